//! What is to be measured: the same on both ends.

use std::time::Duration;

use baton_transfer_engine::{TransportChoice, TransportKind};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::BenchError;

/// Largest working set, bytes: what a host could have.
const MAX_WORKING_SET: u64 = 1 << 42;
/// Most batches under way.
const MAX_DEPTH: u32 = 1024;
/// Longest measurement, seconds.
const MAX_SECONDS: f64 = 3600.0;

/// How the blocks are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum Method {
    /// The engine, over these transports.
    Engine(TransportChoice),
    /// Baseline: blocking `write` and `read` on one TCP connection.
    CopyLoop,
    /// Baseline: one thread copies within one process.
    Memcpy,
}

impl Method {
    /// As in flags and reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Engine(transport) => transport.as_str(),
            Self::CopyLoop => "copy-loop",
            Self::Memcpy => "memcpy",
        }
    }

    /// Whether the engine has no part in it.
    pub const fn is_baseline(self) -> bool {
        matches!(self, Self::CopyLoop | Self::Memcpy)
    }

    /// Whether other processes must be able to map the memory.
    pub(crate) fn shares_memory(self) -> bool {
        matches!(self, Self::Engine(transport) if transport.allows(TransportKind::Shm))
    }

    /// What the engine is told.
    pub(crate) const fn choice(self) -> TransportChoice {
        match self {
            Self::Engine(transport) => transport,
            Self::CopyLoop | Self::Memcpy => TransportChoice::Auto,
        }
    }
}

impl From<Method> for &'static str {
    fn from(method: Method) -> Self {
        method.as_str()
    }
}

impl TryFrom<String> for Method {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let baseline = [Self::CopyLoop, Self::Memcpy].into_iter().find(|method| method.as_str() == text);
        baseline.map_or_else(|| text.parse().map(Self::Engine), Ok)
    }
}

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// From the initiator's memory into the target's.
    Write,
    /// From the target's memory into the initiator's.
    Read,
}

impl Op {
    /// As in flags and reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// What is to be measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// How the blocks are moved.
    pub carrier: Method,
    /// Which way.
    pub op: Op,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Blocks of a batch.
    pub spans: u32,
    /// Batches under way at a time.
    pub depth: u32,
    /// Connections.
    pub lanes: u32,
    /// Bytes of memory on each side.
    pub working_set: u64,
    /// How long to measure.
    pub seconds: f64,
    /// Of the order of blocks.
    pub seed: u64,
    /// Whether to compare every byte at the end.
    pub verify: bool,
}

impl Plan {
    /// Blocks that fit into the working set.
    pub fn blocks(&self) -> u64 {
        self.working_set / self.block_bytes.max(1)
    }

    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Whether it can be run; both ends ask.
    pub fn check(&self) -> Result<(), BenchError> {
        self.check_ranges()?;
        if self.carrier.is_baseline() { self.check_baseline() } else { Ok(()) }
    }

    fn check_ranges(&self) -> Result<(), BenchError> {
        within("--working-set", self.working_set, 1, MAX_WORKING_SET)?;
        within("--block-bytes", self.block_bytes, 1, self.working_set)?;
        // The order of blocks counts them in 32 bits.
        within("--working-set (in blocks)", self.blocks(), 1, u64::from(u32::MAX))?;
        within("--spans", self.spans.into(), 1, self.blocks())?;
        within("--depth", self.depth.into(), 1, u64::from(MAX_DEPTH))?;
        within("--lanes", self.lanes.into(), 1, 64)?;
        if !(self.seconds > 0.0 && self.seconds <= MAX_SECONDS) {
            return Err(BenchError::invalid("--seconds", format!("{}, expected up to {MAX_SECONDS}", self.seconds)));
        }
        // Two batches under way must never have a block in common.
        let under_way = u64::from(self.spans) * u64::from(self.depth);
        if under_way > self.blocks() {
            let problem = format!("{under_way} blocks under way, but the working set has {}", self.blocks());
            return Err(BenchError::invalid("--depth", problem));
        }
        Ok(())
    }

    fn check_baseline(&self) -> Result<(), BenchError> {
        for (field, value) in [("--spans", self.spans), ("--depth", self.depth), ("--lanes", self.lanes)] {
            if value != 1 {
                return Err(BenchError::invalid(field, format!("{value}, but a baseline has 1")));
            }
        }
        match self.op {
            Op::Write => Ok(()),
            Op::Read => Err(BenchError::invalid("--op", "read, but a baseline only writes")),
        }
    }
}

fn within(field: &'static str, value: u64, least: u64, most: u64) -> Result<(), BenchError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(BenchError::invalid(field, format!("{value}, expected from {least} to {most}")))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TCP: Method = Method::Engine(TransportChoice::Only(TransportKind::Tcp));
    pub(crate) const SHM: Method = Method::Engine(TransportChoice::Only(TransportKind::Shm));

    pub(crate) fn plan(carrier: Method) -> Plan {
        let (spans, depth, lanes) = if carrier.is_baseline() { (1, 1, 1) } else { (4, 2, 2) };
        Plan {
            carrier,
            op: Op::Write,
            block_bytes: 4096,
            spans,
            depth,
            lanes,
            working_set: 1 << 20,
            seconds: 0.05,
            seed: 1,
            verify: true,
        }
    }

    #[track_caller]
    fn refused(plan: Plan, flag: &str) {
        match plan.check() {
            Err(BenchError::Invalid { field, .. }) => assert!(field.starts_with(flag), "{field}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn transfer_bench_plan_over_limit_names_its_flag() {
        let fine = plan(TCP);
        fine.check().unwrap();
        refused(Plan { working_set: 0, ..fine }, "--working-set");
        refused(Plan { block_bytes: 2 << 20, ..fine }, "--block-bytes");
        refused(Plan { block_bytes: 1, working_set: 1 << 40, ..fine }, "--working-set");
        refused(Plan { spans: 257, ..fine }, "--spans");
        refused(Plan { spans: 0, ..fine }, "--spans");
        refused(Plan { depth: 65, ..fine }, "--depth");
        refused(Plan { lanes: 0, ..fine }, "--lanes");
        refused(Plan { seconds: f64::NAN, ..fine }, "--seconds");
        refused(Plan { op: Op::Read, ..plan(Method::CopyLoop) }, "--op");
        refused(Plan { depth: 2, ..plan(Method::CopyLoop) }, "--depth");
        Plan { depth: 64, ..fine }.check().unwrap();
        Plan { op: Op::Read, ..fine }.check().unwrap();
    }

    #[test]
    fn transfer_bench_plan_round_trips() {
        let plan = plan(Method::CopyLoop);
        let text = serde_json::to_string(&plan).unwrap();
        assert!(text.contains(r#""carrier":"copy-loop""#), "{text}");
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }
}
