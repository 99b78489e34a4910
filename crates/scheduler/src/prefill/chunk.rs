//! Chunks: which requests the engine works on next, and what comes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, BlockId, ErrorKind, GrantRequest, PrefillEvent, PrefillJob, Refused, RequestKey, StepProgress, TokenId,
    TokenLogprobs,
};

use super::request::InStep;
use super::{Active, PrefillCore, PrefillEffect, Queued, Transfer, failed};
use crate::config::PROGRESS_INTERVAL;
use crate::queue::queue_order;
use crate::step::{LogitsWanted, StepId, StepOutput, StepPlan, StepSequence};

/// Most chunks' worth of the last chunk of a prompt whose last part the decode node computes.
pub(crate) const SPLIT_CHUNKS: usize = 2;

/// The step that the engine works on.
#[derive(Debug)]
pub(super) struct RunningStep {
    pub id: StepId,
    /// Who is in it, with the positions computed.
    pub sequences: Vec<(RequestKey, Range<usize>)>,
    began: Instant,
    /// Layers that were reported.
    layers: BTreeSet<u32>,
    /// The last of them, and when.
    last_layer: Option<(u32, Instant)>,
}

impl RunningStep {
    /// Tokens that its layers have done, as parts of all of them; none if the engine does not tell
    /// of its layers.
    pub fn tokens_done(&self, num_layers: u32) -> u64 {
        let tokens: usize = self.sequences.iter().map(|(_, range)| range.len()).sum();
        let done = self.last_layer.map_or(0, |(layer, _)| layer);
        tokens as u64 * u64::from(done) / u64::from(num_layers)
    }

    /// How far it is: layers take the same time each. `None` before the second layer.
    pub fn progress(&self, now: Instant, num_layers: u32) -> Option<StepProgress> {
        // K and V of a layer are final when the layers before it are done, and a little of it.
        let (done, at) = self.last_layer.filter(|(layer, _)| *layer > 0)?;
        let whole = at.saturating_duration_since(self.began) / done * num_layers;
        let elapsed = now.saturating_duration_since(self.began);
        Some(StepProgress { elapsed, left: whole.saturating_sub(elapsed) })
    }
}

impl PrefillCore {
    /// K and V of one layer are final for all rows of the step, and the end of a last block is
    /// zeroed. What the step fills can be pushed.
    pub fn on_kv_ready(&mut self, now: Instant, step: StepId, layer: u32) {
        self.assert_running(step);
        self.layer_ready(now, layer);
    }

    /// Every layer of the step in flight is computed; the output head and sampling follow.
    /// Optional: without it the step's end stands for it.
    pub fn on_layers_done(&mut self, step: StepId, at: Instant) {
        self.assert_running(step);
        self.layers_ended = Some(at);
    }

    /// The step is over. On failure every request in it fails; another node may have better luck.
    ///
    /// # Panics
    /// If it is not the step in flight: the shell is wrong.
    pub fn on_step_done(&mut self, now: Instant, step: StepId, result: Result<Vec<StepOutput>, Refused>) {
        self.assert_running(step);
        if result.is_ok() {
            // An engine that reports no layers has finished them all by now.
            for layer in 0..self.config.model.layout.num_layers {
                self.layer_ready(now, layer);
            }
        }
        let Some(running) = self.step.take() else { return };
        let layers_ended = self.layers_ended.take().unwrap_or(now);
        let (mut outputs, failure) = match result {
            Ok(outputs) => (outputs.into_iter().map(|output| (output.key, output)).collect(), None),
            Err(refused) => (BTreeMap::new(), Some(refused)),
        };
        for (key, range) in running.sequences {
            if let Some(transfer) = self.active.get_mut(&key).and_then(|request| request.transfer.as_mut()) {
                transfer.on_compute_ended(layers_ended);
            }
            self.on_sequence_done(now, key, range, outputs.remove(&key), failure.as_ref());
        }
        self.plan_step(now);
    }

