//! The nodes that can take a request, and what they are predicted to do with it.

use std::time::Instant;

use baton_types::{ErrorKind, NodeId, NodeRole, QueueOrdering, Ttft};

use super::explain::LeftOut;
use super::place::{RETRY_UNAVAILABLE, refuse};
use super::trust::keep_trusted;
use super::{Cluster, ClusterNode, NodeState, PromptsAtDecode};
use crate::backlog::QueueImpact;
use crate::cost::duration;
use crate::placement::{DecodeCandidate, PlacementRequest, PrefillCandidate, PrefillPlan, Refusal};

/// Blocks of the prefix that each node holds, and who holds most.
#[derive(Debug, Default)]
pub(super) struct Matches {
    /// By slot; those after the last hold none.
    pub(super) blocks: Vec<u32>,
    /// Of each KV compatibility class.
    pub(super) longest: Vec<Option<(NodeId, u32)>>,
}

impl Matches {
    pub(super) fn of(&self, node: &ClusterNode) -> u32 {
        node.slot.and_then(|slot| self.blocks.get(usize::from(slot.0))).copied().unwrap_or(0)
    }

    /// The holder of the longest prefix in a KV compatibility class.
    pub(super) fn longest(&self, kv_class: usize) -> Option<(&NodeId, u32)> {
        self.longest.get(kv_class)?.as_ref().map(|(node, blocks)| (node, *blocks))
    }
}

/// What a request takes of a decode node.
pub(super) struct Needs {
    pub blocks: usize,
    pub kv_tokens: u64,
}

/// A request, and what is expected of its answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct SizedRequest<'a> {
    pub request: &'a PlacementRequest<'a>,
    /// Expected tokens of the answer.
    pub output_tokens: f64,
}

impl SizedRequest<'_> {
    /// What it takes of this decode node. As the node counts: the last token's KV is never
    /// computed.
    pub(super) fn needs(&self, node: &ClusterNode) -> Needs {
        Needs::of(self.request.prompt_tokens, self.output_tokens, node)
    }

    /// Whether the node can hold the prompt and all that is expected of the answer.
    fn is_expected_to_fit(&self, node: &ClusterNode) -> bool {
        f64::from(self.request.prompt_tokens) + self.output_tokens <= f64::from(node.info().max_sequence_tokens())
    }
}

impl Needs {
    /// Blocks and KV of a sequence with this prompt and so many expected tokens of output. A limit
    /// of the output is no expectation: most answers end long before theirs.
    pub(super) fn of(prompt: u32, output_tokens: f64, node: &ClusterNode) -> Self {
        let info = node.info();
        let total = prompt.saturating_add(output_tokens.ceil() as u32).min(info.max_sequence_tokens());
        let blocks = info.layout.blocks_for(total.saturating_sub(1) as usize);
        let output = output_tokens.min(f64::from(total.saturating_sub(prompt)));
        Self { blocks, kv_tokens: u64::from(prompt) + output as u64 / 2 }
    }
}

impl Cluster {
    /// Who holds what of the request's prefix.
    pub(super) fn matches(&self, request: &PlacementRequest<'_>) -> Matches {
        if request.bypass_cache { Matches::default() } else { self.matches_of(request.block_hashes) }
    }

    /// Nodes of a role that may be taken, ascending by name: those that are ready. If there are
    /// none and no other role stands in for them, those that missed reports.
    fn usable(&self, role: NodeRole, exclude: &[NodeId]) -> Result<Vec<&ClusterNode>, Refusal> {
        let in_state = |state| -> Vec<_> {
            let nodes = self.nodes.of_role(role).filter(|node| node.state() == state);
            nodes.filter(|node| !exclude.contains(&node.info().node)).collect()
        };
        let ready = in_state(NodeState::Ready);
        let usable = if ready.is_empty() && !self.stands_in(role) { in_state(NodeState::Suspect) } else { ready };
        if usable.is_empty() {
            return refuse(ErrorKind::Unavailable, format!("no {role} node is ready"), Some(RETRY_UNAVAILABLE));
        }
        Ok(usable)
    }

    /// Whether others do the work of a role none of whose nodes is ready.
    pub(super) fn stands_in(&self, role: NodeRole) -> bool {
        let may = role == NodeRole::Prefill && self.config.prompts_at_decode != PromptsAtDecode::Never;
        may && self.nodes.of_role(NodeRole::Decode).any(ClusterNode::is_ready)
    }

