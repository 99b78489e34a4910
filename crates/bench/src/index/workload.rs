//! What the nodes report, and what is asked: the same for every index, and known before any clock
//! starts.

use std::collections::{HashMap, VecDeque};

use baton_sim::Random;

use crate::BenchError;

/// A block, by the order of first use. Indexes make their own hashes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block(pub u32);

impl Block {
    /// As an index into [`Workload::parents`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Events of one node, of one kind.
#[derive(Debug)]
pub struct Batch {
    /// From 0.
    pub node: u32,
    /// What happened there.
    pub change: Change,
}

/// What happened to blocks of a node.
#[derive(Debug)]
pub enum Change {
    /// A chain, and the block that it continues.
    Stored {
        /// The block before the first of them; none if they begin a prompt.
        parent: Option<Block>,
        /// One after the other.
        blocks: Vec<Block>,
    },
    /// Blocks that went.
    Removed {
        /// Children before their parents.
        blocks: Vec<Block>,
    },
}

/// A block sequence that is asked for.
#[derive(Debug)]
pub struct Prompt {
    /// From the first.
    pub blocks: Vec<Block>,
    /// Leading blocks that each node holds in the end, nodes that hold none left out. Ordered by
    /// node.
    pub depths: Vec<(u32, u32)>,
}

/// Requests of a trace, each to a node drawn by chance. The trace is played as often as it takes to
/// fill the nodes' caches one and a quarter times. In each copy all blocks are new, but for those
/// that every prompt begins with. So conversations share what they shared, and all prompts share
/// what all shared.
#[derive(Debug)]
pub struct Workload {
    /// Nodes that report.
    pub nodes: u32,
    /// Times that the trace is played.
    pub copies: u32,
    /// Requests of all copies.
    pub requests: usize,
    /// In the order in which they happen.
    pub batches: Vec<Batch>,
    /// Blocks stored, over all batches.
    pub stored: usize,
    /// Blocks removed.
    pub removed: usize,
    /// Pairs of a block and a node that holds it in the end.
    pub entries: usize,
    /// Of each block, the one before it, which always has the smaller number.
    pub parents: Vec<Option<Block>>,
    /// Every prompt of the trace, each of another copy, to be asked one by one.
    pub one_by_one: Vec<Prompt>,
    /// The same of other copies, to be asked in a row.
    pub in_a_row: Vec<Prompt>,
}

/// How often the caches are filled.
const FILLS: f64 = 1.25;

impl Workload {
    /// Plays the trace.
    pub fn new(prompts: &[Vec<u64>], nodes: u32, capacity: u32, seed: u64) -> Result<Self, BenchError> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        if longest > capacity as usize {
            let problem = format!("expected {longest} or more, which the longest prompt has");
            return Err(BenchError::invalid("--capacity", problem));
        }
        let mut blocks = Blocks::new(prompts);
        let mut caches: Vec<_> = (0..nodes).map(|_| Cache::default()).collect();
        let mut random = Random::new(seed);
        let mut batches = Vec::new();
        let mut copies = Vec::new();
        let mut stored = 0;
        let mut removed = 0;
        let enough = (f64::from(nodes) * f64::from(capacity) * FILLS) as usize;
        while stored < enough {
            blocks.start_replication();
            let copy = prompts.iter().map(|prompt| blocks.number(prompt)).collect::<Result<Vec<_>, _>>()?;
            for prompt in &copy {
                let node = random.below(nodes.into()) as u32;
                let (gone, held) = caches[node as usize].take_in(prompt, capacity as usize);
                removed += gone.len();
                stored += prompt.len() - held;
                if !gone.is_empty() {
                    batches.push(Batch { node, change: Change::Removed { blocks: gone } });
                }
                if held < prompt.len() {
                    let parent = held.checked_sub(1).map(|last| prompt[last]);
                    batches.push(Batch { node, change: Change::Stored { parent, blocks: prompt[held..].to_vec() } });
                }
            }
            copies.push(copy);
        }
        let pick = |shift: usize| {
            let of = |n: usize| copies[(n + shift) % copies.len()][n].clone();
            (0..prompts.len()).map(|n| Prompt::new(of(n), &caches)).collect()
        };
        Ok(Self {
            nodes,
            requests: copies.len() * prompts.len(),
            batches,
            stored,
            removed,
            entries: caches.iter().map(|cache| cache.last_use.len()).sum(),
            one_by_one: pick(0),
            in_a_row: pick(copies.len() / 2),
            copies: copies.len() as u32,
            parents: blocks.parents,
        })
    }
}

impl Prompt {
    fn new(blocks: Vec<Block>, caches: &[Cache]) -> Self {
        let depth = |cache: &Cache| blocks.iter().take_while(|block| cache.last_use.contains_key(block)).count() as u32;
        let depths = (0..).zip(caches.iter().map(depth)).filter(|(_, depth)| *depth > 0).collect();
        Self { blocks, depths }
    }
}

