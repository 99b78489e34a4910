//! Writers that are stopped in mid-batch: their grants end at once, their ranges are used again, and nothing lands there when they go on.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_transfer_engine::{Arrival, SpanPair, TransferEngine, TransportChoice};
use baton_types::GrantId;
use tokio::task::JoinSet;

use crate::node::{Memory, Node, config};
use crate::pattern::{Random, pattern};
use crate::peer::Peer;

/// Long enough that the writer can be stopped in the middle of it.
const BATCH_BYTES: u64 = 64 << 20;
/// Writers that are stopped, independently of each other.
const WRITERS: u64 = 4;
/// How often each is stopped.
const ROUNDS: usize = 5;
/// A batch may be over before the writer stops; so often, another one is tried.
const TRIES: usize = 20;
/// Within which the ranges come back.
const FENCE_LIMIT: Duration = Duration::from_secs(2);
/// How long a range is watched after its writer goes on.
const WATCH: Duration = Duration::from_secs(2);
/// What the writer that is left alone writes at a time.
const OTHER_BYTES: u64 = 1 << 20;
/// In which it gets that done, on a machine that is busy with all the others.
const OTHER_LIMIT: Duration = Duration::from_secs(1);
/// Tags of the writer that is left alone; those of the others are below.
const OTHER_TAGS: u64 = 1 << 32;

/// A writer that is stopped, and its range.
struct Victim {
    owner: TransferEngine,
    memory: Memory,
    grants: Box<dyn Fn(u64) -> GrantId + Send + Sync>,
    peer: Peer,
    random: Random,
    start: u64,
    next: u64,
}

/// What one stop came to.
struct Stop {
    tag: u64,
    revoked_in: Duration,
    landed: u64,
}

impl Victim {
    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn reuse(&self, tag: u64) {
        self.memory.fill(self.start, BATCH_BYTES, tag, self.start);
    }

    fn holds(&self, tag: u64) -> bool {
        self.memory.bytes(self.start..self.start + BATCH_BYTES) == pattern(tag, self.start..self.start + BATCH_BYTES)
    }

    /// One batch, its writer stopped, its grant ended. `None`: the batch was over before.
    async fn stop(&mut self) -> Option<Stop> {
        let (before, tag) = (self.next(), self.next());
        self.reuse(before);
        let grant = (self.grants)(tag);
        let span = SpanPair { local_offset: 0, remote_offset: self.start, len: BATCH_BYTES };
        self.peer.write(tag, grant, &[span]).await;
        self.first_bytes(before).await;
        tokio::time::sleep(Duration::from_micros(self.random.within(0..30_000))).await;
        tokio::task::block_in_place(|| self.peer.freeze());
        // What the network still holds lands meanwhile, or does not.
        tokio::time::sleep(Duration::from_millis(self.random.within(0..2) * self.random.within(0..50))).await;

        let asked = Instant::now();
        self.owner.revoke(grant).await;
        let revoked_in = asked.elapsed();
        let landed = tokio::task::block_in_place(|| self.landed(tag));
        (landed < BATCH_BYTES).then_some(Stop { tag, revoked_in, landed })
    }

    /// Until some of the batch has landed: the range's first bytes are not what they were.
    async fn first_bytes(&self, before: u64) {
        let begin = pattern(before, self.start..self.start + 8);
        while self.memory.bytes(self.start..self.start + 8) == begin {
            tokio::task::yield_now().await;
        }
    }

    fn landed(&self, tag: u64) -> u64 {
        let (found, full) = (
            self.memory.bytes(self.start..self.start + BATCH_BYTES),
            pattern(tag, self.start..self.start + BATCH_BYTES),
        );
        let words = found.chunks_exact(8).zip(full.chunks_exact(8));
        8 * words.filter(|(found, full)| found == full).count() as u64
    }

