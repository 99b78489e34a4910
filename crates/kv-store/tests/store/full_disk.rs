//! A disk that is full, and files that may not grow: real ones.

use std::fs;
use std::path::Path;

use baton_kv_store::{KvStore, ReadOutcome, StoreError, StoreOptions};

use crate::other_process::OtherProcess;
use crate::records::{LARGE, number, numbers, open, put, put_ok, read, with_slots};

/// Far more than there is room for.
const SLOTS: u64 = 64;

/// The other process: the folder has no room for what the options allow.
pub fn fill(folder: &Path) {
    let options = with_slots(&LARGE, SLOTS);
    let mut store = open(folder, &options);
    let records = fill_until_it_fails(&mut store, &options);
    go_on_by_replacing(&mut store, &options, 600, 2);
    let before = numbers(&store);
    drop(store);
    let mut store = open(folder, &options);
    assert_eq!(numbers(&store), before, "all survives");
    assert_eq!(before.len(), records);
    let failed = put(&mut store, 5000, &options);
    assert!(matches!(failed.result, Err(StoreError::NoSpace { .. })), "{failed:?}");
    go_on_by_replacing(&mut store, &options, 6000, 0);
}

/// The other process: room comes back, and is used.
pub fn fill_and_free(folder: &Path) {
    let options = with_slots(&LARGE, SLOTS);
    let ballast = folder.join("ballast");
    fs::write(&ballast, vec![1; 3 << 20]).unwrap();
    let mut store = open(folder, &options);
    let records = fill_until_it_fails(&mut store, &options);
    fs::remove_file(ballast).unwrap();
    for n in 1000..1256 {
        put_ok(&mut store, n, &options);
    }
    assert_eq!(store.len(), records + 1, "a probe found room");
    let more = (2000..).take_while(|n| put(&mut store, *n, &options).result.is_ok() && *n < 2000 + SLOTS).count();
    assert!((5..SLOTS as usize).contains(&more), "{more} more until the disk was full again");
    let last = numbers(&store);
    assert!(last.into_iter().all(|n| read(&mut store, n, &options) == ReadOutcome::Found));
}

/// Returns how many records there are.
fn fill_until_it_fails(store: &mut KvStore, options: &StoreOptions) -> usize {
    let failed = (0..SLOTS).find_map(|n| {
        let put = put(store, n, options);
        assert_eq!(put.evicted, None);
        put.result.err().map(|error| (n, error))
    });
    let (records, error) = failed.expect("the disk is full at some time");
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert!(records >= 3, "only {records} found room");
    assert_eq!((store.stats().no_space, store.is_degraded()), (1, false));
    assert_eq!(store.capacity(), records * options.record_bytes(), "it has what it has room for");
    for n in 0..records {
        assert_eq!(read(store, n, options), ReadOutcome::Found, "record {n}");
    }
    store.check_integrity().unwrap();
    records as usize
}

/// 512 puts, of which 2 probe for room.
fn go_on_by_replacing(store: &mut KvStore, options: &StoreOptions, first: u64, probes: usize) {
    let records = store.len();
    let mut failed = 0;
    for n in first..first + probes as u64 * 256 + 10 {
        let put = put(store, n, options);
        match put.result {
            Ok(()) => {
                assert!(put.evicted.is_some_and(|evicted| number(evicted) != n));
                assert_eq!(read(store, n, options), ReadOutcome::Found, "record {n}");
            }
            Err(error) => {
                assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
                failed += 1;
            }
        }
        assert_eq!(store.len(), records, "nothing is lost");
    }
    assert_eq!(failed, probes, "only the probes fail");
    assert!(numbers(store).into_iter().all(|n| read(store, n, options) == ReadOutcome::Found));
    store.check_integrity().unwrap();
}

/// The other process in a folder that is a file system of 6 MiB, gone with the process.
fn on_a_small_disk(role: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mount = r#"mount -t tmpfs -o size=6m,mode=700 none "$BATON_KV_STORE_TEST_FOLDER" && exec "$@""#;
    let other = OtherProcess::start_under(&["unshare", "-rm", "sh", "-c", mount, "sh"], role, folder.path());
    assert!(other.ended().success());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "it was on the small disk");
}

#[test]
#[ignore = "needs to mount a file system: unshare -rm"]
fn full_disk_fails_one_put_and_later_records_replace_others() {
    on_a_small_disk("fill");
}

#[test]
#[ignore = "needs to mount a file system: unshare -rm"]
fn freed_disk_space_is_used_again() {
    on_a_small_disk("fill-and-free");
}

#[test]
fn file_size_limit_is_handled_like_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let limit = r#"trap "" XFSZ && ulimit -f 6000 && exec "$@""#;
    let other = OtherProcess::start_under(&["sh", "-c", limit, "sh"], "fill", folder.path());
    assert!(other.ended().success());
}
