//! Takes connections in.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use super::connections::{Connections, Registered};
use super::receive::Receiver;
use super::socket::{prepare, read_exact, write_all};
use super::wire::{Hello, MAGIC, PREFIX_BYTES, PROTOCOL_VERSION, Prefix, Rejection, Reply, common_version};
use crate::engine::Host;
use crate::metrics::Held;

/// Wait after an error of accept(2), which is mostly that of having no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts until the engine is closed.
pub(super) async fn accept(host: &Arc<Host>, listener: TcpListener, connections: Arc<Connections>) {
    let places = Arc::new(Semaphore::new(host.config.max_connections));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = host.closed.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => start(host, stream, &connections, &places).await,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a transfer connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn start(host: &Arc<Host>, stream: TcpStream, connections: &Arc<Connections>, places: &Arc<Semaphore>) {
    let place = Arc::clone(places).try_acquire_owned().ok();
    let (host, connections) = (Arc::clone(host), Arc::clone(connections));
    if place.is_none() {
        // Answered in line, so that connections beyond the limit cost no task. The answer fits into any socket's buffer.
        let _ = stream.try_write(&Reply::Reject(Rejection::Full).encode());
        return;
    }
    let tasks = host.tasks.clone();
    tasks.spawn_request("transfer connection", async move {
        let peer = stream.peer_addr().ok();
        tokio::select! {
            result = serve(&host, stream, &connections, place) => {
                if let Err(error) = result {
                    tracing::debug!(?peer, %error, "a transfer connection ended");
                }
            }
            () = host.closed.cancelled() => {}
        }
    });
}

async fn serve(
    host: &Host,
    stream: TcpStream,
    connections: &Arc<Connections>,
    _place: Option<OwnedSemaphorePermit>,
) -> io::Result<()> {
    let _open = Held::new(&host.metrics.connections_in, 1.0);
    prepare(&stream)?;
    let greeting = timeout(host.config.connect_timeout, greet(host, &stream, connections));
    let Some(registered) = greeting.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? else {
        return Ok(());
    };
    let mut receiver = Receiver::new(host, &stream, connections, &registered);
    // Dropping the receiver ends all landing: it holds a pass only within a call that does not wait. `registered` is dropped after it, and tells so.
    tokio::select! {
        result = receiver.run() => result,
        () = registered.killed() => Ok(()),
    }
}

/// The handshake. `None`: the connection is not taken, and the writer knows why.
async fn greet(host: &Host, stream: &TcpStream, connections: &Arc<Connections>) -> io::Result<Option<Registered>> {
    let hello = read_hello(stream).await?;
    match judge(host, &hello).and_then(|version| Ok((version, connections.register(&hello.writer, hello.connection)?)))
    {
        Ok((version, registered)) => {
            write_all(stream, &Reply::Welcome { version }.encode()).await?;
            Ok(Some(registered))
        }
        Err(rejection) => {
            tracing::info!(writer = %hello.writer.node, ?rejection, "a transfer connection is refused");
            write_all(stream, &Reply::Reject(rejection).encode()).await?;
            Ok(None)
        }
    }
}

async fn read_hello(stream: &TcpStream) -> io::Result<Hello> {
    let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
    let mut start = [0; MAGIC.len() + PREFIX_BYTES];
    let (magic, prefix) = start.split_at_mut(MAGIC.len());
    if !read_exact(stream, magic).await? || *magic != MAGIC {
        return Err(invalid("not a transfer connection".into()));
    }
    let mut prefix_bytes = [0; PREFIX_BYTES];
    read_exact(stream, prefix).await?;
    prefix_bytes.copy_from_slice(prefix);
    let prefix = Prefix::decode(prefix_bytes).map_err(|error| invalid(error.0))?;
    let mut body = vec![0; prefix.body];
    read_exact(stream, &mut body).await?;
    Hello::decode(prefix, &body).map_err(|error| invalid(error.0))
}

fn judge(host: &Host, hello: &Hello) -> Result<u16, Rejection> {
    let version = common_version(PROTOCOL_VERSION, hello.version).ok_or(Rejection::Version(PROTOCOL_VERSION))?;
    let config = &host.config;
    if hello.target.node != config.node {
        return Err(Rejection::WrongNode(config.node.to_string()));
    }
    if hello.target.generation != config.generation {
        return Err(Rejection::StaleTarget(config.generation));
    }
    Ok(version)
}
