//! Mutated transcripts against a live owner over real sockets. It never panics, nothing lands
//! outside of the grant, and each connection is answered or closed in bounded time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_transfer_engine::{SegmentDescriptor, TransportChoice};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::node::LONG;
use crate::pattern::Random;
use crate::peer::Peer;
use crate::raw::{Raw, Reply, VERSION, commit, data, frame, hello, kind};

const SEGMENT_BYTES: u64 = 1 << 20;
const GRANTED: std::ops::Range<u64> = 64 << 10..128 << 10;
const GRANT: u64 = 1;
const UNTOUCHED: u64 = 78;
const CONNECT_MS: u64 = 1000;
const PROGRESS_MS: u64 = 500;
/// Within which the owner answers or closes, once nothing more comes: twice its progress timeout,
/// and room.
const ANSWER: Duration = Duration::from_secs(5);
/// Connections at the same time.
const TASKS: usize = 4;
/// By how much the owner's memory may grow.
const GROWTH: u64 = 16 << 20;
/// Numbers at which parsers err.
const EDGES: [u64; 12] = [0, 1, 7, 8, 255, 256, 8192, 8193, 4 << 20, u32::MAX as u64, u64::MAX - 1, u64::MAX];

/// An edge, or any number.
fn number(random: &mut Random) -> u64 {
    match random.within(0..3) {
        0 => random.draw(),
        1 => random.within(0..1 << 20),
        _ => EDGES[random.within(0..EDGES.len() as u64) as usize],
    }
}

/// Mostly what is right, sometimes any number.
fn mostly(random: &mut Random, right: u64) -> u64 {
    if random.once_in(8) { number(random) } else { right }
}

fn greeting(random: &mut Random) -> Vec<u8> {
    let version = mostly(random, u64::from(VERSION)) as u16;
    let connection = random.draw();
    let generation = mostly(random, 1);
    let target = mostly(random, 1);
    let name = if random.once_in(8) { "" } else { "fuzzer" };
    hello(version, connection, (name, generation), ("victim", target), 1)
}

/// Spans of the grant, as a rule.
fn spans(random: &mut Random) -> Vec<(u64, u32)> {
    let count = random.within(0..4);
    let span = |_| {
        let right = random.within(GRANTED.start..GRANTED.end - 2048);
        (mostly(random, right), mostly(random, 500) as u32)
    };
    (0..count).map(span).collect()
}

/// One part of a batch: heads, payloads and the trailer.
fn part(random: &mut Random) -> Vec<u8> {
    let batch = random.within(0..1000);
    let grant = mostly(random, GRANT);
    let segment = mostly(random, 0) as u32;
    let mut out = Vec::new();
    let mut bytes = 0;
    for _ in 0..random.within(0..3) {
        let spans = spans(random);
        let payload = spans.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        out.extend(data(batch, grant, segment, &spans));
        out.extend(vec![random.draw() as u8; payload.min(16 << 10) as usize]);
        bytes += payload;
    }
    let part = (mostly(random, 0) as u32, mostly(random, 1) as u32);
    out.extend(commit(batch, grant, segment, part, mostly(random, bytes)));
    out
}

fn other_frame(random: &mut Random) -> Vec<u8> {
    let first = number(random).to_be_bytes();
    let second = number(random).to_be_bytes();
    match random.within(0..3) {
        0 => frame(kind::CANCEL, &[first, second].concat()),
        1 => frame(kind::FENCE, &first),
        _ => frame(random.draw() as u8, &vec![random.draw() as u8; random.within(0..300) as usize]),
    }
}

/// What a connection says, not yet broken.
fn transcript(random: &mut Random) -> Vec<u8> {
    let mut out = greeting(random);
    for _ in 0..random.within(0..6) {
        let next = if random.once_in(4) { other_frame(random) } else { part(random) };
        out.extend(next);
    }
    out
}

/// One change, anywhere.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    let len = bytes.len() as u64;
    if len < 2 {
        return bytes.push(random.draw() as u8);
    }
    let at = random.within(0..len) as usize;
    let end = at + random.within(1..len - at as u64 + 1).min(64) as usize;
    match random.within(0..6) {
        0 => bytes[at] ^= 1 << random.within(0..8),
        1 => bytes[at..end].iter_mut().for_each(|byte| *byte = random.draw() as u8),
        2 => drop(bytes.drain(at..end)),
        3 => bytes.truncate(at),
        4 => {
            let copy = bytes[at..end].to_vec();
            bytes.splice(at..at, copy);
        }
        _ => {
            let edge = number(random).to_be_bytes();
            let width = (1usize << random.within(0..4)).min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&edge[8 - width..]);
        }
    }
}

