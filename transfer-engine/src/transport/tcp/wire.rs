//! What goes over a connection, as bytes.
//!
//! ```text
//! frame:   kind u8 | flags u8 | 0 u16 | body length u32 | body            (big endian)
//! DATA:    batch u64 | grant u64 | part u32 | segment u32 | { offset u64 | length u32 } ...     followed by the payload, spans in this order
//! ```
//!
//! HELLO and the answer to it have the same form in every version, so that two versions can tell each other which one to speak. No flag is defined yet; bit 0
//! is kept for a checksum of the payload.

use std::fmt;

use baton_types::{Generation, GrantId, NodeId};
use bytes::{Buf, BufMut};

use crate::error::{Refusal, RefusalReason};
use crate::grant::{RemoteSpan, Writer};
use crate::{SegmentId, SpanPair};

/// Spoken by this version; the one before is understood too.
pub(crate) const PROTOCOL_VERSION: u16 = 1;
/// First bytes of a connection.
pub(crate) const MAGIC: [u8; 8] = *b"BATONKV\n";
/// Bytes in front of a frame's body.
pub(crate) const PREFIX_BYTES: usize = 8;
/// Most spans of one DATA frame.
pub(crate) const MAX_FRAME_SPANS: usize = 256;
/// Largest payload of one DATA frame that is taken, bytes.
pub(crate) const MAX_FRAME_PAYLOAD: u32 = 4 << 20;

/// Longest body, bytes: that of DATA, with room to grow.
const MAX_BODY: u32 = 8192;
/// Longest message of a refusal, bytes.
const MAX_MESSAGE: usize = 512;
const SPAN_BYTES: usize = 12;

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const DATA: u8 = 2;
    pub(super) const COMMIT: u8 = 3;
    pub(super) const CANCEL: u8 = 4;
    pub(super) const FENCE: u8 = 5;
    pub(super) const WELCOME: u8 = 64;
    pub(super) const REJECT: u8 = 65;
    pub(super) const ACK: u8 = 66;
    pub(super) const REFUSE: u8 = 67;
    pub(super) const PROGRESS: u8 = 68;
    pub(super) const FAULT: u8 = 69;
}

/// Bytes that are no frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WireError(pub(crate) String);

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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
        let (kind, flags, reserved, body) = (rest.get_u8(), rest.get_u8(), rest.get_u16(), rest.get_u32());
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

/// First frame of the writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The writer's latest version.
    pub(crate) version: u16,
    /// Names the connection among the writer's.
    pub(crate) connection: u64,
    pub(crate) writer: Writer,
    /// Whom the writer means to reach.
    pub(crate) target: Writer,
}

/// Why a connection is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rejection {
    /// The owner runs in another generation.
    StaleTarget(Generation),
    /// The owner knows a later generation of the writer.
    StaleWriter(Generation),
    /// Another node listens here.
    WrongNode(String),
    /// The owner's latest version.
    Version(u16),
    /// The owner has as many connections as it takes.
    Full,
    /// The connection's number is in use.
    InUse,
}

/// A DATA frame's spans; the payload follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Data {
    pub(crate) id: PartId,
    pub(crate) grant: GrantId,
    pub(crate) segment: SegmentId,
    pub(crate) spans: Vec<RemoteSpan>,
}

impl Data {
    pub(crate) fn payload_bytes(&self) -> u64 {
        self.spans.iter().map(|span| u64::from(span.len)).sum()
    }
}

/// A part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PartId {
    pub(crate) batch: u64,
    pub(crate) part: u32,
}

/// The trailer of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) id: PartId,
    pub(crate) grant: GrantId,
    pub(crate) segment: SegmentId,
    /// Parts of the batch.
    pub(crate) parts: u32,
    /// Bytes of this part.
    pub(crate) bytes: u64,
    pub(crate) tag: u64,
}

