//! Whether the engine gets on with its step. A driver that hangs and a kernel that never returns
//! look the same: nothing more is heard.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_scheduler::{DecodeCost, PrefillCost, StepPlan};
use baton_types::{NodeInfo, RequestKey};

/// An engine is stalled after so many times the longest that it takes from one mark to the next, as
/// predicted or as seen, within these bounds.
const STALLED_FACTOR: u32 = 8;
const STALLED_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// Seconds from mark to mark, as the node was profiled at its start.
#[derive(Debug, Clone)]
pub(crate) struct LayerCost {
    prefill: PrefillCost,
    decode: DecodeCost,
    layers: f64,
}

impl LayerCost {
    /// Cost of a layer at this node.
    pub(crate) fn new(info: &NodeInfo) -> Self {
        let layers = f64::from(info.layout.num_layers.max(1));
        Self { prefill: PrefillCost::new(&info.profile), decode: DecodeCost::new(&info.profile), layers }
    }

    /// Time of a layer of a step, the larger of what its rows take as prompts and as sequences.
    fn layer(&self, rows: u32, attended: u64) -> Duration {
        let step = self.prefill.step(rows, attended).max(self.decode.step(rows, attended));
        Duration::try_from_secs_f64(step / self.layers).unwrap_or_default()
    }
}

/// The step that the engine is in.
#[derive(Debug, Default)]
struct StepInHand {
    requests: Vec<RequestKey>,
    rows: u32,
    attended: u64,
}

/// What the engine's thread says of itself.
#[derive(Debug, Default)]
pub(crate) struct EngineProgress {
    in_step: AtomicBool,
    /// Layers, rows and steps that it was through with.
    marks: AtomicU64,
    step: Mutex<StepInHand>,
}

impl EngineProgress {
    pub(crate) fn begin(&self, plan: &StepPlan) {
        let sequences = plan.sequences.iter().chain(plan.slice.as_ref().map(|slice| &slice.sequence));
        let mut step = self.step();
        *step = StepInHand::default();
        for sequence in sequences {
            step.requests.push(sequence.key);
            step.rows += sequence.range.len() as u32;
            step.attended += sequence.attended_tokens();
        }
        drop(step);
        self.mark();
        self.in_step.store(true, Ordering::Release);
    }

    /// The engine got a bit further.
    pub(crate) fn mark(&self) {
        self.marks.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn end(&self) {
        self.in_step.store(false, Ordering::Release);
    }

    fn step(&self) -> MutexGuard<'_, StepInHand> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How the engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pulse {
    /// It waits for steps, or gets on with one.
    Steady,
    /// It has made no progress for longer than usual.
    Stalled,
    /// It is taken never to make any.
    Dead,
}

/// Looks at the progress now and then. Time is counted in looks: if the process was stopped for a
/// while, the engine was, too.
pub(crate) struct EngineWatch {
    progress: Arc<EngineProgress>,
    cost: LayerCost,
    interval: Duration,
    /// Marks at the last look.
    seen: u64,
    /// Looks in a row without a new one.
    still: u32,
    /// The most that there were before a new one came.
    longest: u32,
    stalled_after: (u32, u32),
    dead_after: u32,
}

impl EngineWatch {
    /// A watch that looks every `interval`; after `timeout` without a mark the engine is dead.
    pub(crate) fn new(progress: Arc<EngineProgress>, interval: Duration, cost: LayerCost, timeout: Duration) -> Self {
        let most = STALLED_AFTER.1.max(timeout / 3);
        Self {
            progress,
            cost,
            interval,
            seen: 0,
            still: 0,
            longest: 0,
            stalled_after: (looks(STALLED_AFTER.0, interval), looks(most, interval)),
            dead_after: looks(timeout, interval).max(1),
        }
    }

    /// Looks once.
    pub(crate) fn look(&mut self) -> Pulse {
        let marks = self.progress.marks.load(Ordering::Acquire);
        if marks != self.seen || !self.progress.in_step.load(Ordering::Acquire) {
            self.seen = marks;
            self.longest = self.longest.max(std::mem::take(&mut self.still));
            return Pulse::Steady;
        }
        self.still += 1;
        match self.still {
            still if still >= self.dead_after => Pulse::Dead,
            still if still >= self.stalled_after.0 && still >= self.stall_limit() => Pulse::Stalled,
            _ => Pulse::Steady,
        }
    }

