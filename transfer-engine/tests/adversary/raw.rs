//! The wire format by hand, frame by frame: for what the engine would never send. Written from the description of the format, not with the engine's code, so that a
//! change of the format shows.

use std::io;
use std::time::Duration;

use baton_transfer_engine::{SegmentDescriptor, TransportKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub const MAGIC: &[u8] = b"BATONKV\n";
pub const VERSION: u16 = 2;

/// What is to carry the bytes, as a handshake says it.
const TCP: u8 = 3;

/// Kinds of frames.
pub mod kind {
    pub const HELLO: u8 = 1;
    pub const DATA: u8 = 2;
    pub const COMMIT: u8 = 3;
    pub const CANCEL: u8 = 4;
    pub const FENCE: u8 = 5;
}

/// What the owner says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Welcome,
    /// The handshake is refused, with a code of [`rejected`].
    Reject(u8),
    Ack,
    /// A part is refused, with a code of [`refused`].
    Refuse(u8, String),
    /// The frame breaks the protocol; the connection ends.
    Fault(String),
    /// The owner has closed.
    Closed,
}

/// Codes of refusals of parts.
pub mod refused {
    pub const UNKNOWN_GRANT: u8 = 0;
    pub const REVOKED: u8 = 1;
    pub const EXPIRED: u8 = 2;
    pub const WRONG_WRITER: u8 = 3;
    pub const WRONG_SEGMENT: u8 = 4;
    pub const OUT_OF_RANGE: u8 = 5;
}

/// Codes of refusals of connections.
pub mod rejected {
    pub const STALE_TARGET: u8 = 1;
    pub const STALE_WRITER: u8 = 2;
    pub const WRONG_NODE: u8 = 3;
    pub const VERSION: u8 = 4;
    pub const FULL: u8 = 5;
    pub const IN_USE: u8 = 6;
}

/// A frame.
pub fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0][..], &(body.len() as u32).to_be_bytes(), body].concat()
}

/// The first frame of a connection, with the magic in front.
pub fn hello(version: u16, connection: u64, writer: (&str, u64), target: (&str, u64)) -> Vec<u8> {
    let named = |(name, generation): (&str, u64)| {
        [&generation.to_be_bytes()[..], &[name.len() as u8], name.as_bytes()].concat()
    };
    let transport = [TCP];
    let body =
        [&version.to_be_bytes()[..], &connection.to_be_bytes(), &named(writer), &named(target), &transport].concat();
    [MAGIC, &frame(kind::HELLO, &body)].concat()
}

/// The head of a DATA frame of part 0: batch, grant, segment, spans of offset and length. The payload is the caller's.
pub fn data(batch: u64, grant: u64, segment: u32, spans: &[(u64, u32)]) -> Vec<u8> {
    let mut body =
        [&batch.to_be_bytes()[..], &grant.to_be_bytes(), &0u32.to_be_bytes(), &segment.to_be_bytes()].concat();
    for (offset, len) in spans {
        body.extend_from_slice(&offset.to_be_bytes());
        body.extend_from_slice(&len.to_be_bytes());
    }
    frame(kind::DATA, &body)
}

/// The trailer of part `part.0` of `part.1`.
pub fn commit(batch: u64, grant: u64, segment: u32, part: (u32, u32), bytes: u64) -> Vec<u8> {
    let mut body = [&batch.to_be_bytes()[..], &grant.to_be_bytes()].concat();
    for number in [part.0, segment, part.1] {
        body.extend_from_slice(&number.to_be_bytes());
    }
    body.extend_from_slice(&bytes.to_be_bytes());
    body.extend_from_slice(&7u64.to_be_bytes());
    frame(kind::COMMIT, &body)
}

/// A connection that speaks the protocol as it likes.
pub struct Raw(pub TcpStream);

impl Raw {
    pub async fn connect(owner: &SegmentDescriptor) -> io::Result<Self> {
        let stream = TcpStream::connect(owner.address(TransportKind::Tcp).unwrap()).await?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    /// With the handshake done.
    pub async fn open(owner: &SegmentDescriptor, connection: u64, writer: (&str, u64)) -> Self {
        let mut raw = Self::connect(owner).await.unwrap();
        raw.send(&hello(VERSION, connection, writer, (owner.node.as_str(), owner.generation.0))).await;
        assert_eq!(raw.reply().await, Reply::Welcome);
        raw
    }

    /// Sends, if the owner still listens.
    pub async fn send(&mut self, bytes: &[u8]) {
        // What the owner answered, or that it closed, shows with the next reply.
        let _ = self.0.write_all(bytes).await;
    }

    /// Whether there is a reply, or the owner has closed.
    pub fn has_heard(&self) -> bool {
        let heard = socket2::SockRef::from(&self.0).peek(&mut [std::mem::MaybeUninit::uninit()]);
        !heard.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// The next reply that is not about progress.
    pub async fn reply(&mut self) -> Reply {
        self.reply_within(Duration::from_secs(10)).await.expect("a reply, or an end, in time")
    }

    /// `None`: nothing in that time.
    pub async fn reply_within(&mut self, time: Duration) -> Option<Reply> {
        let reply = async {
            loop {
                match self.next().await {
                    Ok(Some(reply)) => return reply,
                    Ok(None) => {}
                    // A reset is an end, too.
                    Err(_) => return Reply::Closed,
                }
            }
        };
        tokio::time::timeout(time, reply).await.ok()
    }

    async fn next(&mut self) -> io::Result<Option<Reply>> {
        let mut prefix = [0; 8];
        self.0.read_exact(&mut prefix).await?;
        let len = u32::from_be_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]);
        assert!(len <= 8192, "an absurd reply: {prefix:?}");
        let mut body = vec![0; len as usize];
        self.0.read_exact(&mut body).await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Some(match prefix[0] {
            64 => Reply::Welcome,
            65 => Reply::Reject(body[0]),
            66 => Reply::Ack,
            67 => Reply::Refuse(body[12], text(&body[13..])),
            68 => return Ok(None),
            69 => Reply::Fault(text(&body)),
            other => panic!("a reply of unknown kind {other}"),
        }))
    }
}
