//! Reads and writes on other threads than the books' owner's.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use baton_kv_store::{ReadOutcome, RecordRef, Reservation, StoreError, Written};
use baton_types::{ErrorKind, Random};

use crate::records::{LARGE, SMALL, hash, number, open, parent, payload, put_ok, read, slices, with_slots};

const SLOTS: u64 = 8;

enum Job {
    Write(Reservation),
    Read(RecordRef),
}

enum Done {
    Written(Written),
    Read(Result<(), StoreError>),
}

fn work(jobs: &Mutex<Receiver<Job>>, done: &Sender<Done>) {
    loop {
        let job = jobs.lock().unwrap().recv();
        let Ok(job) = job else { return };
        let sent = match job {
            Job::Write(reservation) => {
                let payload = payload(number(reservation.hash()), &LARGE);
                done.send(Done::Written(reservation.write(&slices(&payload))))
            }
            Job::Read(record) => {
                let mut parts = vec![vec![0; LARGE.part_bytes as usize]; LARGE.parts as usize];
                let read = record.read(&mut parts.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
                assert!(parts == payload(number(record.hash()), &LARGE), "wrong bytes under a handle");
                // The owner counts on the slot once it hears of it.
                drop(record);
                done.send(Done::Read(read))
            }
        };
        sent.unwrap();
    }
}

#[test]
fn readers_and_writers_on_threads_never_share_a_store_slot() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&LARGE, SLOTS);
    let mut store = open(folder.path(), &options);
    let (jobs, todo) = channel();
    let (sender, done) = channel();
    let todo = Arc::new(Mutex::new(todo));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let todo = todo.clone();
            let sender = sender.clone();
            std::thread::spawn(move || work(&todo, &sender))
        })
        .collect();
    let mut random = Random::new(3);
    let mut under_way = 0;
    let mut written = 0;
    let mut found = 0;
    for _ in 0..3000 {
        let n = random.below(3 * SLOTS);
        let job = match random.below(3) {
            0 => store.locate(hash(n)).map(Job::Read),
            1 if random.below(8) == 0 => {
                store.remove(hash(n)).unwrap();
                None
            }
            _ => store.reserve(hash(n), parent(n)).unwrap().map(Job::Write),
        };
        under_way += job.map_or(0, |job| jobs.send(job).map(|()| 1).unwrap());
        // Never so many that no slot is left.
        while under_way == SLOTS - 2 {
            match done.recv().unwrap() {
                Done::Written(outcome) => store.commit(outcome).map(|()| written += 1).unwrap(),
                Done::Read(outcome) => outcome.map(|()| found += 1).unwrap(),
            }
            under_way -= 1;
        }
        store.check_integrity().unwrap();
    }
    drop(jobs);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(written > 100 && found > 100, "{written} written, {found} found");
    let last: Vec<_> = store.iter().collect();
    for (hash, _) in last {
        assert_eq!(read(&mut store, number(hash), &options), ReadOutcome::Found);
    }
}

#[test]
fn record_being_read_stays_and_put_is_refused_if_all_are_being_read() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, 2);
    let mut store = open(folder.path(), &options);
    put_ok(&mut store, 0, &options);
    put_ok(&mut store, 1, &options);
    let held = store.locate(hash(0)).unwrap();
    assert_eq!((held.hash(), held.parent()), (hash(0), None));
    for n in 2..10 {
        assert_eq!(put_ok(&mut store, n, &options), Some(if n == 2 { 1 } else { n - 1 }));
    }
    let also = store.locate(hash(9)).unwrap();
    let error = store.reserve(hash(20), None).unwrap_err();
    assert_eq!(error, StoreError::NoSlot { usable: 2, writing: 0 });
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    let mut part = vec![0; options.part_bytes as usize];
    held.read_part(2, &mut part).unwrap();
    assert!(part == payload(0, &options)[2]);
    drop((held, also));
    assert_eq!(put_ok(&mut store, 20, &options), Some(0));
}

#[test]
fn record_is_found_once_its_write_is_committed() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, 2);
    let mut store = open(folder.path(), &options);
    let reservation = store.reserve(hash(4), parent(4)).unwrap().unwrap();
    assert!(store.reserve(hash(4), parent(4)).unwrap().is_none(), "it is being written");
    let written = reservation.write(&slices(&payload(4, &options)));
    assert_eq!((store.contains(hash(4)), written.hash()), (false, hash(4)));
    store.commit(written).unwrap();
    assert_eq!(read(&mut store, 4, &options), ReadOutcome::Found);
    assert!(store.reserve(hash(4), parent(4)).unwrap().is_none(), "it is here");
}

#[test]
fn dropped_reservation_or_write_outcome_frees_its_slot() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, 1);
    let mut store = open(folder.path(), &options);
    drop(store.reserve(hash(1), parent(1)).unwrap().unwrap());
    drop(store.reserve(hash(2), parent(2)).unwrap().unwrap().write(&slices(&payload(2, &options))));
    let kept = store.reserve(hash(1), parent(1)).unwrap().unwrap();
    assert_eq!(store.reserve(hash(3), None).unwrap_err(), StoreError::NoSlot { usable: 1, writing: 1 });
    drop(kept);
    assert_eq!(put_ok(&mut store, 3, &options), None);
    store.check_integrity().unwrap();
}

#[test]
fn bad_store_arguments_are_refused_and_take_no_slot() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, 1);
    let mut store = open(folder.path(), &options);
    put_ok(&mut store, 1, &options);
    let invalid = |error: StoreError| matches!(error, StoreError::Invalid { .. });
    let short: &[u8] = &[0; 1000];
    assert!(invalid(store.put(hash(2), None, &[short; 3]).result.unwrap_err()));
    assert!(invalid(store.put(hash(2), None, &[short; 2]).result.unwrap_err()));
    assert!(invalid(store.read_part(hash(1), 0, &mut [0; 7]).unwrap_err()));
    assert!(invalid(store.read_part(hash(1), 3, &mut [0; 1001]).unwrap_err()));
    assert_eq!(read(&mut store, 1, &options), ReadOutcome::Found);

    let reservation = store.reserve(hash(2), None).unwrap().unwrap();
    assert!(invalid(store.commit(reservation.write(&[])).unwrap_err()));
    let other = tempfile::tempdir().unwrap();
    let mut other = open(other.path(), &options);
    let strange = other.reserve(hash(2), None).unwrap().unwrap().write(&slices(&payload(2, &options)));
    assert!(invalid(store.commit(strange).unwrap_err()));
    assert_eq!((store.stats().write_errors, store.is_degraded()), (0, false));
    put_ok(&mut store, 3, &options);
    store.check_integrity().unwrap();
}
