//! One line of a trace.

use std::time::Duration;

use serde_json::{Map, Value};

use super::block_size::BlockSize;
use super::{MAX_LINE_BYTES, TraceRequest};

/// Most tokens of a prompt, and of an answer.
const MAX_TOKENS: u32 = 1 << 24;

/// The field that is wrong, and what is wrong with it.
pub(super) type Problem = (&'static str, String);

/// A line, before its blocks are known to be those of the others.
pub(super) struct Line {
    timestamp: Duration,
    input_length: u32,
    output_length: u32,
    hash_ids: Option<Vec<u64>>,
}

impl Line {
    pub(super) fn parse(text: &[u8]) -> Result<Self, Problem> {
        if text.len() as u64 > MAX_LINE_BYTES {
            return Err(("line", format!("longer than {MAX_LINE_BYTES} bytes")));
        }
        let line: Map<String, Value> = serde_json::from_slice(text).map_err(|error| ("line", error.to_string()))?;
        Ok(Self {
            timestamp: timestamp(&line)?,
            input_length: tokens(&line, "input_length", 1)?,
            output_length: tokens(&line, "output_length", 0)?,
            hash_ids: hash_ids(&line)?,
        })
    }

    /// The request, if its blocks have the size of those before.
    pub(super) fn of_blocks(self, line: usize, block_size: &mut BlockSize) -> Result<TraceRequest, Problem> {
        let Self { timestamp, input_length, output_length, hash_ids } = self;
        let hash_ids = match hash_ids {
            Some(ids) => {
                block_size.take(input_length, ids.len()).map_err(|problem| ("hash_ids", problem))?;
                ids
            }
            // No other line has this id.
            None => vec![u64::MAX - line as u64],
        };
        // To compute a prompt gives the first token of its answer.
        Ok(TraceRequest { timestamp, input_length, output_length: output_length.max(1), hash_ids })
    }
}

fn field<'a>(line: &'a Map<String, Value>, name: &'static str) -> Result<&'a Value, Problem> {
    line.get(name).ok_or_else(|| (name, "missing".to_owned()))
}

fn timestamp(line: &Map<String, Value>) -> Result<Duration, Problem> {
    let value = field(line, "timestamp")?;
    let seconds = value.as_f64().map(|ms| Duration::try_from_secs_f64(ms / 1e3));
    seconds.and_then(Result::ok).ok_or_else(|| ("timestamp", format!("{value} is not a time in milliseconds, from 0")))
}

fn tokens(line: &Map<String, Value>, name: &'static str, least: u32) -> Result<u32, Problem> {
    let value = field(line, name)?;
    let tokens = value.as_u64().and_then(|tokens| u32::try_from(tokens).ok());
    let tokens = tokens.filter(|tokens| (least..=MAX_TOKENS).contains(tokens));
    tokens.ok_or_else(|| (name, format!("{value} is not a number of tokens, from {least} to {MAX_TOKENS}")))
}

/// The ids of the prompt's blocks; none if the trace does not say which prompts begin alike.
fn hash_ids(line: &Map<String, Value>) -> Result<Option<Vec<u64>>, Problem> {
    let problem = |problem| ("hash_ids", problem);
    let Some(value) = line.get("hash_ids").filter(|value| !value.is_null()) else { return Ok(None) };
    let values = value.as_array().ok_or_else(|| problem("not a list".to_owned()))?;
    if values.is_empty() {
        return Ok(None);
    }
    let id = |value: &Value| value.as_u64().ok_or_else(|| problem(format!("{value} is not an id, from 0")));
    let ids: Vec<_> = values.iter().map(id).collect::<Result<_, _>>()?;
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => Err(problem(format!("{} stands twice", twice[0]))),
        None => Ok(Some(ids)),
    }
}
