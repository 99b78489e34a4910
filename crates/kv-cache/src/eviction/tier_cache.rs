//! A cache of blocks by hash, for a lower tier.

use std::collections::HashMap;

use baton_types::{BlockHash, BlockId};

use super::{EvictionKind, EvictionPolicy, Position};

/// Books of a tier below the pool, such as host memory or an SSD: which blocks it holds and which
/// goes next. No sequence holds its blocks, so that all can be evicted.
#[derive(Debug)]
pub struct TierCache {
    policy: Box<dyn EvictionPolicy>,
    index: HashMap<BlockHash, BlockId>,
    /// Of the blocks in use.
    hashes: Vec<BlockHash>,
    free: Vec<BlockId>,
}

impl TierCache {
    /// An empty cache of `num_blocks`.
    pub fn new(num_blocks: u32, eviction: EvictionKind) -> Self {
        Self {
            policy: eviction.policy(num_blocks),
            index: HashMap::new(),
            hashes: vec![BlockHash([0; 16]); num_blocks as usize],
            free: (0..num_blocks).rev().map(BlockId).collect(),
        }
    }

    /// Blocks that fit.
    pub fn capacity(&self) -> usize {
        self.hashes.len()
    }

    /// Blocks here.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether no block is here.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Whether a block is here. Only looks: [`Self::touch`] uses it.
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.index.contains_key(&hash)
    }

    /// How many leading `hashes` are here.
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.contains(**hash)).count()
    }

    /// Uses a block; `false` if it is not here. Of one prompt, children come before their parents,
    /// here and in [`Self::insert`].
    pub fn touch(&mut self, hash: BlockHash, position: Position) -> bool {
        let Some(&block) = self.index.get(&hash) else { return false };
        self.policy.on_use(block);
        self.policy.on_release(block, position);
        true
    }

    /// Takes a block in, or uses it if it is here. The hash returned had to go for it: its own, if
    /// nothing fits.
    pub fn insert(&mut self, hash: BlockHash, position: Position) -> Option<BlockHash> {
        if self.touch(hash, position) {
            return None;
        }
        if self.capacity() == 0 {
            return Some(hash);
        }
        let (block, evicted) = self.store(hash);
        self.policy.on_release(block, position);
        evicted
    }

    /// Uses or takes in the blocks of one prompt, from its first to its last, none of which is
    /// evicted for another. Of a prompt that does not fit, the first blocks are taken. Returns the
    /// hashes that had to go, in that order.
    ///
    /// # Panics
    /// If a hash stands twice.
    pub fn insert_prompt(&mut self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let fitting = &hashes[..hashes.len().min(self.capacity())];
        for block in fitting.iter().filter_map(|hash| self.index.get(hash)) {
            self.policy.on_use(*block);
        }
        let mut evicted = Vec::new();
        let mut blocks = Vec::with_capacity(fitting.len());
        for hash in fitting {
            blocks.push(self.index.get(hash).copied().unwrap_or_else(|| {
                let (block, removed) = self.store(*hash);
                evicted.extend(removed);
                block
            }));
        }
        for (block, position) in blocks.into_iter().zip(Position::of_prompt(hashes.len())).rev() {
            self.policy.on_release(block, position);
        }
        evicted
    }

    /// Drops a block; `false` if it is not here.
    pub fn remove(&mut self, hash: BlockHash) -> bool {
        let Some(block) = self.index.remove(&hash) else { return false };
        self.policy.on_forget(block);
        self.free.push(block);
        true
    }

    /// Finds room for a hash that is not here.
    fn store(&mut self, hash: BlockHash) -> (BlockId, Option<BlockHash>) {
        let (block, evicted) = match self.free.pop() {
            Some(block) => (block, None),
            None => self.evict(),
        };
        self.index.insert(hash, block);
        self.hashes[block.index()] = hash;
        self.policy.on_store(block, hash);
        (block, evicted)
    }

    fn evict(&mut self) -> (BlockId, Option<BlockHash>) {
        let block = self.policy.evict().expect("fewer blocks are in use than fit");
        let hash = self.hashes[block.index()];
        self.index.remove(&hash);
        (block, Some(hash))
    }
}
