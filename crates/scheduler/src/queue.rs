//! The order in a prefill node's queue, and what it costs those who wait in it.
//!
//! A prompt comes with its **patience**: how long after it others may still arrive and pass it. Prompts go by priority, then by *due* time, which is arrival plus the
//! patience that is left; what is computed already takes its share of the patience away, so that a prompt that is nearly done is not put off for a new one. With no patience at all this is first
//! come, first served; with patience in proportion to the work it is close to shortest remaining first.
//!
//! Where some must miss their deadline, the order is by deadline, and those that give least for their time are put off until the others are served, so that few are late and not all (Moore and
//! Hodgson's algorithm, Management Science 15, 1968, with the work weighted by value). Nobody is put off, or passed, for longer than **`max_overtaken`**.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use baton_types::QueueTerms;

use crate::cost::duration;

/// A prompt in a queue.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueItem {
    /// Its terms.
    pub terms: QueueTerms,
    /// When it arrived.
    pub arrived: Instant,
    /// Ascending with the arrivals.
    pub turn: u64,
    /// Part of its work, 0 to 1, that is still to do.
    pub left: f64,
}

impl QueueItem {
    /// Seconds of its work that are still to do.
    pub(crate) fn seconds(&self) -> f64 {
        self.terms.compute.as_secs_f64() * self.left
    }

    fn due(&self) -> Instant {
        let patience = self.terms.patience.min(self.terms.max_overtaken).as_secs_f64();
        self.arrived + duration(patience * self.left.clamp(0.0, 1.0))
    }

    fn deadline(&self) -> Option<Instant> {
        self.terms.deadline.and_then(|deadline| self.arrived.checked_add(deadline))
    }

    /// Whether it has waited for as long as it may be put off.
    fn is_overdue(&self, now: Instant) -> bool {
        !self.terms.max_overtaken.is_zero() && now >= self.arrived + self.terms.max_overtaken
    }
}

/// A prompt's place in a queue: the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueRank {
    put_off: bool,
    /// Who has waited for as long as it may goes before any priority.
    within_bound: bool,
    priority: Reverse<i32>,
    due: Instant,
    turn: u64,
}

/// How a queue is ordered at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Order {
    /// By due time: everybody is served in time.
    #[default]
    Due,
    /// By deadline: the queue is too long for the order by due time.
    Deadline,
}

impl Order {
    pub(crate) fn rank(self, now: Instant, item: &QueueItem, put_off: bool) -> QueueRank {
        let overdue = item.is_overdue(now);
        let priority = Reverse(if overdue { i32::MAX } else { item.terms.priority });
        let due = match (self, item.deadline()) {
            _ if overdue => item.arrived,
            (Self::Deadline, Some(deadline)) => deadline,
            // Where some are late, whoever has no deadline goes after those who have.
            (Self::Deadline, None) => item.arrived + item.terms.max_overtaken,
            (Self::Due, _) => item.due(),
        };
        QueueRank { put_off, within_bound: !overdue, priority, due, turn: item.turn }
    }
}

/// The order of a queue at `now`: each item's rank, and whether it is by deadline.
pub(crate) fn rank_all(now: Instant, items: &[QueueItem]) -> (Vec<QueueRank>, Order) {
    let ranks = |order: Order, put_off: &[bool]| -> Vec<_> {
        items.iter().zip(put_off).map(|(item, put_off)| order.rank(now, item, *put_off)).collect()
    };
    let mut put_off = vec![false; items.len()];
    let by_due = ranks(Order::Due, &put_off);
    if all_in_time(now, items, &by_due) {
        return (by_due, Order::Due);
    }
    let by_deadline = ranks(Order::Deadline, &put_off);
    for index in too_late(now, items, &by_deadline) {
        put_off[index] = true;
    }
    let by_due = ranks(Order::Due, &put_off);
    if all_in_time(now, items, &by_due) {
        return (by_due, Order::Due);
    }
    (ranks(Order::Deadline, &put_off), Order::Deadline)
}

pub(crate) fn sorted(ranks: &[QueueRank]) -> Vec<usize> {
    let mut order: Vec<_> = (0..ranks.len()).collect();
    order.sort_unstable_by_key(|index| ranks[*index]);
    order
}

/// Whether everybody who is not put off is computed before the deadline.
fn all_in_time(now: Instant, items: &[QueueItem], ranks: &[QueueRank]) -> bool {
    let mut seconds = 0.0;
    sorted(ranks).into_iter().filter(|index| !ranks[*index].put_off).all(|index| {
        seconds += items[index].seconds();
        items[index].deadline().is_none_or(|deadline| seconds <= left_until(now, deadline))
    })
}

pub(crate) fn left_until(now: Instant, deadline: Instant) -> f64 {
    deadline.saturating_duration_since(now).as_secs_f64()
}

