//! What operators are told of the requests served so far.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::ErrorKind;

use crate::error::GenerateError;
use crate::prediction_errors::PredictionErrors;

/// Goodput is of this time.
const GOODPUT_WINDOW: Duration = Duration::from_secs(60);
/// Requests that end within this time are counted together.
const GOODPUT_STEP: Duration = Duration::from_secs(1);

/// See the module's text. Everything in it is bounded.
#[derive(Debug)]
pub struct WindowStats {
    /// How good the predictions were.
    pub prediction_errors: PredictionErrors,
    /// What was taken in.
    pub admission: AdmissionStats,
    /// What was served within its objectives.
    pub goodput: Goodput,
}

/// Requests taken in, rejected and queued at admission since the start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdmissionStats {
    /// Taken in.
    pub admitted: u64,
    /// Refused for want of nodes, room or time.
    pub rejected: u64,
    /// Waited in the admission queue, whatever became of them then.
    pub queued: u64,
    /// The last one rejected of each kind, latest first.
    pub last_rejections: Vec<LastRejection>,
}

/// What the last client that was rejected was told.
#[derive(Debug, Clone, PartialEq)]
pub struct LastRejection {
    /// What to do about it.
    pub kind: ErrorKind,
    /// Refusals of this kind.
    pub count: u64,
    /// When.
    pub at: Instant,
    /// Why.
    pub message: String,
    /// When to come again.
    pub retry_after: Option<Duration>,
}

impl AdmissionStats {
    /// A request was admitted or rejected. A request with a wrong field counts as neither.
    pub fn on_admission<T>(&mut self, now: Instant, outcome: &Result<T, GenerateError>) {
        match outcome {
            Ok(_) => self.admitted += 1,
            Err(error) if matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::Unavailable) => {
                self.rejected += 1;
                let kind = error.kind();
                let earlier = self.last_rejections.iter().position(|rejection| rejection.kind == kind);
                let count = 1 + earlier.map_or(0, |index| self.last_rejections.remove(index).count);
                let message = error.to_string();
                let retry_after = error.retry_after();
                self.last_rejections.insert(0, LastRejection { kind, count, at: now, message, retry_after });
            }
            Err(_) => {}
        }
    }
}

/// Requests of the last minute that ended, and those of them that were within their objectives.
#[derive(Debug)]
pub struct Goodput {
    started: Instant,
    /// A second each, the last one last.
    steps: VecDeque<(Instant, GoodputCount)>,
}

/// Requests that ended in some time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GoodputCount {
    /// Taken in, and finished or failed.
    pub ended: u64,
    /// Finished within their objectives; those without any are within them.
    pub within: u64,
    /// Given up by their clients: neither met nor missed, and not among those that ended.
    pub aborted: u64,
}

/// What the end of a request says of its objectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectiveOutcome {
    /// It finished within them.
    Met,
    /// It finished later, or failed.
    Missed,
    /// Its client gave it up: not known.
    Unknown,
}

impl Goodput {
    fn new(started: Instant) -> Self {
        Self { started, steps: VecDeque::new() }
    }

    /// A request that was taken in ended.
    pub fn on_end(&mut self, now: Instant, kept: ObjectiveOutcome) {
        while self.steps.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > GOODPUT_WINDOW) {
            self.steps.pop_front();
        }
        let current = self.steps.back().filter(|(at, _)| now.saturating_duration_since(*at) < GOODPUT_STEP);
        if current.is_none() {
            self.steps.push_back((now, GoodputCount::default()));
        }
        if let Some((_, count)) = self.steps.back_mut() {
            match kept {
                ObjectiveOutcome::Unknown => count.aborted += 1,
                kept => {
                    count.ended += 1;
                    count.within += u64::from(kept == ObjectiveOutcome::Met);
                }
            }
        }
    }

    /// Counts of the window, and how long it is: shorter than a minute after the start.
    pub fn window(&self, now: Instant) -> (GoodputCount, Duration) {
        let recent = self.steps.iter().filter(|(at, _)| now.saturating_duration_since(*at) <= GOODPUT_WINDOW);
        let sum = recent.fold(GoodputCount::default(), |sum, (_, count)| GoodputCount {
            ended: sum.ended + count.ended,
            within: sum.within + count.within,
            aborted: sum.aborted + count.aborted,
        });
        (sum, now.saturating_duration_since(self.started).clamp(GOODPUT_STEP, GOODPUT_WINDOW))
    }
}

/// Statistics that requests share.
pub struct SharedWindowStats(Mutex<WindowStats>);

impl SharedWindowStats {
    /// Of a conductor that starts now.
    pub fn new(now: Instant) -> Self {
        let prediction_errors = PredictionErrors::default();
        let admission = AdmissionStats::default();
        Self(Mutex::new(WindowStats { prediction_errors, admission, goodput: Goodput::new(now) }))
    }

    /// Never held across an await.
    pub fn lock(&self) -> MutexGuard<'_, WindowStats> {
        // Every critical section leaves the counts whole, so a panic elsewhere does not spoil them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use baton_scheduler::RequestError;

    use super::*;

    #[test]
    fn goodput_window_is_the_last_minute_and_bounded() {
        let start = Instant::now();
        let mut goodput = Goodput::new(start);
        for tenth in 0..10_000_u32 {
            let kept = [
                ObjectiveOutcome::Missed,
                ObjectiveOutcome::Met,
                ObjectiveOutcome::Met,
                ObjectiveOutcome::Met,
                ObjectiveOutcome::Unknown,
            ][tenth as usize % 5];
            goodput.on_end(start + tenth * Duration::from_millis(100), kept);
        }
        assert!(goodput.steps.len() <= 62, "{}", goodput.steps.len());
        let (count, window) = goodput.window(start + Duration::from_secs(1000));
        assert_eq!((count.ended, count.within, count.aborted, window), (480, 360, 120, GOODPUT_WINDOW));
        assert_eq!(goodput.window(start + Duration::from_secs(2000)).0, GoodputCount::default());
        let young = Goodput::new(start).window(start + Duration::from_secs(5)).1;
        assert_eq!(young, Duration::from_secs(5));
    }

    #[test]
    fn invalid_request_is_not_counted_as_admission_refusal() {
        let now = Instant::now();
        let mut window_stats = AdmissionStats::default();
        window_stats.on_admission(now, &Ok(()));
        window_stats.on_admission::<()>(now, &Err(GenerateError::invalid("seed", "no")));
        window_stats.on_admission::<()>(now, &Err(RequestError::GoingDown.into()));
        assert_eq!((window_stats.admitted, window_stats.rejected), (1, 1));
        assert_eq!(window_stats.last_rejections[0].message, "this conductor is going down");
        let full = GenerateError::Frontend { kind: ErrorKind::Overloaded, message: "full".into(), retry_after: None };
        window_stats.on_admission::<()>(now, &Err(full));
        window_stats.on_admission::<()>(now, &Err(RequestError::GoingDown.into()));
        let told = window_stats.last_rejections.iter().map(|rejection| (rejection.kind, rejection.count));
        assert_eq!(told.collect::<Vec<_>>(), [(ErrorKind::Unavailable, 2), (ErrorKind::Overloaded, 1)]);
    }
}
