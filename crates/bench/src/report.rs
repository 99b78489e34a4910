//! The figures of a run.

use std::io::{self, Write};

use serde::Serialize;

use crate::plan::Plan;
use crate::stats::TransferStats;
use crate::table::named_values;

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// Batches, bytes and latencies.
    pub stats: TransferStats,
    /// CPU seconds of the initiator's process during the measurement.
    pub initiator_cpu_s: f64,
    /// CPU seconds of the target's process.
    pub target_cpu_s: f64,
}

/// The figures of a run. GB are 1e9 bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What carried the blocks: tcp, shm, rdma, copy-loop or memcpy.
    pub transport: String,
    /// `write` or `read`.
    pub op: &'static str,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Blocks of a batch.
    pub spans: u32,
    /// Batches under way at a time.
    pub depth: u32,
    /// Most connections.
    pub lanes: u32,
    /// Bytes of memory on each side.
    pub working_set: u64,
    /// Of the order of blocks.
    pub seed: u64,
    /// From the first batch's start to the last one's end.
    pub seconds: f64,
    /// Batches that completed.
    pub batches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Rate.
    pub gb_s: f64,
    /// Median latency of a batch, microseconds.
    pub p50_us: u64,
    /// 99th percentile of it.
    pub p99_us: u64,
    /// Longest.
    pub max_us: u64,
    /// CPU seconds of both processes for each GB.
    pub cpu_seconds_per_gb: f64,
    /// CPU seconds of the initiator's process.
    pub initiator_cpu_s: f64,
    /// CPU seconds of the target's process.
    pub target_cpu_s: f64,
    /// Whether every byte was compared; a wrong one is an error, not a report.
    pub verified: bool,
}

impl Report {
    pub(crate) fn new(plan: &Plan, transport: &str, measured: &Measured) -> Self {
        let stats = &measured.stats;
        let cpu_s = measured.initiator_cpu_s + measured.target_cpu_s;
        Self {
            transport: transport.to_owned(),
            op: plan.op.as_str(),
            block_bytes: plan.block_bytes,
            spans: plan.spans,
            depth: plan.depth,
            lanes: plan.lanes,
            working_set: plan.working_set,
            seed: plan.seed,
            seconds: stats.elapsed.as_secs_f64(),
            batches: stats.batches,
            bytes: stats.bytes,
            gb_s: stats.gb_s(),
            p50_us: stats.latencies.quantile_us(0.5),
            p99_us: stats.latencies.quantile_us(0.99),
            max_us: stats.latencies.quantile_us(1.0),
            cpu_seconds_per_gb: cpu_s * 1e9 / stats.bytes.max(1) as f64,
            initiator_cpu_s: measured.initiator_cpu_s,
            target_cpu_s: measured.target_cpu_s,
            verified: plan.verify,
        }
    }

    pub(crate) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json { serde_json::to_string(self)? } else { self.table() };
        writeln!(io::stdout(), "{text}")
    }

    fn table(&self) -> String {
        named_values(&[
            ("path", format!("{} {}", self.transport, self.op)),
            (
                "blocks",
                format!("{} bytes x {}, scattered over {} bytes", self.block_bytes, self.spans, self.working_set),
            ),
            ("under way", format!("{} batches, {} lanes", self.depth, self.lanes)),
            ("transferred", format!("{} bytes in {} batches, {:.2} s", self.bytes, self.batches, self.seconds)),
            ("rate", format!("{:.3} GB/s", self.gb_s)),
            ("batch latency", format!("p50 {} us, p99 {} us, max {} us", self.p50_us, self.p99_us, self.max_us)),
            ("CPU", format!("{:.3} s per GB, both processes", self.cpu_seconds_per_gb)),
            ("bytes", if self.verified { "all compared" } else { "not compared (--verify)" }.to_owned()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::plan::tests::{TCP, plan};

    fn report() -> Report {
        let mut stats = TransferStats::default();
        stats.add(500_000_000, Duration::from_millis(100));
        stats.add(500_000_000, Duration::from_millis(300));
        stats.elapsed = Duration::from_millis(400);
        Report::new(&plan(TCP), "tcp", &Measured { stats, initiator_cpu_s: 0.25, target_cpu_s: 0.5 })
    }

    #[test]
    fn transfer_bench_json_has_the_documented_fields() {
        let json = serde_json::to_value(report()).unwrap();
        for (field, value) in [("gb_s", 2.5), ("cpu_seconds_per_gb", 0.75), ("seconds", 0.4)] {
            assert!((json[field].as_f64().unwrap() - value).abs() < 1e-9, "{field}: {}", json[field]);
        }
        for (field, value) in
            [("bytes", 1_000_000_000), ("batches", 2), ("block_bytes", 4096), ("working_set", 1 << 20)]
        {
            assert_eq!(json[field], value, "{field}");
        }
        assert_eq!((&json["transport"], &json["op"]), (&"tcp".into(), &"write".into()));
        // Three digits of a latency count.
        assert!(json["p50_us"].as_u64().unwrap().abs_diff(100_000) <= 100, "{}", json["p50_us"]);
        assert!(json["p99_us"].as_u64().unwrap().abs_diff(300_000) <= 300, "{}", json["p99_us"]);
    }

    #[test]
    fn transfer_bench_table_shows_rate_and_unit() {
        assert!(report().table().contains("rate          2.500 GB/s"), "{}", report().table());
    }
}
