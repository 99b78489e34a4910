//! A prefill node: its queue in the policy's order, its cache, one chunk after the other.

use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::{BlockPool, TierCache};
use baton_scheduler::{MIN_CHUNK_PART, QueueItem, queue_order};
use baton_types::{BlockHash, BlockId, QueueTerms, StepProgress};

use crate::trace::BLOCK_TOKENS;
use baton_profile::{ModelProfile, attended};

/// A prompt as it comes to the node.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// Index of the request.
    pub request: usize,
    pub tokens: u32,
    /// Of its full blocks.
    pub hashes: Arc<[BlockHash]>,
    pub arrived: Instant,
    pub terms: QueueTerms,
    /// Part of a chunk's work that this node does: less than 1 where others do the rest.
    pub share_of_work: f64,
    /// Of a part that helps another node, which holds the blocks: tokens that need not be computed.
    pub helps_from: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Holds nothing.
    Queued,
    /// Holds room for a prefix that is under way.
    Fetching,
    /// Holds its prefix, and room for that only.
    Fetched,
    /// Holds all of its blocks.
    Computing,
}

#[derive(Debug)]
struct Prompt {
    job: Job,
    turn: u64,
    state: State,
    blocks: Vec<BlockId>,
    /// Leading blocks that are hashed.
    complete: usize,
    num_computed_tokens: u32,
    cached_tokens: u32,
    fetched_tokens: u32,
    ssd_tokens: u32,
}

impl Prompt {
    fn item(&self) -> QueueItem {
        let left = f64::from(self.left()) / f64::from((self.job.tokens - self.cached_tokens).max(1));
        QueueItem { terms: self.job.terms, arrived: self.job.arrived, turn: self.turn, left }
    }

    fn left(&self) -> u32 {
        self.job.tokens - self.num_computed_tokens
    }

    /// Full blocks that may come from a cache: the last token is always computed.
    fn reusable(&self) -> usize {
        if self.job.helps_from.is_some() {
            return 0;
        }
        (((self.job.tokens - 1) / BLOCK_TOKENS) as usize).min(self.job.hashes.len())
    }
}

/// A part of a chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    pub request: usize,
    pub from: u32,
    pub to: u32,
    /// As in [`Job::share_of_work`].
    pub of_work: f64,
}

/// A prompt that is computed.
#[derive(Debug)]
pub(crate) struct Computed {
    pub request: usize,
    pub blocks: Vec<BlockId>,
    pub cached_tokens: u32,
    pub fetched_tokens: u32,
    pub ssd_tokens: u32,
}

/// One prefill node.
#[derive(Debug)]
pub(crate) struct PrefillNode {
    pub pool: BlockPool,
    /// Written through when a prompt lets go of its blocks.
    pub ssd: Option<TierCache>,
    chunk_tokens: u32,
    min_chunk_tokens: u32,
    prompts: Vec<Prompt>,
    running: Vec<Share>,
    /// When the chunk began and when it will be done.
    under_way: Option<(Instant, Instant)>,
    turns: u64,
}

impl PrefillNode {
    pub(crate) fn new(pool: BlockPool, ssd: Option<TierCache>, profile: &ModelProfile) -> Self {
        let chunk_tokens = profile.chunk_tokens.next_multiple_of(BLOCK_TOKENS);
        let min_chunk_tokens = chunk_tokens / MIN_CHUNK_PART as u32;
        Self {
            pool,
            ssd,
            chunk_tokens,
            min_chunk_tokens,
            prompts: Vec::new(),
            running: Vec::new(),
            under_way: None,
            turns: 0,
        }
    }

    pub(crate) fn submit(&mut self, job: Job) {
        self.turns += 1;
        let cached_tokens = job.helps_from.unwrap_or(0);
        self.prompts.push(Prompt {
            state: if job.helps_from.is_some() { State::Computing } else { State::Queued },
            job,
            turn: self.turns,
            blocks: Vec::new(),
            complete: 0,
            num_computed_tokens: cached_tokens,
            cached_tokens,
            fetched_tokens: 0,
            ssd_tokens: 0,
        });
    }

