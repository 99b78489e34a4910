//! What becomes of slots that hold no record.

use std::sync::Arc;

use crate::circuit_breaker::CircuitBreaker;
use crate::index::SlotRecord;

/// A slot to write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) number: u32,
    /// Whether it may need room on the disk that the store does not have yet.
    pub(crate) grows: bool,
}

/// Slots without a record, until the store takes them for one.
#[derive(Debug)]
pub(crate) struct Slots {
    limit: u32,
    /// Slots from here on were never used.
    used: u32,
    /// Had a record, so that they have room on the disk.
    free: Vec<u32>,
    /// Were used, but may have no room on the disk.
    unfilled: Vec<u32>,
    /// Never to be used again by this process.
    retired: u32,
    /// Of records that are gone, but still read.
    leaving: Vec<Arc<SlotRecord>>,
    /// Shut while the disk is full.
    growth: CircuitBreaker,
}

impl Slots {
    /// Of slots below `used`, those in `unfilled`, in falling order, hold nothing.
    pub(crate) fn new(limit: u32, used: u32, unfilled: Vec<u32>) -> Self {
        let free = Vec::new();
        let leaving = Vec::new();
        Self { limit, used, free, unfilled, retired: 0, leaving, growth: CircuitBreaker::default() }
    }

    /// Slots that can have a record, as far as is known of the disk.
    pub(crate) fn usable(&self) -> u32 {
        if self.growth.is_shut() {
            self.used - self.retired - self.unfilled.len() as u32
        } else {
            self.limit - self.retired
        }
    }

    pub(crate) fn retired(&self) -> u32 {
        self.retired
    }

    /// A slot without a record.
    pub(crate) fn take(&mut self) -> Option<Slot> {
        self.sweep();
        if let Some(number) = self.free.pop() {
            return Some(Slot { number, grows: false });
        }
        let more = !self.unfilled.is_empty() || self.used < self.limit;
        if !more || !self.growth.admits() {
            return None;
        }
        let number = self.unfilled.pop().unwrap_or_else(|| {
            self.used += 1;
            self.used - 1
        });
        Some(Slot { number, grows: true })
    }

    /// A write to it was begun at most.
    pub(crate) fn give_back(&mut self, slot: Slot) {
        if slot.grows { self.unfilled.push(slot.number) } else { self.free.push(slot.number) }
    }

    /// It has a record now.
    pub(crate) fn filled(&mut self, slot: Slot) {
        if slot.grows {
            self.growth.open();
        }
    }

    /// The disk had no room for it.
    pub(crate) fn no_room(&mut self, slot: Slot) {
        self.unfilled.push(slot.number);
        self.growth.shut();
    }

    /// It is never used again.
    pub(crate) fn retire(&mut self) {
        self.retired += 1;
    }

    /// Its record is gone; it is free once no reader has it.
    pub(crate) fn leave(&mut self, record: Arc<SlotRecord>) {
        self.leaving.push(record);
    }

    fn sweep(&mut self) {
        let idle = self.leaving.extract_if(.., |record| Arc::get_mut(record).is_some());
        self.free.extend(idle.map(|record| record.slot));
    }

    /// Slots below this one were taken at least once.
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    /// Used slots that have no record and are not being written, but for the retired ones.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        let leaving = self.leaving.iter().map(|record| record.slot);
        self.free.iter().chain(&self.unfilled).copied().chain(leaving).collect()
    }
}
