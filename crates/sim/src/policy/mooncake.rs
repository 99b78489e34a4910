//! Algorithm 1 of the Mooncake paper (arXiv 2407.00079, section 6.1).

use baton_scheduler::{
    Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate, PrefillPlan, least, lightest_decode,
};

/// `kvcache_balancing_threshold` if none is set.
pub(super) const BALANCING_THRESHOLD: f64 = 1.5;

/// Per node: if the longest prefix is longer than the node's own by less than
/// `balancing_threshold`, queue and prefill with its own; else transfer, queue and prefill with the
/// longest. The least sum wins; the prefix is fetched if the ratio says so. The paper leaves ties
/// open.
#[derive(Debug, Clone)]
pub(super) struct Mooncake {
    /// `kvcache_balancing_threshold`.
    pub balancing_threshold: f64,
}

impl Mooncake {
    /// Whether the ratio test says to fetch the longest prefix.
    fn transfers(&self, candidate: &PrefillCandidate) -> bool {
        let Some(best) = &candidate.fetch else { return false };
        let own = f64::from(candidate.local.matched_tokens);
        f64::from(best.matched_tokens) >= self.balancing_threshold * own
    }

    fn plan<'a>(&self, candidate: &'a PrefillCandidate<'a>) -> &'a PrefillPlan {
        candidate.plan(self.transfers(candidate))
    }
}

impl PlacementPolicy for Mooncake {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn choose(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let ttft = prefill.iter().map(|candidate| self.plan(candidate).finish_in_turn());
        let chosen = least(ttft, 0.0, rng).unwrap_or(0);
        Choice { prefill: chosen, fetch: self.transfers(&prefill[chosen]), decode: lightest_decode(decode, rng) }
    }

    fn cost(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &PrefillCandidate<'_>,
        _: Option<&DecodeCandidate<'_>>,
    ) -> Option<f64> {
        Some(self.plan(prefill).finish_in_turn())
    }

    fn boxed_clone(&self) -> Box<dyn PlacementPolicy> {
        Box::new(self.clone())
    }

    fn fetches(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use baton_types::{Attempt, NodeId, RequestId, RequestKey};

    use super::*;

    fn ms(milliseconds: u64) -> f64 {
        milliseconds as f64 / 1e3
    }

    fn request() -> PlacementRequest<'static> {
        PlacementRequest {
            key: RequestKey { request: RequestId(1), attempt: Attempt(0) },
            prompt_tokens: 1000,
            max_tokens: 200,
            wants_decode: true,
            ..PlacementRequest::default()
        }
    }

    fn prefill(queue_ms: u64, compute_ms: u64, matched_tokens: u32) -> PrefillCandidate<'static> {
        static NODE: OnceLock<NodeId> = OnceLock::new();
        let node = NODE.get_or_init(|| NodeId::new("n").expect("a name"));
        let local =
            PrefillPlan { matched_tokens, compute: ms(compute_ms), ahead: ms(queue_ms), ..PrefillPlan::default() };
        PrefillCandidate { node, pending: 0, local, fetch: None }
    }

    fn with_fetch(
        candidate: PrefillCandidate<'static>,
        transfer_ms: u64,
        compute_ms: u64,
        matched_tokens: u32,
    ) -> PrefillCandidate<'static> {
        let transfer = ms(transfer_ms);
        let compute = ms(compute_ms);
        let fetch = Some(PrefillPlan { matched_tokens, transfer, compute, ..candidate.local });
        PrefillCandidate { fetch, ..candidate }
    }

    fn choose(threshold: f64, candidates: &[PrefillCandidate<'_>]) -> (usize, bool) {
        let choice = Mooncake { balancing_threshold: threshold }.choose(&request(), candidates, &[], &mut || 0);
        (choice.prefill, choice.fetch)
    }

    #[test]
    fn mooncake_threshold_chooses_between_own_and_longest_prefix() {
        // 1,000 tokens elsewhere, 400 here: 2.5 times as long.
        let candidates = [with_fetch(prefill(10, 600, 400), 50, 100, 1000), prefill(700, 100, 1000)];
        assert_eq!(choose(2.0, &candidates), (0, true));
        assert_eq!(choose(3.0, &candidates), (0, false), "610 ms without a transfer");
        let busy = [with_fetch(prefill(900, 600, 400), 50, 100, 1000), prefill(700, 100, 1000)];
        assert_eq!(choose(2.0, &busy), (1, false));
    }

    #[test]
    fn mooncake_fetches_prefix_even_if_computing_is_faster() {
        let candidates = [with_fetch(prefill(0, 100, 0), 500, 10, 64)];
        assert_eq!(choose(4.0, &candidates), (0, true), "with nothing of its own the ratio has no bound");
    }
}
