//! Placement: candidates, choice, objectives, charge.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{ErrorKind, NodeId, NodeRole, Slo, Tbt, Ttft};

use super::{Cluster, ClusterNode, NodeState, cost_class};
use crate::ledger::{Charge, DecodeCharge};
use crate::placement::{
    CacheAware, Choice, DecodeCandidate, Placement, PlacementPolicy, PlacementRequest, PrefillCandidate, Refusal,
    estimated_ttft,
};

/// What a client is told to wait where nothing better is known: nodes register and report about this often.
const RETRY_UNAVAILABLE: Duration = Duration::from_secs(1);
/// Shortest and longest hint to a client.
const RETRY_RANGE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

fn refuse<T>(kind: ErrorKind, message: String, retry_after: Option<Duration>) -> Result<T, Refusal> {
    let retry_after = retry_after.map(|after| after.clamp(RETRY_RANGE.0, RETRY_RANGE.1));
    Err(Refusal { kind, message, retry_after })
}

/// Blocks of the prefix that each node holds.
type Matches = BTreeMap<NodeId, u32>;

/// What a request takes of a decode node.
struct Needs {
    blocks: usize,
    kv_tokens: u64,
}

impl Needs {
    fn of(request: &PlacementRequest<'_>, node: &ClusterNode) -> Self {
        let info = node.info();
        let total = request.prompt_tokens.saturating_add(request.max_tokens).min(info.context_length);
        // As the decode node counts: the last token's KV is never computed.
        let blocks = info.layout.blocks_for((total.saturating_sub(1)) as usize);
        let output = u64::from(total.saturating_sub(request.prompt_tokens));
        Self { blocks, kv_tokens: u64::from(request.prompt_tokens) + output / 2 }
    }
}

impl Cluster {
    /// Chooses the nodes for a request and charges them at once. `rng` decides ties. A request that is charged already is given back its charge first.
    pub fn place(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        rng: &mut impl FnMut() -> u64,
    ) -> Result<Placement, Refusal> {
        self.on_ended(now, request.key);
        self.on_tick(now);
        let matches: Matches = self.index.longest_prefix(request.block_hashes).into_iter().collect();
        let prefill = self.prefill_candidates(now, request, &matches)?;
        let decode = if request.wants_decode { self.decode_candidates(now, request, &matches)? } else { Vec::new() };
        let decode = within_tbt(decode, request.slo)?;
        let choice = self.choose(&prefill, &decode, request.slo, rng)?;
        let (prefill, decode) = (&prefill[choice.prefill], choice.decode.map(|index| &decode[index]));
        self.charge(now, request, prefill, decode);
        Ok(Placement {
            prefill: prefill.node.clone(),
            decode: decode.map(|decode| decode.node.clone()),
            estimated_ttft: Ttft(estimated_ttft(prefill, decode)),
            estimated_tbt: decode.map(|decode| Tbt(decode.tbt)),
            matched_tokens: prefill.matched_tokens,
        })
    }

    /// Nodes of a role that may be taken: those that are ready, or, where there are none, those that missed reports.
    fn usable(&self, role: NodeRole, exclude: &[NodeId]) -> Result<Vec<&ClusterNode>, Refusal> {
        let in_state = |state| {
            let nodes = self.nodes.values().filter(move |node| node.info().role == role && node.state() == state);
            nodes.filter(|node| !exclude.contains(&node.info().node)).collect::<Vec<_>>()
        };
        let ready = in_state(NodeState::Ready);
        let usable = if ready.is_empty() { in_state(NodeState::Suspect) } else { ready };
        if usable.is_empty() {
            return refuse(ErrorKind::Unavailable, format!("no {role} node is ready"), Some(RETRY_UNAVAILABLE));
        }
        Ok(usable)
    }

