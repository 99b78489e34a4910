//! The books: what is stored where, and what goes when it is full.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use baton_types::BlockHash;

use crate::StoreError;
use crate::circuit_breaker::CircuitBreaker;
use crate::files::Files;
use crate::index::{Entry, Index, SlotRecord};
use crate::layout::{Layout, PREAMBLE_BYTES, StoreOptions};
use crate::read::{ReadOutcome, RecordRef};
use crate::recovery::{Found, Recovery, recover};
use crate::slots::{Slot, Slots};
use crate::write::{Reservation, Written};

/// So many writes in a row fail before puts are refused.
const MAX_FAILURES: u32 = 8;

/// Counts since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Lookups that found a record.
    pub hits: u64,
    /// Lookups that found none.
    pub misses: u64,
    /// Records written.
    pub stored: u64,
    /// Records that had to go for others.
    pub evicted: u64,
    /// Records that were found damaged.
    pub corrupt: u64,
    /// Writes that found no room.
    pub no_space: u64,
    /// Writes that failed otherwise; each retired its slot.
    pub write_errors: u64,
    /// Records whose read failed; each retired its slot.
    pub read_errors: u64,
}

/// What became of a put.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a record may have been evicted"]
pub struct Put {
    /// The record that had to go, also if the put failed then.
    pub evicted: Option<BlockHash>,
    /// Whether the record is here now.
    pub result: Result<(), StoreError>,
}

/// A write under way.
#[derive(Debug)]
struct Writing {
    slot: Slot,
    /// Not shared any more once the reservation was dropped.
    pin: Arc<()>,
}

/// Records in one folder; see the crate's documentation.
#[derive(Debug)]
pub struct KvStore {
    files: Arc<Files>,
    index: Index,
    slots: Slots,
    writing: HashMap<BlockHash, Writing>,
    next_sequence: u64,
    /// Shut while the store is degraded.
    writes: CircuitBreaker,
    /// Writes that failed since the last one that did not.
    failures: u32,
    stats: StoreStats,
    recovery: Recovery,
}

impl KvStore {
    /// Opens the store in `folder`, creates what is missing, and recovers what an earlier process
    /// left: the headers are read, no payload is.
    ///
    /// # Errors
    /// `Invalid` names the option; `Locked` the folder that another store has; `Io` and `NoSpace`
    /// the file and the reason.
    pub fn open(folder: &Path, options: &StoreOptions) -> Result<Self, StoreError> {
        let files = Files::open(folder, Layout::new(options)?)?;
        let found = recover(&files)?;
        Ok(Self::with(files, found))
    }

    fn with(files: Files, found: Found) -> Self {
        let mut index = Index::default();
        let mut dropped = found.dropped;
        let next_sequence = found.records.last().map_or(0, |(_, header)| header.sequence + 1);
        for (slot, header) in found.records {
            let record = SlotRecord { slot, checksums: header.checksums };
            dropped += u32::from(index.insert(header.hash, header.parent, record).is_some());
        }
        let filled: HashSet<_> = index.iter().map(|(_, entry)| entry.record.slot).collect();
        let unfilled = (0..found.used).rev().filter(|slot| !filled.contains(slot)).collect();
        let slots = Slots::new(files.layout.slots, found.used, unfilled);
        let recovery = Recovery { records: index.len() as u32, dropped, reset: found.reset };
        let files = Arc::new(files);
        let writing = HashMap::new();
        let writes = CircuitBreaker::default();
        let stats = StoreStats::default();
        Self { files, index, slots, writing, next_sequence, writes, failures: 0, stats, recovery }
    }

