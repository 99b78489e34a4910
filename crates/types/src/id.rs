//! Ids. Each is a newtype, so that a block is never taken for a node.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// A string did not have the form of an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{value}' is not {expected}")]
pub struct ParseIdError {
    /// What was given.
    pub value: String,
    /// What was expected.
    pub expected: &'static str,
}

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident, $inner:ty, $width:literal, $expected:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{:0", $width, "x}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(s: &str) -> Result<Self, Self::Err> {
                // `from_str_radix` alone would take a sign.
                if !s.is_empty() && s.bytes().all(|b| b.is_ascii_hexdigit()) {
                    if let Ok(value) = <$inner>::from_str_radix(s, 16) {
                        return Ok(Self(value));
                    }
                }
                Err(ParseIdError { value: s.chars().take(80).collect(), expected: $expected })
            }
        }
    };
}

hex_id!(
    /// One answer, the same through every attempt. That of a call's first answer is drawn at
    /// random, and those of its others follow it.
    RequestId,
    u128,
    "32",
    "a request id (up to 32 hexadecimal digits)"
);

impl RequestId {
    /// The id that comes so many after it.
    pub fn plus(self, answers: u32) -> Self {
        Self(self.0.wrapping_add(answers.into()))
    }
}

/// The first digits of a request's id, as people copy them: six at least, all at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestIdPrefix(String);

impl RequestIdPrefix {
    /// Fewer are too likely a word, or several requests'.
    const MIN_DIGITS: usize = 6;
    /// All digits of an id.
    const MAX_DIGITS: usize = 32;

    /// Whether the id begins so.
    pub fn matches(&self, id: RequestId) -> bool {
        id.to_string().starts_with(&self.0)
    }
}

impl fmt::Display for RequestIdPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RequestIdPrefix {
    type Err = ParseIdError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if (Self::MIN_DIGITS..=Self::MAX_DIGITS).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Ok(Self(s.to_ascii_lowercase()));
        }
        let expected = "a request id, or its first 6 hexadecimal digits or more";
        Err(ParseIdError { value: s.chars().take(80).collect(), expected })
    }
}

hex_id!(
    /// Hash of everything that decides what a KV block's bytes mean: architecture, hyperparameters
    /// and weights of the model.
    ModelFingerprint,
    u64,
    "16",
    "a model fingerprint (up to 16 hexadecimal digits)"
);
hex_id!(
    /// One start of one process. A later start of the same node has a larger generation; anything
    /// from an older one is refused.
    Generation,
    u64,
    "16",
    "a generation (up to 16 hexadecimal digits)"
);
hex_id!(
    /// One frontend process.
    ConductorId,
    u64,
    "16",
    "a conductor id (up to 16 hexadecimal digits)"
);

/// How often a request has been placed: 0 for the first placement. Tokens of an older attempt are
/// dropped at the frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Attempt(pub u32);

/// A right, given by the owner of a segment, to write certain ranges of it. Unique within the
/// owner's generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId(pub u64);

impl GrantId {
    /// No grant's: who gives this one up has none yet, but a place in the line for one.
    pub const NONE: Self = Self(u64::MAX);
}

/// Index of a block in a node's arena, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Chained hash of a full block: 128 bits of keyed BLAKE3 over the parent's hash and the block's
/// tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// Name of a node, chosen by the operator or made from the role and port. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(Arc<str>);

impl NodeId {
    /// Longest name taken, bytes.
    pub const MAX_LEN: usize = 128;

    /// Checks the form: 1 to 128 of letters, digits, `-`, `_`, `.` and `:`.
    pub fn new(name: &str) -> Result<Self, ParseIdError> {
        let ok = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
        if name.is_empty() || name.len() > Self::MAX_LEN || !name.bytes().all(ok) {
            let expected = "a node name (1 to 128 of letters, digits, '-', '_', '.', ':')";
            return Err(ParseIdError { value: name.chars().take(80).collect(), expected });
        }
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for NodeId {
    type Err = ParseIdError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::new(s)
    }
}

/// One start of one node. The generation keeps a node that came back from being credited for its
/// past.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeStart {
    /// The node.
    pub node: NodeId,
    /// Which start of it.
    pub generation: Generation,
}

/// What a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeRole {
    /// Computes prompts.
    Prefill,
    /// Streams tokens.
    Decode,
}

impl NodeRole {
    /// Both roles.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// `prefill` or `decode`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for NodeRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_round_trips_through_text() {
        let id = RequestId(0xabc);
        assert_eq!(id.to_string(), "00000000000000000000000000000abc");
        assert_eq!(id.to_string().parse::<RequestId>().unwrap(), id);
        assert_eq!("ABC".parse::<RequestId>().unwrap(), id);
        for bad in ["", "xyz", "+1", "-1", "123456789012345678901234567890123"] {
            assert!(bad.parse::<RequestId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn request_id_prefix_matches_only_first_digits() {
        let id: RequestId = "4f0c1a00000000000000000000000000".parse().unwrap();
        for prefix in ["4f0c1a", "4F0C1A0", "4f0c1a00000000000000000000000000"] {
            assert!(prefix.parse::<RequestIdPrefix>().unwrap().matches(id), "{prefix}");
        }
        assert!(!"f0c1a0".parse::<RequestIdPrefix>().unwrap().matches(id), "not from its middle");
        for bad in ["", "4f0c1", "4f0c1g", "4f0c1a ", "4f0c1a000000000000000000000000000"] {
            assert!(bad.parse::<RequestIdPrefix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn invalid_node_ids_are_refused() {
        assert_eq!(NodeId::new("prefill-0.rack:7").unwrap().as_str(), "prefill-0.rack:7");
        for bad in ["", "a b", "ü", "x/y", &"n".repeat(129)] {
            assert!(NodeId::new(bad).is_err(), "{bad}");
        }
    }
}
