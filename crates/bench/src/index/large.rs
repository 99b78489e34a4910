//! Baton alone at size: lookups in one thread, and in another events as fast as they are taken.
//!
//! Prompts have 128 blocks. They come in families of 8 that share the first 32 blocks, of which one
//! begins every prompt; 4 nodes hold a family. An event batch is what a request would make: one
//! prompt's blocks stored, or removed. The writer removes the oldest family and stores a new one,
//! again and again, so that the number of entries stays.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use baton_sim::Random;
use baton_types::{BlockHash, KvEvent};
use serde::Serialize;

use super::args::IndexArgs;
use super::baton::{Shared, hash};
use super::measure::quantile;
use super::{allocator, cores, progress};
use crate::BenchError;

const NODES: u32 = 1000;
/// Fewer would be a few families only.
pub const LEAST_ENTRIES: u64 = 100_000;
/// Nodes that hold a family.
const HOLDERS: u32 = 4;
/// Prompts of a family.
const PROMPTS: u64 = 8;
/// Blocks of a prompt.
const BLOCKS: u64 = 128;
/// Leading blocks that a family shares.
const SHARED: u64 = 32;
/// Entries of a family; the first block of all is not its own.
const FAMILY_ENTRIES: u64 = (SHARED - 1 + PROMPTS * (BLOCKS - SHARED)) * HOLDERS as u64;

/// What was measured.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// That report.
    pub nodes: u32,
    /// Pairs of a block and a node that holds it.
    pub entries: u64,
    /// All of which some nodes hold.
    pub blocks_per_lookup: u64,
    /// While nothing else ran.
    pub fill_m_blocks_s: f64,
    /// Once filled.
    pub bytes_per_entry: f64,
    /// Lookups while nothing else runs.
    pub alone: Lookups,
    /// Lookups while events come.
    pub beside_events: Lookups,
    /// Blocks stored and removed during those lookups.
    pub events_m_blocks_s: f64,
}

/// Times of lookups, clock included.
#[derive(Debug, Serialize)]
pub struct Lookups {
    /// How many there were.
    pub count: usize,
    /// Median.
    pub p50_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
    /// 99.9th percentile.
    pub p999_ns: f64,
    /// Longest.
    pub longest_ns: f64,
}

/// Hash of a block of a prompt of a family.
fn block(family: u64, prompt: u64, position: u64) -> BlockHash {
    hash(match position {
        0 => 0,
        _ if position < SHARED => (1 + family * (PROMPTS + 1)) << 8 | position,
        _ => (2 + family * (PROMPTS + 1) + prompt) << 8 | position,
    })
}

/// The nodes that hold a family: one by chance, the others at equal distances.
fn holders(family: u64) -> impl Iterator<Item = u32> {
    let first = Random::new(family).below(NODES.into()) as u32;
    (0..HOLDERS).map(move |n| (first + n * (NODES / HOLDERS)) % NODES)
}

/// The one thread that applies events.
struct Writer<'a> {
    index: &'a Shared,
    sequences: Vec<u64>,
    events: Vec<KvEvent>,
    blocks: u64,
}

impl<'a> Writer<'a> {
    /// Every node stores the first block of all.
    fn new(index: &'a Shared) -> Self {
        let mut writer = Self { index, sequences: vec![0; NODES as usize], events: Vec::new(), blocks: 0 };
        for node in 0..NODES {
            writer.events.push(KvEvent::Stored { hash: block(0, 0, 0), parent: None });
            writer.apply(node);
        }
        writer
    }

    fn apply(&mut self, node: u32) {
        let sequence = &mut self.sequences[node as usize];
        self.index.apply(node, *sequence, &self.events);
        *sequence += self.events.len() as u64;
        self.blocks += self.events.len() as u64;
        self.events.clear();
    }

    fn store(&mut self, family: u64) {
        for (node, prompt) in holders(family).flat_map(|node| (0..PROMPTS).map(move |prompt| (node, prompt))) {
            let first = if prompt == 0 { 1 } else { SHARED };
            self.events.extend((first..BLOCKS).map(|position| KvEvent::Stored {
                hash: block(family, prompt, position),
                parent: Some(block(family, prompt, position - 1)),
            }));
            self.apply(node);
        }
    }

