//! The wire format by hand, frame by frame: for what the engine would never send. Written from the
//! description of the format, not with the engine's code, so that a change of the format shows.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use baton_transfer_engine::{SegmentDescriptor, TransportKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

pub const MAGIC: &[u8] = b"BATONKV\n";
pub const VERSION: u16 = 2;

/// What is to carry the bytes, as a handshake says it.
const TCP: u8 = 1;
/// The same, within a host.
pub const SHM: u8 = 2;

/// Kinds of frames.
pub mod kind {
    pub const HELLO: u8 = 1;
    pub const DATA: u8 = 2;
    pub const COMMIT: u8 = 3;
    pub const CANCEL: u8 = 4;
    pub const FENCE: u8 = 5;
    pub const SLOTS: u8 = 6;
    pub const SOURCE: u8 = 7;
    pub const COPY: u8 = 8;
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
    /// Something else that the protocol knows.
    Other,
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

/// What the owner's descriptor says carries the bytes.
pub fn via(owner: &SegmentDescriptor) -> u8 {
    match owner.transports[0].kind {
        TransportKind::Shm => SHM,
        TransportKind::Rdma | TransportKind::Tcp | TransportKind::Fake => TCP,
    }
}

/// The first frame of a connection, with the magic in front.
pub fn hello(version: u16, connection: u64, writer: (&str, u64), target: (&str, u64), via: u8) -> Vec<u8> {
    let named = |(name, generation): (&str, u64)| {
        [&generation.to_be_bytes()[..], &[name.len() as u8], name.as_bytes()].concat()
    };
    let body = [&version.to_be_bytes()[..], &connection.to_be_bytes(), &named(writer), &named(target), &[via]].concat();
    [MAGIC, &frame(kind::HELLO, &body)].concat()
}

/// The head of a DATA frame of part 0: batch, grant, segment, spans of offset and length. The
/// payload is the caller's.
pub fn data(batch: u64, grant: u64, segment: u32, spans: &[(u64, u32)]) -> Vec<u8> {
    let mut body =
        [&batch.to_be_bytes()[..], &grant.to_be_bytes(), &0u32.to_be_bytes(), &segment.to_be_bytes()].concat();
    for (offset, len) in spans {
        body.extend_from_slice(&offset.to_be_bytes());
        body.extend_from_slice(&len.to_be_bytes());
    }
    frame(kind::DATA, &body)
}

/// A COPY frame of part 0: batch, grant, segment, and spans of offset, length and offset in segment
/// 0 of the writer. Slot 0 and token 1.
pub fn copy(batch: u64, grant: u64, segment: u32, spans: &[(u64, u32, u64)]) -> Vec<u8> {
    let mut body =
        [&batch.to_be_bytes()[..], &grant.to_be_bytes(), &0u32.to_be_bytes(), &segment.to_be_bytes()].concat();
    body.extend_from_slice(&[0; 8]);
    body.extend_from_slice(&1u64.to_be_bytes());
    for (offset, len, from) in spans {
        body.extend_from_slice(&offset.to_be_bytes());
        body.extend_from_slice(&len.to_be_bytes());
        body.extend_from_slice(&from.to_be_bytes());
    }
    frame(kind::COPY, &body)
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

/// What the bytes go through.
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection that speaks the protocol as it likes.
pub struct Raw(Socket);

impl Raw {
    /// By the first way of the descriptor.
    pub async fn connect(owner: &SegmentDescriptor) -> io::Result<Self> {
        let address = &owner.transports[0].address;
        if via(owner) == TCP {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            return Ok(Self(Socket::Tcp(stream)));
        }
        let name = address.split_once("/@").expect("a socket without a file").1;
        Ok(Self(Socket::Unix(UnixStream::connect(format!("\0{name}")).await?)))
    }

    /// With the handshake done.
    pub async fn open(owner: &SegmentDescriptor, connection: u64, writer: (&str, u64)) -> Self {
        let mut raw = Self::connect(owner).await.unwrap();
        raw.send(&hello(VERSION, connection, writer, (owner.node.as_str(), owner.generation.0), via(owner))).await;
        assert_eq!(raw.reply().await, Reply::Welcome);
        raw
    }

    /// Sends, if the owner still listens.
    pub async fn send(&mut self, bytes: &[u8]) {
        // What the owner answered, or that it closed, shows with the next reply.
        let _ = self.try_send(bytes).await;
    }

    /// Sends.
    pub async fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Socket::Tcp(stream) => stream.write_all(bytes).await,
            Socket::Unix(stream) => stream.write_all(bytes).await,
        }
    }

    /// Says that nothing more comes.
    pub async fn finish(&mut self) {
        // The owner may have ended the connection already.
        let _ = match &mut self.0 {
            Socket::Tcp(stream) => stream.shutdown().await,
            Socket::Unix(stream) => stream.shutdown().await,
        };
    }

    /// Ends it so that what is on its way may be lost.
    pub fn reset(self) {
        let _ = self.socket().set_linger(Some(Duration::ZERO));
    }

    /// Sends a frame with a file.
    #[allow(unsafe_code)] // control messages have no safe form in the standard library
    pub fn send_with_file(&self, bytes: &[u8], file: BorrowedFd<'_>) {
        let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = [0u64; 4];
        // SAFETY: a msghdr of zeros is a valid one with no name, no data and no control message.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: only computes lengths.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as _;
        // SAFETY: the header lies in `control`, which is aligned for it and has room for it and one
        // descriptor; the pieces live until the call returns.
        let sent = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            ((*header).cmsg_level, (*header).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(file.as_raw_fd());
            libc::sendmsg(self.socket().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        assert_eq!(sent, bytes.len() as isize, "{}", io::Error::last_os_error());
    }

    fn socket(&self) -> socket2::SockRef<'_> {
        match &self.0 {
            Socket::Tcp(stream) => stream.into(),
            Socket::Unix(stream) => stream.into(),
        }
    }

    async fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Socket::Tcp(stream) => stream.read_exact(bytes).await,
            Socket::Unix(stream) => stream.read_exact(bytes).await,
        }
    }

    /// Whether there is a reply, or the owner has closed.
    pub fn has_heard(&self) -> bool {
        let heard = self.socket().peek(&mut [std::mem::MaybeUninit::uninit()]);
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
        self.read_exact(&mut prefix).await?;
        let len = u32::from_be_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]);
        assert!(len <= 8192, "an absurd reply: {prefix:?}");
        let mut body = vec![0; len as usize];
        self.read_exact(&mut body).await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Some(match prefix[0] {
            64 => Reply::Welcome,
            65 => Reply::Reject(body[0]),
            66 => Reply::Ack,
            67 => Reply::Refuse(body[12], text(&body[13..])),
            68 => return Ok(None),
            69 => Reply::Fault(text(&body)),
            70..=73 => Reply::Other,
            other => panic!("a reply of unknown kind {other}"),
        }))
    }
}