/// Whom to put off so that all others are in time: by deadline, and when somebody would be late, the one so far with the least priority that takes most time for its value. Whoever
/// could not be in time with nobody put off before it goes itself.
fn too_late(now: Instant, items: &[QueueItem], ranks: &[QueueRank]) -> Vec<usize> {
    // Seconds in all, and of those who are never put off.
    let (mut seconds, mut fixed) = (0.0, 0.0);
    let mut taken = BinaryHeap::new();
    let mut late = Vec::new();
    for index in sorted(ranks) {
        let item = &items[index];
        let Some(deadline) = item.deadline().filter(|_| !item.is_overdue(now)) else {
            fixed += item.seconds();
            seconds += item.seconds();
            continue;
        };
        if fixed + item.seconds() > left_until(now, deadline) {
            late.push(index);
            continue;
        }
        seconds += item.seconds();
        let density = Density(item.seconds() / item.terms.value.max(1e-9));
        taken.push((Reverse(item.terms.priority), density, index));
        while seconds > left_until(now, deadline)
            && let Some((.., worst)) = taken.pop()
        {
            seconds -= items[worst].seconds();
            late.push(worst);
            if worst == index {
                break;
            }
        }
    }
    late
}

/// Seconds for a unit of value, in total order.
#[derive(Debug, Clone, Copy)]
struct Density(f64);

impl PartialEq for Density {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Density {}

impl PartialOrd for Density {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Density {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Indices of the items, those that go first first.
pub fn queue_order(now: Instant, items: &[QueueItem]) -> Vec<usize> {
    sorted(&rank_all(now, items).0)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Of a prompt that takes so many seconds, and lets others pass for so many.
    pub(crate) fn terms(patience: u64, seconds: f64) -> QueueTerms {
        QueueTerms {
            patience: Duration::from_secs(patience),
            value: 1.0,
            max_overtaken: 300 * SECOND,
            compute: Duration::from_secs_f64(seconds),
            ..QueueTerms::default()
        }
    }

    fn item(arrived: Instant, turn: u64, deadline: u64, seconds: f64) -> QueueItem {
        let terms = QueueTerms { deadline: Some(Duration::from_secs(deadline)), ..terms(0, seconds) };
        QueueItem { terms, arrived, turn, left: 1.0 }
    }

    #[test]
    fn few_are_late_and_not_all() {
        let now = Instant::now();
        // In the order of arrival the long one makes all others late.
        let items = [item(now, 0, 30, 29.0), item(now, 1, 30, 9.0), item(now, 2, 30, 9.0), item(now, 3, 30, 9.0)];
        assert_eq!(queue_order(now, &items), [1, 2, 3, 0]);
        assert_eq!(queue_order(now, &items[..1]), [0]);
        let mut worth = items;
        worth[0].terms.value = 100.0;
        assert_eq!(queue_order(now, &worth), [0, 1, 2, 3], "it is worth more than the others together");
        // 20 s later the first of two is late in any case.
        let late = [item(now, 0, 30, 15.0), item(now + 10 * SECOND, 1, 30, 15.0)];
        assert_eq!(queue_order(now + 20 * SECOND, &late), [1, 0]);
        assert_eq!(queue_order(now + 301 * SECOND, &late), [0, 1], "put off for long enough");
    }

    #[test]
    fn who_cannot_be_saved_costs_nobody_else_its_place() {
        let now = Instant::now();
        let later = now + 20 * SECOND;
        let hopeless = item(now, 0, 20, 5.0);
        let items = [hopeless, item(now, 1, 40, 9.0), item(now, 2, 40, 9.0)];
        assert_eq!(queue_order(later, &items), [1, 2, 0]);
        let mut first = [item(now, 0, 30, 20.0), item(now, 1, 30, 9.0), item(now, 2, 30, 9.0)];
        first[0].terms.priority = 1;
        assert_eq!(queue_order(now, &first), [0, 1, 2], "the least of the others goes, and not the one with priority");
    }

    #[test]
    fn where_all_are_in_time_by_deadline_nobody_is_put_off() {
        let now = Instant::now();
        let items = [item(now, 0, 40, 20.0), item(now, 1, 15, 14.0)];
        assert_eq!(queue_order(now, &items), [1, 0]);
    }

    proptest! {
        /// Whatever they are worth and whenever they are due: nobody who arrives after another's bound goes before it.
        #[test]
        fn nobody_waits_beyond_its_bound(
            prompts in prop::collection::vec((0u64..20, 0u64..60, 0.1f64..30.0, 0u8..101, 0u64..40, 0.0f64..5.0), 1..30),
            priorities in prop::collection::vec(-1i32..2, 30),
            wait in 0u64..200,
        ) {
            let start = Instant::now();
            let mut at = start;
            let numbered = prompts.iter().zip(&priorities).zip(0..);
            let items: Vec<_> = numbered.map(|(((gap, patience, seconds, left, deadline, value), priority), turn)| {
                at += Duration::from_secs(*gap);
                let deadline = (*deadline > 0).then(|| Duration::from_secs(*deadline));
                let max_overtaken = 60 * SECOND;
                let terms = QueueTerms { priority: *priority, deadline, value: *value, max_overtaken, ..terms(*patience, *seconds) };
                QueueItem { terms, arrived: at, turn, left: f64::from(*left) / 100.0 }
            }).collect();
            let now = at + Duration::from_secs(wait);
            let order = queue_order(now, &items);
            let mut seen = order.clone();
            seen.sort_unstable();
            prop_assert!(seen.iter().copied().eq(0..items.len()), "everybody has one place");
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
