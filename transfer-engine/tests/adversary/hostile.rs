//! Peers that lie, stall and flood. Each is refused, with a reason if it speaks the protocol at
//! all. The owner's memory stays bounded, and a well-behaved peer's batches complete all the while.

#![allow(unsafe_code)] // one write to memory that is the hostile peer's own

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_transfer_engine::{SegmentDescriptor, SpanPair, TransportChoice};
use baton_types::GrantId;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::node::LONG;
use crate::peer::{Peer, Usage};
use crate::raw::{Raw, Reply, SHM, VERSION, commit, copy, data, frame, hello, kind, refused, rejected, via};

const MIB: u64 = 1 << 20;
/// The well-behaved peer's range of the victim's memory.
const GOOD: std::ops::Range<u64> = 0..MIB;
/// The hostile peer's grant.
pub const GRANTED: std::ops::Range<u64> = 2 * MIB..3 * MIB;
const SEGMENT_BYTES: u64 = 4 * MIB;
/// Pattern of the memory that no peer may write.
const UNTOUCHED: u64 = 77;
/// Grants of the victim.
pub mod grant {
    pub const GOOD: u64 = 1;
    pub const HOSTILE: u64 = 2;
    pub const REVOKED: u64 = 3;
    pub const EXPIRED: u64 = 4;
    pub const OTHER_GENERATION: u64 = 5;
    pub const SOMEBODY_ELSES: u64 = 6;
    pub const UNKNOWN: u64 = 99;
}
/// Settings of the victim, milliseconds.
pub const CONNECT_MS: u64 = 1000;
pub const PROGRESS_MS: u64 = 500;
/// Upper bound on the growth of the victim's memory: 1,024 connections of at most 8 KiB of frame,
/// 16 KiB of scratch and 8 KiB of state.
const GROWTH_LIMIT: u64 = 32 * MIB;
/// How much slower the well-behaved peer's batches may be on average. The machine is busy with the
/// attack: the peer shares two cores with both sides of it.
const SLOWER: f64 = 10.0;
/// How often a series of quick attacks is run.
const REPEATS: usize = 20;
/// The longest that one of them may take.
const SLOWEST: Duration = Duration::from_secs(2);

/// An owner in another process, and a well-behaved peer of it in a third.
pub struct Scene {
    pub victim: Peer,
    pub descriptor: SegmentDescriptor,
    good: Option<Peer>,
    before: Usage,
    /// Of a batch of the well-behaved peer, when nothing else happens.
    calm: Duration,
    done: u64,
}

/// What the well-behaved peer did meanwhile.
struct Meanwhile {
    batches: u64,
    time: Duration,
    slowest: Duration,
}

impl Meanwhile {
    fn mean(&self) -> Duration {
        self.time / self.batches as u32
    }
}

impl Scene {
    pub async fn set(transport: TransportChoice) -> Self {
        let settings = format!(" connect_timeout={CONNECT_MS} progress_timeout={PROGRESS_MS}");
        let mut victim = Peer::start_with("victim", transport, SEGMENT_BYTES, &settings).await;
        victim.fill(UNTOUCHED, 0..SEGMENT_BYTES).await;
        victim.grant(grant::GOOD, ("good", 1), GOOD, LONG).await;
        victim.grant(grant::HOSTILE, ("hostile", 1), GRANTED, LONG).await;
        victim.grant(grant::REVOKED, ("hostile", 1), GRANTED, LONG).await;
        victim.grant(grant::EXPIRED, ("hostile", 1), GRANTED, Duration::from_millis(1)).await;
        victim.grant(grant::OTHER_GENERATION, ("hostile", 2), GRANTED, LONG).await;
        victim.grant(grant::SOMEBODY_ELSES, ("good", 1), GRANTED, LONG).await;
        victim.revoke(grant::REVOKED).await;
        let descriptor = victim.descriptor().await;
        let mut good = Peer::start("good", transport, MIB).await;
        good.aim(&descriptor).await;
        let before = victim.usage().await;
        let mut scene = Self { victim, descriptor, good: Some(good), before, calm: Duration::ZERO, done: 0 };
        let (calm, ()) = scene.meanwhile(async |_, _| sleep(Duration::from_millis(500)).await).await;
        (scene.calm, scene.before) = (calm.mean(), scene.victim.usage().await);
        scene
    }

