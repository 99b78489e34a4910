//! The control connection: one line of JSON for each message, over TCP, apart from the bytes that
//! are measured.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::BenchError;
use crate::plan::Plan;

/// Both ends must be of the same.
pub const VERSION: u32 = 2;
/// Longest message, bytes: a descriptor has at most 4 KiB, twice that in hexadecimal digits.
const MAX_LINE: u64 = 64 << 10;
/// Longest wait for an answer: the other end may have to touch or compare a large working set
/// first.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest wait for a greeting, either way.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// From the initiator.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// First of all.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// What is to be measured.
        plan: Plan,
        /// Generation of the initiator, which is who may write.
        writer_generation: u64,
    },
    /// Answer when this many bytes have arrived since the start.
    Mark {
        /// Bytes.
        bytes: u64,
    },
    /// Fill the destination with zeros.
    Clear,
    /// Compare blocks.
    Verify {
        /// Number of the first.
        first: u64,
        /// How many; more than one round of the layout is one round.
        blocks: u64,
    },
    /// Last of all, without an answer: an end that closes the connection before has failed.
    End,
}

/// From the target.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// To `Hello`, at once.
    Welcome,
    /// After `Welcome`, when the memory is ready: an engine's.
    Segment {
        /// Its encoded descriptor in hexadecimal digits.
        descriptor: String,
    },
    /// The same, of a bare loop: where it connects to.
    Stream {
        /// Address.
        address: SocketAddr,
    },
    /// To `Mark`.
    Marked {
        /// CPU seconds of the process so far.
        cpu_s: f64,
    },
    /// To `Clear` and `Verify`.
    Done,
    /// It went wrong, and the target has ended.
    Failed {
        /// Why.
        reason: String,
    },
}

/// One end of the connection.
#[derive(Debug)]
pub struct Control {
    /// What the other end is called in errors.
    peer: &'static str,
    read: BufReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    local: IpAddr,
}

impl Control {
    /// Over a connection.
    pub fn new(stream: TcpStream, peer: &'static str) -> Result<Self, BenchError> {
        stream.set_nodelay(true)?;
        let local = stream.local_addr()?.ip();
        let (read, write) = stream.into_split();
        Ok(Self { peer, read: BufReader::new(read), write, local })
    }

    /// The address of this end: the other one can reach it.
    pub const fn local_ip(&self) -> IpAddr {
        self.local
    }

    /// Sends one message.
    pub async fn send(&mut self, message: &impl Serialize) -> Result<(), BenchError> {
        let mut line = serde_json::to_string(message).map_err(|error| self.error(error.to_string()))?;
        line.push('\n');
        self.write.write_all(line.as_bytes()).await.map_err(|error| self.error(format!("went away: {error}")))
    }

    /// Receives one message.
    pub async fn receive<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<T, BenchError> {
        let mut line = String::new();
        let mut limited = (&mut self.read).take(MAX_LINE);
        let received = tokio::time::timeout(timeout, limited.read_line(&mut line)).await;
        match received {
            Err(_) => Err(self.error(format!("said nothing within {timeout:?}"))),
            Ok(Err(error)) => Err(self.error(format!("went away: {error}"))),
            Ok(Ok(0)) => Err(self.error("went away".to_owned())),
            Ok(Ok(_)) => serde_json::from_str(&line)
                .map_err(|error| self.error(format!("sent what is no message of this bench: {error}"))),
        }
    }

    /// Greets the target and receives what it is ready with.
    pub async fn greet(&mut self, hello: &Request) -> Result<Reply, BenchError> {
        self.send(hello).await?;
        match self.reply(GREETING_TIMEOUT).await? {
            Reply::Welcome => self.reply(ANSWER_TIMEOUT).await,
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends a request and receives its reply.
    pub async fn ask(&mut self, request: &Request) -> Result<Reply, BenchError> {
        self.send(request).await?;
        self.reply(ANSWER_TIMEOUT).await
    }

    async fn reply(&mut self, timeout: Duration) -> Result<Reply, BenchError> {
        match self.receive(timeout).await? {
            Reply::Failed { reason } => Err(self.error(reason)),
            reply => Ok(reply),
        }
    }

    /// A reply that does not answer the request.
    pub fn unexpected(&self, message: &impl std::fmt::Debug) -> BenchError {
        self.error(format!("sent {message:?}, which is not an answer"))
    }

    fn error(&self, problem: String) -> BenchError {
        BenchError::control(self.peer, problem)
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::plan::tests::{TCP, plan};

    async fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Control::new(ours, "target").unwrap(), listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn control_messages_round_trip() {
        let (mut ours, theirs) = pair().await;
        let mut theirs = Control::new(theirs, "initiator").unwrap();
        let hello = Request::Hello { version: VERSION, plan: plan(TCP), writer_generation: 7 };
        for request in [hello, Request::Mark { bytes: 1 << 40 }, Request::Clear] {
            ours.send(&request).await.unwrap();
            assert_eq!(theirs.receive::<Request>(ANSWER_TIMEOUT).await.unwrap(), request);
        }
    }

    #[tokio::test]
    async fn invalid_or_silent_bench_peer_is_named() {
        for (sent, problem) in [("{\"marked\":1}\n", "no message of this bench"), ("", "went away")] {
            let (mut ours, mut theirs) = pair().await;
            theirs.write_all(sent.as_bytes()).await.unwrap();
            drop(theirs);
            let error = ours.receive::<Reply>(ANSWER_TIMEOUT).await.unwrap_err().to_string();
            assert!(error.starts_with("target: ") && error.contains(problem), "{error}");
        }
        let (mut ours, theirs) = pair().await;
        let error = ours.receive::<Reply>(Duration::from_millis(10)).await.unwrap_err().to_string();
        assert!(error.contains("said nothing"), "{error}");
        drop(theirs);
    }

    #[tokio::test]
    async fn control_line_over_limit_is_refused() {
        let (mut ours, mut theirs) = pair().await;
        theirs.write_all(&vec![b'['; MAX_LINE as usize + 1]).await.unwrap();
        let error = ours.receive::<Reply>(ANSWER_TIMEOUT).await.unwrap_err().to_string();
        assert!(error.contains("no message of this bench"), "{error}");
    }
}
