//! Records whose bytes follow from their number, so that wrong ones are noticed.

use std::ops::Range;
use std::path::Path;

use baton_kv_store::{KvStore, Put, ReadOutcome, StoreOptions};
use baton_types::BlockHash;

/// Small, and of a length that is no multiple of anything.
pub const SMALL: StoreOptions = StoreOptions { fingerprint: [7; 16], parts: 3, part_bytes: 1001, capacity_bytes: 0 };
/// As of a real model.
pub const LARGE: StoreOptions =
    StoreOptions { fingerprint: [8; 16], parts: 30, part_bytes: 12 << 10, capacity_bytes: 0 };

/// With room for so many records.
pub fn with_slots(options: &StoreOptions, slots: u64) -> StoreOptions {
    let header = (64 + 4 * u64::from(options.parts)).next_power_of_two();
    let capacity_bytes = 4096 + slots * (options.record_bytes().next_multiple_of(4096) + header);
    StoreOptions { capacity_bytes, ..options.clone() }
}

pub fn open(folder: &Path, options: &StoreOptions) -> KvStore {
    KvStore::open(folder, options).unwrap()
}

pub fn hash(n: u64) -> BlockHash {
    BlockHash(u128::from(n + 1).to_be_bytes())
}

pub fn number(hash: BlockHash) -> u64 {
    u128::from_be_bytes(hash.0) as u64 - 1
}

/// Every third record is a first block.
pub fn parent(n: u64) -> Option<BlockHash> {
    (!n.is_multiple_of(3)).then(|| hash(n - 1))
}

pub fn payload(n: u64, options: &StoreOptions) -> Vec<Vec<u8>> {
    let mut bytes = blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof();
    let part = |_| {
        let mut part = vec![0; options.part_bytes as usize];
        bytes.fill(&mut part);
        part
    };
    (0..options.parts).map(part).collect()
}

pub fn slices(payload: &[Vec<u8>]) -> Vec<&[u8]> {
    payload.iter().map(Vec::as_slice).collect()
}

pub fn put(store: &mut KvStore, n: u64, options: &StoreOptions) -> Put {
    store.put(hash(n), parent(n), &slices(&payload(n, options)))
}

/// Puts what must be possible to put.
pub fn put_ok(store: &mut KvStore, n: u64, options: &StoreOptions) -> Option<u64> {
    let Put { evicted, result } = put(store, n, options);
    result.unwrap();
    evicted.map(number)
}

/// Puts what must have room.
pub fn put_all(store: &mut KvStore, numbers: Range<u64>, options: &StoreOptions) {
    for n in numbers {
        assert_eq!(put_ok(store, n, options), None);
    }
}

/// Reads all parts, and sees that what is found is right.
pub fn read(store: &mut KvStore, n: u64, options: &StoreOptions) -> ReadOutcome {
    let mut parts = vec![vec![0; options.part_bytes as usize]; options.parts as usize];
    let mut into: Vec<_> = parts.iter_mut().map(Vec::as_mut_slice).collect();
    let outcome = store.read(hash(n), &mut into).unwrap();
    if outcome == ReadOutcome::Found {
        assert!(parts == payload(n, options), "record {n} has wrong bytes");
    }
    outcome
}

/// Numbers and parents of all that is here, least recently used first; the parents must be right.
pub fn numbers(store: &KvStore) -> Vec<u64> {
    let check = |(hash, found)| {
        let n = number(hash);
        assert_eq!(found, parent(n), "parent of record {n}");
        n
    };
    store.iter().map(check).collect()
}
