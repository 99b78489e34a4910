//! A process that is killed while it writes.

use std::path::Path;
use std::time::Duration;

use baton_kv_store::ReadOutcome;
use baton_types::Random;

use crate::other_process::{OtherProcess, say_ready};
use crate::records::{LARGE, numbers, open, put_ok, read, with_slots};

const SLOTS: u64 = 12;
const ROUNDS: u64 = 12;

/// The other process: fills the store, then puts records that are not there until it is killed.
pub fn write_for_ever(folder: &Path) {
    let options = with_slots(&LARGE, SLOTS);
    let mut store = open(folder, &options);
    let mut random = Random::new(store.len() as u64 + u64::from(std::process::id()));
    let mut ready = false;
    loop {
        put_ok(&mut store, random.below(20 * SLOTS), &options);
        if !ready && store.len() as u64 == SLOTS {
            ready = true;
            say_ready();
        }
    }
}

#[test]
fn killed_process_leaves_whole_records_and_loses_one_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&LARGE, SLOTS);
    let mut random = Random::new(1);
    for round in 0..ROUNDS {
        let mut other = OtherProcess::start("write", folder.path());
        other.wait_ready();
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        other.kill();
        let mut store = open(folder.path(), &options);
        let found = numbers(&store);
        assert!(found.len() as u64 >= SLOTS - 1, "round {round}: of {SLOTS} records, {} are left", found.len());
        for n in found {
            assert_eq!(read(&mut store, n, &options), ReadOutcome::Found, "round {round}, record {n}");
        }
        store.check_integrity().unwrap();
    }
}