    fn prefill_candidates(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        matches: &Matches,
    ) -> Result<Vec<PrefillCandidate>, Refusal> {
        let mut nodes = self.usable(NodeRole::Prefill, request.exclude)?;
        let tokens = request.prompt_tokens;
        let fits = |node: &&ClusterNode| {
            let info = node.info();
            let blocks = info.layout.blocks_for(tokens as usize);
            tokens > 0 && tokens < info.context_length && blocks <= info.layout.num_blocks as usize
        };
        nodes.retain(fits);
        if nodes.is_empty() {
            let message = format!("a prompt of {tokens} tokens does not fit any prefill node");
            return refuse(ErrorKind::Invalid, message, None);
        }
        let has_place = |node: &&ClusterNode| {
            let limit = node.info().profile.max_waiting as usize;
            limit == 0 || node.charges.pending() < limit
        };
        let soonest =
            nodes.iter().map(|node| node.charges.queue_time(now) / node.charges.pending().max(1) as u32).min();
        let full = nodes.len();
        nodes.retain(has_place);
        if nodes.is_empty() {
            let message = format!("the queues of all {full} prefill nodes are full");
            return refuse(ErrorKind::Overloaded, message, soonest);
        }
        Ok(nodes.into_iter().filter_map(|node| self.prefill_candidate(now, request, node, matches)).collect())
    }

    fn prefill_candidate(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        node: &ClusterNode,
        matches: &Matches,
    ) -> Option<PrefillCandidate> {
        let info = node.info();
        let cost = &self.costs.get(&cost_class(info))?.prefill;
        // The last token is always computed.
        let reusable = request.prompt_tokens.saturating_sub(1) / info.layout.block_tokens;
        let held = matches.get(&info.node).copied().filter(|_| !request.bypass_cache).unwrap_or(0);
        let matched_tokens = held.min(reusable) * info.layout.block_tokens;
        Some(PrefillCandidate {
            node: info.node.clone(),
            queue: node.charges.queue_time(now),
            compute: node.speed.time(cost.prompt(request.prompt_tokens, matched_tokens)),
            matched_tokens,
            pending: node.charges.pending(),
        })
    }

    fn decode_candidates(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        matches: &Matches,
    ) -> Result<Vec<DecodeCandidate>, Refusal> {
        let mut nodes = self.usable(NodeRole::Decode, request.exclude)?;
        let (prompt, output) = (request.prompt_tokens, request.max_tokens);
        nodes.retain(|node| {
            let layout = &node.info().layout;
            prompt.saturating_add(2) <= node.info().context_length
                && Needs::of(request, node).blocks <= layout.num_blocks as usize
        });
        if nodes.is_empty() {
            let message = format!("{prompt} prompt and {output} output tokens do not fit any decode node");
            return refuse(ErrorKind::Invalid, message, None);
        }
        let best_room = nodes.iter().map(|node| free_blocks(node)).max().unwrap_or(0);
        let needs = nodes.iter().map(|node| Needs::of(request, node).blocks).min().unwrap_or(0);
        nodes.retain(|node| free_blocks(node) >= Needs::of(request, node).blocks && has_seat(node));
        if nodes.is_empty() {
            let message = format!(
                "no decode node has room for {prompt} prompt and {output} output tokens: {needs} blocks wanted, \
                 {best_room} free at most"
            );
            return refuse(ErrorKind::Overloaded, message, Some(self.next_end(now)));
        }
        Ok(nodes.into_iter().filter_map(|node| self.decode_candidate(request, node, matches)).collect())
    }

    fn decode_candidate(
        &self,
        request: &PlacementRequest<'_>,
        node: &ClusterNode,
        matches: &Matches,
    ) -> Option<DecodeCandidate> {
        let info = node.info();
        let cost = &self.costs.get(&cost_class(info))?.decode;
        let sequences = node.charges.sequences + 1;
        // More than the batch takes wait: they do not slow the step.
        let in_batch = match info.profile.max_running as usize {
            0 => sequences,
            limit => sequences.min(limit),
        };
        let kv_tokens = node.charges.kv_tokens + Needs::of(request, node).kv_tokens;
        let kv_in_batch = kv_tokens * in_batch as u64 / sequences as u64;
        let prompt_blocks = info.layout.blocks_for(request.prompt_tokens as usize);
        let held = matches.get(&info.node).copied().unwrap_or(0) as usize;
        let bytes = prompt_blocks.saturating_sub(held) as f64 * info.layout.block_bytes_all_layers() as f64;
        let push = Duration::from_secs_f64((bytes / self.config.bandwidth.max(1.0)).min(1e6));
        Some(DecodeCandidate {
            node: info.node.clone(),
            tbt: node.speed.time(cost.step(in_batch as u32, kv_in_batch)),
            push,
            push_last_layer: push / info.layout.num_layers.max(1),
            sequences: node.charges.sequences,
        })
    }

