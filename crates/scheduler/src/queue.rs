//! The order in a prefill node's queue, and what it costs those who wait in it.
//!
//! A prompt comes with its **patience**: how long after it others may still arrive and pass it. Prompts go by priority, then by *due* time, which is arrival plus the
//! patience that is left; what is computed already takes its share of the patience away, so that a prompt that is nearly done is not put off for a new one. With no patience at all this is first
//! come, first served; with patience in proportion to the work it is close to shortest remaining first.
//!
//! Where some must miss their deadline, the order is by deadline, and those that give least for their time are put off until the others are served, so that few are late and not all (Moore and
//! Hodgson's algorithm, Management Science 15, 1968, with the work weighted by value). Nobody is put off, or passed, for longer than **`max_wait`**.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use baton_types::{QueueTerms, RequestKey};

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
    fn seconds(&self) -> f64 {
        self.terms.compute.as_secs_f64() * self.left
    }

    fn due(&self) -> Instant {
        let patience = self.terms.patience.min(self.terms.max_wait).as_secs_f64();
        self.arrived + duration(patience * self.left.clamp(0.0, 1.0))
    }

    fn deadline(&self) -> Option<Instant> {
        self.terms.deadline.and_then(|deadline| self.arrived.checked_add(deadline))
    }

    /// Whether it has waited for as long as it may be put off.
    fn is_overdue(&self, now: Instant) -> bool {
        !self.terms.max_wait.is_zero() && now >= self.arrived + self.terms.max_wait
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
enum Order {
    /// By due time: everybody is served in time.
    #[default]
    Due,
    /// By deadline: the queue is too long for the order by due time.
    Deadline,
}

impl Order {
    fn rank(self, now: Instant, item: &QueueItem, put_off: bool) -> QueueRank {
        let overdue = item.is_overdue(now);
        let priority = Reverse(if overdue { i32::MAX } else { item.terms.priority });
        let due = match (self, item.deadline()) {
            _ if overdue => item.arrived,
            (Self::Deadline, Some(deadline)) => deadline,
            // Where some are late, whoever has no deadline goes after those who have.
            (Self::Deadline, None) => item.arrived + item.terms.max_wait,
            (Self::Due, _) => item.due(),
        };
        QueueRank { put_off, within_bound: !overdue, priority, due, turn: item.turn }
    }
}

/// The order of a queue at `now`: each item's rank, and whether it is by deadline.
fn rank_all(now: Instant, items: &[QueueItem]) -> (Vec<QueueRank>, Order) {
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

fn sorted(ranks: &[QueueRank]) -> Vec<usize> {
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

fn left_until(now: Instant, deadline: Instant) -> f64 {
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

/// A prompt that a node was given and has not computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueuedPrompt {
    pub key: RequestKey,
    pub arrived: Instant,
    pub terms: QueueTerms,
    /// Tokens to compute, at least one.
    pub tokens: u32,
    /// When it is late, whether or not the queue's order minds.
    pub deadline: Option<Instant>,
}

/// A prompt, and its number among those of the node.
#[derive(Debug, Clone, Copy)]
struct Entry {
    prompt: QueuedPrompt,
    turn: u64,
}

/// Where a prompt stands. Apart from the rest of it and small: each placement reads those of every node.
#[derive(Debug, Clone, Copy)]
struct Place {
    rank: QueueRank,
    /// Seconds of it still to compute.
    left: f64,
    /// Index of its entry.
    entry: usize,
}

/// What a node still has to compute, as far as it can be told from outside: in the node's own order, the first of them shrinking as time passes.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// By rank.
    places: Vec<Place>,
    /// In no order.
    entries: Vec<Entry>,
    order: Order,
    settled: Option<Instant>,
    turns: u64,
    /// Sum of what is left, when it was settled.
    total: f64,
}

/// What a newcomer would find, and do, in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct QueueImpact {
    /// Seconds of work that goes before it.
    pub ahead: f64,
    /// Prompts that it goes before.
    pub passed: usize,
    /// Prompts that would miss their deadline because of it and would have met it without.
    pub broken: usize,
}

impl Backlog {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn add(&mut self, now: Instant, prompt: QueuedPrompt) {
        self.settle(now);
        self.turns += 1;
        let left = prompt.terms.compute.as_secs_f64();
        let item = QueueItem { terms: prompt.terms, arrived: prompt.arrived, turn: self.turns, left: 1.0 };
        let rank = self.order.rank(now, &item, false);
        self.places.push(Place { rank, left, entry: self.entries.len() });
        self.entries.push(Entry { prompt, turn: self.turns });
        self.sort(now);
    }

    /// The prompt is computed, or will not be.
    pub(crate) fn remove(&mut self, now: Instant, key: RequestKey) {
        let Some(index) = self.entries.iter().position(|entry| entry.prompt.key == key) else { return };
        self.settle(now);
        self.entries.swap_remove(index);
        self.places.retain(|place| place.entry != index);
        let moved = self.entries.len();
        if let Some(place) = self.places.iter_mut().find(|place| place.entry == moved) {
            place.entry = index;
        }
        self.sort(now);
    }

    /// The node says how many tokens it has still to compute. Prompts given to it after `known_until` it may not know yet.
    pub(crate) fn correct(&mut self, now: Instant, queued_tokens: u64, known_until: Instant) {
        self.settle(now);
        let entries = &self.entries;
        let prompt = |place: &Place| &entries[place.entry].prompt;
        let left_tokens = |place: &Place| f64::from(prompt(place).tokens) * left_share(place.left, prompt(place));
        let known = |place: &&mut Place| prompt(place).arrived <= known_until;
        let expected: f64 = self.places.iter_mut().filter(known).map(|place| left_tokens(place)).sum();
        let mut surplus = expected - queued_tokens as f64;
        for place in self.places.iter_mut().filter(known) {
            // What was counted as done too early comes back to the prompts that it was taken from.
            let (left, all) = (left_tokens(place), f64::from(prompt(place).tokens));
            let change = surplus.clamp(left - all, left);
            place.left -= change * prompt(place).terms.compute.as_secs_f64() / all;
            surplus -= change;
        }
        self.sort(now);
    }

    /// Seconds of work in all.
    pub(crate) fn total(&self, now: Instant) -> f64 {
        self.total - self.spent(now).min(self.total)
    }

    /// Seconds of work that would go before a prompt on these terms, and how many it would go before, if the others kept their order. Where the node computes, it waits at least for `chunk`
    /// seconds: a chunk is not interrupted.
    pub(crate) fn impact(&self, now: Instant, terms: QueueTerms, chunk: f64) -> (f64, usize) {
        let item = QueueItem { terms, arrived: now, turn: u64::MAX, left: 1.0 };
        let rank = self.order.rank(now, &item, false);
        let before = self.places.partition_point(|place| place.rank < rank);
        let ahead = self.left_at(now).take(before).sum::<f64>();
        (ahead.max(chunk.min(self.total(now))), self.places.len() - before)
    }

    /// What it would find and do where the order becomes another one with it, in which it or others are put off. Takes longer to find out.
    pub(crate) fn impact_reordered(&self, now: Instant, terms: QueueTerms, chunk: f64) -> QueueImpact {
        let left: Vec<_> = self.left_at(now).collect();
        let mut items: Vec<_> = self.places.iter().zip(&left).map(|(place, left)| self.item(place, *left)).collect();
        items.push(QueueItem { terms, arrived: now, turn: u64::MAX, left: 1.0 });
        let newcomer = self.places.len();
        let (ranks, _) = rank_all(now, &items);
        let mut ends = Vec::with_capacity(newcomer);
        let mut elapsed = 0.0;
        for left in &left {
            elapsed += left;
            ends.push(elapsed);
        }
        let mut impact = QueueImpact::default();
        let (all, mut elapsed, mut after) = (elapsed, 0.0, false);
        for index in sorted(&ranks) {
            if index == newcomer {
                (impact.ahead, after) = (elapsed, true);
            } else {
                impact.passed += usize::from(after);
            }
            elapsed += items[index].seconds();
            let Some(place) = self.places.get(index) else { continue };
            let deadline = self.entries[place.entry].prompt.deadline;
            let slack = deadline.map_or(f64::INFINITY, |deadline| left_until(now, deadline));
            impact.broken += usize::from(ends[index] <= slack && elapsed > slack);
        }
        impact.ahead = impact.ahead.max(chunk.min(all));
        impact
    }

    /// Seconds that are left of each by now, by rank.
    fn left_at(&self, now: Instant) -> impl Iterator<Item = f64> {
        let mut unspent = self.spent(now);
        self.places.iter().map(move |place| {
            let left = (place.left - unspent).max(0.0);
            unspent = (unspent - place.left).max(0.0);
            left
        })
    }

    fn item(&self, place: &Place, left: f64) -> QueueItem {
        let Entry { prompt, turn } = self.entries[place.entry];
        QueueItem { terms: prompt.terms, arrived: prompt.arrived, turn, left: left_share(left, &prompt) }
    }

    /// Seconds that passed since the books were brought up to date.
    fn spent(&self, now: Instant) -> f64 {
        self.settled.map_or(0.0, |settled| now.saturating_duration_since(settled).as_secs_f64())
    }

    /// Takes the time that passed off the first prompts.
    fn settle(&mut self, now: Instant) {
        let mut spent = self.spent(now);
        self.settled = Some(now);
        for place in &mut self.places {
            let done = spent.min(place.left);
            place.left -= done;
            spent -= done;
            if spent <= 0.0 {
                break;
            }
        }
    }

    fn sort(&mut self, now: Instant) {
        let items: Vec<_> = self.places.iter().map(|place| self.item(place, place.left)).collect();
        let (ranks, order) = rank_all(now, &items);
        for (place, rank) in self.places.iter_mut().zip(ranks) {
            place.rank = rank;
        }
        self.order = order;
        self.places.sort_unstable_by_key(|place| place.rank);
        self.total = self.places.iter().map(|place| place.left).sum();
    }
}

/// Part of a prompt's work that so many seconds are.
fn left_share(left: f64, prompt: &QueuedPrompt) -> f64 {
    let seconds = prompt.terms.compute.as_secs_f64();
    if seconds > 0.0 { left / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{Attempt, RequestId};
    use proptest::prelude::*;

    use super::*;

    fn key(n: u128) -> RequestKey {
        RequestKey { request: RequestId(n), attempt: Attempt(0) }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn terms(patience: u64, seconds: f64) -> QueueTerms {
        QueueTerms {
            patience: Duration::from_secs(patience),
            value: 1.0,
            max_wait: 300 * SECOND,
            compute: Duration::from_secs_f64(seconds),
            ..QueueTerms::default()
        }
    }

    fn prompt(n: u128, arrived: Instant, patience: u64, seconds: f64) -> QueuedPrompt {
        QueuedPrompt { key: key(n), arrived, terms: terms(patience, seconds), tokens: 1000, deadline: None }
    }

    #[test]
    fn the_queue_shrinks_with_time_and_with_first_tokens() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        assert_eq!(backlog.total(start), 0.0);
        backlog.add(start, prompt(1, start, 0, 4.0));
        backlog.add(start + SECOND, prompt(2, start + SECOND, 0, 2.0));
        assert_eq!(backlog.total(start + SECOND), 5.0);
        assert_eq!(backlog.impact(start + SECOND, terms(0, 1.0), 0.0).0, 5.0);
        assert_eq!(backlog.total(start + 60 * SECOND), 0.0, "both should be done");
        backlog.remove(start + 4 * SECOND, key(1));
        backlog.remove(start + 5 * SECOND, key(1));
        assert_eq!(backlog.total(start + 5 * SECOND), 1.0);
        backlog.remove(start + 5 * SECOND, key(2));
        assert_eq!((backlog.len(), backlog.total(start)), (0, 0.0));
    }

    #[test]
    fn patience_lets_others_pass_until_it_is_used_up() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        backlog.add(start, prompt(1, start, 10, 8.0));
        let short = |backlog: &Backlog, chunk| backlog.impact(start, terms(1, 1.0), chunk);
        assert_eq!(short(&backlog, 0.0), (0.0, 1));
        assert_eq!(short(&backlog, 0.5).0, 0.5, "the chunk that is being computed");
        // After 6 of its 8 seconds a quarter of its patience is left: it is due at 2.5 s, the newcomer at 7 s.
        backlog.add(start + 6 * SECOND, prompt(2, start + 6 * SECOND, 1, 1.0));
        let impact = backlog.impact(start + 6 * SECOND, terms(0, 1.0), 0.0);
        assert_eq!(impact, (2.0, 1), "a third without patience goes between them");
    }

    #[test]
    fn priority_goes_before_everything() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        backlog.add(start, prompt(1, start, 0, 8.0));
        let with = |priority| QueueTerms { priority, ..terms(1, 1.0) };
        assert_eq!(backlog.impact(start, with(1), 0.0).1, 1);
        assert_eq!(backlog.impact(start, with(-1), 0.0).0, 8.0);
    }

    #[test]
    fn who_would_miss_a_deadline_is_counted() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        let deadline = Some(start + 9 * SECOND);
        backlog.add(start, QueuedPrompt { deadline, ..prompt(1, start, 100, 8.0) });
        assert_eq!(backlog.impact_reordered(start, terms(0, 0.5), 0.0).broken, 0);
        assert_eq!(backlog.impact_reordered(start, terms(0, 2.0), 0.0).broken, 1);
        backlog.add(start, prompt(2, start, 0, 5.0));
        assert_eq!(backlog.impact_reordered(start, terms(1, 2.0), 0.0).broken, 0, "it is late anyway");
    }

    #[test]
    fn a_newcomer_may_change_the_order_for_itself_and_for_others() {
        let start = Instant::now();
        let due = |seconds| QueueTerms { deadline: Some(30 * SECOND), ..terms(0, seconds) };
        let waiting = |seconds: &[f64]| {
            let mut backlog = Backlog::default();
            for (n, seconds) in (1..).zip(seconds) {
                let deadline = Some(start + 30 * SECOND);
                backlog.add(start, QueuedPrompt { terms: due(*seconds), deadline, ..prompt(n, start, 0, 1.0) });
            }
            backlog
        };
        let short_ones = waiting(&[9.0, 9.0, 9.0]);
        let put_off = short_ones.impact_reordered(start, due(29.0), 0.0);
        assert_eq!(put_off, QueueImpact { ahead: 27.0, passed: 0, broken: 0 });
        let long_one = waiting(&[29.0]);
        let served = long_one.impact_reordered(start, due(9.0), 0.0);
        assert_eq!(served, QueueImpact { ahead: 0.0, passed: 1, broken: 1 }, "the long one would have been in time");
        assert_eq!(long_one.impact(start, due(9.0), 0.0), (29.0, 0), "in the present order");
        assert_eq!(long_one.impact_reordered(start + SECOND, due(9.0), 0.5).ahead, 0.5, "the chunk under way");
    }

    #[test]
    fn a_report_corrects_what_was_guessed_but_not_what_it_cannot_know() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        backlog.add(start, prompt(1, start, 0, 4.0));
        backlog.add(start, prompt(2, start, 0, 4.0));
        backlog.add(start + 3 * SECOND, prompt(3, start + 3 * SECOND, 0, 5.0));
        backlog.correct(start + 3 * SECOND, 1875, start + 2 * SECOND);
        assert_eq!(backlog.total(start + 3 * SECOND), 12.5, "slower than thought");
        backlog.correct(start + 3 * SECOND, 250, start + 2 * SECOND);
        assert_eq!(backlog.total(start + 3 * SECOND), 6.0, "faster than thought");
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
                let max_wait = 60 * SECOND;
                let terms = QueueTerms { priority: *priority, deadline, value: *value, max_wait, ..terms(*patience, *seconds) };
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
                    let bound = item.arrived + item.terms.max_wait;
                    if now >= bound && later.arrived > bound {
                        prop_assert!(place(index) < place(other));
                    }
                }
            }
        }
    }
}
