//! Writing a record, on any thread.

use std::sync::Arc;

use baton_types::BlockHash;

use crate::StoreError;
use crate::files::Files;
use crate::header::Header;
use crate::slots::Slot;

/// A slot for one record. Dropped, it gives the slot back.
#[derive(Debug)]
#[must_use = "dropped, the reservation is given up"]
pub struct Reservation {
    pub(crate) files: Arc<Files>,
    pub(crate) hash: BlockHash,
    pub(crate) parent: Option<BlockHash>,
    pub(crate) sequence: u64,
    pub(crate) slot: Slot,
    /// Shared with the store, which sees by it that this was dropped.
    pub(crate) pin: Arc<()>,
    pub(crate) evicted: Option<BlockHash>,
}

impl Reservation {
    /// The record's.
    pub const fn hash(&self) -> BlockHash {
        self.hash
    }

    /// The record that had to go for it, whatever becomes of the write.
    pub const fn evicted(&self) -> Option<BlockHash> {
        self.evicted
    }

    /// Writes the record's parts, one slice each, without copying them together. Pass the outcome,
    /// good or bad, to [`KvStore::commit`](crate::KvStore::commit).
    pub fn write(self, parts: &[&[u8]]) -> Written {
        let result = self.write_slot(parts);
        Written { hash: self.hash, parent: self.parent, slot: self.slot, pin: self.pin, result }
    }

    /// The order is what keeps a killed process from leaving a header over another record's bytes.
    fn write_slot(&self, parts: &[&[u8]]) -> Result<Box<[u32]>, StoreError> {
        self.files.layout.check_parts(parts.iter().map(|part| part.len()))?;
        self.files.erase(self.slot.number)?;
        let checksums = self.write_payload(parts)?;
        let header = Header { sequence: self.sequence, hash: self.hash, parent: self.parent, checksums };
        self.files.write_header(self.slot.number, &header)?;
        Ok(header.checksums)
    }

    fn write_payload(&self, parts: &[&[u8]]) -> Result<Box<[u32]>, StoreError> {
        let write = |(part, bytes): (u32, &&[u8])| {
            self.files.write_part(self.slot.number, part, bytes)?;
            Ok(crc32c::crc32c(bytes))
        };
        (0..).zip(parts).map(write).collect()
    }
}

/// What became of a write.
#[derive(Debug)]
#[must_use = "the record is stored once this is committed"]
pub struct Written {
    pub(crate) hash: BlockHash,
    pub(crate) parent: Option<BlockHash>,
    pub(crate) slot: Slot,
    pub(crate) pin: Arc<()>,
    /// Checksums of the parts.
    pub(crate) result: Result<Box<[u32]>, StoreError>,
}

impl Written {
    /// The record's.
    pub const fn hash(&self) -> BlockHash {
        self.hash
    }
}
