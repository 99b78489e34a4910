//! Any node.

use baton_scheduler::{Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate};

/// Any nodes, each as likely.
#[derive(Debug, Clone)]
pub(super) struct Random;

impl PlacementPolicy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let mut draw = |n: usize| (rng() as usize).checked_rem(n);
        Choice { prefill: draw(prefill.len()).unwrap_or(0), fetch: false, decode: draw(decode.len()) }
    }

    fn boxed_clone(&self) -> Box<dyn PlacementPolicy> {
        Box::new(self.clone())
    }
}
