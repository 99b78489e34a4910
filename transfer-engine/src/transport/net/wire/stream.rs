//! A connection's bytes: TCP, or a Unix socket, which carries file descriptors too.

#![allow(unsafe_code)] // scatter and gather lists that point into registered memory, and control messages; see the SAFETY notes

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

use super::{PREFIX_BYTES, Prefix};

/// A silent connection is probed after this long, and then as often.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// File descriptors that came and are not taken yet; a peer that sends more breaks the protocol.
const MAX_FILES: usize = 4;
/// Bytes of a control message with [`MAX_FILES`] descriptors, generously.
const CONTROL_BYTES: usize = 64;

/// A connection, either way of it.
pub(crate) enum Stream {
    /// Between hosts.
    Tcp(TcpStream),
    /// Within a host. Received files wait for the caller that knows what they are.
    Unix(UnixStream, Mutex<VecDeque<OwnedFd>>),
}

/// As the kernel takes them.
pub(crate) const NO_PIECE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

impl Stream {
    /// Small frames must not wait for each other, and a peer whose machine is gone must be noticed.
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Self::Tcp(stream))
    }

    pub(crate) fn unix(stream: UnixStream) -> Self {
        Self::Unix(stream, Mutex::default())
    }

    fn fd(&self) -> RawFd {
        match self {
            Self::Tcp(stream) => stream.as_raw_fd(),
            Self::Unix(stream, _) => stream.as_raw_fd(),
        }
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Unix(stream, _) => stream.readable().await,
        }
    }

    /// How many bytes must be there for the connection to count as readable; its end counts always.
    /// Only for TCP.
    pub(crate) fn set_low_water(&self, bytes: usize) -> io::Result<()> {
        if let Self::Unix(..) = self {
            return Ok(());
        }
        let bytes = bytes as libc::c_int;
        let size = size_of_val(&bytes) as libc::socklen_t;
        // SAFETY: an option of an open socket, as an int of the size that is told.
        let set = unsafe {
            libc::setsockopt(self.fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, (&raw const bytes).cast(), size)
        };
        result(set as isize).map(drop)
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream, _) => stream.writable().await,
        }
    }

    fn try_io<R>(&self, interest: Interest, io: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        match self {
            Self::Tcp(stream) => stream.try_io(interest, io),
            Self::Unix(stream, _) => stream.try_io(interest, io),
        }
    }

    /// Receives what is there, without waiting. 0: the peer has closed.
    pub(crate) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut piece = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
        // SAFETY: the piece is the buffer, borrowed for the call.
        unsafe { self.try_receive(&mut piece) }
    }

    /// Receives into pieces of memory what is there, without waiting. 0: the peer has closed.
    ///
    /// # Safety
    /// Every piece is memory that outlives the call and that nothing else uses meanwhile.
    pub(crate) unsafe fn try_receive(&self, pieces: &mut [libc::iovec]) -> io::Result<usize> {
        self.try_io(Interest::READABLE, || match self {
            // SAFETY: the pieces are the caller's promise; their number is at most that of an array
            // here.
            Self::Tcp(_) => result(unsafe { libc::readv(self.fd(), pieces.as_ptr(), pieces.len() as libc::c_int) }),
            // SAFETY: passed on.
            Self::Unix(_, files) => unsafe { receive_with_files(self.fd(), pieces, files) },
        })
    }

    /// Sends pieces of memory, and a file with their first byte, as far as the socket takes them.
    ///
    /// # Safety
    /// Every piece is memory that outlives the call and that nothing writes meanwhile.
    pub(crate) unsafe fn try_send(
        &self,
        pieces: &mut [libc::iovec],
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, || {
            // SAFETY: a msghdr of zeros is a valid one with no name, no data and no control
            // message.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = pieces.as_mut_ptr();
            message.msg_iovlen = pieces.len() as _;
            let mut control = Control::default();
            if let Some(file) = file {
                control.put(&mut message, file.as_raw_fd());
            }
            // SAFETY: pieces as promised by the caller; the control message lives in `control`,
            // which outlives the call.
            result(unsafe { libc::sendmsg(self.fd(), &raw const message, libc::MSG_NOSIGNAL) })
        })
    }

    /// The oldest file that came and was not taken.
    pub(crate) fn take_file(&self) -> Option<OwnedFd> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(_, files) => files.lock().unwrap_or_else(PoisonError::into_inner).pop_front(),
        }
    }

    /// Reads exactly as much. `Ok(false)`: the peer closed before the first byte.
    pub(crate) async fn read_exact(&self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.try_read(&mut buffer[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable().await?,
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads the start of a frame, and its body. `None`: the peer closed before it.
    pub(crate) async fn read_frame(&self) -> io::Result<Option<(Prefix, Vec<u8>)>> {
        let mut prefix = [0; PREFIX_BYTES];
        if !self.read_exact(&mut prefix).await? {
            return Ok(None);
        }
        let prefix = Prefix::decode(prefix)?;
        let mut body = vec![0; prefix.body];
        self.read_exact(&mut body).await?;
        Ok(Some((prefix, body)))
    }

    /// Writes everything.
    pub(crate) async fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        self.write_with_file(bytes, None).await
    }

    /// Writes everything, and a file with the first byte.
    pub(crate) async fn write_with_file(&self, mut bytes: &[u8], mut file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = {
                let mut piece = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
                // SAFETY: the piece is the borrowed slice, which the kernel only reads.
                unsafe { self.try_send(&mut piece, file) }
            };
            match sent {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    file = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn result(bytes: isize) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Room for control messages, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

impl Default for Control {
    fn default() -> Self {
        Self([0; CONTROL_BYTES])
    }
}

impl Control {
    /// Makes one descriptor the message's only control message.
    fn put(&mut self, message: &mut libc::msghdr, file: RawFd) {
        let bytes = size_of::<RawFd>() as u32;
        message.msg_control = self.0.as_mut_ptr().cast();
        // SAFETY: computes a size.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as _;
        // SAFETY: the room is aligned and larger than one header with one descriptor, so that the
        // first header lies in it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file);
        }
    }
}

/// # Safety
/// As for [`Stream::try_receive`].
unsafe fn receive_with_files(
    fd: RawFd,
    pieces: &mut [libc::iovec],
    files: &Mutex<VecDeque<OwnedFd>>,
) -> io::Result<usize> {
    let mut control = Control::default();
    // SAFETY: zeros are a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: pieces as promised by the caller; the control room is as long as said.
    let received = result(unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_CMSG_CLOEXEC) })?;
    // SAFETY: the kernel has filled the control room as the message now says.
    let came = unsafe { files_of(&message) };
    let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
    files.extend(came);
    if files.len() > MAX_FILES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "more file descriptors than frames that have one"));
    }
    Ok(received)
}

