//! Indexes of `dynamo-kv-router`, with nothing around them: no actor, no async call, no channel on
//! a lookup.
//!
//! Each is called as its own wrapper calls it (`KvIndexer` for the tree, `ThreadPoolIndexer` for
//! the others). `early_exit` is off as there, so that a lookup gives every worker's score. A score
//! is the number of leading blocks, the same as Baton's depth; workers without any are left out by
//! both. Block hashes are made by the crate's own functions.
//!
//! Left out are `BranchShardedIndexer` and the `cuckoo` module. The first spreads prompts over
//! several of these by an async call. The second answers for up to 16 data centres and by chance.

use std::sync::Arc;
use std::thread::JoinHandle;

use baton_bench::index::{Batch, Block, Change, Contender, Index, Workload};
use dynamo_kv_router::indexer::WorkerTask;
use dynamo_kv_router::nested_map::{LevelIndex, SearchMode};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank, compute_block_hash,
    compute_next_seq_hash,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, LowerTierIndexer, PositionalIndexer, RadixTree, SyncIndexer};
use tokio::sync::oneshot;

/// All of them.
pub const CONTENDERS: [Contender; 5] = [
    Contender::of::<Tree>(),
    Contender::of::<Lane<ConcurrentRadixTreeCompressed>>(),
    Contender::of::<Positional<false>>(),
    Contender::of::<Positional<true>>(),
    Contender::of::<Lane<LowerTierIndexer>>(),
];

/// Hashes of each block: of itself, and of the chain up to it.
pub struct Names {
    local: Vec<LocalBlockHash>,
    sequence: Vec<ExternalSequenceBlockHash>,
}

impl Names {
    fn new(workload: &Workload) -> Self {
        let local: Vec<_> =
            (0..workload.parents.len() as u64).map(|block| compute_block_hash(&block.to_le_bytes())).collect();
        let mut sequence: Vec<ExternalSequenceBlockHash> = Vec::with_capacity(local.len());
        for (hash, parent) in local.iter().zip(&workload.parents) {
            let chained = parent.map_or(hash.0, |parent| compute_next_seq_hash(sequence[parent.index()].0, *hash));
            sequence.push(ExternalSequenceBlockHash(chained));
        }
        Self { local, sequence }
    }

    fn sequence(&self, block: Block) -> ExternalSequenceBlockHash {
        self.sequence[block.index()]
    }

    fn event(&self, batch: &Batch) -> RouterEvent {
        let data = match &batch.change {
            Change::Stored { parent, blocks } => {
                let stored = |block: &Block| KvCacheStoredBlockData {
                    block_hash: self.sequence(*block),
                    tokens_hash: self.local[block.index()],
                    mm_extra_info: None,
                };
                KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: parent.map(|parent| self.sequence(parent)),
                    start_position: None,
                    blocks: blocks.iter().map(stored).collect(),
                })
            }
            Change::Removed { blocks } => KvCacheEventData::Removed(KvCacheRemoveData {
                block_hashes: blocks.iter().map(|block| self.sequence(*block)).collect(),
            }),
        };
        // The indexes only log the number of an event.
        RouterEvent::new(batch.node.into(), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
    }

    fn prompt(&self, blocks: &[Block]) -> Vec<LocalBlockHash> {
        blocks.iter().map(|block| self.local[block.index()]).collect()
    }
}

fn depths(scores: OverlapScores) -> Vec<(u32, u32)> {
    let number = |worker: WorkerWithDpRank| u32::try_from(worker.worker_id).expect("numbered here");
    let mut depths: Vec<_> = scores.scores.into_iter().map(|(worker, score)| (number(worker), score)).collect();
    depths.sort_unstable();
    depths
}

/// What all of them have in common.
macro_rules! common {
    () => {
        type Names = Names;
        type Prompt = Vec<LocalBlockHash>;
        type Matches = OverlapScores;

        fn names(workload: &Workload) -> Names {
            Names::new(workload)
        }

        fn prompt(names: &Names, blocks: &[Block]) -> Vec<LocalBlockHash> {
            names.prompt(blocks)
        }

        fn depths(&self, matches: OverlapScores) -> Vec<(u32, u32)> {
            depths(matches)
        }
    };
}

/// For one thread.
pub struct Tree {
    index: RadixTree,
    pending: Vec<RouterEvent>,
}

impl Index for Tree {
    const NAME: &str = "dynamo RadixTree";
    common!();