    /// The range is used for something else, and the writer goes on.
    async fn go_on(&mut self, fenced: bool) {
        let reused = self.next();
        self.reuse(reused);
        self.peer.thaw();
        let outcome = self.peer.outcome().await;
        if fenced {
            assert!(outcome.result.contains("revoked"), "{outcome:?}");
            let until = Instant::now() + WATCH;
            while Instant::now() < until {
                assert!(
                    tokio::task::block_in_place(|| self.holds(reused)),
                    "bytes of {outcome:?} landed after the fence"
                );
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }

    async fn run(mut self) -> Vec<Stop> {
        let mut stops = Vec::new();
        for _ in 0..TRIES {
            let stop = self.stop().await;
            self.go_on(stop.is_some()).await;
            stops.extend(stop);
            if stops.len() == ROUNDS {
                return stops;
            }
        }
        panic!("in {TRIES} tries only {} batches were under way when their writer stopped", stops.len());
    }
}

/// What the writer that is left alone has done.
#[derive(Default)]
struct Others {
    batches: u64,
    slowest: Duration,
    /// Tags of the other writers' batches that were announced.
    announced: HashSet<u64>,
}

/// Writes, batch after batch, until it is told to end.
async fn left_alone(mut owner: Node, mut peer: Peer, start: u64, end: Arc<AtomicBool>) -> (Node, Others) {
    let mut others = Others::default();
    let grant = owner.grant(OTHER_TAGS, "other", start..start + OTHER_BYTES);
    while !end.load(Relaxed) {
        let tag = OTHER_TAGS + others.batches;
        let begun = Instant::now();
        peer.write(tag, grant, &[SpanPair { local_offset: 0, remote_offset: start, len: OTHER_BYTES }]).await;
        loop {
            let Arrival::Batch { tag: arrived, .. } = owner.arrival().await else { panic!("a grant expired") };
            if arrived == tag {
                break;
            }
            others.announced.insert(arrived);
        }
        let range = start..start + OTHER_BYTES;
        assert!(owner.memory.bytes(range.clone()) == pattern(tag, range), "batch {tag} is not there");
        let outcome = peer.outcome().await;
        assert!(outcome.is_ok(), "{outcome:?}");
        others.slowest = others.slowest.max(begun.elapsed());
        others.batches += 1;
    }
    (owner, others)
}

async fn victim(owner: &Node, transport: TransportChoice, index: u64, random: Random) -> Victim {
    let (name, start) = (format!("w{index}"), index * BATCH_BYTES);
    let mut peer = Peer::start(&name, transport, BATCH_BYTES).await;
    peer.aim(&owner.descriptor).await;
    let granter = owner.granter(&name, start..start + BATCH_BYTES);
    let (engine, memory) = (owner.engine.clone(), owner.memory.clone());
    // Tags and grants of a writer begin where those of the one before cannot come.
    Victim { owner: engine, memory, grants: Box::new(granter), peer, random, start, next: (index + 1) << 16 }
}

pub async fn fencing(transport: TransportChoice) {
    let mut random = Random::from_environment("fencing");
    let owner = Node::start(config("o", transport), (WRITERS * BATCH_BYTES + OTHER_BYTES) as usize).await;
    let mut victims = JoinSet::new();
    for index in 0..WRITERS {
        victims.spawn(victim(&owner, transport, index, random.fork()).await.run());
    }
    let mut other = Peer::start("other", transport, OTHER_BYTES).await;
    other.aim(&owner.descriptor).await;
    let end = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::new();
    others.spawn(left_alone(owner, other, WRITERS * BATCH_BYTES, Arc::clone(&end)));
    let stops: Vec<Stop> = victims.join_all().await.into_iter().flatten().collect();
    end.store(true, Relaxed);
    let (owner, others) = others.join_next().await.unwrap().unwrap();
    report(transport, &stops, &others);
    owner.stop().await;
}

fn report(transport: TransportChoice, stops: &[Stop], others: &Others) {
    let slowest = stops.iter().map(|stop| stop.revoked_in).max().unwrap();
    let (least, most) = (stops.iter().map(|stop| stop.landed).min(), stops.iter().map(|stop| stop.landed).max());
    println!(
        "fencing over {transport}: {} writers stopped in mid-batch, with {} to {} KiB of {} landed; slowest revoke {slowest:.1?}; another writer's {} batches \
         of 1 MiB took at most {:.1?}",
        stops.len(),
        least.unwrap() >> 10,
        most.unwrap() >> 10,
        BATCH_BYTES >> 10,
        others.batches,
        others.slowest,
    );
    assert_eq!(stops.len(), WRITERS as usize * ROUNDS);
    assert!(slowest <= FENCE_LIMIT, "a fence took {slowest:?}");
    assert!(stops.iter().all(|stop| stop.landed > 0), "stopped before the first byte");
    assert!(stops.iter().all(|stop| !others.announced.contains(&stop.tag)), "a fenced batch was announced");
    assert!(others.slowest <= OTHER_LIMIT, "a writer that was left alone took {:?}", others.slowest);
    assert!(others.batches >= 100, "only {} batches meanwhile", others.batches);
}