    fn remove(&mut self, family: u64) {
        for (node, prompt) in holders(family).flat_map(|node| (0..PROMPTS).rev().map(move |prompt| (node, prompt))) {
            let first = if prompt == 0 { 1 } else { SHARED };
            let removed = |position| KvEvent::Removed { hash: block(family, prompt, position) };
            self.events.extend((first..BLOCKS).rev().map(removed));
            self.apply(node);
        }
    }
}

/// Fills the index, then asks it alone and during events.
pub fn run(args: &IndexArgs) -> Result<Figures, BenchError> {
    let time = Duration::from_secs(args.seconds.into());
    let families = u64::from(args.entries) / FAMILY_ENTRIES;
    let [asking, writing] = cores::usable("--large")?;
    cores::bind(writing)?;
    progress(&format!("{} entries are stored", args.entries));
    let begin = baton_runtime::now();
    let ((index, sequences, blocks), bytes) = allocator::allocated(|| {
        let index = Shared::new(NODES);
        let mut writer = Writer::new(&index);
        (0..families).for_each(|family| writer.store(family));
        let Writer { sequences, blocks, .. } = writer;
        (index, sequences, blocks)
    });
    let filled = begin.elapsed();
    let oldest = AtomicU64::new(0);
    let asked = |seed| cores::bind(asking).map(|()| ask(&index, families, &oldest, time, seed));
    let alone = std::thread::scope(|scope| join(scope.spawn(|| asked(args.seed))))?;

    let ended = AtomicBool::new(false);
    let mut writer = Writer { index: &index, sequences, events: Vec::new(), blocks: 0 };
    let begin = baton_runtime::now();
    let beside_events = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let lookups = asked(args.seed.wrapping_add(1));
            ended.store(true, Ordering::Relaxed);
            lookups
        });
        let mut family = 0;
        while !ended.load(Ordering::Relaxed) && !thread.is_finished() {
            writer.store(family + families);
            oldest.store(family + 1, Ordering::Relaxed);
            writer.remove(family);
            family += 1;
        }
        join(thread)
    })?;
    Ok(Figures {
        nodes: NODES,
        entries: families * FAMILY_ENTRIES + u64::from(NODES),
        blocks_per_lookup: BLOCKS,
        fill_m_blocks_s: blocks as f64 / filled.as_secs_f64() / 1e6,
        bytes_per_entry: bytes as f64 / blocks as f64,
        alone,
        beside_events,
        events_m_blocks_s: writer.blocks as f64 / begin.elapsed().as_secs_f64() / 1e6,
    })
}

fn join(thread: std::thread::ScopedJoinHandle<'_, Result<Lookups, BenchError>>) -> Result<Lookups, BenchError> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Looks up prompts of families that are whole, drawn by chance.
fn ask(index: &Shared, families: u64, oldest: &AtomicU64, time: Duration, seed: u64) -> Lookups {
    let mut random = Random::new(seed);
    let mut times = Vec::with_capacity(1 << 24);
    let mut prompt = Vec::with_capacity(BLOCKS as usize);
    let begin = baton_runtime::now();
    while begin.elapsed() < time && times.len() < times.capacity() {
        // Not the oldest tenth: the writer may remove it before it is asked for.
        let age = families / 10 + random.below(families * 9 / 10);
        let family = oldest.load(Ordering::Relaxed) + age;
        let number = random.below(PROMPTS);
        prompt.clear();
        prompt.extend((0..BLOCKS).map(|position| block(family, number, position)));
        let begin = baton_runtime::now();
        let found = index.lookup(&prompt);
        let took = begin.elapsed();
        // If this thread stood still for long, the writer may have removed it.
        if oldest.load(Ordering::Relaxed) > family {
            continue;
        }
        times.push(took.as_nanos() as u64);
        // All nodes hold the first block.
        assert_eq!(found, (NODES as usize, BLOCKS as u32), "prompt {number} of family {family}");
    }
    let [p50_ns, p99_ns, p999_ns, longest_ns] = [0.5, 0.99, 0.999, 1.0].map(|q| quantile(&mut times, q));
    Lookups { count: times.len(), p50_ns, p99_ns, p999_ns, longest_ns }
}
