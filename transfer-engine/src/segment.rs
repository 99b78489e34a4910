//! Registered memory, and how others learn of it.

use std::fmt;
use std::str::FromStr;

use baton_types::{Generation, NodeId};
use bytes::{Buf, BufMut};

use crate::TransferError;

/// First byte of an encoded descriptor.
const FORMAT: u8 = 1;
/// Longest encoded descriptor, bytes.
const MAX_ENCODED: usize = 4096;
/// Longest address, bytes.
const MAX_ADDRESS: usize = 512;

/// A registered memory region of a node. Unique within the node's generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(pub u32);

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What carries bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// One-sided writes and reads by the network adapter (InfiniBand, RoCE).
    Rdma,
    /// Copies from the peer's memory, on the same host.
    Shm,
    /// TCP connections.
    Tcp,
    /// Copies within one process, for tests.
    Fake,
}

impl TransportKind {
    pub(crate) const ALL: [Self; 4] = [Self::Rdma, Self::Shm, Self::Tcp, Self::Fake];

    /// `rdma`, `shm`, `tcp` or `fake`: in metrics, reports and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Fake => "fake",
        }
    }

    /// Those between processes, the best first.
    pub(crate) fn between_processes() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| kind.listener().is_some())
    }

    /// Place among all, the best first.
    pub(crate) const fn rank(self) -> usize {
        self as usize
    }

    /// The kind whose listener its connections come to; `None`: it stays within a process.
    pub(crate) const fn listener(self) -> Option<Self> {
        match self {
            // RDMA is set up over TCP.
            Self::Rdma | Self::Tcp => Some(Self::Tcp),
            Self::Shm => Some(Self::Shm),
            Self::Fake => None,
        }
    }

    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Tcp => 1,
            Self::Shm => 2,
            Self::Rdma => 3,
            Self::Fake => 255,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

// Metrics are found by rank.
const _: () = {
    let mut rank = 0;
    while rank < TransportKind::ALL.len() {
        assert!(TransportKind::ALL[rank].rank() == rank, "the enum and ALL have the same order");
        rank += 1;
    }
};

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which transports may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TransportChoice {
    /// The best that both ends have: rdma before shm before tcp; the next best while it fails.
    #[default]
    Auto,
    /// This one, or an error.
    Only(TransportKind),
}

impl TransportChoice {
    /// Whether `kind` may carry.
    pub fn allows(self, kind: TransportKind) -> bool {
        match self {
            Self::Auto => true,
            Self::Only(only) => only == kind,
        }
    }

    /// Every choice of a user: auto, then the kinds between processes, the best first.
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Auto).chain(TransportKind::between_processes().map(Self::Only))
    }

    /// The names of all, for help and errors: `auto, rdma, shm or tcp`.
    pub fn names() -> String {
        let mut names: Vec<_> = Self::all().map(Self::as_str).collect();
        let last = names.pop().unwrap_or_default();
        format!("{} or {last}", names.join(", "))
    }

    /// `auto`, or the name of the kind.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Only(kind) => kind.as_str(),
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::all().find(|choice| choice.as_str() == text);
        found.ok_or_else(|| format!("'{text}', expected {}", Self::names()))
    }
}

/// One way to a segment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TransportAddress {
    /// What carries the bytes.
    pub kind: TransportKind,
    /// Where: `host:port` for tcp, boot id and socket for shm, the node's name for the fake.
    pub address: String,
}

/// A registered region, as peers need it to write there. Crosses to them as opaque bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// Which segment of the node.
    pub id: SegmentId,
    /// The owner.
    pub node: NodeId,
    /// The start of the owner that registered it.
    pub generation: Generation,
    /// Bytes.
    pub length: u64,
    /// Ways to it, best first.
    pub transports: Vec<TransportAddress>,
}