    pub(super) fn prefill_candidates(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        matches: &Matches,
    ) -> Result<Vec<PrefillCandidate<'_>>, Refusal> {
        let usable = self.usable(NodeRole::Prefill, request.exclude)?;
        let tokens = request.prompt_tokens;
        let fits = |node: &&ClusterNode| fits_prefill(tokens, node);
        let mut nodes: Vec<_> = usable.iter().copied().filter(|node| fits(node) && has_place(node)).collect();
        if nodes.is_empty() {
            let full: Vec<_> = usable.iter().copied().filter(fits).collect();
            if full.is_empty() {
                return self.too_large(now, request, NodeRole::Prefill, |node| fits_prefill(tokens, node));
            }
            return no_place(now, &full);
        }
        prefer(&mut nodes, request.first_completion_nodes);
        keep_trusted(now, self.nodes.of_role(NodeRole::Prefill), &mut nodes, |node| node.charges.pending());
        self.warm(now, &mut nodes, |node| node.charges.pending());
        self.leave_out_busy(now, request, &mut nodes);
        Ok(nodes.into_iter().map(|node| self.prefill_candidate(now, request, node, matches)).collect())
    }

    /// Leaves out nodes that joined lately and have their share: an empty cache and an empty queue
    /// would attract everything at once.
    fn warm(&self, now: Instant, nodes: &mut Vec<&ClusterNode>, load: impl Fn(&ClusterNode) -> usize) {
        let slow_start = self.config.slow_start;
        if self.nodes.joined().is_none_or(|joined| now.saturating_duration_since(joined) >= slow_start) {
            return;
        }
        let busiest = nodes.iter().map(|node| load(node)).max().unwrap_or(0);
        let within = |node: &&ClusterNode| {
            let warmth = node.warmth(now, slow_start);
            warmth >= 1.0 || load(node) as f64 <= warmth * busiest as f64
        };
        if nodes.iter().any(within) {
            nodes.retain(within);
        }
    }

    /// Leaves out nodes whose queue alone is longer than the objective, while others' is not.
    fn leave_out_busy(&self, now: Instant, request: &PlacementRequest<'_>, nodes: &mut Vec<&ClusterNode>) {
        // A prompt that may pass others does not wait for all of them.
        let Some(Ttft(limit)) = request.slo_left().ttft.filter(|_| !self.policies.placement.reorders()) else { return };
        let within = |node: &&ClusterNode| node.charges.backlog.total(now) <= limit.as_secs_f64();
        if nodes.iter().any(within) {
            nodes.retain(within);
        }
    }

    /// Why a node is not among the candidates.
    pub(super) fn why_not_prefill(&self, now: Instant, request: &PlacementRequest<'_>, node: &ClusterNode) -> LeftOut {
        let busy = |Ttft(limit): Ttft| node.charges.backlog.total(now) > limit.as_secs_f64();
        match () {
            () if request.exclude.contains(&node.info().node) => LeftOut::Excluded,
            () if !self.is_usable(node) => LeftOut::State(node.state()),
            () if !fits_prefill(request.prompt_tokens, node) => LeftOut::TooSmall,
            () if !has_place(node) => LeftOut::QueueFull,
            () if node.warmth(now, self.config.slow_start) < 1.0 && !request.slo_left().ttft.is_some_and(busy) => {
                LeftOut::SlowStart
            }
            () if node.trust.limit().is_some() && !request.slo_left().ttft.is_some_and(busy) => LeftOut::Unproven,
            () => LeftOut::Busy,
        }
    }

    /// The same of a decode node.
    pub(super) fn why_not_decode(&self, now: Instant, sized: SizedRequest<'_>, node: &ClusterNode) -> LeftOut {
        match () {
            () if sized.request.exclude.contains(&node.info().node) => LeftOut::Excluded,
            () if !self.is_usable(node) => LeftOut::State(node.state()),
            () if !fits_decode(sized, node) || !sized.is_expected_to_fit(node) => LeftOut::TooSmall,
            () if !has_room(sized, node) => LeftOut::NoRoom,
            () if sized.request.yields() && !has_seat_to_spare(node) => LeftOut::NoRoom,
            () if self.decode_candidate(sized, node, 0).breaks => LeftOut::Breaks,
            () if node.warmth(now, self.config.slow_start) < 1.0 => LeftOut::SlowStart,
            () if node.trust.limit().is_some() => LeftOut::Unproven,
            () => LeftOut::State(node.state()),
        }
    }

    /// Whether the node's state lets it take requests: it is ready, or missed reports and no other
    /// of its role is ready.
    fn is_usable(&self, node: &ClusterNode) -> bool {
        let any_ready = || self.nodes.of_role(node.info().role).any(ClusterNode::is_ready);
        node.is_ready() || node.state() == NodeState::Suspect && !any_ready()
    }

    fn prefill_candidate<'a>(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        node: &'a ClusterNode,
        matches: &Matches,
    ) -> PrefillCandidate<'a> {
        let info = node.info();
        // The last token is always computed.
        let reusable = request.prompt_tokens.saturating_sub(1) / info.layout.block_tokens;
        let held = matches.of(node).min(reusable);
        let may_fetch = self.config.fetches && self.policies.placement.fetches();
        let longer = if may_fetch { self.holder_for(now, matches, node, held) } else { None };
        let fetch = longer.map(|(from, blocks)| (from, blocks.min(reusable))).filter(|(_, blocks)| *blocks > held);
        let fetch = match fetch {
            Some((from, blocks)) => {
                let bytes = u64::from(blocks - held) * info.layout.block_bytes_all_layers() as u64;
                let seconds = self.predictor.transfers.seconds(from, &info.node, self.ledger.sending(from), bytes);
                Some(self.plan(now, request, node, blocks, seconds))
            }
            None => None,
        };
        let local = self.plan(now, request, node, held, 0.0);
        PrefillCandidate { node: &info.node, pending: node.charges.pending(), local, fetch }
    }

    /// How a prompt that takes so many seconds waits at its node.
    pub(super) fn terms(&self, request: &PlacementRequest<'_>, compute: f64) -> QueueOrdering {
        QueueOrdering {
            max_overtaken: self.config.max_overtaken,
            timeout: self.config.queue_timeout,
            ..self.policies.placement.terms(request, compute)
        }
    }

    /// What becomes of the prompt on a node that then has the first `blocks` blocks of it.
    fn plan(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        node: &ClusterNode,
        blocks: u32,
        transfer: f64,
    ) -> PrefillPlan {
        let matched_tokens = blocks * node.info().layout.block_tokens;
        let compute = self.predictor.prompt_seconds(node, request.prompt_tokens, matched_tokens);
        let terms = self.terms(request, compute);
        let QueueImpact { ahead, passed } = node.charges.backlog.impact(now, terms);
        PrefillPlan { matched_tokens, transfer, compute, ahead, passed }
    }

    /// The plan of the node that was chosen on these terms, and how many prompts that were admitted
    /// would miss their objective because of it.
    pub(super) fn reordered(
        &self,
        now: Instant,
        terms: QueueOrdering,
        node: &NodeId,
        plan: &PrefillPlan,
    ) -> (PrefillPlan, usize) {
        let Some(node) = self.nodes.get(node) else { return (*plan, 0) };
        let backlog = &node.charges.backlog;
        let QueueImpact { ahead, passed } = backlog.impact(now, terms);
        (PrefillPlan { ahead, passed, ..*plan }, backlog.broken(now, terms, self.predictor.ttft_margin()))
    }

    pub(super) fn decode_candidates(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        matches: &Matches,
    ) -> Result<Vec<DecodeCandidate<'_>>, Refusal> {
        let request = sized.request;
        let usable = self.usable(NodeRole::Decode, request.exclude)?;
        let mut nodes: Vec<_> = usable.iter().copied().filter(|node| fits_decode(sized, node)).collect();
        if nodes.is_empty() {
            return self.too_large(now, request, NodeRole::Decode, |node| fits_decode(sized, node));
        }
        // What outgrows its node has to migrate.
        if nodes.iter().any(|node| sized.is_expected_to_fit(node)) {
            nodes.retain(|node| sized.is_expected_to_fit(node));
        }
        self.with_room(now, sized, &mut nodes)?;
        if request.yields() {
            nodes.retain(|node| !self.decode_candidate(sized, node, 0).breaks);
            if nodes.is_empty() {
                let message = "other requests would miss their time between tokens".to_owned();
                return refuse(ErrorKind::Overloaded, message, Some(RETRY_UNAVAILABLE));
            }
        }
        prefer(&mut nodes, request.first_completion_nodes);
        keep_trusted(now, self.nodes.of_role(NodeRole::Decode), &mut nodes, |node| node.charges.sequences());
        self.warm(now, &mut nodes, |node| node.charges.sequences());
        let counts = self.nodes.holds_for_prefill();
        let held = |node: &ClusterNode| if counts(node) { matches.of(node) } else { 0 };
        let mut candidates: Vec<_> =
            nodes.into_iter().map(|node| self.decode_candidate(sized, node, held(node))).collect();
        // A refusal for the sake of admitted requests is for when there is no other node.
        if candidates.iter().any(|candidate| !candidate.breaks) {
            candidates.retain(|candidate| !candidate.breaks);
        }
        Ok(candidates)
    }

    /// Keeps the nodes that have blocks and a slot for the request beside all that is charged; if
    /// none has, those with a slot. Room is only guessed here, and sequences wait at their node if
    /// the guess was wrong.
    fn with_room(&self, now: Instant, sized: SizedRequest<'_>, nodes: &mut Vec<&ClusterNode>) -> Result<(), Refusal> {
        let all = nodes.clone();
        let has_seat =
            |node: &ClusterNode| if sized.request.yields() { has_seat_to_spare(node) } else { has_seat(node) };
        nodes.retain(|node| has_room(sized, node) && has_seat(node));
        if nodes.is_empty() {
            nodes.extend(all.iter().filter(|node| has_seat(node)));
        }
        if !nodes.is_empty() {
            return Ok(());
        }
        let best_room = all.iter().map(|node| free_blocks(node)).max().unwrap_or(0);
        let needs = all.iter().map(|node| sized.needs(node).blocks).min().unwrap_or(0);
        let soonest = all.iter().filter_map(|node| self.predictor.next_end(now, node)).min();
        let prompt = sized.request.prompt_tokens;
        let output = sized.output_tokens;
        let message = format!(
            "no decode node has room for {prompt} prompt tokens and {output:.0} expected output tokens: {needs} blocks \
             wanted, {best_room} free at most"
        );
        refuse(ErrorKind::Overloaded, message, Some(soonest.unwrap_or(RETRY_UNAVAILABLE)))
    }

    /// No usable node of a role holds the prompt. That is the client's to mend, unless a node does
    /// that may soon be ready.
    fn too_large<T>(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        role: NodeRole,
        fits: impl Fn(&ClusterNode) -> bool,
    ) -> Result<T, Refusal> {
        let tokens = request.prompt_tokens;
        let most = |node: &ClusterNode| node.info().max_prompt_tokens();
        let usable = self.nodes.of_role(role).filter(|node| self.is_usable(node));
        let largest = usable.map(most).max().unwrap_or(0);
        let message = format!("no ready {role} node holds a prompt of {tokens} tokens: the largest holds {largest}");
        // What has output may fit without it: its request begins again from its prompt.
        let may_fit = request.output_tokens == 0;
        let may_return = |node: &ClusterNode| node.may_return(now) && fits(node);
        if may_fit && (tokens <= self.held_lately(now) || self.nodes.of_role(role).any(may_return)) {
            return refuse(ErrorKind::Unavailable, message, Some(RETRY_UNAVAILABLE));
        }
        refuse(ErrorKind::Invalid, message, None)
    }

    fn decode_candidate<'a>(&self, sized: SizedRequest<'_>, node: &'a ClusterNode, held: u32) -> DecodeCandidate<'a> {
        let info = node.info();
        let charges = &node.charges;
        let sequences = charges.sequences() as f64;
        let kv_tokens = charges.kv_tokens as f64;
        let prompt_blocks = info.layout.blocks_for(sized.request.prompt_tokens as usize);
        let bytes = prompt_blocks.saturating_sub(held as usize) as f64 * info.layout.block_bytes_all_layers() as f64;
        let (push, push_last_layer) = self.predictor.transfers.push_seconds(&info.node, bytes, info.layout.num_layers);
        let tbt =
            self.predictor.high_step_seconds(node, sequences + 1.0, kv_tokens + sized.needs(node).kv_tokens as f64);
        let without = || self.predictor.high_step_seconds(node, sequences, kv_tokens);
        DecodeCandidate {
            node: &info.node,
            tbt,
            stream: tbt * sized.output_tokens,
            push,
            push_last_layer,
            sequences: charges.sequences(),
            breaks: charges.has_tbt_limit_below(tbt) && charges.has_tbt_limit_in(without(), tbt),
        }
    }
}

