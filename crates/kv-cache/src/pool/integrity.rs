//! The proof that every block is accounted for.

use std::collections::HashMap;

use baton_types::{BlockId, ErrorKind};

use super::{BlockPool, BlockState};

/// The books of a pool, or of what uses it, do not balance: a bug.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct IntegrityError(pub String);

impl IntegrityError {
    /// Always [`ErrorKind::Internal`].
    pub const fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

/// `Err` with the message if `ok` is false.
fn ensure(ok: bool, message: impl FnOnce() -> String) -> Result<(), IntegrityError> {
    if ok { Ok(()) } else { Err(IntegrityError(message())) }
}

impl BlockPool {
    /// Checks the pool by itself: each block in exactly one place, free list, index and eviction
    /// order agree with the states, promises can be kept. Takes time in the size of the pool.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        self.check_free_list()?;
        self.check_eviction()?;
        self.check_index()?;
        let room = self.free.len() + self.eviction.len();
        ensure(self.reserved <= room, || format!("{} blocks promised, {room} free or cached", self.reserved))
    }

    /// Checks the pool and that its holders are those named. `holders` lists every held, receiving
    /// or quarantined block, once per holder. `reserved` is the sum of the promises that are out.
    pub fn check_integrity_with(
        &self,
        holders: impl IntoIterator<Item = BlockId>,
        reserved: usize,
    ) -> Result<(), IntegrityError> {
        self.check_integrity()?;
        let mut held: HashMap<BlockId, u32> = HashMap::new();
        for block in holders {
            *held.entry(block).or_default() += 1;
        }
        for (id, block) in self.ids().zip(&self.blocks) {
            let expected = match block.state {
                BlockState::Free | BlockState::Cached => 0,
                BlockState::Mutable | BlockState::Receiving(_) | BlockState::Quarantined => 1,
                BlockState::Complete { refs } => refs,
            };
            let found = held.remove(&id).unwrap_or(0);
            let state = block.state;
            ensure(found == expected, || format!("block {} is {state:?}, but {found} hold it", id.0))?;
        }
        ensure(held.is_empty(), || format!("blocks outside the pool are held: {:?}", held.keys()))?;
        ensure(reserved == self.reserved, || format!("{} blocks promised, {reserved} known to holders", self.reserved))
    }

    fn ids(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.blocks.len() as u32).map(BlockId)
    }

    fn in_state(&self, state: BlockState) -> usize {
        self.blocks.iter().filter(|block| block.state == state).count()
    }

    fn check_free_list(&self) -> Result<(), IntegrityError> {
        let mut seen = vec![false; self.blocks.len()];
        for &block in &self.free {
            let twice = std::mem::replace(&mut seen[block.index()], true);
            ensure(!twice, || format!("block {} is in the free list twice", block.0))?;
            let state = self.state(block);
            ensure(state == BlockState::Free, || format!("block {} is in the free list, but {state:?}", block.0))?;
        }
        let listed = self.free.len();
        let free = self.in_state(BlockState::Free);
        ensure(listed == free, || format!("{free} blocks are free, {listed} in the free list"))
    }

    fn check_eviction(&self) -> Result<(), IntegrityError> {
        let listed = self.eviction.blocks();
        for &block in &listed {
            let state = self.state(block);
            ensure(state == BlockState::Cached, || format!("block {} can be evicted, but is {state:?}", block.0))?;
        }
        let cached = self.in_state(BlockState::Cached);
        let listed = listed.len();
        let len = self.eviction.len();
        ensure(listed == cached && listed == len, || format!("{cached} blocks cached, {listed} evictable"))
    }

    fn check_index(&self) -> Result<(), IntegrityError> {
        for (hash, block) in &self.index {
            let found = self.hash(*block);
            ensure(found == Some(*hash), || {
                format!("hash {hash} leads to block {}, whose hash is {found:?}", block.0)
            })?;
        }
        let mut indexed = 0;
        for (id, block) in self.ids().zip(&self.blocks) {
            let state = block.state;
            let has = block.identity.is_some();
            let agrees = match state {
                BlockState::Cached => has,
                // One that was forgotten has none.
                BlockState::Complete { .. } => true,
                _ => !has,
            };
            ensure(agrees, || format!("block {} is {state:?}, but has a hash: {has}", id.0))?;
            ensure(!matches!(state, BlockState::Complete { refs: 0 }), || format!("block {} has no holder", id.0))?;
            indexed += usize::from(has);
        }
        let entries = self.index.len();
        ensure(indexed == entries, || format!("{indexed} blocks have a hash, {entries} are in the index"))
    }
}