    /// Makes room for the first `blocks` blocks of a queued prompt; how many of them are missing, and not 0. `None` where nothing is missing, or there is no room.
    pub(crate) fn begin_fetch(&mut self, request: usize, blocks: usize) -> Option<usize> {
        let prompt = self.prompts.iter_mut().find(|prompt| prompt.job.request == request)?;
        let wanted = blocks.min(prompt.reusable());
        let held = self.pool.match_prefix(&prompt.job.hashes[..wanted]);
        let missing = wanted - held.len();
        if missing == 0 || self.pool.check_fits(&held, missing).is_err() {
            return None;
        }
        self.pool.acquire(&held);
        prompt.complete = held.len();
        prompt.cached_tokens = held.len() as u32 * BLOCK_TOKENS;
        prompt.blocks = held;
        prompt.blocks.extend(self.pool.allocate(missing).ok()?);
        prompt.state = State::Fetching;
        Some(missing)
    }

    /// The prefix is here: from another node, or from this node's SSD.
    pub(crate) fn end_fetch(&mut self, request: usize, from_ssd: bool) {
        let Some(index) = self.prompts.iter().position(|prompt| prompt.job.request == request) else { return };
        let prompt = &mut self.prompts[index];
        prompt.state = State::Fetched;
        let held = prompt.blocks.len();
        let tokens = (held - prompt.complete) as u32 * BLOCK_TOKENS;
        (prompt.ssd_tokens, prompt.fetched_tokens) = if from_ssd { (tokens, 0) } else { (0, tokens) };
        prompt.num_computed_tokens = held as u32 * BLOCK_TOKENS;
        prompt.cached_tokens = prompt.num_computed_tokens;
        self.complete_blocks(index);
    }

    fn complete_blocks(&mut self, index: usize) {
        let prompt = &mut self.prompts[index];
        let full = ((prompt.num_computed_tokens / BLOCK_TOKENS) as usize).min(prompt.job.hashes.len());
        for block in prompt.complete..full {
            let parent = block.checked_sub(1).map(|parent| prompt.job.hashes[parent]);
            self.pool.complete(prompt.blocks[block], prompt.job.hashes[block], parent);
        }
        prompt.complete = full.max(prompt.complete);
    }

    /// The next chunk, if the node is idle and has something to do: its parts, and how long it takes.
    pub(crate) fn plan(&mut self, now: Instant, profile: &ModelProfile) -> Option<(Vec<Share>, f64)> {
        if !self.running.is_empty() {
            return None;
        }
        let items: Vec<_> = self.prompts.iter().map(Prompt::item).collect();
        let order = queue_order(now, &items);
        let (mut budget, mut may_start) = (self.chunk_tokens, true);
        for index in order.iter().copied() {
            if budget == 0 {
                break;
            }
            match self.prompts[index].state {
                State::Fetching => continue,
                State::Queued | State::Fetched if !may_start => continue,
                State::Queued | State::Fetched => {
                    may_start = self.start(index) || (self.make_room(&order, index) && self.start(index));
                    if !may_start {
                        continue;
                    }
                }
                State::Computing => {}
            }
            budget -= self.add_share(index, budget);
            if self.running.iter().any(|share| self.is_last(share)) {
                let rows: u32 = self.running.iter().map(|share| share.to - share.from).sum();
                budget = budget.min(self.min_chunk_tokens.saturating_sub(rows));
            }
        }
        let seconds = self.running.iter().map(|share| {
            let work = profile.prefill_step(share.to - share.from, attended(share.from, share.to));
            (work - profile.prefill_base) * share.of_work
        });
        let seconds = profile.prefill_base + seconds.sum::<f64>();
        (!self.running.is_empty()).then(|| (self.running.clone(), seconds))
    }

    /// Whether the prompt is computed with it.
    fn is_last(&self, share: &Share) -> bool {
        self.prompts.iter().any(|prompt| prompt.job.request == share.request && prompt.job.tokens == share.to)
    }

    /// Adds a prompt's part: all that is left of it, or whole blocks within the budget; its tokens.
    fn add_share(&mut self, index: usize, budget: u32) -> u32 {
        let prompt = &self.prompts[index];
        let left = prompt.left();
        let share = if left <= budget { left } else { budget / BLOCK_TOKENS * BLOCK_TOKENS };
        if share == 0 {
            return 0;
        }
        let from = prompt.num_computed_tokens;
        self.running.push(Share {
            request: prompt.job.request,
            from,
            to: from + share,
            of_work: prompt.job.share_of_work,
        });
        share
    }

