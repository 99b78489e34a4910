//! By quantiles, never at the cost of those admitted, and under overload what gives most for its
//! time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::{Slo, Tbt, Ttft};

use super::{AdmissionPolicy, Assessment, DecodeLoad, Excess};

/// Until a request in the admission queue is looked at again.
const HOLD: Duration = Duration::from_millis(250);
/// Arrivals that the demand is measured by.
const WINDOW: usize = 512;
/// And for how long: an hour without requests must not make the next burst look small.
const MEMORY: Duration = Duration::from_secs(120);
/// Fewer say nothing of the demand.
const ENOUGH: usize = 64;
/// Factor on the predicted step time if an objective of the time between tokens is at stake. The
/// mean of the longest tenth of gaps is above the predicted quantile, and admission fills a decode
/// node up to the limit. Without a margin half of what it admits is a few percent late (14 + 2
/// nodes at 3x: 50 % within objectives, 85 % with 1.05, 89 % with 1.15).
const TBT_MARGIN: f64 = 1.15;
/// The cluster counts as busy from this share on: of the objective that a prompt waits and computes
/// for, or of its longest wait. Chosen on the first halves of Mooncake's traces: at 1 as many are
/// served, and their first tokens come a third later.
const BUSY: f64 = 0.5;
/// Up to this share of its longest wait a request without an objective is never refused for its
/// cost: a short queue is no overload.
const QUIET: f64 = BUSY / 3.0;

/// Refuses what would be late by a high quantile of the prediction, and what would make others
/// late. If more work arrives than the prefill nodes can do, it also refuses the requests that give
/// least for a second of compute. A request queued at admission counts as demand each time that it
/// is looked at, also for the decode nodes. While the cluster is busy, a second spent on one
/// request is taken from others (a fractional knapsack, filled in the order of value by weight).
#[derive(Debug, Clone, Default)]
pub struct ValueDensity {
    arrivals: VecDeque<Arrival>,
    mean_tokens: f64,
}

#[derive(Debug, Clone, Copy)]
struct Arrival {
    at: Instant,
    seconds: f64,
    /// Value per second of compute.
    density: f64,
}

impl ValueDensity {
    fn value(&self, request: &Assessment) -> f64 {
        let share = f64::from(request.prompt_tokens) / self.mean_tokens.max(1.0);
        (0.5 + 0.5 * share) * f64::from(request.priority.clamp(-20, 20)).exp2()
    }

    fn observe(&mut self, request: &Assessment) -> f64 {
        let seconds = request.compute.as_secs_f64().max(1e-6);
        let tokens = f64::from(request.prompt_tokens);
        self.mean_tokens += (tokens - self.mean_tokens) / (self.arrivals.len() + 1).min(WINDOW) as f64;
        let density = self.value(request) / seconds;
        let old = |first: &Arrival| request.now.saturating_duration_since(first.at) > MEMORY;
        while self.arrivals.len() == WINDOW || self.arrivals.front().is_some_and(old) {
            self.arrivals.pop_front();
        }
        self.arrivals.push_back(Arrival { at: request.now, seconds, density });
        density
    }

    /// The least density that the nodes have time for, at the rate of the last arrivals.
    fn threshold(&self, request: &Assessment) -> f64 {
        let Some(first) = self.arrivals.front() else { return 0.0 };
        let span = request.now.saturating_duration_since(first.at).as_secs_f64();
        let mut room = span * request.prefill_nodes as f64;
        let mut arrivals: Vec<_> = self.arrivals.iter().map(|arrival| (arrival.density, arrival.seconds)).collect();
        arrivals.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        for (density, seconds) in arrivals {
            room -= seconds;
            if room < 0.0 {
                return density;
            }
        }
        0.0
    }
}

