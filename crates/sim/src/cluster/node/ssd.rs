//! The tier below a node's arena: a bandwidth and a set of hashes, least recently used first out,
//! as the store of production.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_profile::Link;
use baton_scheduler::{FetchedBytes, RequestKey, TierEffect, TieredCore};
use baton_types::{BlockHash, Refused};

use super::fetch::Holder;
use super::{Core, Node, with_core};
use crate::cluster::contents::Contents;
use crate::cluster::wire::{Input, Wire};
use crate::faults::FaultKind;

/// A block's contents, layer by layer; nothing if they are not checked.
type Record = Vec<u64>;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Ssd {
    blocks: Recent,
    disk: Link,
    /// Blocks that are being written, and what they contained when that began.
    writes: BTreeMap<BlockHash, Record>,
    /// What each block holds, if contents are checked.
    records: BTreeMap<BlockHash, Record>,
}

impl Ssd {
    pub(super) fn new(blocks: u32, bytes_per_s: f64) -> Self {
        let disk = Link::new(bytes_per_s, Duration::ZERO);
        Self { blocks: Recent::new(blocks), disk, writes: BTreeMap::new(), records: BTreeMap::new() }
    }
}

/// Hashes of at most so many blocks, in the order in which they were used.
#[derive(Debug)]
struct Recent {
    capacity: usize,
    /// Each block's last use.
    uses: BTreeMap<BlockHash, u64>,
    by_use: BTreeMap<u64, BlockHash>,
    now: u64,
}

impl Recent {
    fn new(capacity: u32) -> Self {
        Self { capacity: capacity as usize, uses: BTreeMap::new(), by_use: BTreeMap::new(), now: 0 }
    }

    fn contains(&self, hash: BlockHash) -> bool {
        self.uses.contains_key(&hash)
    }

    /// Uses a block; `false` if it is not here.
    fn touch(&mut self, hash: BlockHash) -> bool {
        let Some(used) = self.uses.get_mut(&hash) else { return false };
        self.by_use.remove(used);
        self.now += 1;
        *used = self.now;
        self.by_use.insert(self.now, hash);
        true
    }

    /// Takes a block in that is not here. The hash returned had to go for it: its own, if nothing
    /// fits.
    fn insert(&mut self, hash: BlockHash) -> Option<BlockHash> {
        self.now += 1;
        self.uses.insert(hash, self.now);
        self.by_use.insert(self.now, hash);
        if self.uses.len() <= self.capacity {
            return None;
        }
        let (_, evicted) = self.by_use.pop_first()?;
        self.uses.remove(&evicted);
        Some(evicted)
    }

    fn remove(&mut self, hash: BlockHash) {
        if let Some(used) = self.uses.remove(&hash) {
            self.by_use.remove(&used);
        }
    }

    fn clear(&mut self) {
        self.uses.clear();
        self.by_use.clear();
    }
}

impl Node {
    pub(super) fn on_tier_effect(&mut self, wire: &mut Wire, effect: TierEffect) {
        let now = wire.now();
        let fails = matches!(effect, TierEffect::Store { .. }) && self.fails(wire, FaultKind::Disk);
        let Some(ssd) = &mut self.ssd else { return };
        match effect {
            TierEffect::Store { hash, block, .. } => {
                if ssd.blocks.contains(hash) || ssd.writes.contains_key(&hash) {
                    return with_core!(self, core => core.on_stored(now, hash, true));
                }
                let bytes = self.info.layout.block_bytes_all_layers() as u64;
                let node = self.start.node;
                let num_layers = self.info.layout.num_layers;
                let read =
                    |contents: &Contents| (0..num_layers).map(|layer| contents.read(node, layer, block)).collect();
                ssd.writes.insert(hash, wire.contents.as_ref().map_or_else(Vec::new, read));
                wire.at(ssd.disk.reserve(now, bytes), self.start, Input::Stored(hash, !fails));
            }
            TierEffect::Load { key, hashes, mut destinations } => {
                let here: Vec<_> = hashes.iter().take_while(|hash| ssd.blocks.touch(**hash)).copied().collect();
                let layer_bytes = (self.info.layout.block_bytes() * here.len()) as u64;
                let dues = (0..self.info.layout.num_layers).map(|_| ssd.disk.reserve(now, layer_bytes)).collect();
                let blocks = here.len();
                if let Some(lost) = hashes.get(blocks).copied() {
                    with_core!(self, core => core.on_store_lost(lost));
                }
                let records = here.iter().filter_map(|hash| ssd.records.get(hash).cloned()).collect();
                destinations.truncate(blocks);
                self.insert_fetch(now, key, Holder::Ssd, dues, destinations, records);
                if blocks == 0 {
                    return self.cancel_fetch(wire, key);
                }
                if let Core::Prefill(core) = &mut self.core {
                    core.on_fetch_begun(now, key, blocks);
                }
                self.await_layer(wire, key);
            }
            TierEffect::Forget(hashes) => {
                for hash in hashes {
                    ssd.blocks.remove(hash);
                    ssd.records.remove(&hash);
                }
            }
            TierEffect::Clear => {
                ssd.blocks.clear();
                ssd.records.clear();
            }
        }
    }

    pub(super) fn on_stored(&mut self, now: Instant, hash: BlockHash, stored: bool) {
        let Some(ssd) = &mut self.ssd else { return };
        if let Some(record) = ssd.writes.remove(&hash).filter(|_| stored) {
            ssd.records.insert(hash, record);
            if let Some(evicted) = ssd.blocks.insert(hash) {
                ssd.records.remove(&evicted);
                with_core!(self, core => core.on_store_lost(evicted));
            }
        }
        with_core!(self, core => core.on_stored(now, hash, stored));
    }

    /// A read of the SSD is over.
    pub(super) fn end_load(
        &mut self,
        now: Instant,
        key: RequestKey,
        blocks: usize,
        result: Result<FetchedBytes, Refused>,
    ) {
        match &mut self.core {
            Core::Prefill(core) => core.on_fetch_done(now, key, result),
            Core::Decode(core) => core.on_load_done(now, key, result.map(|_| blocks)),
        }
    }
}
