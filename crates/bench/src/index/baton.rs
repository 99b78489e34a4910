//! Baton's index. Nothing else of the bench knows its interface.

use baton_kv_cache::{Applied, NodeSlot, PrefixIndex, PrefixMatches};
use baton_sim::Random;
use baton_types::{BlockHash, Generation, KvEvent, NodeId};

use super::contender::Index;
use super::workload::{Batch, Block, Change, Workload};

/// No limit that a node here would reach.
const MAX_ENTRIES_PER_NODE: usize = 1 << 24;
const GENERATION: Generation = Generation(1);

/// Hashes of blocks and names of nodes.
pub struct Names {
    hashes: Vec<BlockHash>,
    nodes: Vec<NodeId>,
}

/// Names of that many nodes.
fn nodes(count: u32) -> Vec<NodeId> {
    (0..count).map(|node| NodeId::new(&format!("node-{node:05}")).expect("a name of letters and digits")).collect()
}

/// 128 bits, as a block hash has, of a number.
pub fn hash(number: u64) -> BlockHash {
    let mut random = Random::new(number);
    BlockHash((u128::from(random.next_u64()) << 64 | u128::from(random.next_u64())).to_le_bytes())
}

/// An index that these nodes are in, each in the slot of its number.
fn index_of(nodes: &[NodeId]) -> PrefixIndex {
    let index = PrefixIndex::new(MAX_ENTRIES_PER_NODE);
    for (node, number) in nodes.iter().zip(0..) {
        assert_eq!(index.add_node(node, GENERATION), Some(NodeSlot(number)));
    }
    index
}

/// [`PrefixIndex`] under the trace.
pub struct Baton {
    index: PrefixIndex,
    sequences: Vec<u64>,
    pending: Vec<(u32, Vec<KvEvent>)>,
}

impl Index for Baton {
    const NAME: &str = "baton PrefixIndex";
    type Names = Names;
    type Prompt = Vec<BlockHash>;
    type Matches = PrefixMatches;

    fn names(workload: &Workload) -> Names {
        let hashes = (0..workload.parents.len() as u64).map(hash).collect();
        Names { hashes, nodes: nodes(workload.nodes) }
    }

    fn new(names: &Names) -> Self {
        let index = index_of(&names.nodes);
        Self { index, sequences: vec![0; names.nodes.len()], pending: Vec::new() }
    }

    fn enqueue(&mut self, names: &Names, batch: &Batch) {
        let hash = |block: &Block| names.hashes[block.index()];
        let events = match &batch.change {
            Change::Stored { parent, blocks } => {
                let parents = std::iter::once(*parent).chain(blocks.iter().copied().map(Some));
                let stored = |(block, parent): (&Block, Option<Block>)| KvEvent::Stored {
                    hash: hash(block),
                    parent: parent.as_ref().map(hash),
                };
                blocks.iter().zip(parents).map(stored).collect()
            }
            Change::Removed { blocks } => blocks.iter().map(|block| KvEvent::Removed { hash: hash(block) }).collect(),
        };
        self.pending.push((batch.node, events));
    }

    fn drain(&mut self, names: &Names) {
        for (node, events) in std::mem::take(&mut self.pending) {
            let node = node as usize;
            let applied = self.index.apply(&names.nodes[node], GENERATION, self.sequences[node], &events);
            assert_eq!(applied, Applied::Applied);
            self.sequences[node] += events.len() as u64;
        }
    }

    fn prompt(names: &Names, blocks: &[Block]) -> Vec<BlockHash> {
        blocks.iter().map(|block| names.hashes[block.index()]).collect()
    }

    fn lookup(&self, prompt: &mut Vec<BlockHash>) -> PrefixMatches {
        self.index.matches(prompt)
    }

    fn depths(&self, matches: PrefixMatches) -> Vec<(u32, u32)> {
        let mut depths: Vec<_> = matches.by_slot().iter().map(|(slot, depth)| (slot.0.into(), *depth)).collect();
        depths.sort_unstable();
        depths
    }
}

/// The index as threads share it, for `--large`.
pub struct Shared {
    index: PrefixIndex,
    nodes: Vec<NodeId>,
}

impl Shared {
    /// An empty index.
    pub fn new(nodes: u32) -> Self {
        let nodes = self::nodes(nodes);
        Self { index: index_of(&nodes), nodes }
    }

    /// Applies a node's events, the first of which has that number.
    pub fn apply(&self, node: u32, sequence: u64, events: &[KvEvent]) {
        let applied = self.index.apply(&self.nodes[node as usize], GENERATION, sequence, events);
        assert_eq!(applied, Applied::Applied);
    }

    /// Nodes that hold some of the prompt, and most leading blocks that one of them holds.
    pub fn lookup(&self, prompt: &[BlockHash]) -> (usize, u32) {
        let matches = self.index.matches(prompt);
        (matches.by_slot().len(), matches.by_slot().last().map_or(0, |(_, depth)| *depth))
    }
}
