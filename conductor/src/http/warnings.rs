//! Warnings of what was left out of requests, in the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::HeaderName;

/// The header that tells a client what was left out of its request.
pub(super) const WARNING: HeaderName = HeaderName::from_static("x-baton-warning");

/// Shortest time between two lines: a client sends the same with each of its requests.
const INTERVAL: Duration = Duration::from_secs(1);

/// Logs warnings, and counts those that come too soon after another one.
#[derive(Debug, Default)]
pub(super) struct WarningLog(Mutex<Logged>);

#[derive(Debug, Default)]
struct Logged {
    last: Option<Instant>,
    unlogged: u64,
}

impl WarningLog {
    pub(super) fn log(&self, now: Instant, warning: &str) {
        if let Some(unlogged) = self.take(now) {
            tracing::warn!(warning, unlogged, "a request was served without what it has besides");
        }
    }

    /// How many were not logged since the last one that was; `None`: this one is not, either.
    fn take(&self, now: Instant) -> Option<u64> {
        // A panic leaves a wrong count at worst.
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            logged.unlogged += 1;
            return None;
        }
        logged.last = Some(now);
        Some(std::mem::take(&mut logged.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_logged_once_in_a_second() {
        let log = WarningLog::default();
        let start = baton_runtime::now();
        let at = |ms| log.take(start + Duration::from_millis(ms));
        assert_eq!([at(0), at(10), at(999), at(1000), at(3000)], [Some(0), None, None, Some(2), Some(0)]);
    }
}