impl AdmissionPolicy for ValueDensity {
    fn name(&self) -> &'static str {
        "value-density"
    }

    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy> {
        Box::new(self.clone())
    }

    fn queue_for(&self, slo: Slo, ttft: Duration, excess: &Excess) -> Option<Duration> {
        let Ttft(limit) = slo.ttft?;
        let passes = matches!(
            excess,
            Excess::Tbt { .. } | Excess::KvBlocks { .. } | Excess::AdmittedTtft { .. } | Excess::AdmittedTbt { .. }
        );
        (passes && ttft + HOLD < limit).then_some(HOLD)
    }

    /// A sequence joins a batch between two steps, so the gap after its first token is one to two
    /// steps. If a step takes long, an answer of a few tokens misses its objective by that one gap.
    /// A step later the gap is none to one, as in a player's jitter buffer. Only if the objective
    /// of the time to first token leaves ten times as much.
    fn first_token_delay(&self, request: &Assessment) -> Duration {
        let (Some(Ttft(ttft)), Some(Tbt(tbt)), Some(load)) =
            (request.slo_left().ttft, request.slo.tbt, request.decode_expected)
        else {
            return Duration::ZERO;
        };
        let slack = ttft.saturating_sub(request.ttft_high);
        if load.tbt * 2 <= tbt { Duration::ZERO } else { load.tbt.min(tbt).min(slack / 10) }
    }

    fn admit(&mut self, request: &Assessment) -> Result<(), Excess> {
        let density = self.observe(request);
        request.check_ttft(request.ttft_high)?;
        request.check_admitted()?;
        if let Some(load) = request.decode_expected {
            // A sequence that is alone is taken whatever its objective leaves above a step.
            let margin = if load.others < 1.0 { 1.0 } else { TBT_MARGIN };
            DecodeLoad { tbt_high: load.tbt_high.mul_f64(margin), ..load }.check_high(request.slo)?;
        }
        // It is alone at its nodes, and takes nothing from others.
        if request.ahead.is_zero() && request.decode_expected.is_none_or(|load| load.others < 1.0) {
            return Ok(());
        }
        let quiet = if request.slo.ttft.is_none() { QUIET } else { 0.0 };
        let busy = ((request.prefill_load() - quiet) / (BUSY - quiet)).clamp(0.0, 1.0);
        let threshold = self.threshold(request) * busy;
        if busy == 0.0 || self.arrivals.len() < ENOUGH || density >= threshold {
            return Ok(());
        }
        let affordable = Duration::from_secs_f64(self.value(request) / threshold);
        Err(Excess::Work { compute: request.compute, affordable })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::assessment;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// So many prompts that each take a second arrive in a second, at 8 nodes. How many of 100
    /// longer ones of the same size are admitted then.
    fn taken(per_second: u32, priority: i32) -> usize {
        let mut policy = ValueDensity::default();
        let start = assessment().now;
        let busy = |n: u32| Assessment { now: start + n * SECOND / per_second, ttft: 20 * SECOND, ..assessment() };
        let _ = (0..512).filter(|n| policy.admit(&busy(*n)).is_ok()).count();
        let dear = |n: u32| Assessment { compute: 15 * SECOND, priority, ..busy(512 + n) };
        (0_u32..100).filter(|n| policy.admit(&dear(*n)).is_ok()).count()
    }

    #[test]
    fn value_density_refuses_most_work_for_its_value_under_overload() {
        assert_eq!(taken(4, 0), 100, "there is time for all");
        assert_eq!(taken(100, 0), 0);
        assert_eq!(taken(100, 10), 100, "priority is worth");
    }

    #[test]
    fn value_density_admits_a_lone_request_after_a_burst() {
        let mut policy = ValueDensity::default();
        let start = assessment().now;
        let busy = |n: u32| Assessment { now: start + n * SECOND / 100, ttft: 20 * SECOND, ..assessment() };
        let _ = (0..512).filter(|n| policy.admit(&busy(*n)).is_ok()).count();
        let dear = Assessment { compute: 15 * SECOND, ..busy(600) };
        assert!(policy.admit(&dear).is_err());
        let alone = Assessment { ahead: Duration::ZERO, decode_expected: None, ..dear };
        assert_eq!(policy.admit(&alone), Ok(()));
    }

    #[test]
    fn value_density_without_objective_admits_to_a_short_queue() {
        let mut policy = ValueDensity::default();
        let start = assessment().now;
        let busy = |n: u32| Assessment {
            now: start + n * SECOND / 100,
            slo: Slo::default(),
            max_wait: Some(30 * SECOND),
            ..assessment()
        };
        let dear = |ahead: Duration| Assessment { compute: 35 * SECOND, ahead, ..busy(512) };
        let _ = (0..512).filter(|n| policy.admit(&busy(*n)).is_ok()).count();
        assert_eq!(policy.admit(&dear(5 * SECOND)), Ok(()));
        assert!(matches!(policy.admit(&dear(10 * SECOND)), Err(Excess::Work { .. })));
    }

    #[test]
    fn value_density_queues_request_while_objective_leaves_time() {
        let policy = ValueDensity::default();
        let slo = assessment().slo;
        let room = Excess::KvBlocks { share: 1.1 };
        assert_eq!(policy.queue_for(slo, 10 * SECOND, &room), Some(HOLD));
        assert_eq!(policy.queue_for(slo, 30 * SECOND, &room), None);
        assert_eq!(policy.queue_for(Slo::default(), SECOND, &room), None, "nothing says how long");
        let objective = Ttft(30 * SECOND);
        let late = Excess::Ttft { estimate: Ttft(31 * SECOND), objective, left: objective };
        assert_eq!(policy.queue_for(slo, SECOND, &late), None);
    }

    #[test]
    fn value_density_keeps_tbt_margin_except_for_a_lone_sequence() {
        let taken = |tbt_high: Duration, others: f64| {
            let load = Some(DecodeLoad { tbt: tbt_high, tbt_high, kv_share: 0.5, others });
            ValueDensity::default().admit(&Assessment { decode_expected: load, ..assessment() }).is_ok()
        };
        let limit = SECOND / 10;
        assert!(taken(limit.mul_f64(0.86), 3.0) && !taken(limit.mul_f64(0.88), 3.0));
        assert!(taken(limit, 0.0) && !taken(limit.mul_f64(1.01), 0.0));
    }

    #[test]
    fn first_token_smoothing_is_used_only_if_the_next_gap_is_too_long() {
        let policy = ValueDensity::default();
        let with = |tbt: Duration| {
            let load = Some(DecodeLoad { tbt, tbt_high: tbt, kv_share: 0.5, others: 3.0 });
            policy.first_token_delay(&Assessment { decode_expected: load, ..assessment() })
        };
        assert_eq!((with(SECOND / 25), with(SECOND / 12)), (Duration::ZERO, SECOND / 12));
        assert_eq!(policy.first_token_delay(&Assessment { slo: Slo::default(), ..assessment() }), Duration::ZERO);
    }
}
