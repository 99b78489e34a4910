//! What comes on a connection: frames, whose heads are read ahead, and payload, received where it
//! belongs.

use std::io;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use tokio::time::{timeout, timeout_at};

use super::payload::{Cursor, put, try_receive};
use super::stream::Stream;
use super::{PREFIX_BYTES, Prefix};

/// Bytes received in the same call as what is wanted: mostly the head of the next frame. A little
/// of a payload that comes along is copied from here.
const AHEAD: usize = 2 << 10;
/// Dropped payload is received in pieces of this size.
pub(crate) const DROPPED_AT_ONCE: usize = 16 << 10;
/// A wait for payload ends when this much is there: woken for each segment, the receiver takes the
/// processor's time that the bytes need.
const LOW_WATER: usize = 512 << 10;
/// A slower sender is followed byte by byte.
const LOW_WATER_WAIT: Duration = Duration::from_millis(20);

/// What came on one connection and is not taken yet.
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    /// `bytes[start..end]` came and is not taken.
    start: usize,
    end: usize,
    /// Since when a part of a frame is here and the rest is waited for.
    waits_since: Option<Instant>,
    /// How long that may take.
    patience: Duration,
    /// Bytes that must be there before the socket counts as readable.
    low_water: usize,
}

impl Incoming {
    /// Of a connection whose handshake is done. A frame whose rest does not come within `patience`
    /// is an error.
    pub(crate) fn new(patience: Duration) -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0, waits_since: None, patience, low_water: 1 }
    }

    /// The next frame's start and its body; `None`: the peer has closed between frames. May be
    /// dropped while it waits.
    pub(crate) async fn next(&mut self, stream: &Stream) -> io::Result<Option<(Prefix, &[u8])>> {
        let prefix = loop {
            let wanted = match self.bytes[self.start..self.end].split_first_chunk::<PREFIX_BYTES>() {
                Some((prefix, rest)) => {
                    let prefix = Prefix::decode(*prefix)?;
                    if rest.len() >= prefix.body {
                        break prefix;
                    }
                    PREFIX_BYTES + prefix.body
                }
                None => PREFIX_BYTES,
            };
            if !self.fill(stream, wanted).await? {
                return Ok(None);
            }
        };
        self.waits_since = None;
        let body = self.start + PREFIX_BYTES;
        self.start = body + prefix.body;
        Ok(Some((prefix, &self.bytes[body..self.start])))
    }

    /// Receives what is there of the next `wanted` bytes, and some of what follows them. False: the
    /// peer has closed, with nothing left to take.
    async fn fill(&mut self, stream: &Stream, wanted: usize) -> io::Result<bool> {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = wanted.max(AHEAD);
        loop {
            // At most the largest frame: 8 KiB.
            self.grow(room);
            match stream.try_read(&mut self.bytes[self.end..room]) {
                Ok(0) if self.end == 0 => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => {
                    self.end += received;
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_frame(stream).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Between frames for as long as it takes; within one, only so long.
    async fn wait_for_frame(&mut self, stream: &Stream) -> io::Result<()> {
        self.set_low_water(stream, 1)?;
        if self.end == 0 {
            // An idle peer costs no buffer.
            self.bytes = Vec::new();
            return stream.readable().await;
        }
        let limit = *self.waits_since.get_or_insert_with(baton_runtime::now) + self.patience;
        let ready = timeout_at(limit.into(), stream.readable()).await;
        ready.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    fn grow(&mut self, room: usize) {
        self.bytes.resize(self.bytes.len().max(room), 0);
    }

    /// Receives payload that is there, until `end` bytes of the spans are left, without waiting,
    /// and moves the cursor on. 0: the peer has closed.
    ///
    /// The caller holds a pass of the fence guard of the spans: nothing else may use them.
    pub(crate) fn try_receive(
        &mut self,
        stream: &Stream,
        region: &MemoryRegion,
        cursor: &mut Cursor,
        end: usize,
    ) -> io::Result<usize> {
        let came = &self.bytes[self.start..self.end];
        if !came.is_empty() {
            let taken = came.len().min(cursor.remaining() - end);
            put(region, cursor, &came[..taken]);
            self.start += taken;
            return Ok(taken);
        }
        self.grow(AHEAD);
        let (received, beyond) = try_receive(stream, region, cursor, end, &mut self.bytes[..AHEAD])?;
        self.start = 0;
        self.end = beyond;
        Ok(received)
    }

    /// Drops so many bytes of a payload.
    pub(crate) async fn drop_all(&mut self, stream: &Stream, mut bytes: usize) -> io::Result<()> {
        loop {
            let dropped = bytes.min(self.end - self.start);
            self.start += dropped;
            bytes -= dropped;
            if bytes == 0 {
                return Ok(());
            }
            self.grow(DROPPED_AT_ONCE);
            self.start = 0;
            self.end = 0;
            match stream.try_read(&mut self.bytes[..bytes.min(DROPPED_AT_ONCE)]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => self.end = received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.set_low_water(stream, 1)?;
                    stream.readable().await?;
                }
                Err(error) => return Err(error),
            }
            tokio::task::coop::consume_budget().await;
        }
    }

    /// Waits for payload of which `missing` bytes are missing: for much of it if it comes fast,
    /// else for any.
    pub(crate) async fn wait_for_payload(&mut self, stream: &Stream, missing: usize) -> io::Result<()> {
        self.set_low_water(stream, missing.min(LOW_WATER))?;
        if let Ok(ready) = timeout(LOW_WATER_WAIT, stream.readable()).await {
            return ready;
        }
        self.set_low_water(stream, 1)?;
        stream.readable().await
    }

    fn set_low_water(&mut self, stream: &Stream, bytes: usize) -> io::Result<()> {
        if self.low_water != bytes {
            stream.set_low_water(bytes)?;
            self.low_water = bytes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::super::payload::Outgoing;
    use super::super::{PartId, Reply, put_payload};
    use super::*;

    async fn pair() -> (Stream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (a, b) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        (Stream::tcp(a.unwrap()).unwrap(), Stream::tcp(b.unwrap().0).unwrap())
    }

    fn ack(part: u32) -> (Vec<u8>, Reply) {
        let reply = Reply::Ack(PartId { batch: 7, part });
        (reply.encode(), reply)
    }

    async fn reply(incoming: &mut Incoming, stream: &Stream) -> Option<Reply> {
        let (prefix, body) = incoming.next(stream).await.unwrap()?;
        Some(Reply::decode(prefix, body).unwrap())
    }

    #[tokio::test]
    async fn frames_and_payload_are_separated_in_pieces_of_any_size() {
        let region = MemoryRegion::allocate(100_000).unwrap();
        let payload: Vec<u8> = (0..60_000u32).map(|i| (i * 7) as u8).collect();
        let mut bytes = Vec::new();
        bytes.extend(ack(1).0);
        put_payload(&mut bytes, PartId { batch: 7, part: 2 }, payload.len() as u32);
        bytes.extend(&payload);
        bytes.extend(ack(3).0);
        put_payload(&mut bytes, PartId { batch: 7, part: 4 }, 5000);
        bytes.extend(&payload[..5000]);
        bytes.extend(ack(5).0);
        for piece in [1, 7, 1000, 30_000, bytes.len()] {
            let (sender, receiver) = pair().await;
            let send = async {
                for piece in bytes.chunks(piece) {
                    sender.write_all(piece).await.unwrap();
                }
                drop(sender);
            };
            let receive = async {
                let mut incoming = Incoming::new(Duration::from_secs(5));
                assert_eq!(reply(&mut incoming, &receiver).await, Some(ack(1).1));
                assert!(matches!(reply(&mut incoming, &receiver).await, Some(Reply::Payload { bytes: 60_000, .. })));
                let mut cursor = Cursor::new(&region, [(10, 20_000), (30_020, 40_000)].into_iter());
                while !cursor.is_done() {
                    match incoming.try_receive(&receiver, &region, &mut cursor, 0) {
                        Ok(received) => assert!(received > 0),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            incoming.wait_for_payload(&receiver, cursor.remaining()).await.unwrap();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                assert_eq!(reply(&mut incoming, &receiver).await, Some(ack(3).1));
                assert!(matches!(reply(&mut incoming, &receiver).await, Some(Reply::Payload { bytes: 5000, .. })));
                incoming.drop_all(&receiver, 5000).await.unwrap();
                assert_eq!(reply(&mut incoming, &receiver).await, Some(ack(5).1));
                assert_eq!(reply(&mut incoming, &receiver).await, None);
            };
            tokio::join!(send, receive);
            let landed = Cursor::new(&region, [(10, 20_000), (30_020, 40_000)].into_iter());
            let landed = Outgoing { head: &[], region: &region, payload: landed, tail: &[] };
            assert_eq!(landed.copy_rest(), payload, "in pieces of {piece}");
        }
    }

    #[tokio::test]
    async fn incomplete_frame_times_out() {
        let (sender, receiver) = pair().await;
        sender.write_all(&ack(1).0[..9]).await.unwrap();
        let mut incoming = Incoming::new(Duration::from_millis(50));
        let began = Instant::now();
        // Waits that are dropped do not begin anew.
        let error = loop {
            assert!(began.elapsed() < Duration::from_secs(10));
            if let Ok(next) = timeout(Duration::from_millis(10), incoming.next(&receiver)).await {
                break next.unwrap_err();
            }
        };
        assert_eq!((error.kind(), began.elapsed() >= Duration::from_millis(50)), (io::ErrorKind::TimedOut, true));
    }
}
