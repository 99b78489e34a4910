//! A node's bookkeeping of its blocks.
//!
//! ```text
//!            allocate              complete                release (last holder)
//!   Free ───────────────▶ Mutable ──────────▶ Complete ───────────────────────▶ Cached
//!    ▲ ▲                   ▲ │                    ▲                               │ │
//!    │ │ allocate_receiving│ │ release            └────────── acquire ────────────┘ │
//!    │ └──────▶ Receiving ─┘ └──▶ Free                             eviction, by policy
//!    │              │ quarantine                                                    │
//!    └── fenced ── Quarantined                                    Free ◀────────────┘
//! ```

mod integrity;
#[cfg(test)]
mod model_test;

use std::collections::{HashMap, HashSet};

use baton_types::{BlockHash, BlockId, ErrorKind, GrantId, KvEvent};

use crate::event_log::{EventLog, KvEventBatch};
use crate::eviction::{EvictionKind, EvictionPolicy, Position};

pub use integrity::IntegrityError;

/// What a block is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// Nothing; its bytes mean nothing.
    Free,
    /// One sequence writes into it.
    Mutable,
    /// Full, hashed and held by this many sequences, at least one.
    Complete {
        /// Its holders.
        refs: u32,
    },
    /// Full and hashed; no sequence holds it, so it may be evicted.
    Cached,
    /// Another node writes into it under this grant.
    Receiving(GrantId),
    /// Its grant is revoked, but bytes may still land until the writer is fenced.
    Quarantined,
}

/// There is not enough room now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} blocks wanted, {available} of {total} available")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub wanted: usize,
    /// Blocks that are free or can be evicted, and that are not promised.
    pub available: usize,
    /// Blocks of the pool.
    pub total: usize,
}

impl OutOfBlocks {
    /// Always [`ErrorKind::Overloaded`].
    pub const fn kind(&self) -> ErrorKind {
        ErrorKind::Overloaded
    }
}

/// Room promised but not allocated yet. It is given back through [`BlockPool::cancel_reservation`];
/// one that is dropped instead leaks its room, which [`BlockPool::check_integrity_with`] finds.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "room that is dropped is never given back"]
pub struct Reservation {
    blocks: usize,
}

impl Reservation {
    /// No room: it takes nothing and need not be given back.
    pub const fn none() -> Self {
        Self { blocks: 0 }
    }

    /// Blocks that can still be taken from it.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }
}

/// How many blocks are in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolCounts {
    /// All.
    pub total: usize,
    /// [`BlockState::Free`].
    pub free: usize,
    /// [`BlockState::Cached`].
    pub cached: usize,
    /// Every other state.
    pub used: usize,
    /// Promised, out of the free and cached ones.
    pub reserved: usize,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    state: BlockState,
    /// Set if the block is `Cached`, or `Complete` and not forgotten: the index points here.
    identity: Option<Identity>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    hash: BlockHash,
    parent: Option<BlockHash>,
}

