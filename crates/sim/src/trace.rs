//! What clients asked, and when: traces in the format of Mooncake's.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use baton_types::ErrorKind;
use serde_json::{Map, Value};

use crate::Random;

/// Tokens per block of a trace.
pub const BLOCK_TOKENS: u32 = 512;
/// Most lines taken.
const MAX_LINES: usize = 10_000_000;
/// Longest time from the first request to the last.
const MAX_SPAN: Duration = Duration::from_secs(30 * 86_400);
/// Longest line taken, bytes.
const MAX_LINE_BYTES: u64 = 1_000_000;

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRequest {
    /// Since the beginning of the trace.
    pub timestamp: Duration,
    /// Tokens of the prompt.
    pub input_length: u32,
    /// Tokens of the answer.
    pub output_length: u32,
    /// Of the prompt's blocks, the last of which may be partial. Prefix-chained: the same id means
    /// the same prompt up to there.
    pub hash_ids: Vec<u64>,
}

/// Requests in the order of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Its file's name.
    pub name: String,
    /// In the order of their timestamps.
    pub requests: Vec<TraceRequest>,
    /// Tokens per block.
    pub block_tokens: u32,
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line is wrong.
    #[error("line {line}: {field}: {problem}")]
    Invalid {
        /// From 1.
        line: usize,
        /// The field of the line; `line` if it is all of it.
        field: &'static str,
        /// What is wrong, and what is taken.
        problem: String,
    },
    /// There are too many lines.
    #[error("more than {MAX_LINES} lines")]
    TooLong,
    /// It covers too much time.
    #[error("timestamps span {} days, and {} are taken", span.as_secs() / 86_400, MAX_SPAN.as_secs() / 86_400)]
    TooSlow {
        /// From the first request to the last.
        span: Duration,
    },
    /// The operating system refused.
    #[error("operating system: {0}")]
    Io(#[from] io::Error),
}

impl TraceError {
    /// What to do about it.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::TooLong | Self::TooSlow { .. } => ErrorKind::Invalid,
            Self::Io(_) => ErrorKind::Internal,
        }
    }
}

impl Trace {
    /// Reads a file of JSON lines; the name is the file's, without its extension.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::read(&name, BufReader::new(File::open(path)?))
    }

    /// Reads JSON lines. Empty ones are skipped, and fields that are not known.
    pub fn read(name: &str, mut input: impl BufRead) -> Result<Self, TraceError> {
        let mut requests = Vec::new();
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            if input.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut text)? == 0 {
                break;
            }
            if line > MAX_LINES {
                return Err(TraceError::TooLong);
            }
            if !text.trim_ascii().is_empty() {
                let request = parse(&text).map_err(|(field, problem)| TraceError::Invalid { line, field, problem })?;
                requests.push(request);
            }
        }
        let mut trace = Self { name: name.to_owned(), requests, block_tokens: BLOCK_TOKENS };
        trace.sort();
        trace.rebase()?;
        Ok(trace)
    }

    /// Time begins with the first request.
    fn rebase(&mut self) -> Result<(), TraceError> {
        let first = self.requests.first().map_or(Duration::ZERO, |first| first.timestamp);
        for request in &mut self.requests {
            request.timestamp -= first;
        }
        let span = self.requests.last().map_or(Duration::ZERO, |last| last.timestamp);
        if span > MAX_SPAN { Err(TraceError::TooSlow { span }) } else { Ok(()) }
    }

    /// Shifts each request later by up to `within`, and sorts again: if timestamps are rounded,
    /// requests come in bursts that no client sent.
    fn jitter(&mut self, within: Duration, random: &mut Random) {
        for request in &mut self.requests {
            request.timestamp += within.mul_f64(random.unit());
        }
        self.sort();
    }

    /// As it is played: the requests of its first so many seconds, each delayed by up to `jitter`.
    /// The seed is the run's; the draws are not those of the run itself.
    pub fn played(mut self, duration: Option<Duration>, jitter: Duration, seed: u64) -> Self {
        if let Some(duration) = duration {
            self.requests.retain(|request| request.timestamp < duration);
        }
        if !jitter.is_zero() {
            self.jitter(jitter, &mut Random::new(!seed));
        }
        self
    }

    /// How many requests come before this part of the time from 0 to the last request.
    pub fn before(&self, fraction: f64) -> usize {
        let end = self.requests.last().map_or(Duration::ZERO, |last| last.timestamp);
        let time = end.mul_f64(fraction.clamp(0.0, 1.0));
        self.requests.partition_point(|request| request.timestamp < time)
    }

    /// Blocks of all prompts.
    pub fn blocks(&self) -> usize {
        self.requests.iter().map(|request| request.hash_ids.len()).sum()
    }

    /// Stable: requests of one moment stay in the order in which they were.
    fn sort(&mut self) {
        self.requests.sort_by_key(|request| request.timestamp);
    }
}

