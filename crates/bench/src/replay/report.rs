//! The figures of a replay, next to those of the simulator.

use std::collections::BTreeMap;
use std::io::{self, Write};

use baton_sim::Summary;
use serde::Serialize;
use serde_json::{Map, Value};

/// What a replay came to.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Of the cluster. What only the simulator knows (predictions, loads, fetches) is 0.
    pub live: Summary,
    /// Of the simulator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<Summary>,
    /// Requests that neither completed nor were rejected, by reason.
    pub failures: BTreeMap<String, usize>,
    /// 99 % of the requests were sent at most this long after their time.
    pub late_p99_s: f64,
}

/// Figures that both have.
const SHOWN: [&str; 16] = [
    "requests",
    "completed",
    "rejected",
    "met",
    "late",
    "failed",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tbt_mean_s",
    "tbt_p50_s",
    "tbt_p90_s",
    "tbt_p99_s",
    "cache_hit_ratio",
    "computed_tokens",
];

impl Report {
    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json { self.json()?.to_string() } else { self.table()? };
        writeln!(io::stdout(), "{text}")
    }

    /// With `ratio`: live over simulated of each figure that both have, where the simulator's is
    /// not 0.
    fn json(&self) -> serde_json::Result<Value> {
        let mut value = serde_json::to_value(self)?;
        if self.simulated.is_some() {
            let ratio =
                SHOWN.iter().map(|name| ((*name).to_owned(), ratio(&value, name).map_or(Value::Null, Value::from)));
            value["ratio"] = Value::Object(ratio.collect::<Map<_, _>>());
        }
        Ok(value)
    }

    fn table(&self) -> serde_json::Result<String> {
        let value = serde_json::to_value(self)?;
        let mut lines = vec![format!("{:<22}{:>12}{:>12}{:>9}", "", "live", "simulated", "ratio")];
        for name in SHOWN {
            let live = figure(&value["live"][name]);
            let simulated = figure(&value["simulated"][name]);
            let ratio = ratio(&value, name).map_or_else(String::new, |ratio| format!("{ratio:.3}"));
            lines.push(format!("{name:<22}{live:>12}{simulated:>12}{ratio:>9}").trim_end().to_owned());
        }
        lines.push(format!("requests were sent up to {:.4} s late (99 %)", self.late_p99_s));
        lines.extend(self.failures.iter().map(|(reason, count)| format!("{count} failed: {reason}")));
        Ok(lines.join("\n"))
    }
}

fn ratio(report: &Value, name: &str) -> Option<f64> {
    let live = report["live"][name].as_f64()?;
    let simulated = report["simulated"][name].as_f64()?;
    (simulated != 0.0).then(|| live / simulated)
}

fn figure(value: &Value) -> String {
    match (value.as_u64(), value.as_f64()) {
        (Some(count), _) => count.to_string(),
        (None, Some(number)) => format!("{number:.4}"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use baton_sim::{Outcome, SimOptions};

    use super::*;

    fn summary(ttft_mean_s: f64, rejected: usize) -> Summary {
        let none = Outcome::of(Vec::new());
        Summary { ttft_mean_s, rejected, ..Summary::of(&none, &SimOptions::default()) }
    }

    fn report(simulated: Option<Summary>) -> Report {
        Report { live: summary(3.0, 4), simulated, failures: [("gone".to_owned(), 2)].into(), late_p99_s: 0.001 }
    }

    #[test]
    fn replay_report_shows_live_and_simulated_with_their_ratio() {
        let report = report(Some(summary(2.0, 0)));
        let json = report.json().unwrap();
        assert_eq!((&json["live"]["ttft_mean_s"], &json["simulated"]["ttft_mean_s"]), (&3.0.into(), &2.0.into()));
        assert_eq!((&json["ratio"]["ttft_mean_s"], &json["ratio"]["rejected"]), (&1.5.into(), &Value::Null));
        let table = report.table().unwrap();
        assert!(table.contains("ttft_mean_s                 3.0000      2.0000    1.500"), "{table}");
        assert!(table.ends_with("2 failed: gone"), "{table}");
    }

    #[test]
    fn replay_report_without_simulation_has_no_ratio() {
        assert!(report(None).json().unwrap().get("ratio").is_none());
        assert!(report(None).table().unwrap().contains("rejected                         4\n"));
    }
}
