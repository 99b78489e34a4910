//! The running batch: sequences join and leave at every step.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use baton_types::{
    ConductorId, DecodeEvent, ErrorKind, FinishReason, PrefillEvent, Refused, RequestKey, TokenId, TokenLogprobs,
};

use super::partial_prefill::RunningSlice;
use super::sequence::{Origin, Phase};
use super::{DecodeCore, DecodeEffect, Outcome, failed};
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

impl RunningStep {
    /// The slice's and the sequences'.
    pub(super) fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.slice.iter().map(|slice| slice.key).chain(self.sequences.iter().map(|(key, _)| *key))
    }
}

type StepOutputs = Result<BTreeMap<RequestKey, StepOutput>, Refused>;

fn take_output(outputs: &mut StepOutputs, key: RequestKey) -> Result<Option<StepOutput>, &Refused> {
    match outputs {
        Ok(outputs) => Ok(outputs.remove(&key)),
        Err(refused) => Err(refused),
    }
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
        let mut outputs = result.map(|outputs| outputs.into_iter().map(|output| (output.key, output)).collect());
        if running.sequences.iter().any(|(_, range)| range.len() == 1) {
            self.step_time.observe(now.saturating_duration_since(running.began));
        }
        let mut events = Events::new();
        let mut finished = Vec::new();
        if let Some(slice) = running.slice
            && self.on_slice_done(now, &slice, take_output(&mut outputs, slice.key), &mut events).is_some()
        {
            finished.push(slice.key);
        }
        for (key, range) in running.sequences {
            let result = take_output(&mut outputs, key);
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
        if self.release_ended(key) {
            return None;
        }
        let sequence = self.sequences.get(&key).expect("a sequence in a step stays until the step is over");
        let is_last_chunk = range.end == sequence.tokens.len();
        if let Ok(Some(output)) = &result
            && output.is_mask_late
            && is_last_chunk
        {
            self.sit_out(key, range, &output.prompt_logprobs);
            return None;
        }
        let output = self.check_output(key, is_last_chunk, result)?;
        let sequence = self.sequences.get_mut(&key)?;
        sequence.kv.num_computed_tokens = range.end;
        let is_prompt = sequence.is_prompt();
        if let Origin::Submitted(prompt) = &mut sequence.origin {
            prompt.prompt_logprobs.extend(output.prompt_logprobs);
        }
        self.complete_blocks(key);
        match output.sampled {
            Some((token, logprobs)) if is_prompt => self.on_first_token(now, key, token, logprobs),
            Some((token, logprobs)) => self.on_token(key, token, logprobs, events),
            None => {
                self.tell_progress(now, key);
                None
            }
        }
    }

    /// Tells the conductor now and then that tokens which are no news to it are computed.
    pub(super) fn tell_progress(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        if now >= sequence.last_progress + PROGRESS_INTERVAL {
            sequence.last_progress = now;
            let event = PrefillEvent::Progress { tokens: sequence.kv.num_computed_tokens as u32 };
            self.effects.push_back(DecodeEffect::EmitPrefill { conductor: sequence.conductor, key, event });
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
            Ok(Some(StepOutput { failed: Some(refused), .. })) => {
                if refused.kind == ErrorKind::DataLoss {
                    self.forget_prefix(key);
                }
                self.fail(key, refused);
            }
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
        let finish = sequence.push_token(token);
        let index = (sequence.tokens.len() - sequence.lengths.prompt_tokens - 1) as u32;
        let event = DecodeEvent::Token { index, token, logprobs, finish, queue: sequence.queue.take() };
        events.entry(sequence.conductor).or_default().push((key, event));
        finish
    }

    /// Makes the blocks that are full shareable.
    pub(super) fn complete_blocks(&mut self, key: RequestKey) {
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key).filter(|sequence| !sequence.is_other_class()) else { return };
        sequence.kv.complete(&sequence.tokens, &sequence.hasher, block_tokens, &mut self.pool, &mut self.stores);
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
        self.send_due_migration_requests(now);
    }

    /// Sequences join while there are places, the oldest first. Those that have their blocks need
    /// not wait for those that have none.
    fn admit(&mut self, now: Instant) {
        self.lacks_room = false;
        for (turn, key) in self.waiting.clone() {
            if self.running.len() >= self.config.max_running {
                return;
            }
            // The others do not wait for its grammar, nor do they wait for room that it would take.
            if self.awaits_mask(key) {
                continue;
            }
            let has_room = match self.phase(key) {
                Some(Phase::Loading(_)) => continue,
                Some(Phase::Waiting) => true,
                // If one finds none, those behind it do not take what it waits for.
                _ => !self.lacks_room && self.find_room(now, key),
            };
            self.lacks_room |= !has_room;
            // What comes from the tier first lets it join later.
            if has_room && !matches!(self.phase(key), Some(Phase::Loading(_))) {
                self.waiting.remove(&turn);
                self.join(now, key);
            }
        }
    }

    fn phase(&self, key: RequestKey) -> Option<&Phase> {
        self.sequences.get(&key).map(|sequence| &sequence.phase)
    }

    fn join(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.phase = Phase::Running;
        if let Some(since) = sequence.queued_since.take() {
            sequence.queue = Some(now.saturating_duration_since(since));
        }
        self.running.push(key);
    }

    /// One token of each sequence that decodes, and layers of a partial prefill, or chunks of what
    /// else is to be computed. The oldest first, within the budget.
    fn run_batch(&mut self, now: Instant) {
        let held_until = now + self.config.grant_wait;
        let slice = self.next_slice();
        let mut budget = if slice.is_some() { 0 } else { self.config.prompt_budget };
        let mut by_age = self.running.clone();
        by_age.sort_by_key(|key| self.sequences.get(key).map(|sequence| sequence.turn));
        let sequences: Vec<StepSequence> =
            by_age.into_iter().filter_map(|key| self.add_to_step(key, held_until, &mut budget)).collect();
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

    fn add_to_step(&mut self, key: RequestKey, held_until: Instant, budget: &mut usize) -> Option<StepSequence> {
        if self.awaits_mask(key) || self.lacks_block(key) || self.sequences.get_mut(&key)?.hold_last_token(held_until) {
            return None;
        }
        // A partial prefill goes through the layers, with its tokens together.
        let sequence = self.sequences.get(&key).filter(|sequence| sequence.partial_prefill().is_none())?;
        let remaining = sequence.remaining_tokens();
        let share = if remaining == 1 { 1 } else { remaining.min(*budget) };
        if share == 0 {
            return None;
        }
        if remaining > 1 {
            *budget -= share;
        }
        Some(sequence.step_sequence(key, share))
    }
}
