//! The nodes with the least to do.

use super::{Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate, least};

/// The nodes with the fewest requests.
#[derive(Debug, Clone)]
pub struct LoadBalance;

impl PlacementPolicy for LoadBalance {
    fn name(&self) -> &'static str {
        "load-balance"
    }

    fn choose(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let pending = least(prefill.iter().map(|candidate| candidate.pending as f64), 0.0, rng);
        let sequences = least(decode.iter().map(|candidate| candidate.sequences as f64), 0.0, rng);
        Choice { prefill: pending.unwrap_or(0), fetch: false, decode: sequences }
    }

    fn cost(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &PrefillCandidate<'_>,
        _: Option<&DecodeCandidate<'_>>,
    ) -> Option<f64> {
        Some(prefill.pending as f64)
    }

    fn boxed_clone(&self) -> Box<dyn PlacementPolicy> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate::tests::{decode, prefill, request};
    use super::*;

    #[test]
    fn load_balance_placement_takes_least_loaded_nodes() {
        let p = [prefill(3, 1, 0), prefill(1, 1, 0)];
        let d = [decode(1, 1, 4), decode(1, 1, 2), decode(1, 1, 9)];
        let choice = LoadBalance.choose(&request(), &p, &d, &mut || 0);
        assert_eq!((choice.prefill, choice.decode), (1, Some(1)));
    }
}
