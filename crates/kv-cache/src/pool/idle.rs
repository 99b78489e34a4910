//! How long cached blocks have been unused, whatever the policy that evicts them thinks of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{BlockId, KvEvent};

use super::{BlockPool, BlockState, OutOfBlocks};
use crate::eviction::BlockLists;

/// Cached blocks in the order in which they were released: of what one sequence released, children
/// before their parents.
#[derive(Debug)]
pub(super) struct Idle {
    order: BlockLists,
    /// By block: when it was released; nothing before the pool was first told the time.
    since: Vec<Option<Instant>>,
    /// How many of them were released at each time.
    counts: BTreeMap<Instant, usize>,
    now: Option<Instant>,
}

impl Idle {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            order: BlockLists::new(num_blocks, 1),
            since: vec![None; num_blocks as usize],
            counts: BTreeMap::new(),
            now: None,
        }
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.since[block.index()] = self.now;
        if let Some(now) = self.now {
            *self.counts.entry(now).or_default() += 1;
        }
        self.order.push(0, block);
    }

    pub(super) fn remove(&mut self, block: BlockId) {
        self.order.remove(block);
        let Some(since) = self.since[block.index()].take() else { return };
        if let Some(count) = self.counts.get_mut(&since) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&since);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Those not used for `idle` at `now`, the longest unused first.
    fn cold(&self, now: Option<Instant>, idle: Duration) -> impl Iterator<Item = BlockId> + '_ {
        let is_cold = move |block: &BlockId| {
            let ages = now.zip(self.since[block.index()]);
            ages.is_some_and(|(now, since)| now.saturating_duration_since(since) >= idle)
        };
        self.order.iter().take_while(is_cold)
    }
}

impl BlockPool {
    /// Tells the pool the time: blocks that are released from here on are unused since then.
    pub fn pass_time(&mut self, now: Instant) {
        self.idle.now = Some(now);
    }

    /// Cached blocks not used for `idle` at `now`. Takes time in the number of times at which
    /// blocks were released.
    pub fn cold(&self, now: Instant, idle: Duration) -> usize {
        let until = now.checked_sub(idle);
        until.map_or(0, |until| self.idle.counts.range(..=until).map(|(_, count)| count).sum())
    }

    /// Takes `n` blocks to write into as [`Self::allocate`] does, but of the cached ones none that
    /// was used within `idle`.
    pub fn allocate_cold(&mut self, n: usize, idle: Duration) -> Result<Vec<BlockId>, OutOfBlocks> {
        if n == 0 {
            return Ok(Vec::new());
        }
        let wanted_cold = (n + self.reserved).saturating_sub(self.free.len());
        let cold: Vec<_> = self.idle.cold(self.idle.now, idle).take(wanted_cold).collect();
        if cold.len() < wanted_cold {
            let available = (self.free.len() + cold.len()).saturating_sub(self.reserved);
            return Err(OutOfBlocks { wanted: n, available, total: self.blocks.len() });
        }
        let missing = n.saturating_sub(self.free.len());
        for &block in &cold[..missing] {
            self.eviction.on_forget(block);
            let hash = self.forget(block);
            if !self.below.contains_key(&hash) {
                self.events.push(KvEvent::Removed { hash });
            }
            self.put_back(block);
        }
        Ok((0..n).map(|_| self.take(BlockState::Mutable)).collect())
    }
}
