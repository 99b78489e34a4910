//! The tier below a node's arena: a bandwidth and a set of hashes, least recently used first out, as the store of production.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use baton_kv_cache::{EvictionKind, Position, TierCache};
use baton_scheduler::{FetchedBytes, RequestKey, TierEffect, TieredCore};
use baton_types::{BlockHash, Refused};

use super::fetch::Holder;
use super::{Core, Node, with_core};
use crate::cluster::link::Link;
use crate::cluster::wire::{Input, Wire};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Ssd {
    blocks: TierCache,
    disk: Link,
    /// Blocks that are being written.
    writes: BTreeSet<BlockHash>,
}

impl Ssd {
    pub(super) fn new(blocks: u32, bytes_per_s: f64) -> Self {
        let blocks = TierCache::new(blocks, EvictionKind::Lru);
        Self { blocks, disk: Link::new(bytes_per_s, Duration::ZERO), writes: BTreeSet::new() }
    }
}

const NOWHERE: Position = Position { depth: 0, length: 1 };

impl Node {
    pub(super) fn on_tier_effect(&mut self, wire: &mut Wire, effect: TierEffect) {
        let now = wire.now();
        let Some(ssd) = &mut self.ssd else { return };
        match effect {
            TierEffect::Store { hash, .. } => {
                if ssd.blocks.contains(hash) || ssd.writes.contains(&hash) {
                    return with_core!(self, core => core.on_stored(now, hash, true));
                }
                let bytes = self.info.layout.block_bytes_all_layers() as u64;
                ssd.writes.insert(hash);
                wire.at(ssd.disk.reserve(now, bytes), self.start, Input::Stored(hash));
            }
            TierEffect::Load { key, hashes, destinations: _ } => {
                let here: Vec<_> =
                    hashes.iter().take_while(|hash| ssd.blocks.touch(**hash, NOWHERE)).copied().collect();
                let layer_bytes = (self.info.layout.block_bytes() * here.len()) as u64;
                let dues = (0..self.info.layout.num_layers).map(|_| ssd.disk.reserve(now, layer_bytes)).collect();
                let blocks = here.len();
                if let Some(lost) = hashes.get(blocks).copied() {
                    with_core!(self, core => core.on_store_lost(lost));
                }
                self.insert_fetch(now, key, Holder::Ssd, dues, blocks);
                if blocks == 0 {
                    return self.cancel_fetch(wire, key);
                }
                if let Core::Prefill(core) = &mut self.core {
                    core.on_fetch_begun(now, key, blocks);
                }
                self.await_layer(wire, key);
            }
            TierEffect::Clear => {
                let capacity = ssd.blocks.capacity() as u32;
                ssd.blocks = TierCache::new(capacity, EvictionKind::Lru);
            }
        }
    }

    pub(super) fn on_stored(&mut self, now: Instant, hash: BlockHash) {
        let Some(ssd) = &mut self.ssd else { return };
        ssd.writes.remove(&hash);
        let evicted = ssd.blocks.insert(hash, NOWHERE);
        if let Some(evicted) = evicted {
            with_core!(self, core => core.on_store_lost(evicted));
        }
        with_core!(self, core => core.on_stored(now, hash, true));
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
