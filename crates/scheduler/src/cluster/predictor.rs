//! What work takes on the nodes, as far as was measured.

use std::time::{Duration, Instant};

use baton_types::{NodeInfo, NodeRole};

use super::ClusterNode;
use super::candidates::SizedRequest;
use super::table::NodeTable;
use crate::admission::DecodeLoad;
use crate::backlog::ChunkSeconds;
use crate::config::MIN_CHUNK_PART;
use crate::cost::{ClassCost, OutputLength, Residuals, SpeedFactor, TransferCost, duration};
use crate::ledger::{Between, DecodeForecast, Steps};
use crate::placement::PlacementRequest;

/// Answers are about so long until some have ended.
const FIRST_OUTPUT_TOKENS: u32 = 256;

/// Nodes of one class cost the same, up to a factor: role, model and kv_class.
type CostClass = (NodeRole, u64, String);

fn cost_class(info: &NodeInfo) -> CostClass {
    (info.role, info.layout.model, info.kv_class.clone())
}

/// Classes that are remembered without a node.
pub(super) const MAX_CLASSES: usize = 64;

/// How a node compares with its class, by what it says.
fn speed(info: &NodeInfo, class: &ClassCost) -> SpeedFactor {
    let own = ClassCost::new(&info.profile);
    match info.role {
        NodeRole::Prefill => SpeedFactor::from_profiles(own.prefill.prompt(512, 0), class.prefill.prompt(512, 0)),
        NodeRole::Decode => SpeedFactor::from_profiles(own.decode.step(8, 4096), class.decode.step(8, 4096)),
    }
}

/// How a node that joins compares with those that are known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Introduced {
    /// Index of its cost models.
    pub class: usize,
    pub speed: SpeedFactor,
}

/// Cost models of nodes, transfers and answers.
#[derive(Debug)]
pub(super) struct Predictor {
    /// By class; a node knows the index of its own.
    costs: Vec<(CostClass, ClassCost)>,
    pub(super) transfers: TransferCost,
    pub(super) output_lengths: OutputLength,
    /// Of the predicted time to first token.
    pub(super) ttft_residuals: Residuals,
    /// Which quantile of the predictions counts as high.
    quantile: f64,
}

impl Predictor {
    /// Nothing is measured yet. Transfers take `bandwidth` until then.
    pub(super) fn new(quantile: f64, bandwidth: f64) -> Self {
        Self {
            costs: Vec::new(),
            transfers: TransferCost::new(bandwidth),
            output_lengths: OutputLength::new(FIRST_OUTPUT_TOKENS),
            ttft_residuals: Residuals::default(),
            quantile,
        }
    }

    /// Takes another quantile for a high one.
    pub(super) fn set_quantile(&mut self, quantile: f64) {
        self.quantile = quantile;
    }

    /// A node says what it can do. Its class is seeded with that if it is the first of it.
    /// What a class was seeded with may change by it: its nodes are compared with that anew.
    pub(super) fn introduce(&mut self, info: &NodeInfo, nodes: &mut NodeTable) -> Introduced {
        self.transfers.introduce(&info.node, info.profile.transfer_bytes_per_s);
        let class = self.class_of(info, nodes);
        let cost = &self.costs[class].1;
        for node in nodes.values_mut().filter(|node| node.class == class && !node.speed.is_measured()) {
            node.speed = speed(node.info(), cost);
        }
        Introduced { class, speed: speed(info, cost) }
    }

    /// Index of the node's class.
    fn class_of(&mut self, info: &NodeInfo, nodes: &NodeTable) -> usize {
        let class = cost_class(info);
        if let Some(known) = self.costs.iter().position(|(other, _)| *other == class) {
            self.costs[known].1.introduce(&info.profile);
            return known;
        }
        let seeded = (class, ClassCost::new(&info.profile));
        let is_used = |index: &usize| nodes.values().any(|node| node.class == *index);
        // Names of classes are the nodes' to choose: those of nodes that are gone make room.
        let unused = (0..self.costs.len()).find(|index| !is_used(index)).filter(|_| self.costs.len() >= MAX_CLASSES);
        if let Some(unused) = unused {
            self.costs[unused] = seeded;
            return unused;
        }
        self.costs.push(seeded);
        self.costs.len() - 1
    }

