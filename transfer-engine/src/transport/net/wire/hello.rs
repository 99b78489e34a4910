//! The handshake.

use baton_types::{Generation, NodeId, NodeStart};
use bytes::{Buf, BufMut};

use super::{MAGIC, Prefix, WireError, frame, kind, put_name, take_name};
use crate::TransportKind;

/// First frame of the writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The writer's version.
    pub(crate) version: u16,
    /// Names the connection among the writer's.
    pub(crate) connection: u64,
    pub(crate) writer: NodeStart,
    /// Whom the writer means to reach.
    pub(crate) owner: NodeStart,
    /// What is to carry the bytes.
    pub(crate) transport: TransportKind,
}

/// Why a connection is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rejection {
    /// The owner runs in another generation.
    StaleOwner(Generation),
    /// The owner knows a later generation of the writer.
    StaleWriter(Generation),
    /// Another node listens here.
    WrongNode(String),
    /// The owner has this version, which is another one.
    Version(u16),
    /// The owner has as many connections as it takes.
    Full,
    /// The connection's number is in use.
    InUse,
    /// The owner does not carry bytes that way.
    Transport,
}

impl Hello {
    /// With the magic in front.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        frame(&mut out, kind::HELLO, |out| {
            out.put_u16(self.version);
            out.put_u64(self.connection);
            put_writer(out, &self.writer);
            put_writer(out, &self.owner);
            out.put_u8(self.transport.code());
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
                owner: take_writer(&mut rest)?,
                transport: TransportKind::from_code(rest.try_get_u8().ok()?)?,
            })
        };
        fields().ok_or_else(|| WireError("malformed HELLO".into()))
    }
}

fn put_writer(out: &mut Vec<u8>, writer: &NodeStart) {
    out.put_u64(writer.generation.0);
    put_name(out, writer.node.as_str());
}

fn take_writer(rest: &mut &[u8]) -> Option<NodeStart> {
    let generation = Generation(rest.try_get_u64().ok()?);
    let node = NodeId::new(take_name(rest)?).ok()?;
    Some(NodeStart { node, generation })
}

impl Rejection {
    fn code(&self) -> u8 {
        match self {
            Self::StaleOwner(_) => 1,
            Self::StaleWriter(_) => 2,
            Self::WrongNode(_) => 3,
            Self::Version(_) => 4,
            Self::Full => 5,
            Self::InUse => 6,
            Self::Transport => 7,
        }
    }
}

pub(super) fn put_rejection(out: &mut Vec<u8>, rejection: &Rejection) {
    out.put_u8(rejection.code());
    match rejection {
        Rejection::StaleOwner(generation) | Rejection::StaleWriter(generation) => out.put_u64(generation.0),
        Rejection::WrongNode(node) => put_name(out, node),
        Rejection::Version(version) => out.put_u16(*version),
        Rejection::Full | Rejection::InUse | Rejection::Transport => {}
    }
}

pub(super) fn take_rejection(rest: &mut &[u8]) -> Option<Rejection> {
    Some(match rest.try_get_u8().ok()? {
        1 => Rejection::StaleOwner(Generation(rest.try_get_u64().ok()?)),
        2 => Rejection::StaleWriter(Generation(rest.try_get_u64().ok()?)),
        3 => Rejection::WrongNode(take_name(rest)?.to_owned()),
        4 => Rejection::Version(rest.try_get_u16().ok()?),
        5 => Rejection::Full,
        6 => Rejection::InUse,
        7 => Rejection::Transport,
        _ => return None,
    })
}
