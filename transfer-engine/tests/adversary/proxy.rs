//! A TCP proxy that kills connections at random, from outside the engine.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_runtime::TaskSet;
use baton_transfer_engine::{SegmentDescriptor, TransportKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::pattern::Random;

/// Bytes of a handshake, about: fewer cut it short, which costs the writer a pause.
const HANDSHAKE: u64 = 200;

/// Stands between writer and owner. It ends when it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
    address: String,
    tasks: TaskSet,
}

struct Shared {
    random: Mutex<Random>,
    /// The live connections.
    live: Mutex<HashMap<u64, CancellationToken>>,
    next: AtomicU64,
    kills: AtomicU64,
}

impl Proxy {
    /// In front of an owner. Each connection ends after a random number of bytes, or at a random
    /// moment, whichever comes first.
    pub async fn before(owner: &SegmentDescriptor, mut random: Random) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let target = owner.address(TransportKind::Tcp).unwrap().to_owned();
        let tasks = TaskSet::new();
        let killing = random.fork();
        let (live, next, kills) = Default::default();
        let shared = Arc::new(Shared { random: Mutex::new(random), live, next, kills });
        tasks.spawn_request(
            "proxy",
            until_cancelled(&tasks, accept(listener, target, Arc::clone(&shared), tasks.clone())),
        );
        tasks.spawn_request("killer", until_cancelled(&tasks, kill(Arc::clone(&shared), killing)));
        Self { shared, address, tasks }
    }

    /// The owner's segment, to be reached through the proxy only.
    pub fn via(&self, descriptor: &SegmentDescriptor) -> SegmentDescriptor {
        let mut descriptor = descriptor.clone();
        descriptor.transports.retain(|transport| transport.kind == TransportKind::Tcp);
        descriptor.transports[0].address.clone_from(&self.address);
        descriptor
    }

    /// Connections killed so far.
    pub fn kills(&self) -> u64 {
        self.shared.kills.load(Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

fn until_cancelled<T: Future<Output = ()> + Send>(
    tasks: &TaskSet,
    task: T,
) -> impl Future<Output = ()> + Send + use<T> {
    let tasks = tasks.clone();
    async move {
        tokio::select! {
            () = task => {}
            () = tasks.cancelled() => {}
        }
    }
}

async fn accept(listener: TcpListener, target: String, shared: Arc<Shared>, tasks: TaskSet) {
    loop {
        let (writer, _) = listener.accept().await.unwrap();
        let target = target.clone();
        let shared = Arc::clone(&shared);
        tasks.spawn_request("proxied connection", until_cancelled(&tasks, forward(writer, target, shared)));
    }
}

/// Every few milliseconds, one of the live connections.
async fn kill(shared: Arc<Shared>, mut random: Random) {
    loop {
        tokio::time::sleep(Duration::from_micros(random.within(1000..8000))).await;
        let live = shared.live.lock().unwrap();
        if !live.is_empty() {
            let victim = random.within(0..live.len() as u64) as usize;
            live.values().nth(victim).unwrap().cancel();
        }
    }
}

/// How a connection is killed.
#[derive(Debug, Clone, Copy)]
enum Death {
    /// Both sides hear an end.
    End,
    /// Both sides hear a reset; what is on its way is lost.
    Reset,
    /// The writer hears a reset. What is on its way arrives at the owner later, as from a network
    /// that holds packets back.
    Limbo(Duration),
}

/// The fate of a connection: bytes from the writer, bytes from the owner, and what then.
fn fate(random: &mut Random) -> (u64, u64, Death) {
    let least = [HANDSHAKE, 64 << 10][random.within(0..2) as usize] * u64::from(!random.once_in(50));
    let limbo = Duration::from_micros(random.within(500..40_000));
    let death = [Death::End, Death::Reset, Death::Limbo(limbo), Death::Limbo(limbo)][random.within(0..4) as usize];
    (least + random.of_any_size(24), least + random.of_any_size(16), death)
}

async fn forward(mut writer: TcpStream, target: String, shared: Arc<Shared>) {
    let Ok(mut owner) = TcpStream::connect(target).await else { return };
    for stream in [&writer, &owner] {
        stream.set_nodelay(true).unwrap();
    }
    let killed = CancellationToken::new();
    let id = shared.next.fetch_add(1, Relaxed);
    shared.live.lock().unwrap().insert(id, killed.clone());
    let (forth, back, death) = fate(&mut shared.random.lock().unwrap());
    let ((from_writer, to_writer), (from_owner, to_owner)) = (writer.split(), owner.split());
    let cut = tokio::select! {
        cut = copy(from_writer, to_owner, forth) => cut,
        cut = copy(from_owner, to_writer, back) => cut,
        () = killed.cancelled() => true,
    };
    shared.kills.fetch_add(u64::from(cut), Relaxed);
    shared.live.lock().unwrap().remove(&id);
    match death {
        Death::End => {}
        Death::Reset => [&writer, &owner].into_iter().for_each(reset_on_close),
        Death::Limbo(time) => limbo(writer, owner, time).await,
    }
}

fn reset_on_close(stream: &TcpStream) {
    // The other side may have closed it already.
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// The writer knows that the connection is gone; the owner does not, and gets the rest of it.
async fn limbo(writer: TcpStream, mut owner: TcpStream, time: Duration) {
    let mut rest = vec![0; 1 << 20];
    let held = writer.try_read(&mut rest).unwrap_or(0);
    reset_on_close(&writer);
    drop(writer);
    tokio::time::sleep(time).await;
    // An owner that has heard of the failure has closed its side.
    let _ = owner.write_all(&rest[..held]).await;
}

/// True: stopped by the limit; false: one side has closed.
async fn copy(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin, limit: u64) -> bool {
    let mut left = limit as usize;
    let mut buffer = vec![0; 64 << 10];
    while left > 0 {
        let most = buffer.len().min(left);
        let Ok(bytes @ 1..) = from.read(&mut buffer[..most]).await else { return false };
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return false;
        }
        left -= bytes;
    }
    true
}