    /// Looks without a mark after which the engine is stalled in its step.
    fn stall_limit(&self) -> u32 {
        let (least, most) = self.stalled_after;
        let step = self.progress.step();
        let usual = looks(self.cost.layer(step.rows, step.attended), self.interval);
        usual.max(self.longest).saturating_mul(STALLED_FACTOR).clamp(least, most)
    }

    /// Requests in its step.
    pub(crate) fn requests(&self) -> Vec<RequestKey> {
        self.progress.step().requests.clone()
    }
}

/// Looks every `interval` that `time` has room for, rounded up.
fn looks(time: Duration, interval: Duration) -> u32 {
    time.div_duration_f64(interval).ceil() as u32
}

#[cfg(test)]
mod tests {
    use baton_scheduler::{LogitsWanted, StepId, StepSequence};
    use baton_types::{Attempt, NodeProfile, RequestId};

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(200);

    /// A watch at a node that takes 10 us for a pair of tokens in all its layers.
    fn watch(layers: u32) -> (Arc<EngineProgress>, EngineWatch) {
        let progress = Arc::new(EngineProgress::default());
        let measured = NodeProfile {
            prefill_base: 1e-6,
            prefill_per_token: 1e-6,
            prefill_per_token_pair: 1e-5,
            decode_base: 1e-6,
            decode_per_sequence: 1e-6,
            decode_per_kv_token: 1e-6,
            ..NodeProfile::default()
        };
        let cost = LayerCost {
            prefill: PrefillCost::new(&measured),
            decode: DecodeCost::new(&measured),
            layers: f64::from(layers),
        };
        (Arc::clone(&progress), EngineWatch::new(progress, INTERVAL, cost, Duration::from_secs(30)))
    }

    /// A step of 100 tokens of a prompt behind so many.
    fn step(before: usize) -> StepPlan {
        let sequence = StepSequence {
            key: RequestKey { request: RequestId(1), attempt: Attempt(0) },
            tokens: Arc::default(),
            prompt_tokens: 0,
            range: before..before + 100,
            block_table: Arc::default(),
            logits: LogitsWanted::Last,
            zero_tail: None,
            sampling: Arc::default(),
            is_last_chunk: false,
            awaits_prefix: false,
        };
        StepPlan { id: StepId(1), sequences: vec![sequence], slice: None }
    }

    /// Looks until it is stalled, and until it is dead.
    fn looks_until(watch: &mut EngineWatch) -> (u32, u32) {
        let pulses: Vec<_> = (0..1000).map(|_| watch.look()).collect();
        let first = |pulse| pulses.iter().position(|other| *other == pulse).unwrap() as u32 + 1;
        (first(Pulse::Stalled), first(Pulse::Dead))
    }

    #[test]
    fn engine_that_progresses_or_is_idle_is_not_stalled() {
        let (progress, mut watch) = watch(10);
        assert!((0..1000).all(|_| watch.look() == Pulse::Steady), "it waits");
        progress.begin(&step(0));
        for _ in 0..1000 {
            progress.mark();
            assert_eq!(watch.look(), Pulse::Steady);
        }
        assert_eq!(looks_until(&mut watch), (10, 150), "2 s and 30 s");
        progress.mark();
        assert_eq!(watch.look(), Pulse::Steady, "it was slow");
        progress.end();
        assert!((0..1000).all(|_| watch.look() == Pulse::Steady));
    }

    #[test]
    fn engine_stall_limit_grows_with_the_time_of_a_layer() {
        let (progress, mut watch) = watch(10);
        // 100 rows attend to 595,050 tokens, which is 5.95 s in ten layers.
        progress.begin(&step(5_900));
        watch.look();
        assert_eq!(looks_until(&mut watch), (24, 150), "eight times the 0.6 s that its layers take");
        progress.begin(&step(0));
        progress.mark();
        watch.look();
        assert_eq!(looks_until(&mut watch), (50, 150), "it was away for long, but 10 s are enough");
    }
}
