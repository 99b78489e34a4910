//! The total predicted delay of all requests.

use std::time::Duration;

use baton_types::{QueueOrdering, Slo, Tbt};

use super::{
    Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate, PrefillPlan, least, lightest_by,
};
use crate::cost::duration;

/// The parts of [`MinTotalDelay`], for measuring what each is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MinTotalDelayConfig {
    /// Whether shorter prompts may pass longer ones.
    pub reorders: bool,
    /// Seconds of patience per second of compute. More is closer to shortest first, and harder on
    /// long prompts.
    pub patience: f64,
    /// Longest patience: no later prompt goes before.
    pub max_patience: Duration,
    /// Part of the time that an objective leaves beside the compute that a prompt may be passed in.
    pub slack_share: f64,
    /// How much more a second counts the closer the prompt is to its objective: the tail, and not
    /// the mean alone.
    pub tail_weight: f64,
    /// Weight of the delay of the prompts that the newcomer passes.
    pub delay_weight: f64,
    /// Seconds that a second of compute is worth to those who come later.
    pub work_weight: f64,
    /// Weight of the time that the answer takes to come after its first token.
    pub stream_weight: f64,
}

impl Default for MinTotalDelayConfig {
    fn default() -> Self {
        Self {
            reorders: true,
            patience: 1.0,
            max_patience: Duration::from_secs(30),
            slack_share: 0.2,
            tail_weight: 2.0,
            delay_weight: 0.5,
            work_weight: 0.5,
            stream_weight: 0.1,
        }
    }
}

/// Per node, the better of computing and fetching, the fetch overlapping the queue. Of the pairs of
/// prefill and decode nodes, the one with the least total delay of the newcomer and those whom it
/// passes, the time between tokens of the answer counted.
#[derive(Debug, Clone, Default)]
pub struct MinTotalDelay {
    config: MinTotalDelayConfig,
}

impl MinTotalDelay {
    /// With its parts set by hand.
    pub fn new(config: MinTotalDelayConfig) -> Self {
        Self { config }
    }

    /// Seconds of patience of a prompt that takes `compute` seconds.
    fn patience(&self, compute: f64, time_left: Option<f64>) -> f64 {
        let config = &self.config;
        let most = config.max_patience.as_secs_f64();
        let by_work = (compute * config.patience).min(most);
        match time_left {
            // It is late in any case: others need not be.
            Some(limit) if compute >= limit => most,
            Some(limit) => by_work.min((limit - compute) * config.slack_share),
            None => by_work,
        }
    }

    /// Seconds that the plan costs all requests, the decode node's part apart.
    fn prefill_cost(&self, plan: &PrefillPlan, target: &Target, time_left: Option<f64>) -> f64 {
        let own = plan.finish() + target.exposed(plan.compute);
        let own = own * (1.0 + self.config.tail_weight * time_left.map_or(0.0, |limit| share(own, limit)));
        own + plan.compute * (self.config.delay_weight * plan.passed as f64 + self.config.work_weight)
    }

    /// Seconds that the answer's time between tokens at a decode node is worth.
    fn decode_cost(&self, decode: &DecodeCandidate<'_>, slo: Slo) -> f64 {
        let load = slo.tbt.map_or(0.0, |Tbt(limit)| share(decode.tbt, limit.as_secs_f64()));
        self.config.stream_weight * decode.stream * (1.0 + self.config.tail_weight * load)
    }