    fn cost(&self, node: &ClusterNode) -> &ClassCost {
        &self.costs[node.class].1
    }

    /// What was measured long ago says nothing any more.
    pub(super) fn forget_old(&mut self, now: Instant) {
        self.ttft_residuals.forget_old(now);
        for (_, cost) in &mut self.costs {
            cost.forget_old(now);
        }
    }

    /// A node's step took `seconds`.
    pub(super) fn on_step(
        &mut self,
        now: Instant,
        node: &mut ClusterNode,
        rows: u32,
        attended_tokens: u64,
        seconds: f64,
    ) {
        let cost = &mut self.costs[node.class].1;
        match node.info().role {
            NodeRole::Prefill => cost.on_prefill_step(&mut node.speed, rows, attended_tokens, seconds),
            NodeRole::Decode => cost.on_decode_step(now, &mut node.speed, rows, attended_tokens, seconds),
        }
    }

    /// A decode node would take `seconds` for a partial prefill of so many rows, as far as some of
    /// its layers tell.
    pub(super) fn on_slice(&mut self, node: &ClusterNode, rows: u32, attended_tokens: u64, seconds: f64) {
        self.costs[node.class].1.on_slice(node.speed, rows, attended_tokens, seconds);
    }

    /// The request, with what is expected of its answer.
    pub(super) fn sized<'a>(&self, request: &'a PlacementRequest<'a>) -> SizedRequest<'a> {
        let done = request.output_tokens;
        let output_tokens = self.output_lengths.expected_left(done, done.saturating_add(request.max_tokens));
        SizedRequest { request, output_tokens }
    }

    /// Seconds by which a predicted time to first token may be too short, as a high quantile.
    pub(super) fn ttft_margin(&self) -> f64 {
        self.ttft_residuals.quantile(self.quantile)
    }

    /// Seconds that a node takes for a prompt of which it has `cached` tokens, in its chunks.
    pub(super) fn prompt_seconds(&self, node: &ClusterNode, tokens: u32, cached: u32) -> f64 {
        let cost = self.cost(node);
        cost.seconds(node.speed, cost.prefill.prompt_in_chunks(tokens, cached, self.chunk_rows(node)))
    }

    /// The same in one chunk.
    pub(super) fn one_chunk_seconds(&self, node: &ClusterNode, tokens: u32, cached: u32) -> f64 {
        let cost = self.cost(node);
        cost.seconds(node.speed, cost.prefill.one_chunk(tokens, cached))
    }

    /// Rows of a full chunk of a node.
    pub(super) fn chunk_rows(&self, node: &ClusterNode) -> u32 {
        match node.info().profile.chunk_tokens {
            0 => self.cost(node).prefill.chunk_rows(),
            told => told,
        }
    }

    /// How long a prefill node's chunks take.
    pub(super) fn chunk_seconds(&self, node: &ClusterNode) -> ChunkSeconds {
        let rows = self.chunk_rows(node);
        let full = self.prompt_seconds(node, rows, 0);
        let least = self.prompt_seconds(node, (rows as usize / MIN_CHUNK_PART) as u32, 0);
        ChunkSeconds { full, least }
    }

    /// Seconds of a step of a batch on this node. More than the batch takes wait, and do not slow
    /// the step.
    pub(super) fn step_seconds(&self, node: &ClusterNode, sequences: f64, kv_tokens: f64) -> f64 {
        let cost = self.cost(node);
        let share = match f64::from(node.info().profile.max_running) {
            limit if limit > 0.0 && sequences > limit => limit / sequences,
            _ => 1.0,
        };
        let step = cost.decode.step((sequences * share).round() as u32, (kv_tokens * share) as u64);
        cost.seconds(node.speed, step)
    }

    /// The same in the tail of the steps.
    pub(super) fn high_step_seconds(&self, node: &ClusterNode, sequences: f64, kv_tokens: f64) -> f64 {
        let spread = self.cost(node).decode_spread(self.quantile);
        self.step_seconds(node, sequences, kv_tokens) * (1.0 + spread)
    }