    pub(super) fn assert_running(&self, step: StepId) {
        let running = self.step.as_ref().map(|running| running.id);
        assert_eq!(running, Some(step), "the step reported is not the step in flight");
    }

    fn layer_ready(&mut self, now: Instant, layer: u32) {
        let block_tokens = self.config.model.block_tokens();
        let Some(running) = self.step.as_mut().filter(|running| !running.layers.contains(&layer)) else { return };
        running.layers.insert(layer);
        running.last_layer = Some((layer, now));
        for (key, range) in running.sequences.clone() {
            let counts = |request: &&mut Active| !request.ended && request.in_step == InStep::Yes;
            let Some(request) = self.active.get_mut(&key).filter(counts) else { continue };
            if let Some(transfer) = &mut request.transfer {
                transfer.on_ready(layer, range.start / block_tokens..range.end.div_ceil(block_tokens));
            }
            self.advance_transfer(now, key);
            self.tell_progress(now, key);
        }
    }

    fn on_sequence_done(
        &mut self,
        now: Instant,
        key: RequestKey,
        range: Range<usize>,
        output: Option<StepOutput>,
        failure: Option<&Refused>,
    ) {
        let request = self.active.get_mut(&key).expect("a request in a step stays until the step is over");
        let in_step = std::mem::replace(&mut request.in_step, InStep::No);
        if request.ended {
            return self.release_if_unused(key);
        }
        if let Some(Refused { kind, message }) = failure {
            return self.end(key, Some(failed(*kind, format!("the engine failed: {message}"))));
        }
        if in_step == InStep::Spoiled {
            return;
        }
        assert!(request.fetch.is_none(), "a step is over before the prefix that it waited for");
        let Some(output) = output else {
            return self.end(key, Some(failed(ErrorKind::Internal, "the step gave no output for the request".into())));
        };
        if let Some(Refused { kind, message }) = output.failed {
            if kind == ErrorKind::DataLoss {
                self.forget_prefix(key);
            }
            return self.end(key, Some(failed(kind, message)));
        }
        let is_last = range.end == request.num_tokens();
        if is_last && output.is_mask_late {
            return self.sit_out(key, &range, output.prompt_logprobs);
        }
        request.num_computed_tokens = range.end;
        request.prompt_logprobs.extend(output.prompt_logprobs);
        self.complete_blocks(key, range.end / self.config.model.block_tokens());
        match (is_last, output.sampled) {
            (true, Some((token, logprobs))) => self.on_first_token(now, key, token, logprobs),
            (false, None) => {}
            (_, sampled) => {
                let message = format!("the step sampled {sampled:?}, last chunk: {is_last}");
                self.end(key, Some(failed(ErrorKind::Internal, message)));
            }
        }
    }

    /// Makes the first `full` blocks, which are full, shareable.
    pub(super) fn complete_blocks(&mut self, key: RequestKey, full: usize) {
        let Some(request) = self.active.get_mut(&key) else { return };
        let blocks = request.blocks.clone();
        let hashes = request.hashes.clone();
        let first = request.num_complete_blocks;
        request.num_complete_blocks = first.max(full);
        self.share(&blocks, &hashes, first..full);
    }

    /// Makes these of a prompt's blocks, which are full, shareable.
    pub(super) fn share(&mut self, blocks: &[BlockId], hashes: &[BlockHash], full: Range<usize>) {
        let parent = |index: usize| index.checked_sub(1).map(|parent| hashes[parent]);
        for index in full.clone() {
            self.pool.complete(blocks[index], hashes[index], parent(index));
        }
        for index in full {
            self.stores.queue(&self.pool, hashes[index], parent(index));
        }
        self.start_stores();
    }

