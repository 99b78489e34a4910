//! Prompts that a decode node computes itself, in chunks of a mixed batch: those too short to
//! disturb it, and all of them if no prefill node is left.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::{BlockHasher, Reservation};
use baton_types::{
    ErrorKind, FinishReason, KvTransfer, PrefillEvent, PrefillJob, Refused, RequestKey, TokenId, TokenLogprobs,
};

use super::{DecodeCore, DecodeEffect, HandedOff, Outcome, Phase, Sequence};

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
        if self.sequences.contains_key(&key) {
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
        let max_total_tokens = self.check_job(&job)?;
        let hasher = BlockHasher::new(self.config.model.layout.fingerprint(), &job.salt);
        let hashes = hasher.chain(&job.tokens, self.config.model.layout.block_tokens);
        let handed_off = HandedOff {
            conductor: job.conductor,
            at: now,
            tokens: Arc::new(job.tokens.to_vec()),
            sampling: job.sampling.clone(),
            hasher,
            first_step: None,
            // It has no wait of its own between a handoff and its first step.
            first_token_told: true,
        };
        Ok(Sequence {
            grant: None,
            is_other_class: false,
            turn: self.next_turn(),
            prompt_tokens: job.tokens.len() - job.output_tokens as usize,
            given_tokens: job.tokens.len(),
            max_tokens: job.sampling.max_tokens,
            max_total_tokens,
            hashes,
            blocks: Arc::default(),
            held_blocks: 0,
            head_blocks: 0,
            reservation: Reservation::none(),
            pushes: BTreeSet::new(),
            arrived_bytes: 0,
            expected_bytes: 0,
            handed_off: Some(handed_off),
            phase: Phase::Preempted,
            num_computed_tokens: 0,
            num_complete_blocks: 0,
            local: (!job.is_migration).then(|| LocalPrompt {
                submitted: now,
                started: None,
                prompt_logprobs: Vec::new(),
            }),
            tail: None,
            loading: None,
            fetch: None,
            offered: None,
            told: now,
            in_step: false,
            ended: false,
        })
    }

    /// Most tokens of prompt and output together, if the job can be taken.
    fn check_job(&self, job: &PrefillJob) -> Result<usize, Refused> {
        let refuse = |kind, message| Err(Refused { kind, message });
        let model = &self.config.model;
        let tokens = job.tokens.len();
        let prompt = tokens.saturating_sub(job.output_tokens as usize);
        let context = model.context_length as usize;
        if self.draining {
            return refuse(ErrorKind::Unavailable, "the decode node is draining".into());
        }
        if let Err(error) = job.sampling.validate() {
            return refuse(ErrorKind::Invalid, error.to_string());
        }
        if prompt == 0 || prompt >= context {
            return refuse(ErrorKind::Invalid, format!("a prompt of {prompt} tokens in a context of {context}"));
        }
        if let Some(token) = job.tokens.iter().find(|token| **token >= model.vocab_size) {
            let message = format!("token {token} is not in the vocabulary of {}", model.vocab_size);
            return refuse(ErrorKind::Invalid, message);
        }
        let max_total_tokens = prompt.saturating_add(job.sampling.max_tokens as usize).min(context);
        if tokens >= max_total_tokens && job.output_tokens > 0 {
            let message = format!("{tokens} tokens are here of {max_total_tokens}: nothing to decode");
            return refuse(ErrorKind::Invalid, message);
        }
        let blocks = model.layout.blocks_for(max_total_tokens - 1);
        let total = model.layout.num_blocks as usize;
        if blocks > total {
            let message = format!(
                "{prompt} prompt and {} output tokens take {blocks} blocks, the node has {total}",
                job.sampling.max_tokens
            );
            return refuse(ErrorKind::Invalid, message);
        }
        let open = self.sequences.len();
        let limit = self.config.max_running + self.config.max_waiting;
        if open >= limit {
            let message = format!("{open} sequences are granted, waiting or running, as many as may");
            return refuse(ErrorKind::Overloaded, message);
        }
        Ok(max_total_tokens)
    }

    /// A sequence got its blocks: if its prompt is computed here and this is the first time, its
    /// conductor hears it.
    pub(super) fn on_local_started(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let cached_tokens = sequence.num_computed_tokens as u32;
        let (Some(local), Some(handed_off)) = (&mut sequence.local, &sequence.handed_off) else { return };
        if local.started.replace(now).is_some() {
            return;
        }
        let queue = now.saturating_duration_since(local.submitted);
        let event = PrefillEvent::Started { queue, cached_tokens };
        self.effects.push_back(DecodeEffect::EmitPrefill { conductor: handed_off.conductor, key, event });
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
        let local = sequence.local.as_mut()?;
        let handed_off = sequence.handed_off.as_mut()?;
        Arc::make_mut(&mut handed_off.tokens).push(token);
        let finish = handed_off.finish(sequence.max_total_tokens);
        let conductor = handed_off.conductor;
        let compute = local.started.map_or(Duration::ZERO, |started| now.saturating_duration_since(started));
        let prompt_logprobs = std::mem::take(&mut local.prompt_logprobs);
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
        let Some(sequence) = self.sequences.get(&key).filter(|sequence| !sequence.ended) else { return false };
        let Some(handed_off) = sequence.handed_off.as_ref().filter(|_| sequence.is_prompt()) else { return false };
        let conductor = handed_off.conductor;
        let event = PrefillEvent::Failed(refused.clone());
        self.effects.push_back(DecodeEffect::EmitPrefill { conductor, key, event });
        self.end(key, Outcome::Failed, None);
        true
    }
}
