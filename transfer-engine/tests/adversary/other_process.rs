//! The other process: an engine that does what the test says, line by line.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_runtime::Telemetry;
use baton_transfer_engine::{
    Arrival, ArrivalReceiver, BatchOptions, BatchReport, GrantSpec, METRICS, SegmentDescriptor, SpanPair,
    TransferConfig, TransferError,
};
use baton_types::{Generation, GrantId, NodeId, NodeStart};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::crowd::Crowd;
use crate::node::{LONG, Node, config};
use crate::pattern::{Random, pattern};

/// Set in the other process: the name of its node.
pub const NAME: &str = "BATON_TEST_PEER";

/// Obeys until the test closes its end.
pub fn run() {
    let name = std::env::var(NAME).expect("a test starts its other process itself");
    crate::flood::raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let control = std::os::unix::net::UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    control.set_nonblocking(true).unwrap();
    runtime.block_on(async {
        let (read, write) = UnixStream::from_std(control).unwrap().into_split();
        tokio::task::LocalSet::new().run_until(serve(&name, BufReader::new(read).lines(), write)).await;
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
}

/// Batches that have arrived, by writer.
type Arrived = Arc<Mutex<HashMap<String, u64>>>;

struct OtherProcess {
    node: Node,
    telemetry: Telemetry,
    target: Option<SegmentDescriptor>,
    arrived: Arrived,
    lines: mpsc::Sender<String>,
    disconnects: Arc<AtomicU64>,
    crowd: Crowd,
}

async fn serve(name: &str, mut commands: Lines<BufReader<OwnedReadHalf>>, control: OwnedWriteHalf) {
    let telemetry = Telemetry::install(&[METRICS]).unwrap();
    let first = commands.next_line().await.unwrap().unwrap();
    let mut words = first.split(' ');
    let transport = words.next().unwrap().parse().unwrap();
    let bytes = words.next().unwrap().parse().unwrap();
    let mut settings = config(name, transport);
    words.for_each(|word| set(&mut settings, word));
    let mut node = Node::start(settings.clone(), bytes).await;
    let arrived = Arrived::default();
    let arrivals = std::mem::replace(&mut node.arrivals, ArrivalReceiver::empty());
    tokio::task::spawn_local(count(arrivals, Arc::clone(&arrived)));
    let (lines, outgoing) = mpsc::channel(1024);
    tokio::task::spawn_local(send(outgoing, control));
    let mut process = OtherProcess {
        node,
        telemetry,
        target: None,
        arrived,
        lines,
        disconnects: Arc::default(),
        crowd: Crowd::new(settings),
    };
    process.answer("ready").await;
    while let Ok(Some(line)) = commands.next_line().await {
        process.obey(&line).await;
    }
}

/// A setting, as `name=value`; times in milliseconds.
fn set(config: &mut TransferConfig, word: &str) {
    let (name, value) = word.split_once('=').unwrap();
    let number: u64 = value.parse().unwrap();
    match name {
        "connect_timeout" => config.connect_timeout = Duration::from_millis(number),
        "progress_timeout" => config.progress_timeout = Duration::from_millis(number),
        "idle_timeout" => config.idle_timeout = Duration::from_millis(number),
        "max_connections" => config.max_connections = number as usize,
        other => panic!("unknown setting {other}"),
    }
}

async fn count(mut arrivals: ArrivalReceiver, arrived: Arrived) {
    while let Some(arrival) = arrivals.recv().await {
        if let Arrival::Batch { from, .. } = arrival {
            *arrived.lock().unwrap().entry(from.to_string()).or_default() += 1;
        }
    }
}

async fn send(mut lines: mpsc::Receiver<String>, mut control: OwnedWriteHalf) {
    while let Some(line) = lines.recv().await {
        // The test may be over.
        let _ = control.write_all(format!("{line}\n").as_bytes()).await;
    }
}

impl OtherProcess {
    async fn answer(&self, answer: impl std::fmt::Display) {
        self.lines.send(format!("answer {answer}")).await.unwrap();
    }

    async fn obey(&mut self, line: &str) {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        match command {
            "disconnect" => self.disconnect_at_random(rest),
            "disconnects" => self.answer(self.disconnects.load(Relaxed)).await,
            "aim" => self.target = Some(from_hex(rest)),
            "write" => self.write(rest),
            "descriptor" => self.answer(to_hex(&self.node.descriptor)).await,
            "retries" => self.answer(self.total("baton_transfer_retries_total")).await,
            "panics" => self.answer(self.total("baton_process_task_panics_total")).await,
            "usage" => self.answer(usage()).await,
            "arrivals" => self.answer(self.arrivals(rest)).await,
            "grant" => self.answer(self.grant(rest)).await,
            "revoke" => self.answer(self.revoke(rest).await).await,
            "fill" => self.answer(self.fill(rest)).await,
            "holds" => self.answer(self.holds(rest)).await,
            "crowd" => {
                let descriptors = self.crowd.gather(rest).await;
                self.answer(descriptors).await;
            }
            "crowd-writes" => self.answer(self.crowd.write(self.target.as_ref().unwrap()).await).await,
            "write-to-all" => self.answer(crate::crowd::write_to_all(&self.node, rest).await).await,
            other => panic!("unknown command {other}"),
        }
    }

    /// Again and again, for good.
    fn disconnect_at_random(&self, arguments: &str) {
        let mut words = arguments.split(' ');
        let mut random = Random::new(number(&mut words));
        let pause_us = 1000 * number(&mut words)..1000 * number(&mut words);
        let engine = self.node.engine.clone();
        let disconnects = Arc::clone(&self.disconnects);
        tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(Duration::from_micros(random.within(pause_us.clone()))).await;
                engine.disconnect();
                disconnects.fetch_add(1, Relaxed);
            }
        });
    }

    fn arrivals(&self, writer: &str) -> u64 {
        self.arrived.lock().unwrap().get(writer).copied().unwrap_or(0)
    }

    /// The sum of a counter's lines in the page of metrics.
    fn total(&self, counter: &str) -> u64 {
        let page = self.telemetry.render();
        let lines = page.lines().filter(|line| line.starts_with(counter));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }

    fn write(&self, arguments: &str) {
        let mut words = arguments.split(' ');
        let tag = number(&mut words);
        let grant = GrantId(number(&mut words));
        let spans: Vec<SpanPair> = words.map(parse_span).collect();
        for span in &spans {
            self.node.memory.fill(span.local_offset, span.len, tag, span.remote_offset);
        }
        let lines = self.lines.clone();
        let options = BatchOptions::new(Instant::now() + LONG).tag(tag);
        let batch = self.node.engine.write(self.node.segment, self.target.as_ref().unwrap(), grant, spans, options);
        tokio::task::spawn_local(async move {
            // The test may be over.
            let _ = lines.send(format!("outcome {tag} {}", describe(batch.await))).await;
        });
    }

    fn grant(&self, arguments: &str) -> &'static str {
        let mut words = arguments.split(' ');
        let id = GrantId(number(&mut words));
        let node = words.next().unwrap();
        let generation = Generation(number(&mut words));
        let writer = (node != "-").then(|| NodeStart { node: NodeId::new(node).unwrap(), generation });
        let ranges = vec![number(&mut words)..number(&mut words)];
        let expires = Instant::now() + Duration::from_millis(number(&mut words));
        let segment = self.node.segment;
        self.node.engine.grant(GrantSpec { id, segment, ranges, writer, expires }).unwrap();
        "granted"
    }

    async fn revoke(&self, id: &str) -> &'static str {
        self.node.engine.revoke(GrantId(id.parse().unwrap())).await;
        "revoked"
    }

    fn fill(&self, arguments: &str) -> &'static str {
        let mut words = arguments.split(' ');
        let tag = number(&mut words);
        let start = number(&mut words);
        let end = number(&mut words);
        self.node.memory.fill(start, end - start, tag, start);
        "filled"
    }

    fn holds(&self, arguments: &str) -> bool {
        let mut words = arguments.split(' ');
        let tag = number(&mut words);
        let start = number(&mut words);
        let end = number(&mut words);
        self.node.memory.bytes(start..end) == pattern(tag, start..end)
    }
}

fn number<'a>(words: &mut impl Iterator<Item = &'a str>) -> u64 {
    words.next().unwrap().parse().unwrap()
}

fn describe(result: Result<BatchReport, TransferError>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "ok".to_owned())
}

fn parse_span(text: &str) -> SpanPair {
    let numbers: Vec<u64> = text.split(':').map(|number| number.parse().unwrap()).collect();
    SpanPair { local_offset: numbers[0], remote_offset: numbers[1], len: numbers[2] }
}

fn usage() -> String {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    format!("{} {files}", kib << 10)
}

/// A descriptor as it travels to another process.
pub fn to_hex(descriptor: &SegmentDescriptor) -> String {
    descriptor.encode().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// As [`to_hex`] wrote it.
pub fn from_hex(hex: &str) -> SegmentDescriptor {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    let bytes: Vec<u8> = hex.as_bytes().chunks(2).map(byte).collect();
    SegmentDescriptor::decode(&bytes).unwrap()
}
