//! Fills and asks indexes, in turn.

use std::hint::black_box;

use super::contender::{Contender, Index};
use super::report::{Row, Spread, Table};
use super::workload::{Prompt, Workload};
use super::{allocator, progress};
use crate::BenchError;

/// Batches taken in at a time while memory is counted, so that those that wait weigh nothing.
const FEW: usize = 64;

/// What one filling and asking gave.
#[derive(Debug)]
pub struct Round {
    lookup_p50_ns: f64,
    lookup_p99_ns: f64,
    lookup_mean_ns: f64,
    events_m_blocks_s: f64,
}

/// What the clock says of doing nothing.
pub fn clock_ns() -> f64 {
    let mut times: Vec<_> = (0..10_001).map(|_| baton_runtime::now().elapsed().as_nanos() as u64).collect();
    quantile(&mut times, 0.5)
}

/// Measures them.
pub fn table(workload: &Workload, contenders: &[Contender], rounds: u32) -> Result<Table, BenchError> {
    let mut bytes = Vec::new();
    for contender in contenders {
        progress(&format!("{} nodes: {}: memory and answers", workload.nodes, contender.name));
        bytes.push((contender.check)(workload)?);
    }
    let mut taken: Vec<Vec<Round>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds as usize {
        progress(&format!("{} nodes: round {} of {rounds}", workload.nodes, round + 1));
        // Each round begins with another one.
        for n in (0..contenders.len()).map(|n| (n + round) % contenders.len()) {
            taken[n].push((contenders[n].round)(workload));
        }
    }
    let rows = contenders.iter().zip(&taken).zip(bytes);
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
pub fn check<I: Index>(workload: &Workload) -> Result<f64, BenchError> {
    let names = I::names(workload);
    let (index, bytes) = allocator::allocated(|| filled::<I>(workload, &names));
    compare(workload, &names, &index)?;
    match bytes {
        0 => Err(wrong::<I>("its memory was not counted: the program has another allocator".to_owned())),
        bytes => Ok(bytes as f64 / workload.entries as f64),
    }
}

fn filled<I: Index>(workload: &Workload, names: &I::Names) -> I {
    let mut index = I::new(names);
    for batches in workload.batches.chunks(FEW) {
        batches.iter().for_each(|batch| index.enqueue(names, batch));
        index.drain(names);
    }
    index
}

fn compare<I: Index>(workload: &Workload, names: &I::Names, index: &I) -> Result<(), BenchError> {
    for (n, prompt) in workload.one_by_one.iter().chain(&workload.in_a_row).enumerate() {
        let depths = index.depths(index.lookup(&mut I::prompt(names, &prompt.blocks)));
        if depths != prompt.depths {
            let differs = depths.iter().zip(&prompt.depths).find(|(found, held)| found != held);
            let found = depths.len();
            let held = prompt.depths.len();
            let problem = format!(
                "lookup {n}: {found} nodes found and {held} hold some of it; first difference (node, blocks): {differs:?}"
            );
            return Err(wrong::<I>(problem));
        }
    }
    Ok(())
}

fn wrong<I: Index>(problem: String) -> BenchError {
    BenchError::Index { index: I::NAME, problem }
}

/// Fills an index and asks it.
pub fn round<I: Index>(workload: &Workload) -> Round {
    let names = I::names(workload);
    let mut index = I::new(&names);
    workload.batches.iter().for_each(|batch| index.enqueue(&names, batch));
    let begin = baton_runtime::now();
    index.drain(&names);
    let fill = begin.elapsed();

    let prepare =
        |prompts: &[Prompt]| -> Vec<_> { prompts.iter().map(|prompt| I::prompt(&names, &prompt.blocks)).collect() };
    let ask = |prompt: &mut I::Prompt| drop(black_box(index.lookup(black_box(prompt))));
    let mut prompts = prepare(&workload.one_by_one);
    let timed = |prompt: &mut I::Prompt| {
        let begin = baton_runtime::now();
        ask(prompt);
        begin.elapsed().as_nanos() as u64
    };
    let mut times: Vec<_> = prompts.iter_mut().map(timed).collect();
    let mut prompts = prepare(&workload.in_a_row);
    let begin = baton_runtime::now();
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

#[cfg(test)]
mod tests {
    use super::super::baton::Baton;
    use super::*;

    fn workload() -> Workload {
        Workload::new(&[vec![1, 2, 3], vec![1, 4, 5, 6], vec![1, 2, 3, 7]], 9, 50, 1).unwrap()
    }

    #[test]
    fn wrong_index_lookup_is_an_error() {
        let mut workload = workload();
        let names = Baton::names(&workload);
        let index = filled::<Baton>(&workload, &names);
        compare(&workload, &names, &index).unwrap();
        let prompt = workload.one_by_one.iter_mut().find(|prompt| !prompt.depths.is_empty()).unwrap();
        prompt.depths[0].1 += 1;
        let error = compare(&workload, &names, &index).unwrap_err().to_string();
        assert!(error.starts_with("baton PrefixIndex: lookup "), "{error}");
    }

    #[test]
    fn index_bench_round_has_positive_figures() {
        let round = round::<Baton>(&workload());
        assert!(round.events_m_blocks_s > 0.0 && round.lookup_mean_ns > 0.0);
        assert!(round.lookup_p50_ns > 0.0 && round.lookup_p50_ns <= round.lookup_p99_ns);
    }

    #[test]
    fn index_bench_quantiles_are_of_sorted_times() {
        let mut times: Vec<u64> = (1..=101).rev().collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|q| quantile(&mut times, q)), [1.0, 51.0, 100.0, 101.0]);
    }
}
