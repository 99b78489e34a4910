//! Prefixes on their way here: a lease and one read per layer from another node, or one read per
//! layer from the SSD.

use std::time::{Duration, Instant};

use baton_scheduler::{FetchedBytes, LEASE_DEADLINE, MAX_PREFIX_WAIT_PER_STEP, RequestKey, prefix_patience};
use baton_types::{
    BlockId, ErrorKind, FetchSource, GrantId, LeaseRelease, LeaseReply, LeaseRequest, NodeStart, Refused,
};

use super::{Core, Node, with_core};
use crate::cluster::wire::{Event, Input, Start, Wire};
use crate::faults::FaultKind;

/// Where a prefix comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Node(Start),
    Ssd,
}

/// One prefix on its way.
#[derive(Debug)]
pub(super) struct Fetch {
    pub holder: Holder,
    /// Names it among those of this node.
    serial: u64,
    lease: Option<GrantId>,
    /// When each layer is due.
    dues: Vec<Instant>,
    pub layers_here: u32,
    /// What is read, in order: blocks of the holder, or what the SSD holds of each layer. Nothing
    /// of the latter if contents are not checked.
    sources: Vec<BlockId>,
    records: Vec<Vec<u64>>,
    /// Where it goes.
    destinations: Vec<BlockId>,
    began: Instant,
    /// When the last layer came.
    came: Instant,
}

impl Fetch {
    /// How long a step waits for the next layer.
    pub(super) fn patience(&self) -> Duration {
        prefix_patience((self.came - self.began) / self.layers_here.max(1))
    }

    /// A layer of it is written here. What is read while a lease ends, or fails, may be anything.
    fn land(&self, wire: &mut Wire, node: usize, is_good: bool) {
        let Some(contents) = &mut wire.contents else { return };
        let layer = self.layers_here;
        for (index, block) in self.destinations.iter().enumerate() {
            let value = match self.holder {
                _ if !is_good => 0xdead,
                Holder::Node(holder) => contents.read(holder.node, layer, self.sources[index]),
                Holder::Ssd => self.records[index][layer as usize],
            };
            contents.write(node, layer, *block, value);
        }
    }
}

impl Node {
    /// Asks the holder; the adapter is taken at once, as the order of transfers is that in which
    /// they are asked for.
    pub(super) fn start_fetch(
        &mut self,
        wire: &mut Wire,
        source: &FetchSource,
        lease: LeaseRequest,
        destinations: Vec<BlockId>,
    ) {
        let holder = wire.start(&source.node, source.generation);
        let now = wire.now();
        let layer_bytes = (self.info.layout.block_bytes() * destinations.len()) as u64;
        let dues = (0..self.info.layout.num_layers).map(|_| self.receive.reserve(now, layer_bytes)).collect();
        let key = lease.key;
        self.insert_fetch(now, key, Holder::Node(holder), dues, destinations, Vec::new());
        wire.at(now + LEASE_DEADLINE, self.start, Input::LeaseDue(key, self.num_fetches));
        let lost = Input::LeaseReply(key, Err(super::unavailable("the answer was lost")));
        self.ask(wire, Duration::ZERO, holder, |from| Input::LeaseRequest(from, Box::new(lease)), lost);
    }

    /// A fetch that begins.
    pub(super) fn insert_fetch(
        &mut self,
        now: Instant,
        key: RequestKey,
        holder: Holder,
        dues: Vec<Instant>,
        destinations: Vec<BlockId>,
        records: Vec<Vec<u64>>,
    ) {
        self.num_fetches += 1;
        let serial = self.num_fetches;
        let sources = Vec::new();
        let fetch = Fetch {
            holder,
            serial,
            lease: None,
            dues,
            layers_here: 0,
            sources,
            records,
            destinations,
            began: now,
            came: now,
        };
        self.fetches.insert(key, fetch);
    }

    pub(super) fn on_lease_reply(&mut self, wire: &mut Wire, key: RequestKey, reply: Result<LeaseReply, Refused>) {
        let now = wire.now();
        match (reply, self.fetches.get_mut(&key)) {
            (Ok(LeaseReply { lease, blocks }), Some(fetch)) => {
                fetch.destinations.truncate(blocks.len());
                fetch.lease = Some(lease);
                fetch.sources = blocks;
                let blocks = fetch.sources.len();
                match &mut self.core {
                    Core::Prefill(core) => core.on_fetch_begun(now, key, blocks),
                    Core::Decode(core) => core.on_fetch_begun(key, blocks),
                }
                self.await_layer(wire, key);
            }
            (Err(refused), Some(_)) => self.end_fetch(wire, key, Err(refused)),
            // No request waits for it any more, and it is not known here from which node the answer
            // is: the lease expires.
            (_, None) => {}
        }
    }