/// Numbers for the trace's ids.
struct Blocks {
    /// What every prompt begins with.
    common: usize,
    numbers: HashMap<u64, Block>,
    parents: Vec<Option<Block>>,
}

impl Blocks {
    fn new(prompts: &[Vec<u64>]) -> Self {
        let shared = |prompt: &Vec<u64>| prompt.iter().zip(&prompts[0]).take_while(|(a, b)| a == b).count();
        let common = prompts.iter().map(shared).min().unwrap_or(0);
        Self { common, numbers: HashMap::new(), parents: Vec::new() }
    }

    fn start_replication(&mut self) {
        let common = self.common as u32;
        self.numbers.retain(|_, block| block.0 < common);
    }

    fn number(&mut self, prompt: &[u64]) -> Result<Vec<Block>, BenchError> {
        let mut parent = None;
        let mut blocks = Vec::with_capacity(prompt.len());
        for id in prompt {
            let block = *self.numbers.entry(*id).or_insert_with(|| {
                self.parents.push(parent);
                Block(self.parents.len() as u32 - 1)
            });
            if self.parents[block.index()] != parent {
                return Err(BenchError::invalid(
                    "--trace",
                    format!("block {id} has two parents: expected an id per prefix"),
                ));
            }
            parent = Some(block);
            blocks.push(block);
        }
        Ok(blocks)
    }
}

/// A node's cache. A use of a block is a use of all before it, so that children go before their
/// parents.
#[derive(Default)]
struct Cache {
    last_use: HashMap<Block, u64>,
    /// In the order of use; those used again since are passed over.
    uses: VecDeque<(Block, u64)>,
    clock: u64,
}

impl Cache {
    /// What had to go, and how many leading blocks were there.
    fn take_in(&mut self, prompt: &[Block], capacity: usize) -> (Vec<Block>, usize) {
        let held = prompt.iter().take_while(|block| self.last_use.contains_key(block)).count();
        for block in prompt.iter().rev() {
            self.clock += 1;
            self.last_use.insert(*block, self.clock);
            self.uses.push_back((*block, self.clock));
        }
        let mut gone = Vec::new();
        while self.last_use.len() > capacity {
            let (block, at) = self.uses.pop_front().expect("every block that is held has a use");
            if self.last_use.get(&block) == Some(&at) {
                self.last_use.remove(&block);
                gone.push(block);
            }
        }
        (gone, held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_workload_batches_add_up_to_the_cached_blocks() {
        // One block that all begin with, and two conversations.
        let prompts = [vec![1, 2, 3], vec![1, 4, 5, 6], vec![1, 2, 3, 7]];
        let workload = Workload::new(&prompts, 3, 5, 1).unwrap();
        let mut held = vec![Vec::new(); 3];
        for Batch { node, change } in &workload.batches {
            let held: &mut Vec<Block> = &mut held[*node as usize];
            match change {
                Change::Stored { parent, blocks } => {
                    assert!(parent.is_none_or(|parent| held.contains(&parent)), "{parent:?}");
                    assert!(blocks.iter().all(|block| !held.contains(block)), "{blocks:?}");
                    held.extend(blocks);
                }
                Change::Removed { blocks } => {
                    assert!(blocks.iter().all(|block| held.contains(block)), "{blocks:?}");
                    held.retain(|block| !blocks.contains(block));
                }
            }
            assert!(held.len() <= 5);
        }
        assert_eq!(held.iter().map(Vec::len).sum::<usize>(), workload.entries);
        assert_eq!(workload.stored - workload.removed, workload.entries);
        assert!(workload.stored >= 3 * 5 * 5 / 4 && workload.removed > 0);
        assert_eq!(workload.one_by_one.len(), prompts.len());
        for prompt in workload.one_by_one.iter().chain(&workload.in_a_row) {
            for (node, blocks) in (0..).zip(&held) {
                let depth = prompt.blocks.iter().take_while(|block| blocks.contains(block)).count() as u32;
                let found = prompt.depths.iter().find(|(holder, _)| *holder == node);
                assert_eq!(found.map_or(0, |(_, depth)| *depth), depth);
            }
        }
    }

    #[test]
    fn inconsistent_index_workload_names_its_flag() {
        let error = |prompts: &[Vec<u64>], capacity| Workload::new(prompts, 2, capacity, 1).unwrap_err().to_string();
        assert_eq!(error(&[vec![1, 2]], 1), "--capacity: expected 2 or more, which the longest prompt has");
        assert!(error(&[vec![1, 2], vec![3, 2]], 9).starts_with("--trace: block 2 has two parents"));
    }
}