    /// Takes the blocks for a prompt; whether there was room.
    fn start(&mut self, index: usize) -> bool {
        let prompt = &mut self.prompts[index];
        let total = prompt.job.tokens.div_ceil(BLOCK_TOKENS) as usize;
        if prompt.state == State::Queued {
            let held = self.pool.match_prefix(&prompt.job.hashes[..prompt.reusable()]);
            if self.pool.check_fits(&held, total - held.len()).is_err() {
                return false;
            }
            self.pool.acquire(&held);
            prompt.complete = held.len();
            prompt.cached_tokens = held.len() as u32 * BLOCK_TOKENS;
            prompt.num_computed_tokens = prompt.cached_tokens;
            prompt.blocks = held;
        }
        let Ok(blocks) = self.pool.allocate(total - prompt.blocks.len()) else { return false };
        prompt.blocks.extend(blocks);
        prompt.state = State::Computing;
        true
    }

    /// Where nobody computes and the first prompt lacks room, those behind it give up what was fetched for them. Whether anything was freed.
    fn make_room(&mut self, order: &[usize], first: usize) -> bool {
        if self.prompts.iter().any(|prompt| prompt.state == State::Computing) {
            return false;
        }
        let mut freed = false;
        for &index in order.iter().filter(|index| **index != first) {
            let prompt = &mut self.prompts[index];
            if prompt.state == State::Fetched {
                self.pool.release(&std::mem::take(&mut prompt.blocks));
                prompt.state = State::Queued;
                (prompt.complete, prompt.num_computed_tokens, prompt.cached_tokens) = (0, 0, 0);
                (prompt.fetched_tokens, prompt.ssd_tokens) = (0, 0);
                freed = true;
            }
        }
        freed
    }

    /// The chunk that was planned takes so long.
    pub(crate) fn begin_chunk(&mut self, began: Instant, ends: Instant) {
        self.under_way = Some((began, ends));
    }

    /// How far the chunk under way is.
    pub(crate) fn progress(&self, now: Instant) -> Option<StepProgress> {
        self.under_way.map(|(began, ends)| StepProgress {
            elapsed: now.saturating_duration_since(began),
            left: ends.saturating_duration_since(now),
        })
    }

    /// The chunk is computed: the prompts that are complete now. Their blocks are theirs until [`Self::release`].
    pub(crate) fn on_chunk_done(&mut self) -> Vec<Computed> {
        self.under_way = None;
        let mut done = Vec::new();
        for share in std::mem::take(&mut self.running) {
            let position = self.prompts.iter().position(|prompt| prompt.job.request == share.request);
            let Some(index) = position else { continue };
            self.prompts[index].num_computed_tokens = share.to;
            self.complete_blocks(index);
            if self.prompts[index].left() == 0 {
                let Prompt { job, blocks, cached_tokens, fetched_tokens, ssd_tokens, .. } = self.prompts.remove(index);
                done.push(Computed { request: job.request, blocks, cached_tokens, fetched_tokens, ssd_tokens });
            }
        }
        done
    }

    /// Tokens that are to be computed, as the node reports them.
    pub(crate) fn queued_tokens(&self, now: Instant) -> u64 {
        let left = |prompt: &Prompt| match prompt.state {
            State::Queued => {
                let held = self.pool.match_prefix(&prompt.job.hashes[..prompt.reusable()]).len() as u32;
                u64::from(prompt.job.tokens - held * BLOCK_TOKENS)
            }
            State::Fetching => u64::from(prompt.job.tokens - prompt.blocks.len() as u32 * BLOCK_TOKENS),
            State::Fetched | State::Computing => u64::from(prompt.left()),
        };
        let rows: u32 = self.running.iter().map(|share| share.to - share.from).sum();
        let done = self.progress(now).map_or(0.0, |StepProgress { elapsed, left }| {
            f64::from(rows) * elapsed.as_secs_f64() / (elapsed + left).as_secs_f64().max(1e-9)
        });
        self.prompts.iter().map(left).sum::<u64>().saturating_sub(done as u64)
    }

    /// Seconds of work that wait here.
    pub(crate) fn backlog_s(&self, profile: &ModelProfile) -> f64 {
        let seconds =
            |prompt: &Prompt| profile.prompt(prompt.job.tokens, prompt.num_computed_tokens) * prompt.job.share_of_work;
        self.prompts.iter().map(seconds).sum()
    }

    /// How much of a prompt is in memory, and how much with what the SSD has of the rest, blocks.
    pub(crate) fn held(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let memory = self.pool.match_prefix(hashes).len();
        let ssd = self.ssd.as_ref().map_or(0, |ssd| ssd.match_prefix(&hashes[memory..]));
        (memory, memory + ssd)
    }

    /// Prompts that are not computed.
    pub(crate) fn waiting(&self) -> usize {
        self.prompts.len()
    }
}
