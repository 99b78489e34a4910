//! The headers file's contents: a preamble that says what the records are, and a sealed header per
//! slot.
//!
//! ```text
//! preamble | magic 8 | version 4 | parts 4 | part_bytes 4 | 0 × 4 | fingerprint 16 | 0 ..
//! header   | seal 16 | sequence 8 | hash 16 | parent 16 | 1 where it has a parent | 0 × 7 | CRC-32C of each part, 4 each | 0 ..
//! ```
//!
//! Numbers are little endian. A header of zeros is an empty slot.

use baton_types::BlockHash;

use crate::layout::{HEADER_FIXED_BYTES, Layout};

/// The first bytes of every headers file, of all versions.
pub(crate) const MAGIC: [u8; 8] = *b"batonkvs";
const VERSION: u32 = 1;
/// Domain of the seal's key: headers of another format never pass.
const CONTEXT: &str = "baton kv-store record header v1";
const SEAL_BYTES: usize = 16;
/// Where the fields of a header start.
const SEQUENCE: usize = SEAL_BYTES;
const HASH: usize = SEQUENCE + 8;
const PARENT: usize = HASH + 16;
const HAS_PARENT: usize = PARENT + 16;
/// No store lives to put so many records, and the next number must not overflow.
const MAX_SEQUENCE: u64 = 1 << 62;
/// Length of what counts of the preamble, bytes.
pub(crate) const PREAMBLE_LEN: usize = 40;

/// Which record a slot holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// Larger than that of every record put before.
    pub(crate) sequence: u64,
    pub(crate) hash: BlockHash,
    pub(crate) parent: Option<BlockHash>,
    /// Of each part.
    pub(crate) checksums: Box<[u32]>,
}

/// What was found where a header should be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed {
    Empty,
    Torn,
    Record(Header),
}

/// What the headers file of a store with this layout begins with.
pub(crate) fn preamble(layout: &Layout) -> [u8; PREAMBLE_LEN] {
    let mut bytes = [0; PREAMBLE_LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&layout.parts.to_le_bytes());
    bytes[16..20].copy_from_slice(&layout.part_bytes.to_le_bytes());
    bytes[24..40].copy_from_slice(&layout.fingerprint);
    bytes
}

/// Seals headers and checks seals.
#[derive(Debug)]
pub(crate) struct Sealer {
    key: [u8; 32],
}

impl Sealer {
    /// For the headers of stores with this fingerprint and these sizes.
    pub(crate) fn new(layout: &Layout) -> Self {
        Self { key: blake3::derive_key(CONTEXT, &preamble(layout)) }
    }

    /// The bytes of a header, for this slot only.
    pub(crate) fn encode(&self, layout: &Layout, slot: u32, header: &Header) -> Vec<u8> {
        let mut bytes = vec![0; layout.header_bytes()];
        bytes[SEQUENCE..HASH].copy_from_slice(&header.sequence.to_le_bytes());
        bytes[HASH..PARENT].copy_from_slice(&header.hash.0);
        if let Some(parent) = header.parent {
            bytes[PARENT..HAS_PARENT].copy_from_slice(&parent.0);
            bytes[HAS_PARENT] = 1;
        }
        for (to, checksum) in bytes[HEADER_FIXED_BYTES..].chunks_exact_mut(4).zip(&header.checksums) {
            to.copy_from_slice(&checksum.to_le_bytes());
        }
        let seal = self.seal(slot, &bytes[SEAL_BYTES..]);
        bytes[..SEAL_BYTES].copy_from_slice(&seal);
        bytes
    }

    /// What `bytes`, as long as a header, are in this slot.
    pub(crate) fn parse(&self, layout: &Layout, slot: u32, bytes: &[u8]) -> Parsed {
        if bytes.iter().all(|byte| *byte == 0) {
            return Parsed::Empty;
        }
        if bytes[..SEAL_BYTES] != self.seal(slot, &bytes[SEAL_BYTES..]) {
            return Parsed::Torn;
        }
        let sequence = u64::from_le_bytes(array(&bytes[SEQUENCE..]));
        if sequence >= MAX_SEQUENCE {
            return Parsed::Torn;
        }
        let parent = (bytes[HAS_PARENT] == 1).then(|| BlockHash(array(&bytes[PARENT..])));
        let checksums = bytes[HEADER_FIXED_BYTES..].chunks_exact(4).take(layout.parts as usize);
        let checksums = checksums.map(|bytes| u32::from_le_bytes(array(bytes))).collect();
        Parsed::Record(Header { sequence, hash: BlockHash(array(&bytes[HASH..])), parent, checksums })
    }

    fn seal(&self, slot: u32, sealed: &[u8]) -> [u8; SEAL_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&slot.to_le_bytes());
        hasher.update(sealed);
        array(hasher.finalize().as_bytes())
    }
}

/// The first `N` of `bytes`, which are at least as many.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[..N]);
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { fingerprint: [1; 16], parts: 3, part_bytes: 100, slots: 8 };

    fn header() -> Header {
        let hash = BlockHash([7; 16]);
        let parent = Some(BlockHash([0; 16]));
        Header { sequence: 5, hash, parent, checksums: Box::new([1, 2, 3]) }
    }

    #[test]
    fn record_header_round_trips() {
        let sealer = Sealer::new(&LAYOUT);
        for header in [header(), Header { parent: None, ..header() }] {
            let bytes = sealer.encode(&LAYOUT, 4, &header);
            assert_eq!(bytes.len(), LAYOUT.header_bytes());
            assert_eq!(sealer.parse(&LAYOUT, 4, &bytes), Parsed::Record(header));
        }
        assert_eq!(sealer.parse(&LAYOUT, 4, &[0; 128]), Parsed::Empty);
    }

    #[test]
    fn record_header_of_flipped_byte_other_slot_or_other_store_is_torn() {
        let sealer = Sealer::new(&LAYOUT);
        let bytes = sealer.encode(&LAYOUT, 4, &header());
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert_eq!(sealer.parse(&LAYOUT, 4, &bytes), Parsed::Torn, "byte {at}");
        }
        assert_eq!(sealer.parse(&LAYOUT, 5, &bytes), Parsed::Torn);
        for other in [Layout { fingerprint: [2; 16], ..LAYOUT }, Layout { part_bytes: 101, ..LAYOUT }] {
            assert_eq!(Sealer::new(&other).parse(&other, 4, &bytes), Parsed::Torn);
        }
    }

    #[test]
    fn record_header_with_last_sequence_number_is_torn() {
        let sealer = Sealer::new(&LAYOUT);
        let bytes = sealer.encode(&LAYOUT, 4, &Header { sequence: u64::MAX, ..header() });
        assert_eq!(sealer.parse(&LAYOUT, 4, &bytes), Parsed::Torn);
    }
}