/// The blocks of one arena. Every operation takes time in the number of blocks it is given, not in
/// the size of the pool.
///
/// Methods panic if the caller's accounting is wrong (releasing what no sequence holds, completing
/// a block twice): such a pool must not serve on.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Taken from the end, filled so that a fresh pool gives ascending ids, which coalesce on the
    /// wire.
    free: Vec<BlockId>,
    /// The order in which cached blocks are evicted.
    eviction: Box<dyn EvictionPolicy>,
    index: HashMap<BlockHash, BlockId>,
    /// What a tier below this pool holds, with each block's parent: who hears the events does not
    /// care in which tier a block is.
    below: HashMap<BlockHash, Option<BlockHash>>,
    /// Who hears the events hears of the tier below, too.
    tells_below: bool,
    reserved: usize,
    events: EventLog,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks whose log keeps up to `event_capacity` events until they
    /// are drained. Evicts by the default policy.
    pub fn new(num_blocks: u32, event_capacity: usize) -> Self {
        Self::with_eviction(num_blocks, event_capacity, EvictionKind::default())
    }

    /// As [`Self::new`], by a policy of the caller's choice.
    pub fn with_eviction(num_blocks: u32, event_capacity: usize, eviction: EvictionKind) -> Self {
        let block = Block { state: BlockState::Free, identity: None };
        Self {
            blocks: vec![block; num_blocks as usize],
            free: (0..num_blocks).rev().map(BlockId).collect(),
            eviction: eviction.policy(num_blocks),
            index: HashMap::new(),
            below: HashMap::new(),
            tells_below: true,
            reserved: 0,
            events: EventLog::new(event_capacity),
        }
    }

    /// Blocks per state.
    pub fn counts(&self) -> PoolCounts {
        let total = self.blocks.len();
        let free = self.free.len();
        let cached = self.eviction.len();
        PoolCounts { total, free, cached, used: total - free - cached, reserved: self.reserved }
    }

    /// Blocks that can be allocated or reserved now.
    pub fn available(&self) -> usize {
        self.free.len() + self.eviction.len() - self.reserved
    }

    /// Whether `wanted` more blocks can be allocated or reserved after acquiring `matched`: those
    /// of them that are cached cannot be evicted then.
    pub fn check_fits(&self, matched: &[BlockId], wanted: usize) -> Result<(), OutOfBlocks> {
        let cached = self.count_cached(matched);
        let available = self.available();
        let total = self.blocks.len();
        if cached + wanted <= available {
            return Ok(());
        }
        Err(OutOfBlocks { wanted, available: available.saturating_sub(cached), total })
    }

    /// How many of these blocks no sequence holds: taking them leaves fewer for others.
    pub fn count_cached(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.state(**block) == BlockState::Cached).count()
    }

    /// What a block is doing.
    pub fn state(&self, block: BlockId) -> BlockState {
        self.blocks[block.index()].state
    }

    /// Hash of a complete or cached block.
    pub fn hash(&self, block: BlockId) -> Option<BlockHash> {
        self.blocks[block.index()].identity.map(|identity| identity.hash)
    }

    /// The longest run of leading `hashes` that are here, as blocks. Only looks: [`Self::acquire`]
    /// takes them.
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        hashes.iter().map_while(|hash| self.index.get(hash).copied()).collect()
    }

    /// Whether a block with this hash is here.
    #[cfg(test)]
    pub(crate) fn has(&self, hash: BlockHash) -> bool {
        self.index.contains_key(&hash)
    }

    /// Becomes one more holder of complete or cached blocks.
    ///
    /// # Panics
    /// If a block is in another state, or if [`Self::check_fits`] would have said no.
    pub fn acquire(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            match self.state(block) {
                BlockState::Cached => self.set(block, BlockState::Complete { refs: 1 }),
                BlockState::Complete { refs } => self.set(block, BlockState::Complete { refs: refs + 1 }),
                state => panic!("block {} is {state:?} and cannot be acquired", block.0),
            }
            self.eviction.on_use(block);
        }
        assert!(self.reserved <= self.free.len() + self.eviction.len(), "acquired blocks that were promised to others");
    }

    /// Takes `n` blocks for one sequence to write into: free ones first, then cached ones.
    pub fn allocate(&mut self, n: usize) -> Result<Vec<BlockId>, OutOfBlocks> {
        self.check_fits(&[], n)?;
        Ok((0..n).map(|_| self.take(BlockState::Mutable)).collect())
    }

    /// Takes `n` blocks for another node to write into.
    pub fn allocate_receiving(&mut self, n: usize, grant: GrantId) -> Result<Vec<BlockId>, OutOfBlocks> {
        self.check_fits(&[], n)?;
        Ok((0..n).map(|_| self.take(BlockState::Receiving(grant))).collect())
    }

    /// Promises `n` blocks. Nothing is evicted before they are taken.
    pub fn reserve(&mut self, n: usize) -> Result<Reservation, OutOfBlocks> {
        self.check_fits(&[], n)?;
        self.reserved += n;
        Ok(Reservation { blocks: n })
    }

    /// Takes one block out of a promise; it cannot fail.
    ///
    /// # Panics
    /// If the reservation is used up.
    pub fn allocate_reserved(&mut self, reservation: &mut Reservation) -> BlockId {
        assert!(reservation.blocks > 0, "the reservation is used up");
        reservation.blocks -= 1;
        self.reserved -= 1;
        self.take(BlockState::Mutable)
    }

    /// Gives back what is left of a promise.
    pub fn cancel_reservation(&mut self, reservation: Reservation) {
        self.reserved -= reservation.blocks;
    }

    /// A block is full: from now on it can be shared. The first holder of a hash wins; `false` says
    /// that another block has it already, and this one stays private and is freed when released.
    ///
    /// # Panics
    /// If the block is not [`BlockState::Mutable`].
    pub fn complete(&mut self, block: BlockId, hash: BlockHash, parent: Option<BlockHash>) -> bool {
        assert_eq!(self.state(block), BlockState::Mutable, "block {} cannot be completed", block.0);
        if self.index.contains_key(&hash) {
            return false;
        }
        self.index.insert(hash, block);
        let identity = Some(Identity { hash, parent });
        self.blocks[block.index()] = Block { state: BlockState::Complete { refs: 1 }, identity };
        self.eviction.on_store(block, hash);
        if !self.is_told_below(&hash) {
            self.events.push(KvEvent::Stored { hash, parent });
        }
        true
    }

    /// What only the tier below holds is not told from here on. To be called while nothing is
    /// there.
    pub fn keep_below_to_itself(&mut self) {
        self.tells_below = false;
    }

    fn is_told_below(&self, hash: &BlockHash) -> bool {
        self.tells_below && self.below.contains_key(hash)
    }

    /// A tier below holds this block now, whether or not it is here too.
    pub fn stored_below(&mut self, hash: BlockHash, parent: Option<BlockHash>) {
        if self.below.insert(hash, parent).is_none() && self.tells_below && !self.index.contains_key(&hash) {
            self.events.push(KvEvent::Stored { hash, parent });
        }
    }

    /// The tier below does not hold it any more.
    pub fn removed_below(&mut self, hash: BlockHash) {
        if self.below.remove(&hash).is_some() && self.tells_below && !self.index.contains_key(&hash) {
            self.events.push(KvEvent::Removed { hash });
        }
    }

    /// Whether the tier below holds this block.
    pub fn is_below(&self, hash: BlockHash) -> bool {
        self.below.contains_key(&hash)
    }

    /// Blocks of the tier below.
    pub fn len_below(&self) -> usize {
        self.below.len()
    }

    /// Everything that was granted has arrived in these blocks: their sequence owns them now.
    ///
    /// # Panics
    /// If a block is not [`BlockState::Receiving`].
    pub fn received(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            assert!(matches!(self.state(block), BlockState::Receiving(_)), "block {} receives nothing", block.0);
            self.set(block, BlockState::Mutable);
        }
    }

    /// The grant of these blocks ends before its writer is fenced: they may not be used until
    /// [`Self::unquarantine`].
    ///
    /// # Panics
    /// If a block is not [`BlockState::Receiving`].
    pub fn quarantine(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            assert!(matches!(self.state(block), BlockState::Receiving(_)), "block {} receives nothing", block.0);
            self.set(block, BlockState::Quarantined);
        }
    }

    /// Nothing can land in these blocks any more: they are free.
    ///
    /// # Panics
    /// If a block is not [`BlockState::Quarantined`].
    pub fn unquarantine(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            assert_eq!(self.state(block), BlockState::Quarantined, "block {} is not in quarantine", block.0);
            self.put_back(block);
        }
    }

    /// A sequence releases its blocks, given from its first to its last. They leave from the last
    /// one on, so that of a cached sequence the children are evicted before their parents. If two
    /// sequences computed the same block, the one that was not indexed may lose its parent first,
    /// and is then never matched.
    ///
    /// # Panics
    /// If no sequence holds a block.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for (&block, position) in blocks.iter().zip(Position::of_prompt(blocks.len())).rev() {
            match self.state(block) {
                BlockState::Mutable => self.put_back(block),
                // It was forgotten.
                BlockState::Complete { refs: 1 } if self.hash(block).is_none() => self.put_back(block),
                BlockState::Complete { refs: 1 } => {
                    self.set(block, BlockState::Cached);
                    self.eviction.on_release(block, position);
                }
                BlockState::Complete { refs } => self.set(block, BlockState::Complete { refs: refs - 1 }),
                state => panic!("block {} is {state:?} and cannot be released", block.0),
            }
        }
    }

    /// Frees every cached block, and forgets the tier below, which is the caller's to clear.
    pub fn clear_cached(&mut self) {
        let only_below = |hash: &BlockHash| self.tells_below && !self.index.contains_key(hash);
        for hash in std::mem::take(&mut self.below).into_keys().filter(only_below) {
            self.events.push(KvEvent::Removed { hash });
        }
        let all = self.index.len() == self.eviction.len();
        while let Some(block) = self.eviction.evict() {
            let hash = self.forget(block);
            if !all {
                self.events.push(KvEvent::Removed { hash });
            }
            self.put_back(block);
        }
        if all {
            self.events.push(KvEvent::Cleared);
        }
    }

    /// Takes these blocks, and all that were computed after them, out of the cache: what they hold
    /// is no good. Sequences that hold them keep them, and then they are free. Gives the hashes of
    /// both tiers. Takes time in the size of the pool and the tier.
    pub fn forget_with_successors(&mut self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let forgotten = self.with_successors(hashes);
        for hash in &forgotten {
            let is_told = self.index.contains_key(hash) || self.is_told_below(hash);
            self.below.remove(hash);
            if let Some(&block) = self.index.get(hash) {
                if self.state(block) == BlockState::Cached {
                    self.eviction.on_use(block);
                    self.forget(block);
                    self.put_back(block);
                } else {
                    self.forget(block);
                }
            }
            if is_told {
                self.events.push(KvEvent::Removed { hash: *hash });
            }
        }
        forgotten
    }

    /// Those of the hashes that are in one of the tiers, and those that follow them there.
    fn with_successors(&self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let here = self.blocks.iter().filter_map(|block| block.identity);
        let here = here.map(|Identity { hash, parent }| (hash, parent));
        let mut successors = HashMap::<BlockHash, Vec<BlockHash>>::new();
        for (hash, parent) in here.chain(self.below.iter().map(|(hash, parent)| (*hash, *parent))) {
            if let Some(parent) = parent {
                successors.entry(parent).or_default().push(hash);
            }
        }
        let mut found: Vec<_> = hashes.to_vec();
        let mut seen: HashSet<_> = hashes.iter().copied().collect();
        let mut next = 0;
        while let Some(hash) = found.get(next) {
            let after = successors.remove(hash).unwrap_or_default();
            found.extend(after.into_iter().filter(|hash| seen.insert(*hash)));
            next += 1;
        }
        found.retain(|hash| self.index.contains_key(hash) || self.below.contains_key(hash));
        found
    }

    /// Up to `max` events that were not drained yet, or a snapshot if the log ran over; `None` if
    /// nothing happened.
    pub fn drain_events(&mut self, max: usize) -> Option<KvEventBatch> {
        if self.events.take_overflow() {
            return Some(self.snapshot());
        }
        self.events.drain(max)
    }

    /// Every block that can be reused now. Events that were not drained yet are contained in it and
    /// are older than its number.
    pub fn snapshot(&self) -> KvEventBatch {
        let here = self.blocks.iter().filter_map(|block| block.identity);
        let here = here.map(|Identity { hash, parent }| KvEvent::Stored { hash, parent });
        let below = self.below.iter().filter(|(hash, _)| self.tells_below && !self.index.contains_key(hash));
        let events = here.chain(below.map(|(&hash, &parent)| KvEvent::Stored { hash, parent })).collect();
        KvEventBatch { sequence: self.events.next_sequence(), snapshot: true, events }
    }

    /// A free block, or a cached one. The caller has checked that there is one.
    fn take(&mut self, state: BlockState) -> BlockId {
        let block = self.free.pop().unwrap_or_else(|| self.evict());
        self.set(block, state);
        block
    }

    fn evict(&mut self) -> BlockId {
        let block = self.eviction.evict().expect("room was checked before");
        let hash = self.forget(block);
        if !self.is_told_below(&hash) {
            self.events.push(KvEvent::Removed { hash });
        }
        block
    }

    /// Takes a block out of the index.
    fn forget(&mut self, block: BlockId) -> BlockHash {
        let identity = self.blocks[block.index()].identity.take().expect("a cached block has a hash");
        let indexed = self.index.remove(&identity.hash);
        assert_eq!(indexed, Some(block), "the index has another block for hash {}", identity.hash);
        identity.hash
    }

    fn put_back(&mut self, block: BlockId) {
        self.set(block, BlockState::Free);
        self.free.push(block);
    }

    fn set(&mut self, block: BlockId, state: BlockState) {
        self.blocks[block.index()].state = state;
    }
}
