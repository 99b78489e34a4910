//! The conductor's picture of the cluster: who is here, what they hold, what they were charged.
//!
//! **Invariant**: what a request was charged is given back exactly once, to the very start of the
//! node that was charged.

mod at_decode;
mod candidates;
mod claims;
mod config;
mod declare;
mod explain;
mod holders;
mod ledger;
mod limits;
mod migration;
mod node;
mod node_forecast;
mod partial_prefill;
mod place;
mod predictor;
mod request;
mod table;
#[cfg(test)]
pub(crate) mod tests;
mod trust;

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::{Applied, BlockHasher, PrefixIndex};
use baton_types::{Generation, KvEvent, Load, NodeId, NodeInfo, NodeRole, RequestKey};

use crate::ledger::NodeStart;

use claims::Claims;
use ledger::{Ledger, Ttfts};
use limits::LargestPrompt;
use predictor::Predictor;
use table::NodeTable;

pub use at_decode::PromptAtDecode;
pub use config::{ClusterConfig, Policies, PromptsAtDecode};
pub use explain::{DecodeExplanation, Explanation, LeftOut, PrefillExplanation, Verdict};
pub use limits::SequenceLimits;
pub use migration::MigrationChoice;
pub use node::{ClusterNode, NodeState};
pub use node_forecast::NodeForecast;

/// The conductor's picture of the cluster: membership, prefix index, cost models and the ledger of
/// charges. Placement is [`Cluster::place`].
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    policies: Policies,
    nodes: NodeTable,
    predictor: Predictor,
    ticked: Option<Instant>,
    ledger: Ledger,
    claims: Claims,
    largest_prompt: Option<LargestPrompt>,
}

/// Shortest time between two looks at who reports.
const TICK: Duration = Duration::from_millis(100);

impl Cluster {
    /// A cluster without nodes.
    pub fn new(config: ClusterConfig, policies: Policies) -> Self {
        Self {
            config,
            policies,
            nodes: NodeTable::new(config.max_index_entries_per_node),
            predictor: Predictor::new(config.admission_quantile, config.bandwidth),
            ticked: None,
            ledger: Ledger::default(),
            claims: Claims::default(),
            largest_prompt: None,
        }
    }

    /// Decides by other rules from now on. What is known of the nodes, and what is charged, stays.
    pub fn set_rules(&mut self, config: ClusterConfig, policies: Policies) {
        self.config = config;
        self.predictor.set_quantile(config.admission_quantile);
        self.policies = policies;
    }

