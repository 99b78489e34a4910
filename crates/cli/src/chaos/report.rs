//! What came of it.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_sim::Spread;
use serde_json::{Value, json};

use super::faults::{FaultKind, Faults};
use super::processes::Process;
use super::streams::{Again, Ends, Streams};
use crate::error::CliError;

/// So many of a hundred requests have to succeed.
const LEAST_RIGHT: f64 = 0.99;
/// Failures that are told.
const TOLD: usize = 5;

impl Ends {
    /// Of all clients.
    pub fn of_all(ends: Vec<Self>) -> Self {
        ends.into_iter().fold(Self::default(), |mut all, one| {
            all.right += one.right;
            all.again.add(&one.again);
            all.different.extend(one.different);
            all.failed.extend(one.failed);
            all.rejected.extend(one.rejected);
            all
        })
    }
}

/// Memory of processes that lived from the first look to the last.
#[derive(Default)]
pub struct Memory {
    before: Vec<(String, Process, u64)>,
    growth: Vec<(String, f64)>,
}

impl Memory {
    pub fn has_begun(&self) -> bool {
        !self.before.is_empty()
    }

    /// Looks for the first time, at processes by name and address.
    pub fn begin(&mut self, all: impl Iterator<Item = (String, String)>) {
        let of = |(name, address): (String, String)| {
            let process = Process::listening(&address)?;
            Some((name, process, process.resident_bytes()?))
        };
        self.before = all.filter_map(of).collect();
    }

    /// Looks for the last time.
    pub fn at_end(&mut self) {
        let grown = self.before.iter().filter_map(|(name, process, before)| {
            let after = process.resident_bytes()?;
            Some((name.clone(), after as f64 / (*before).max(1) as f64 - 1.0))
        });
        self.growth = grown.collect();
    }
}

/// The longest gaps after the faults of one kind, at nodes of one role.
struct Gaps {
    kind: FaultKind,
    role: String,
    /// Ascending.
    longest: Vec<Duration>,
}

/// See the module's text.
pub struct Report {
    ends: Ends,
    gaps: Vec<Gaps>,
    growth: Vec<(String, f64)>,
    /// How long it took until nothing was left, or what was.
    aftermath: Result<Duration, String>,
}

impl Report {
    pub fn new(
        ends: Ends,
        faults: &Faults,
        streams: &Streams,
        memory: &Memory,
        aftermath: Result<Duration, String>,
    ) -> Self {
        let mut by_kind: BTreeMap<(FaultKind, String), Vec<Duration>> = BTreeMap::new();
        for (done, longest) in faults.done().iter().zip(streams.faults().gaps()) {
            by_kind.entry(done.clone()).or_default().push(longest);
        }
        let gaps = by_kind.into_iter().map(|((kind, role), mut longest)| {
            longest.sort();
            Gaps { kind, role, longest }
        });
        Self { ends, gaps: gaps.collect(), growth: memory.growth.clone(), aftermath }
    }

    pub fn text(&self) -> String {
        let Ends { right, again, different, failed, rejected } = &self.ends;
        let mut lines = vec![format!(
            "{} requests: {right} as without faults, {} different, {} failed, {} rejected",
            self.ends.count(),
            different.len(),
            failed.len(),
            rejected.len()
        )];
        for (what, list) in [("different", different), ("failed", failed), ("rejected", rejected)] {
            lines.extend(list.iter().take(TOLD).map(|one| format!("  {what}: {one}")));
        }
        if again.count > 0 {
            let Again { count, elsewhere, at_several, interrupted, attached, from_cache } = again;
            lines.push(format!(
                "{count} of them were asked for again, {elsewhere} at another conductor, {at_several} at more than one"
            ));
            let anew = interrupted - attached - from_cache;
            lines.push(format!(
                "  of {interrupted} that had begun, {attached} attached, {from_cache} were served from cached prompts, {anew} anew"
            ));
        }
        for Gaps { kind, role, longest } in &self.gaps {
            let spread = Spread::of(longest.iter().map(Duration::as_secs_f64));
            let half = spread.quantile(0.5);
            let most = spread.quantile(1.0);
            let count = longest.len();
            lines.push(format!(
                "longest gap after {count} x {} {role}: p50 {half:.2} s, max {most:.2} s",
                kind.as_str()
            ));
        }
        if let Some((name, most)) = self.growth.iter().max_by(|a, b| a.1.total_cmp(&b.1)) {
            let count = self.growth.len();
            lines.push(format!("memory of {count} survivors: at most {:+.1} % ({name})", 100.0 * most));
        }
        lines.push(match &self.aftermath {
            Ok(time) => {
                format!(
                    "every block is accounted for, and no block is in use {:.1} s after the last",
                    time.as_secs_f64()
                )
            }
            Err(left) => format!("left: {left}"),
        });
        lines.join("\n")
    }

    pub fn json(&self) -> Value {
        let Ends { right, again, different, failed, rejected } = &self.ends;
        let gaps = |gaps: &Gaps| {
            let seconds: Vec<_> = gaps.longest.iter().map(Duration::as_secs_f64).collect();
            json!({ "fault": gaps.kind.as_str(), "role": gaps.role, "longest_gap_s": seconds })
        };
        json!({
            "requests": self.ends.count(), "right": right, "asked_again": again.count,
            "asked_elsewhere": again.elsewhere, "asked_at_several": again.at_several,
            "interrupted": again.interrupted, "attached": again.attached,
            "from_cache": again.from_cache, "different": different, "failed": failed, "rejected": rejected,
            "faults": self.gaps.iter().map(gaps).collect::<Vec<_>>(),
            "memory_growth": self.growth.iter().map(|(name, grown)| json!({ "process": name, "growth": grown })).collect::<Vec<_>>(),
            "left": self.aftermath.as_ref().err(),
            "idle_after_s": self.aftermath.as_ref().ok().map(Duration::as_secs_f64),
        })
    }

    /// Whether the cluster has kept its promise.
    pub fn verdict(&self) -> Result<(), CliError> {
        let share = self.ends.right as f64 / self.ends.count().max(1) as f64;
        let problem = match (&self.aftermath, self.ends.different.len()) {
            (_, different) if different > 0 => format!("{different} answers differ from those without faults"),
            _ if self.ends.count() == 0 => "no request ended".to_owned(),
            _ if share < LEAST_RIGHT => format!("{:.1} % of the requests succeeded", 100.0 * share),
            (Err(left), _) => left.clone(),
            (Ok(_), _) => return Ok(()),
        };
        Err(CliError::Cluster(problem))
    }
}