    fn on_first_token(&mut self, now: Instant, key: RequestKey, token: TokenId, logprobs: Option<TokenLogprobs>) {
        self.computing.retain(|other| *other != key);
        let Some(request) = self.active.get_mut(&key) else { return };
        let finish = request.finish(token, self.config.model.context_length);
        let event = PrefillEvent::FirstToken {
            token,
            logprobs,
            prompt_logprobs: std::mem::take(&mut request.prompt_logprobs),
            finish,
            compute: now.saturating_duration_since(request.started),
        };
        if finish.is_some() {
            return self.end(key, Some(event));
        }
        request.first_token = Some(token);
        let conductor = request.job.conductor;
        self.emit(conductor, key, event);
        self.advance_transfer(now, key);
    }

    /// Gives the engine its next step, if it is idle and there is something to do.
    pub(super) fn plan_step(&mut self, now: Instant) {
        if self.step.is_some() {
            return;
        }
        let mut sequences = Vec::new();
        let mut budget = self.config.token_budget;
        let mut may_start = true;
        for key in self.queue(now) {
            if budget == 0 {
                break;
            }
            if self.queued.contains_key(&key) {
                let has_place =
                    budget >= self.config.model.block_tokens() && sequences.len() < self.config.max_sequences_per_chunk;
                // If there is no room for one, those behind it do not take what it waits for.
                may_start = may_start && has_place && self.start_queued(now, key).is_some();
                if !may_start {
                    continue;
                }
            }
            self.add_share(now, key, &mut budget, &mut sequences);
            if sequences.iter().any(|sequence| sequence.is_last_chunk) {
                // What else is in it makes its first token wait.
                budget = budget.min(self.config.min_chunk_tokens.saturating_sub(rows(&sequences)));
            }
        }
        if sequences.is_empty() {
            return;
        }
        let id = StepId(self.next_step);
        self.next_step += 1;
        let members = sequences.iter().map(|sequence| (sequence.key, sequence.range.clone())).collect();
        let layers = BTreeSet::new();
        let last_layer = None;
        self.step = Some(RunningStep { id, sequences: members, began: now, layers, last_layer });
        self.effects.push_back(PrefillEffect::RunStep(StepPlan { id, sequences, slice: None }));
    }

    /// Adds a request's share of the chunk: all that is left of its prompt, or whole blocks within
    /// the budget.
    fn add_share(&mut self, now: Instant, key: RequestKey, budget: &mut usize, sequences: &mut Vec<StepSequence>) {
        let block_tokens = self.config.model.block_tokens();
        let Some(request) = self.active.get_mut(&key) else { return };
        let remaining = request.remaining_tokens();
        // In a partial prefill the decode node follows the last chunk alone, so that chunk may be
        // large.
        let is_first = *budget == self.config.token_budget;
        let most = if request.partial_prefill_tokens() > 0 && is_first { SPLIT_CHUNKS * *budget } else { *budget };
        let share = if remaining <= most { remaining } else { *budget / block_tokens * block_tokens };
        let num_layers = self.config.model.layout.num_layers;
        let draws = request.num_computed_tokens + share == request.num_tokens();
        if draws && self.awaiting_mask.contains(&key) {
            return;
        }
        let has_place = share > 0 && sequences.len() < self.config.max_sequences_per_chunk;
        if !has_place || !request.may_compute(now, num_layers, share) {
            return;
        }
        *budget = budget.saturating_sub(share);
        request.in_step = InStep::Yes;
        sequences.push(step_sequence(request, share, block_tokens));
        self.tell_started(now, key);
    }

    /// Tells the conductor, once, that compute begins.
    fn tell_started(&mut self, now: Instant, key: RequestKey) {
        let Some(request) = self.active.get_mut(&key).filter(|request| request.told.is_none()) else { return };
        request.started = now;
        request.told = Some(now);
        let queue = now.saturating_duration_since(request.submitted);
        let event = PrefillEvent::Started { queue, cached_tokens: request.locally_cached_tokens as u32 };
        let conductor = request.job.conductor;
        self.emit(conductor, key, event);
    }