    /// A connection of the hostile peer, after the handshake.
    pub async fn hostile(&self, connection: u64) -> Raw {
        Raw::open(&self.descriptor, connection, ("hostile", 1)).await
    }

    /// Runs an attack; then checks that it cost no other peer anything.
    pub async fn endures<T>(&mut self, what: &str, attack: impl AsyncFnOnce(&mut Peer, &SegmentDescriptor) -> T) -> T {
        let (meanwhile, result) = self.meanwhile(attack).await;
        self.check(what, &meanwhile).await;
        result
    }

    /// Has the well-behaved peer write as long as something else happens.
    async fn meanwhile<T>(&mut self, attack: impl AsyncFnOnce(&mut Peer, &SegmentDescriptor) -> T) -> (Meanwhile, T) {
        let end = Arc::new(AtomicBool::new(false));
        let good = steadily(self.good.take().unwrap(), self.done, Arc::clone(&end));
        let result = attack(&mut self.victim, &self.descriptor).await;
        end.store(true, Relaxed);
        let (good, meanwhile) = good.await.unwrap();
        self.good = Some(good);
        self.done += meanwhile.batches;
        (meanwhile, result)
    }

    async fn check(&mut self, what: &str, meanwhile: &Meanwhile) {
        let usage = self.victim.usage().await;
        let growth = usage.resident.saturating_sub(self.before.resident);
        println!(
            "{what}: the victim holds {} KiB more; a well-behaved peer's {} batches of 1 MiB took {:.1?} on average, {:.1?} at most (alone {:.1?})",
            growth >> 10,
            meanwhile.batches,
            meanwhile.mean(),
            meanwhile.slowest,
            self.calm,
        );
        assert!(growth <= GROWTH_LIMIT, "{what}: the victim's memory grew by {growth} bytes");
        assert!(meanwhile.slowest <= SLOWEST, "{what}: a batch took {:?}", meanwhile.slowest);
        assert!(meanwhile.mean().as_secs_f64() <= SLOWER * self.calm.as_secs_f64(), "{what}: {:?}", meanwhile.mean());
        let good = self.victim.arrivals("good").await;
        assert_eq!(good, self.done, "{what}: batches of the well-behaved peer");
        assert!(self.victim.holds(self.done, GOOD).await, "{what}: the well-behaved peer's bytes are not as written");
        for range in [GOOD.end..GRANTED.start, GRANTED.end..SEGMENT_BYTES] {
            assert!(self.victim.holds(UNTOUCHED, range).await, "{what}: bytes outside of any grant have changed");
        }
    }
}

/// Batch after batch, until it is told to end. Tags go on from `done`.
fn steadily(mut good: Peer, done: u64, end: Arc<AtomicBool>) -> JoinHandle<(Peer, Meanwhile)> {
    #[allow(clippy::disallowed_methods)] // a panic in it reaches the test with its end
    tokio::spawn(async move {
        let mut meanwhile = Meanwhile { batches: 0, time: Duration::ZERO, slowest: Duration::ZERO };
        while !end.load(Relaxed) || meanwhile.batches == 0 {
            let tag = done + meanwhile.batches + 1;
            let begun = Instant::now();
            good.write(tag, GrantId(grant::GOOD), &[SpanPair { local_offset: 0, remote_offset: 0, len: MIB }]).await;
            let outcome = good.outcome().await;
            assert!(outcome.is_ok(), "the well-behaved peer: {outcome:?}");
            meanwhile.batches += 1;
            meanwhile.time += begun.elapsed();
            meanwhile.slowest = meanwhile.slowest.max(begun.elapsed());
        }
        (good, meanwhile)
    })
}