/// What the writer sends after HELLO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    Data(Data),
    Commit(Commit),
    Cancel { batch: u64, grant: GrantId },
    Fence { connection: u64 },
}

/// What the owner sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Welcome { version: u16 },
    Reject(Rejection),
    Ack(PartId),
    Refuse(PartId, Refusal),
    Progress,
    Fault(String),
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

fn put_writer(out: &mut Vec<u8>, writer: &Writer) {
    out.put_u64(writer.generation.0);
    put_name(out, writer.node.as_str());
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    // A NodeId has at most 128 bytes.
    out.put_u8(name.len() as u8);
    out.put_slice(name.as_bytes());
}

fn put_message(out: &mut Vec<u8>, message: &str) {
    out.put_slice(&message.as_bytes()[..message.floor_char_boundary(MAX_MESSAGE)]);
}

impl Hello {
    /// With the magic in front.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        frame(&mut out, kind::HELLO, |out| {
            out.put_u16(self.version);
            out.put_u64(self.connection);
            put_writer(out, &self.writer);
            put_writer(out, &self.target);
        });
        out
    }

    /// The body; what a later version may add at its end is left unread.
    pub(crate) fn decode(prefix: Prefix, body: &[u8]) -> Result<Self, WireError> {
        if prefix.kind != kind::HELLO {
            return Err(WireError(format!("a frame of kind {} instead of HELLO", prefix.kind)));
        }
        let mut rest = body;
        let mut fields = || {
            Some(Self {
                version: rest.try_get_u16().ok()?,
                connection: rest.try_get_u64().ok()?,
                writer: take_writer(&mut rest)?,
                target: take_writer(&mut rest)?,
            })
        };
        fields().ok_or_else(|| WireError("malformed HELLO".into()))
    }
}

fn take_writer(rest: &mut &[u8]) -> Option<Writer> {
    let generation = Generation(rest.try_get_u64().ok()?);
    let node = NodeId::new(take_name(rest)?).ok()?;
    Some(Writer { node, generation })
}

fn take_name<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let len = usize::from(rest.try_get_u8().ok()?);
    std::str::from_utf8(rest.split_off(..len)?).ok()
}

/// Appends the head of a DATA frame for spans of at most `MAX_FRAME_SPANS` and 4 GiB each.
pub(crate) fn put_data(out: &mut Vec<u8>, id: PartId, grant: GrantId, segment: SegmentId, spans: &[SpanPair]) {
    debug_assert!(spans.len() <= MAX_FRAME_SPANS);
    frame(out, kind::DATA, |out| {
        out.put_u64(id.batch);
        out.put_u64(grant.0);
        out.put_u32(id.part);
        out.put_u32(segment.0);
        for span in spans {
            out.put_u64(span.remote_offset);
            out.put_u32(span.len as u32);
        }
    });
}

pub(crate) fn put_commit(out: &mut Vec<u8>, commit: &Commit) {
    frame(out, kind::COMMIT, |out| {
        out.put_u64(commit.id.batch);
        out.put_u64(commit.grant.0);
        out.put_u32(commit.id.part);
        out.put_u32(commit.segment.0);
        out.put_u32(commit.parts);
        out.put_u64(commit.bytes);
        out.put_u64(commit.tag);
    });
}

pub(crate) fn put_cancel(out: &mut Vec<u8>, batch: u64, grant: GrantId) {
    frame(out, kind::CANCEL, |out| {
        out.put_u64(batch);
        out.put_u64(grant.0);
    });
}

pub(crate) fn put_fence(out: &mut Vec<u8>, connection: u64) {
    frame(out, kind::FENCE, |out| out.put_u64(connection));
}

impl Frame {
    pub(crate) fn decode(prefix: Prefix, body: &[u8]) -> Result<Self, WireError> {
        let frame = match prefix.kind {
            kind::DATA => decode_data(body),
            kind::COMMIT => decode_commit(body),
            kind::CANCEL => decode_cancel(body),
            kind::FENCE => decode_fence(body),
            other => return Err(WireError(format!("a frame of unknown kind {other}"))),
        };
        frame.ok_or_else(|| WireError(format!("a malformed frame of kind {}", prefix.kind)))
    }
}

