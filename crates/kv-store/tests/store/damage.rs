//! Bytes flipped and files cut by others: never wrong bytes, never a panic, and the store goes on.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use baton_kv_store::{ReadOutcome, StoreError};
use proptest::prelude::*;

use crate::records::{SMALL, numbers, open, put_all, put_ok, read, with_slots};

const SLOTS: u64 = 6;
const HEADERS: &str = "baton-kv.headers";
const PAYLOADS: &str = "baton-kv.payloads";
/// Bytes of the magic that a store's headers begin with.
const MAGIC: u64 = 8;

#[derive(Debug, Clone)]
enum Damage {
    /// File, from where its bytes count, a position that is taken modulo the rest, bits to flip.
    Flip(&'static str, u64, u64, u8),
    /// File, what stays of it, and the length of the rest, modulo that which it has.
    Cut(&'static str, u64, u64),
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let at = || (0..1u64 << 40, 1..=u8::MAX);
    let damage = prop_oneof![
        4 => at().prop_map(|(at, bits)| Damage::Flip(HEADERS, 4096, at, bits)),
        8 => at().prop_map(|(at, bits)| Damage::Flip(PAYLOADS, 0, at, bits)),
        // Of the preamble; files without the magic are refused.
        1 => at().prop_map(|(at, bits)| Damage::Flip(HEADERS, MAGIC, at % 32, bits)),
        1 => (0..1u64 << 40).prop_map(|to| Damage::Cut(PAYLOADS, 0, to)),
        1 => (0..1u64 << 40).prop_map(|to| Damage::Cut(HEADERS, MAGIC, to)),
    ];
    prop::collection::vec(damage, 1..6)
}

fn damage(folder: &Path, damage: &Damage) {
    let (Damage::Flip(file, ..) | Damage::Cut(file, ..)) = damage;
    let file = OpenOptions::new().read(true).write(true).open(folder.join(file)).unwrap();
    let length = file.metadata().unwrap().len();
    match *damage {
        Damage::Flip(_, from, at, bits) if length > from => {
            let at = from + at % (length - from);
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ bits], at).unwrap();
        }
        Damage::Cut(_, from, to) if length > from => file.set_len(from + to % (length - from)).unwrap(),
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn damaged_store_files_are_misses_never_wrong_bytes(damages in damages(), reopened: bool) {
        let folder = tempfile::tempdir().unwrap();
        let options = with_slots(&SMALL, SLOTS);
        let mut store = open(folder.path(), &options);
        put_all(&mut store, 0..SLOTS, &options);
        if reopened {
            drop(store);
            damages.iter().for_each(|one| damage(folder.path(), one));
            store = open(folder.path(), &options);
            // Their parents are checked, too.
            numbers(&store);
        } else {
            damages.iter().for_each(|one| damage(folder.path(), one));
        }
        for n in 0..SLOTS {
            // The bytes of what is found are checked.
            read(&mut store, n, &options);
        }
        store.check_integrity().unwrap();
        for n in 0..SLOTS {
            put_ok(&mut store, n, &options);
            prop_assert_eq!(read(&mut store, n, &options), ReadOutcome::Found);
        }
        prop_assert_eq!(store.len() as u64, SLOTS);
    }
}

#[test]
fn damaged_record_is_dropped_and_counted_and_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    put_all(&mut store, 0..SLOTS, &options);
    // The last part of record 2.
    damage(folder.path(), &Damage::Flip(PAYLOADS, 2 * 4096 + 2002, 5, 1));
    let mut part = vec![0; options.part_bytes as usize];
    let record = store.locate(crate::records::hash(2)).unwrap();
    record.read_part(0, &mut part).unwrap();
    let error = record.read_part(2, &mut part).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { part: 2, .. }), "{error}");
    assert!(store.on_read_failed(&record, &error));
    assert!(!store.on_read_failed(&record, &error), "dropped once");
    for n in 0..SLOTS {
        let expected = if n == 2 { ReadOutcome::Missing } else { ReadOutcome::Found };
        assert_eq!(read(&mut store, n, &options), expected, "record {n}");
    }
    assert_eq!(store.stats().corrupt, 1);
    drop((store, record));
    let store = open(folder.path(), &options);
    assert_eq!(numbers(&store), [0, 1, 3, 4, 5], "erased, so not back");
}

#[test]
fn record_under_header_of_another_is_corrupt() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, 2);
    let mut store = open(folder.path(), &options);
    put_all(&mut store, 0..2, &options);
    drop(store);
    // As a power failure may leave it: the payload of record 1 under the header of record 0.
    let file = OpenOptions::new().read(true).write(true).open(folder.path().join(PAYLOADS)).unwrap();
    let mut bytes = vec![0; options.record_bytes() as usize];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    // And a header that is another slot's.
    let path = folder.path().join(HEADERS);
    let headers = fs::read(&path).unwrap();
    assert_eq!(headers.len(), 4096 + 2 * 128);
    let mut store = open(folder.path(), &options);
    assert_eq!(read(&mut store, 0, &options), ReadOutcome::Corrupt);
    assert_eq!(read(&mut store, 1, &options), ReadOutcome::Found);
    drop(store);
    let moved = [&headers[..4096], &headers[4096 + 128..], &headers[4096..4096 + 128]].concat();
    fs::write(&path, moved).unwrap();
    let store = open(folder.path(), &options);
    assert_eq!((store.len(), store.recovery().dropped), (0, 2));
}
