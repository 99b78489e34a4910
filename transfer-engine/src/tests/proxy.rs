//! A TCP proxy that misbehaves at a chosen byte.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_runtime::TaskSet;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::{SegmentDescriptor, TransportKind};

/// What a proxied connection does, from its first byte on.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Fault {
    #[default]
    None,
    /// Closes both sides after so many bytes from the writer.
    CutAfter(u64),
    /// Forwards so many bytes from the writer, then nothing, but stays open. [`Proxy::release`]
    /// ends it.
    StallAfter(u64),
    /// Closes both sides after so many bytes from the owner.
    CutRepliesAfter(u64),
    /// Forwards so many bytes from the owner, then nothing. [`Proxy::release`] ends it.
    StallRepliesAfter(u64),
    /// Forwards so many bytes at a time, with a pause after each.
    Trickle(usize, Duration),
}

#[derive(Default)]
struct Shared {
    /// Of the next connections; those after them get the last.
    faults: Mutex<VecDeque<Fault>>,
    released: CancellationToken,
    accepted: AtomicUsize,
    open: AtomicUsize,
    from_writer: AtomicU64,
}

/// Stands between writer and owner.
#[derive(Clone)]
pub(super) struct Proxy {
    shared: Arc<Shared>,
    address: String,
}

impl Proxy {
    /// Connection `i` gets fault `i`, the later ones the last.
    pub(super) async fn before(owner: &SegmentDescriptor, tasks: &TaskSet, faults: &[Fault]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // Inherited by what it accepts, so that a stalled connection holds a known number of bytes:
        // these, and Linux' 4 MiB at the writer (tcp_wmem).
        socket2::SockRef::from(&listener).set_recv_buffer_size(64 << 10).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared { faults: Mutex::new(faults.iter().copied().collect()), ..Shared::default() });
        let target = owner.address(TransportKind::Tcp).unwrap().to_owned();
        let accepting = Arc::clone(&shared);
        let all = tasks.clone();
        tasks.spawn_request("proxy", async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    () = all.cancelled() => return,
                };
                let shared = Arc::clone(&accepting);
                let end = all.clone();
                let target = target.clone();
                all.spawn_request("proxied connection", async move {
                    tokio::select! {
                        () = forward(&shared, accepted, &target) => {}
                        () = end.cancelled() => {}
                    }
                });
            }
        });
        Self { shared, address }
    }

    /// The owner's segment, to be reached through the proxy.
    pub(super) fn via(&self, descriptor: &SegmentDescriptor) -> SegmentDescriptor {
        let mut descriptor = descriptor.clone();
        descriptor.transports[0].address.clone_from(&self.address);
        descriptor
    }

    /// Ends all stalls.
    pub(super) fn release(&self) {
        self.shared.released.cancel();
    }

    /// Connections so far.
    pub(super) fn accepted(&self) -> usize {
        self.shared.accepted.load(SeqCst)
    }

    /// Connections now.
    pub(super) fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }

    /// Bytes that came from the writer, on all connections.
    pub(super) fn sent_by_writer(&self) -> u64 {
        self.shared.from_writer.load(SeqCst)
    }
}

impl Shared {
    fn next_fault(&self) -> Fault {
        let mut faults = self.faults.lock().unwrap();
        if faults.len() > 1 { faults.pop_front().unwrap() } else { faults.front().copied().unwrap_or_default() }
    }
}

async fn forward(shared: &Arc<Shared>, writer: TcpStream, target: &str) {
    shared.accepted.fetch_add(1, SeqCst);
    let fault = shared.next_fault();
    let Ok(owner) = TcpStream::connect(target).await else { return };
    shared.open.fetch_add(1, SeqCst);
    writer.set_nodelay(true).unwrap();
    owner.set_nodelay(true).unwrap();
    let (from_writer, to_writer) = writer.into_split();
    let (from_owner, to_owner) = owner.into_split();
    let (forth, back) = match fault {
        Fault::None => (Limit::default(), Limit::default()),
        Fault::CutAfter(bytes) => (Limit { bytes, ..Limit::default() }, Limit::default()),
        Fault::StallAfter(bytes) => (Limit { bytes, stalls: true, ..Limit::default() }, Limit::default()),
        Fault::CutRepliesAfter(bytes) => (Limit::default(), Limit { bytes, ..Limit::default() }),
        Fault::StallRepliesAfter(bytes) => (Limit::default(), Limit { bytes, stalls: true, ..Limit::default() }),
        Fault::Trickle(piece, pause) => (Limit { piece, pause, ..Limit::default() }, Limit::default()),
    };
    tokio::select! {
        () = copy(from_writer, to_owner, forth, shared, Some(&shared.from_writer)) => {}
        () = copy(from_owner, to_writer, back, shared, None) => {}
    }
    shared.open.fetch_sub(1, SeqCst);
}

struct Limit {
    bytes: u64,
    stalls: bool,
    piece: usize,
    pause: Duration,
}

impl Default for Limit {
    fn default() -> Self {
        Self { bytes: u64::MAX, stalls: false, piece: 64 << 10, pause: Duration::ZERO }
    }
}

/// Returns when either side closes or the limit cuts.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    limit: Limit,
    shared: &Shared,
    count: Option<&AtomicU64>,
) {
    let mut left = limit.bytes;
    let mut buffer = vec![0; limit.piece];
    loop {
        if left == 0 {
            if !limit.stalls {
                return;
            }
            shared.released.cancelled().await;
            left = u64::MAX;
        }
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let Ok(bytes @ 1..) = from.read(&mut buffer[..most]).await else { return };
        if let Some(count) = count {
            count.fetch_add(bytes as u64, SeqCst);
        }
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
        left -= bytes as u64;
        if limit.pause > Duration::ZERO {
            tokio::time::sleep(limit.pause).await;
        }
    }
}
