//! Settings: a TOML file, variables of the environment, flags, and what is set at run time.

use std::cell::OnceCell;
use std::path::PathBuf;

use baton_conductor::{AT_RUN_TIME, fuzz::RunTime};
use baton_membership::SharedSettings;
use baton_runtime::settings::Declared;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::input::{join, parts, text};

pub(super) const WORDS: &[&str] = &[
    "listen",
    "threads",
    "model",
    "grace_s",
    "policy",
    "names",
    " = ",
    "\"",
    "'''",
    "\"\"\"",
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    "inf",
    "nan",
    "0x",
    "1_000",
    "1979-05-27T07:32:00Z",
    "true",
    "\\u0000",
    "BATON_LISTEN=",
    "BATON_THREADS=",
    "BATON_NAMES=",
];

baton_runtime::settings! {
    /// A setting of each form that the binaries have.
    pub struct Settings {
        /// A text.
        listen: String = "127.0.0.1:0".into(), "ADDR";
        /// A number.
        threads: u32 = 1, "N";
        /// A path without a default.
        model: Option<PathBuf> = None, "FILE";
        /// A number without a default.
        limit: Option<u64> = None, "N";
        /// A time.
        grace_s: f64 = 1.0, "SECONDS";
        /// A word.
        policy: Policy = Policy::default(), "POLICY";
        /// A list.
        names: Vec<String> = Vec::new(), "NAMES";
        /// A truth.
        is_on: bool = false, "BOOL";
    }
}

/// A word.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The default.
    #[default]
    RoundRobin,
    /// Another one.
    LoadBalance,
}

/// Parts: the file, lines of variables, and lines of flags.
pub(super) fn load(input: &[u8]) {
    thread_local! {
        static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
    }
    let [toml, environment, flags] = parts(input);
    // A flag of another name is refused by the command line itself.
    let flags = text(flags).lines().filter_map(|line| line.split_once('='));
    let flags = flags.filter_map(|(name, value)| Some((flag(name)?, value.to_owned())));
    let flags: Vec<_> = flags.collect();
    let variables = text(environment).lines().filter_map(|line| line.split_once('='));
    let variables: Vec<_> = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    FOLDER.with(|folder| {
        let file = folder.get_or_init(super::folder).path().join("baton.toml");
        std::fs::write(&file, toml).expect("the file can be written");
        match baton_runtime::settings::load::<Settings>(Some(&file), variables.into_iter(), flags) {
            Ok(loaded) => drop(loaded.print()),
            Err(error) => drop(error.to_string()),
        }
    });
}

fn flag(name: &str) -> Option<&'static str> {
    let known = Settings::SETTINGS.iter().find(|setting| setting.key == name);
    known.map(|setting| setting.key)
}

/// Parts: what etcd says is set, and lines of what an operator sets.
///
/// What is taken is taken by every conductor and node, is in force as it was given, and is stored
/// as it was. A refusal names the setting, and is short.
pub(super) fn run_time(input: &[u8]) {
    let [stored, change] = parts(input);
    let run_time = RunTime::default();
    let before = serde_json::from_slice::<SharedSettings>(stored).unwrap_or_default();
    // What is not taken stays out of force.
    let is_taken = run_time.with(&before).map_err(|refused| check_short(&refused)).is_ok();
    let change = text(change).lines().filter_map(|line| line.split_once('='));
    let change: Vec<_> = change.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let next = match run_time.next(&before, &change) {
        Ok(next) => next,
        Err(refused) => return check_short(&refused),
    };
    assert!(next.version != before.version && (is_taken || !change.is_empty()));
    let settings = run_time.with(&next).expect("what is set goes into force");
    for (key, value) in next.values.iter().filter(|(key, _)| AT_RUN_TIME.contains(&key.as_str())) {
        assert!(settings.value(key).is_some(), "{key} = {value}");
    }
    if let Some(log) = next.values.get("log") {
        log.parse::<baton_runtime::telemetry::LogFilter>().expect("nodes take it, too");
    }
    let json = serde_json::to_vec(&next).expect("JSON");
    assert_eq!(serde_json::from_slice::<SharedSettings>(&json).ok(), Some(next));
}

/// A value of a kilobyte may be repeated, with what is wrong.
fn check_short(refused: &str) {
    assert!(!refused.is_empty() && refused.len() < 8 << 10, "an error of {} bytes", refused.len());
}

pub(super) const RUN_TIME_WORDS: &[&str] = &[
    "log",
    "placement",
    "admission",
    "ttft_slo_ms",
    "queue_timeout_s",
    "max_overtaken_s",
    "max_requests",
    "max_attempts",
    "partial_prefill",
    "off",
    "trace",
    "nan",
    "inf",
    "-1",
    "1e308",
    "\"version\"",
    "\"values\"",
];

pub(super) fn run_time_seeds() -> Vec<Vec<u8>> {
    let stored = |version: u64, values: &str| {
        format!("{{\"version\":{version},\"values\":{{{values}}},\"by\":\"me\",\"set_at_ms\":7}}")
    };
    let all = "admission=none\nfetch_prefixes=false\nlog=debug,a=info\nmax_attempts=2\nmax_overtaken_s=10\n\
        max_request_s=100\nmax_requests=100\nmax_wait_ms=off\npartial_prefill=false\nplacement=round-robin\n\
        prompts_at_decode=never\nqueue_timeout_s=60\ntbt_slo_ms=100\nttft_slo_ms=2000";
    let last = stored(u64::MAX, "\"log\":\"debug\",\"of_another_version\":\"2\"");
    let states = "log=[{x=\"(a|b)*a.{60}\"}]=trace";
    let none = stored(0, "");
    let refused = stored(7, "\"ttft_slo_ms\":\"soon\"");
    [(&*none, all), (&last, "log=\nof_another_version="), (&none, states), (&refused, "ttft_slo_ms=5"), ("", all)]
        .iter()
        .map(|(stored, change)| join(&[stored.as_bytes(), change.as_bytes()]))
        .collect()
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let toml = "listen = \"0.0.0.0:1\"\nthreads = 2\nmodel = '/m'\ngrace_s = 2.5\npolicy = \"load-balance\"\nnames = [\"a\", \"b\"]\nis_on = true\n";
    vec![
        join(&[toml.as_bytes(), b"BATON_LIMIT=7\nBATON_THREADS=3\nPATH=x", b"threads=4\ngrace_s=1e9"]),
        join(&[b"", b"BATON_NAMES=[\"a\"]\nBATON_POLICY=round-robin\nBATON_IS_ON=true"]),
    ]
}
