//! The node's own cache against its queue.

use super::{
    Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate, TIE, least, lightest_decode,
};

/// The least predicted time to first token with what each node has cached itself. Of ties the
/// longest prefix: it costs nothing and keeps conversations together.
#[derive(Debug, Clone)]
pub struct CacheAware;

impl PlacementPolicy for CacheAware {
    fn name(&self) -> &'static str {
        "cache-aware"
    }

    fn choose(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let seconds = |candidate: &PrefillCandidate<'_>| candidate.local.finish();
        let limit = prefill.iter().map(seconds).fold(f64::INFINITY, f64::min) * (1.0 + TIE);
        let unmatched = |candidate: &PrefillCandidate<'_>| {
            let tied = seconds(candidate) <= limit;
            if tied { f64::from(u32::MAX - candidate.local.matched_tokens) } else { f64::INFINITY }
        };
        let chosen = least(prefill.iter().map(unmatched), 0.0, rng);
        Choice { prefill: chosen.unwrap_or(0), fetch: false, decode: lightest_decode(decode, rng) }
    }

    fn cost(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &PrefillCandidate<'_>,
        _: Option<&DecodeCandidate<'_>>,
    ) -> Option<f64> {
        Some(prefill.local.finish())
    }

    fn boxed_clone(&self) -> Box<dyn PlacementPolicy> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate::tests::{decode, prefill, request};
    use super::*;

    fn choose(prefill: &[PrefillCandidate<'_>], decode: &[DecodeCandidate<'_>]) -> (usize, Option<usize>) {
        let choice = CacheAware.choose(&request(), prefill, decode, &mut || 0);
        (choice.prefill, choice.decode)
    }

    #[test]
    fn cache_aware_placement_weighs_queue_against_prefix() {
        assert_eq!(choose(&[prefill(0, 1000, 0), prefill(300, 100, 900)], &[]), (1, None));
        assert_eq!(choose(&[prefill(0, 1000, 0), prefill(2000, 100, 900)], &[]), (0, None));
        let close = [prefill(0, 100, 0), prefill(0, 103, 16)];
        assert_eq!(choose(&close, &[]), (1, None), "a tie goes to the longer prefix");
        assert_eq!(choose(&close[..1], &[decode(50, 0, 0), decode(20, 0, 9)]), (0, Some(1)));
    }
}
