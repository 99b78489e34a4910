//! What everybody waits in sum.

use std::time::Duration;

use baton_types::{Slo, Ttft};

use super::{
    Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate, PrefillPlan, least, lightest_decode,
};
use crate::cost::duration;
use baton_types::QueueTerms;

/// The parts of [`Baton`], for measuring what each is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatonConfig {
    /// Whether shorter prompts may pass longer ones.
    pub reorders: bool,
    /// Seconds of patience per second of compute. More is closer to shortest first, and harder on long prompts.
    pub patience: f64,
    /// Longest patience: whoever comes later never goes before.
    pub max_patience: Duration,
    /// Longest that anybody is put off for others.
    pub max_wait: Duration,
    /// Part of the time that an objective leaves beside the compute that a prompt may be passed in.
    pub slack_share: f64,
    /// How much more a second counts the closer the prompt is to its objective: the tail, and not the mean alone.
    pub tail_weight: f64,
    /// Weight of the delay of the prompts that the newcomer passes.
    pub delay_weight: f64,
    /// Seconds that a second of compute is worth to those who come later.
    pub work_weight: f64,
}

impl Default for BatonConfig {
    fn default() -> Self {
        Self {
            reorders: true,
            patience: 1.0,
            max_patience: Duration::from_secs(30),
            max_wait: Duration::from_secs(600),
            slack_share: 0.2,
            tail_weight: 2.0,
            delay_weight: 0.5,
            work_weight: 0.5,
        }
    }
}

/// Per node, the better of computing and fetching, the fetch overlapping the queue; of the nodes, the one where the newcomer and those whom it passes wait least in sum.
#[derive(Debug, Default)]
pub struct Baton {
    config: BatonConfig,
}

impl Baton {
    /// With its parts set by hand.
    pub fn new(config: BatonConfig) -> Self {
        Self { config }
    }

    fn patience(&self, compute: Duration, slo: Slo) -> Duration {
        let config = &self.config;
        let by_work = duration(compute.as_secs_f64() * config.patience).min(config.max_patience);
        match slo.ttft {
            // It misses its objective in any case: others need not.
            Some(Ttft(limit)) if compute >= limit => config.max_patience,
            Some(Ttft(limit)) => by_work.min(duration((limit - compute).as_secs_f64() * config.slack_share)),
            None => by_work,
        }
    }

    /// Seconds that the plan costs everybody.
    fn cost(&self, plan: &PrefillPlan, decode: Option<&DecodeCandidate>) -> f64 {
        let compute = plan.compute.as_secs_f64();
        let exposed = decode.map_or(Duration::ZERO, |decode| decode.exposed(plan.compute));
        let own = (plan.finish() + exposed).as_secs_f64();
        let limit = plan.terms.deadline.map_or(f64::INFINITY, |limit| limit.as_secs_f64().max(1e-3));
        let own = own * (1.0 + self.config.tail_weight * own / limit);
        own + compute * (self.config.delay_weight * plan.passed as f64 + self.config.work_weight)
    }

    /// The cheaper plan of a node, and whether it is the fetch.
    fn best(&self, candidate: &PrefillCandidate, decode: Option<&DecodeCandidate>) -> (f64, bool) {
        let local = self.cost(&candidate.local, decode);
        let fetch = candidate.fetch.as_ref().map_or(f64::INFINITY, |plan| self.cost(plan, decode));
        if fetch < local { (fetch, true) } else { (local, false) }
    }
}

impl PlacementPolicy for Baton {
    fn choose(
        &mut self,
        prefill: &[PrefillCandidate],
        decode: &[DecodeCandidate],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let chosen_decode = lightest_decode(decode, rng);
        let target = chosen_decode.map(|index| &decode[index]);
        let costs: Vec<_> = prefill.iter().map(|candidate| self.best(candidate, target)).collect();
        let chosen = least(costs.iter().map(|(cost, _)| *cost), 0.0, rng).unwrap_or(0);
        Choice { prefill: chosen, fetch: costs[chosen].1, decode: chosen_decode }
    }

    fn terms(&self, request: &PlacementRequest<'_>, compute: Duration) -> QueueTerms {
        let (config, priority) = (&self.config, request.priority);
        if !config.reorders {
            return QueueTerms { priority, compute, ..QueueTerms::default() };
        }
        QueueTerms {
            priority,
            patience: self.patience(compute, request.slo),
            deadline: request.slo.ttft.map(|Ttft(limit)| limit),
            // Between counting requests and counting tokens.
            value: f64::from(request.prompt_tokens.max(1)).sqrt(),
            max_wait: config.max_wait,
            compute,
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
    use super::super::candidate::tests::{prefill, with_fetch};
    use super::*;

    fn choose(candidates: &[PrefillCandidate]) -> (usize, bool) {
        let choice = Baton::default().choose(candidates, &[], &mut || 0);
        (choice.prefill, choice.fetch)
    }

    #[test]
    fn fetches_only_where_that_is_faster() {
        assert_eq!(choose(&[with_fetch(prefill(0, 100, 0), 500, 10, 64)]), (0, false));
        assert_eq!(choose(&[with_fetch(prefill(0, 900, 0), 500, 10, 64)]), (0, true));
        assert_eq!(choose(&[with_fetch(prefill(600, 100, 0), 500, 10, 64)]), (0, true), "the queue hides it");
    }

    #[test]
    fn those_whom_a_newcomer_passes_count() {
        let mut passing = prefill(0, 1000, 0);
        passing.local.passed = 50;
        assert_eq!(choose(&[passing, prefill(3000, 1000, 0)]), (1, false));
    }

    #[test]
    fn patience_grows_with_the_work_up_to_its_bound() {
        let patience = |seconds| Baton::default().patience(Duration::from_secs(seconds), Slo::default()).as_secs();
        assert_eq!((patience(7), patience(1000)), (7, 30));
    }
}
