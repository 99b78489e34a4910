//! Partial prefills: the decode node computes the last part of a prompt while the prefill node
//! computes the first (Cronus, 2025).
//!
//! The last part follows the first one's last chunk layer by layer (`decode/partial_prefill.rs`).
//! So of a prompt's time the longer of these two parts counts, and one layer. A partial prefill is
//! planned if it makes the first token earlier by a good part of the prompt's compute, other
//! partial prefills at the decode node counted. No stream there may miss its objective by it.

use std::time::Instant;

use baton_types::{NodeId, QueueOrdering};

use super::at_decode::{Batch, JoinedStep, chunk_beside_batch};
use super::candidates::SizedRequest;
use super::predictor::Predictor;
use super::{Cluster, ClusterNode};
use crate::cost::duration;
use crate::decode::slice_layers;
use crate::placement::{DecodeCandidate, PrefillPlan};
use crate::prefill::SPLIT_CHUNKS;

/// The first token has to come sooner by this part of the prompt's compute, and by so many seconds.
const LEAST_GAIN: f64 = 0.1;
const LEAST_SECONDS: f64 = 0.005;
/// Where the last part may begin: sixteenths of what is to be computed.
const CUTS: u32 = 16;
/// Most tokens of a partial prefill: a bound on what decode nodes keep between its layers.
const MAX_TAIL_TOKENS: u32 = 4096;

/// A prompt in two parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PartialPrefill {
    /// Last tokens of the prompt, which the decode node computes.
    pub partial_prefill_tokens: u32,
    /// Seconds that the decode node is busy with them.
    pub tail: f64,
    /// Seconds of the prefill node's part.
    pub head: f64,
    /// Seconds after the prefill node's part until the first token.
    pub after: f64,
}

impl PartialPrefill {
    /// Seconds from the prompt's turn to its first token.
    fn finish(&self) -> f64 {
        self.head + self.after
    }
}

impl Cluster {
    /// Where the last part of a prompt that is to be computed by this plan begins; `None` if it had
    /// better have none.
    pub(super) fn plan_partial_prefill(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        prefill: &NodeId,
        plan: &PrefillPlan,
        decode: Option<&DecodeCandidate<'_>>,
    ) -> Option<PartialPrefill> {
        let request = sized.request;
        if !self.config.takes_partial_prefills || !request.wants_decode || request.bypass_cache {
            return None;
        }
        let from = self.nodes.get(prefill)?;
        let to = self.nodes.get(decode?.node)?;
        let is_alike = from.info().kv_class == to.info().kv_class
            && from.info().layout.block_tokens == to.info().layout.block_tokens;
        if !is_alike {
            return None;
        }
        // Other partial prefills that are still to be computed there when the first part's turn
        // comes.
        let turn = plan.ahead.max(plan.transfer);
        let busy = (to.charges.backlog.total(now) - turn).max(0.0);
        // Who decodes there by then.
        let batch = self.predictor.expected_at(now, now + duration(turn), to);
        let busy = Busy { seconds: busy, batch: Batch { sequences: batch.sequences, kv_tokens: batch.kv_tokens } };
        let pair = Pair { from, to };
        let cuts = cut_points(request.prompt_tokens, plan.matched_tokens, from.info().layout.block_tokens);
        let cuts =
            cuts.filter_map(|head_end| self.predictor.cut_at(sized.request.prompt_tokens, pair, plan, busy, head_end));
        let best = cuts.min_by(|a, b| a.finish().total_cmp(&b.finish()))?;
        let gain = plan.compute - best.finish();
        (gain >= (plan.compute * LEAST_GAIN).max(LEAST_SECONDS)).then_some(best)
    }

    /// The first part on its terms, with what it does to the order of the prefill node's queue.
    pub(super) fn head_of(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        prefill: &NodeId,
        plan: &PrefillPlan,
        partial: &PartialPrefill,
    ) -> (PrefillPlan, QueueOrdering, usize) {
        let terms = self.terms(sized.request, partial.head);
        let (plan, broken) = self.reordered(now, terms, prefill, &PrefillPlan { compute: partial.head, ..*plan });
        (plan, terms, broken)
    }
}

