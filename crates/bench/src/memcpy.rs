//! Baseline: one thread copies blocks from one region to another, within one process.

use crate::layout::Layout;
use crate::memory::Memory;
use crate::plan::Plan;
use crate::report::{Measured, Report};
use crate::stats::TransferStats;
use crate::{BenchError, usage};

/// Runs it.
pub fn run(plan: &Plan) -> Result<Report, BenchError> {
    let source = Memory::filled(plan)?;
    let target = Memory::cleared(plan)?;
    let layout = Layout::new(plan);
    copy(plan, &layout, &source, &target, crate::initiator::WARM_UP.as_secs_f64())?;
    if plan.verify {
        target.clear();
    }
    let before = usage::cpu_seconds()?;
    let stats = copy(plan, &layout, &source, &target, plan.seconds)?;
    let cpu_seconds = usage::cpu_seconds()? - before;
    if plan.verify {
        target.verify(plan, 0, stats.batches)?;
    }
    Ok(Report::new(plan, plan.carrier.as_str(), &Measured { stats, initiator_cpu_s: cpu_seconds, target_cpu_s: 0.0 }))
}

fn copy(
    plan: &Plan,
    layout: &Layout,
    source: &Memory,
    target: &Memory,
    seconds: f64,
) -> Result<TransferStats, BenchError> {
    let mut stats = TransferStats::default();
    let began = baton_runtime::now();
    let mut now = began;
    while (now - began).as_secs_f64() < seconds {
        let (from, to) = layout.places(stats.batches);
        source.copy_to(from, target, to, plan.block_bytes);
        let after = baton_runtime::now();
        stats.add(plan.block_bytes, after - now);
        now = after;
    }
    stats.elapsed = now - began;
    Ok(stats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Method;
    use crate::plan::tests::plan;

    #[test]
    fn memcpy_baseline_verifies_and_counts_its_bytes() {
        let report = run(&plan(Method::Memcpy)).unwrap();
        assert_eq!(report.bytes, report.batches * 4096);
        assert!(report.batches > 256 && report.verified && report.gb_s > 0.0, "{report:?}");
    }
}