    pub(super) fn on_lease_due(&mut self, wire: &mut Wire, key: RequestKey, serial: u64) {
        if self.fetches.get(&key).is_some_and(|fetch| fetch.serial == serial && fetch.lease.is_none()) {
            self.end_fetch(wire, key, Err(super::unavailable("the holder did not answer")));
            self.resume_step(wire);
        }
    }

    /// The next layer comes when it is due.
    pub(super) fn await_layer(&mut self, wire: &mut Wire, key: RequestKey) {
        let Some(fetch) = self.fetches.get(&key) else { return };
        let due = fetch.dues[fetch.layers_here as usize];
        let serial = fetch.serial;
        wire.queue.at(due, Event::FetchedLayer { reader: self.start, key, serial, is_late: false });
    }

    /// The node to ask whether the lease still stands; `None` if the fetch is over, or none need be
    /// asked.
    pub(in crate::cluster) fn lease_of(&self, key: RequestKey, serial: u64) -> Option<(Start, GrantId)> {
        let fetch = self.fetches.get(&key).filter(|fetch| fetch.serial == serial)?;
        match fetch.holder {
            Holder::Node(holder) => Some((holder, fetch.lease?)),
            Holder::Ssd => None,
        }
    }

    /// One more layer is here, or the holder is gone.
    pub(in crate::cluster) fn on_fetched_layer(
        &mut self,
        wire: &mut Wire,
        key: RequestKey,
        serial: u64,
        is_good: bool,
    ) {
        let now = wire.now();
        let num_layers = self.info.layout.num_layers;
        let block_bytes = self.info.layout.block_bytes();
        let Some(fetch) = self.fetches.get(&key).filter(|fetch| fetch.serial == serial) else { return };
        let fault = if fetch.holder == Holder::Ssd { FaultKind::Disk } else { FaultKind::Fetch };
        // Now an early layer, now a late one.
        let is_its_turn = u64::from(fetch.layers_here) == serial % u64::from(num_layers);
        let fails = is_good && is_its_turn && self.fails(wire, fault);
        if fails && (serial / u64::from(num_layers)).is_multiple_of(2) {
            // It comes, and later than a step waits for.
            let event = Event::FetchedLayer { reader: self.start, key, serial, is_late: false };
            return wire.queue.after(MAX_PREFIX_WAIT_PER_STEP, event);
        }
        let is_good = is_good && !fails;
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        fetch.land(wire, self.start.node, is_good);
        if is_good {
            let layer = fetch.layers_here;
            fetch.layers_here += 1;
            fetch.came = now;
            let is_last = fetch.layers_here == num_layers;
            let blocks = fetch.destinations.len();
            let transport = if fetch.holder == Holder::Ssd { baton_types::FetchReport::SSD } else { "simulated" };
            if let Core::Prefill(core) = &mut self.core {
                core.on_fetched(now, key, layer);
            }
            if is_last {
                let bytes = (block_bytes * blocks) as u64 * u64::from(num_layers);
                self.end_fetch(wire, key, Ok(FetchedBytes { bytes, transport: transport.to_owned() }));
            } else {
                self.await_layer(wire, key);
            }
        } else {
            self.end_fetch(wire, key, Err(super::unavailable("the read failed")));
        }
        self.resume_step(wire);
        self.carry_out(wire);
    }

    pub(super) fn cancel_fetch(&mut self, wire: &mut Wire, key: RequestKey) {
        if let Some(fetch) = self.fetches.get(&key) {
            wire.at(wire.now(), self.start, Input::FetchCancelled(key, fetch.serial));
        }
    }

    pub(super) fn on_fetch_cancelled(&mut self, wire: &mut Wire, key: RequestKey, serial: u64) {
        if self.fetches.get(&key).is_some_and(|fetch| fetch.serial == serial) {
            let message = "it is not needed any more".to_owned();
            self.end_fetch(wire, key, Err(Refused { kind: ErrorKind::Cancelled, message }));
            self.resume_step(wire);
        }
    }

    fn end_fetch(&mut self, wire: &mut Wire, key: RequestKey, result: Result<FetchedBytes, Refused>) {
        let now = wire.now();
        let Some(fetch) = self.fetches.remove(&key) else { return };
        if result.is_err()
            && let Some(step) = self.step.as_mut().filter(|step| step.awaited.contains(&key))
        {
            step.awaited.retain(|other| *other != key);
            step.late.push(key);
        }
        match fetch.holder {
            Holder::Node(holder) => {
                if let Some(lease) = fetch.lease {
                    let reader = Some(NodeStart { node: self.info.node.clone(), generation: self.start.generation });
                    wire.tell(self.start.node, holder, Input::ReleaseLease(Box::new(LeaseRelease { lease, reader })));
                }
                with_core!(self, core => core.on_fetch_done(now, key, result));
            }
            Holder::Ssd => self.end_load(now, key, fetch.destinations.len(), result),
        }
    }
}