/// Bytes of the memory that the hostile peer passes to the victim.
const PASSED: usize = 1 << 20;

/// Passes a page of slots, in which slot 0 holds token 1, and a segment.
fn pass_memory(raw: &Raw) -> [MemoryRegion; 2] {
    let [slots, segment] = [4096, PASSED].map(|bytes| MemoryRegion::allocate_shared(bytes).unwrap());
    // SAFETY: no other task knows of it yet.
    unsafe { slots.slice_mut(0..8) }.copy_from_slice(&1u64.to_ne_bytes());
    raw.send_with_file(&frame(kind::SLOTS, &4096u64.to_be_bytes()), slots.shared_file().unwrap());
    raw.send_with_file(&source(0, PASSED as u64), segment.shared_file().unwrap());
    [slots, segment]
}

fn source(segment: u32, bytes: u64) -> Vec<u8> {
    frame(kind::SOURCE, &[&segment.to_be_bytes()[..], &bytes.to_be_bytes()].concat())
}

/// A batch of one part, the way that the bytes go there.
async fn write_part(raw: &mut Raw, way: u8, (batch, grant, segment): (u64, u64, u32), spans: &[(u64, u32)]) {
    let bytes: u64 = spans.iter().map(|(_, len)| u64::from(*len)).sum();
    if way == SHM {
        let spans: Vec<_> = spans.iter().map(|&(offset, len)| (offset, len, 0)).collect();
        raw.send(&copy(batch, grant, segment, &spans)).await;
    } else {
        raw.send(&data(batch, grant, segment, spans)).await;
        raw.send(&vec![0xaa; bytes as usize]).await;
    }
    raw.send(&commit(batch, grant, segment, (0, 1), bytes)).await;
}

/// What it is, grant, segment, spans of offset and length, and the reason for which it is refused.
type Lie<'a> = (&'a str, u64, u32, &'a [(u64, u32)], u8);

/// Writes that no grant covers: each refused for its own reason, nothing lands, and the connection
/// goes on.
pub async fn lies_about_grants(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let way = via(&scene.descriptor);
    let mut raw = scene.hostile(1).await;
    let files = (way == SHM).then(|| pass_memory(&raw));
    let start = GRANTED.start;
    let end = GRANTED.end;
    let id = grant::HOSTILE;
    let lies: &[Lie] = &[
        ("before the grant", id, 0, &[(start - 1, 2)], refused::OUT_OF_RANGE),
        ("past the grant", id, 0, &[(end - 1, 2)], refused::OUT_OF_RANGE),
        ("elsewhere", id, 0, &[(0, 4096)], refused::OUT_OF_RANGE),
        ("one of two", id, 0, &[(start, 4096), (end, 1)], refused::OUT_OF_RANGE),
        ("around the end of all numbers", id, 0, &[(u64::MAX, 4096)], refused::OUT_OF_RANGE),
        ("past the segment", id, 0, &[(SEGMENT_BYTES, 1)], refused::OUT_OF_RANGE),
        ("another segment", id, 1, &[(start, 1)], refused::WRONG_SEGMENT),
        ("unknown grant", grant::UNKNOWN, 0, &[(start, 1)], refused::UNKNOWN_GRANT),
        ("revoked grant", grant::REVOKED, 0, &[(start, 1)], refused::REVOKED),
        ("expired grant", grant::EXPIRED, 0, &[(start, 1)], refused::EXPIRED),
        ("a grant of another generation", grant::OTHER_GENERATION, 0, &[(start, 1)], refused::WRONG_WRITER),
        ("another writer's grant", grant::SOMEBODY_ELSES, 0, &[(start, 1)], refused::WRONG_WRITER),
    ];
    scene
        .endures("lies about grants", async |victim, _| {
            victim.fill(UNTOUCHED, GRANTED).await;
            for (batch, (what, grant, segment, spans, reason)) in
                lies.iter().cycle().take(REPEATS * lies.len()).enumerate()
            {
                write_part(&mut raw, way, (batch as u64, *grant, *segment), spans).await;
                let reply = raw.reply().await;
                assert!(matches!(&reply, Reply::Refuse(code, _) if code == reason), "{what}: {reply:?}");
                // A trailer alone is a notification, which needs the grant as well.
                raw.send(&commit((1 << 32) + batch as u64, *grant, *segment, (0, 1), 0)).await;
                let reply = raw.reply().await;
                let in_range = *reason == refused::OUT_OF_RANGE;
                assert!(
                    in_range && reply == Reply::Ack || matches!(reply, Reply::Refuse(code, _) if code == *reason),
                    "{what}"
                );
            }
            assert!(victim.holds(UNTOUCHED, GRANTED).await, "refused bytes have landed");
            // What is granted does land: the lies were refused for their own sake.
            write_part(&mut raw, way, (1 << 40, id, 0), &[(start, 4096)]).await;
            assert_eq!(raw.reply().await, Reply::Ack);
            assert!(!victim.holds(UNTOUCHED, GRANTED).await, "granted bytes have not landed");
        })
        .await;
    drop(files);
}

