//! What a store finds in its folder when it is opened, and what it says if it cannot be.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use baton_kv_store::{KvStore, ReadOutcome, Recovery, StoreError, StoreOptions};
use baton_types::ErrorKind;

use crate::other_process::OtherProcess;
use crate::records::{SMALL, numbers, open, put_all, put_ok, read, with_slots};

const SLOTS: u64 = 4;

#[test]
fn records_survive_reopen_in_put_order() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    assert_eq!(store.recovery(), Recovery::default());
    for n in [3, 1, 2, 0] {
        assert_eq!(put_ok(&mut store, n, &options), None);
    }
    assert_eq!(put_ok(&mut store, 9, &options), Some(3));
    drop(store);
    let mut store = open(folder.path(), &options);
    assert_eq!(store.recovery(), Recovery { records: 4, dropped: 0, reset: false });
    assert_eq!(numbers(&store), [1, 2, 0, 9]);
    assert_eq!(put_ok(&mut store, 4, &options), Some(1), "numbered after those of before");
    drop(store);
    assert_eq!(numbers(&open(folder.path(), &options)), [2, 0, 9, 4]);
}

#[test]
fn second_store_in_a_folder_is_refused_with_folder_name() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    put_ok(&mut store, 1, &options);
    let error = KvStore::open(folder.path(), &options).unwrap_err();
    assert_eq!(error, StoreError::Locked { folder: folder.path().display().to_string() });
    assert!(error.to_string().contains(&*folder.path().to_string_lossy()) && error.kind() == ErrorKind::Unavailable);
    let record = store.locate(crate::records::hash(1)).unwrap();
    drop(store);
    assert!(KvStore::open(folder.path(), &options).is_err(), "a handle still reads");
    drop(record);
    open(folder.path(), &options);
}

#[test]
fn store_folder_is_locked_until_other_process_dies() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut other = OtherProcess::start("hold", folder.path());
    other.wait_ready();
    assert!(matches!(KvStore::open(folder.path(), &options), Err(StoreError::Locked { .. })));
    other.kill();
    open(folder.path(), &options);
}

#[test]
fn records_of_other_layout_are_discarded_and_foreign_files_kept() {
    let options = with_slots(&SMALL, SLOTS);
    let others = [
        StoreOptions { fingerprint: [9; 16], ..options.clone() },
        StoreOptions { parts: 2, ..options.clone() },
        StoreOptions { part_bytes: 1000, ..options.clone() },
    ];
    for other in others {
        let folder = tempfile::tempdir().unwrap();
        let foreign = folder.path().join("notes.txt");
        fs::write(&foreign, "not ours").unwrap();
        let mut store = open(folder.path(), &options);
        put_all(&mut store, 0..SLOTS, &options);
        drop(store);
        let mut store = open(folder.path(), &other);
        assert_eq!(store.recovery(), Recovery { records: 0, dropped: 0, reset: true });
        assert_eq!(fs::metadata(folder.path().join("baton-kv.payloads")).unwrap().len(), 0, "the room is given back");
        put_ok(&mut store, 7, &other);
        assert_eq!(read(&mut store, 7, &other), ReadOutcome::Found);
        drop(store);
        assert!(open(folder.path(), &options).is_empty(), "nor are they back");
        assert_eq!(fs::read(&foreign).unwrap(), b"not ours");
    }
}

#[test]
fn disk_bytes_are_those_of_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    let before = store.disk_bytes().unwrap();
    put_all(&mut store, 0..SLOTS, &options);
    let written = store.disk_bytes().unwrap() - before;
    assert!(written >= SLOTS * options.record_bytes(), "{written}");
    fs::write(folder.path().join("notes.txt"), vec![7; 1 << 20]).unwrap();
    assert_eq!(store.disk_bytes().unwrap() - before, written, "foreign files are not its own");
}

#[test]
fn smaller_capacity_truncates_files_and_larger_keeps_records() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    put_all(&mut store, 0..SLOTS, &options);
    drop(store);
    let smaller = with_slots(&SMALL, 2);
    let mut store = open(folder.path(), &smaller);
    assert_eq!((store.len(), store.recovery().dropped, store.capacity()), (2, 2, 2 * smaller.record_bytes()));
    let length = |file| fs::metadata(folder.path().join(file)).unwrap().len();
    assert!(length("baton-kv.payloads") + length("baton-kv.headers") <= smaller.capacity_bytes);
    assert!(put_ok(&mut store, 9, &smaller).is_some());
    let kept = numbers(&store);
    drop(store);
    let mut store = open(folder.path(), &with_slots(&SMALL, 3));
    assert_eq!(numbers(&store), kept);
    assert_eq!(put_ok(&mut store, 10, &options), None);
    assert!(put_ok(&mut store, 11, &options).is_some());
}

#[test]
fn truncated_or_missing_files_lose_only_their_own_records() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let fill = || {
        let mut store = open(folder.path(), &options);
        put_all(&mut store, 0..SLOTS, &options);
    };
    let cut = |file: &str, length| {
        fs::OpenOptions::new().write(true).open(folder.path().join(file)).unwrap().set_len(length).unwrap();
    };
    fill();
    cut("baton-kv.payloads", 2 * 4096 + 100);
    assert_eq!(open(folder.path(), &options).recovery(), Recovery { records: 2, dropped: 2, reset: false });
    fill();
    cut("baton-kv.headers", 4096 + 3 * 128 + 5);
    assert_eq!(open(folder.path(), &options).len(), 3);
    fill();
    cut("baton-kv.headers", 17);
    assert_eq!(open(folder.path(), &options).recovery(), Recovery { records: 0, dropped: 0, reset: true });
    fill();
    fs::remove_file(folder.path().join("baton-kv.payloads")).unwrap();
    let mut store = open(folder.path(), &options);
    assert_eq!((store.len(), store.recovery().dropped), (0, 4));
    put_all(&mut store, 0..SLOTS, &options);
    assert_eq!(store.len() as u64, SLOTS);
}

#[test]
fn unusable_store_folder_is_named_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = KvStore::open(&file.join("store"), &options).unwrap_err().to_string();
    assert!(error.contains("create folder") && error.contains("file/store"), "{error}");

    let taken = folder.path().join("taken");
    fs::create_dir_all(taken.join("baton-kv.headers")).unwrap();
    let error = KvStore::open(&taken, &options).unwrap_err().to_string();
    assert!(error.contains("open") && error.contains("baton-kv.headers"), "{error}");
}

#[test]
#[ignore = "needs a user who may not write everywhere: not root"]
fn store_folder_without_write_permission_is_named_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    let error = KvStore::open(&closed, &with_slots(&SMALL, SLOTS)).unwrap_err().to_string();
    assert!(error.contains("closed/baton-kv.lock"), "{error}");
}

#[test]
fn store_files_are_readable_by_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b");
    drop(open(&path, &with_slots(&SMALL, SLOTS)));
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(path.clone()) & 0o077, 0);
    assert_eq!(mode(path.join("baton-kv.payloads")) & 0o077, 0);
}
