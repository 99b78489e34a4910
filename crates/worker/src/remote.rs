//! Blocks of another node's arena, as it names them.

use baton_transfer_engine::SegmentDescriptor;
use baton_types::{BlockId, ErrorKind, KvLayout, NodeId, Refused};

/// Another node's arena.
#[derive(Debug, Clone)]
pub struct RemoteArena {
    /// How to reach it.
    pub segment: SegmentDescriptor,
    /// Ours, with its number of blocks.
    pub layout: KvLayout,
}

impl RemoteArena {
    /// What `node` says of its arena, which is laid out as `ours` but for its size, and of blocks
    /// in it. What lies outside it is the node's bug.
    pub fn new(
        node: &NodeId,
        ours: &KvLayout,
        segment: &[u8],
        num_blocks: u32,
        blocks: Vec<u32>,
    ) -> Result<(Self, Vec<BlockId>), Refused> {
        let invalid = |problem: String| Refused { kind: ErrorKind::Internal, message: format!("{node}: {problem}") };
        let segment = SegmentDescriptor::decode(segment).map_err(|error| invalid(error.to_string()))?;
        if let Some(block) = blocks.iter().find(|&&block| block >= num_blocks) {
            return Err(invalid(format!("it named block {block} of {num_blocks}")));
        }
        let layout = KvLayout { num_blocks, ..ours.clone() };
        // Offsets into it fit then.
        let bytes = u64::from(num_blocks).checked_mul(layout.block_bytes_all_layers() as u64);
        if bytes.is_none_or(|bytes| bytes > segment.length) {
            return Err(invalid(format!("it named an arena of {num_blocks} blocks in {} bytes", segment.length)));
        }
        Ok((Self { segment, layout }, blocks.into_iter().map(BlockId).collect()))
    }
}
