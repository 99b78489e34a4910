//! Where K and V live: one region of memory, laid out as [`KvLayout`] says.

#![allow(unsafe_code)] // hands out parts of memory that other threads and machines write too; see each SAFETY note

use std::ops::Range;
use std::sync::Arc;

use baton_memory::{MemoryError, MemoryRegion};
use baton_types::{BlockId, KvLayout};

/// A node's KV memory. Cheap to clone.
///
/// **Who may touch what**: the step that computes a block's tokens writes its bytes, or the peer
/// that holds a grant for it. Nothing else writes them while either goes on; the block pool's
/// states see to that. Complete blocks are only read.
#[derive(Debug, Clone)]
pub struct KvArena {
    region: Arc<MemoryRegion>,
    layout: KvLayout,
}

impl KvArena {
    /// Maps the memory of an arena, as memory that other processes of the host may be given to
    /// read. Nodes of one host then transfer KV without a network. If the system has no such
    /// memory, it is this process's own.
    pub fn allocate(layout: KvLayout) -> Result<Self, MemoryError> {
        let bytes = layout.arena_bytes();
        let region = match MemoryRegion::allocate_shared(bytes) {
            Err(error @ MemoryError::Share { .. }) => {
                tracing::warn!(%error, "the KV arena is not shared: KV goes to nodes of this host over the network");
                MemoryRegion::allocate(bytes)?
            }
            region => region?,
        };
        Ok(Self { region: Arc::new(region), layout })
    }

    /// The memory: what the transfer engine registers.
    pub fn region(&self) -> &Arc<MemoryRegion> {
        &self.region
    }

    /// How it is laid out.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// One layer of one block: `[kv_head][K|V][token]` rows.
    ///
    /// # Safety
    /// Nothing writes the block while the slice lives.
    pub unsafe fn block(&self, layer: u32, block: BlockId) -> &[u8] {
        let offset = self.layout.offset(layer, block);
        // SAFETY: the caller's promise.
        unsafe { self.region.slice(offset..offset + self.layout.block_bytes()) }
    }

    /// One layer of one block, for writing.
    ///
    /// # Safety
    /// Nothing else reads or writes the block while the slice lives.
    #[allow(clippy::mut_from_ref)] // the arena is shared by design; exclusion is the caller's promise
    pub unsafe fn block_mut(&self, layer: u32, block: BlockId) -> &mut [u8] {
        let offset = self.layout.offset(layer, block);
        // SAFETY: the caller's promise.
        unsafe { self.region.slice_mut(offset..offset + self.layout.block_bytes()) }
    }

    /// A part of one layer of one block, for writing.
    ///
    /// # Safety
    /// Nothing else reads or writes the part while the slice lives.
    ///
    /// # Panics
    /// If the part ends beyond the block.
    #[allow(clippy::mut_from_ref)] // as above
    pub(crate) unsafe fn part_mut(&self, layer: u32, block: BlockId, part: Range<usize>) -> &mut [u8] {
        let offset = self.layout.offset(layer, block);
        let end = self.layout.block_bytes();
        assert!(part.start <= part.end && part.end <= end, "bytes {part:?} of a block of {end}");
        // SAFETY: the caller's promise.
        unsafe { self.region.slice_mut(offset + part.start..offset + part.end) }
    }

    /// Copies one layer of a block out. Only of a complete block that the caller holds.
    ///
    /// # Panics
    /// If `into` is not as long as a block.
    pub fn copy_out(&self, layer: u32, block: BlockId, into: &mut [u8]) {
        // SAFETY: complete blocks are only read, and one that is held stays complete.
        into.copy_from_slice(unsafe { self.block(layer, block) });
    }

    /// Copies one layer of a block in. Only into a block that is the caller's to fill, and that has
    /// no reader before the caller says so.
    ///
    /// # Panics
    /// If `from` is not as long as a block.
    pub fn copy_in(&self, layer: u32, block: BlockId, from: &[u8]) {
        // SAFETY: the caller is the block's only writer, and its readers wait.
        unsafe { self.block_mut(layer, block) }.copy_from_slice(from);
    }

    /// Zeroes one layer of a block from a token on. The rest of a prompt's last block must not
    /// carry an earlier owner's bytes to another machine. Only for a block that the calling step
    /// owns and has finished writing.
    pub fn zero_tail(&self, layer: u32, block: BlockId, from_token: u32) {
        // SAFETY: the block belongs to the step that calls, which is done with this layer of it,
        // and no push of it has begun.
        let record = unsafe { self.block_mut(layer, block) };
        for plane in record.chunks_exact_mut(self.layout.plane_bytes()) {
            plane[self.layout.row_bytes() * from_token as usize..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::KvDtype;

    use super::*;

    #[test]
    fn kv_arena_is_backed_by_a_shared_file() {
        let layout = KvLayout {
            model: 1,
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 4,
            block_tokens: 8,
            dtype: KvDtype::F16,
            num_blocks: 1,
        };
        assert!(KvArena::allocate(layout).unwrap().region().shared_file().is_some());
    }

    #[test]
    fn zero_tail_clears_only_the_last_tokens_of_every_head() {
        let layout = KvLayout {
            model: 1,
            num_layers: 2,
            num_kv_heads: 3,
            head_dim: 4,
            block_tokens: 8,
            dtype: KvDtype::F16,
            num_blocks: 3,
        };
        let arena = KvArena::allocate(layout).unwrap();
        // SAFETY: one thread.
        unsafe { arena.region().slice_mut(0..arena.region().len()).fill(7) };
        arena.zero_tail(1, BlockId(1), 5);
        // SAFETY: one thread.
        let bytes = unsafe { arena.region().slice(0..arena.region().len()) };
        let begin = arena.layout().offset(1, BlockId(1));
        let size = arena.layout().block_bytes();
        for (at, &byte) in bytes.iter().enumerate() {
            let inside = (begin..begin + size).contains(&at);
            let token = (at.wrapping_sub(begin) / 8) % 8;
            assert_eq!(byte, if inside && token >= 5 { 0 } else { 7 }, "byte {at}");
        }
    }
}
