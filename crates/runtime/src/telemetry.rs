//! Logs and metrics.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use metrics::Gauge;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, registry, reload};

pub use crate::log_filter::LogFilter;
use crate::settings::BadSetting;

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts values by size; upper bounds of its buckets.
    Histogram(&'static [f64]),
}

/// A metric that a crate registers. Each crate lists its own in `METRICS`, and `docs/metrics.md` is
/// those lists.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetricDoc {
    /// `baton_<subsystem>_<noun>_<unit>`.
    pub name: &'static str,
    /// What it is.
    pub kind: MetricKind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it tells.
    pub help: &'static str,
}

/// Buckets for times to first token and whole requests, seconds (those that vLLM's users know).
pub const LATENCY_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Buckets for gaps between tokens and steps, seconds.
pub const GAP_BUCKETS: &[f64] = &[
    0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
];

const RESIDENT: &str = "baton_process_resident_bytes";
const BUILD: &str = "baton_build_info";
pub(crate) const TASK_PANICS: &str = "baton_process_task_panics_total";

/// What every process registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc { name: RESIDENT, kind: MetricKind::Gauge, labels: &[], help: "Bytes of the process's resident memory." },
    MetricDoc {
        name: BUILD,
        kind: MetricKind::Gauge,
        labels: &["version"],
        help: "Always 1; the label is the version.",
    },
    MetricDoc {
        name: TASK_PANICS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Tasks of one request or session that panicked. Each is a bug.",
    },
];

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Sends log lines to stderr. A second call in one process does nothing.
///
/// # Errors
/// `filter` is no [`LogFilter`].
pub fn init_logs(format: LogFormat, filter: &str) -> Result<(), BadSetting> {
    let first: LogFilter = filter.parse()?;
    let (layer, handle) = reload::Layer::new(first.targets());
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // An error means that a subscriber is installed already.
    if registry().with(layer).with(lines).try_init().is_ok() {
        LOGS.get_or_init(|| Logs { first, handle });
    }
    Ok(())
}

struct Logs {
    /// The filter that the process was started with.
    first: LogFilter,
    handle: reload::Handle<Targets, Registry>,
}

/// The filter of log lines is the process's, as the subscriber is.
static LOGS: OnceLock<Logs> = OnceLock::new();

/// Has log lines filtered by this from now on, or as the process was started if there is none. Does
/// nothing if [`init_logs`] was not called.
pub fn set_log_filter(filter: Option<&LogFilter>) {
    let Some(logs) = LOGS.get() else { return };
    // It fails if the subscriber is gone, which lives as long as the process.
    let _ = logs.handle.reload(filter.unwrap_or(&logs.first).targets());
}

/// The metrics of this process.
#[derive(Clone)]
pub struct Telemetry {
    handle: PrometheusHandle,
    resident: Gauge,
}

impl Telemetry {
    /// How often [`Telemetry::upkeep`] is to be called.
    pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

