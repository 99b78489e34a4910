//! Clusters in which something goes wrong every few seconds. Whatever it is, each request ends
//! once, with its own tokens, and nothing is left behind.
//!
//! `simulate` checks what a step finds of its sequences' blocks and what clients are told. At the
//! end it checks that nothing is charged and no block is lost.

mod made;

use std::collections::BTreeMap;
use std::time::Duration;

use baton_sim::{FaultKind, Feature, ModelProfile, Outcome, Random, SimAdmission, SimOptions, Trace, simulate};
use made::Conversations;

/// Conversations for a minute.
fn trace(seed: u64) -> Trace {
    let per_second = 1.0 + 3.0 * Random::new(seed).unit();
    let conversations = Conversations { per_second, shared: 4, most_new: 12, most_output: 200 };
    made::trace(conversations.requests(seed).take_while(|request| request.timestamp < Duration::from_secs(60)))
}

/// What a cluster bears often: for these, every third cluster has many of one kind.
const OFTEN: [FaultKind; 6] =
    [FaultKind::Fetch, FaultKind::Disk, FaultKind::Push, FaultKind::Partition, FaultKind::Events, FaultKind::Message];

/// Small caches and memories, so that everything is short now and then.
fn options(seed: u64) -> SimOptions {
    let mut random = Random::new(!seed);
    let mut pick = |of: &[u32]| of[random.below(of.len() as u64) as usize];
    let block_tokens = pick(&[64, 128]);
    let often = seed.is_multiple_of(3).then(|| OFTEN[(seed / 3) as usize % OFTEN.len()]);
    SimOptions {
        prefill: pick(&[2, 3, 4]) as usize,
        decode: pick(&[2, 3]) as usize,
        admission: SimAdmission::NONE,
        without: (pick(&[0, 1]) == 0).then_some(Feature::PromptsAtDecode),
        block_tokens,
        cache_blocks: Some(pick(&[30_000, 60_000]) / block_tokens),
        decode_blocks: Some(pick(&[20_000, 40_000]) / block_tokens),
        ssd_blocks: pick(&[0, 1, 2]) * 60_000 / block_tokens,
        is_cramped: true,
        fault_every: Some(Duration::from_millis(if often.is_some() { 500 } else { 3000 })),
        fault: often,
        seed,
        ..SimOptions::default()
    }
}

/// What became of all requests.
#[derive(Debug, Default)]
struct Ends {
    finished: usize,
    aborted: usize,
    refused: usize,
    failed: BTreeMap<String, usize>,
    migrated: usize,
    fetched_tokens: u64,
    ssd_tokens: u64,
    faults: BTreeMap<FaultKind, u64>,
}

impl Ends {
    fn add(&mut self, outcome: Outcome) {
        for record in outcome.records {
            let ends = [record.finished.is_some(), record.rejected, record.aborted, record.failed.is_some()];
            assert_eq!(ends.iter().filter(|end| **end).count(), 1, "{record:?}");
            self.finished += usize::from(record.finished.is_some());
            self.aborted += usize::from(record.aborted);
            self.refused += usize::from(record.rejected);
            self.migrated += usize::from(record.migrations > 0);
            self.fetched_tokens += u64::from(record.fetched_tokens);
            self.ssd_tokens += u64::from(record.ssd_tokens);
            if let Some(why) = record.failed {
                *self.failed.entry(why).or_default() += 1;
            }
        }
        for (fault, count) in outcome.faults {
            *self.faults.entry(fault).or_default() += count;
        }
    }

    fn check(&self) {
        println!("{self:#?}");
        let failed: usize = self.failed.values().sum();
        let wanted = self.finished + self.refused + failed;
        assert!(self.finished as f64 >= 0.95 * wanted as f64, "{} of {wanted} finished", self.finished);
        for fault in FaultKind::ALL {
            assert!(self.faults.contains_key(fault), "{} never happened", fault.as_str());
        }
        assert!(self.migrated > 0 && self.aborted > 0 && self.fetched_tokens > 0 && self.ssd_tokens > 0);
    }
}

/// A network so slow that prefixes come in, and layers go out, while steps run.
fn profile() -> ModelProfile {
    let profile = ModelProfile::load("llama3-70b-a800").expect("a built-in profile");
    ModelProfile { network_bytes_per_s: 4e9, ssd_bytes_per_s: 2e9, ..profile }
}

fn run(seeds: std::ops::Range<u64>) -> Ends {
    let profile = profile();
    let mut ends = Ends::default();
    for seed in seeds {
        println!("seed {seed}");
        ends.add(simulate(&trace(seed), &profile, &options(seed)));
    }
    ends
}

#[test]
fn every_request_ends_once_under_random_faults() {
    run(0..50).check();
}

#[test]
#[ignore = "takes four minutes: make test-long"]
fn every_request_ends_once_under_random_faults_a_thousand_times() {
    run(1000..2000).check();
}

#[test]
fn same_seed_gives_the_same_faults() {
    let profile = profile();
    let run = |seed| simulate(&trace(1), &profile, &SimOptions { seed, ..options(1) });
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).faults, run(8).faults);
}
