//! What the writer sends after HELLO.

use baton_types::GrantId;
use bytes::{Buf, BufMut};

use super::endpoint::{RdmaEndpoint, take_gid};
use super::{
    MAX_FRAME_PAYLOAD, MAX_FRAME_SPANS, MAX_READ, PartId, Prefix, WireError, frame, kind, put_span, put_target,
    take_all, take_span, take_target,
};
use crate::grant::RemoteSpan;
use crate::{SegmentId, SpanPair};

/// Which part, and the right under which it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) id: PartId,
    pub(crate) grant: GrantId,
    /// The owner's segment.
    pub(crate) segment: SegmentId,
}

/// A DATA frame's spans; the payload follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Data {
    pub(crate) target: Target,
    pub(crate) spans: Vec<RemoteSpan>,
}

/// A COPY frame: spans that the owner fetches from the writer's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) target: Target,
    /// The writer's segment.
    pub(crate) source: SegmentId,
    pub(crate) place: Place,
    pub(crate) spans: Vec<CopySpan>,
}

/// Where in the writer's slots it says that a part is still wanted: as long as `token` stands
/// there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: u32,
    pub(crate) token: u64,
}

/// Bytes to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CopySpan {
    pub(crate) to: RemoteSpan,
    /// First byte in the writer's segment.
    pub(crate) from: u64,
}

/// Spans that the writer of the connection reads from the owner's memory, under a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Read {
    /// The lease is named where writes name their grant.
    pub(crate) target: Target,
    pub(crate) spans: Vec<RemoteSpan>,
}

/// The trailer of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) target: Target,
    /// Parts of the batch.
    pub(crate) parts: u32,
    /// Bytes of this part.
    pub(crate) bytes: u64,
    pub(crate) tag: u64,
}

/// The trailer of a part whose bytes go past the owner's processor: they are there when the
/// immediate of this number is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expect {
    pub(crate) sequence: u32,
    pub(crate) commit: Commit,
}

/// What the writer sends after HELLO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    Data(Data),
    Commit(Commit),
    Cancel {
        batch: u64,
        grant: GrantId,
    },
    Fence {
        connection: u64,
    },
    /// The page in which the writer says which parts are still wanted; its file comes along.
    Slots {
        bytes: u64,
    },
    /// A segment of the writer; its file comes along.
    Source {
        source: SegmentId,
        bytes: u64,
    },
    Copy(Copy),
    /// Asks for bytes: they come as PAYLOAD.
    Read(Read),
    /// Asks whether bytes that were read without the owner's help were under a lease all the time.
    Check(Read),
    /// Asks for the way to a segment: it comes as MAPPED.
    Map {
        segment: SegmentId,
    },
    /// The writer's end of an RDMA connection, and the address of the owner's device that it is
    /// meant for.
    Endpoint {
        device: [u8; 16],
        endpoint: RdmaEndpoint,
    },
    Expect(Expect),
    /// Asks for the ranges of a grant, and to be told of its end.
    Open {
        grant: GrantId,
        segment: SegmentId,
    },
    /// Nothing is under way any more under a grant that the owner has ended.
    Revoked {
        grant: GrantId,
    },
}

pub(super) fn payload_bytes(spans: &[RemoteSpan]) -> u64 {
    spans.iter().map(|span| u64::from(span.len)).sum()
}

impl Data {
    pub(crate) fn payload_bytes(&self) -> u64 {
        payload_bytes(&self.spans)
    }
}

/// Appends the head of a DATA frame for spans of at most `MAX_FRAME_SPANS` and 4 GiB each.
pub(crate) fn put_data(out: &mut Vec<u8>, target: &Target, spans: &[SpanPair]) {
    put_spans(out, kind::DATA, target, spans);
}

/// Appends a COPY frame for spans of at most `MAX_FRAME_SPANS` and 4 GiB each.
pub(crate) fn put_copy(out: &mut Vec<u8>, target: &Target, source: SegmentId, place: Place, spans: &[SpanPair]) {
    debug_assert!(spans.len() <= MAX_FRAME_SPANS);
    frame(out, kind::COPY, |out| {
        put_target(out, target);
        out.put_u32(source.0);
        out.put_u32(place.slot);
        out.put_u64(place.token);
        for span in spans {
            put_span(out, span.remote_offset, span.len);
            out.put_u64(span.local_offset);
        }
    });
}

/// Appends a READ frame for spans of at most `MAX_FRAME_SPANS` and 4 GiB each.
pub(crate) fn put_read(out: &mut Vec<u8>, target: &Target, spans: &[SpanPair]) {
    put_spans(out, kind::READ, target, spans);
}

/// Appends a CHECK frame, likewise.
pub(crate) fn put_check(out: &mut Vec<u8>, target: &Target, spans: &[SpanPair]) {
    put_spans(out, kind::CHECK, target, spans);
}

fn put_spans(out: &mut Vec<u8>, kind: u8, target: &Target, spans: &[SpanPair]) {
    debug_assert!(spans.len() <= MAX_FRAME_SPANS);
    frame(out, kind, |out| {
        put_target(out, target);
        spans.iter().for_each(|span| put_span(out, span.remote_offset, span.len));
    });
}

pub(crate) fn put_commit(out: &mut Vec<u8>, commit: &Commit) {
    frame(out, kind::COMMIT, |out| put_trailer(out, commit));
}

fn put_trailer(out: &mut Vec<u8>, commit: &Commit) {
    put_target(out, &commit.target);
    out.put_u32(commit.parts);
    out.put_u64(commit.bytes);
    out.put_u64(commit.tag);
}

pub(crate) fn put_fence(out: &mut Vec<u8>, connection: u64) {
    Frame::Fence { connection }.encode(out);
}