fn decode_data(mut body: &[u8]) -> Option<Frame> {
    let (batch, grant) = (body.try_get_u64().ok()?, GrantId(body.try_get_u64().ok()?));
    let (part, segment) = (body.try_get_u32().ok()?, SegmentId(body.try_get_u32().ok()?));
    if !body.len().is_multiple_of(SPAN_BYTES) || body.len() / SPAN_BYTES > MAX_FRAME_SPANS {
        return None;
    }
    let span = |mut bytes: &[u8]| RemoteSpan { offset: bytes.get_u64(), len: bytes.get_u32() };
    let spans: Vec<_> = body.chunks_exact(SPAN_BYTES).map(span).collect();
    let data = Data { id: PartId { batch, part }, grant, segment, spans };
    (data.payload_bytes() <= u64::from(MAX_FRAME_PAYLOAD)).then_some(Frame::Data(data))
}

fn decode_commit(mut body: &[u8]) -> Option<Frame> {
    let (batch, grant) = (body.try_get_u64().ok()?, GrantId(body.try_get_u64().ok()?));
    let (part, segment) = (body.try_get_u32().ok()?, SegmentId(body.try_get_u32().ok()?));
    let (parts, bytes, tag) = (body.try_get_u32().ok()?, body.try_get_u64().ok()?, body.try_get_u64().ok()?);
    let commit = Commit { id: PartId { batch, part }, grant, segment, parts, bytes, tag };
    (body.is_empty() && part < parts).then_some(Frame::Commit(commit))
}

fn decode_cancel(mut body: &[u8]) -> Option<Frame> {
    let (batch, grant) = (body.try_get_u64().ok()?, GrantId(body.try_get_u64().ok()?));
    body.is_empty().then_some(Frame::Cancel { batch, grant })
}

fn decode_fence(mut body: &[u8]) -> Option<Frame> {
    let connection = body.try_get_u64().ok()?;
    body.is_empty().then_some(Frame::Fence { connection })
}

impl Rejection {
    fn code(&self) -> u8 {
        match self {
            Self::StaleTarget(_) => 1,
            Self::StaleWriter(_) => 2,
            Self::WrongNode(_) => 3,
            Self::Version(_) => 4,
            Self::Full => 5,
            Self::InUse => 6,
        }
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        match self {
            Self::Welcome { version } => frame(&mut out, kind::WELCOME, |out| out.put_u16(*version)),
            Self::Reject(rejection) => frame(&mut out, kind::REJECT, |out| put_rejection(out, rejection)),
            Self::Ack(id) => frame(&mut out, kind::ACK, |out| put_part(out, *id)),
            Self::Refuse(id, refusal) => frame(&mut out, kind::REFUSE, |out| put_refusal(out, *id, refusal)),
            Self::Progress => frame(&mut out, kind::PROGRESS, |_| {}),
            Self::Fault(message) => frame(&mut out, kind::FAULT, |out| put_message(out, message)),
        }
        out
    }

    pub(crate) fn decode(prefix: Prefix, mut body: &[u8]) -> Result<Self, WireError> {
        let rest = &mut body;
        let reply = match prefix.kind {
            kind::WELCOME => rest.try_get_u16().ok().map(|version| Self::Welcome { version }),
            kind::REJECT => take_rejection(rest).map(Self::Reject),
            kind::ACK => take_part(rest).map(Self::Ack),
            kind::REFUSE => take_refusal(rest),
            kind::PROGRESS => Some(Self::Progress),
            kind::FAULT => Some(Self::Fault(String::from_utf8_lossy(rest).into_owned())),
            other => return Err(WireError(format!("a reply of unknown kind {other}"))),
        };
        reply.ok_or_else(|| WireError(format!("a malformed reply of kind {}", prefix.kind)))
    }
}