    /// The best of a prefill node's plans beside one of these decode nodes.
    fn best_pair(
        &self,
        request: &PlacementRequest<'_>,
        candidate: &PrefillCandidate<'_>,
        targets: &[Target<'_>],
    ) -> Pair {
        let mut best = Pair { cost: f64::INFINITY, fetch: false, decode: targets[0].index() };
        for target in targets {
            for (plan, fetch) in candidate.plans() {
                // One limit for all plans: else one that computes more would have more time.
                let cost = self.prefill_cost(plan, target, request.time_left(0.0)) + target.cost;
                if cost < best.cost {
                    best = Pair { cost, fetch, decode: target.index() };
                }
            }
        }
        best
    }

    fn target<'a>(&self, index: usize, decode: &'a DecodeCandidate<'a>, slo: Slo) -> Target<'a> {
        Target { decode: Some((index, decode)), cost: self.decode_cost(decode, slo) }
    }

    /// The decode nodes that are worth a look: the lightest, and of those that hold more of the
    /// prompt than all that are lighter, the few that hold most.
    fn targets<'a>(
        &self,
        decode: &'a [DecodeCandidate<'a>],
        slo: Slo,
        rng: &mut dyn FnMut() -> u64,
    ) -> Vec<Target<'a>> {
        let Some(lightest) = lightest_by(decode, |candidate| candidate.tbt, rng) else { return vec![Target::NONE] };
        let holds_more = |index: &usize| decode[*index].push < decode[lightest].push;
        let mut others: Vec<_> = (0..decode.len()).filter(holds_more).collect();
        let by_pace = |a: &DecodeCandidate<'_>, b: &DecodeCandidate<'_>| {
            a.tbt.total_cmp(&b.tbt).then(a.sequences.cmp(&b.sequences))
        };
        others.sort_by(|a, b| by_pace(&decode[*a], &decode[*b]));
        let mut least_push = decode[lightest].push;
        others.retain(|index| {
            let push = decode[*index].push;
            let holds_more = push < least_push;
            least_push = least_push.min(push);
            holds_more
        });
        let most = others.len().saturating_sub(MAX_TARGETS - 1);
        let indices = std::iter::once(lightest).chain(others.drain(most..));
        indices.map(|index| self.target(index, &decode[index], slo)).collect()
    }
}

/// Most decode nodes that each prefill node is looked at with.
const MAX_TARGETS: usize = 4;

/// A decode node beside which prefill nodes are looked at: its index and what its time between
/// tokens costs.
#[derive(Debug, Clone, Copy)]
struct Target<'a> {
    decode: Option<(usize, &'a DecodeCandidate<'a>)>,
    cost: f64,
}

impl Target<'_> {
    const NONE: Self = Self { decode: None, cost: 0.0 };

    fn index(&self) -> Option<usize> {
        self.decode.map(|(index, _)| index)
    }

    fn exposed(&self, compute: f64) -> f64 {
        self.decode.map_or(0.0, |(_, decode)| decode.exposed(compute))
    }
}

fn share(seconds: f64, limit: f64) -> f64 {
    seconds / limit.max(1e-3)
}

/// What a prefill node comes to with the best of its plans and decode nodes.
#[derive(Debug, Clone, Copy)]
struct Pair {
    cost: f64,
    fetch: bool,
    decode: Option<usize>,
}

