//! What fuzzing drives, and nothing else should: an owner's end of a connection, and a writer's
//! reading of replies.

#![allow(unsafe_code)] // looks at memory that no grant is for; see the SAFETY note

use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use baton_memory::MemoryRegion;
use baton_runtime::TaskSet;
use baton_types::{Generation, GrantId, NodeId, NodeStart};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use super::owner::accept::Acceptor;
use super::wire::stream::Stream;
use super::wire::{PREFIX_BYTES, Prefix, Reply};
use crate::engine::Host;
use crate::grant::Access;
use crate::{GrantSpec, SegmentId, TransferConfig, TransportKind};

/// Name and generation of the owner.
pub const OWNER: (&str, u64) = ("victim", 1);
/// Name and generation of the writer that has the grant and the lease.
pub const WRITER: (&str, u64) = ("fuzzer", 1);
/// The right to write into [`GRANTED`].
pub const GRANT: u64 = 1;
/// The right to read [`LEASED`].
pub const LEASE: u64 = 2;
/// Bytes of segment 0 that may be written.
pub const GRANTED: Range<u64> = 1 << 10..3 << 10;
/// Bytes of segment 0 that may be read.
pub const LEASED: Range<u64> = 3 << 10..4 << 10;

/// Bytes of segment 0, and of what the writer shares.
const SEGMENT_BYTES: usize = 4 << 10;
/// Each byte of the tokens in the writer's slots.
pub const WANTED: u8 = 1;
/// What stands in the owner's segment before.
const UNTOUCHED: u8 = 78;
/// Bytes of one connection: a socket has room for more.
const MAX_CONNECTION_BYTES: usize = 64 << 10;
/// More batches than fit into a connection, so that nothing waits for room.
const ARRIVAL_QUEUE: usize = MAX_CONNECTION_BYTES / 8;
/// Longer than any run: the grants must not end by themselves.
const EXPIRES: Duration = Duration::from_secs(24 * 3600);

/// The owner's end of connections, one after the other, each to a new engine.
pub struct Owner {
    runtime: Runtime,
    region: Arc<MemoryRegion>,
    /// The writer's slots and segment 0, which come along with the first two bytes over shared
    /// memory.
    shared: [MemoryRegion; 2],
}

impl Default for Owner {
    fn default() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let region = MemoryRegion::allocate(SEGMENT_BYTES).expect("a page");
        // SAFETY: no other task knows the region yet.
        unsafe { region.slice_mut(0..SEGMENT_BYTES) }.fill(UNTOUCHED);
        let shared = [(); 2].map(|()| MemoryRegion::allocate_shared(SEGMENT_BYTES).expect("a page"));
        // SAFETY: no other task knows the region yet.
        unsafe { shared[0].slice_mut(0..SEGMENT_BYTES) }.fill(WANTED);
        Self { runtime, region: Arc::new(region), shared }
    }
}

impl Owner {
    /// Serves a connection whose writer sends these bytes and closes. Returns what it is sent.
    ///
    /// # Panics
    /// Bytes have landed outside of the grant, or the engine does not end: either is a bug.
    pub fn serve(&self, kind: TransportKind, bytes: &[u8]) -> Vec<u8> {
        let replies = self.runtime.block_on(self.connection(kind, &bytes[..bytes.len().min(MAX_CONNECTION_BYTES)]));
        for range in [0..GRANTED.start as usize, GRANTED.end as usize..SEGMENT_BYTES] {
            // SAFETY: no connection is served any more, and no other task knows the region.
            let outside = unsafe { self.region.slice(range.clone()) };
            assert!(outside.iter().all(|byte| *byte == UNTOUCHED), "bytes have landed in {range:?}");
        }
        replies
    }

    async fn connection(&self, kind: TransportKind, bytes: &[u8]) -> Vec<u8> {
        let tasks = TaskSet::new();
        let (host, _arrivals) = Host::new(config(), &tasks).expect("settings in range");
        for (id, range, access) in [(GRANT, GRANTED, Access::Write), (LEASE, LEASED, Access::Read)] {
            host.grants.open(grant(id, range), access, Arc::clone(&self.region)).expect("a new grant");
        }
        let (writer, owner) = UnixStream::pair().expect("two sockets");
        let end = writer.try_clone().expect("a descriptor");
        let writer = unix(writer);
        let owner = unix(owner);
        let acceptor = Acceptor::new(&host);
        let write = async {
            // An owner that has closed takes no more.
            let _ = self.send(kind, &writer, bytes).await;
            end.shutdown(Shutdown::Write).expect("an open socket");
            read_all(&writer).await
        };
        // The end of a connection that breaks the protocol is an error, and as good as any.
        let (replies, _) = tokio::join!(write, acceptor.serve(owner, kind, CancellationToken::new()));
        host.closed.cancel();
        tasks.cancel();
        tasks.join(Duration::from_secs(5)).await.expect("an engine's tasks end with it");
        replies
    }

    async fn send(&self, kind: TransportKind, writer: &Stream, bytes: &[u8]) -> std::io::Result<()> {
        if kind != TransportKind::Shm || bytes.len() < 2 {
            return writer.write_all(bytes).await;
        }
        writer.write_with_file(&bytes[..1], self.shared[0].shared_file()).await?;
        writer.write_with_file(&bytes[1..2], self.shared[1].shared_file()).await?;
        writer.write_all(&bytes[2..]).await
    }
}

fn config() -> TransferConfig {
    let (name, generation) = OWNER;
    let node = NodeId::new(name).expect("a name");
    let listen = ([127, 0, 0, 1], 0).into();
    TransferConfig { arrival_queue: ARRIVAL_QUEUE, ..TransferConfig::new(node, Generation(generation), listen) }
}

fn grant(id: u64, range: Range<u64>) -> GrantSpec {
    let (name, generation) = WRITER;
    let writer = Some(NodeStart { node: NodeId::new(name).expect("a name"), generation: Generation(generation) });
    let expires = baton_runtime::now() + EXPIRES;
    GrantSpec { id: GrantId(id), segment: SegmentId(0), ranges: vec![range], writer, expires }
}

fn unix(stream: UnixStream) -> Stream {
    stream.set_nonblocking(true).expect("an open socket");
    Stream::unix(tokio::net::UnixStream::from_std(stream).expect("a runtime"))
}

/// Everything up to the peer's end.
async fn read_all(stream: &Stream) -> Vec<u8> {
    let mut all = Vec::new();
    let mut byte = [0; 4096];
    loop {
        match stream.try_read(&mut byte) {
            Ok(0) => return all,
            Ok(bytes) => all.extend_from_slice(&byte[..bytes]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && stream.readable().await.is_ok() => {}
            // The owner closed without reading all.
            Err(_) => return all,
        }
    }
}

/// Reads what an owner sends, frame by frame, up to the first that is none. How many there were.
pub fn read_replies(mut bytes: &[u8]) -> usize {
    let mut read = 0;
    while let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() {
        let Ok(prefix) = Prefix::decode(*prefix) else { break };
        let Some((body, rest)) = rest.split_at_checked(prefix.body) else { break };
        let Ok(reply) = Reply::decode(prefix, body) else { break };
        let payload = if let Reply::Payload { bytes, .. } = reply { bytes as usize } else { 0 };
        let Some(rest) = rest.get(payload..) else { break };
        bytes = rest;
        read += 1;
    }
    read
}
