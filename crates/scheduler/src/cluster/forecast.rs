//! What a decode node will be doing.

use std::time::{Duration, Instant};

use super::{Cluster, ClusterNode};
use crate::admission::DecodeLoad;
use crate::cost::duration;
use crate::ledger::DecodeForecast;

impl Cluster {
    /// Seconds of a step of a batch on this node. More than the batch takes wait, and do not slow
    /// the step.
    pub(super) fn step_seconds(&self, node: &ClusterNode, sequences: f64, kv_tokens: f64) -> f64 {
        let cost = &self.costs[node.class].1.decode;
        let share = match f64::from(node.info().profile.max_running) {
            limit if limit > 0.0 && sequences > limit => limit / sequences,
            _ => 1.0,
        };
        node.speed.seconds(cost.step((sequences * share).round() as u32, (kv_tokens * share) as u64))
    }

    /// The same in the tail of the steps.
    pub(super) fn high_step_seconds(&self, node: &ClusterNode, sequences: f64, kv_tokens: f64) -> f64 {
        let spread = self.costs[node.class].1.decode_spread(self.config.admission_quantile);
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
    pub(super) fn broken_sequences(
        &self,
        (now, then): (Instant, Instant),
        node: &ClusterNode,
        newcomer: DecodeForecast,
    ) -> usize {
        let others = self.expected_at(now, then, node);
        let step = |newcomer| self.decode_load(node, others, newcomer).tbt_high;
        let steps = (step(DecodeForecast::default()), step(newcomer));
        node.charges.broken_sequences((now, then), steps, self.step_as_charged(node), &self.output_lengths)
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
}