/// Connections under a wrong name, generation or version.
pub async fn lies_in_the_handshake(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let way = via(&scene.descriptor);
    let _newer = Raw::open(&scene.descriptor, 1, ("hostile", 5)).await;
    let me = ("hostile", 5);
    let lies = [
        ("an earlier generation of the target", hello(VERSION, 2, me, ("victim", 0), way), rejected::STALE_TARGET),
        ("a later generation of the target", hello(VERSION, 2, me, ("victim", 2), way), rejected::STALE_TARGET),
        (
            "an earlier generation of itself",
            hello(VERSION, 2, ("hostile", 4), ("victim", 1), way),
            rejected::STALE_WRITER,
        ),
        ("another target", hello(VERSION, 2, me, ("another", 1), way), rejected::WRONG_NODE),
        ("a later version", hello(VERSION + 1, 2, me, ("victim", 1), way), rejected::VERSION),
        ("an earlier version", hello(VERSION - 1, 2, me, ("victim", 1), way), rejected::VERSION),
        ("no version", hello(0, 2, me, ("victim", 1), way), rejected::VERSION),
        ("a number that is in use", hello(VERSION, 1, me, ("victim", 1), way), rejected::IN_USE),
    ];
    scene
        .endures("lies in the handshake", async |_, descriptor| {
            for (what, bytes, code) in lies.iter().cycle().take(REPEATS * lies.len()) {
                let mut raw = Raw::connect(descriptor).await.unwrap();
                raw.send(bytes).await;
                assert_eq!(raw.reply().await, Reply::Reject(*code), "{what}");
                assert_eq!(raw.reply().await, Reply::Closed, "{what}");
            }
        })
        .await;
}

