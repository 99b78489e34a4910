//! Which log lines are written. A filter is text that others may send: what it costs is bounded.

use std::str::FromStr;

use tracing_subscriber::filter::{LevelFilter, Targets};

use crate::settings::BadSetting;

/// Longest filter, bytes.
const MAX_BYTES: usize = 1024;
/// Most entries: a new log line looks at each of them, once.
const MAX_ENTRIES: usize = 64;
/// Bytes of an entry that an error repeats.
const SHOWN_BYTES: usize = 64;
/// What an error says after the entry that is wrong.
const FORM: &str = "must be a level (off, error, warn, info, debug, trace), or target=level, with commas between";

/// Levels, of all targets or of some: `info`, `baton_worker=debug,info`. Spans, fields and patterns
/// are not served: a pattern of 124 bytes may have 2^60 states.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogFilter(Targets);

impl LogFilter {
    /// The filter that carries it out.
    pub(crate) fn targets(&self) -> Targets {
        self.0.clone()
    }
}

impl FromStr for LogFilter {
    type Err = BadSetting;

    fn from_str(text: &str) -> Result<Self, BadSetting> {
        if text.len() > MAX_BYTES {
            return Err(refused(format!("{} bytes, but must be at most {MAX_BYTES}", text.len())));
        }
        if text.split(',').nth(MAX_ENTRIES).is_some() {
            return Err(refused(format!("must have at most {MAX_ENTRIES} entries")));
        }
        text.split(',').try_fold(Targets::new(), with_entry).map(Self)
    }
}

fn with_entry(targets: Targets, entry: &str) -> Result<Targets, BadSetting> {
    let (target, level) = match entry.split_once('=') {
        Some((target, level)) => (Some(target.trim()), level.trim()),
        None => (None, entry.trim()),
    };
    // A word that is no level would be taken for a target, and nothing would be logged.
    let level = level.parse::<LevelFilter>().ok().filter(|_| !level.is_empty());
    match (target, level) {
        (None, Some(level)) => Ok(targets.with_default(level)),
        (Some(target), Some(level)) if is_target(target) => Ok(targets.with_target(target, level)),
        _ => Err(refused(format!("'{}', but {FORM}", shown(entry)))),
    }
}

/// A path of Rust modules. Crates of others may have a dash in a target.
fn is_target(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-:.".contains(&byte))
}

fn shown(entry: &str) -> String {
    if entry.len() <= SHOWN_BYTES {
        return entry.to_owned();
    }
    format!("{}...", &entry[..entry.floor_char_boundary(SHOWN_BYTES)])
}

fn refused(problem: String) -> BadSetting {
    BadSetting::invalid("log", problem)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    fn parsed(text: &str) -> Result<Targets, String> {
        text.parse::<LogFilter>().map(|filter| filter.0).map_err(|error| error.to_string())
    }

    #[test]
    fn log_filter_has_levels_and_targets() {
        for right in
            ["info", "baton_worker=debug,info", "WARN", "off", "a=info, warn", "h2::proto = trace", "3", "a-b=2"]
        {
            assert!(parsed(right).is_ok(), "{right}");
        }
        let filter = parsed("warn,baton_worker=debug,baton_worker::ssd=off").unwrap();
        assert!(filter.would_enable("baton_worker::fetch", &Level::DEBUG));
        assert!(!filter.would_enable("baton_worker::ssd", &Level::ERROR));
        assert!(filter.would_enable("h2", &Level::WARN) && !filter.would_enable("h2", &Level::INFO));
        assert!(!parsed("baton_worker=debug").unwrap().would_enable("h2", &Level::ERROR), "what is not named is off");
    }

    #[test]
    fn log_filter_with_anything_else_is_refused_by_name() {
        for wrong in
            ["inf", "verbose", "", "info,", "baton_worker", "=info", "a=", "a=b=c", "a b=info", "*=info", "a=6"]
        {
            let error = parsed(wrong).unwrap_err();
            assert!(error.starts_with("log: '") && error.contains("target=level"), "{wrong}: {error}");
        }
    }

    /// Each of these was read by `EnvFilter`, which makes an automaton of the pattern: 2^k states.
    #[test]
    fn log_filter_with_fields_or_patterns_costs_nothing() {
        let states = "[{x=\".*a.{40}b\"}]=trace";
        let nested = "info,[span{x=((((a{90}){90}){90}){90}){90}}]=trace";
        for wrong in [states, nested, "baton[span]=trace", "[{field}]=info", "a[{b=\"c\"}]=debug", "a{b}=info"] {
            assert!(parsed(wrong).unwrap_err().starts_with("log: '"), "{wrong}");
        }
    }

    #[test]
    fn log_filter_is_bounded_in_bytes_and_entries() {
        let entries = |count: usize| vec!["a=info"; count].join(",");
        assert!(parsed(&entries(MAX_ENTRIES)).is_ok());
        assert_eq!(parsed(&entries(MAX_ENTRIES + 1)).unwrap_err(), "log: must have at most 64 entries");
        let long = format!("{}=info", "a".repeat(MAX_BYTES));
        assert_eq!(parsed(&long).unwrap_err(), "log: 1029 bytes, but must be at most 1024");
        let entry = "é".repeat(500);
        assert!(parsed(&entry).unwrap_err().len() < 200, "an error repeats a part of what is long");
    }
}
