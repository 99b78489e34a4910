//! KV blocks on a local SSD: the lowest tier of a node's cache. Sync: no tokio, no clock, no
//! threads of its own.
//!
//! A [`KvStore`] keeps records of one size, each a KV block in all layers, by
//! [`BlockHash`](baton_types::BlockHash). A record is `parts` parts, one per layer. Each has its
//! own checksum, so that one layer can be read and trusted before the next. When full, the store
//! evicts what was used least recently.
//!
//! **Invariants**: what a read returns without an error is, byte for byte, what was put under that
//! hash. It is so whatever happened to the process, the machine or the files, but for a chance of
//! 2⁻³² per damaged part. Every slot is in exactly one state ([`KvStore::check_integrity`]). A slot
//! that is read or written is not given to another record.
//!
//! # Files
//!
//! ```text
//! baton-kv.lock      held exclusively (flock) while the store, or a handle of it, lives
//! baton-kv.headers   | preamble, 4 KiB | header of slot 0 | header of slot 1 | ..        64 + 4 × parts bytes each, rounded up to a power of two
//! baton-kv.payloads  | slot 0          | slot 1           | ..                           parts × part_bytes each, rounded up to 4 KiB
//! ```
//!
//! Headers are apart from the payloads, so that opening reads them in one go. 100 GB of records of
//! 360 KiB are 70 MB of headers, and no seek for each. They are powers of two, so that none
//! straddles a page. There are two files, not segments of a GB: slots are never compacted, so a
//! segment would never be removed as a whole. Files grow with what is put, up to the capacity.
//! Other files in the folder are left alone.
//!
//! The folder and the files must be this user's own, and no other's to write. Symbolic links, hard
//! links, pipes and devices are refused, and so is a headers file without the magic: it is not
//! emptied. Files are opened by the folder's descriptor, so a folder that takes its name's place
//! changes nothing.
//!
//! # What survives
//!
//! A put erases the slot's header, writes the payload, then the header with the checksums. So a
//! process that is killed at any moment leaves the old record gone and the new one absent or whole.
//! Nothing is synced: it is a cache, and a flush per record would cost more than the record is
//! worth. After a power failure pages may have been written in any order. Then a header without its
//! payload is found by its checksums when it is read, and is a miss.
//!
//! - A header is sealed with 128 bits of keyed BLAKE3 over its slot, hash, parent and checksums.
//!   The key is made of the format, the fingerprint and the sizes. What says which block the bytes
//!   are cannot be anything else's by accident. 0.2 µs.
//! - A part has a CRC-32C: 22 GB/s per core against BLAKE3's 4.4 (12 KiB parts, Sapphire Rapids).
//!   BLAKE3 would cost more than the copy out of the page cache. The CRC finds accidents; a process
//!   that can write to the folder can forge records.
//!
//! Uses are not written: what is recovered counts as used in the order in which it was put. What
//! was evicted may be back after a restart if its slot was not written again; what was removed or
//! cleared is not.
//!
//! # Who waits for the disk
//!
//! The books are in memory, and their owner never waits for the disk. [`KvStore::locate`] and
//! [`KvStore::reserve`] return a [`RecordRef`] and a [`Reservation`]. These read and write on any
//! thread, any number at once, and keep their slot from being reused. [`KvStore::commit`] and
//! [`KvStore::on_read_failed`] take the outcome. There is no lock between them: a slot is free
//! again once its last handle is gone. A handle that is dropped, by a panic even, gives it back. An
//! owner that may wait uses [`KvStore::put`], [`KvStore::read`] and [`KvStore::read_part`], which
//! are just these steps in a row. Only opening, [`KvStore::remove`] and [`KvStore::clear`] touch
//! the disk themselves, and headers alone.
//!
//! The checksums are in memory, 4 bytes per part (0.03 % of the capacity with parts of 12 KiB).
//! Reading a part is one read, and nothing on disk is believed twice.
//!
//! # Failure
//!
//! - **No room** (`ENOSPC`, `EDQUOT`, `EFBIG`): the put fails, nothing else is lost, and from then
//!   on records replace others instead of growing the files. Every 256th put that would have grown
//!   them tries again.
//! - **Another error** of a write: the put fails and its slot is retired until the store is opened
//!   anew. After 8 failures in a row the store is degraded: it serves reads and refuses puts, but
//!   for every 256th, which tries. One that succeeds ends it. Counted, not timed, since there is no
//!   clock here.
//! - **A damaged record** is dropped and counted when it is read. So is one whose read fails, and
//!   its slot is retired.

mod circuit_breaker;
mod error;
mod files;
mod folder;
mod header;
mod index;
mod layout;
mod read;
mod recovery;
mod slots;
mod store;
mod write;

pub use error::StoreError;
pub use layout::StoreOptions;
pub use read::{ReadOutcome, RecordRef};
pub use recovery::Recovery;
pub use store::{KvStore, Put, StoreStats};
pub use write::{Reservation, Written};