/// The field that is wrong, and what is wrong with it.
type Problem = (&'static str, String);

fn parse(text: &[u8]) -> Result<TraceRequest, Problem> {
    if text.len() as u64 > MAX_LINE_BYTES {
        return Err(("line", format!("longer than {MAX_LINE_BYTES} bytes")));
    }
    let line: Map<String, Value> = serde_json::from_slice(text).map_err(|error| ("line", error.to_string()))?;
    let input_length = tokens(&line, "input_length")?;
    Ok(TraceRequest {
        timestamp: timestamp(&line)?,
        input_length,
        output_length: tokens(&line, "output_length")?,
        hash_ids: hash_ids(&line, input_length)?,
    })
}

fn field<'a>(line: &'a Map<String, Value>, name: &'static str) -> Result<&'a Value, Problem> {
    line.get(name).ok_or_else(|| (name, "missing".to_owned()))
}

fn timestamp(line: &Map<String, Value>) -> Result<Duration, Problem> {
    let value = field(line, "timestamp")?;
    let seconds = value.as_f64().map(|ms| Duration::try_from_secs_f64(ms / 1e3));
    seconds.and_then(Result::ok).ok_or_else(|| ("timestamp", format!("{value} is not a time in milliseconds, from 0")))
}

fn tokens(line: &Map<String, Value>, name: &'static str) -> Result<u32, Problem> {
    let value = field(line, name)?;
    let tokens = value.as_u64().and_then(|tokens| u32::try_from(tokens).ok()).filter(|tokens| *tokens > 0);
    tokens.ok_or_else(|| (name, format!("{value} is not a number of tokens, from 1")))
}

fn hash_ids(line: &Map<String, Value>, input_length: u32) -> Result<Vec<u64>, Problem> {
    let problem = |problem| ("hash_ids", problem);
    let values = field(line, "hash_ids")?.as_array().ok_or_else(|| problem("not a list".to_owned()))?;
    let id = |value: &Value| value.as_u64().ok_or_else(|| problem(format!("{value} is not an id, from 0")));
    let ids: Vec<_> = values.iter().map(id).collect::<Result<_, _>>()?;
    let blocks = input_length.div_ceil(BLOCK_TOKENS) as usize;
    if ids.len() != blocks {
        return Err(problem(format!("{} ids, but {input_length} tokens are {blocks} blocks", ids.len())));
    }
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => Err(problem(format!("{} stands twice", twice[0]))),
        None => Ok(ids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"timestamp": 3, "input_length": 513, "output_length": 9, "hash_ids": [4, 5]}"#;

    fn read(text: &str) -> Result<Trace, TraceError> {
        Trace::read("test", text.as_bytes())
    }

    fn seconds(trace: &Trace) -> Vec<f64> {
        trace.requests.iter().map(|request| request.timestamp.as_secs_f64()).collect()
    }

    /// Requests at 0, 1, .. 9 seconds.
    fn ten() -> Trace {
        let line = |s| format!("{}\n", LINE.replace("\"timestamp\": 3", &format!("\"timestamp\": {}", s * 1000)));
        read(&(0..10).rev().map(line).collect::<String>()).unwrap()
    }

    #[test]
    fn trace_lines_are_sorted_by_fractional_timestamp() {
        let trace = read(&format!("{}\n\n{LINE}\n", LINE.replace("\"timestamp\": 3", "\"timestamp\": 4.5"))).unwrap();
        assert_eq!(seconds(&trace), [0.0, 0.0015]);
        let first = &trace.requests[0];
        assert_eq!((first.input_length, first.output_length, &first.hash_ids[..]), (513, 9, &[4, 5][..]));
        assert_eq!(trace.blocks(), 4);
    }

    #[test]
    fn trace_fixture_is_read_whole() {
        let trace = Trace::read("small", &include_bytes!("../tests/fixtures/small.jsonl")[..]).unwrap();
        assert_eq!((trace.requests.len(), trace.blocks()), (200, 2_240));
    }

    #[test]
    fn trace_errors_name_line_and_field() {
        let cases = [
            ("{", "[", "line 2: line: "),
            ("\"timestamp\": 3, ", "", "line 2: timestamp: missing"),
            ("\"timestamp\": 3", "\"timestamp\": -1", "line 2: timestamp: -1 is not a time in milliseconds, from 0"),
            ("\"timestamp\": 3", "\"timestamp\": 1e300", "line 2: timestamp: 1e+300 is not a time"),
            ("\"input_length\": 513, ", "", "line 2: input_length: missing"),
            ("513", "-513", "line 2: input_length: -513 is not a number of tokens, from 1"),
            ("513", "5000000000", "line 2: input_length: 5000000000 is not a number of tokens"),
            ("513", "0", "line 2: input_length: 0 is not"),
            ("9,", "0,", "line 2: output_length: 0 is not"),
            ("513", "1025", "line 2: hash_ids: 2 ids, but 1025 tokens are 3 blocks"),
            ("[4, 5]", "7", "line 2: hash_ids: not a list"),
            ("[4, 5]", "[4, -5]", "line 2: hash_ids: -5 is not an id, from 0"),
            ("[4, 5]", "[4, 4]", "line 2: hash_ids: 4 stands twice"),
        ];
        for (from, to, expected) in cases {
            let error = read(&format!("{LINE}\n{}\n", LINE.replace(from, to))).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}");
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    }

    #[test]
    fn trace_line_beyond_the_length_limit_is_refused() {
        let error = read(&format!("{LINE}\n[{}]", "1,".repeat(1_000_000))).unwrap_err();
        assert_eq!(error.to_string(), "line 2: line: longer than 1000000 bytes");
    }

    #[test]
    fn trace_jitter_shifts_later_and_keeps_the_order() {
        let mut trace = ten();
        let before = ten();
        trace.jitter(Duration::from_secs(3), &mut Random::new(1));
        assert!(seconds(&trace).is_sorted());
        let shifted = seconds(&trace).iter().sum::<f64>() - seconds(&before).iter().sum::<f64>();
        assert!(shifted > 3.0 && shifted < 27.0, "{shifted} s in all");
        let mut again = ten();
        again.jitter(Duration::from_secs(3), &mut Random::new(1));
        assert_eq!(trace, again);
    }

    #[test]
    fn trace_limited_to_a_duration_has_only_requests_before_its_end() {
        let played = |seconds| ten().played(seconds, Duration::ZERO, 1).requests.len();
        assert_eq!((played(None), played(Some(Duration::from_secs(4))), played(Some(Duration::ZERO))), (10, 4, 0));
    }

    #[test]
    fn trace_half_is_counted_by_time() {
        assert_eq!((ten().before(0.5), ten().before(0.0), ten().before(1.0)), (5, 0, 9));
        assert_eq!(read("").unwrap().before(0.5), 0);
    }
}