/// Bytes of one connection.
fn case(random: &mut Random) -> Vec<u8> {
    let mut bytes = transcript(random);
    for _ in 0..random.within(0..4) {
        mutate(&mut bytes, random);
    }
    bytes
}

/// How often each kind of reply came.
type Replies = BTreeMap<&'static str, u64>;

/// Plays a case; returns when the owner has closed.
async fn play(owner: &SegmentDescriptor, bytes: &[u8], random: &mut Random, replies: &mut Replies) {
    let mut raw = Raw::connect(owner).await.unwrap();
    let piece = if random.once_in(4) { random.within(1..64) as usize } else { usize::MAX };
    for piece in bytes.chunks(piece.min(bytes.len().max(1))) {
        raw.send(piece).await;
    }
    if random.once_in(10) {
        return raw.reset();
    }
    raw.finish().await;
    loop {
        let reply = raw.reply_within(ANSWER).await;
        let reply = reply.unwrap_or_else(|| panic!("no answer and no end within {ANSWER:?} after {}", hex(bytes)));
        *replies.entry(name(&reply)).or_default() += 1;
        if reply == Reply::Closed {
            return;
        }
    }
}

fn name(reply: &Reply) -> &'static str {
    match reply {
        Reply::Welcome => "welcome",
        Reply::Reject(_) => "reject",
        Reply::Ack => "ack",
        Reply::Refuse(..) => "refuse",
        Reply::Fault(_) => "fault",
        Reply::Other => "other",
        Reply::Closed => "closed",
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn play_many(owner: SegmentDescriptor, mut random: Random, until: Instant) -> Replies {
    let mut replies = Replies::new();
    while Instant::now() < until {
        let bytes = case(&mut random);
        play(&owner, &bytes, &mut random, &mut replies).await;
    }
    replies
}

/// A few seconds of it, or minutes if `BATON_TEST_LONG` is set.
pub async fn mutated_transcripts(transport: TransportChoice) {
    let seconds = if std::env::var_os("BATON_TEST_LONG").is_some() { 180 } else { 4 };
    let mut random = Random::from_environment("fuzz");
    let settings = format!(" connect_timeout={CONNECT_MS} progress_timeout={PROGRESS_MS}");
    let mut victim = Peer::start_with("victim", transport, SEGMENT_BYTES, &settings).await;
    victim.fill(UNTOUCHED, 0..SEGMENT_BYTES).await;
    victim.grant(GRANT, ("fuzzer", 1), GRANTED, 10 * LONG).await;
    let descriptor = victim.descriptor().await;
    let before = victim.usage().await;
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        tasks.spawn(play_many(descriptor.clone(), random.fork(), until));
    }
    let mut replies = Replies::new();
    for (reply, count) in tasks.join_all().await.into_iter().flatten() {
        *replies.entry(reply).or_default() += count;
    }
    println!("fuzz over {transport}: {seconds} s, replies {replies:?}");
    for reply in ["welcome", "reject", "ack", "refuse", "fault", "closed"] {
        assert!(replies.get(reply).is_some_and(|count| *count >= 10), "the cases do not reach far: {reply}");
    }
    check(&mut victim, before.files, before.resident).await;
}

async fn check(victim: &mut Peer, files: u64, resident: u64) {
    assert_eq!(victim.ask("panics").await, "0");
    for range in [0..GRANTED.start, GRANTED.end..SEGMENT_BYTES] {
        assert!(victim.holds(UNTOUCHED, range).await, "bytes outside of the grant have changed");
    }
    assert!(!victim.holds(UNTOUCHED, GRANTED).await, "nothing has landed at all");
    let begun = Instant::now();
    while victim.usage().await.files > files {
        assert!(begun.elapsed() < ANSWER, "connections are left open");
        sleep(Duration::from_millis(50)).await;
    }
    let growth = victim.usage().await.resident.saturating_sub(resident);
    println!("fuzz: the victim holds {} KiB more", growth >> 10);
    assert!(growth <= GROWTH, "the victim's memory grew by {growth} bytes");
}
