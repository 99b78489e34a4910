//! A yardstick: a map of the standard library from each block to the set of nodes that hold it.

use std::collections::{HashMap, HashSet};

use baton_types::BlockHash;

use super::baton;
use super::contender::Index;
use super::workload::{Batch, Block, Change, Workload};

/// What one would write first. It has no bound, no generations and no lock.
#[derive(Default)]
pub struct Naive {
    nodes_of: HashMap<BlockHash, HashSet<u32>>,
    pending: Vec<Events>,
}

/// Blocks of one node that came or went.
struct Events {
    node: u32,
    is_stored: bool,
    blocks: Vec<BlockHash>,
}

impl Index for Naive {
    const NAME: &str = "naive map";
    type Names = Vec<BlockHash>;
    type Prompt = Vec<BlockHash>;
    type Matches = HashMap<u32, u32>;

    fn names(workload: &Workload) -> Vec<BlockHash> {
        (0..workload.parents.len() as u64).map(baton::hash).collect()
    }

    fn new(_: &Vec<BlockHash>) -> Self {
        Self::default()
    }

    fn enqueue(&mut self, names: &Vec<BlockHash>, batch: &Batch) {
        let (is_stored, blocks) = match &batch.change {
            Change::Stored { blocks, .. } => (true, blocks),
            Change::Removed { blocks } => (false, blocks),
        };
        self.pending.push(Events { node: batch.node, is_stored, blocks: Self::prompt(names, blocks) });
    }

    fn drain(&mut self, _: &Vec<BlockHash>) {
        for Events { node, is_stored, blocks } in std::mem::take(&mut self.pending) {
            for block in blocks {
                let nodes = self.nodes_of.entry(block).or_default();
                if is_stored {
                    nodes.insert(node);
                } else if nodes.remove(&node) && nodes.is_empty() {
                    self.nodes_of.remove(&block);
                }
            }
        }
    }

    fn prompt(names: &Vec<BlockHash>, blocks: &[Block]) -> Vec<BlockHash> {
        blocks.iter().map(|block| names[block.index()]).collect()
    }

    fn lookup(&self, prompt: &mut Vec<BlockHash>) -> HashMap<u32, u32> {
        let mut depths = HashMap::new();
        for (block, depth) in prompt.iter().zip(0..) {
            let mut is_held = false;
            for node in self.nodes_of.get(block).into_iter().flatten() {
                let blocks = depths.entry(*node).or_insert(0);
                // Only a node that holds all blocks before this one.
                if *blocks == depth {
                    *blocks += 1;
                    is_held = true;
                }
            }
            if !is_held {
                break;
            }
        }
        depths.retain(|_, blocks| *blocks > 0);
        depths
    }

    fn depths(&self, matches: HashMap<u32, u32>) -> Vec<(u32, u32)> {
        let mut depths: Vec<_> = matches.into_iter().collect();
        depths.sort_unstable();
        depths
    }
}
