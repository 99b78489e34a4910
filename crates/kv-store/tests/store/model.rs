//! Against a list that is searched from end to end.

use baton_kv_store::{KvStore, ReadOutcome, RecordRef, StoreError, StoreOptions};
use proptest::prelude::*;

use crate::records::{SMALL, hash, number, numbers, open, payload, put, read, with_slots};

const SLOTS: u64 = 4;

#[derive(Debug, Clone)]
enum Step {
    Put(u64),
    Read(u64),
    ReadPart(u64, u32),
    Touch(u64),
    Remove(u64),
    /// Holds the record until later.
    Hold(u64),
    LetGo,
    Clear,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let n = || 0..2 * SLOTS;
    let step = prop_oneof![
        8 => n().prop_map(Step::Put),
        4 => n().prop_map(Step::Read),
        2 => (n(), 0..SMALL.parts).prop_map(|(n, part)| Step::ReadPart(n, part)),
        2 => n().prop_map(Step::Touch),
        2 => n().prop_map(Step::Remove),
        3 => n().prop_map(Step::Hold),
        2 => Just(Step::LetGo),
        1 => Just(Step::Clear),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..80)
}

/// A record of the model: what it is, and the how-manieth it was put.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Record {
    n: u64,
    order: u64,
}

#[derive(Default)]
struct Model {
    /// Least recently used first.
    records: Vec<Record>,
    held: Vec<Record>,
    puts: u64,
}

impl Model {
    fn touch(&mut self, n: u64) -> Option<Record> {
        let at = self.records.iter().position(|record| record.n == n)?;
        let record = self.records.remove(at);
        self.records.push(record);
        Some(record)
    }

    /// What goes, or `Err` if nothing can.
    fn put(&mut self, n: u64) -> Result<Option<u64>, ()> {
        if self.touch(n).is_some() {
            return Ok(None);
        }
        let mut leaving: Vec<_> =
            self.held.iter().filter(|held| !self.records.contains(held)).map(|r| r.order).collect();
        leaving.sort_unstable();
        leaving.dedup();
        let mut evicted = None;
        if self.records.len() + leaving.len() == SLOTS as usize {
            let at = self.records.iter().position(|record| !self.held.contains(record)).ok_or(())?;
            evicted = Some(self.records.remove(at).n);
        }
        self.puts += 1;
        self.records.push(Record { n, order: self.puts });
        Ok(evicted)
    }

    fn reopen(&mut self) {
        self.held.clear();
        self.records.sort_by_key(|record| record.order);
    }
}

struct Pair {
    folder: tempfile::TempDir,
    options: StoreOptions,
    store: Option<KvStore>,
    held: Vec<RecordRef>,
    model: Model,
}

impl Pair {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = with_slots(&SMALL, SLOTS);
        let store = Some(open(folder.path(), &options));
        Self { folder, options, store, held: Vec::new(), model: Model::default() }
    }

    fn take(&mut self, step: &Step) {
        let store = self.store.as_mut().expect("open between steps");
        let options = &self.options;
        match *step {
            Step::Put(n) => {
                let got = put(store, n, options);
                match self.model.put(n) {
                    Ok(evicted) => assert_eq!((got.result, got.evicted.map(number)), (Ok(()), evicted)),
                    Err(()) => assert!(matches!(got.result, Err(StoreError::NoSlot { .. })), "{got:?}"),
                }
            }
            Step::Read(n) => assert_eq!(read(store, n, options), outcome(self.model.touch(n))),
            Step::ReadPart(n, part) => {
                let mut bytes = vec![0; options.part_bytes as usize];
                let got = store.read_part(hash(n), part, &mut bytes).unwrap();
                assert_eq!(got, outcome(self.model.touch(n)));
                assert!(got != ReadOutcome::Found || bytes == payload(n, options)[part as usize]);
            }
            Step::Touch(n) => assert_eq!(store.touch(hash(n)), self.model.touch(n).is_some()),
            Step::Remove(n) => {
                assert_eq!(store.remove(hash(n)).unwrap(), self.model.touch(n).is_some());
                self.model.records.retain(|record| record.n != n);
            }
            Step::Hold(n) => {
                self.held.extend(store.locate(hash(n)));
                let held = self.model.touch(n);
                self.model.held.extend(held);
            }
            Step::LetGo => {
                self.held.pop();
                self.model.held.pop();
            }
            Step::Clear => {
                store.clear().unwrap();
                self.model.records.clear();
            }
            Step::Reopen => {
                self.held.clear();
                self.store = None;
                self.store = Some(open(self.folder.path(), options));
                self.model.reopen();
            }
        }
    }

    fn compare(&mut self) {
        let store = self.store.as_mut().expect("open between steps");
        store.check_integrity().unwrap();
        let expected: Vec<_> = self.model.records.iter().map(|record| record.n).collect();
        assert_eq!(numbers(store), expected);
        assert_eq!(store.bytes(), expected.len() as u64 * self.options.record_bytes());
        assert_eq!(self.held.len(), self.model.held.len());
        for record in &self.held {
            let mut part = vec![0; self.options.part_bytes as usize];
            record.read_part(1, &mut part).unwrap();
            assert!(part == payload(number(record.hash()), &self.options)[1], "a held record changed");
        }
        assert_eq!(store.stats().corrupt + store.stats().read_errors + store.stats().write_errors, 0);
    }
}

fn outcome(record: Option<Record>) -> ReadOutcome {
    if record.is_some() { ReadOutcome::Found } else { ReadOutcome::Missing }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn kv_store_matches_model_under_random_steps(steps in steps()) {
        let mut pair = Pair::new();
        for step in &steps {
            pair.take(step);
            pair.compare();
        }
    }
}
