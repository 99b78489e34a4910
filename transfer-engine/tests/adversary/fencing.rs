//! Writers that are stopped in mid-batch: their grants end at once, their ranges are used again,
//! and nothing lands there when they go on.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_transfer_engine::{Arrival, SpanPair, TransferEngine, TransportChoice};
use baton_types::GrantId;
use tokio::task::JoinSet;

use crate::node::{Memory, Node, config};
use crate::pattern::{Random, pattern};
use crate::peer::Peer;

/// How much is written, and what is asked of the machine.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// Long enough that the writer can be stopped in the middle of it.
    pub batch_bytes: u64,
    /// Writers that are stopped, independently of each other.
    pub writers: u64,
    /// How often each is stopped.
    pub rounds: usize,
    /// What the writer that is left alone writes at a time.
    pub other_bytes: u64,
    /// In which it gets that done, on a machine that is busy with all the others.
    pub other_limit: Duration,
    /// What it gets done meanwhile, at least.
    pub other_batches: u64,
}

impl Scale {
    /// For a machine of today.
    pub const FULL: Self = Self {
        batch_bytes: 64 << 20,
        writers: 4,
        rounds: 5,
        other_bytes: 1 << 20,
        other_limit: Duration::from_secs(1),
        other_batches: 100,
    };
}

/// A batch may be over before the writer stops; so often, another one is tried.
const TRIES: usize = 20;
/// Within which the ranges come back.
const FENCE_LIMIT: Duration = Duration::from_secs(2);
/// How long a range is watched after its writer goes on.
const WATCH: Duration = Duration::from_secs(2);
/// Tags of the writer that is left alone; those of the others are below.
const OTHER_TAGS: u64 = 1 << 32;

/// A writer that is stopped, and its range.
struct Victim {
    scale: Scale,
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

    fn range(&self) -> Range<u64> {
        self.start..self.start + self.scale.batch_bytes
    }

    fn reuse(&self, tag: u64) {
        self.memory.fill(self.start, self.scale.batch_bytes, tag, self.start);
    }

    fn holds(&self, tag: u64) -> bool {
        self.memory.bytes(self.range()) == pattern(tag, self.range())
    }

    /// One batch, its writer stopped, its grant ended. `None`: the batch was over before.
    async fn stop(&mut self) -> Option<Stop> {
        let before = self.next();
        let tag = self.next();
        self.reuse(before);
        let grant = (self.grants)(tag);
        let span = SpanPair { local_offset: 0, remote_offset: self.start, len: self.scale.batch_bytes };
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
        (landed < self.scale.batch_bytes).then_some(Stop { tag, revoked_in, landed })
    }

    /// Until some of the batch has landed: the range's first bytes are not what they were.
    async fn first_bytes(&self, before: u64) {
        let begin = pattern(before, self.start..self.start + 8);
        while self.memory.bytes(self.start..self.start + 8) == begin {
            tokio::task::yield_now().await;
        }
    }

    fn landed(&self, tag: u64) -> u64 {
        let found = self.memory.bytes(self.range());
        let full = pattern(tag, self.range());
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
            if stops.len() == self.scale.rounds {
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
async fn left_alone(mut owner: Node, mut peer: Peer, range: Range<u64>, end: Arc<AtomicBool>) -> (Node, Others) {
    let mut others = Others::default();
    let start = range.start;
    let len = range.end - range.start;
    let grant = owner.grant(OTHER_TAGS, "other", range.clone());
    while !end.load(Relaxed) {
        let tag = OTHER_TAGS + others.batches;
        let begun = Instant::now();
        peer.write(tag, grant, &[SpanPair { local_offset: 0, remote_offset: start, len }]).await;
        loop {
            let Arrival::Batch { tag: arrived, .. } = owner.arrival().await else { panic!("a grant expired") };
            if arrived == tag {
                break;
            }
            others.announced.insert(arrived);
        }
        assert!(owner.memory.bytes(range.clone()) == pattern(tag, range.clone()), "batch {tag} is not there");
        let outcome = peer.outcome().await;
        assert!(outcome.is_ok(), "{outcome:?}");
        others.slowest = others.slowest.max(begun.elapsed());
        others.batches += 1;
    }
    (owner, others)
}

async fn victim(owner: &Node, transport: TransportChoice, scale: Scale, index: u64, random: Random) -> Victim {
    let name = format!("w{index}");
    let start = index * scale.batch_bytes;
    let mut peer = Peer::start(&name, transport, scale.batch_bytes).await;
    peer.aim(&owner.descriptor).await;
    let granter = owner.granter(&name, start..start + scale.batch_bytes);
    let engine = owner.engine.clone();
    let memory = owner.memory.clone();
    // Tags and grants of a writer begin where those of the one before cannot come.
    Victim { scale, owner: engine, memory, grants: Box::new(granter), peer, random, start, next: (index + 1) << 16 }
}

pub async fn fencing(transport: TransportChoice, scale: Scale) {
    let mut random = Random::from_environment("fencing");
    let others_start = scale.writers * scale.batch_bytes;
    let others_range = others_start..others_start + scale.other_bytes;
    let owner = Node::start(config("o", transport), others_range.end as usize).await;
    let mut victims = JoinSet::new();
    for index in 0..scale.writers {
        victims.spawn(victim(&owner, transport, scale, index, random.fork()).await.run());
    }
    let mut other = Peer::start("other", transport, scale.other_bytes).await;
    other.aim(&owner.descriptor).await;
    let end = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::new();
    others.spawn(left_alone(owner, other, others_range, Arc::clone(&end)));
    let stops: Vec<Stop> = victims.join_all().await.into_iter().flatten().collect();
    end.store(true, Relaxed);
    let (owner, others) = others.join_next().await.unwrap().unwrap();
    report(transport, scale, &stops, &others);
    owner.stop().await;
}

fn report(transport: TransportChoice, scale: Scale, stops: &[Stop], others: &Others) {
    let slowest = stops.iter().map(|stop| stop.revoked_in).max().unwrap();
    let least = stops.iter().map(|stop| stop.landed).min();
    let most = stops.iter().map(|stop| stop.landed).max();
    println!(
        "fencing over {transport}: {} writers stopped in mid-batch, with {} to {} KiB of {} landed; slowest revoke {slowest:.1?}; another writer's {} batches \
         of {} KiB took at most {:.1?}",
        stops.len(),
        least.unwrap() >> 10,
        most.unwrap() >> 10,
        scale.batch_bytes >> 10,
        others.batches,
        scale.other_bytes >> 10,
        others.slowest,
    );
    assert_eq!(stops.len(), scale.writers as usize * scale.rounds);
    assert!(slowest <= FENCE_LIMIT, "a fence took {slowest:?}");
    assert!(stops.iter().all(|stop| stop.landed > 0), "stopped before the first byte");
    assert!(stops.iter().all(|stop| !others.announced.contains(&stop.tag)), "a fenced batch was announced");
    assert!(others.slowest <= scale.other_limit, "a writer that was left alone took {:?}", others.slowest);
    assert!(others.batches >= scale.other_batches, "only {} batches meanwhile", others.batches);
}
