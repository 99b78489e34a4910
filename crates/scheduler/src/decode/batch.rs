//! The running batch: sequences join and leave at every step.

use std::collections::BTreeMap;
use std::time::Instant;

use baton_types::{ConductorId, DecodeEvent, ErrorKind, FinishReason, Refused, RequestKey, TokenId, TokenLogprobs};

use super::{DecodeCore, DecodeEffect, Outcome, Phase, failed};
use crate::step::{StepId, StepOutput, StepPlan};

/// The step that the engine works on.
#[derive(Debug)]
pub(super) struct RunningStep {
    pub id: StepId,
    pub keys: Vec<RequestKey>,
}

/// One step's events, by conductor.
type Events = BTreeMap<ConductorId, Vec<(RequestKey, DecodeEvent)>>;

impl DecodeCore {
    /// The step is over. On failure every sequence in it fails; another node may have better luck.
    ///
    /// # Panics
    /// If it is not the step in flight: the shell is wrong.
    pub fn on_step_done(&mut self, now: Instant, step: StepId, result: Result<Vec<StepOutput>, Refused>) {
        let running = self.step.take().filter(|running| running.id == step);
        let running = running.expect("the step reported is not the step in flight");
        let (mut outputs, failure) = match result {
            Ok(outputs) => (outputs.into_iter().map(|output| (output.key, output.sampled)).collect(), None),
            Err(refused) => (BTreeMap::new(), Some(refused)),
        };
        let mut events = Events::new();
        let mut finished = Vec::new();
        for key in running.keys {
            let sampled = outputs.remove(&key).flatten();
            if self.on_sequence_done(key, sampled, failure.as_ref(), &mut events).is_some() {
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

    /// Takes in a sequence's token; tells why it was the last one, if it was.
    fn on_sequence_done(
        &mut self,
        key: RequestKey,
        sampled: Option<(TokenId, Option<TokenLogprobs>)>,
        failure: Option<&Refused>,
        events: &mut Events,
    ) -> Option<FinishReason> {
        let sequence = self.sequences.get_mut(&key).expect("a sequence in a step stays until the step is over");
        sequence.in_step = false;
        if sequence.ended {
            self.release_if_unused(key);
            return None;
        }
        match (failure, sampled) {
            (Some(Refused { kind, message }), _) => {
                self.end(key, Outcome::Failed, Some(failed(*kind, format!("the engine failed: {message}"))));
                None
            }
            (None, None) => {
                let message = "the step gave no token for the sequence".to_owned();
                self.end(key, Outcome::Failed, Some(failed(ErrorKind::Internal, message)));
                None
            }
            (None, Some((token, logprobs))) => self.on_token(key, token, logprobs, events),
        }
    }

    fn on_token(
        &mut self,
        key: RequestKey,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        events: &mut Events,
    ) -> Option<FinishReason> {
        self.complete_block(key);
        let sequence = self.sequences.get_mut(&key)?;
        let handed_over = sequence.handed_over.as_mut()?;
        handed_over.tokens.push(token);
        let finish = handed_over.finish(sequence.max_total_tokens);
        let told = std::mem::replace(&mut handed_over.first_token_told, true);
        let wait = handed_over.first_step.map(|step| step.saturating_duration_since(handed_over.at));
        let index = (handed_over.tokens.len() - sequence.prompt_tokens - 1) as u32;
        let event = DecodeEvent::Token { index, token, logprobs, finish, queue: wait.filter(|_| !told) };
        events.entry(handed_over.conductor).or_default().push((key, event));
        finish
    }

    /// The KV of the last token is in the arena: if that filled a block, it can be shared.
    fn complete_block(&mut self, key: RequestKey) {
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Some(handed_over) = &mut sequence.handed_over else { return };
        let num_kv_tokens = handed_over.tokens.len();
        if !num_kv_tokens.is_multiple_of(block_tokens) {
            return;
        }
        let block = sequence.blocks[num_kv_tokens / block_tokens - 1];
        let parent = handed_over.last_hash;
        let hash = handed_over.hasher.next(parent, &handed_over.tokens[num_kv_tokens - block_tokens..]);
        handed_over.last_hash = Some(hash);
        self.pool.complete(block, hash, parent);
    }

    /// Gives the engine its next step, if it is idle and there is something to do.
    pub(super) fn plan_step(&mut self, now: Instant) {
        if self.step.is_some() {
            return;
        }
        while self.running.len() < self.config.max_running {
            let Some(key) = self.waiting.pop_front() else { break };
            self.join(now, key);
        }
        if self.running.is_empty() {
            return;
        }
        let id = StepId(self.next_step);
        self.next_step += 1;
        let keys = self.running.clone();
        let sequences = keys.iter().filter_map(|key| self.add_to_step(*key)).collect();
        self.step = Some(RunningStep { id, keys });
        self.effects.push_back(DecodeEffect::RunStep(StepPlan { id, sequences }));
    }

    fn join(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.phase = Phase::Running;
        if let Some(handed_over) = &mut sequence.handed_over {
            handed_over.first_step = Some(now);
        }
        self.running.push(key);
    }

    /// A running sequence's part of the next step, with a block for its last token.
    fn add_to_step(&mut self, key: RequestKey) -> Option<crate::step::StepSequence> {
        let block_tokens = self.config.model.block_tokens();
        let sequence = self.sequences.get_mut(&key)?;
        if sequence.blocks.len() * block_tokens < sequence.num_tokens() {
            let block = self.pool.allocate_reserved(&mut sequence.reservation);
            sequence.blocks.push(block);
        }
        sequence.in_step = true;
        sequence.step_sequence(key)
    }
}