fn put_part(out: &mut Vec<u8>, id: PartId) {
    out.put_u64(id.batch);
    out.put_u32(id.part);
}

fn take_part(rest: &mut &[u8]) -> Option<PartId> {
    Some(PartId { batch: rest.try_get_u64().ok()?, part: rest.try_get_u32().ok()? })
}

fn put_rejection(out: &mut Vec<u8>, rejection: &Rejection) {
    out.put_u8(rejection.code());
    match rejection {
        Rejection::StaleTarget(generation) | Rejection::StaleWriter(generation) => out.put_u64(generation.0),
        Rejection::WrongNode(node) => put_name(out, node),
        Rejection::Version(version) => out.put_u16(*version),
        Rejection::Full | Rejection::InUse => {}
    }
}

fn take_rejection(rest: &mut &[u8]) -> Option<Rejection> {
    Some(match rest.try_get_u8().ok()? {
        1 => Rejection::StaleTarget(Generation(rest.try_get_u64().ok()?)),
        2 => Rejection::StaleWriter(Generation(rest.try_get_u64().ok()?)),
        3 => Rejection::WrongNode(take_name(rest)?.to_owned()),
        4 => Rejection::Version(rest.try_get_u16().ok()?),
        5 => Rejection::Full,
        6 => Rejection::InUse,
        _ => return None,
    })
}

fn put_refusal(out: &mut Vec<u8>, id: PartId, refusal: &Refusal) {
    put_part(out, id);
    // Its place in the list, which only ever grows at the end.
    let code = RefusalReason::ALL.iter().position(|reason| *reason == refusal.reason);
    out.put_u8(code.unwrap_or_default() as u8);
    put_message(out, &refusal.message);
}

fn take_refusal(rest: &mut &[u8]) -> Option<Reply> {
    let id = take_part(rest)?;
    // A reason of a later version is as good as an unknown grant: this batch cannot be written.
    let reason = RefusalReason::ALL.get(usize::from(rest.try_get_u8().ok()?)).copied();
    let message = String::from_utf8_lossy(rest).into_owned();
    Some(Reply::Refuse(id, Refusal { reason: reason.unwrap_or(RefusalReason::UnknownGrant), message }))
}

