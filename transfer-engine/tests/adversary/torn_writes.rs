//! Batches of random spans while connections die: at the moment of each notification every byte is
//! where it belongs, and no other byte has changed.

use std::time::{Duration, Instant};

use baton_transfer_engine::{Arrival, SpanPair, TransportChoice};
use baton_types::GrantId;

use crate::node::{Node, config};
use crate::pattern::{Random, fill};
use crate::peer::{Outcome, Peer};
use crate::proxy::Proxy;

/// Batches that are under way at the same time, each in a range of its own.
const SLOTS: u64 = 8;
const MAX_SPANS: u64 = 40;

/// How much is written, and how often it is disturbed.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// Batches that are to complete.
    pub batches: u64,
    /// Most bytes of a batch.
    pub slot_bytes: u64,
    /// Milliseconds from one disconnection by the writer to the next.
    pub disconnect_ms: (u64, u64),
}

impl Scale {
    /// What a machine does in half a minute.
    pub const FULL: Self = Self { batches: 10_000, slot_bytes: 256 << 10, disconnect_ms: (1, 8) };

    /// The writer keeps the bytes of a batch in another order, with gaps.
    const fn local_slot_bytes(self) -> u64 {
        2 * self.slot_bytes
    }
}

/// One range of the owner's memory.
struct Slot {
    start: u64,
    bytes: u64,
    grant: GrantId,
    /// The batch under way.
    tag: u64,
    spans: Vec<SpanPair>,
    arrived: bool,
    /// What the range held before it.
    before: Vec<u8>,
}

impl Slot {
    /// What the range holds once the batch is complete.
    fn after(&self) -> Vec<u8> {
        let mut after = self.before.clone();
        for span in &self.spans {
            let at = (span.remote_offset - self.start) as usize;
            fill(&mut after[at..at + span.len as usize], self.tag, span.remote_offset);
        }
        after
    }

    fn now(&self, owner: &Node) -> Vec<u8> {
        owner.memory.bytes(self.start..self.start + self.bytes)
    }

    /// At the notification.
    fn verify(&mut self, owner: &Node) {
        assert!(!self.arrived, "batch {} arrived twice", self.tag);
        self.arrived = true;
        let after = self.after();
        let now = self.now(owner);
        if let Some(at) = after.iter().zip(&now).position(|(expected, found)| expected != found) {
            let of = self
                .spans
                .iter()
                .any(|span| (span.remote_offset..span.remote_offset + span.len).contains(&(self.start + at as u64)));
            panic!("batch {}: byte {at} of its range is wrong; inside its spans: {of}; {:?}", self.tag, self.spans);
        }
    }

    /// After a failure and a fence: each byte is as before or as it was to be.
    fn settle(&mut self, owner: &Node) {
        let after = self.after();
        let now = self.now(owner);
        let allowed =
            self.before.iter().zip(&after).zip(&now).all(|((old, new), now)| now == new || now == old && !self.arrived);
        assert!(allowed, "batch {} failed and left bytes that are neither its own nor the earlier ones", self.tag);
        self.before = now;
    }
}

/// Random spans of a slot: apart on the remote side, in any order and with gaps on the local one.
fn plan(random: &mut Random, slot: u64, scale: Scale) -> Vec<SpanPair> {
    let max_bits = 1 + u64::from(scale.slot_bytes.ilog2());
    let count = random.within(0..MAX_SPANS + 1);
    let max_bits = random.within(1..max_bits);
    let mut lengths = Vec::new();
    let mut at = random.within(0..scale.slot_bytes / 64);
    for _ in 0..count {
        let len = random.of_any_size(max_bits);
        if at + len > scale.slot_bytes {
            break;
        }
        lengths.push((slot * scale.slot_bytes + at, len));
        at += len + random.within(0..2) * random.of_any_size(max_bits);
    }
    random.shuffle(&mut lengths);
    let mut local_offset = slot * scale.local_slot_bytes();
    let place = |(remote_offset, len)| {
        local_offset += random.within(0..64);
        let span = SpanPair { local_offset, remote_offset, len };
        local_offset += len;
        span
    };
    lengths.into_iter().map(place).collect()
}

/// The whole test: an owner, here, and a writer in another process.
struct Run {
    scale: Scale,
    owner: Node,
    writer: Peer,
    random: Random,
    slots: Vec<Slot>,
    next: u64,
    complete: u64,
    failed: u64,
    /// Why the latest failed.
    failure: String,
    bytes: u64,
}

impl Run {
    async fn begin(scale: Scale, owner: Node, writer: Peer, random: Random) -> Self {
        let mut run = Self {
            scale,
            owner,
            writer,
            random,
            slots: Vec::new(),
            next: 1,
            complete: 0,
            failed: 0,
            failure: String::new(),
            bytes: 0,
        };
        for slot in 0..SLOTS {
            let start = slot * scale.slot_bytes;
            let bytes = scale.slot_bytes;
            let before = run.owner.memory.bytes(start..start + bytes);
            let grant = GrantId(0);
            let spans = Vec::new();
            run.slots.push(Slot { start, bytes, grant, tag: 0, spans, arrived: false, before });
            run.grant(slot as usize);
            run.start_batch(slot as usize).await;
        }
        run
    }