/// Positions at which the last part may begin: block boundaries, something before and behind them.
fn cut_points(tokens: u32, matched: u32, block_tokens: u32) -> impl Iterator<Item = u32> {
    let uncached = tokens.saturating_sub(matched);
    let points = (1..CUTS).map(move |part| matched + (u64::from(uncached) * u64::from(part) / u64::from(CUTS)) as u32);
    let whole = points.map(move |point| point / block_tokens * block_tokens);
    whole.filter(move |point| *point > matched && *point < tokens && tokens - point <= MAX_TAIL_TOKENS)
}

/// The nodes of a partial prefill.
#[derive(Clone, Copy)]
struct Pair<'a> {
    from: &'a ClusterNode,
    to: &'a ClusterNode,
}

/// What the decode node has to do before, and beside it.
#[derive(Clone, Copy)]
struct Busy {
    /// Other partial prefills, after this one's turn comes at the prefill node.
    seconds: f64,
    batch: Batch,
}

impl Predictor {
    /// The prompt in two parts, of which the first ends at `head_end`; `None` if a stream would
    /// miss its objective.
    fn cut_at(
        &self,
        tokens: u32,
        pair: Pair<'_>,
        plan: &PrefillPlan,
        busy: Busy,
        head_end: u32,
    ) -> Option<PartialPrefill> {
        let Pair { from, to } = pair;
        let partial_prefill_tokens = tokens - head_end;
        let head = self.prompt_seconds(from, head_end, plan.matched_tokens);
        // As the node cuts it into chunks.
        let chunk = self.chunk_rows(from).max(1);
        let rows = head_end - plan.matched_tokens;
        let most = chunk.saturating_mul(SPLIT_CHUNKS as u32);
        let last = rows - (rows.saturating_sub(most)).div_ceil(chunk) * chunk;
        let last = self.one_chunk_seconds(from, head_end, head_end - last);
        let alone = self.one_chunk_seconds(to, tokens, head_end);
        let layers = to.info().layout.num_layers.max(1);
        let slices = f64::from(layers.div_ceil(slice_layers(chunk_beside_batch(to), layers, partial_prefill_tokens)));
        let JoinedStep { step, breaks } = self.step_beside(to, busy.batch, alone / slices);
        if breaks {
            return None;
        }
        let tail = alone + slices * step;
        // The last part begins a layer after the first one's last chunk, and ends a layer after it.
        let layers = f64::from(layers);
        let begins = (head - last + last / layers).max(busy.seconds);
        let after = (begins + tail - head).max(tail / layers);
        Some(PartialPrefill { partial_prefill_tokens, tail, head, after })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{NodeInfo, NodeRole, Slo, Tbt};

    use super::super::tests::{info, key, place, request};
    use super::super::{ClusterConfig, Policies};
    use super::*;
    use crate::placement::{Placement, PlacementRequest};

    /// One prefill and one decode node, 1 ms a token.
    fn pair(now: Instant, change: impl Fn(&mut NodeInfo)) -> Cluster {
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        for (name, role) in [("p0", NodeRole::Prefill), ("d0", NodeRole::Decode)] {
            let mut info = info(name, role, 1);
            info.layout.num_layers = 30;
            info.layout.num_blocks = 1000;
            change(&mut info);
            cluster.on_node_joined(now, info);
        }
        cluster
    }

    fn long(n: u128, prompt_tokens: u32) -> PlacementRequest<'static> {
        PlacementRequest { prompt_tokens, ..request(n, &[]) }
    }

    fn placed(cluster: &mut Cluster, now: Instant, request: &PlacementRequest<'_>) -> Placement {
        place(cluster, now, request).unwrap()
    }

    #[test]
    fn partial_prefill_is_half_of_the_prompt_if_both_nodes_are_idle() {
        let now = Instant::now();
        let mut cluster = pair(now, |_| {});
        let split = placed(&mut cluster, now, &long(0, 1600));
        assert!(
            (700..=800).contains(&split.partial_prefill_tokens) && split.partial_prefill_tokens.is_multiple_of(16),
            "{split:?}"
        );
        let ttft = split.predicted_ttft.0.as_secs_f64();
        assert!((0.8..0.95).contains(&ttft), "{ttft} s of 1.6 alone");
        // The next one's turn comes when both are about to be free.
        let next = placed(&mut cluster, now, &long(1, 1600));
        assert!((600..=800).contains(&next.partial_prefill_tokens), "{next:?}");
        assert!((1.6..1.9).contains(&next.predicted_ttft.0.as_secs_f64()), "{next:?}");
        (0..2).for_each(|n| cluster.on_ended(now, key(n)));
        assert!(cluster.nodes().all(|node| node.charges.is_zero()), "{cluster:?}");
    }