impl SegmentDescriptor {
    /// The descriptor as opaque bytes, at most 4 KiB.
    ///
    /// ```text
    /// format u8 | id u32 | generation u64 | length u64 | node: len u8, bytes | count u8 | { kind u8 | len u16 | address } ...   (big endian)
    /// ```
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        out.put_u8(FORMAT);
        out.put_u32(self.id.0);
        out.put_u64(self.generation.0);
        out.put_u64(self.length);
        // A NodeId has at most 128 bytes.
        out.put_u8(self.node.as_str().len() as u8);
        out.put_slice(self.node.as_str().as_bytes());
        out.put_u8(self.transports.len() as u8);
        for transport in &self.transports {
            out.put_u8(transport.kind.code());
            out.put_u16(transport.address.len() as u16);
            out.put_slice(transport.address.as_bytes());
        }
        debug_assert!(out.len() <= MAX_ENCODED, "{self:?}");
        out
    }

    /// Reads what [`SegmentDescriptor::encode`] wrote, on this or another version: transports that
    /// this version does not know are left out.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        if bytes.len() > MAX_ENCODED {
            return Err(malformed(format!("{} bytes, but at most {MAX_ENCODED} are taken", bytes.len())));
        }
        let mut rest = bytes;
        let format = rest.try_get_u8().map_err(|_| malformed("empty"))?;
        if format != FORMAT {
            return Err(malformed(format!("format {format}, but {FORMAT} is known")));
        }
        decode_fields(&mut rest).ok_or_else(|| malformed("truncated or malformed"))
    }

    /// The address of the given transport.
    pub fn address(&self, kind: TransportKind) -> Option<&str> {
        self.transports.iter().find(|transport| transport.kind == kind).map(|transport| transport.address.as_str())
    }
}

fn malformed(problem: impl Into<String>) -> TransferError {
    TransferError::invalid("segment descriptor", problem)
}

fn decode_fields(rest: &mut &[u8]) -> Option<SegmentDescriptor> {
    let id = SegmentId(rest.try_get_u32().ok()?);
    let generation = Generation(rest.try_get_u64().ok()?);
    let length = rest.try_get_u64().ok()?;
    let name_len = rest.try_get_u8().ok()?;
    let node = NodeId::new(take_str(rest, name_len.into())?).ok()?;
    let count = rest.try_get_u8().ok()?;
    let mut transports = Vec::new();
    for _ in 0..count {
        let kind = TransportKind::from_code(rest.try_get_u8().ok()?);
        let len = usize::from(rest.try_get_u16().ok()?);
        let address = rest.split_off(..len)?;
        if let Some(kind) = kind {
            let address = std::str::from_utf8(address).ok().filter(|address| address.len() <= MAX_ADDRESS)?;
            transports.push(TransportAddress { kind, address: address.to_owned() });
        }
    }
    rest.is_empty().then_some(SegmentDescriptor { id, node, generation, length, transports })
}

fn take_str<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a str> {
    std::str::from_utf8(rest.split_off(..len)?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor(id: u32, generation: u64, length: u64, address: String) -> SegmentDescriptor {
        let transports =
            [TransportKind::Fake, TransportKind::Tcp].map(|kind| TransportAddress { kind, address: address.clone() });
        let node = NodeId::new("decode-0").unwrap();
        SegmentDescriptor {
            id: SegmentId(id),
            node,
            generation: Generation(generation),
            length,
            transports: transports.into(),
        }
    }

    proptest! {
        #[test]
        fn segment_descriptor_round_trips(id: u32, generation: u64, length: u64, address in "[a-z0-9.:]{0,40}") {
            let descriptor = descriptor(id, generation, length, address);
            prop_assert_eq!(SegmentDescriptor::decode(&descriptor.encode()).unwrap(), descriptor);
        }

        #[test]
        fn invalid_segment_descriptor_is_refused_without_a_panic(bytes: Vec<u8>, cut in 0usize..60) {
            let _ = SegmentDescriptor::decode(&bytes);
            let encoded = descriptor(1, 2, 3, "10.0.0.1:77".into()).encode();
            prop_assert!(SegmentDescriptor::decode(&encoded[..cut.min(encoded.len() - 1)]).is_err());
        }
    }

    #[test]
    fn unknown_transport_in_segment_descriptor_is_left_out() {
        let mut bytes = descriptor(1, 2, 3, "a:1".into()).encode();
        let position = bytes.iter().position(|&b| b == TransportKind::Fake.code()).unwrap();
        bytes[position] = 77;
        let decoded = SegmentDescriptor::decode(&bytes).unwrap();
        assert_eq!((decoded.transports.len(), decoded.address(TransportKind::Tcp)), (1, Some("a:1")));
    }

    #[test]
    fn segment_descriptor_of_other_format_or_huge_size_is_refused() {
        let mut bytes = descriptor(1, 2, 3, "a:1".into()).encode();
        bytes[0] = 9;
        assert!(SegmentDescriptor::decode(&bytes).unwrap_err().to_string().contains("format 9"));
        assert!(SegmentDescriptor::decode(&[1; 5000]).is_err());
    }
}