    fn grant(&mut self, slot: usize) {
        let Slot { start, bytes, .. } = self.slots[slot];
        self.slots[slot].grant = self.owner.grant(self.next, "w", start..start + bytes);
        self.next += 1;
    }

    async fn start_batch(&mut self, slot: usize) {
        let spans = plan(&mut self.random, slot as u64, self.scale);
        let state = &mut self.slots[slot];
        state.tag = self.next;
        state.spans = spans;
        state.arrived = false;
        self.next += 1;
        self.writer.write(state.tag, state.grant, &state.spans).await;
    }

    fn on_arrival(&mut self, arrival: &Arrival) {
        let Arrival::Batch { grant, tag, bytes, .. } = arrival else { panic!("{arrival:?}") };
        let slot = self.slots.iter_mut().find(|slot| slot.tag == *tag).expect("an arrival of a batch under way");
        assert_eq!((slot.grant, slot.spans.iter().map(|span| span.len).sum::<u64>()), (*grant, *bytes));
        slot.verify(&self.owner);
        self.complete += 1;
        self.bytes += bytes;
    }

    fn take_arrivals(&mut self) {
        while let Some(arrival) = self.owner.arrivals.try_recv() {
            self.on_arrival(&arrival);
        }
    }

    /// Takes the end of a batch; returns its slot.
    async fn on_outcome(&mut self, outcome: Outcome) -> usize {
        let slot = self.slots.iter().position(|slot| slot.tag == outcome.tag).expect("a batch under way");
        if outcome.is_ok() {
            self.take_arrivals();
            assert!(self.slots[slot].arrived, "batch {} is complete, but its owner has not heard of it", outcome.tag);
            let after = self.slots[slot].after();
            let now = self.slots[slot].now(&self.owner);
            assert!(after == now, "batch {} changed after it was complete", outcome.tag);
            self.slots[slot].before = after;
        } else {
            self.failed += 1;
            self.failure = outcome.result;
            self.owner.engine.revoke(self.slots[slot].grant).await;
            self.take_arrivals();
            self.slots[slot].settle(&self.owner);
            self.grant(slot);
        }
        slot
    }

    /// What is under way ends.
    async fn finish(&mut self) {
        for _ in 1..SLOTS {
            let outcome = self.writer.outcome().await;
            self.on_outcome(outcome).await;
        }
    }

    async fn report(&mut self, transport: TransportChoice, kills: u64, time: Duration) {
        let retries = self.writer.retries().await;
        let complete = self.complete;
        let failed = self.failed;
        let failure = &self.failure;
        let mib = self.bytes >> 20;
        println!(
            "torn writes over {transport}: {complete} batches complete, {mib} MiB, {failed} failed ({failure}), connections killed {kills} times, {retries} parts sent \
             again, {time:.1?}"
        );
        assert!(retries >= complete / 100, "too few batches were hit to show anything");
    }

    async fn step(&mut self) -> bool {
        tokio::select! {
            arrival = self.owner.arrivals.recv() => self.on_arrival(&arrival.unwrap()),
            outcome = self.writer.outcome() => {
                let slot = self.on_outcome(outcome).await;
                if self.complete >= self.scale.batches {
                    return false;
                }
                self.start_batch(slot).await;
            }
        }
        true
    }
}

/// Who kills connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Killer {
    /// A proxy, which only tcp can go through.
    Proxy,
    /// The writer itself, on any transport.
    Writer,
}

/// Batches until so many are complete.
pub async fn torn_writes(transport: TransportChoice, killer: Killer, scale: Scale) {
    let mut random = Random::from_environment("torn writes");
    let started = Instant::now();
    let owner = Node::start(config("o", transport), (SLOTS * scale.slot_bytes) as usize).await;
    let mut writer = Peer::start("w", transport, SLOTS * scale.local_slot_bytes()).await;
    let proxy = match killer {
        Killer::Proxy => Some(Proxy::before(&owner.descriptor, random.fork()).await),
        Killer::Writer => None,
    };
    let descriptor = proxy.as_ref().map_or_else(|| owner.descriptor.clone(), |proxy| proxy.via(&owner.descriptor));
    writer.aim(&descriptor).await;
    if killer == Killer::Writer {
        writer.disconnect_at_random(random.draw(), scale.disconnect_ms).await;
    }
    let mut run = Run::begin(scale, owner, writer, random).await;
    while run.step().await {
        assert!(run.failed <= scale.batches / 10, "{} batches failed, {} are complete", run.failed, run.complete);
    }
    run.finish().await;
    let kills = match &proxy {
        Some(proxy) => proxy.kills(),
        None => run.writer.disconnects().await,
    };
    run.report(transport, kills, started.elapsed()).await;
    assert!(kills >= scale.batches / 50, "too few failures to show anything");
    run.owner.stop().await;
}