    /// Installs the recorder of this process and describes `metrics`, and those that every process
    /// has, to it. Before any handle is made.
    pub fn install(metrics: &[&[MetricDoc]]) -> Result<Self, BuildError> {
        let builder = Self::builder(metrics)?;
        let handle = builder.install_recorder()?;
        for doc in metrics.iter().copied().flatten().chain(METRICS) {
            match doc.kind {
                MetricKind::Counter => {
                    metrics::describe_counter!(doc.name, doc.help);
                    if doc.labels.is_empty() {
                        metrics::counter!(doc.name).absolute(0);
                    }
                }
                MetricKind::Gauge => metrics::describe_gauge!(doc.name, doc.help),
                MetricKind::Histogram(_) => metrics::describe_histogram!(doc.name, doc.help),
            }
        }
        metrics::gauge!(BUILD, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        Ok(Self { handle, resident: metrics::gauge!(RESIDENT) })
    }

    fn builder(metrics: &[&[MetricDoc]]) -> Result<PrometheusBuilder, BuildError> {
        let mut builder = PrometheusBuilder::new();
        for doc in metrics.iter().copied().flatten() {
            if let MetricKind::Histogram(buckets) = doc.kind {
                builder = builder.set_buckets_for_metric(Matcher::Full(doc.name.to_owned()), buckets)?;
            }
        }
        Ok(builder)
    }

    /// A recorder that nothing records to: for tests of what renders it.
    pub fn detached() -> Self {
        Self { handle: PrometheusBuilder::new().build_recorder().handle(), resident: Gauge::noop() }
    }

    /// A recorder for the handles that `make` makes, and for no others: a process may have many.
    pub fn local<T>(metrics: &[&[MetricDoc]], make: impl FnOnce() -> T) -> Result<(Self, T), BuildError> {
        let recorder = Self::builder(metrics)?.build_recorder();
        let made = metrics::with_local_recorder(&recorder, make);
        Ok((Self { handle: recorder.handle(), resident: Gauge::noop() }, made))
    }

    /// The metrics in Prometheus' text form.
    pub fn render(&self) -> String {
        if let Some(bytes) = resident_bytes() {
            self.resident.set(bytes as f64);
        }
        self.handle.render()
    }

    /// Folds what histograms have collected; without it they grow until the next scrape.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

/// Makes the counters of a label's values, at 0: `increase()` does not see a counter's first event
/// if the counter begins with it.
pub fn count_from_zero(name: &'static str, label: &'static str, values: impl IntoIterator<Item = &'static str>) {
    for value in values {
        metrics::counter!(name, label => value).absolute(0);
    }
}

/// Memory of this process that is in RAM; `None` if the system does not say.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    parse_resident(&status)
}

/// `VmRSS:     1234 kB`. Unlike `statm`, it does not need the size of a page.
fn parse_resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The metrics' page: what `docs/metrics.md` must be equal to.
pub fn metrics_page(crates: &[(&str, &[MetricDoc])]) -> String {
    let mut page = String::from("# Metrics\n\nMade from the lists in the code; a test keeps the two equal.\n");
    for (name, metrics) in crates {
        page.push_str(&format!("\n## {name}\n\n| metric | kind | labels | what it tells |\n|---|---|---|---|\n"));
        for doc in *metrics {
            let kind = match doc.kind {
                MetricKind::Counter => "counter",
                MetricKind::Gauge => "gauge",
                MetricKind::Histogram(_) => "histogram",
            };
            page.push_str(&format!("| `{}` | {kind} | {} | {} |\n", doc.name, doc.labels.join(", "), doc.help));
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCS: &[MetricDoc] = &[
        MetricDoc { name: "baton_test_events_total", kind: MetricKind::Counter, labels: &[], help: "Events." },
        MetricDoc { name: "baton_test_things_total", kind: MetricKind::Counter, labels: &["kind"], help: "Things." },
        MetricDoc {
            name: "baton_test_wait_seconds",
            kind: MetricKind::Histogram(&[0.1, 1.0]),
            labels: &[],
            help: "Waits.",
        },
    ];

    #[test]
    fn metrics_are_rendered_with_histogram_buckets() {
        let recorder = Telemetry::builder(&[DOCS]).unwrap().build_recorder();
        let telemetry = Telemetry { handle: recorder.handle(), resident: Gauge::noop() };
        metrics::with_local_recorder(&recorder, || {
            metrics::counter!("baton_test_things_total", "kind" => "a").increment(2);
            metrics::histogram!("baton_test_wait_seconds").record(0.5);
        });
        telemetry.upkeep();
        let text = telemetry.render();
        assert!(text.contains("baton_test_things_total{kind=\"a\"} 2"), "{text}");
        assert!(text.contains("baton_test_wait_seconds_bucket{le=\"1\"} 1"), "{text}");
    }

    #[test]
    fn resident_memory_is_read_from_proc_status() {
        assert_eq!(parse_resident("Name:\tbaton\nVmRSS:\t   1234 kB\nThreads:\t1\n"), Some(1234 * 1024));
        assert_eq!(parse_resident("Name:\tkthread\n"), None);
        let mine = resident_bytes().expect("Linux says");
        assert!((1 << 20..1 << 40).contains(&mine), "{mine}");
    }

    #[test]
    fn metrics_include_version_and_resident_memory() {
        let telemetry = Telemetry::install(&[DOCS]).unwrap();
        let text = telemetry.render();
        assert!(text.contains(&format!("baton_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"))), "{text}");
        assert!(text.contains("baton_test_events_total 0\n"), "a counter without labels begins at 0: {text}");
        let line = text.lines().find(|line| line.starts_with("baton_process_resident_bytes ")).expect("there is one");
        assert!(!line.ends_with(" 0"), "{line}");
    }

    #[test]
    fn invalid_log_filter_is_an_error() {
        let error = init_logs(LogFormat::Text, "a=b=c").unwrap_err();
        assert!(error.key == "log" && error.problem.starts_with("'a=b=c'"), "{error}");
    }

    #[test]
    fn metrics_page_lists_every_metric() {
        let page = metrics_page(&[("test", DOCS)]);
        assert!(page.contains("| `baton_test_things_total` | counter | kind | Things. |"), "{page}");
    }
}
