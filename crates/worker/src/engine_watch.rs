//! Whether the engine gets on with its step. A driver that hangs and a kernel that never returns
//! look the same: nothing more is heard.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_scheduler::StepPlan;
use baton_types::RequestKey;

/// An engine is stalled after so many times the longest that it ever took from one mark to the
/// next, within these bounds.
const STALLED_FACTOR: u32 = 8;
const STALLED_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// What the engine's thread says of itself.
#[derive(Debug, Default)]
pub(crate) struct EngineProgress {
    in_step: AtomicBool,
    /// Layers, rows and steps that it was through with.
    marks: AtomicU64,
    /// Of the step.
    requests: Mutex<Vec<RequestKey>>,
}

impl EngineProgress {
    pub(crate) fn begin(&self, plan: &StepPlan) {
        let sequences = plan.sequences.iter().chain(plan.slice.as_ref().map(|slice| &slice.sequence));
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.clear();
        requests.extend(sequences.map(|sequence| sequence.key));
        drop(requests);
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
    /// A watch that looks every `interval`. `usual` is how long the engine takes from mark to mark,
    /// as far as it is known; after `timeout` without one it is dead.
    pub(crate) fn new(progress: Arc<EngineProgress>, interval: Duration, usual: Duration, timeout: Duration) -> Self {
        let looks = |time: Duration| time.div_duration_f64(interval).ceil() as u32;
        Self {
            progress,
            seen: 0,
            still: 0,
            longest: looks(usual),
            stalled_after: (looks(STALLED_AFTER.0), looks(STALLED_AFTER.1.max(timeout / 3))),
            dead_after: looks(timeout).max(1),
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
        let (least, most) = self.stalled_after;
        match self.still {
            still if still >= self.dead_after => Pulse::Dead,
            still if still >= self.longest.saturating_mul(STALLED_FACTOR).clamp(least, most) => Pulse::Stalled,
            _ => Pulse::Steady,
        }
    }

    /// Requests in its step.
    pub(crate) fn requests(&self) -> Vec<RequestKey> {
        self.progress.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use baton_scheduler::StepId;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(200);

    fn watch(usual: Duration) -> (Arc<EngineProgress>, EngineWatch) {
        let progress = Arc::new(EngineProgress::default());
        (Arc::clone(&progress), EngineWatch::new(progress, INTERVAL, usual, Duration::from_secs(30)))
    }

    /// Looks until it is stalled, and until it is dead.
    fn looks(watch: &mut EngineWatch) -> (u32, u32) {
        let pulses: Vec<_> = (0..1000).map(|_| watch.look()).collect();
        let first = |pulse| pulses.iter().position(|other| *other == pulse).unwrap() as u32 + 1;
        (first(Pulse::Stalled), first(Pulse::Dead))
    }

    #[test]
    fn engine_that_progresses_or_is_idle_is_not_stalled() {
        let (progress, mut watch) = watch(Duration::ZERO);
        assert!((0..1000).all(|_| watch.look() == Pulse::Steady), "it waits");
        progress.begin(&StepPlan { id: StepId(1), sequences: Vec::new(), slice: None });
        for _ in 0..1000 {
            progress.mark();
            assert_eq!(watch.look(), Pulse::Steady);
        }
        assert_eq!(looks(&mut watch), (10, 150), "2 s and 30 s");
        progress.mark();
        assert_eq!(watch.look(), Pulse::Steady, "it was slow");
        progress.end();
        assert!((0..1000).all(|_| watch.look() == Pulse::Steady));
    }

    #[test]
    fn engine_stall_limit_grows_with_its_usual_layer_time() {
        let (progress, mut watch) = watch(Duration::from_millis(600));
        progress.begin(&StepPlan { id: StepId(1), sequences: Vec::new(), slice: None });
        watch.look();
        assert_eq!(looks(&mut watch), (24, 150), "eight times the 0.6 s that its layers take");
        progress.mark();
        watch.look();
        assert_eq!(looks(&mut watch), (50, 150), "it was away for long, but 10 s are enough");
    }
}