    /// What opening found.
    pub const fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Records here; those being written are not.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether no record is here.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Payload of the records here, bytes.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.files.layout.record_bytes()
    }

    /// Payload that has room, as far as is known of the disk, bytes. It is less than at first once
    /// the disk is full or slots are retired.
    pub fn capacity(&self) -> u64 {
        u64::from(self.slots.usable()) * self.files.layout.record_bytes()
    }

    /// Bytes of the disk that its files have now.
    ///
    /// # Errors
    /// The operating system does not say.
    pub fn disk_bytes(&self) -> Result<u64, StoreError> {
        self.files.disk_bytes()
    }

    /// Slots that are not used again until the store is opened anew, since reads or writes of them
    /// failed.
    pub fn retired_slots(&self) -> u32 {
        self.slots.retired()
    }

    /// Whether puts are refused since writes failed again and again.
    pub fn is_degraded(&self) -> bool {
        self.writes.is_shut()
    }

    /// Writes in a row that failed, if puts are refused since; else 0.
    pub fn failures_if_degraded(&self) -> u32 {
        if self.is_degraded() { self.failures } else { 0 }
    }

    /// Counts so far.
    pub const fn stats(&self) -> StoreStats {
        self.stats
    }

    /// Whether a record is here. Only looks.
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.index.find(hash).is_some()
    }

    /// The records with their parents, from the least to the most recently used.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, Option<BlockHash>)> {
        self.index.iter().map(|(hash, entry)| (hash, entry.parent))
    }

    /// Uses a record; `false` if it is not here.
    pub fn touch(&mut self, hash: BlockHash) -> bool {
        self.index.touch(hash).is_some()
    }

    /// Uses a record and hands it out to be read on any thread. Counts as a hit or a miss.
    pub fn locate(&mut self, hash: BlockHash) -> Option<RecordRef> {
        let Some(Entry { record, parent, .. }) = self.index.touch(hash) else {
            self.stats.misses += 1;
            return None;
        };
        self.stats.hits += 1;
        Some(RecordRef { files: self.files.clone(), record: record.clone(), hash, parent: *parent })
    }

    /// A read of `record` ended with `error`. The record is dropped; if the read itself failed, its
    /// slot is retired. `false` if it was gone already, or if the error is the caller's.
    pub fn on_read_failed(&mut self, record: &RecordRef, error: &StoreError) -> bool {
        let here = self.index.find(record.hash).is_some_and(|entry| Arc::ptr_eq(&entry.record, &record.record));
        if !here || matches!(error, StoreError::Invalid { .. }) {
            return false;
        }
        self.index.remove(record.hash);
        if matches!(error, StoreError::Corrupt { .. }) {
            self.stats.corrupt += 1;
            self.slots.leave(record.record.clone());
        } else {
            self.stats.read_errors += 1;
            self.slots.retire();
        }
        true
    }

    /// A slot for a record, to be written on any thread; `None` if the record is here, which uses
    /// it, or being written. When the store is full, the least recently used record without a
    /// reader is evicted ([`Reservation::evicted`]).
    ///
    /// # Errors
    /// `NoSlot` if all are being read or written, or the disk is full and nothing can go;
    /// `Degraded`.
    pub fn reserve(&mut self, hash: BlockHash, parent: Option<BlockHash>) -> Result<Option<Reservation>, StoreError> {
        self.reclaim_dropped();
        if self.touch(hash) || self.writing.contains_key(&hash) {
            return Ok(None);
        }
        if !self.writes.admits() {
            return Err(StoreError::Degraded { failures: self.failures });
        }
        let (slot, evicted) = self.take_slot()?;
        let files = self.files.clone();
        let pin = Arc::new(());
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.writing.insert(hash, Writing { slot, pin: pin.clone() });
        Ok(Some(Reservation { files, hash, parent, sequence, slot, pin, evicted }))
    }

    /// Slots of reservations that were dropped, by a panic perhaps.
    fn reclaim_dropped(&mut self) {
        let dropped = self.writing.extract_if(|_, writing| Arc::get_mut(&mut writing.pin).is_some());
        dropped.for_each(|(_, writing)| self.slots.give_back(writing.slot));
    }

    fn take_slot(&mut self) -> Result<(Slot, Option<BlockHash>), StoreError> {
        if let Some(slot) = self.slots.take() {
            return Ok((slot, None));
        }
        let Some((hash, number)) = self.index.evict() else {
            return Err(StoreError::NoSlot { usable: self.slots.usable(), writing: self.writing.len() as u32 });
        };
        self.stats.evicted += 1;
        Ok((Slot { number, grows: false }, Some(hash)))
    }

    /// A write ended: the record is here, or the error says why not.
    ///
    /// # Errors
    /// Those of the write: `NoSpace`, `Io`, `Invalid`; and `Invalid` for another store's write.
    pub fn commit(&mut self, written: Written) -> Result<(), StoreError> {
        let Written { hash, parent, slot, pin, result } = written;
        if !self.writing.get(&hash).is_some_and(|writing| Arc::ptr_eq(&writing.pin, &pin)) {
            return Err(StoreError::invalid("written", format!("block {hash} was not reserved in this store")));
        }
        self.writing.remove(&hash);
        match result {
            Ok(checksums) => {
                self.on_stored(slot);
                let replaced = self.index.insert(hash, parent, SlotRecord { slot: slot.number, checksums });
                assert!(replaced.is_none(), "a hash that is here is never reserved");
                Ok(())
            }
            Err(error) => {
                self.on_write_failed(slot, &error);
                Err(error)
            }
        }
    }

    fn on_stored(&mut self, slot: Slot) {
        self.stats.stored += 1;
        self.slots.filled(slot);
        self.failures = 0;
        self.writes.open();
    }

    fn on_write_failed(&mut self, slot: Slot, error: &StoreError) {
        match error {
            StoreError::Invalid { .. } => return self.slots.give_back(slot),
            StoreError::NoSpace { .. } => {
                self.stats.no_space += 1;
                self.slots.no_room(slot);
                // To find the disk full is no failure of the disk; that it has no room for what had
                // room before may be.
                if slot.grows {
                    return;
                }
            }
            _ => {
                self.stats.write_errors += 1;
                self.slots.retire();
            }
        }
        self.failures += 1;
        if self.failures >= MAX_FAILURES {
            self.writes.shut();
        }
    }

    /// Stores a record, or uses it if it is here: [`Self::reserve`], [`Reservation::write`] and
    /// [`Self::commit`]. `parts` are the payload, one slice each.
    pub fn put(&mut self, hash: BlockHash, parent: Option<BlockHash>, parts: &[&[u8]]) -> Put {
        let checked = self.files.layout.check_parts(parts.iter().map(|part| part.len()));
        match checked.and_then(|()| self.reserve(hash, parent)) {
            Ok(Some(reservation)) => {
                let evicted = reservation.evicted();
                Put { evicted, result: self.commit(reservation.write(parts)) }
            }
            Ok(None) => Put { evicted: None, result: Ok(()) },
            Err(error) => Put { evicted: None, result: Err(error) },
        }
    }

    /// Reads a record into one slice per part: [`Self::locate`], [`RecordRef::read`] and
    /// [`Self::on_read_failed`].
    ///
    /// # Errors
    /// `Invalid` for buffers of other sizes; `Io`, after which the record is gone.
    pub fn read(&mut self, hash: BlockHash, into: &mut [&mut [u8]]) -> Result<ReadOutcome, StoreError> {
        self.read_with(hash, |record| record.read(into))
    }

    /// Reads one part of a record; as [`Self::read`].
    pub fn read_part(&mut self, hash: BlockHash, part: u32, into: &mut [u8]) -> Result<ReadOutcome, StoreError> {
        self.read_with(hash, |record| record.read_part(part, into))
    }

    fn read_with(
        &mut self,
        hash: BlockHash,
        read: impl FnOnce(&RecordRef) -> Result<(), StoreError>,
    ) -> Result<ReadOutcome, StoreError> {
        let Some(record) = self.locate(hash) else { return Ok(ReadOutcome::Missing) };
        let Err(error) = read(&record) else { return Ok(ReadOutcome::Found) };
        self.on_read_failed(&record, &error);
        match error {
            StoreError::Corrupt { .. } => Ok(ReadOutcome::Corrupt),
            error => Err(error),
        }
    }

    /// Removes a record, also for after a restart; `false` if it was not here. One that is being
    /// written is not.
    ///
    /// # Errors
    /// `Io` if its header cannot be erased: it is gone, but may be back after a restart.
    pub fn remove(&mut self, hash: BlockHash) -> Result<bool, StoreError> {
        let Some(record) = self.index.remove(hash) else { return Ok(false) };
        let erased = self.files.erase(record.slot);
        self.slots.leave(record);
        erased.map(|()| true)
    }

    /// Removes every record, as [`Self::remove`]. The files keep their room on the disk until the
    /// store is opened anew.
    ///
    /// # Errors
    /// As for [`Self::remove`].
    pub fn clear(&mut self) -> Result<(), StoreError> {
        let index = std::mem::take(&mut self.index);
        index.into_records().for_each(|record| self.slots.leave(record));
        self.files.set_lens(PREAMBLE_BYTES, u64::MAX)
    }

    /// Proves that every slot is in exactly one state.
    ///
    /// # Errors
    /// `Inconsistent`: a bug.
    pub fn check_integrity(&self) -> Result<(), StoreError> {
        let mut slots = self.slots.numbers();
        slots.extend(self.index.iter().map(|(_, entry)| entry.record.slot));
        slots.extend(self.writing.values().map(|writing| writing.slot.number));
        slots.sort_unstable();
        let fail = |problem| Err(StoreError::Inconsistent { problem });
        if let Some(two) = slots.windows(2).find(|two| two[0] == two[1]) {
            return fail(format!("slot {} is in two states", two[0]));
        }
        let found = slots.len() as u64;
        let retired = u64::from(self.slots.retired());
        if found + retired != u64::from(self.slots.used()) {
            return fail(format!("{found} slots and {retired} retired ones are not {}", self.slots.used()));
        }
        let records = self.len();
        let in_order = self.iter().count();
        if records != in_order {
            return fail(format!("of {records} records, {in_order} are in the order of use"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::circuit_breaker::PROBE_EVERY;

    const OPTIONS: StoreOptions =
        StoreOptions { fingerprint: [1; 16], parts: 2, part_bytes: 64, capacity_bytes: 4096 + 100 * (4096 + 128) };

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 16])
    }

    fn put(store: &mut KvStore, n: u8) -> Put {
        store.put(hash(n), None, &[&[n; 64], &[n; 64]])
    }

    fn read(store: &mut KvStore, n: u8) -> ReadOutcome {
        let mut bytes = [[0; 64]; 2];
        let [first, second] = &mut bytes;
        let outcome = store.read(hash(n), &mut [first, second]).unwrap();
        assert!(outcome != ReadOutcome::Found || bytes == [[n; 64]; 2]);
        outcome
    }

    /// A put whose write ends with an error of this kind, as of a bad disk.
    fn put_failing(store: &mut KvStore, n: u8, kind: io::ErrorKind) -> Result<Option<BlockHash>, StoreError> {
        let reservation = store.reserve(hash(n), None)?.expect("not here");
        let evicted = reservation.evicted();
        let written = reservation.write(&[&[n; 64], &[n; 64]]);
        let result = Err(StoreError::io("write", Path::new("payloads"), &kind.into()));
        store.commit(Written { result, ..written }).unwrap_err();
        Ok(evicted)
    }

    #[test]
    fn failed_writes_retire_slots_and_consecutive_ones_stop_puts() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = KvStore::open(folder.path(), &OPTIONS).unwrap();
        let slots = store.capacity() / OPTIONS.record_bytes();
        put(&mut store, 1).result.unwrap();
        for n in 0..MAX_FAILURES {
            assert!(!store.is_degraded());
            assert_eq!(put_failing(&mut store, 10 + n as u8, io::ErrorKind::Other), Ok(None));
        }
        assert!(store.is_degraded());
        assert_eq!((store.retired_slots(), store.stats().write_errors), (MAX_FAILURES, u64::from(MAX_FAILURES)));
        assert_eq!(store.capacity(), (slots - u64::from(MAX_FAILURES)) * OPTIONS.record_bytes());
        assert_eq!(read(&mut store, 1), ReadOutcome::Found, "reads go on");

        let refused = |store: &mut KvStore| {
            (1..PROBE_EVERY).for_each(|_| {
                assert!(matches!(put(store, 2).result, Err(StoreError::Degraded { .. })));
            })
        };
        refused(&mut store);
        assert_eq!(put_failing(&mut store, 2, io::ErrorKind::Other), Ok(None), "let through, and failed");
        refused(&mut store);
        put(&mut store, 2).result.unwrap();
        assert!(!store.is_degraded());
        put(&mut store, 3).result.unwrap();
        assert_eq!((read(&mut store, 2), read(&mut store, 3)), (ReadOutcome::Found, ReadOutcome::Found));
        store.check_integrity().unwrap();
    }

    #[test]
    fn successful_write_resets_count_of_consecutive_failures() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = KvStore::open(folder.path(), &OPTIONS).unwrap();
        for n in 0..3 * MAX_FAILURES as u8 {
            put_failing(&mut store, 100 + n, io::ErrorKind::Other).unwrap();
            if n % 4 == 0 {
                put(&mut store, n).result.unwrap();
            }
        }
        assert!(!store.is_degraded());
    }

    /// On a file system that writes to a new place each time, a full disk refuses what had room,
    /// too. That must not empty the store.
    #[test]
    fn full_disk_stops_puts_before_all_records_are_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let options = StoreOptions { capacity_bytes: 4096 + 20 * (4096 + 128), ..OPTIONS };
        let mut store = KvStore::open(folder.path(), &options).unwrap();
        (0..20).for_each(|n| put(&mut store, n).result.unwrap());
        let failed = (100..200).map_while(|n| put_failing(&mut store, n, io::ErrorKind::StorageFull).ok());
        assert_eq!(failed.flatten().count(), MAX_FAILURES as usize);
        assert_eq!((store.len(), store.is_degraded()), (20 - MAX_FAILURES as usize, true));
        assert!((MAX_FAILURES as u8..20).all(|n| read(&mut store, n) == ReadOutcome::Found));
        assert_eq!(store.stats().no_space, u64::from(MAX_FAILURES));
        store.check_integrity().unwrap();
    }

    #[test]
    fn failed_read_drops_record_and_retires_its_slot() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = KvStore::open(folder.path(), &OPTIONS).unwrap();
        (0..3).for_each(|n| put(&mut store, n).result.unwrap());
        let record = store.locate(hash(1)).unwrap();
        let error = StoreError::io("read", Path::new("payloads"), &io::ErrorKind::Other.into());
        assert!(store.on_read_failed(&record, &error));
        assert_eq!((store.stats().read_errors, store.retired_slots()), (1, 1));
        assert_eq!((read(&mut store, 1), read(&mut store, 2)), (ReadOutcome::Missing, ReadOutcome::Found));
        store.check_integrity().unwrap();
    }
}