    /// Tells the conductor now and then that compute goes on.
    fn tell_progress(&mut self, now: Instant, key: RequestKey) {
        let is_due = |request: &&mut Active| request.told.is_some_and(|told| now >= told + PROGRESS_INTERVAL);
        let Some(request) = self.active.get_mut(&key).filter(is_due) else { return };
        request.told = Some(now);
        let conductor = request.job.conductor;
        let tokens = request.num_computed_tokens as u32;
        self.emit(conductor, key, PrefillEvent::Progress { tokens });
    }

    /// All whose prompt is to be computed, in the order of the queue: one that has begun may be
    /// passed by one that has not.
    fn queue(&self, now: Instant) -> Vec<RequestKey> {
        let computing = self.computing.iter().filter_map(|key| Some((*key, self.active.get(key)?.item())));
        let queued = self.queued.iter().map(|(key, request)| (*key, request.item()));
        let (keys, items): (Vec<_>, Vec<_>) = computing.chain(queued).unzip();
        queue_order(now, &items).into_iter().map(|index| keys[index]).collect()
    }

    /// Starts a queued request if there is room for its prompt.
    fn start_queued(&mut self, now: Instant, key: RequestKey) -> Option<()> {
        if self.active.len() >= self.config.max_active {
            return None;
        }
        let queued = self.queued.get(&key)?;
        let tokens = queued.job.tokens.len();
        let (matched, missing) = self.room_for(queued);
        if self.pool.check_fits(&matched, missing).is_err() {
            return None;
        }
        self.pool.acquire(&matched);
        let new = self.pool.allocate(missing).ok()?;
        self.lookups.count(tokens, matched.len() * self.config.model.block_tokens());
        let queued = self.remove_queued(key)?;
        let num_cached = matched.len();
        self.start(now, queued, num_cached, Arc::new(matched.into_iter().chain(new).collect()));
        Some(())
    }

    /// Blocks of a prompt that are here, and how many are not.
    fn room_for(&self, queued: &Queued) -> (Vec<BlockId>, usize) {
        let reusable = reusable_blocks(&queued.job, self.config.model.block_tokens());
        let matched = self.pool.match_prefix(&queued.hashes[..reusable]);
        let missing = self.config.model.layout.blocks_for(queued.job.tokens.len()) - matched.len();
        (matched, missing)
    }

    /// Blocks that must be free or cached before the first prompt that waits can start; `None` if
    /// no prompt waits for room.
    pub(super) fn wanted_blocks(&self, now: Instant) -> Option<usize> {
        let may_start = self.active.len() < self.config.max_active;
        let first = self.queue(now).into_iter().find_map(|key| self.queued.get(&key)).filter(|_| may_start)?;
        let (matched, missing) = self.room_for(first);
        Some(self.pool.count_cached(&matched) + missing)
    }

    fn start(&mut self, now: Instant, queued: Queued, num_cached: usize, blocks: Arc<Vec<BlockId>>) {
        let Queued { job, hashes, submitted, turn, .. } = queued;
        let key = job.key;
        let block_tokens = self.config.model.block_tokens();
        let locally_cached_tokens = num_cached * block_tokens;
        self.deadlines.clear(key);
        let fetch = self.fetch_of(now, &job, &hashes[..reusable_blocks(&job, block_tokens)], num_cached);
        let cached_tokens = fetch.as_ref().map_or(locally_cached_tokens, |fetch| fetch.blocks.end * block_tokens);
        let end = end_of_share(&job, cached_tokens, block_tokens);
        let mut request = Active {
            tokens: Arc::new(job.tokens.to_vec()),
            job,
            hashes,
            blocks,
            submitted,
            turn,
            started: now,
            locally_cached_tokens,
            cached_tokens,
            num_computed_tokens: cached_tokens,
            end,
            num_complete_blocks: num_cached,
            fetch: None,
            told: None,
            in_step: InStep::No,
            ended: false,
            prompt_logprobs: Vec::new(),
            first_token: None,
            transfer: None,
        };
        self.request_grant(now, &mut request, num_cached);
        if let Some(fetch) = fetch {
            self.start_fetch(&request, &fetch);
            request.fetch = Some(fetch);
        }
        self.computing.push(key);
        self.active.insert(key, request);
    }