impl PlacementPolicy for MinTotalDelay {
    fn name(&self) -> &'static str {
        "min-total-delay"
    }

    fn choose(
        &self,
        request: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let targets = self.targets(decode, request.slo_left(), rng);
        let pairs: Vec<_> = prefill.iter().map(|candidate| self.best_pair(request, candidate, &targets)).collect();
        let chosen = least(pairs.iter().map(|pair| pair.cost), 0.0, rng).unwrap_or(0);
        Choice { prefill: chosen, fetch: pairs[chosen].fetch, decode: pairs[chosen].decode }
    }

    fn cost(
        &self,
        request: &PlacementRequest<'_>,
        prefill: &PrefillCandidate<'_>,
        decode: Option<&DecodeCandidate<'_>>,
    ) -> Option<f64> {
        let target = decode.map_or(Target::NONE, |decode| self.target(0, decode, request.slo_left()));
        Some(self.best_pair(request, prefill, &[target]).cost)
    }

    fn boxed_clone(&self) -> Box<dyn PlacementPolicy> {
        Box::new(self.clone())
    }

    fn terms(&self, request: &PlacementRequest<'_>, compute: f64) -> QueueOrdering {
        let config = &self.config;
        let priority = request.priority;
        if !config.reorders {
            return QueueOrdering { priority, compute: duration(compute), ..QueueOrdering::default() };
        }
        QueueOrdering {
            priority,
            patience: duration(self.patience(compute, request.time_left(compute))),
            compute: duration(compute),
            ..QueueOrdering::default()
        }
    }

    fn reorders(&self) -> bool {
        self.config.reorders
    }

    fn fetches(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate::tests::{decode, prefill, request, with_fetch};
    use super::*;

    fn choose(candidates: &[PrefillCandidate<'_>]) -> (usize, bool) {
        let choice = MinTotalDelay::default().choose(&request(), candidates, &[], &mut || 0);
        (choice.prefill, choice.fetch)
    }

    #[test]
    fn min_total_delay_fetches_prefix_only_if_faster() {
        assert_eq!(choose(&[with_fetch(prefill(0, 100, 0), 500, 10, 64)]), (0, false));
        assert_eq!(choose(&[with_fetch(prefill(0, 900, 0), 500, 10, 64)]), (0, true));
        assert_eq!(choose(&[with_fetch(prefill(600, 100, 0), 500, 10, 64)]), (0, true), "the queue hides it");
    }

    #[test]
    fn min_total_delay_counts_delay_of_overtaken_prompts() {
        let mut passing = prefill(0, 1000, 0);
        passing.local.passed = 50;
        assert_eq!(choose(&[passing, prefill(3000, 1000, 0)]), (1, false));
    }

    #[test]
    fn min_total_delay_weighs_push_saved_against_slower_decode_steps() {
        let choose = |holder_tbt, push| {
            let decodes = [decode(30, push, 1), decode(holder_tbt, 0, 1), decode(holder_tbt, 0, 0)];
            MinTotalDelay::default().choose(&request(), &[prefill(0, 100, 0)], &decodes, &mut || 0).decode.unwrap()
        };
        assert_eq!(choose(33, 3000), 2, "2.9 s of push that compute does not hide for 0.3 s of stream");
        assert_eq!(choose(33, 90), 0, "compute hides most of it");
        assert_eq!(choose(500, 3000), 0, "five times the objective");
    }

    #[test]
    fn min_total_delay_considers_decode_nodes_with_longest_prefix() {
        let mut decodes = vec![decode(30, 3000, 0)];
        decodes.extend((1..9).map(|n| decode(32 + n, 3000 - 10 * n, 0)));
        decodes.push(decode(42, 0, 0));
        let choice = MinTotalDelay::default().choose(&request(), &[prefill(0, 100, 0)], &decodes, &mut || 0);
        assert_eq!(choice.decode, Some(9));
    }

    #[test]
    fn min_total_delay_patience_grows_with_work_up_to_its_bound() {
        let patience = |seconds| MinTotalDelay::default().patience(seconds, None);
        assert_eq!((patience(7.0), patience(1000.0)), (7.0, 30.0));
        assert_eq!(MinTotalDelay::default().patience(7.0, Some(17.0)), 2.0, "a fifth of what it need not compute");
    }

    #[test]
    fn min_total_delay_treats_longest_wait_like_an_objective() {
        let waited = Duration::from_secs(30);
        let within = |max_wait| PlacementRequest { max_wait, slo: Slo::default(), ..request() };
        assert_eq!(within(Some(waited)).time_left(2.0), Some(32.0));
        assert_eq!((within(None).time_left(2.0), request().time_left(2.0)), (None, Some(30.0)));
        let used_up = PlacementRequest { waited, ..within(Some(waited)) };
        assert_eq!(used_up.time_left(2.0), Some(2.0));
        let cost = |request| MinTotalDelay::default().cost(&request, &prefill(0, 100, 0), None).unwrap();
        assert!(cost(used_up).is_finite() && cost(used_up) > cost(within(Some(waited))));
    }
}
