//! Another process with an engine. It is this test binary once more, and does what it is told over its standard input, a socket.

use std::fmt::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_runtime::Telemetry;
use baton_transfer_engine::{
    BatchOptions, BatchReport, METRICS, SegmentDescriptor, SpanPair, TransferConfig, TransferError, TransportChoice,
};
use baton_types::GrantId;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::node::{LONG, Node, config};

/// Set in the other process: the name of its node.
const NAME: &str = "BATON_TEST_PEER";

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

/// The other process, as the test sees it. It is killed when this is dropped.
pub struct Peer {
    child: Child,
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    control: OwnedWriteHalf,
}

impl Peer {
    /// Starts one whose engine has a segment of `bytes`.
    pub async fn start(name: &str, transport: TransportChoice, bytes: u64) -> Self {
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
        let mut peer = Self { child, lines: BufReader::new(read).lines(), control };
        peer.tell(&format!("{transport} {bytes}")).await;
        assert_eq!(peer.line().await, "ready");
        peer
    }

    /// Where it writes to from now on.
    pub async fn aim(&mut self, descriptor: &SegmentDescriptor) {
        let mut line = "aim ".to_owned();
        descriptor.encode().iter().for_each(|byte| write!(line, "{byte:02x}").unwrap());
        self.tell(&line).await;
    }

    /// Has it write a batch of spans, filled with pattern `tag` as it stands at their remote offsets.
    pub async fn write(&mut self, tag: u64, grant: GrantId, spans: &[SpanPair]) {
        let mut line = format!("write {tag} {}", grant.0);
        for SpanPair { local_offset, remote_offset, len } in spans {
            write!(line, " {local_offset}:{remote_offset}:{len}").unwrap();
        }
        self.tell(&line).await;
    }

    /// The next batch that ended.
    pub async fn outcome(&mut self) -> Outcome {
        let line = self.line().await;
        let (tag, result) = line.split_once(' ').unwrap();
        Outcome { tag: tag.parse().unwrap(), result: result.to_owned() }
    }

    /// Parts of batches that it sent again. No batch may be under way.
    pub async fn retries(&mut self) -> u64 {
        self.tell("retries").await;
        self.line().await.parse().unwrap()
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
        // SAFETY: no memory is involved; the process is our child and not yet waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    async fn tell(&mut self, line: &str) {
        self.control.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// The next line; whoever drops the future loses nothing.
    async fn line(&mut self) -> String {
        let line = tokio::time::timeout(LONG, self.lines.next_line()).await.expect("the other process answers in time");
        line.unwrap().expect("the other process lives")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the other process does, until the test closes its end.
pub fn run_as_other_process() {
    let Ok(name) = std::env::var(NAME) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let control = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let control = std::os::unix::net::UnixStream::from(control);
    control.set_nonblocking(true).unwrap();
    runtime.block_on(async {
        let (read, write) = UnixStream::from_std(control).unwrap().into_split();
        serve(&name, BufReader::new(read).lines(), write).await;
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
}

async fn serve(name: &str, mut commands: tokio::io::Lines<BufReader<OwnedReadHalf>>, control: OwnedWriteHalf) {
    let telemetry = Telemetry::install(&[METRICS]).unwrap();
    let first = commands.next_line().await.unwrap().unwrap();
    let (transport, bytes) = first.split_once(' ').unwrap();
    let node = Node::start(other_config(name, transport.parse().unwrap()), bytes.parse().unwrap()).await;
    let (replies, outgoing) = mpsc::channel(1024);
    let answering = tokio::task::LocalSet::new();
    answering.spawn_local(answer(outgoing, control));
    replies.send("ready".to_owned()).await.unwrap();
    answering
        .run_until(async {
            let mut target = None;
            while let Ok(Some(line)) = commands.next_line().await {
                let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
                match command {
                    "aim" => target = Some(decode(rest)),
                    "write" => start_write(&node, target.as_ref().unwrap(), rest, replies.clone()),
                    "retries" => replies.send(retries(&telemetry.render()).to_string()).await.unwrap(),
                    other => panic!("unknown command {other}"),
                }
            }
        })
        .await;
}

fn other_config(name: &str, transport: TransportChoice) -> TransferConfig {
    config(name, transport)
}

async fn answer(mut outgoing: mpsc::Receiver<String>, mut control: OwnedWriteHalf) {
    while let Some(line) = outgoing.recv().await {
        // The test may be over.
        let _ = control.write_all(format!("{line}\n").as_bytes()).await;
    }
}

fn decode(hex: &str) -> SegmentDescriptor {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    let bytes: Vec<u8> = hex.as_bytes().chunks(2).map(byte).collect();
    SegmentDescriptor::decode(&bytes).unwrap()
}

fn start_write(node: &Node, target: &SegmentDescriptor, arguments: &str, replies: mpsc::Sender<String>) {
    let mut words = arguments.split(' ');
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let (tag, grant) = (number(), GrantId(number()));
    let spans: Vec<SpanPair> = words.map(parse_span).collect();
    for span in &spans {
        node.memory.fill(span.local_offset, span.len, tag, span.remote_offset);
    }
    let options = BatchOptions::new(std::time::Instant::now() + LONG).tag(tag);
    let batch = node.engine.write(node.segment, target, grant, spans, options);
    tokio::task::spawn_local(async move {
        let _ = replies.send(format!("{tag} {}", describe(batch.await))).await;
    });
}

fn describe(result: Result<BatchReport, TransferError>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "ok".to_owned())
}

fn parse_span(text: &str) -> SpanPair {
    let numbers: Vec<u64> = text.split(':').map(|number| number.parse().unwrap()).collect();
    SpanPair { local_offset: numbers[0], remote_offset: numbers[1], len: numbers[2] }
}

/// The sum of the counter's lines in the page of metrics.
fn retries(page: &str) -> u64 {
    let lines = page.lines().filter(|line| line.starts_with("baton_transfer_retries_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}
