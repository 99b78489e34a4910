//! Virtual time: what happens next.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Something that happens at a time; of one time, what was scheduled first.
#[derive(Debug)]
struct Scheduled<E> {
    at: Instant,
    turn: u64,
    event: E,
}

impl<E> PartialEq for Scheduled<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Scheduled<E> {}

impl<E> PartialOrd for Scheduled<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Scheduled<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.turn).cmp(&(other.at, other.turn))
    }
}

/// The events that are to come, and the clock that jumps from one to the next.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    heap: BinaryHeap<Reverse<Scheduled<E>>>,
    start: Instant,
    now: Instant,
    turns: u64,
}

impl<E> EventQueue<E> {
    /// At time 0. The cores count in `Instant`s; only differences between them mean anything.
    pub(crate) fn new() -> Self {
        #[allow(clippy::disallowed_methods)] // an origin is needed, and which one it is decides nothing
        let start = Instant::now();
        Self { heap: BinaryHeap::new(), start, now: start, turns: 0 }
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    /// Events that have been scheduled so far.
    pub(crate) fn turns(&self) -> u64 {
        self.turns
    }

    pub(crate) fn at(&mut self, at: Instant, event: E) {
        self.turns += 1;
        self.heap.push(Reverse(Scheduled { at: at.max(self.now), turn: self.turns, event }));
    }

    pub(crate) fn after(&mut self, delay: Duration, event: E) {
        self.at(self.now + delay, event);
    }

    /// The next event; the clock stands at its time.
    pub(crate) fn pop(&mut self) -> Option<E> {
        let Reverse(scheduled) = self.heap.pop()?;
        self.now = scheduled.at;
        Some(scheduled.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_queue_orders_by_time_then_by_scheduling() {
        let mut queue = EventQueue::new();
        for (seconds, event) in [(3, 'c'), (1, 'a'), (3, 'd'), (2, 'b')] {
            queue.after(Duration::from_secs(seconds), event);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!((order, queue.elapsed()), (vec!['a', 'b', 'c', 'd'], Duration::from_secs(3)));
        queue.at(queue.now() - Duration::from_secs(1), 'e');
        assert_eq!((queue.pop(), queue.elapsed()), (Some('e'), Duration::from_secs(3)), "nothing happens in the past");
    }
}
