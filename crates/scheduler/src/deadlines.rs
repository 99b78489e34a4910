//! One deadline per request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use baton_types::RequestKey;

/// Deadlines in the order in which they fall due.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    by_time: BTreeSet<(Instant, RequestKey)>,
    by_key: BTreeMap<RequestKey, Instant>,
}

impl Deadlines {
    /// Sets a request's deadline in place of the one it has.
    pub(crate) fn set(&mut self, key: RequestKey, at: Instant) {
        self.clear(key);
        self.by_time.insert((at, key));
        self.by_key.insert(key, at);
    }

    pub(crate) fn clear(&mut self, key: RequestKey) {
        if let Some(at) = self.by_key.remove(&key) {
            self.by_time.remove(&(at, key));
        }
    }

    /// Whether a request has a deadline, and it has not come.
    pub(crate) fn is_after(&self, key: RequestKey, now: Instant) -> bool {
        self.by_key.get(&key).is_some_and(|at| *at > now)
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes out the first request whose deadline has come.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<RequestKey> {
        let (_, key) = *self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.clear(key);
        Some(key)
    }

    /// The requests that have one.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &RequestKey> {
        self.by_key.keys()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{Attempt, RequestId};

    use super::*;

    #[test]
    fn deadlines_are_one_per_request_and_fall_due_in_order() {
        let key = |n| RequestKey { request: RequestId(n), attempt: Attempt(0) };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut deadlines = Deadlines::default();
        deadlines.set(key(1), at(1));
        deadlines.set(key(2), at(2));
        deadlines.set(key(1), at(3));
        assert_eq!(deadlines.next(), Some(at(2)));
        assert_eq!(deadlines.pop_due(at(1)), None);
        assert_eq!(deadlines.pop_due(at(3)), Some(key(2)));
        deadlines.clear(key(1));
        assert_eq!((deadlines.pop_due(at(9)), deadlines.next()), (None, None));
    }
}