    /// Every node, those that left lately included: prefill nodes before decode nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &ClusterNode> {
        self.nodes.values()
    }

    /// One node.
    pub fn node(&self, node: &NodeId) -> Option<&ClusterNode> {
        self.nodes.get(node)
    }

    /// Whether this start of a node is here.
    pub fn is_here(&self, start: &NodeStart) -> bool {
        self.nodes.is_here(start)
    }

    /// Nothing is placed here any more: what was charged, or waits, is in the ledger of another.
    pub fn forget_charges(&mut self, now: Instant) {
        let keys: Vec<_> = self.ledger.keys().collect();
        keys.into_iter().for_each(|key| self.on_ended(now, key));
        self.claims = Claims::default();
    }

    /// Who holds which blocks. Events may be applied to it, and chains looked up, while this
    /// cluster is in use elsewhere.
    pub fn index(&self) -> Arc<PrefixIndex> {
        Arc::clone(&self.nodes.index)
    }

    /// Name of the policy that takes in.
    pub fn admission_policy(&self) -> &'static str {
        self.policies.admission.name()
    }

    /// Whether a request could be served now: a decode node is ready, and a prefill node is or is
    /// not needed. Nodes that missed reports are a last resort for requests that come all the same.
    pub fn is_ready(&self) -> bool {
        self.has_nodes(ClusterNode::is_ready)
    }

    /// Whether the nodes that a request needs are heard of: those that are silent or gone are not.
    /// Some may drain.
    pub fn reaches_nodes(&self) -> bool {
        self.has_nodes(|node| matches!(node.state(), NodeState::Ready | NodeState::Draining))
    }

    fn has_nodes(&self, is_there: impl Fn(&ClusterNode) -> bool) -> bool {
        let any = |role| self.nodes.of_role(role).any(&is_there);
        let prompts = self.config.prompts_at_decode != PromptsAtDecode::Never || any(NodeRole::Prefill);
        prompts && any(NodeRole::Decode)
    }

    /// Requests that are charged.
    pub fn placed(&self) -> usize {
        self.ledger.placed()
    }

    /// How the nodes hash the blocks of prompts, and the tokens of a block; `None` while no node
    /// says how. Hashing is for the caller, who does not hold the cluster for that.
    pub fn block_hasher(&self, salt: &[u8]) -> Option<(BlockHasher, u32)> {
        let layout = &self.nodes.values().find(|node| !node.state().is_gone())?.info().layout;
        Some((BlockHasher::new(layout.fingerprint(), salt), layout.block_tokens))
    }

    /// A node is here, or here again in a later generation. An older one is ignored.
    pub fn on_node_joined(&mut self, now: Instant, info: NodeInfo) {
        let known = self.nodes.get(&info.node).filter(|node| !node.state().is_gone());
        match known.map(|node| node.info().generation) {
            Some(known) if known >= info.generation => return,
            // Its end may be told later, or not at all: what was on its way to it will not come.
            Some(earlier) => self.leave(now, &info.node, earlier, NodeState::Lost),
            None => self.nodes.index.remove_node(&info.node),
        }
        let introduced = self.predictor.introduce(&info, &mut self.nodes);
        self.nodes.enter(now, info, introduced);
    }

    /// A node is lost. What it had cached and was charged is forgotten; the requests on it are
    /// their owners' to end.
    pub fn on_node_left(&mut self, now: Instant, node: &NodeId, generation: Generation) {
        self.leave(now, node, generation, NodeState::Lost);
    }

    /// A node ended its session itself: after a drain that is its goodbye, and lost otherwise. Says
    /// which; the rest is as in [`Cluster::on_node_left`].
    pub fn on_node_goodbye(&mut self, now: Instant, node: &NodeId, generation: Generation) -> NodeState {
        let node_left = self.nodes.get(node).filter(|node| node.info().generation == generation);
        let drained = node_left.is_some_and(|node| node.state() == NodeState::Draining);
        let state = if drained { NodeState::Drained } else { NodeState::Lost };
        self.leave(now, node, generation, state);
        state
    }

    fn leave(&mut self, now: Instant, node: &NodeId, generation: Generation, state: NodeState) {
        if self.nodes.leave(now, node, generation, state, self.config.max_lost_nodes) {
            self.predictor.transfers.forget(node);
            self.ledger.forget_start(&NodeStart { node: node.clone(), generation });
        }
    }

    /// A node is asked to drain: nothing is placed there any more.
    pub fn on_drain_ordered(&mut self, node: &NodeId) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.on_drain_ordered();
        }
    }

    /// A node is asked to take requests again. It is ready when its report says that it does.
    pub fn on_undrain_ordered(&mut self, node: &NodeId) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.on_undrain_ordered();
        }
    }

    /// A node's report.
    pub fn on_load(&mut self, now: Instant, node: &NodeId, load: Load) {
        let Some(seconds) = self.nodes.get(node).map(|node| self.predictor.chunk_seconds(node)) else { return };
        let Some(node) = self.nodes.get_mut(node) else { return };
        if node.info().role == NodeRole::Prefill
            && let Some(known_until) = now.checked_sub(self.config.report_delay)
        {
            node.charges.backlog.set_chunk_seconds(seconds);
            node.charges.backlog.correct(now, load.queued_tokens, load.step, known_until);
        }
        node.on_load(now, load);
    }

    /// A node says nothing at all: it is suspected before its reports are missed. Tells whether
    /// others can do its work.
    pub fn on_node_silent(&mut self, node: &NodeId) -> bool {
        let Some(silent) = self.nodes.get_mut(node) else { return false };
        silent.on_suspect();
        let role = silent.info().role;
        self.nodes.of_role(role).any(ClusterNode::is_ready) || self.stands_in(role)
    }

    /// Time has passed: nodes that do not report are suspected. Looks at most every tenth of a
    /// second.
    pub fn on_tick(&mut self, now: Instant) {
        if self.ticked.is_some_and(|ticked| now.saturating_duration_since(ticked) < TICK) {
            return;
        }
        self.ticked = Some(now);
        self.predictor.forget_old(now);
        self.nodes.on_tick(now, self.config.suspect_after, self.config.index_ttl);
        self.nodes.values_mut().for_each(|node| node.trust.on_tick(node.charges.owes_since(now)));
        self.compare_claims(now);
        self.remember_limits(now);
    }

    /// Changes of a node's prefix cache, or (`snapshot`) all of it, as in
    /// [`baton_kv_cache::KvEventBatch`].
    pub fn on_kv_events(
        &self,
        node: &NodeId,
        generation: Generation,
        sequence: u64,
        snapshot: bool,
        events: &[KvEvent],
    ) -> Applied {
        self.nodes.index.on_events(node, generation, sequence, snapshot, events)
    }

    /// A node's step took `seconds`: rows and attended tokens as in [`crate::StepPlan::rows`] and
    /// [`crate::StepPlan::attended_tokens`].
    pub fn on_step(&mut self, now: Instant, node: &NodeId, rows: u32, attended_tokens: u64, seconds: f64) {
        // A step that took a partial prefill through some layers, and nothing else, says nothing of
        // one with a batch.
        if rows == 0 {
            return;
        }
        let teaches = self.teaches(node);
        let Some(node) = self.nodes.get_mut(node) else { return };
        node.last_steps.observe(rows, seconds);
        if teaches {
            self.predictor.on_step(now, node, rows, attended_tokens, seconds);
        }
        if node.info().role == NodeRole::Prefill {
            node.charges.backlog.on_chunk_done(now);
        }
    }

    /// Whether the node's class learns from what it says. From one that has not answered it does so
    /// only while no other has.
    fn teaches(&self, node: &NodeId) -> bool {
        let Some(node) = self.nodes.get(node) else { return false };
        let serves = |other: &ClusterNode| other.class == node.class && other.trust.has_answered();
        node.trust.has_answered() || !self.nodes.values().any(serves)
    }

    /// A decode node would take `seconds` for a partial prefill of so many rows, as far as some of
    /// its layers tell.
    pub fn on_slice(&mut self, node: &NodeId, rows: u32, attended_tokens: u64, seconds: f64) {
        if !self.teaches(node) {
            return;
        }
        let Some(node) = self.nodes.get(node) else { return };
        self.predictor.on_slice(node, rows, attended_tokens, seconds);
    }

    /// The request's prefix was fetched by its prefill node, or will not be.
    pub fn on_fetch_done(&mut self, key: RequestKey) {
        self.ledger.on_fetch_done(key);
    }

    /// A transfer between two nodes that had the way for itself took so long.
    pub fn on_transfer(&mut self, from: &NodeId, to: &NodeId, bytes: u64, seconds: f64) {
        self.predictor.transfers.observe(from, to, bytes, seconds);
    }

    /// The request's prompt is computed: its prefill node has done its part.
    pub fn on_prefilled(&mut self, now: Instant, key: RequestKey) {
        let Some(Ttfts { predicted, measured }) = self.ledger.on_prefilled(now, key, &mut self.nodes) else { return };
        self.predictor.ttft_residuals.observe(now, predicted.as_secs_f64(), measured.as_secs_f64());
    }

    /// The request's first token goes out: it decodes from now on.
    pub fn on_first_token(&mut self, now: Instant, key: RequestKey) {
        self.on_prefilled(now, key);
        self.ledger.on_first_token(now, key, &mut self.nodes);
    }

    /// The request's decode node has given its first token.
    pub fn on_decodes(&mut self, now: Instant, key: RequestKey) {
        self.ledger.on_decodes(now, key, &mut self.nodes);
    }

    /// The answer is complete, with so many tokens. The attempt is over.
    pub fn on_finished(&mut self, now: Instant, key: RequestKey, output_tokens: u32) {
        // What is not charged ended before, or never was.
        if let Some(decode) = self.ledger.decoding(key) {
            self.predictor.output_lengths.observe(output_tokens.min(decode.charge.max_tokens));
            self.ledger.on_decodes(now, key, &mut self.nodes);
        }
        self.on_ended(now, key);
    }

    /// The attempt is over, one way or the other: everything that it was charged is given back.
    /// Unknown ones are ignored.
    pub fn on_ended(&mut self, now: Instant, key: RequestKey) {
        self.ledger.on_ended(now, key, &mut self.nodes);
    }
}