    /// How long an answer takes on this node as it is charged now: the mean number of tokens, a
    /// step each.
    pub(super) fn answer_time(&self, node: &ClusterNode) -> Duration {
        duration(self.step_as_charged(node).as_secs_f64() * self.output_lengths.mean(u32::MAX))
    }

    /// The node with these sequences and the newcomer.
    pub(super) fn decode_load(
        &self,
        node: &ClusterNode,
        others: DecodeForecast,
        newcomer: DecodeForecast,
    ) -> DecodeLoad {
        let sequences = others.sequences + newcomer.sequences;
        let kv_tokens = others.kv_tokens + newcomer.kv_tokens;
        let total = f64::from(node.info().layout.num_blocks).max(1.0);
        let kv_share = (others.blocks + newcomer.blocks) / total;
        DecodeLoad {
            tbt: duration(self.step_seconds(node, sequences, kv_tokens)),
            tbt_high: duration(self.high_step_seconds(node, sequences, kv_tokens)),
            kv_share,
            others: others.sequences,
        }
    }

    /// Until the first sequence that a node has now should be over.
    pub(super) fn next_end(&self, now: Instant, node: &ClusterNode) -> Option<Duration> {
        node.charges.next_end(now, self.step_as_charged(node), &self.output_lengths)
    }

    /// A step of all sequences placed there.
    fn step_as_charged(&self, node: &ClusterNode) -> Duration {
        duration(self.step_seconds(node, node.charges.sequences() as f64, node.charges.kv_tokens as f64))
    }

    /// Sequences that would miss their time between tokens for the newcomer's sake, as it will be
    /// at the later of two times.
    pub(super) fn broken_sequences(&self, between: Between, node: &ClusterNode, newcomer: DecodeForecast) -> usize {
        let others = self.expected_at(between.now, between.then, node);
        let step = |newcomer| self.decode_load(node, others, newcomer).tbt_high;
        let steps = Steps { without: step(DecodeForecast::default()), with: step(newcomer) };
        node.charges.broken_sequences(between, steps, self.step_as_charged(node), &self.output_lengths)
    }

    /// Expected sequences of a node at a later time, each answer going on with the probability that
    /// the lengths so far give it.
    pub(super) fn expected_at(&self, now: Instant, then: Instant, node: &ClusterNode) -> DecodeForecast {
        node.charges.expected_at(now, then, self.step_as_charged(node), &self.output_lengths)
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Slo, Ttft};

    use super::super::tests::{cluster, key, place, request};
    use super::super::{ClusterConfig, Policies};
    use super::*;
    use crate::placement::{PlacementKind, PlacementRequest};

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn admission_recovers_once_wrong_ttft_predictions_expire() {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::default());
        // Each takes 0.8 s, and is predicted to take 0.2 s.
        for n in 0..36 {
            place(&mut cluster, now, &request(n, &[])).unwrap();
            now += 800 * MS;
            cluster.on_prefilled(now, key(n));
            cluster.on_ended(now, key(n));
        }
        let slo = Slo { ttft: Some(Ttft(500 * MS)), tbt: None };
        let strict = |n| PlacementRequest { slo, ..request(n, &[]) };
        // A request that is alone at its nodes waits for none.
        place(&mut cluster, now, &strict(100)).unwrap();
        place(&mut cluster, now, &strict(101)).unwrap();
        let refusal = place(&mut cluster, now, &strict(102)).unwrap_err();
        assert!(refusal.message.contains("the objective is 500ms"), "{refusal:?}");
        // What was learned is old some day.
        now += Duration::from_secs(301);
        (100..104).for_each(|n| cluster.on_ended(now, key(n)));
        (200..203).for_each(|n| _ = place(&mut cluster, now, &strict(n)).unwrap());
    }

    #[test]
    fn other_admission_quantile_holds_from_new_rules_on() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::default());
        for late in 0..40 {
            cluster.predictor.ttft_residuals.observe(now, 1.0, 1.0 + f64::from(late));
        }
        let high = cluster.predictor.ttft_margin();
        let config = ClusterConfig { admission_quantile: 0.5, ..ClusterConfig::default() };
        cluster.set_rules(config, Policies::default());
        let median = cluster.predictor.ttft_margin();
        assert!((34.0..37.0).contains(&high) && (19.0..21.0).contains(&median), "{high} {median}");
    }
}
