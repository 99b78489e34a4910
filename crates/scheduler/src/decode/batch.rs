//! The running batch: sequences join and leave at every step.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use baton_types::{
    ConductorId, DecodeEvent, ErrorKind, FinishReason, PrefillEvent, Refused, RequestKey, TokenId, TokenLogprobs,
};

use super::partial_prefill::RunningSlice;
use super::{DecodeCore, DecodeEffect, Outcome, Phase, failed};
use crate::config::PROGRESS_INTERVAL;
use crate::step::{StepId, StepOutput, StepPlan, StepSequence};

/// The step that the engine works on.
#[derive(Debug)]
pub(super) struct RunningStep {
    pub id: StepId,
    pub began: Instant,
    /// Who is in it, with the positions computed.
    pub sequences: Vec<(RequestKey, Range<usize>)>,
    pub slice: Option<RunningSlice>,
}

/// One step's events, by conductor.
pub(super) type Events = BTreeMap<ConductorId, Vec<(RequestKey, DecodeEvent)>>;

impl DecodeCore {
    /// The step is over. On failure every sequence in it fails; another node may have better luck.
    ///
    /// # Panics
    /// If it is not the step in flight: the shell is wrong.
    pub fn on_step_done(&mut self, now: Instant, step: StepId, result: Result<Vec<StepOutput>, Refused>) {
        let running = self.step.take().filter(|running| running.id == step);
        let running = running.expect("the step reported is not the step in flight");
        let (mut outputs, failure) = match result {
            Ok(outputs) => (outputs.into_iter().map(|output| (output.key, output)).collect(), None),
            Err(refused) => (BTreeMap::new(), Some(refused)),
        };
        if running.sequences.iter().any(|(_, range)| range.len() == 1) {
            self.step_time.observe(now.saturating_duration_since(running.began));
        }
        let mut result_of = |key| match &failure {
            Some(refused) => Err(refused),
            None => Ok(outputs.remove(&key)),
        };
        let mut events = Events::new();
        let mut finished = Vec::new();
        if let Some(slice) = running.slice
            && self.on_slice_done(&slice, result_of(slice.key), &mut events).is_some()
        {
            finished.push(slice.key);
        }
        for (key, range) in running.sequences {
            let result = result_of(key);
            if self.on_sequence_done(now, key, range, result, &mut events).is_some() {
                finished.push(key);
            }
        }
        let emits = events.into_iter().map(|(conductor, events)| DecodeEffect::Emit { conductor, events });
        self.effects.extend(emits);
        for key in finished {
            self.end(key, Outcome::Finished, None);
        }
        self.plan_step(now);
    }

    /// Takes in what a step gave for a sequence; tells why its token was the last one, if it was.
    fn on_sequence_done(
        &mut self,
        now: Instant,
        key: RequestKey,
        range: Range<usize>,
        result: Result<Option<StepOutput>, &Refused>,
        events: &mut Events,
    ) -> Option<FinishReason> {
        let sequence = self.sequences.get_mut(&key).expect("a sequence in a step stays until the step is over");
        sequence.in_step = false;
        if sequence.ended {
            self.release_if_unused(key);
            return None;
        }
        let is_last_chunk = range.end == sequence.num_tokens();
        let output = self.check_output(key, is_last_chunk, result)?;
        let sequence = self.sequences.get_mut(&key)?;
        sequence.num_computed_tokens = range.end;
        if let Some(local) = &mut sequence.local {
            local.prompt_logprobs.extend(output.prompt_logprobs);
        }
        let is_prompt = sequence.is_prompt();
        self.complete_blocks(key);
        let Some((token, logprobs)) = output.sampled else {
            self.tell_progress(now, key);
            return None;
        };
        match is_prompt {
            true => self.on_first_token(now, key, token, logprobs),
            false => self.on_token(key, token, logprobs, events),
        }
    }

    /// Tells the conductor now and then that tokens which are no news to it are computed.
    fn tell_progress(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Some(handed_off) = &sequence.handed_off else { return };
        if now >= sequence.told + PROGRESS_INTERVAL {
            sequence.told = now;
            let event = PrefillEvent::Progress { tokens: sequence.num_computed_tokens as u32 };
            self.effects.push_back(DecodeEffect::EmitPrefill { conductor: handed_off.conductor, key, event });
        }
    }

    /// What a step gave for a sequence that goes on. Fails the sequence if the step failed, or drew
    /// no token at its end, or one before.
    pub(super) fn check_output(
        &mut self,
        key: RequestKey,
        is_last: bool,
        result: Result<Option<StepOutput>, &Refused>,
    ) -> Option<StepOutput> {
        match result {
            Ok(Some(StepOutput { failed: Some(refused), .. })) => self.fail(key, refused),
            Ok(Some(output)) if output.sampled.is_some() == is_last => return Some(output),
            Ok(output) => {
                let sampled = output.and_then(|output| output.sampled);
                let message = format!("the step sampled {sampled:?}, last part: {is_last}");
                self.fail(key, Refused { kind: ErrorKind::Internal, message });
            }
            Err(Refused { kind, message }) => {
                self.fail(key, Refused { kind: *kind, message: format!("the engine failed: {message}") });
            }
        }
        None
    }

    pub(super) fn fail(&mut self, key: RequestKey, refused: Refused) {
        if !self.end_local(key, &refused) {
            self.end(key, Outcome::Failed, Some(failed(refused.kind, refused.message)));
        }
    }