/// The version that both sides speak, or `None`: each understands its own and the one before.
pub(crate) const fn common_version(ours: u16, theirs: u16) -> Option<u16> {
    let version = if ours < theirs { ours } else { theirs };
    if version > 0 && ours.abs_diff(theirs) <= 1 { Some(version) } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(bytes: &[u8]) -> (Prefix, &[u8]) {
        let (prefix, body) = bytes.split_at(PREFIX_BYTES);
        let prefix = Prefix::decode(prefix.try_into().unwrap()).unwrap();
        assert_eq!(prefix.body, body.len());
        (prefix, body)
    }

    fn frame_of(put: impl FnOnce(&mut Vec<u8>)) -> Frame {
        let mut out = Vec::new();
        put(&mut out);
        let (prefix, body) = split(&out);
        Frame::decode(prefix, body).unwrap()
    }

    proptest! {
        #[test]
        fn frames_round_trip(batch: u64, part in 0u32..9, grant: u64, segment: u32, bytes: u64, tag: u64, lens in prop::collection::vec(0u32..9999, 0..256)) {
            let (id, grant, segment) = (PartId { batch, part }, GrantId(grant), SegmentId(segment));
            let spans: Vec<_> = lens.iter().map(|&len| SpanPair { local_offset: 7, remote_offset: tag ^ u64::from(len), len: len.into() }).collect();
            let remote = spans.iter().map(|span| RemoteSpan { offset: span.remote_offset, len: span.len as u32 }).collect();
            let data = Frame::Data(Data { id, grant, segment, spans: remote });
            prop_assert_eq!(frame_of(|out| put_data(out, id, grant, segment, &spans)), data);
            let commit = Commit { id, grant, segment, parts: 9, bytes, tag };
            prop_assert_eq!(frame_of(|out| put_commit(out, &commit)), Frame::Commit(commit));
            prop_assert_eq!(frame_of(|out| put_cancel(out, batch, grant)), Frame::Cancel { batch, grant });
            prop_assert_eq!(frame_of(|out| put_fence(out, bytes)), Frame::Fence { connection: bytes });
        }

        #[test]
        fn replies_round_trip(batch: u64, part: u32, generation: u64, version: u16, reason in 0usize..8, message in ".{0,100}") {
            let id = PartId { batch, part };
            let replies = [
                Reply::Welcome { version },
                Reply::Reject(Rejection::StaleTarget(Generation(generation))),
                Reply::Reject(Rejection::StaleWriter(Generation(generation))),
                Reply::Reject(Rejection::WrongNode("decode-7".into())),
                Reply::Reject(Rejection::Version(version)),
                Reply::Reject(Rejection::Full),
                Reply::Reject(Rejection::InUse),
                Reply::Ack(id),
                Reply::Refuse(id, Refusal::new(RefusalReason::ALL[reason], message.clone())),
                Reply::Progress,
                Reply::Fault(message),
            ];
            for reply in replies {
                let bytes = reply.encode();
                let (prefix, body) = split(&bytes);
                prop_assert_eq!(Reply::decode(prefix, body).unwrap(), reply);
            }
        }

        #[test]
        fn nonsense_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..200)) {
            let prefix = Prefix { kind, body: body.len() };
            let _ = (Frame::decode(prefix, &body), Reply::decode(prefix, &body), Hello::decode(prefix, &body));
        }
    }

    #[test]
    fn hello_round_trips_and_may_grow() {
        let writer = |name, generation| Writer { node: NodeId::new(name).unwrap(), generation: Generation(generation) };
        let hello = Hello { version: 1, connection: 9, writer: writer("p", 3), target: writer("d", 4) };
        let bytes = hello.encode();
        let (prefix, body) = split(bytes.strip_prefix(&MAGIC).unwrap());
        assert_eq!(Hello::decode(prefix, body).as_ref(), Ok(&hello));
        assert_eq!(Hello::decode(prefix, &[body, &[1, 2, 3]].concat()), Ok(hello));
        assert!(Hello::decode(prefix, &body[..body.len() - 1]).is_err());
    }

    #[test]
    fn bounds_are_kept() {
        let mut prefix = [0; PREFIX_BYTES];
        prefix[4..].copy_from_slice(&(MAX_BODY + 1).to_be_bytes());
        assert!(Prefix::decode(prefix).is_err());
        let flagged = [kind::DATA, 1, 0, 0, 0, 0, 0, 0];
        assert!(Prefix::decode(flagged).unwrap_err().0.contains("unknown flags 0x01"));
        let mut out = Vec::new();
        let id = PartId { batch: 1, part: 0 };
        let span = SpanPair { local_offset: 0, remote_offset: 0, len: u64::from(MAX_FRAME_PAYLOAD) };
        put_data(&mut out, id, GrantId(1), SegmentId(0), &[span, SpanPair { len: 1, ..span }]);
        let (prefix, body) = split(&out);
        assert!(Frame::decode(prefix, body).is_err(), "more payload than a frame may have");
        let long = Reply::Fault("ü".repeat(1000)).encode();
        assert_eq!(long.len(), PREFIX_BYTES + MAX_MESSAGE);
    }

    #[test]
    fn a_version_speaks_to_its_neighbours() {
        assert_eq!(common_version(3, 3), Some(3));
        assert_eq!(common_version(3, 4), Some(3));
        assert_eq!(common_version(4, 3), Some(3));
        assert_eq!(common_version(5, 3), None);
        assert_eq!(common_version(1, 0), None);
    }
}
