//! Files of a KV store, as a node finds them at its start.
//!
//! **Invariant**: what is read is, byte for byte, what was put under that hash, and no block is
//! there that was never put.

use std::cell::OnceCell;
use std::path::Path;

use baton_kv_store::{KvStore, ReadOutcome, StoreOptions};
use baton_types::BlockHash;
use tempfile::TempDir;

const PARTS: u32 = 2;
const PART_BYTES: usize = 32;
const RECORDS: u8 = 3;
const HEADERS: &str = "baton-kv.headers";
const PAYLOADS: &str = "baton-kv.payloads";

fn options() -> StoreOptions {
    StoreOptions { fingerprint: [7; 16], parts: PARTS, part_bytes: PART_BYTES as u32, capacity_bytes: 64 << 10 }
}

/// What is put under the hash of a number.
fn content(n: u8) -> [[u8; PART_BYTES]; PARTS as usize] {
    [[n; PART_BYTES], [n ^ 0xff; PART_BYTES]]
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

/// Two files, with the length of the first one before them.
pub(super) fn open(input: &[u8]) {
    thread_local! {
        static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
    }
    let Some((length, files)) = input.split_first_chunk() else { return };
    let headers = files.len().min(u32::from_le_bytes(*length) as usize);
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(super::folder).path();
        write(folder, HEADERS, &files[..headers]);
        write(folder, PAYLOADS, &files[headers..]);
        // A file that no store made is refused.
        let Ok(mut store) = KvStore::open(folder, &options()) else { return };
        store.check_integrity().expect("the books of a store");
        let found: Vec<_> = store.iter().collect();
        assert!(found.len() <= usize::from(RECORDS));
        for (of, _) in found {
            let n = of.0[0];
            assert!(of == hash(n) && n < RECORDS, "{of:?} was never put");
            let mut parts = [[0; PART_BYTES]; PARTS as usize];
            let read = store.read(of, &mut parts.each_mut().map(|part| &mut part[..]));
            if matches!(read, Ok(ReadOutcome::Found)) {
                assert_eq!(parts, content(n), "{of:?}");
            }
        }
        store.check_integrity().expect("the books of a store");
    });
}

fn write(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(folder.join(name), bytes).expect("the file can be written");
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let folder = super::folder();
    let mut store = KvStore::open(folder.path(), &options()).expect("a store");
    for n in 0..RECORDS {
        let parts = content(n);
        // What is there is counted below.
        let _ = store.put(hash(n), n.checked_sub(1).map(hash), &parts.each_ref().map(|part| &part[..]));
    }
    assert_eq!(store.len(), usize::from(RECORDS));
    drop(store);
    let read = |name| std::fs::read(folder.path().join(name)).expect("a file of the store");
    let headers = read(HEADERS);
    let length = (headers.len() as u32).to_le_bytes();
    vec![[&length[..], &headers, &read(PAYLOADS)].concat(), [&length[..], &headers].concat()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_kv_file_seed_is_a_store_of_all_records() {
        let seed = seeds().swap_remove(0);
        let folder = super::super::folder();
        let (length, files) = seed.split_first_chunk().unwrap();
        let headers = u32::from_le_bytes(*length) as usize;
        write(folder.path(), HEADERS, &files[..headers]);
        write(folder.path(), PAYLOADS, &files[headers..]);
        assert_eq!(KvStore::open(folder.path(), &options()).unwrap().len(), usize::from(RECORDS));
    }
}
