//! Clients that are silent, slow, many or gone.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const SOON: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(100);

struct Server {
    address: SocketAddr,
    connections: Connections,
    tasks: TaskSet,
    shutdown: Shutdown,
    /// Requests that have begun and not ended.
    open: Arc<AtomicUsize>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Server {
    async fn start(limits: ConnectionLimits, max: usize) -> Self {
        Self::speaking(Protocol::Http1, limits, max).await
    }

    async fn speaking(protocol: Protocol, limits: ConnectionLimits, max: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Connections::new(max);
        let tasks = TaskSet::new();
        let open = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&open);
        let begin = move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Open(Arc::clone(&counted))
        };
        let never = begin.clone();
        let router = Router::new()
            .route("/", get(async || "hello"))
            .route(
                "/never",
                get(async move || {
                    let _open = never();
                    std::future::pending::<()>().await;
                }),
            )
            .route(
                "/endless",
                get(async move || {
                    let open = begin();
                    let frames = std::iter::repeat_with(move || {
                        let _ = &open;
                        Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 4096]))
                    });
                    axum::body::Body::from_stream(tokio_stream::iter(frames))
                }),
            );
        let shutdown = Shutdown::new();
        let counted = connections.clone();
        let leaves = Some(shutdown.clone());
        Port { name: "test", listener, protocol, limits, connections: counted, leaves }.serve(router, &tasks);
        Self { address, connections, tasks, shutdown, open }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn ask(&self, path: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        stream
    }

    async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        let there = async {
            while !check(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, there).await.unwrap_or_else(|_| panic!("{what}"));
    }

    async fn open_requests(&self, count: usize) {
        self.until("requests", |server| server.open.load(Ordering::SeqCst) == count).await;
    }
}

async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    // A reset is an end, too.
    let _ = tokio::time::timeout(SOON, stream.read_to_string(&mut text)).await.expect("it is closed");
    text
}

#[tokio::test]
async fn silent_connection_and_half_sent_header_are_closed() {
    let limits = ConnectionLimits { first_request: SHORT, ..ConnectionLimits::default() };
    let server = Server::start(limits, 8).await;
    assert_eq!(read_to_end(&mut server.connect().await).await, "");
    let mut half = server.connect().await;
    half.write_all(b"GET / HTTP/1.1\r\nhost").await.unwrap();
    assert_eq!(read_to_end(&mut half).await, "");
    server.until("closed", |server| server.connections.open() == 0).await;
}

#[tokio::test]
async fn request_may_take_longer_than_the_idle_timeout() {
    let limits = ConnectionLimits { first_request: SHORT, idle: SHORT, ..ConnectionLimits::default() };
    let server = Server::start(limits, 8).await;
    let _asked = server.ask("/never").await;
    server.open_requests(1).await;
    tokio::time::sleep(4 * SHORT).await;
    server.open_requests(1).await;
    let answer = read_to_end(&mut server.ask("/").await).await;
    assert!(answer.ends_with("hello"), "closed, once it was idle: {answer}");
}