/// Keeps those of `wanted`, if there is one.
fn prefer(nodes: &mut Vec<&ClusterNode>, wanted: &[NodeId]) {
    let is_wanted = |node: &&ClusterNode| wanted.contains(&node.info().node);
    if nodes.iter().any(is_wanted) {
        nodes.retain(is_wanted);
    }
}

fn fits_prefill(tokens: u32, node: &ClusterNode) -> bool {
    (1..=node.info().max_prompt_tokens()).contains(&tokens)
}

fn has_place(node: &ClusterNode) -> bool {
    let limit = node.info().profile.max_waiting as usize;
    limit == 0 || node.charges.pending() < limit
}

fn fits_decode(sized: SizedRequest<'_>, node: &ClusterNode) -> bool {
    // A decode node draws a second token; one that only computes the prompt draws the first.
    let least_output = if sized.request.wants_decode { 2 } else { 1 };
    sized.request.prompt_tokens.saturating_add(least_output) <= node.info().max_sequence_tokens()
}

fn has_room(sized: SizedRequest<'_>, node: &ClusterNode) -> bool {
    free_blocks(node) >= sized.needs(node).blocks && has_seat(node)
}

/// All nodes that the prompt fits have full queues.
fn no_place<T>(now: Instant, full: &[&ClusterNode]) -> Result<T, Refusal> {
    let queue = |node: &&ClusterNode| node.charges.backlog.total(now) / node.charges.pending().max(1) as f64;
    let soonest = full.iter().map(queue).fold(f64::INFINITY, f64::min);
    let full = full.len();
    let message = format!("the queues of all {full} prefill nodes are full");
    refuse(ErrorKind::Overloaded, message, Some(duration(soonest)))
}

