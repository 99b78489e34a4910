//! The order in a prefill node's queue, and what it costs those who wait in it.
//!
//! A prompt comes with its **patience**: how long after it others may still arrive and pass it.
//! Prompts go by priority, then by *due* time, which is arrival plus the patience that is left.
//! What is computed already takes its share of the patience away, so a prompt that is nearly done
//! is not put off for a new one. With no patience at all this is first come, first served; with
//! patience in proportion to the work it is close to shortest remaining first.
//!
//! What has waited for **`max_overtaken`** is passed by nothing that arrives later.
//!
//! Requests that admission took in are not put off for others that are worth more: under overload
//! that made more of them late than it saved (docs/design/0007).

use std::cmp::Reverse;
use std::time::Instant;

use baton_types::QueueOrdering;

use crate::cost::duration;

/// A prompt in a queue.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueItem {
    /// Its terms.
    pub terms: QueueOrdering,
    /// When it arrived.
    pub arrived: Instant,
    /// Ascending with the arrivals.
    pub turn: u64,
    /// Part of its work, 0 to 1, that is still to do.
    pub left: f64,
}

impl QueueItem {
    fn due(&self) -> Instant {
        let patience = self.terms.patience.min(self.terms.max_overtaken).as_secs_f64();
        self.arrived + duration(patience * self.left.clamp(0.0, 1.0))
    }

    /// Whether it has waited for as long as it may be put off.
    fn is_overdue(&self, now: Instant) -> bool {
        !self.terms.max_overtaken.is_zero() && now >= self.arrived + self.terms.max_overtaken
    }
}

/// A prompt's place in a queue: the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueRank {
    /// What has waited for as long as it may goes before any priority.
    within_bound: bool,
    priority: Reverse<i32>,
    due: Instant,
    turn: u64,
}

impl QueueRank {
    pub(crate) fn of(now: Instant, item: &QueueItem) -> Self {
        let overdue = item.is_overdue(now);
        let priority = Reverse(if overdue { i32::MAX } else { item.terms.priority });
        let due = if overdue { item.arrived } else { item.due() };
        Self { within_bound: !overdue, priority, due, turn: item.turn }
    }
}

pub(crate) fn left_until(now: Instant, deadline: Instant) -> f64 {
    deadline.saturating_duration_since(now).as_secs_f64()
}

/// Indices of the items, those that go first first.
pub fn queue_order(now: Instant, items: &[QueueItem]) -> Vec<usize> {
    let mut order: Vec<_> = (0..items.len()).collect();
    order.sort_unstable_by_key(|index| QueueRank::of(now, &items[*index]));
    order
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Of a prompt that takes so many seconds, and lets others pass for so many.
    pub(crate) fn terms(patience: u64, seconds: f64) -> QueueOrdering {
        QueueOrdering {
            patience: Duration::from_secs(patience),
            max_overtaken: 300 * SECOND,
            compute: Duration::from_secs_f64(seconds),
            ..QueueOrdering::default()
        }
    }

    proptest! {
        /// Whenever they are due: no later arrival goes before a request whose bound has passed.
        #[test]
        fn prefill_queue_overtakes_no_request_past_its_bound(
            prompts in prop::collection::vec((0u64..20, 0u64..60, 0.1f64..30.0, 0u8..101), 1..30),
            priorities in prop::collection::vec(-1i32..2, 30),
            wait in 0u64..200,
        ) {
            let start = Instant::now();
            let mut at = start;
            let numbered = prompts.iter().zip(&priorities).zip(0..);
            let items: Vec<_> = numbered.map(|(((gap, patience, seconds, left), priority), turn)| {
                at += Duration::from_secs(*gap);
                let max_overtaken = 60 * SECOND;
                let terms = QueueOrdering { priority: *priority, max_overtaken, ..terms(*patience, *seconds) };
                QueueItem { terms, arrived: at, turn, left: f64::from(*left) / 100.0 }
            }).collect();
            let now = at + Duration::from_secs(wait);
            let order = queue_order(now, &items);
            let mut seen = order.clone();
            seen.sort_unstable();
            prop_assert!(seen.iter().copied().eq(0..items.len()), "each has one place");
            let place = |index: usize| order.iter().position(|other| *other == index);
            for (index, item) in items.iter().enumerate() {
                for (other, later) in items.iter().enumerate() {
                    let bound = item.arrived + item.terms.max_overtaken;
                    if now >= bound && later.arrived > bound {
                        prop_assert!(place(index) < place(other));
                    }
                }
            }
        }
    }
}