#[tokio::test]
async fn idle_connections_are_closed_for_new_ones_and_busy_ones_stay() {
    let server = Server::start(ConnectionLimits::default(), 3).await;
    let _busy = server.ask("/never").await;
    server.open_requests(1).await;
    let mut silent = Vec::new();
    for _ in 0..10 {
        silent.push(server.connect().await);
    }
    assert_eq!(read_to_end(&mut silent[0]).await, "");
    let mut asked = server.ask("/").await;
    let mut answer = [0; 12];
    tokio::time::timeout(SOON, asked.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    server.open_requests(1).await;

    let _others = (server.ask("/never").await, server.ask("/never").await);
    server.open_requests(3).await;
    assert_eq!(read_to_end(&mut server.ask("/").await).await, "", "all are busy");
}

#[tokio::test]
async fn client_that_does_not_read_is_disconnected() {
    let limits = ConnectionLimits { stall: SHORT, ..ConnectionLimits::default() };
    let server = Server::start(limits, 8).await;
    let mut slow = server.ask("/endless").await;
    server.open_requests(1).await;
    server.open_requests(0).await;
    let text = read_to_end(&mut slow).await;
    assert!(!text.ends_with("\r\n0\r\n\r\n"), "it has no regular end");
}

#[tokio::test]
async fn client_disconnect_is_noticed_behind_a_pipelined_request() {
    let server = Server::start(ConnectionLimits::default(), 8).await;
    let mut stream = server.ask("/never").await;
    server.open_requests(1).await;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    drop(stream);
    server.open_requests(0).await;
}

#[tokio::test]
async fn response_sent_before_the_request_body_ends_arrives() {
    let server = Server::start(ConnectionLimits::default(), 8).await;
    let mut stream = server.connect().await;
    let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 64 << 20);
    stream.write_all(head.as_bytes()).await.unwrap();
    let sent = async {
        let piece = vec![b'x'; 64 << 10];
        for _ in 0..64 {
            stream.write_all(&piece).await?;
        }
        io::Result::Ok(())
    };
    sent.await.unwrap();
    let answer = read_to_end(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
}

#[tokio::test]
async fn large_request_headers_are_refused_with_431() {
    let server = Server::start(ConnectionLimits::default(), 8).await;
    let header = "x".repeat(64 << 10);
    let many = "a: b\r\n".repeat(100);
    for more in [format!("y: {header}\r\n"), many] {
        let mut stream = server.connect().await;
        let _ = stream.write_all(format!("GET / HTTP/1.1\r\nhost: x\r\n{more}\r\n").as_bytes()).await;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 431");
    }
}

/// RFC 9113 section 4.1: length, type, flags, stream.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

#[tokio::test]
async fn drain_sends_goaway_and_lets_open_requests_go_on() {
    let server = Server::speaking(Protocol::Http2, ConnectionLimits::default(), 8).await;
    let mut peer = server.connect().await;
    // HPACK (RFC 7541 appendix A): GET, http, path /never, authority x.
    let get = [&[0x82, 0x86, 0x04, 6][..], b"/never", &[0x41, 1, b'x']].concat();
    let preface = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[]), &frame(1, 5, 1, &get)].concat();
    peer.write_all(&preface).await.unwrap();
    server.open_requests(1).await;
    server.shutdown.advance(Phase::Draining);
    let mut told = Vec::new();
    let goaway = |told: &[u8]| told.windows(9).any(|at| at[3] == 7 && at[..3] == [0, 0, 8] && at[5..] == [0; 4]);
    while !goaway(&told) {
        let read = tokio::time::timeout(SOON, peer.read_buf(&mut told)).await.expect("GOAWAY").unwrap();
        assert_ne!(read, 0, "it is closed");
    }
    tokio::time::sleep(SHORT).await;
    assert_eq!(server.open.load(Ordering::SeqCst), 1, "what was begun goes on");
    drop(peer);
    server.open_requests(0).await;
}

#[tokio::test]
async fn many_http2_stream_resets_do_not_close_the_connection() {
    // HPACK (RFC 7541 appendix A): GET / over http, authority x.
    const GET: &[u8] = &[0x82, 0x84, 0x86, 0x41, 1, b'x'];
    let headers = 1;
    let reset = 3;
    let settings = 4;
    let end = 0x5;
    let server = Server::speaking(Protocol::Http2, ConnectionLimits::default(), 8).await;
    let mut gateway = server.connect().await;
    let mut sent = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(settings, 0, 0, &[])].concat();
    for left in 0..500 {
        sent.extend(frame(headers, end, 2 * left + 1, GET));
        sent.extend(frame(reset, 0, 2 * left + 1, &8_u32.to_be_bytes()));
    }
    sent.extend(frame(headers, end, 1001, GET));
    gateway.write_all(&sent).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"hello") {
        let read = tokio::time::timeout(SOON, gateway.read_buf(&mut answer)).await.expect("an answer").unwrap();
        assert_ne!(read, 0, "it goes on: {}", String::from_utf8_lossy(&answer));
    }
}

#[tokio::test]
async fn shutdown_closes_idle_connections_and_waits_for_requests() {
    let server = Server::start(ConnectionLimits::default(), 8).await;
    let mut silent = server.connect().await;
    let asked = server.ask("/never").await;
    server.open_requests(1).await;
    server.tasks.cancel();
    assert_eq!(read_to_end(&mut silent).await, "");
    assert_eq!(server.open.load(Ordering::SeqCst), 1);
    drop(asked);
    assert_eq!(server.tasks.join(SOON).await, Ok(()));
}

#[tokio::test]
async fn half_sent_request_does_not_delay_shutdown() {
    let server = Server::start(ConnectionLimits::default(), 8).await;
    let mut trickles = server.connect().await;
    trickles.write_all(b"GET / HTTP/1.1\r\nho").await.unwrap();
    let _never = server.ask("/never").await;
    server.open_requests(1).await;
    server.tasks.cancel();
    assert_eq!(server.tasks.join(SOON).await, Ok(()));
}
