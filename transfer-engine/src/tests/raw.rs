//! A writer by hand, byte for byte: for what the engine would never do.

use std::time::Duration;

use baton_types::{Generation, GrantId, NodeId, NodeStart};
use tokio::net::TcpStream;

use super::harness::{TestNode, span};
use crate::TransportKind;
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{
    Commit, Hello, PREFIX_BYTES, PROTOCOL_VERSION, PartId, Prefix, Reply, Target, put_commit, put_data, put_fence,
};

/// A connection that speaks the protocol as it likes.
pub(super) struct RawWriter {
    pub(super) stream: Stream,
    segment: crate::SegmentId,
}

pub(super) fn raw_identity() -> NodeStart {
    NodeStart { node: NodeId::new("raw").unwrap(), generation: Generation(1) }
}

impl RawWriter {
    pub(super) async fn connect(owner: &TestNode) -> Self {
        Self { stream: connect(owner).await, segment: owner.segment }
    }

    /// With the handshake done.
    pub(super) async fn open(owner: &TestNode, connection: u64) -> Self {
        let raw = Self::connect(owner).await;
        raw.hello(owner, PROTOCOL_VERSION, connection).await;
        assert_eq!(raw.reply().await, Some(Reply::Welcome { version: PROTOCOL_VERSION }));
        raw
    }

    pub(super) async fn hello(&self, owner: &TestNode, version: u16, connection: u64) {
        let writer = raw_identity();
        let owner = owner.identity.clone();
        let hello = Hello { version, connection, writer, owner, transport: TransportKind::Tcp };
        self.send(&hello.encode()).await;
    }

    pub(super) async fn send(&self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// The head of a DATA frame of one part of batch `batch`; its payload is the caller's.
    pub(super) async fn data(&self, batch: u64, grant: GrantId, offset: u64, len: u64) {
        let mut out = Vec::new();
        put_data(&mut out, &self.target(batch, grant), &[span(0, offset, len)]);
        self.send(&out).await;
    }

    pub(super) async fn commit(&self, batch: u64, grant: GrantId, bytes: u64) {
        let mut out = Vec::new();
        put_commit(&mut out, &Commit { target: self.target(batch, grant), parts: 1, bytes, tag: 1 });
        self.send(&out).await;
    }

    fn target(&self, batch: u64, grant: GrantId) -> Target {
        Target { id: PartId { batch, part: 0 }, grant, segment: self.segment }
    }

    pub(super) async fn fence(&self, connection: u64) {
        let mut out = Vec::new();
        put_fence(&mut out, connection);
        self.send(&out).await;
    }

    /// The next reply that is not about progress; `None` when the owner has closed.
    pub(super) async fn reply(&self) -> Option<Reply> {
        tokio::time::timeout(Duration::from_secs(5), self.wait_for_reply()).await.expect("a reply in time")
    }

    async fn wait_for_reply(&self) -> Option<Reply> {
        loop {
            let mut prefix = [0; PREFIX_BYTES];
            // A reset is an end, too.
            if !self.stream.read_exact(&mut prefix).await.unwrap_or(false) {
                return None;
            }
            let prefix = Prefix::decode(prefix).unwrap();
            let mut body = vec![0; prefix.body];
            self.stream.read_exact(&mut body).await.unwrap();
            match Reply::decode(prefix, &body).unwrap() {
                Reply::Progress => {}
                reply => return Some(reply),
            }
        }
    }
}

async fn connect(owner: &TestNode) -> Stream {
    Stream::tcp(TcpStream::connect(owner.descriptor.address(TransportKind::Tcp).unwrap()).await.unwrap()).unwrap()
}