    /// The policy's choice, or the one with the least estimate where the policy's is too slow for the objective.
    fn choose(
        &mut self,
        prefill: &[PrefillCandidate],
        decode: &[DecodeCandidate],
        slo: Slo,
        rng: &mut impl FnMut() -> u64,
    ) -> Result<Choice, Refusal> {
        let estimate =
            |choice: Choice| estimated_ttft(&prefill[choice.prefill], choice.decode.map(|index| &decode[index]));
        let choice = self.policy.choose(prefill, decode, rng);
        let Some(Ttft(limit)) = slo.ttft else { return Ok(choice) };
        if estimate(choice) <= limit {
            return Ok(choice);
        }
        let fastest = CacheAware.choose(prefill, decode, rng);
        let best = estimate(fastest);
        if best <= limit {
            return Ok(fastest);
        }
        let message = format!("the time to first token would be {best:.3?}, the objective is {limit:.3?}");
        refuse(ErrorKind::Overloaded, message, Some(best - limit))
    }

    fn charge(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        prefill: &PrefillCandidate,
        decode: Option<&DecodeCandidate>,
    ) {
        let ttft = estimated_ttft(prefill, decode);
        let decode = decode.and_then(|candidate| {
            let node = self.nodes.get_mut(&candidate.node)?;
            let Needs { blocks, kv_tokens } = Needs::of(request, node);
            let duration = ttft.saturating_add(candidate.tbt.saturating_mul(request.max_tokens));
            let expected_end = now.checked_add(duration.min(RETRY_RANGE.1)).unwrap_or(now);
            let id = (candidate.node.clone(), node.info().generation);
            let charge = DecodeCharge { node: id, blocks, kv_tokens, expected_end };
            node.charges.add_decode(&charge);
            Some(charge)
        });
        if let Some(node) = self.nodes.get_mut(&prefill.node) {
            node.charges.add_prefill(now, request.key, prefill.compute);
            let prefill = (prefill.node.clone(), node.info().generation);
            self.charges.insert(request.key, Charge { prefill: Some(prefill), decode });
        }
    }

    /// How long until a decode node should have room again.
    fn next_end(&self, now: Instant) -> Duration {
        let ends = self.charges.values().filter_map(|charge| Some(charge.decode.as_ref()?.expected_end));
        ends.min().map_or(RETRY_UNAVAILABLE, |end| end.saturating_duration_since(now))
    }
}

/// Blocks that were not charged. Shared prefixes are charged to each request: what is promised here is there even if nothing is shared.
fn free_blocks(node: &ClusterNode) -> usize {
    (node.info().layout.num_blocks as usize).saturating_sub(node.charges.blocks)
}

fn has_seat(node: &ClusterNode) -> bool {
    let profile = &node.info().profile;
    let seats = (profile.max_running as usize).saturating_add(profile.max_waiting as usize);
    seats == 0 || node.charges.sequences < seats
}

/// The decode nodes whose step stays within the objective.
fn within_tbt(mut candidates: Vec<DecodeCandidate>, slo: Slo) -> Result<Vec<DecodeCandidate>, Refusal> {
    let Some(Tbt(limit)) = slo.tbt else { return Ok(candidates) };
    let Some(best) = candidates.iter().map(|candidate| candidate.tbt).min() else { return Ok(candidates) };
    candidates.retain(|candidate| candidate.tbt <= limit);
    if candidates.is_empty() {
        let message = format!("the time between tokens would be {best:.3?}, the objective is {limit:.3?}");
        return refuse(ErrorKind::Overloaded, message, Some(RETRY_UNAVAILABLE));
    }
    Ok(candidates)
}