    /// Asks the decode node for room, if more than one token is wanted.
    fn request_grant(&mut self, now: Instant, request: &mut Active, num_cached: usize) {
        let Some(target) = request.job.decode.clone().filter(|_| request.job.wants_decode()) else { return };
        let mut transfer = Transfer::new(target.clone());
        for layer in 0..self.config.model.layout.num_layers {
            transfer.on_ready(layer, 0..num_cached);
        }
        request.transfer = Some(transfer);
        let request = self.grant_request(request, target.tbt);
        self.deadlines.set(request.key, now + self.config.grant_timeout);
        self.effects.push_back(PrefillEffect::RequestGrant { target, request, delay: Duration::ZERO });
    }

    fn grant_request(&self, request: &Active, tbt: Option<Duration>) -> GrantRequest {
        GrantRequest {
            key: request.job.key,
            prefill: self.config.node.clone(),
            prefill_generation: self.config.generation,
            prompt_tokens: request.num_tokens() as u32 - request.job.output_tokens,
            output_tokens: request.job.output_tokens,
            block_hashes: request.hashes.clone(),
            max_tokens: request.job.sampling.max_tokens,
            partial_prefill_tokens: request.partial_prefill_tokens() as u32,
            tbt,
            is_other_class: false,
        }
    }

    /// Asks the request's decode node for a grant.
    pub(super) fn ask_for_grant(&mut self, key: RequestKey, delay: Duration) {
        let Some(request) = self.active.get(&key) else { return };
        let Some(target) = request.transfer.as_ref().map(|transfer| transfer.target.clone()) else { return };
        let request = self.grant_request(request, target.tbt);
        self.effects.push_back(PrefillEffect::RequestGrant { target, request, delay });
    }
}

/// Full blocks of the prompt that may come from the cache. The last token is always computed; all
/// are if the log-probabilities of the prompt are wanted.
pub(super) fn reusable_blocks(job: &PrefillJob, block_tokens: usize) -> usize {
    if job.sampling.prompt_logprobs.is_some() {
        return 0;
    }
    (job.tokens.len() - 1) / block_tokens
}

/// Tokens of a prompt that are computed here: all, unless the decode node is to compute the last
/// part and something is left to compute before it.
fn end_of_share(job: &PrefillJob, cached_tokens: usize, block_tokens: usize) -> usize {
    let all = job.tokens.len();
    let end = job.tokens.len().saturating_sub(job.partial_prefill_tokens as usize);
    let is_decoded = job.decode.is_some() && job.wants_decode() && job.sampling.prompt_logprobs.is_none();
    if is_decoded && end > cached_tokens && end.is_multiple_of(block_tokens) { end } else { all }
}

fn rows(sequences: &[StepSequence]) -> usize {
    sequences.iter().map(|sequence| sequence.range.len()).sum()
}

fn step_sequence(request: &Active, share: usize, block_tokens: usize) -> StepSequence {
    let tokens = request.num_tokens();
    let range = request.num_computed_tokens..request.num_computed_tokens + share;
    let is_last_chunk = range.end == tokens;
    let partial = (tokens % block_tokens) as u32;
    let last_block = request.blocks.last().copied().filter(|_| is_last_chunk && partial > 0);
    let logits = match (request.job.sampling.prompt_logprobs.is_some(), is_last_chunk) {
        (true, _) => LogitsWanted::All,
        (false, true) => LogitsWanted::Last,
        (false, false) => LogitsWanted::None,
    };
    StepSequence {
        key: request.job.key,
        tokens: Arc::clone(&request.tokens),
        prompt_tokens: tokens - request.job.output_tokens as usize,
        range,
        block_table: Arc::clone(&request.blocks),
        logits,
        zero_tail: last_block.map(|block| (block, partial)),
        sampling: request.job.sampling.clone(),
        is_last_chunk,
        awaits_prefix: request.fetch.is_some(),
    }
}
