//! What the owner sends.

use std::ops::Range;

use baton_types::GrantId;
use bytes::{Buf, BufMut};

use super::endpoint::RdmaEndpoint;
use super::hello::{put_rejection, take_rejection};
use super::{
    MAX_FRAME_PAYLOAD, PartId, Prefix, Rejection, WireError, frame, kind, put_message, put_part, take_all, take_part,
};
use crate::SegmentId;
use crate::error::{Refusal, RefusalReason};

/// What the owner sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Welcome {
        version: u16,
    },
    Reject(Rejection),
    Ack(PartId),
    Refuse(PartId, Refusal),
    Progress,
    Fault(String),
    /// Bytes of a READ follow, in the order of its spans, as far as they have not come before.
    Payload {
        id: PartId,
        bytes: u32,
    },
    /// A segment of the owner, for peers that move bytes without its help. No bytes: there is none.
    /// On shm its file comes along; on rdma it is at `address` under `key`.
    Mapped {
        segment: SegmentId,
        bytes: u64,
        address: u64,
        key: u32,
    },
    /// The owner's end of an RDMA connection.
    Connected(RdmaEndpoint),
    /// Ranges of a grant; if there are `more`, they follow.
    Opened {
        grant: GrantId,
        /// It is to write; else to read.
        write: bool,
        more: bool,
        ranges: Vec<Range<u64>>,
    },
    /// A grant that was asked for is not to be had.
    Closed {
        grant: GrantId,
        refusal: Refusal,
    },
    /// A grant has ended: the owner waits until nothing is under way under it.
    Revoke {
        grant: GrantId,
    },
}

/// Most ranges of one OPENED.
#[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
pub(crate) const MAX_OPENED_RANGES: usize = 256;

/// Appends the head of a PAYLOAD.
pub(crate) fn put_payload(out: &mut Vec<u8>, id: PartId, bytes: u32) {
    frame(out, kind::PAYLOAD, |out| {
        put_part(out, id);
        out.put_u32(bytes);
    });
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
            Self::Payload { id, bytes } => put_payload(&mut out, *id, *bytes),
            Self::Mapped { segment, bytes, address, key } => frame(&mut out, kind::MAPPED, |out| {
                out.put_u32(segment.0);
                out.put_u64(*bytes);
                out.put_u64(*address);
                out.put_u32(*key);
            }),
            Self::Connected(endpoint) => frame(&mut out, kind::CONNECTED, |out| endpoint.put(out)),
            Self::Opened { grant, write, more, ranges } => frame(&mut out, kind::OPENED, |out| {
                out.put_u64(grant.0);
                out.put_u8(u8::from(*write));
                out.put_u8(u8::from(*more));
                for range in ranges {
                    out.put_u64(range.start);
                    out.put_u64(range.end);
                }
            }),
            Self::Closed { grant, refusal } => frame(&mut out, kind::CLOSED, |out| {
                out.put_u64(grant.0);
                put_reason(out, refusal);
            }),
            Self::Revoke { grant } => frame(&mut out, kind::REVOKE, |out| out.put_u64(grant.0)),
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
            kind::PAYLOAD => take_payload(rest),
            kind::MAPPED => take_mapped(rest),
            kind::CONNECTED => RdmaEndpoint::take(rest).map(Self::Connected),
            kind::OPENED => take_opened(rest),
            kind::CLOSED => take_closed(rest),
            kind::REVOKE => rest.try_get_u64().ok().map(|grant| Self::Revoke { grant: GrantId(grant) }),
            other => return Err(WireError(format!("a reply of unknown kind {other}"))),
        };
        reply.ok_or_else(|| WireError(format!("a malformed reply of kind {}", prefix.kind)))
    }
}

fn take_payload(rest: &mut &[u8]) -> Option<Reply> {
    let id = take_part(rest)?;
    let bytes = rest.try_get_u32().ok()?;
    (bytes <= MAX_FRAME_PAYLOAD).then_some(Reply::Payload { id, bytes })
}

fn take_mapped(rest: &mut &[u8]) -> Option<Reply> {
    let segment = SegmentId(rest.try_get_u32().ok()?);
    let bytes = rest.try_get_u64().ok()?;
    let address = rest.try_get_u64().ok()?;
    Some(Reply::Mapped { segment, bytes, address, key: rest.try_get_u32().ok()? })
}

fn take_opened(rest: &mut &[u8]) -> Option<Reply> {
    let grant = GrantId(rest.try_get_u64().ok()?);
    let write = rest.try_get_u8().ok()? != 0;
    let more = rest.try_get_u8().ok()? != 0;
    let ranges = take_all(rest, |rest| Some(rest.try_get_u64().ok()?..rest.try_get_u64().ok()?))?;
    Some(Reply::Opened { grant, write, more, ranges })
}

fn take_closed(rest: &mut &[u8]) -> Option<Reply> {
    let grant = GrantId(rest.try_get_u64().ok()?);
    Some(Reply::Closed { grant, refusal: take_reason(rest)? })
}

fn put_refusal(out: &mut Vec<u8>, id: PartId, refusal: &Refusal) {
    put_part(out, id);
    put_reason(out, refusal);
}

fn put_reason(out: &mut Vec<u8>, refusal: &Refusal) {
    // Its place in the list, which only ever grows at the end.
    let code = RefusalReason::ALL.iter().position(|reason| *reason == refusal.reason);
    out.put_u8(code.unwrap_or_default() as u8);
    put_message(out, &refusal.message);
}

fn take_refusal(rest: &mut &[u8]) -> Option<Reply> {
    let id = take_part(rest)?;
    Some(Reply::Refuse(id, take_reason(rest)?))
}

fn take_reason(rest: &mut &[u8]) -> Option<Refusal> {
    // A reason of a later version is as good as an unknown grant: this batch cannot be written.
    let reason = RefusalReason::ALL.get(usize::from(rest.try_get_u8().ok()?)).copied();
    let message = String::from_utf8_lossy(rest).into_owned();
    Some(Refusal { reason: reason.unwrap_or(RefusalReason::UnknownGrant), message })
}
