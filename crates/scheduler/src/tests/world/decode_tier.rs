//! The decode node's tier: blocks that it writes, and reads back for sequences that have lost them.

use std::time::Duration;

use baton_types::{BlockHash, BlockId, RequestKey};

use super::super::engine::NUM_LAYERS;
use super::{World, unavailable};
use crate::{TierEffect, TieredCore};

/// Of the tier, on its way.
pub(super) enum Event {
    /// With what the block held when the write began.
    Written(BlockHash, BlockId, Vec<u64>),
    /// What was found of the blocks asked for, and where they go.
    Read(RequestKey, Vec<Vec<u64>>, Vec<BlockId>),
}

impl World {
    pub(super) fn on_decode_tier_effect(&mut self, effect: TierEffect) {
        let event = match effect {
            TierEffect::Store { hash, block, .. } => {
                let values = (0..NUM_LAYERS).map(|layer| self.decode_arena.read(layer, block)).collect();
                Event::Written(hash, block, values)
            }
            TierEffect::Load { key, hashes, destinations } => {
                assert_eq!(hashes.len(), destinations.len());
                let found = |hash| self.decode_ssd.iter().find(|(other, _)| other == hash);
                let records = hashes.iter().map_while(|hash| Some(found(hash)?.1.clone())).collect();
                Event::Read(key, records, destinations)
            }
            TierEffect::Clear => return self.decode_ssd.clear(),
        };
        let took = Duration::from_micros(self.rng.below(3000));
        self.send_after(took, super::Event::DecodeTier(event));
    }

    pub(super) fn on_decode_tier(&mut self, event: Event) {
        match event {
            Event::Written(hash, block, values) => {
                let now: Vec<_> = (0..NUM_LAYERS).map(|layer| self.decode_arena.read(layer, block)).collect();
                assert_eq!(now, values, "a block changed while it was written");
                let stored = !self.rng.chance(self.faults.fetch);
                if stored {
                    self.decode_ssd.push((hash, values));
                }
                self.decode.on_stored(self.now, hash, stored);
                if self.decode_ssd.len() > 40 {
                    let (lost, _) = self.decode_ssd.remove(self.rng.below(5) as usize);
                    self.decode.on_store_lost(lost);
                }
            }
            Event::Read(key, records, destinations) => {
                let fails = records.is_empty() || self.rng.chance(self.faults.fetch);
                for (values, to) in records.iter().zip(destinations) {
                    // What fails may have come in part.
                    for (layer, value) in (0..NUM_LAYERS).zip(values) {
                        self.decode_arena.write(layer, to, if fails { 0xdead } else { *value });
                    }
                }
                let result = if fails { Err(unavailable("disk fault")) } else { Ok(records.len()) };
                self.counts.loaded_at_decode += result.as_ref().map_or(0, |blocks| *blocks as u64);
                self.decode.on_load_done(self.now, key, result);
            }
        }
    }
}