    #[test]
    fn partial_prefill_is_smaller_if_decode_node_has_others_queued() {
        let now = Instant::now();
        let mut cluster = pair(now, |_| {});
        placed(&mut cluster, now, &long(0, 1600));
        let backlog = cluster.nodes.get(&"d0".parse().unwrap()).unwrap().charges.backlog.total(now);
        assert!(backlog > 0.5, "{backlog}");
        // The first one's first part is given back, as if it had been done early.
        let p0 = "p0".parse().unwrap();
        cluster.nodes.get_mut(&p0).unwrap().charges.backlog.remove(now, key(0));
        let next = placed(&mut cluster, now, &long(1, 1600));
        assert!(next.partial_prefill_tokens > 0 && next.partial_prefill_tokens < 500, "{next:?}");
    }

    #[test]
    fn partial_prefill_charge_is_released_when_decode_node_changes() {
        let now = Instant::now();
        let mut cluster = pair(now, |_| {});
        let mut other = info("d1", NodeRole::Decode, 1);
        other.layout.num_layers = 30;
        other.layout.num_blocks = 1000;
        cluster.on_node_joined(now, other);
        let split = placed(&mut cluster, now, &long(0, 1600));
        let was: NodeId = split.decode.unwrap();
        let other: NodeId = "d1".parse().unwrap();
        let other = if was == other { "d0".parse().unwrap() } else { other };
        assert!(split.partial_prefill_tokens > 0 && !cluster.nodes.get(&was).unwrap().charges.is_zero());
        cluster.ledger.change_decode_node(now, key(0), &other, &mut cluster.nodes);
        assert!(cluster.nodes.get(&was).unwrap().charges.is_zero());
        assert_eq!(cluster.nodes.get(&other).unwrap().charges.pending(), 0, "it computes none of it");
        cluster.on_ended(now, key(0));
        assert!(cluster.nodes().all(|node| node.charges.is_zero()));
    }

    #[test]
    fn partial_prefill_is_not_used_if_unsupported_or_slower() {
        let now = Instant::now();
        let tail = |change: fn(&mut NodeInfo), request: &PlacementRequest<'_>| {
            placed(&mut pair(now, change), now, request).partial_prefill_tokens
        };
        let wanted = long(0, 1600);
        assert!(tail(|_| {}, &wanted) > 0);
        assert_eq!(tail(|info| info.kv_class = info.node.to_string(), &wanted), 0, "other bits");
        assert_eq!(tail(|_| {}, &PlacementRequest { bypass_cache: true, ..wanted }), 0, "all log-probabilities");
        assert_eq!(tail(|_| {}, &PlacementRequest { wants_decode: false, max_tokens: 1, ..wanted }), 0);
        assert_eq!(tail(|_| {}, &long(0, 16)), 0, "one block");
        let slow: fn(&mut NodeInfo) = |info| {
            if info.role == NodeRole::Decode {
                info.profile.prefill_base = 5.0;
            }
        };
        assert_eq!(tail(slow, &wanted), 0, "the last part would take longer than all of it");
    }

    #[test]
    fn partial_prefill_is_not_used_if_it_breaks_a_tbt_objective() {
        let now = Instant::now();
        let mut cluster = pair(now, |_| {});
        let tbt = Some(Tbt(Duration::from_millis(20)));
        let strict = PlacementRequest { slo: Slo { ttft: None, tbt }, ..long(0, 64) };
        placed(&mut cluster, now, &strict);
        cluster.on_first_token(now, key(0));
        let tokens = placed(&mut cluster, now, &long(1, 1600)).partial_prefill_tokens;
        assert_eq!(tokens, 0, "a step takes 11 ms, and a layer of any partial prefill worth it as long again");
        cluster.on_ended(now, key(0));
        cluster.on_ended(now, key(1));
        assert!(placed(&mut cluster, now, &long(2, 1600)).partial_prefill_tokens > 0);
    }
}
