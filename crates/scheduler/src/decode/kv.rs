//! A sequence's KV in the arena.

use std::sync::Arc;

use baton_kv_cache::{BlockHasher, BlockPool, Reservation};
use baton_types::{BlockHash, BlockId, TokenId};

use crate::tier::Stores;

/// What a sequence has in the arena, and what it is called in the prefix cache.
#[derive(Debug)]
pub(super) struct SequenceKv {
    /// Chained hashes of the full blocks, of the prompt and then of the output.
    pub hashes: Vec<BlockHash>,
    /// Of the prompt, and of the output as it grows; none while it is preempted.
    pub blocks: Arc<Vec<BlockId>>,
    /// Room promised for some of the output.
    pub reservation: Reservation,
    /// Tokens whose KV is in the arena, or arrives under the grant.
    pub num_computed_tokens: usize,
    /// Leading blocks that are hashed.
    pub num_complete_blocks: usize,
}

impl SequenceKv {
    /// No blocks yet.
    pub(super) fn new(hashes: Vec<BlockHash>) -> Self {
        Self {
            hashes,
            blocks: Arc::default(),
            reservation: Reservation::none(),
            num_computed_tokens: 0,
            num_complete_blocks: 0,
        }
    }

    /// Takes its blocks, of which the first `held` are in the cache, with all of their tokens.
    pub(super) fn set_blocks(&mut self, held: Vec<BlockId>, new: Vec<BlockId>, block_tokens: usize) {
        self.num_complete_blocks = held.len();
        self.num_computed_tokens = held.len() * block_tokens;
        self.blocks = Arc::new(held.into_iter().chain(new).collect());
    }

    /// Takes one more block, out of its reservation first. `false`: there is none.
    pub(super) fn grow(&mut self, pool: &mut BlockPool) -> bool {
        let block = match self.reservation.blocks() {
            0 => pool.allocate(1).ok().and_then(|blocks| blocks.first().copied()),
            _ => Some(pool.allocate_reserved(&mut self.reservation)),
        };
        Arc::make_mut(&mut self.blocks).extend(block);
        block.is_some()
    }

    /// Makes the blocks that are full shareable. `tokens` are those of prompt and output.
    pub(super) fn complete(
        &mut self,
        tokens: &[TokenId],
        hasher: &BlockHasher,
        block_tokens: usize,
        pool: &mut BlockPool,
        stores: &mut Stores,
    ) {
        let full = self.num_computed_tokens / block_tokens;
        for index in self.num_complete_blocks..full {
            let parent = index.checked_sub(1).map(|parent| self.hashes[parent]);
            if index == self.hashes.len() {
                let tokens = &tokens[index * block_tokens..(index + 1) * block_tokens];
                self.hashes.push(hasher.next(parent, tokens));
            }
            pool.complete(self.blocks[index], self.hashes[index], parent);
            stores.queue(pool, self.hashes[index], parent);
        }
        self.num_complete_blocks = self.num_complete_blocks.max(full);
    }

    /// Gives back its blocks, and the room promised for more.
    pub(super) fn release(&mut self, pool: &mut BlockPool) {
        pool.cancel_reservation(std::mem::replace(&mut self.reservation, Reservation::none()));
        pool.release(&std::mem::take(&mut self.blocks));
        self.num_computed_tokens = 0;
        self.num_complete_blocks = 0;
    }
}