    pub(super) fn on_token(
        &mut self,
        key: RequestKey,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        events: &mut Events,
    ) -> Option<FinishReason> {
        let sequence = self.sequences.get_mut(&key)?;
        let handed_off = sequence.handed_off.as_mut()?;
        Arc::make_mut(&mut handed_off.tokens).push(token);
        let finish = handed_off.finish(sequence.max_total_tokens);
        let told = std::mem::replace(&mut handed_off.first_token_told, true);
        let wait = handed_off.first_step.map(|step| step.saturating_duration_since(handed_off.at));
        let index = (handed_off.tokens.len() - sequence.prompt_tokens - 1) as u32;
        let event = DecodeEvent::Token { index, token, logprobs, finish, queue: wait.filter(|_| !told) };
        events.entry(handed_off.conductor).or_default().push((key, event));
        finish
    }

    /// Makes the blocks that are full shareable.
    pub(super) fn complete_blocks(&mut self, key: RequestKey) {
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key).filter(|sequence| !sequence.is_other_class) else { return };
        let Some(handed_off) = &sequence.handed_off else { return };
        let full = sequence.num_computed_tokens / block_tokens;
        for index in sequence.num_complete_blocks..full {
            let parent = index.checked_sub(1).map(|parent| sequence.hashes[parent]);
            if index == sequence.hashes.len() {
                let tokens = &handed_off.tokens[index * block_tokens..(index + 1) * block_tokens];
                sequence.hashes.push(handed_off.hasher.next(parent, tokens));
            }
            self.pool.complete(sequence.blocks[index], sequence.hashes[index], parent);
            self.stores.queue(&self.pool, sequence.hashes[index], parent);
        }
        sequence.num_complete_blocks = sequence.num_complete_blocks.max(full);
        self.start_stores();
    }

    /// Gives the engine its next step, if it is idle and there is something to do. Grants that wait
    /// for room come after all sequences that are here.
    pub(super) fn plan_step(&mut self, now: Instant) {
        if self.step.is_none() {
            self.admit(now);
            self.make_room();
            if self.running.is_empty() {
                // A preempted sequence left a slot to an older one.
                self.admit(now);
                self.make_room();
            }
            self.run_batch(now);
        }
        self.answer_asked(now);
        self.offer_due(now);
    }

    /// Sequences join while there are places, the oldest first. Those that have their blocks need
    /// not wait for those that have none.
    fn admit(&mut self, now: Instant) {
        self.lacks_room = false;
        for (turn, key) in self.waiting.clone() {
            if self.running.len() >= self.config.max_running {
                return;
            }
            if self.is_loading(key) {
                continue;
            }
            let has_blocks = self.sequences.get(&key).is_some_and(|sequence| sequence.phase == Phase::Waiting);
            // If one finds none, those behind it do not take what it waits for.
            let has_room = has_blocks || !self.lacks_room && self.find_room(now, key);
            self.lacks_room |= !has_room;
            // What comes from the tier first lets it join later.
            if has_room && !self.is_loading(key) {
                self.waiting.remove(&turn);
                self.join(now, key);
            }
        }
    }

    fn is_loading(&self, key: RequestKey) -> bool {
        self.sequences.get(&key).is_some_and(|sequence| sequence.loading.is_some())
    }

    fn join(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.phase = Phase::Running;
        if let Some(handed_off) = &mut sequence.handed_off {
            handed_off.first_step.get_or_insert(now);
        }
        self.running.push(key);
    }

    /// One token of each sequence that decodes, and layers of a partial prefill, or chunks of what
    /// else is to be computed. The oldest first, within the budget.
    fn run_batch(&mut self, now: Instant) {
        let slice = self.next_slice();
        let mut budget = if slice.is_some() { 0 } else { self.config.prompt_budget };
        let mut by_age = self.running.clone();
        by_age.sort_by_key(|key| self.sequences.get(key).map(|sequence| sequence.turn));
        let sequences: Vec<StepSequence> =
            by_age.into_iter().filter_map(|key| self.add_to_step(key, &mut budget)).collect();
        if sequences.is_empty() {
            self.step_time.forget();
        }
        if sequences.is_empty() && slice.is_none() {
            return;
        }
        let id = StepId(self.next_step);
        self.next_step += 1;
        let members = sequences.iter().map(|sequence| (sequence.key, sequence.range.clone())).collect();
        let running = slice.as_ref().map(RunningSlice::from);
        self.step = Some(RunningStep { id, began: now, sequences: members, slice: running });
        self.effects.push_back(DecodeEffect::RunStep(StepPlan { id, sequences, slice }));
    }

    fn add_to_step(&mut self, key: RequestKey, budget: &mut usize) -> Option<StepSequence> {
        if self.lacks_block(key) {
            return None;
        }
        // A partial prefill goes through the layers, with its tokens together.
        let sequence = self.sequences.get_mut(&key).filter(|sequence| sequence.tail.is_none())?;
        let remaining = sequence.remaining_tokens();
        let share = if remaining == 1 { 1 } else { remaining.min(*budget) };
        if share == 0 {
            return None;
        }
        if remaining > 1 {
            *budget -= share;
        }
        sequence.in_step = true;
        sequence.step_sequence(key, share)
    }
}