/// Blocks that were not charged. Shared prefixes are charged to each request: what is promised here
/// is there even if nothing is shared.
fn free_blocks(node: &ClusterNode) -> usize {
    (node.info().layout.num_blocks as usize).saturating_sub(node.charges.blocks)
}

/// Whether a quarter of the node's batch stays free for others after one more sequence.
fn has_seat_to_spare(node: &ClusterNode) -> bool {
    let batch = node.info().profile.max_running as usize;
    batch == 0 || node.charges.sequences() < batch - batch / 4
}

pub(super) fn has_seat(node: &ClusterNode) -> bool {
    let profile = &node.info().profile;
    let slots = (profile.max_running as usize).saturating_add(profile.max_waiting as usize);
    slots == 0 || node.charges.sequences() < slots
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cluster, id, info, place, refusal, request};
    use super::super::{ClusterConfig, Policies};
    use super::*;
    use crate::placement::PlacementKind;

    #[test]
    fn prompt_that_no_node_holds_is_invalid_and_output_limit_is_no_demand() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        let long = PlacementRequest { prompt_tokens: 1700, wants_decode: false, ..request(0, &[]) };
        let (kind, message) = refusal(&mut cluster, now, &long);
        let named = "no ready prefill node holds a prompt of 1700 tokens: the largest holds 1600";
        assert_eq!((kind, message.as_str()), (ErrorKind::Invalid, named));
        let open = PlacementRequest { max_tokens: 1888, ..request(0, &[]) };
        assert!(place(&mut cluster, now, &open).is_ok(), "160 prompt and 1888 output tokens are more than 1600");
        let resumed = PlacementRequest { output_tokens: 100, prompt_tokens: 1700, ..open };
        assert_eq!(refusal(&mut cluster, now, &resumed).0, ErrorKind::Invalid, "it begins again from its prompt");
    }

    #[test]
    fn node_that_holds_the_expected_output_goes_before_smaller_ones() {
        let now = Instant::now();
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        cluster.on_node_joined(now, info("p0", NodeRole::Prefill, 1));
        let mut small = info("d0", NodeRole::Decode, 1);
        small.layout.num_blocks = 12;
        cluster.on_node_joined(now, small);
        let open = |n| PlacementRequest { max_tokens: 1888, ..request(n, &[]) };
        let placed = place(&mut cluster, now, &open(0)).unwrap();
        assert_eq!(placed.decode, Some(id("d0")), "192 tokens hold the prompt, and no other node is here");
        cluster.on_node_joined(now, info("d1", NodeRole::Decode, 1));
        for n in 1..3 {
            assert_eq!(place(&mut cluster, now, &open(n)).unwrap().decode, Some(id("d1")));
        }
        let short = PlacementRequest { max_tokens: 16, ..request(3, &[]) };
        let exclude = [id("d1")];
        let short = PlacementRequest { exclude: &exclude, ..short };
        assert_eq!(place(&mut cluster, now, &short).unwrap().decode, Some(id("d0")));
    }

    #[test]
    fn prompt_that_fits_only_decode_nodes_is_computed_there() {
        let now = Instant::now();
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        let mut small = info("p0", NodeRole::Prefill, 1);
        small.layout.num_blocks = 4;
        cluster.on_node_joined(now, small);
        cluster.on_node_joined(now, info("d0", NodeRole::Decode, 1));
        assert_eq!(place(&mut cluster, now, &request(0, &[])).unwrap().prefill, id("d0"));
    }
}
