//! What clients asked, and when: traces in the format of Mooncake's.

mod block_size;
mod line;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use baton_types::ErrorKind;
use flate2::bufread::MultiGzDecoder;

use crate::Random;

use block_size::BlockSize;
use line::Line;

/// Tokens per block of Mooncake's traces.
pub const BLOCK_TOKENS: u32 = 512;
/// Most tokens per block of a trace.
pub const MAX_BLOCK_TOKENS: u32 = 1 << 20;
/// First bytes of a file that gzip made.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// What some editors put before a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Most bytes of a trace, unzipped.
const MAX_BYTES: u64 = 8 << 30;
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
    /// the same prompt up to there. The last id stands for all that is left of the prompt.
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
    /// The trace has too many lines, or bytes.
    #[error("more than {MAX_LINES} lines, or {MAX_BYTES} bytes")]
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
    /// Reads a file of JSON lines, as [`read`](Self::read) does; the name is the file's, without
    /// its extension.
    pub fn open(path: &Path, block_tokens: Option<u32>) -> Result<Self, TraceError> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::read(&name, BufReader::new(File::open(path)?), block_tokens)
    }

    /// Reads JSON lines, also if gzip made them smaller. Empty ones are skipped, and fields that
    /// are not known. Without `block_tokens`, the prompts' lengths tell the size of the blocks.
    pub fn read(name: &str, mut input: impl BufRead, block_tokens: Option<u32>) -> Result<Self, TraceError> {
        let is_gzip = input.fill_buf()?.starts_with(&GZIP);
        let (requests, block_tokens) = if is_gzip {
            lines(BufReader::new(MultiGzDecoder::new(input)), block_tokens)?
        } else {
            lines(input, block_tokens)?
        };
        let mut trace = Self { name: name.to_owned(), requests, block_tokens };
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

/// The requests, and the tokens per block.
fn lines(mut input: impl BufRead, block_tokens: Option<u32>) -> Result<(Vec<TraceRequest>, u32), TraceError> {
    let mut requests = Vec::new();
    let mut block_size = BlockSize::new(block_tokens);
    let mut text = Vec::new();
    let mut bytes = 0;
    for line in 1.. {
        let invalid = |(field, problem)| TraceError::Invalid { line, field, problem };
        text.clear();
        let read = input.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut text);
        let read = read.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                invalid(("line", format!("gzip: {error}")))
            }
            _ => TraceError::Io(error),
        })?;
        if read == 0 {
            break;
        }
        bytes += read as u64;
        if line > MAX_LINES || bytes > MAX_BYTES {
            return Err(TraceError::TooLong);
        }
        let text = text.strip_prefix(BYTE_ORDER_MARK).filter(|_| line == 1).unwrap_or(&text);
        if !text.trim_ascii().is_empty() {
            let request = Line::parse(text).and_then(|request| request.of_blocks(line, &mut block_size));
            requests.push(request.map_err(invalid)?);
        }
    }
    Ok((requests, block_size.tokens()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const LINE: &str = r#"{"timestamp": 3, "input_length": 513, "output_length": 9, "hash_ids": [4, 5]}"#;

    fn read(text: &str) -> Result<Trace, TraceError> {
        Trace::read("test", text.as_bytes(), None)
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
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
        let trace = Trace::read("small", &include_bytes!("../tests/fixtures/small.jsonl")[..], None).unwrap();
        assert_eq!((trace.requests.len(), trace.blocks(), trace.block_tokens), (200, 2_240, 512));
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
            ("9,", "-1,", "line 2: output_length: -1 is not a number of tokens, from 0 to 16777216"),
            (", \"output_length\": 9", "", "line 2: output_length: missing"),
            ("513", "1025", "line 2: hash_ids: 2 ids for 1025 tokens: the lines before have 257 to 512 tokens a block"),
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
    fn gzip_byte_order_mark_and_crlf_are_read() {
        let text = format!("\u{feff}{LINE}\r\n\r\n{LINE}");
        let expected = read(&format!("{LINE}\n{LINE}\n")).unwrap();
        assert_eq!(read(&text).unwrap(), expected);
        // As pigz and `cat` make them: one after the other.
        let members = [gzip(&text), gzip(""), gzip("\n")].concat();
        assert_eq!(Trace::read("test", &members[..], None).unwrap(), expected);
    }

    #[test]
    fn broken_gzip_is_refused_with_its_line() {
        let whole = gzip(&format!("{LINE}\n").repeat(3));
        let cut = Trace::read("test", &whole[..whole.len() - 9], None).unwrap_err();
        assert!(cut.to_string().starts_with("line ") && cut.to_string().contains(": line: gzip: "), "{cut}");
        let bomb = gzip(&"0".repeat(MAX_LINE_BYTES as usize + 2));
        let error = Trace::read("test", &bomb[..], None).unwrap_err().to_string();
        assert_eq!(error, "line 1: line: longer than 1000000 bytes");
    }

    #[test]
    fn output_length_0_counts_as_the_token_of_a_prefill() {
        assert_eq!(read(&LINE.replace("9,", "0,")).unwrap().requests[0].output_length, 1);
    }

    #[test]
    fn requests_without_hash_ids_share_no_prefix() {
        let bare = LINE.replace(r#", "hash_ids": [4, 5]"#, "");
        let null = LINE.replace("[4, 5]", "null");
        let empty = LINE.replace("[4, 5]", "[]");
        let trace = read(&format!("{bare}\n{null}\n{empty}\n{LINE}\n")).unwrap();
        let ids: HashSet<_> = trace.requests.iter().flat_map(|request| &request.hash_ids).collect();
        assert_eq!((ids.len(), trace.block_tokens), (5, 512), "no id is that of two requests");
    }

    #[test]
    fn block_size_is_what_the_lengths_tell_or_what_is_given() {
        let line = |length: u32, ids: u32| {
            let ids: Vec<_> = (0..ids).collect();
            format!(r#"{{"timestamp": 0, "input_length": {length}, "output_length": 1, "hash_ids": {ids:?}}}"#)
        };
        let of = |lines: &[(u32, u32)], given| {
            let text: String = lines.iter().map(|(length, ids)| line(*length, *ids) + "\n").collect();
            Trace::read("test", text.as_bytes(), given).map(|trace| trace.block_tokens)
        };
        assert_eq!(of(&[(100, 7), (33, 3)], None).unwrap(), 16);
        assert_eq!(of(&[(1100, 2), (3000, 3)], None).unwrap(), 1024);
        assert_eq!(of(&[(1000, 10), (101, 2)], None).unwrap(), 100);
        assert_eq!(of(&[(100, 1), (512, 1)], None).unwrap(), 512, "Mooncake's if that fits");
        assert_eq!(of(&[(100, 1)], Some(128)).unwrap(), 128);
        let error = of(&[(100, 7), (33, 2)], Some(16)).unwrap_err().to_string();
        assert_eq!(error, "line 2: hash_ids: 2 ids, but 33 tokens are 3 blocks of 16");
        let error = of(&[(5, 9)], None).unwrap_err().to_string();
        assert!(error.starts_with("line 1: hash_ids: 9 ids for 5 tokens: "), "{error}");
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
