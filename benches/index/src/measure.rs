//! Fills and asks the indexes, in turn.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use core_affinity::CoreId;
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, LowerTierIndexer};

use crate::baton::Baton;
use crate::dynamo::{Lane, Positional, Tree};
use crate::index::Index;
use crate::memory;
use crate::report::{Row, Spread, Table};
use crate::workload::{Prompt, Workload};

/// Batches taken in at a time where memory is counted, so that those that wait weigh nothing.
const FEW: usize = 64;

/// An index with its type left behind.
struct Contender {
    name: &'static str,
    check: fn(&Workload) -> Result<f64>,
    round: fn(&Workload) -> Round,
}

/// What one filling and asking gave.
struct Round {
    lookup_p50_ns: f64,
    lookup_p99_ns: f64,
    lookup_mean_ns: f64,
    events_m_blocks_s: f64,
}

const CONTENDERS: [Contender; 6] = [
    contender::<Tree>(),
    contender::<Lane<ConcurrentRadixTreeCompressed>>(),
    contender::<Positional<false>>(),
    contender::<Positional<true>>(),
    contender::<Lane<LowerTierIndexer>>(),
    contender::<Baton>(),
];

const fn contender<I: Index>() -> Contender {
    Contender { name: I::NAME, check: check::<I>, round: round::<I> }
}

/// Cores that the process may use, as long as no thread is bound to one: the first so many.
pub fn cores<const N: usize>() -> Result<[CoreId; N]> {
    let cores = core_affinity::get_core_ids().context("the cores of this machine cannot be listed")?;
    let first = cores.first_chunk().with_context(|| format!("needs {N} cores: {} can be used", cores.len()))?;
    Ok(*first)
}

/// Binds this thread, and those that it starts, to a core.
pub fn pin(core: CoreId) -> Result<()> {
    ensure!(core_affinity::set_for_current(core), "a thread cannot be bound to core {}", core.id);
    Ok(())
}

/// What the clock says of doing nothing.
pub fn clock_ns() -> f64 {
    let mut times: Vec<_> = (0..10_001).map(|_| Instant::now().elapsed().as_nanos() as u64).collect();
    quantile(&mut times, 0.5)
}

/// Measures all indexes.
pub fn table(workload: &Workload, rounds: u32) -> Result<Table> {
    let mut bytes = Vec::new();
    for contender in &CONTENDERS {
        eprintln!("bench-index: {} nodes: {}: memory and answers", workload.nodes, contender.name);
        bytes.push((contender.check)(workload).with_context(|| contender.name)?);
    }
    let mut taken: Vec<Vec<Round>> = CONTENDERS.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds as usize {
        eprintln!("bench-index: {} nodes: round {} of {rounds}", workload.nodes, round + 1);
        // Each round begins with another one.
        for n in (0..CONTENDERS.len()).map(|n| (n + round) % CONTENDERS.len()) {
            taken[n].push((CONTENDERS[n].round)(workload));
        }
    }
    let rows = CONTENDERS.iter().zip(&taken).zip(bytes);
    Ok(Table::new(workload, rows.map(|((contender, taken), bytes)| row(contender, taken, bytes)).collect()))
}

fn row(contender: &Contender, taken: &[Round], bytes_per_entry: f64) -> Row {
    let spread = |figure: fn(&Round) -> f64| Spread::of(taken.iter().map(figure).collect());
    Row {
        name: contender.name,
        lookup_p50_ns: spread(|round| round.lookup_p50_ns),
        lookup_p99_ns: spread(|round| round.lookup_p99_ns),
        lookup_mean_ns: spread(|round| round.lookup_mean_ns),
        events_m_blocks_s: spread(|round| round.events_m_blocks_s),
        bytes_per_entry,
    }
}

/// Bytes per entry; every answer is compared with what the nodes' caches hold.
fn check<I: Index>(workload: &Workload) -> Result<f64> {
    let names = I::names(workload);
    let (index, bytes) = memory::allocated(|| {
        let mut index = I::new(&names);
        for batches in workload.batches.chunks(FEW) {
            batches.iter().for_each(|batch| index.enqueue(&names, batch));
            index.drain(&names);
        }
        index
    });
    for (n, prompt) in workload.one_by_one.iter().chain(&workload.in_a_row).enumerate() {
        let depths = index.depths(index.lookup(&mut I::prompt(&names, &prompt.blocks)));
        let differs = depths.iter().zip(&prompt.depths).find(|(found, held)| found != held);
        ensure!(
            depths == prompt.depths,
            "lookup {n}: {} nodes found and {} hold some of it; first difference (node, blocks): {differs:?}",
            depths.len(),
            prompt.depths.len()
        );
    }
    Ok(bytes as f64 / workload.entries as f64)
}

fn round<I: Index>(workload: &Workload) -> Round {
    let names = I::names(workload);
    let mut index = I::new(&names);
    workload.batches.iter().for_each(|batch| index.enqueue(&names, batch));
    let begin = Instant::now();
    index.drain(&names);
    let fill = begin.elapsed();

    let prepare =
        |prompts: &[Prompt]| -> Vec<_> { prompts.iter().map(|prompt| I::prompt(&names, &prompt.blocks)).collect() };
    let ask = |prompt: &mut I::Prompt| drop(black_box(index.lookup(black_box(prompt))));
    let mut prompts = prepare(&workload.one_by_one);
    let timed = |prompt: &mut I::Prompt| {
        let begin = Instant::now();
        ask(prompt);
        begin.elapsed().as_nanos() as u64
    };
    let mut times: Vec<_> = prompts.iter_mut().map(timed).collect();
    let mut prompts = prepare(&workload.in_a_row);
    let begin = Instant::now();
    prompts.iter_mut().for_each(ask);
    let row = begin.elapsed();
    Round {
        lookup_p50_ns: quantile(&mut times, 0.5),
        lookup_p99_ns: quantile(&mut times, 0.99),
        lookup_mean_ns: row.as_nanos() as f64 / prompts.len() as f64,
        events_m_blocks_s: (workload.stored + workload.removed) as f64 / fill.as_secs_f64() / 1e6,
    }
}

/// A quantile of some times; sorts them.
pub fn quantile(times: &mut [u64], q: f64) -> f64 {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * q) as usize] as f64
}
