//! Connections of HTTP clients: request lines, headers within their limits, frames of HTTP/2, and
//! bodies.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_api::{ChatRequest, read};
use baton_runtime::TaskSet;
use baton_runtime::serve::{ConnectionLimits, Connections, Port, Protocol};
use http::{Request, Response};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tower_service::Service;

use crate::input::choice;

pub(super) const WORDS: &[&str] = &[
    "GET / HTTP/1.1\r\n",
    "POST /v1/chat/completions HTTP/1.1\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "Host: x\r\n",
    "Content-Length: ",
    "Transfer-Encoding: chunked\r\n",
    "Expect: 100-continue\r\n",
    "Connection: close\r\n",
    "Connection: upgrade\r\nUpgrade: h2c\r\n",
    "\r\n\r\n",
    "\r\n",
    "a: b\r\n",
    "ffffffffffffffff\r\n",
    "0\r\n\r\n",
    "HTTP/1.0",
    "{\"messages\":[]}",
];

const PROTOCOLS: [Protocol; 3] = [Protocol::Http1, Protocol::Http2, Protocol::Both];
/// Largest body that is taken.
const MAX_BODY: usize = 32 << 10;
/// Turns that the server has before its client stops to send: it gives up the request of one that
/// has.
const TURNS: usize = 64;
/// Within which a connection is over, once its client is gone.
const SOON: Duration = Duration::from_secs(5);

/// A port for each protocol.
struct Server {
    runtime: Runtime,
    ports: Vec<(SocketAddr, Connections)>,
    _tasks: TaskSet,
}

/// Reads bodies as the frontend does.
#[derive(Clone)]
struct Reader;

impl Service<Request<Incoming>> for Reader {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<String>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        Box::pin(async {
            let body = Limited::new(request.into_body(), MAX_BODY).collect().await;
            let said = match body {
                Ok(body) => read::<ChatRequest>(&body.to_bytes()).map_or_else(|bad| bad.problem, |_| "ok".to_owned()),
                Err(error) => error.to_string(),
            };
            Ok(Response::new(said))
        })
    }
}

impl Server {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let tasks = TaskSet::new();
        let ports = runtime.block_on(async {
            let mut ports = Vec::new();
            for protocol in PROTOCOLS {
                let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let address = listener.local_addr().expect("a bound port");
                let connections = Connections::new(16);
                ports.push((address, connections.clone()));
                let limits = ConnectionLimits::default();
                Port { name: "fuzz", listener, protocol, limits, connections, leaves: None }.serve(Reader, &tasks);
            }
            ports
        });
        Self { runtime, ports, _tasks: tasks }
    }

    /// Sends all at once. Returns what comes of it.
    async fn connection(&self, port: usize, bytes: &[u8]) -> Vec<u8> {
        let (address, connections) = &self.ports[port];
        let mut client = TcpStream::connect(address).await.expect("a connection");
        // Thousands of connections a second would use all ports up.
        client.set_zero_linger().expect("an open socket");
        // The server may close before all is written or read.
        let _ = client.write_all(bytes).await;
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        let _ = client.shutdown().await;
        let mut heard = Vec::new();
        let _ = tokio::time::timeout(SOON, client.read_to_end(&mut heard)).await;
        drop(client);
        let over = async {
            while connections.open() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, over).await.expect("the connection ends with its client");
        heard
    }
}

/// A connection: the first byte says to which port.
pub(super) fn serve(input: &[u8]) {
    thread_local! {
        static SERVER: Server = Server::new();
    }
    let (port, bytes) = choice(input, PROTOCOLS.len());
    SERVER.with(|server| drop(server.runtime.block_on(server.connection(port, bytes))));
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes()[1..], &[kind, flags], &stream.to_be_bytes(), body].concat()
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let body = r#"{"messages":[{"role":"user","content":"x"}]}"#;
    let post = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let chunked = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\nTrailer: x\r\n\r\n",
        body.len()
    );
    let get = "GET /health HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nConnection: close\r\n\r\n";
    // POST, http, /, and an authority: indexed in the static table, but for the last.
    let headers = frame(1, 4, 1, b"\x83\x86\x84\x41\x01x");
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings = frame(4, 0, 0, &[0, 4, 0, 1, 0, 0]);
    let window = frame(8, 0, 0, &[0, 0, 1, 0]);
    let data = frame(0, 1, 1, body.as_bytes());
    let end = [frame(6, 0, 0, &[1; 8]), frame(3, 0, 1, &[0, 0, 0, 8]), frame(7, 0, 0, &[0; 8])].concat();
    let http2 = [&preface[..], &settings, &window, &headers, &data].concat();
    let to = |port: u8, bytes: &[u8]| [&[port], bytes].concat();
    vec![
        to(0, post.as_bytes()),
        to(0, [get, &post].concat().replace("close", "keep-alive").as_bytes()),
        to(2, chunked.as_bytes()),
        to(1, &http2),
        to(2, &http2),
        to(1, &[http2, end].concat()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_connection_seeds_have_their_body_read() {
        let server = Server::new();
        let seeds = seeds();
        // The last one takes its request back.
        for seed in &seeds[..seeds.len() - 1] {
            let (port, bytes) = choice(seed, PROTOCOLS.len());
            let heard = server.runtime.block_on(server.connection(port, bytes));
            assert!(heard.windows(2).any(|two| two == b"ok"), "{heard:?}");
        }
    }
}
