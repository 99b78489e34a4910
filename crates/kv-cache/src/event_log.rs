//! What changed in a pool's prefix cache, for the conductors.

use std::collections::VecDeque;

use baton_types::KvEvent;

/// Changes of a node's prefix cache, numbered per generation of the node from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventBatch {
    /// Number of the first event. Of a snapshot: number of the first event after it.
    pub sequence: u64,
    /// `events` are all blocks that can be reused (`Stored` only), and what was told before does
    /// not count any more.
    pub snapshot: bool,
    /// In the order in which they happened.
    pub events: Vec<KvEvent>,
}

/// Bounded log of events that have not been taken yet.
#[derive(Debug)]
pub(crate) struct EventLog {
    events: VecDeque<KvEvent>,
    /// Number of the next event that happens.
    next: u64,
    capacity: usize,
    /// Events were dropped: only a snapshot can tell what there is now.
    overflowed: bool,
}

impl EventLog {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { events: VecDeque::new(), next: 0, capacity, overflowed: false }
    }

    pub(crate) fn push(&mut self, event: KvEvent) {
        self.next += 1;
        if self.overflowed {
            return;
        }
        if self.events.len() == self.capacity {
            self.overflowed = true;
            self.events = VecDeque::new();
            return;
        }
        self.events.push_back(event);
    }

    /// Number of the next event that happens.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next
    }

    /// Whether only a snapshot helps; asking clears it.
    pub(crate) fn take_overflow(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    /// Up to `max` of the oldest events; `None` if there are none.
    pub(crate) fn drain(&mut self, max: usize) -> Option<KvEventBatch> {
        let sequence = self.next - self.events.len() as u64;
        let events: Vec<_> = self.events.drain(..max.min(self.events.len())).collect();
        (!events.is_empty()).then_some(KvEventBatch { sequence, snapshot: false, events })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_log_batches_are_contiguous_and_overflow_is_reported_once() {
        let mut log = EventLog::new(3);
        for _ in 0..3 {
            log.push(KvEvent::Cleared);
        }
        let sequences = |log: &mut EventLog| log.drain(2).map(|batch| (batch.sequence, batch.events.len()));
        assert_eq!(sequences(&mut log), Some((0, 2)));
        assert_eq!(sequences(&mut log), Some((2, 1)));
        assert_eq!(sequences(&mut log), None);
        for _ in 0..5 {
            log.push(KvEvent::Cleared);
        }
        assert_eq!(sequences(&mut log), None);
        assert!(log.take_overflow() && !log.take_overflow());
        log.push(KvEvent::Cleared);
        assert_eq!((log.next_sequence(), sequences(&mut log)), (9, Some((8, 1))));
    }
}
