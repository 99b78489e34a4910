//! Prompts that a decode node computes itself, in chunks of a mixed batch: those too short to
//! disturb it, and all of them if no prefill node is left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockHasher;
use baton_types::{
    ErrorKind, FinishReason, KvTransfer, PrefillEvent, PrefillJob, Refused, RequestKey, TokenId, TokenLogprobs,
};

use super::kv::SequenceKv;
use super::sequence::{LastToken, Lengths, Origin, Phase, Sequence};
use super::{DecodeCore, DecodeEffect, Outcome};

/// What only a prompt that is computed here has.
#[derive(Debug)]
pub(super) struct LocalPrompt {
    submitted: Instant,
    /// When it got its blocks for the first time.
    started: Option<Instant>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

impl DecodeCore {
    /// A conductor wants a prompt computed, and answered, here. One that is here already is
    /// ignored; one that cannot be taken fails at once.
    pub fn on_submit(&mut self, now: Instant, job: PrefillJob) {
        let key = job.key;
        let conductor = job.conductor;
        if self.is_here(key) {
            return;
        }
        if job.is_migration {
            return self.on_resume(now, job);
        }
        match self.local_sequence(now, job) {
            Ok(sequence) => {
                self.waiting.insert(sequence.turn, key);
                self.sequences.insert(key, sequence);
                self.plan_step(now);
            }
            Err(refused) => {
                let event = PrefillEvent::Failed(refused);
                self.effects.push_back(DecodeEffect::EmitPrefill { conductor, key, event });
            }
        }
    }

    pub(super) fn local_sequence(&mut self, now: Instant, job: PrefillJob) -> Result<Sequence, Refused> {
        let lengths = self.check_job(&job)?;
        let hasher = BlockHasher::new(self.config.model.layout.fingerprint(), &job.salt);
        let hashes = hasher.chain(&job.tokens, self.config.model.layout.block_tokens);
        let prompt = LocalPrompt { submitted: now, started: None, prompt_logprobs: Vec::new() };
        Ok(Sequence {
            turn: self.next_turn(),
            origin: if job.is_migration { Origin::Migrated } else { Origin::Submitted(prompt) },
            conductor: job.conductor,
            lengths,
            tokens: Arc::new(job.tokens.to_vec()),
            awaits_mask: job.sampling.grammar.is_some(),
            sampling: job.sampling,
            hasher,
            kv: SequenceKv::new(hashes),
            phase: Phase::Preempted,
            queued_since: None,
            queue: None,
            last_migration_request: None,
            last_progress: now,
            last_token: LastToken::Ahead,
        })
    }

    /// The lengths of the sequence, if the job can be taken.
    fn check_job(&self, job: &PrefillJob) -> Result<Lengths, Refused> {
        let refuse = |kind, message| Err(Refused { kind, message });
        let model = &self.config.model;
        let tokens = job.tokens.len();
        let prompt = tokens.saturating_sub(job.output_tokens as usize);
        if self.draining {
            return refuse(ErrorKind::Unavailable, "the decode node is draining".into());
        }
        if let Err(error) = job.sampling.validate() {
            return refuse(ErrorKind::Invalid, error.to_string());
        }
        let lengths = Lengths::new(model, prompt, tokens, job.sampling.max_tokens);
        if prompt == 0 || tokens >= lengths.max_total_tokens {
            let message = format!(
                "{prompt} prompt and {} output tokens, of which {} are given, and this node holds {}: nothing to decode",
                job.sampling.max_tokens,
                job.output_tokens,
                model.layout.max_sequence_tokens(model.context_length)
            );
            return refuse(ErrorKind::Invalid, message);
        }
        if let Some(token) = job.tokens.iter().find(|token| **token >= model.vocab_size) {
            let message = format!("token {token} is not in the vocabulary of {}", model.vocab_size);
            return refuse(ErrorKind::Invalid, message);
        }
        let open = self.num_requests();
        let limit = self.config.max_running + self.config.max_waiting;
        if open >= limit {
            let message = format!("{open} sequences are granted, waiting or running, as many as may");
            return refuse(ErrorKind::Overloaded, message);
        }
        Ok(lengths)
    }

    /// A sequence got its blocks: if its prompt is computed here and this is the first time, its
    /// conductor hears it.
    pub(super) fn on_local_started(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Origin::Submitted(prompt) = &mut sequence.origin else { return };
        if prompt.started.replace(now).is_some() {
            return;
        }
        let queue = now.saturating_duration_since(prompt.submitted);
        let event = PrefillEvent::Started { queue, cached_tokens: sequence.kv.num_computed_tokens as u32 };
        self.effects.push_back(DecodeEffect::EmitPrefill { conductor: sequence.conductor, key, event });
    }

    /// The first token drawn of a prompt that was computed here; tells why it is the last one, if
    /// it is.
    pub(super) fn on_first_token(
        &mut self,
        now: Instant,
        key: RequestKey,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<FinishReason> {
        let sequence = self.sequences.get_mut(&key)?;
        let finish = sequence.push_token(token);
        let conductor = sequence.conductor;
        let Origin::Submitted(prompt) = &mut sequence.origin else { return finish };
        let compute = prompt.started.map_or(Duration::ZERO, |started| now.saturating_duration_since(started));
        let prompt_logprobs = std::mem::take(&mut prompt.prompt_logprobs);
        let event = PrefillEvent::FirstToken { token, logprobs, prompt_logprobs, finish, compute };
        self.effects.push_back(DecodeEffect::EmitPrefill { conductor, key, event });
        if finish.is_none() {
            // There is nothing to hand off, so none need wait for it.
            let event = PrefillEvent::HandedOff(KvTransfer::default());
            self.effects.push_back(DecodeEffect::EmitPrefill { conductor, key, event });
        }
        finish
    }

    /// Before its first token the request is its prefill's, afterwards its decoding's.
    pub(super) fn end_local(&mut self, key: RequestKey, refused: &Refused) -> bool {
        let Some(sequence) = self.sequences.get(&key).filter(|sequence| sequence.is_prompt()) else { return false };
        let conductor = sequence.conductor;
        let event = PrefillEvent::Failed(refused.clone());
        self.effects.push_back(DecodeEffect::EmitPrefill { conductor, key, event });
        self.end(key, Outcome::Failed, None);
        true
    }
}
