//! A proxy in front of a node's port: it delays what goes through, or changes it.
//!
//! A node that is told `--advertise-host 127.0.0.2` listens on 127.0.0.1, and is looked for where a
//! proxy can stand, at the same port.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Where nodes are looked for.
pub const PROXIED_HOST: &str = "127.0.0.2";
/// Read at once. What has at least half as much is KV, and not a message.
const CHUNK: usize = 8 << 10;

/// What a proxy does to what goes through.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conduct {
    /// Each chunk waits for so long.
    pub delay: Duration,
    /// In so many of the next chunks of KV one bit is turned.
    pub flips: u32,
}

/// Stands before one port; ends when dropped.
pub struct Proxy {
    conduct: watch::Sender<Conduct>,
    task: AbortHandle,
}

impl Proxy {
    /// In front of a port of 127.0.0.1, at the same port of [`PROXIED_HOST`].
    #[allow(clippy::disallowed_methods)] // a test's helper, which ends with the proxy
    pub async fn before(port: u16) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((PROXIED_HOST, port)).await?;
        let conduct = watch::Sender::new(Conduct::default());
        let shared = conduct.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(node) = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await else { continue };
                let _ = (client.set_nodelay(true), node.set_nodelay(true));
                let ((client_reads, client_writes), (node_reads, node_writes)) =
                    (client.into_split(), node.into_split());
                tokio::spawn(forward(client_reads, node_writes, shared.clone()));
                tokio::spawn(forward(node_reads, client_writes, shared.clone()));
            }
        });
        Ok(Self { conduct, task: task.abort_handle() })
    }

    /// From now on.
    pub fn set(&self, conduct: Conduct) {
        self.conduct.send_replace(conduct);
    }

    /// Flips that are still to come.
    pub fn flips_left(&self) -> u32 {
        self.conduct.borrow().flips
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, conduct: watch::Sender<Conduct>) {
    let mut chunk = vec![0; CHUNK];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        let delay = conduct.borrow().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let flips = |conduct: &mut Conduct| {
            let flips = conduct.flips > 0 && read >= CHUNK / 2;
            conduct.flips -= u32::from(flips);
            flips
        };
        if conduct.send_if_modified(flips) {
            chunk[read / 2] ^= 1;
        }
        if to.write_all(&chunk[..read]).await.is_err() {
            return;
        }
    }
    // The other side hears that this one has ended.
    let _ = to.shutdown().await;
}
