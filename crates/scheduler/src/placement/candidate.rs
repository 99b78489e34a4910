//! What placement chooses from. Times are seconds, as a number: a placement works out thousands of
//! them, and conversions would take most of its time.

use baton_types::NodeId;

/// One way to compute a prompt on one node.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PrefillPlan {
    /// Tokens of the prompt that need not be computed.
    pub matched_tokens: u32,
    /// Seconds to fetch those of them that the node does not hold.
    pub transfer: f64,
    /// Seconds to compute the others.
    pub compute: f64,
    /// Seconds of work of the node that goes before it.
    pub ahead: f64,
    /// Prompts that wait there and that it goes before.
    pub passed: usize,
}

impl PrefillPlan {
    /// Seconds until the prompt is computed, the transfer overlapping the queue.
    pub fn finish(&self) -> f64 {
        self.ahead.max(self.transfer) + self.compute
    }

    /// The same, one thing after the other (Mooncake, Algorithm 1).
    pub fn finish_in_turn(&self) -> f64 {
        self.ahead + self.transfer + self.compute
    }
}

/// A prefill node that can take the request.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillCandidate<'a> {
    /// The node.
    pub node: &'a NodeId,
    /// Prompts placed there whose first token has not come.
    pub pending: usize,
    /// With what it holds.
    pub local: PrefillPlan,
    /// With the longest prefix that any node holds, if that is longer.
    pub fetch: Option<PrefillPlan>,
}

impl PrefillCandidate<'_> {
    /// Each plan, and whether it is the fetch.
    pub fn plans(&self) -> impl Iterator<Item = (&PrefillPlan, bool)> {
        std::iter::once((&self.local, false)).chain(self.fetch.iter().map(|plan| (plan, true)))
    }

    /// The plan that a choice means.
    pub fn plan(&self, fetch: bool) -> &PrefillPlan {
        self.fetch.as_ref().filter(|_| fetch).unwrap_or(&self.local)
    }
}

/// A decode node that has room for the request.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeCandidate<'a> {
    /// The node.
    pub node: &'a NodeId,
    /// Seconds of a step of the batch of all sequences placed there, the newcomer included, as a
    /// high quantile: the tail of the time between tokens.
    pub tbt: f64,
    /// Seconds of the expected tokens of the answer, each at that time.
    pub stream: f64,
    /// Seconds to push what it does not hold.
    pub push: f64,
    /// The least part of it that no compute can hide: the last layer's.
    pub push_last_layer: f64,
    /// Sequences placed there.
    pub sequences: usize,
    /// Whether one of them would miss its time between tokens because of the newcomer.
    pub breaks: bool,
}

impl DecodeCandidate<'_> {
    /// Seconds of the push that computing for so many does not hide.
    pub fn exposed(&self, compute: f64) -> f64 {
        (self.push - compute).max(self.push_last_layer)
    }
}

/// Predicted seconds to the first token of a pair: queue, transfer, prefill of what is not cached,
/// and the part of the push that compute does not hide. The push counts, since the first token is
/// of little use before the second.
pub fn predicted_ttft(plan: &PrefillPlan, decode: Option<&DecodeCandidate<'_>>) -> f64 {
    plan.finish() + decode.map_or(0.0, |decode| decode.exposed(plan.compute))
}

/// A choice: indices into the candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Of the prefill candidates.
    pub prefill: usize,
    /// Whether the longest prefix is fetched there first.
    pub fetch: bool,
    /// Of the decode candidates; `None` if there are none.
    pub decode: Option<usize>,
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::OnceLock;
    use std::time::Duration;

    use baton_types::{Attempt, RequestId, RequestKey, Slo, Tbt, Ttft};

    use super::super::PlacementRequest;
    use super::*;

    fn ms(milliseconds: u64) -> f64 {
        milliseconds as f64 / 1e3
    }

    fn node() -> &'static NodeId {
        static NODE: OnceLock<NodeId> = OnceLock::new();
        NODE.get_or_init(|| NodeId::new("n").unwrap())
    }

    pub fn request() -> PlacementRequest<'static> {
        PlacementRequest {
            key: RequestKey { request: RequestId(1), attempt: Attempt(0) },
            prompt_tokens: 1000,
            max_tokens: 200,
            wants_decode: true,
            slo: Slo { ttft: Some(Ttft(Duration::from_secs(30))), tbt: Some(Tbt(Duration::from_millis(100))) },
            ..PlacementRequest::default()
        }
    }

    pub fn prefill(queue_ms: u64, compute_ms: u64, matched_tokens: u32) -> PrefillCandidate<'static> {
        let local =
            PrefillPlan { matched_tokens, compute: ms(compute_ms), ahead: ms(queue_ms), ..PrefillPlan::default() };
        PrefillCandidate { node: node(), pending: queue_ms as usize, local, fetch: None }
    }

    pub fn with_fetch(
        candidate: PrefillCandidate<'static>,
        transfer_ms: u64,
        compute_ms: u64,
        tokens: u32,
    ) -> PrefillCandidate<'static> {
        let transfer = ms(transfer_ms);
        let compute = ms(compute_ms);
        let fetch = Some(PrefillPlan { matched_tokens: tokens, transfer, compute, ..candidate.local });
        PrefillCandidate { fetch, ..candidate }
    }

    pub fn decode(tbt_ms: u64, push_ms: u64, sequences: usize) -> DecodeCandidate<'static> {
        let tbt = ms(tbt_ms);
        let stream = ms(100 * tbt_ms);
        DecodeCandidate {
            node: node(),
            tbt,
            stream,
            push: ms(push_ms),
            push_last_layer: ms(push_ms / 10),
            sequences,
            breaks: false,
        }
    }

    #[test]
    fn ttft_estimate_omits_push_time_hidden_by_compute() {
        let plan = prefill(5, 100, 0).local;
        let ttft_ms = |decode: Option<DecodeCandidate<'_>>| (predicted_ttft(&plan, decode.as_ref()) * 1e3).round();
        assert_eq!(ttft_ms(None), 105.0);
        assert_eq!(ttft_ms(Some(decode(10, 50, 0))), 110.0);
        assert_eq!(ttft_ms(Some(decode(10, 250, 0))), 255.0);
        assert_eq!(ttft_ms(Some(decode(10, 0, 0))), 105.0);
    }

    #[test]
    fn prefix_fetch_overlaps_the_prefill_queue() {
        let plan = with_fetch(prefill(300, 1000, 0), 200, 100, 900).fetch.unwrap();
        assert_eq!((plan.finish(), plan.finish_in_turn()), (0.4, 0.6));
    }
}
