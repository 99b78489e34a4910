//! Wire to domain and back, by who tells what to whom.

mod event;
mod job;
mod leader;
mod node;
mod peer;

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use baton_types as d;

use crate::v1 as w;

pub use event::token_text;
pub use node::Step;

/// A message from the network does not have the form of what it stands for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {}", cut(found))]
pub struct InvalidMessage {
    /// The field of the message.
    pub field: &'static str,
    /// What is wrong with it.
    pub found: String,
}

impl InvalidMessage {
    /// Always [`d::ErrorKind::Invalid`].
    pub const fn kind(&self) -> d::ErrorKind {
        d::ErrorKind::Invalid
    }
}

impl From<InvalidMessage> for tonic::Status {
    fn from(error: InvalidMessage) -> Self {
        crate::status(error.kind(), error.to_string(), None)
    }
}

/// A field that must be there.
pub fn required<T>(field: &'static str, value: Option<T>) -> Result<T, InvalidMessage> {
    value.ok_or(InvalidMessage { field, found: "missing".into() })
}

fn parse<T: FromStr<Err = d::ParseIdError>>(field: &'static str, text: &str) -> Result<T, InvalidMessage> {
    text.parse().map_err(|error: d::ParseIdError| InvalidMessage { field, found: error.to_string() })
}

/// A node's name.
pub fn node_id(field: &'static str, text: &str) -> Result<d::NodeId, InvalidMessage> {
    parse(field, text)
}

/// A generation.
pub fn generation(field: &'static str, text: &str) -> Result<d::Generation, InvalidMessage> {
    parse(field, text)
}

/// A request's key.
pub fn key(value: Option<w::RequestKey>) -> Result<d::RequestKey, InvalidMessage> {
    required("key", value)?.try_into()
}

/// Most tokens, blocks or requests that are believed: sums of a few of them fit.
const MAX_COUNT: u32 = 1 << 28;
/// Most of what is counted over time, and most bytes, that are believed: sums of many fit.
const MAX_TOTAL: u64 = 1 << 56;
/// Longest address of a process that is believed, bytes: a scheme, a host's name and a port.
const MAX_ADDRESS: usize = 272;
/// Longest name of a model or a class, or digest, that is believed, bytes.
const MAX_NAME: usize = 256;
/// Longest salt that is believed, bytes.
const MAX_SALT: usize = 256;
/// Bytes of a text about an error that are kept: it is logged, and told to operators.
const MAX_MESSAGE: usize = 1024;
/// Longest time that is believed.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// A time that is not negative, and not too long to be true.
pub fn seconds(field: &'static str, value: f64) -> Result<Duration, InvalidMessage> {
    let time = Duration::try_from_secs_f64(value);
    let time = time.map_err(|error| InvalidMessage { field, found: format!("{value}: {error}") })?;
    if time > LONGEST {
        return Err(InvalidMessage { field, found: format!("{value}, but must be at most {}", LONGEST.as_secs()) });
    }
    Ok(time)
}

/// A limit that a client may have set as high as it likes.
pub fn limit(field: &'static str, value: f64) -> Result<Duration, InvalidMessage> {
    if value > LONGEST.as_secs_f64() { Ok(LONGEST) } else { seconds(field, value) }
}

fn at_most<T: PartialOrd + std::fmt::Display>(field: &'static str, value: T, most: T) -> Result<T, InvalidMessage> {
    if value > most {
        return Err(InvalidMessage { field, found: format!("{value}, but must be at most {most}") });
    }
    Ok(value)
}

/// A text, or bytes, of which no more is kept than there can be.
fn short<T: AsRef<[u8]>>(field: &'static str, text: T, longest: usize) -> Result<T, InvalidMessage> {
    let bytes = text.as_ref().len();
    if bytes > longest {
        return Err(InvalidMessage { field, found: format!("{bytes} bytes, but must be at most {longest}") });
    }
    Ok(text)
}

/// What is kept of a text about an error.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_MESSAGE)]
}

/// A number of tokens, blocks or requests that is not too large to be true.
pub fn count(field: &'static str, value: u32) -> Result<u32, InvalidMessage> {
    at_most(field, value, MAX_COUNT)
}

fn total(field: &'static str, value: u64) -> Result<u64, InvalidMessage> {
    at_most(field, value, MAX_TOTAL)
}

fn hash(field: &'static str, bytes: &[u8]) -> Result<d::BlockHash, InvalidMessage> {
    let found = || InvalidMessage { field, found: format!("{} bytes, but a block hash has 16", bytes.len()) };
    Ok(d::BlockHash(bytes.try_into().map_err(|_| found())?))
}

/// Hashes, 16 bytes each, one after the other.
pub fn hashes_to_bytes(hashes: &[d::BlockHash]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.0).collect()
}

/// The other way of [`hashes_to_bytes`].
pub fn hashes_from_bytes(field: &'static str, bytes: &[u8]) -> Result<Arc<[d::BlockHash]>, InvalidMessage> {
    bytes.chunks(16).map(|chunk| hash(field, chunk)).collect()
}

impl From<d::RequestKey> for w::RequestKey {
    fn from(key: d::RequestKey) -> Self {
        Self { request_id: key.request.to_string(), attempt: key.attempt.0 }
    }
}

impl TryFrom<w::RequestKey> for d::RequestKey {
    type Error = InvalidMessage;

    fn try_from(key: w::RequestKey) -> Result<Self, Self::Error> {
        Ok(Self { request: parse("request_id", &key.request_id)?, attempt: d::Attempt(key.attempt) })
    }
}

#[cfg(test)]
mod tests;