    fn new(_: &Names) -> Self {
        Self { index: RadixTree::new(), pending: Vec::new() }
    }

    fn enqueue(&mut self, names: &Names, batch: &Batch) {
        self.pending.push(names.event(batch));
    }

    fn drain(&mut self, _: &Names) {
        for event in std::mem::take(&mut self.pending) {
            self.index.apply_event(event).expect("events in order, without a gap");
        }
    }

    fn lookup(&self, prompt: &mut Vec<LocalBlockHash>) -> OverlapScores {
        self.index.find_matches(std::mem::take(prompt), false)
    }
}

/// A step of the jump search; the value that the crate's documentation gives.
const JUMP: usize = 32;

/// A map per position, searched in jumps or in halves.
pub struct Positional<const HALVES: bool> {
    index: PositionalIndexer,
    /// What a thread of the pool has besides the index: where each of its workers' blocks is.
    blocks: WorkerBlocks,
    pending: Vec<RouterEvent>,
}

type WorkerBlocks = std::collections::HashMap<WorkerWithDpRank, LevelIndex, rustc_hash::FxBuildHasher>;

impl<const HALVES: bool> Index for Positional<HALVES> {
    const NAME: &str = if HALVES { "dynamo Positional, binary" } else { "dynamo Positional" };
    common!();

    fn new(_: &Names) -> Self {
        let mode = if HALVES { SearchMode::Binary } else { SearchMode::Strided };
        let index = PositionalIndexer::new_with_mode(JUMP, mode);
        Self { index, blocks: WorkerBlocks::default(), pending: Vec::new() }
    }

    fn enqueue(&mut self, names: &Names, batch: &Batch) {
        self.pending.push(names.event(batch));
    }

    fn drain(&mut self, _: &Names) {
        for event in std::mem::take(&mut self.pending) {
            self.index.apply_event(&mut self.blocks, event, None).expect("events in order, without a gap");
        }
    }

    fn lookup(&self, prompt: &mut Vec<LocalBlockHash>) -> OverlapScores {
        self.index.find_matches(prompt, false)
    }
}

/// An index that applies events in a loop of its own only, and keeps part of its state there. The
/// loop runs on a thread, which has the same core as all else here. It finds the events waiting:
/// applying them takes one switch of threads in all, and taking each one off the queue.
pub struct Lane<T: SyncIndexer> {
    index: Arc<T>,
    tasks: flume::Sender<WorkerTask>,
    waiting: Option<flume::Receiver<WorkerTask>>,
    worker: Option<JoinHandle<()>>,
}

impl<T: SyncIndexer + Default> Lane<T> {
    fn empty() -> Self {
        let (tasks, waiting) = flume::unbounded();
        Self { index: Arc::default(), tasks, waiting: Some(waiting), worker: None }
    }

    fn send(&self, task: WorkerTask) {
        assert!(self.tasks.send(task).is_ok(), "the loop runs until it is told to end");
    }

    fn flush(&mut self) {
        let (done, waiter) = oneshot::channel();
        self.send(WorkerTask::Flush(done));
        if let Some(waiting) = self.waiting.take() {
            let index = Arc::clone(&self.index);
            let run = move || index.worker(waiting, None).expect("the loop ends when told to");
            self.worker = Some(std::thread::spawn(run));
        }
        waiter.blocking_recv().expect("the loop answers");
    }
}

impl<T: SyncIndexer> Drop for Lane<T> {
    fn drop(&mut self) {
        // Both fail only if the loop ended by a panic, which has been reported.
        let _ = self.tasks.send(WorkerTask::Terminate);
        let _ = self.worker.take().map(JoinHandle::join);
    }
}

macro_rules! lane {
    ($index:ty, $name:literal) => {
        impl Index for Lane<$index> {
            const NAME: &str = $name;
            common!();

            fn new(_: &Names) -> Self {
                Self::empty()
            }

            fn enqueue(&mut self, names: &Names, batch: &Batch) {
                self.send(WorkerTask::Event(names.event(batch)));
            }

            fn drain(&mut self, _: &Names) {
                self.flush();
            }

            fn lookup(&self, prompt: &mut Vec<LocalBlockHash>) -> OverlapScores {
                self.index.find_matches(prompt, false)
            }
        }
    };
}

lane!(ConcurrentRadixTreeCompressed, "dynamo ConcurrentRadixTree");
lane!(LowerTierIndexer, "dynamo LowerTierIndexer");
