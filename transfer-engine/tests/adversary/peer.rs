//! Another process with an engine. It is this test binary once more, and does what it is told over
//! its standard input, a socket; see `other_process.rs`.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_transfer_engine::{SegmentDescriptor, SpanPair, TransportChoice};
use baton_types::GrantId;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::node::LONG;
use crate::other_process::{NAME, from_hex, to_hex};

/// What became of a batch in the other process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub tag: u64,
    /// `ok`, or the error.
    pub result: String,
}

impl Outcome {
    pub fn is_ok(&self) -> bool {
        self.result == "ok"
    }
}

/// What a process holds.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// Memory in RAM, bytes.
    pub resident: u64,
    /// Open file descriptors.
    pub files: u64,
}

/// The other process, as the test sees it. It is killed when this is dropped.
pub struct Peer {
    child: Child,
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    control: OwnedWriteHalf,
    /// Heard while waiting for something else.
    outcomes: VecDeque<Outcome>,
}

impl Peer {
    /// Starts one whose engine has a segment of `bytes`.
    pub async fn start(name: &str, transport: TransportChoice, bytes: u64) -> Self {
        Self::start_with(name, transport, bytes, "").await
    }

    /// With settings of the engine, each as ` name=value`.
    pub async fn start_with(name: &str, transport: TransportChoice, bytes: u64, settings: &str) -> Self {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_process", "--ignored", "--nocapture"])
            .env(NAME, name)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        ours.set_nonblocking(true).unwrap();
        let (read, control) = UnixStream::from_std(ours).unwrap().into_split();
        let mut peer = Self { child, lines: BufReader::new(read).lines(), control, outcomes: VecDeque::new() };
        assert_eq!(peer.ask(&format!("{transport} {bytes}{settings}")).await, "ready");
        peer
    }

    /// Its segment.
    pub async fn descriptor(&mut self) -> SegmentDescriptor {
        from_hex(&self.ask("descriptor").await)
    }

    /// Where it writes to from now on.
    pub async fn aim(&mut self, descriptor: &SegmentDescriptor) {
        self.tell(&format!("aim {}", to_hex(descriptor))).await;
    }

    /// Has it give a right to write, to a node in a generation, or to any peer (`-`), for so long.
    pub async fn grant(&mut self, id: u64, writer: (&str, u64), range: Range<u64>, time: Duration) {
        let ((node, generation), Range { start, end }) = (writer, range);
        self.ask(&format!("grant {id} {node} {generation} {start} {end} {}", time.as_millis())).await;
    }

    /// Has it end a grant; returns once that is fenced.
    pub async fn revoke(&mut self, id: u64) {
        self.ask(&format!("revoke {id}")).await;
    }

    /// Fills bytes of its segment with a pattern, in place.
    pub async fn fill(&mut self, tag: u64, range: Range<u64>) {
        self.ask(&format!("fill {tag} {} {}", range.start, range.end)).await;
    }

    /// Whether bytes of its segment hold a pattern.
    pub async fn holds(&mut self, tag: u64, range: Range<u64>) -> bool {
        self.ask(&format!("holds {tag} {} {}", range.start, range.end)).await == "true"
    }

    /// Batches of a writer that it has been told of.
    pub async fn arrivals(&mut self, writer: &str) -> u64 {
        self.ask(&format!("arrivals {writer}")).await.parse().unwrap()
    }

    /// What it holds now.
    pub async fn usage(&mut self) -> Usage {
        let line = self.ask("usage").await;
        let (resident, files) = line.split_once(' ').unwrap();
        Usage { resident: resident.parse().unwrap(), files: files.parse().unwrap() }
    }

    /// Has it write a batch of spans, filled with pattern `tag` as it stands at their remote
    /// offsets.
    pub async fn write(&mut self, tag: u64, grant: GrantId, spans: &[SpanPair]) {
        let mut line = format!("write {tag} {}", grant.0);
        for SpanPair { local_offset, remote_offset, len } in spans {
            write!(line, " {local_offset}:{remote_offset}:{len}").unwrap();
        }
        self.tell(&line).await;
    }

    /// The next batch that ended.
    pub async fn outcome(&mut self) -> Outcome {
        match self.outcomes.pop_front() {
            Some(outcome) => outcome,
            None => self.line().await.expect_err("nothing was asked"),
        }
    }

    /// Has its engine close its connections, from now on, each time after some milliseconds between
    /// these.
    pub async fn disconnect_at_random(&mut self, seed: u64, (least_ms, most_ms): (u64, u64)) {
        self.tell(&format!("disconnect {seed} {least_ms} {most_ms}")).await;
    }

    /// How often it did.
    pub async fn disconnects(&mut self) -> u64 {
        self.ask("disconnects").await.parse().unwrap()
    }

    /// Parts of batches that it sent again.
    pub async fn retries(&mut self) -> u64 {
        self.ask("retries").await.parse().unwrap()
    }

    /// Stops it, as a node that hangs; when this returns, it runs no more.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        let stopped = || std::fs::read_to_string(&stat).unwrap().rsplit(") ").next().unwrap().starts_with('T');
        while !stopped() {
            std::thread::yield_now();
        }
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }

    #[allow(unsafe_code)] // kill(2) has no safe form in the standard library
    fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved; the process is our child and not yet waited for, so the
        // number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    async fn tell(&mut self, line: &str) {
        self.control.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// Its answer to a command.
    pub async fn ask(&mut self, command: &str) -> String {
        self.tell(command).await;
        loop {
            match self.line().await {
                Ok(answer) => return answer,
                Err(outcome) => self.outcomes.push_back(outcome),
            }
        }
    }

    /// The next answer, or the next end of a batch; dropping the future loses nothing.
    async fn line(&mut self) -> Result<String, Outcome> {
        let line = tokio::time::timeout(LONG, self.lines.next_line()).await.expect("the other process answers in time");
        let line = line.unwrap().expect("the other process lives");
        let (kind, rest) = line.split_once(' ').unwrap();
        if kind == "answer" {
            return Ok(rest.to_owned());
        }
        let (tag, result) = rest.split_once(' ').unwrap();
        Err(Outcome { tag: tag.parse().unwrap(), result: result.to_owned() })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
