//! A proxy in front of a node's port: it delays what goes through.
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
/// Bytes read at once.
const CHUNK: usize = 8 << 10;

/// Stands before one port; ends when dropped.
pub struct Proxy {
    delay: watch::Sender<Duration>,
    task: AbortHandle,
}

impl Proxy {
    /// In front of a port of 127.0.0.1, at the same port of [`PROXIED_HOST`].
    #[allow(clippy::disallowed_methods)] // a test's helper, which ends with the proxy
    pub async fn before(port: u16) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((PROXIED_HOST, port)).await?;
        let delay = watch::Sender::new(Duration::ZERO);
        let shared = delay.subscribe();
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
        Ok(Self { delay, task: task.abort_handle() })
    }

    /// Each chunk waits for so long, from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.delay.send_replace(delay);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: watch::Receiver<Duration>) {
    let mut chunk = vec![0; CHUNK];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        let delay = *delay.borrow();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if to.write_all(&chunk[..read]).await.is_err() {
            return;
        }
    }
    // The other side hears that this one has ended.
    let _ = to.shutdown().await;
}
