//! What goes over a connection, as bytes.
//!
//! ```text
//! frame:   kind u8 | flags u8 | 0 u16 | body length u32 | body            (big endian)
//! DATA:    batch u64 | grant u64 | part u32 | segment u32 | { offset u64 | length u32 } ...     followed by the payload, spans in this order
//! COPY:    the same head | source u32 | slot u32 | token u64 | { offset u64 | length u32 | source offset u64 } ...
//! ```
//!
//! HELLO and the answer to it have the same form in every version, so that an owner can tell a
//! writer which version it has. What a later version adds stands at their ends.
//! `docs/internals/transfer-protocol.md` specifies every frame.

mod endpoint;
mod frame;
mod hello;
pub(crate) mod incoming;
pub(crate) mod payload;
mod reply;
pub(crate) mod stream;
#[cfg(test)]
mod tests;

use std::{fmt, io};

use baton_types::GrantId;
use bytes::{Buf, BufMut};

#[cfg(any(test, feature = "rdma"))]
pub(crate) use endpoint::RdmaEndpoint;
#[cfg(any(test, feature = "rdma"))]
pub(crate) use frame::Expect;
pub(crate) use frame::{
    Commit, Copy, CopySpan, Data, Frame, Place, Read, Target, put_check, put_commit, put_copy, put_data, put_fence,
    put_read,
};
pub(crate) use hello::{Hello, Rejection};
#[cfg(any(test, feature = "rdma"))]
pub(crate) use reply::MAX_OPENED_RANGES;
pub(crate) use reply::{Reply, put_payload};

use crate::SegmentId;
use crate::grant::RemoteSpan;

/// The version of the protocol. An end of another version is refused.
pub(crate) const PROTOCOL_VERSION: u16 = 2;
/// First bytes of a connection.
pub(crate) const MAGIC: [u8; 8] = *b"BATONKV\n";
/// Bytes in front of a frame's body.
pub(crate) const PREFIX_BYTES: usize = 8;
/// Most spans of one frame.
pub(crate) const MAX_FRAME_SPANS: usize = 256;
/// Largest payload of one frame that is taken, bytes.
pub(crate) const MAX_FRAME_PAYLOAD: u32 = 4 << 20;
/// Most bytes of one READ or CHECK.
const MAX_READ: u32 = 1 << 30;

/// Longest body, bytes: that of COPY, with room to grow.
const MAX_BODY: u32 = 8192;
/// Longest message of a refusal, bytes.
const MAX_MESSAGE: usize = 512;

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const DATA: u8 = 2;
    pub(super) const COMMIT: u8 = 3;
    pub(super) const CANCEL: u8 = 4;
    pub(super) const FENCE: u8 = 5;
    pub(super) const SLOTS: u8 = 6;
    pub(super) const SOURCE: u8 = 7;
    pub(super) const COPY: u8 = 8;
    pub(super) const READ: u8 = 9;
    pub(super) const CHECK: u8 = 10;
    pub(super) const MAP: u8 = 11;
    pub(super) const REVOKED: u8 = 12;
    pub(super) const ENDPOINT: u8 = 13;
    pub(super) const EXPECT: u8 = 14;
    pub(super) const OPEN: u8 = 15;
    pub(super) const WELCOME: u8 = 64;
    pub(super) const REJECT: u8 = 65;
    pub(super) const ACK: u8 = 66;
    pub(super) const REFUSE: u8 = 67;
    pub(super) const PROGRESS: u8 = 68;
    pub(super) const FAULT: u8 = 69;
    pub(super) const PAYLOAD: u8 = 70;
    pub(super) const MAPPED: u8 = 71;
    pub(super) const REVOKE: u8 = 72;
    pub(super) const CONNECTED: u8 = 73;
    pub(super) const OPENED: u8 = 74;
    pub(super) const CLOSED: u8 = 75;
}

/// Bytes that are no frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WireError(pub(crate) String);

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<WireError> for io::Error {
    fn from(error: WireError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error.0)
    }
}

/// The start of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    kind: u8,
    /// Bytes of the body that follows.
    pub(crate) body: usize,
}

impl Prefix {
    pub(crate) fn decode(bytes: [u8; PREFIX_BYTES]) -> Result<Self, WireError> {
        let mut rest = &bytes[..];
        let kind = rest.get_u8();
        let flags = rest.get_u8();
        let reserved = rest.get_u16();
        let body = rest.get_u32();
        if flags != 0 || reserved != 0 {
            return Err(WireError(format!("a frame of kind {kind} has unknown flags {flags:#04x}")));
        }
        if body > MAX_BODY {
            return Err(WireError(format!(
                "a frame of kind {kind} has {body} bytes, but at most {MAX_BODY} are taken"
            )));
        }
        Ok(Self { kind, body: body as usize })
    }
}

/// A part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PartId {
    pub(crate) batch: u64,
    pub(crate) part: u32,
}

/// Appends one frame: its body is what `body` appends.
fn frame(out: &mut Vec<u8>, kind: u8, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.put_u32(u32::from(kind) << 24);
    out.put_u32(0);
    body(out);
    let len = (out.len() - start - PREFIX_BYTES) as u32;
    debug_assert!(len <= MAX_BODY);
    out[start + 4..start + 8].copy_from_slice(&len.to_be_bytes());
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    // A NodeId has at most 128 bytes.
    out.put_u8(name.len() as u8);
    out.put_slice(name.as_bytes());
}

fn take_name<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let len = usize::from(rest.try_get_u8().ok()?);
    std::str::from_utf8(rest.split_off(..len)?).ok()
}

fn put_message(out: &mut Vec<u8>, message: &str) {
    out.put_slice(&message.as_bytes()[..message.floor_char_boundary(MAX_MESSAGE)]);
}

fn put_part(out: &mut Vec<u8>, id: PartId) {
    out.put_u64(id.batch);
    out.put_u32(id.part);
}

fn take_part(rest: &mut &[u8]) -> Option<PartId> {
    Some(PartId { batch: rest.try_get_u64().ok()?, part: rest.try_get_u32().ok()? })
}

fn put_target(out: &mut Vec<u8>, target: &Target) {
    out.put_u64(target.id.batch);
    out.put_u64(target.grant.0);
    out.put_u32(target.id.part);
    out.put_u32(target.segment.0);
}

fn take_target(rest: &mut &[u8]) -> Option<Target> {
    let batch = rest.try_get_u64().ok()?;
    let grant = GrantId(rest.try_get_u64().ok()?);
    let part = rest.try_get_u32().ok()?;
    let segment = SegmentId(rest.try_get_u32().ok()?);
    Some(Target { id: PartId { batch, part }, grant, segment })
}

fn put_span(out: &mut Vec<u8>, offset: u64, len: u64) {
    out.put_u64(offset);
    out.put_u32(len as u32);
}

fn take_span(rest: &mut &[u8]) -> Option<RemoteSpan> {
    Some(RemoteSpan { offset: rest.try_get_u64().ok()?, len: rest.try_get_u32().ok()? })
}

/// Everything that is left, as a list of at most [`MAX_FRAME_SPANS`].
fn take_all<T>(rest: &mut &[u8], take: impl Fn(&mut &[u8]) -> Option<T>) -> Option<Vec<T>> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        if all.len() == MAX_FRAME_SPANS {
            return None;
        }
        all.push(take(rest)?);
    }
    Some(all)
}
