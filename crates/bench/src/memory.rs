//! The memory of one end: allocated, touched, filled and compared in one place.

#![allow(unsafe_code)] // bytes of a region are reached through unsafe functions only; the two ends take turns, see each SAFETY note

use std::io::{self, Read, Write};
use std::sync::Arc;

use baton_memory::MemoryRegion;

use crate::BenchError;
use crate::layout::Layout;
use crate::plan::Plan;

/// Working set of one end.
///
/// An end fills, clears and compares the bytes only while no batch is under way, which the control
/// connection orders. A bare loop has the region for itself.
#[derive(Debug, Clone)]
pub struct Memory(Arc<MemoryRegion>);

impl Memory {
    /// A plan's working set full of zeros, every page of it touched.
    pub fn cleared(plan: &Plan) -> Result<Self, BenchError> {
        let memory = Self::allocate(plan)?;
        memory.clear();
        Ok(memory)
    }

    /// A plan's working set full of a pattern in which no two words are alike.
    pub fn filled(plan: &Plan) -> Result<Self, BenchError> {
        let memory = Self::allocate(plan)?;
        for (word, bytes) in (0_u64..).zip(memory.bytes_mut().chunks_mut(8)) {
            bytes.copy_from_slice(&pattern(word)[..bytes.len()]);
        }
        Ok(memory)
    }

    fn allocate(plan: &Plan) -> Result<Self, BenchError> {
        let bytes = to_usize(plan.working_set)?;
        let region = if plan.carrier.shares_memory() {
            MemoryRegion::allocate_shared(bytes)?
        } else {
            MemoryRegion::allocate(bytes)?
        };
        Ok(Self(Arc::new(region)))
    }

    /// The region, to register.
    pub fn region(&self) -> Arc<MemoryRegion> {
        Arc::clone(&self.0)
    }

    /// Zeros everywhere.
    pub fn clear(&self) {
        self.bytes_mut().fill(0);
    }

    /// Compares what so many blocks of a run, from `first` on, have left in the destination.
    pub fn verify(&self, plan: &Plan, first: u64, blocks: u64) -> Result<(), BenchError> {
        let layout = Layout::new(plan);
        self.compare(plan.block_bytes, layout.all(first..first + blocks.min(layout.blocks())))
    }

    /// Compares blocks, given by source and destination offset, with the pattern of the source.
    pub fn compare(&self, block_bytes: u64, blocks: impl Iterator<Item = (u64, u64)>) -> Result<(), BenchError> {
        for (block, (source, destination)) in (0_u64..).zip(blocks) {
            // SAFETY: no batch is under way, so that no peer writes.
            let bytes = unsafe { self.0.slice(destination as usize..(destination + block_bytes) as usize) };
            if !is_pattern(source, bytes) {
                return Err(BenchError::Wrong { block, offset: destination });
            }
        }
        Ok(())
    }

    /// Writes one block to a stream.
    pub fn send(&self, offset: u64, len: u64, to: &mut impl Write) -> io::Result<()> {
        // SAFETY: the source of a bare loop is read only.
        to.write_all(unsafe { self.0.slice(offset as usize..(offset + len) as usize) })
    }

    /// Reads one block from a stream.
    pub fn receive(&self, offset: u64, len: u64, from: &mut impl Read) -> io::Result<()> {
        // SAFETY: the one thread of the bare loop is all that reaches the destination while it
        // runs.
        from.read_exact(unsafe { self.0.slice_mut(offset as usize..(offset + len) as usize) })
    }

    /// Copies one block into another end's memory.
    pub fn copy_to(&self, offset: u64, to: &Self, to_offset: u64, len: u64) {
        // SAFETY: two regions, one thread.
        let (from, to) = unsafe {
            let from = self.0.slice(offset as usize..(offset + len) as usize);
            (from, to.0.slice_mut(to_offset as usize..(to_offset + len) as usize))
        };
        to.copy_from_slice(from);
    }

    #[allow(clippy::mut_from_ref)] // as of the region
    fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: no batch is under way and no other slice lives: private, and callers drop it
        // before they return.
        unsafe { self.0.slice_mut(0..self.0.len()) }
    }
}

fn to_usize(bytes: u64) -> Result<usize, BenchError> {
    usize::try_from(bytes)
        .map_err(|_| BenchError::invalid("--working-set", format!("{bytes}, which no address reaches")))
}

/// Fibonacci hashing: no word is zero, and none is like another.
fn pattern(word: u64) -> [u8; 8] {
    (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

/// Whether these are the pattern's bytes from `offset` on.
fn is_pattern(offset: u64, bytes: &[u8]) -> bool {
    let skip = (offset % 8) as usize;
    let head = bytes.len().min((8 - skip) % 8);
    let word = offset / 8;
    let first = u64::from(skip > 0);
    let (head, rest) = bytes.split_at(head);
    pattern(word)[skip..].starts_with(head)
        && (word + first..).zip(rest.chunks(8)).all(|(word, bytes)| pattern(word)[..bytes.len()] == *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Method;
    use crate::plan::tests::{SHM, plan};

    fn pair(carrier: Method, working_set: u64) -> (Memory, Memory) {
        let plan = Plan { working_set, ..plan(carrier) };
        (Memory::filled(&plan).unwrap(), Memory::cleared(&plan).unwrap())
    }

    #[test]
    fn copied_block_has_the_pattern_and_a_wrong_byte_is_found() {
        // 1003 is no multiple of a word: blocks begin and end within words.
        let (source, target) = pair(SHM, 10_030);
        let blocks = || (0..10_u64).map(|k| (k * 1003, (9 - k) * 1003));
        assert!(matches!(target.compare(1003, blocks()), Err(BenchError::Wrong { block: 0, offset: 9027 })));
        for (from, to) in blocks() {
            source.copy_to(from, &target, to, 1003);
        }
        target.compare(1003, blocks()).unwrap();
        target.bytes_mut()[5000] ^= 1;
        assert!(matches!(target.compare(1003, blocks()), Err(BenchError::Wrong { block: 5, offset: 4012 })));
    }

    #[test]
    fn block_sent_over_a_stream_arrives_unchanged() {
        let (source, target) = pair(Method::CopyLoop, 4096);
        let mut wire = Vec::new();
        source.send(1024, 512, &mut wire).unwrap();
        target.receive(2048, 512, &mut wire.as_slice()).unwrap();
        target.compare(512, [(1024, 2048)].into_iter()).unwrap();
    }
}
