//! Handoffs: what a prefill node says of a request whose KV it writes here.

use std::collections::btree_map::Entry;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::BlockHasher;
use baton_types::{ErrorKind, GrantId, Handoff, Refused, RequestKey};

use super::grant::{Granted, refused};
use super::sequence::{LastToken, Origin, Phase, Sequence};
use super::{DecodeCore, DecodeEffect, Outcome};
use crate::config::ModelConfig;

impl DecodeCore {
    /// The prefill node hands a sequence off. Answered by [`DecodeEffect::HandoffReply`]; a handoff
    /// that is told twice is accepted twice and counts once.
    pub fn on_handoff(&mut self, now: Instant, handoff: Handoff) {
        let key = handoff.key;
        let result = self.accept(now, handoff);
        self.effects.push_back(DecodeEffect::HandoffReply { key, result });
        self.admit_if_complete(now, key);
        if self.partial_prefills.contains(&key) {
            self.plan_step(now);
        }
    }

    fn accept(&mut self, now: Instant, handoff: Handoff) -> Result<(), Refused> {
        let key = handoff.key;
        let Entry::Occupied(entry) = self.granted.entry(key) else { return self.check_again(&handoff) };
        check_grant(&handoff, Some(entry.get().grant.id))?;
        let hasher = BlockHasher::new(self.config.model.layout.fingerprint(), &handoff.salt);
        if let Err(message) = entry.get().check_handoff(&handoff, &hasher, &self.config.model) {
            self.end(key, Outcome::Failed, None);
            return refused(ErrorKind::Invalid, message);
        }
        let sequence = entry.remove().into_sequence(now, handoff, hasher);
        self.sequences.insert(key, sequence);
        self.deadlines.set(key, now + self.config.grant_ttl);
        Ok(())
    }

    /// The answer to a handoff that was told before, or that comes too late.
    fn check_again(&self, handoff: &Handoff) -> Result<(), Refused> {
        if let Some(sequence) = self.sequences.get(&handoff.key) {
            return check_grant(handoff, sequence.grant().map(|grant| grant.id));
        }
        match self.tombstones.of(handoff.key) {
            Some(Outcome::Finished) => Ok(()),
            Some(Outcome::Aborted) => refused(ErrorKind::Cancelled, "the request was aborted".into()),
            Some(Outcome::Failed) | None => {
                refused(ErrorKind::Unavailable, format!("grant {} is not open", handoff.grant.0))
            }
        }
    }

    /// Puts a sequence in line for the batch once it is here whole, and closes its grant.
    pub(super) fn admit_if_complete(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Origin::Granted(grant) = &sequence.origin else { return };
        if sequence.phase != Phase::Receiving || !grant.is_complete() {
            return;
        }
        sequence.phase = Phase::Waiting;
        self.pool.received(&sequence.kv.blocks[grant.receiving.clone()]);
        if self.grants.contains_key(&grant.id) {
            self.effects.push_back(DecodeEffect::RevokeGrant { grant: grant.id });
        }
        self.deadlines.clear(key);
        self.waiting.insert(sequence.turn, key);
        self.complete_blocks(key);
        self.plan_step(now);
    }
}

/// Compares the grant that a handoff names with that of the request.
fn check_grant(handoff: &Handoff, grant: Option<GrantId>) -> Result<(), Refused> {
    if grant == Some(handoff.grant) {
        return Ok(());
    }
    let has = grant.map_or_else(|| "none".to_owned(), |grant| grant.0.to_string());
    let message = format!("the handoff names grant {}, the request has {has}", handoff.grant.0);
    refused(ErrorKind::Invalid, message)
}

fn check_same<T: Display + PartialEq>(field: &str, granted: T, handed: T) -> Result<(), String> {
    if granted == handed { Ok(()) } else { Err(format!("{field}: {granted} granted, {handed} handed off")) }
}

impl Granted {
    /// Compares the handoff with what was granted. The hashes prove that blocks which were here
    /// already belong to this very prompt.
    fn check_handoff(&self, handoff: &Handoff, hasher: &BlockHasher, model: &ModelConfig) -> Result<(), String> {
        check_same("tokens", self.lengths.given_tokens, handoff.tokens.len())?;
        check_same("max_tokens", self.max_tokens, handoff.sampling.max_tokens)?;
        check_same("bytes", self.grant.expected_bytes, handoff.expected_bytes)?;
        handoff.sampling.validate().map_err(|error| error.to_string())?;
        match (&self.grant.partial_prefill, handoff.first_token) {
            (Some(_), Some(token)) => {
                return Err(format!("first_token: {token} handed off, but this node computes the partial prefill"));
            }
            (None, None) => return Err("first_token: none handed off".to_owned()),
            (Some(_), None) | (None, Some(_)) => {}
        }
        let mut tokens = handoff.tokens.iter().chain(&handoff.first_token);
        if let Some(token) = tokens.find(|token| **token >= model.vocab_size) {
            return Err(format!("token {token} is not in the vocabulary of {}", model.vocab_size));
        }
        if hasher.chain(&handoff.tokens, model.layout.block_tokens) != self.kv.hashes {
            return Err("the prompt does not have the block hashes that the grant was asked with".into());
        }
        Ok(())
    }

    fn into_sequence(self, now: Instant, handoff: Handoff, hasher: BlockHasher) -> Sequence {
        let mut tokens = Vec::with_capacity(self.lengths.max_total_tokens.min(handoff.tokens.len() + 1024));
        tokens.extend_from_slice(&handoff.tokens);
        tokens.extend(handoff.first_token);
        Sequence {
            turn: self.turn,
            origin: Origin::Granted(self.grant),
            conductor: handoff.conductor,
            lengths: self.lengths,
            tokens: Arc::new(tokens),
            awaits_mask: handoff.sampling.grammar.is_some(),
            sampling: handoff.sampling,
            hasher,
            kv: self.kv,
            phase: Phase::Receiving,
            queued_since: handoff.first_token.map(|_| now),
            queue: None,
            last_migration_request: None,
            last_progress: self.since,
            last_token: LastToken::Ahead,
        }
    }
}