impl Frame {
    /// Appends the frames that are not made from a batch.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Data(_) | Self::Copy(_) | Self::Read(_) | Self::Check(_) => {
                debug_assert!(false, "made from a batch");
            }
            Self::Commit(commit) => put_commit(out, commit),
            Self::Endpoint { device, endpoint } => frame(out, kind::ENDPOINT, |out| {
                out.put_slice(device);
                endpoint.put(out);
            }),
            Self::Expect(Expect { sequence, commit }) => frame(out, kind::EXPECT, |out| {
                out.put_u32(*sequence);
                put_trailer(out, commit);
            }),
            Self::Open { grant, segment } => frame(out, kind::OPEN, |out| {
                out.put_u64(grant.0);
                out.put_u32(segment.0);
            }),
            Self::Revoked { grant } => frame(out, kind::REVOKED, |out| out.put_u64(grant.0)),
            Self::Map { segment } => frame(out, kind::MAP, |out| out.put_u32(segment.0)),
            Self::Cancel { batch, grant } => frame(out, kind::CANCEL, |out| {
                out.put_u64(*batch);
                out.put_u64(grant.0);
            }),
            Self::Fence { connection } => frame(out, kind::FENCE, |out| out.put_u64(*connection)),
            Self::Slots { bytes } => frame(out, kind::SLOTS, |out| out.put_u64(*bytes)),
            Self::Source { source, bytes } => frame(out, kind::SOURCE, |out| {
                out.put_u32(source.0);
                out.put_u64(*bytes);
            }),
        }
    }

    pub(crate) fn decode(prefix: Prefix, body: &[u8]) -> Result<Self, WireError> {
        let mut rest = body;
        let frame = match prefix.kind {
            kind::DATA => decode_data(&mut rest),
            kind::COMMIT => decode_commit(&mut rest).map(Self::Commit),
            kind::EXPECT => decode_expect(&mut rest),
            kind::ENDPOINT => decode_endpoint(&mut rest),
            kind::OPEN => decode_open(&mut rest),
            kind::REVOKED => rest.try_get_u64().ok().map(|grant| Self::Revoked { grant: GrantId(grant) }),
            kind::CANCEL => decode_cancel(&mut rest),
            kind::FENCE => rest.try_get_u64().ok().map(|connection| Self::Fence { connection }),
            kind::SLOTS => rest.try_get_u64().ok().map(|bytes| Self::Slots { bytes }),
            kind::SOURCE => decode_source(&mut rest),
            kind::COPY => decode_copy(&mut rest),
            kind::READ => decode_read(&mut rest).map(Self::Read),
            kind::CHECK => decode_read(&mut rest).map(Self::Check),
            kind::MAP => rest.try_get_u32().ok().map(|segment| Self::Map { segment: SegmentId(segment) }),
            other => return Err(WireError(format!("a frame of unknown kind {other}"))),
        };
        let whole = frame.filter(|_| rest.is_empty());
        whole.ok_or_else(|| WireError(format!("a malformed frame of kind {}", prefix.kind)))
    }
}

fn decode_data(rest: &mut &[u8]) -> Option<Frame> {
    let target = take_target(rest)?;
    let spans = take_all(rest, take_span)?;
    let data = Data { target, spans };
    (data.payload_bytes() <= u64::from(MAX_FRAME_PAYLOAD)).then_some(Frame::Data(data))
}

fn decode_copy(rest: &mut &[u8]) -> Option<Frame> {
    let target = take_target(rest)?;
    let source = SegmentId(rest.try_get_u32().ok()?);
    let place = Place { slot: rest.try_get_u32().ok()?, token: rest.try_get_u64().ok()? };
    let spans = take_all(rest, |rest| Some(CopySpan { to: take_span(rest)?, from: rest.try_get_u64().ok()? }))?;
    Some(Frame::Copy(Copy { target, source, place, spans }))
}

fn decode_read(rest: &mut &[u8]) -> Option<Read> {
    let target = take_target(rest)?;
    let spans = take_all(rest, take_span)?;
    (payload_bytes(&spans) <= u64::from(MAX_READ)).then_some(Read { target, spans })
}

fn decode_commit(rest: &mut &[u8]) -> Option<Commit> {
    let target = take_target(rest)?;
    let parts = rest.try_get_u32().ok()?;
    let bytes = rest.try_get_u64().ok()?;
    let tag = rest.try_get_u64().ok()?;
    (target.id.part < parts).then_some(Commit { target, parts, bytes, tag })
}

fn decode_cancel(rest: &mut &[u8]) -> Option<Frame> {
    let batch = rest.try_get_u64().ok()?;
    let grant = GrantId(rest.try_get_u64().ok()?);
    Some(Frame::Cancel { batch, grant })
}

fn decode_source(rest: &mut &[u8]) -> Option<Frame> {
    let source = SegmentId(rest.try_get_u32().ok()?);
    Some(Frame::Source { source, bytes: rest.try_get_u64().ok()? })
}

fn decode_expect(rest: &mut &[u8]) -> Option<Frame> {
    let sequence = rest.try_get_u32().ok()?;
    Some(Frame::Expect(Expect { sequence, commit: decode_commit(rest)? }))
}

fn decode_endpoint(rest: &mut &[u8]) -> Option<Frame> {
    Some(Frame::Endpoint { device: take_gid(rest)?, endpoint: RdmaEndpoint::take(rest)? })
}

fn decode_open(rest: &mut &[u8]) -> Option<Frame> {
    let grant = GrantId(rest.try_get_u64().ok()?);
    Some(Frame::Open { grant, segment: SegmentId(rest.try_get_u32().ok()?) })
}
