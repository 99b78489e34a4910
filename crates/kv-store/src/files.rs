//! The store's files, shared by all its handles.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::StoreError;
use crate::folder::Folder;
use crate::header::{Header, MAGIC, PREAMBLE_LEN, Sealer, preamble};
use crate::layout::{Layout, PREAMBLE_BYTES};

const LOCK: &str = "baton-kv.lock";
const HEADERS: &str = "baton-kv.headers";
const PAYLOADS: &str = "baton-kv.payloads";
/// What `st_blocks` counts in, whatever the file system's blocks are.
const STAT_BLOCK_BYTES: u64 = 512;

/// Open files. The folder is locked as long as they are.
#[derive(Debug)]
pub(crate) struct Files {
    folder: PathBuf,
    headers: File,
    payloads: File,
    lock: File,
    pub(crate) layout: Layout,
    pub(crate) sealer: Sealer,
}

impl Files {
    /// Creates the folder and what is missing in it, and locks it.
    pub(crate) fn open(folder: &Path, layout: Layout) -> Result<Self, StoreError> {
        let folder = Folder::open(folder)?;
        let lock = lock(&folder)?;
        let headers = folder.file(HEADERS)?;
        let payloads = folder.file(PAYLOADS)?;
        let sealer = Sealer::new(&layout);
        Ok(Self { folder: folder.path, headers, payloads, lock, layout, sealer })
    }

    /// Discards the records unless the files are of this layout; `true` if there was anything else.
    pub(crate) fn reset_if_foreign(&self) -> Result<bool, StoreError> {
        let expected = preamble(&self.layout);
        let length = self.headers_len()?;
        let mut found = [0; PREAMBLE_LEN];
        let there = length.min(PREAMBLE_LEN as u64) as usize;
        let read = self.headers.read_exact_at(&mut found[..there], 0);
        read.map_err(|error| StoreError::io("read", &self.headers_path(), &error))?;
        if found == expected && length >= PREAMBLE_BYTES {
            return Ok(false);
        }
        self.check_magic(&found)?;
        // The preamble last: a process that is killed before leaves files that are reset once more.
        self.set_lens(0, 0)?;
        let mut page = [0; PREAMBLE_BYTES as usize];
        page[..PREAMBLE_LEN].copy_from_slice(&expected);
        let written = self.headers.write_all_at(&page, 0);
        written.map_err(|error| StoreError::io("write", &self.headers_path(), &error))?;
        Ok(length > 0)
    }

    /// Whether the files may be emptied: a store made them, of any version, or there is nothing.
    fn check_magic(&self, found: &[u8; PREAMBLE_LEN]) -> Result<(), StoreError> {
        let is_blank = *found == [0; PREAMBLE_LEN] && self.payloads_len()? == 0;
        if is_blank || found.starts_with(&MAGIC) {
            return Ok(());
        }
        let problem = "no kv store made it, or it is damaged: it is left as it is. Move both baton-kv files away";
        Err(StoreError::foreign(&self.headers_path(), problem))
    }

    pub(crate) fn headers_len(&self) -> Result<u64, StoreError> {
        let length = self.headers.metadata().map(|metadata| metadata.len());
        length.map_err(|error| StoreError::io("look at", &self.headers_path(), &error))
    }

    pub(crate) fn payloads_len(&self) -> Result<u64, StoreError> {
        let length = self.payloads.metadata().map(|metadata| metadata.len());
        length.map_err(|error| StoreError::io("look at", &self.payloads_path(), &error))
    }

    /// Bytes of the disk that the files have: they are sparse where nothing was written.
    pub(crate) fn disk_bytes(&self) -> Result<u64, StoreError> {
        let of = |file: &File| file.metadata().map(|metadata| metadata.blocks() * STAT_BLOCK_BYTES);
        let both = of(&self.headers).and_then(|headers| Ok(headers + of(&self.payloads)?));
        both.map_err(|error| StoreError::io("look at the files of", &self.folder, &error))
    }

    /// Cuts the files to these lengths, bytes; a shorter one stays as it is. The headers last: they
    /// say whose the payloads are.
    pub(crate) fn set_lens(&self, headers: u64, payloads: u64) -> Result<(), StoreError> {
        let cut = |file: &File, now: u64, to: u64| if now > to { file.set_len(to) } else { Ok(()) };
        let done = cut(&self.payloads, self.payloads_len()?, payloads);
        done.map_err(|error| StoreError::io("cut", &self.payloads_path(), &error))?;
        let done = cut(&self.headers, self.headers_len()?, headers);
        done.map_err(|error| StoreError::io("cut", &self.headers_path(), &error))
    }

    /// Headers from that of slot `first` on.
    pub(crate) fn read_headers(&self, first: u32, into: &mut [u8]) -> Result<(), StoreError> {
        let read = self.headers.read_exact_at(into, self.layout.header_offset(first));
        read.map_err(|error| StoreError::io("read", &self.headers_path(), &error))
    }

    /// What the slot held is gone, also after a restart.
    pub(crate) fn erase(&self, slot: u32) -> Result<(), StoreError> {
        let zeros = vec![0; self.layout.header_bytes()];
        let written = self.headers.write_all_at(&zeros, self.layout.header_offset(slot));
        written.map_err(|error| StoreError::io("write", &self.headers_path(), &error))
    }

    pub(crate) fn write_header(&self, slot: u32, header: &Header) -> Result<(), StoreError> {
        let bytes = self.sealer.encode(&self.layout, slot, header);
        let written = self.headers.write_all_at(&bytes, self.layout.header_offset(slot));
        written.map_err(|error| StoreError::io("write", &self.headers_path(), &error))
    }

    pub(crate) fn write_part(&self, slot: u32, part: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let written = self.payloads.write_all_at(bytes, self.layout.part_offset(slot, part));
        written.map_err(|error| StoreError::io("write", &self.payloads_path(), &error))
    }

    /// `false` if the file ends before the part does.
    pub(crate) fn read_part(&self, slot: u32, part: u32, into: &mut [u8]) -> Result<bool, StoreError> {
        match self.payloads.read_exact_at(into, self.layout.part_offset(slot, part)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(StoreError::io("read", &self.payloads_path(), &error)),
        }
    }

    fn headers_path(&self) -> PathBuf {
        self.folder.join(HEADERS)
    }

    fn payloads_path(&self) -> PathBuf {
        self.folder.join(PAYLOADS)
    }
}

impl Drop for Files {
    /// Closing would not do: a process that is just being started has the file, too, until it runs
    /// its program.
    fn drop(&mut self) {
        let _ = self.lock.unlock();
    }
}

/// The lock is the kernel's: it ends with the process, however that ends.
fn lock(folder: &Folder) -> Result<File, StoreError> {
    let file = folder.file(LOCK)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::Locked { folder: folder.path.display().to_string() }),
        Err(TryLockError::Error(error)) => Err(StoreError::io("lock", &folder.path.join(LOCK), &error)),
    }
}
