//! Reading a record, on any thread.

use std::sync::Arc;

use baton_types::BlockHash;

use crate::StoreError;
use crate::files::Files;
use crate::index::SlotRecord;

/// What became of a read by hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The buffers hold the bytes.
    Found,
    /// No such record. The buffers are as they were.
    Missing,
    /// The record was damaged, and is gone now. What the buffers hold means nothing.
    Corrupt,
}

/// A stored record. Its slot is not reused as long as this lives, even if the record is removed
/// meanwhile.
#[derive(Debug)]
pub struct RecordRef {
    pub(crate) files: Arc<Files>,
    pub(crate) record: Arc<SlotRecord>,
    pub(crate) hash: BlockHash,
    pub(crate) parent: Option<BlockHash>,
}

impl RecordRef {
    /// The record's.
    pub const fn hash(&self) -> BlockHash {
        self.hash
    }

    /// The hash that the record was put with as its parent.
    pub const fn parent(&self) -> Option<BlockHash> {
        self.parent
    }

    /// Reads one part, of `part_bytes` bytes. After an error, the buffer's content means nothing.
    /// Tell the store ([`KvStore::on_read_failed`](crate::KvStore::on_read_failed)). A damaged
    /// record is erased on the disk at once.
    pub fn read_part(&self, part: u32, into: &mut [u8]) -> Result<(), StoreError> {
        let Some(&checksum) = self.record.checksums.get(part as usize) else {
            let parts = self.record.checksums.len();
            return Err(StoreError::invalid("part", format!("{part} is not below {parts}")));
        };
        self.files.layout.check_part(into.len())?;
        if !self.files.read_part(self.record.slot, part, into)? {
            return Err(self.corrupt(part, "the file ends before it"));
        }
        if crc32c::crc32c(into) != checksum {
            return Err(self.corrupt(part, "its checksum is another"));
        }
        Ok(())
    }

    /// Reads all parts, one slice each; as [`Self::read_part`].
    pub fn read(&self, into: &mut [&mut [u8]]) -> Result<(), StoreError> {
        self.files.layout.check_parts(into.iter().map(|part| part.len()))?;
        (0..).zip(into).try_for_each(|(part, bytes)| self.read_part(part, bytes))
    }

    fn corrupt(&self, part: u32, reason: &'static str) -> StoreError {
        // If even this fails, the record is found damaged once more after a restart.
        let _ = self.files.erase(self.record.slot);
        StoreError::Corrupt { hash: self.hash, part, reason }
    }
}