/// Frames that are none, or that promise what no peer can keep: each ends its connection with a
/// message.
pub async fn broken_frames(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let way = via(&scene.descriptor);
    let start = GRANTED.start;
    let id = grant::HOSTILE;
    let many = vec![(start, 1); 257];
    let mut longest = data(1, id, 0, &[(start, 1)]);
    longest[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut broken = vec![
        ("a frame of 4 GiB", longest, "4294967295 bytes"),
        ("a payload of 4 GiB", data(1, id, 0, &[(start, u32::MAX)]), "malformed"),
        ("257 spans", data(1, id, 0, &many), "malformed"),
        ("half a span", frame(kind::DATA, &[0; 30]), "malformed"),
        ("a trailer of more bytes than came", commit(1, id, 0, (0, 1), u64::MAX), "0 came"),
        ("part 1 of 1", commit(1, id, 0, (1, 1), 0), "malformed"),
        ("no parts", commit(1, id, 0, (0, 0), 0), "malformed"),
        ("a short trailer", frame(kind::COMMIT, &[0; 43]), "malformed"),
        ("a long trailer", frame(kind::COMMIT, &[0; 45]), "malformed"),
        ("an empty cancel", frame(kind::CANCEL, &[]), "malformed"),
        ("a fence of itself", frame(kind::FENCE, &9u64.to_be_bytes()), "fence itself"),
        ("an unknown kind", frame(200, b"what"), "unknown kind 200"),
        ("a second handshake", hello(VERSION, 9, ("hostile", 1), ("victim", 1), way)[8..].to_vec(), "unknown kind 1"),
        ("unknown flags", vec![kind::DATA, 2, 0, 0, 0, 0, 0, 0], "unknown flags"),
        ("text", b"GET / HTTP/1.1\r\n\r\n".to_vec(), "unknown flags"),
    ];
    let data = data(1, id, 0, &[(start, 1)]);
    let copy = copy(1, id, 0, &[(start, 1, 0)]);
    if way == SHM {
        broken.extend([
            ("payload on a connection over shm", data, "no place"),
            ("a copy from nowhere", copy, "was not passed"),
            ("slots without a file", frame(kind::SLOTS, &4096u64.to_be_bytes()), "without a file"),
            ("a segment without a file", source(0, 4096), "without a file"),
        ]);
    } else {
        broken.push(("a copy on a connection over tcp", copy, "no place"));
    }
    scene
        .endures("broken frames", async |_, descriptor| {
            for (what, bytes, expected) in broken.iter().cycle().take(REPEATS * broken.len()) {
                let mut raw = Raw::open(descriptor, 9, ("hostile", 1)).await;
                raw.send(bytes).await;
                let reply = raw.reply().await;
                assert!(matches!(&reply, Reply::Fault(why) if why.contains(expected)), "{what}: {reply:?}");
                assert_eq!(raw.reply().await, Reply::Closed, "{what}");
            }
        })
        .await;
}

/// How long the victim takes to close a connection on which nothing sensible comes.
async fn closes_within(mut raw: Raw, limit: Duration, what: &str) {
    let begun = Instant::now();
    loop {
        match raw.reply_within(limit.saturating_sub(begun.elapsed())).await {
            Some(Reply::Closed) => return println!("{what}: closed after {:.1?}", begun.elapsed()),
            Some(_) => {}
            None => panic!("{what}: still open after {:?}", begun.elapsed()),
        }
    }
}

/// Sends byte after byte, with a pause in front of each, until all are sent or the victim closes.
async fn closes_while_it_drips(mut raw: Raw, bytes: Vec<u8>, pause: Duration, limit: Duration, what: &str) {
    let begun = Instant::now();
    for byte in bytes {
        raw.send(&[byte]).await;
        match raw.reply_within(pause).await {
            Some(Reply::Closed) => return println!("{what}: closed after {:.1?}", begun.elapsed()),
            _ => assert!(begun.elapsed() < limit, "{what}: still open after {:?}", begun.elapsed()),
        }
    }
    closes_within(raw, limit.saturating_sub(begun.elapsed()), what).await;
}

/// Peers that take for ever.
pub async fn slow_peers(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let way = via(&scene.descriptor);
    let greeting = Duration::from_millis(CONNECT_MS + 500);
    // The victim waits twice as long as a writer would.
    let patience = Duration::from_millis(2 * PROGRESS_MS + 500);
    let pause = Duration::from_millis(50);
    scene
        .endures("slow peers", async |victim, descriptor| {
            let connect = async || Raw::connect(descriptor).await.unwrap();
            let open = async |connection| Raw::open(descriptor, connection, ("hostile", 1)).await;
            if way == SHM {
                tokio::join!(
                    closes_within(connect().await, greeting, "silence"),
                    closes_while_it_drips(
                        connect().await,
                        hello(VERSION, 1, ("hostile", 1), ("victim", 1), way),
                        pause,
                        greeting,
                        "a handshake byte by byte"
                    ),
                    closes_while_it_drips(
                        open(2).await,
                        copy(1, grant::HOSTILE, 0, &[])[..30].to_vec(),
                        pause,
                        patience,
                        "a head byte by byte"
                    ),
                );
                return;
            }
            let slow = hello(VERSION, 1, ("hostile", 1), ("victim", 1), way);
            let endless = data(1, grant::HOSTILE, 0, &[(GRANTED.start, 4096)]);
            let mut payload = open(4).await;
            payload.send(&endless).await;
            payload.send(&[1; 1000]).await;
            let mut ended = open(5).await;
            victim.grant(200, ("hostile", 1), GRANTED, LONG).await;
            ended.send(&data(1, 200, 0, &[(GRANTED.start, 64 << 10)])).await;
            victim.revoke(200).await;
            tokio::join!(
                closes_within(connect().await, greeting, "silence"),
                closes_while_it_drips(connect().await, slow, pause, greeting, "a handshake byte by byte"),
                closes_while_it_drips(open(2).await, endless[..30].to_vec(), pause, patience, "a head byte by byte"),
                closes_within(payload, patience, "a payload that stops"),
                closes_while_it_drips(
                    ended,
                    vec![1; 1000],
                    pause,
                    patience,
                    "a payload byte by byte after its grant's end"
                ),
            );
        })
        .await;
}

/// A peer that never reads what it is told.
pub async fn deaf_peer(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let mut raw = scene.hostile(1).await;
    scene
        .endures("a deaf peer", async |_, _| {
            let lie: Vec<u8> = (0..1000).flat_map(|batch| commit(batch, grant::UNKNOWN, 0, (0, 1), 0)).collect();
            let begun = Instant::now();
            // Each of these is answered with about fifty bytes.
            while raw.try_send(&lie).await.is_ok() {
                assert!(begun.elapsed() < Duration::from_secs(10), "the victim still takes what it cannot answer");
            }
        })
        .await;
}

/// Files that are not what the frames say: mapping them must not crash the victim.
pub async fn broken_memory(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let sealed = MemoryRegion::allocate_shared(4096).unwrap();
    let plain = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let sealed = sealed.shared_file().unwrap();
    let plain = plain.as_fd();
    let slots = |bytes: u64| frame(kind::SLOTS, &bytes.to_be_bytes());
    let broken = [
        ("slots longer than their file", slots(8192), sealed),
        ("slots of no bytes", slots(0), sealed),
        ("slots of 4 GiB", slots(4 << 30), sealed),
        ("slots in a file that can shrink", slots(4096), plain),
        ("a segment longer than its file", source(0, 4097), sealed),
        ("a segment of no bytes", source(0, 0), sealed),
        ("a segment of all bytes there are", source(0, u64::MAX), sealed),
        ("a segment in a file that can shrink", source(0, 4096), plain),
    ];
    scene
        .endures("broken memory", async |_, descriptor| {
            for (what, bytes, file) in broken.iter().cycle().take(REPEATS * broken.len()) {
                let mut raw = Raw::open(descriptor, 9, ("hostile", 1)).await;
                raw.send_with_file(bytes, *file);
                let reply = raw.reply().await;
                assert!(
                    matches!(&reply, Reply::Fault(why) if why.contains("bytes") || why.contains("seal")),
                    "{what}: {reply:?}"
                );
                assert_eq!(raw.reply().await, Reply::Closed, "{what}");
            }
            for (what, from, len) in
                [("past its end", PASSED as u64, 1), ("around the end of all numbers", u64::MAX, 2)]
            {
                let mut raw = Raw::open(descriptor, 9, ("hostile", 1)).await;
                let _memory = pass_memory(&raw);
                raw.send(&copy(1, grant::HOSTILE, 0, &[(GRANTED.start, len, from)])).await;
                let reply = raw.reply().await;
                assert!(matches!(&reply, Reply::Fault(why) if why.contains("COPY of")), "{what}: {reply:?}");
            }
        })
        .await;
}