/// # Safety
/// `message` was filled by a successful recvmsg, and its control room lives.
unsafe fn files_of(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut files = Vec::new();
    // SAFETY: walks the headers that the kernel wrote; each descriptor in them is new and this
    // process's own.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    files.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[tokio::test]
    async fn file_descriptors_arrive_with_the_bytes_they_were_sent_with() {
        let (a, b) = UnixStream::pair().unwrap();
        let a = Stream::unix(a);
        let b = Stream::unix(b);
        let mut file = tempfile();
        file.write_all(b"hello").unwrap();
        a.write_with_file(b"abc", Some(file.as_fd())).await.unwrap();
        a.write_all(b"d").await.unwrap();
        let mut bytes = [0; 4];
        assert!(b.read_exact(&mut bytes).await.unwrap());
        assert_eq!(&bytes, b"abcd");
        let mut received = std::fs::File::from(b.take_file().unwrap());
        received.rewind().unwrap();
        let mut text = String::new();
        received.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), b.take_file().is_none()), ("hello", true));
    }

    #[tokio::test]
    async fn too_many_file_descriptors_are_an_error() {
        let (a, b) = UnixStream::pair().unwrap();
        let a = Stream::unix(a);
        let b = Stream::unix(b);
        let file = tempfile();
        for _ in 0..=MAX_FILES {
            a.write_with_file(b"x", Some(file.as_fd())).await.unwrap();
        }
        let error = b.read_exact(&mut [0; MAX_FILES + 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    fn tempfile() -> std::fs::File {
        // SAFETY: makes a descriptor, owned right here.
        unsafe { std::fs::File::from_raw_fd(libc::memfd_create(c"t".as_ptr(), 0)) }
    }
}
