//! Migration: sequences go on at another decode node, because their own has no room for them or is
//! on its way out. A sequence that may get longer than its node can hold needs a larger node. If
//! none takes it, its output ends.
//!
//! ```text
//!   there: preempted, outgrowing or draining ─▶ RequestMigration, now and then ──────────────────────────────────────▶ on_abort, once it is taken
//!   here:  on_submit of a migration     ─▶ blocks, Fetch of the full ones ─▶ on_fetch_done ─▶ AnswerMigration ─▶ the rest is computed, tokens
//!                       └─ no room now: AnswerMigration, refused; it stays at its node
//! ```
//!
//! Until the conductor hears that it is taken the sequence is the other node's, which goes on with
//! it as soon as it can. What could not be fetched comes from this node's tier, once no fetch is
//! under way, or is computed: the tokens are the same.

use std::ops::Range;
use std::time::{Duration, Instant};

use baton_types::{ErrorKind, FetchReport, FetchSource, PrefillJob, Refused, RequestKey};

use super::sequence::{Origin, Phase, Sequence};
use super::{DecodeCore, DecodeEffect, Outcome};
use crate::prefill::FetchedBytes;

/// Blocks on their way here.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fetch {
    /// Which of the sequence's.
    blocks: Range<usize>,
    asked: Instant,
}

fn nothing_fetched(elapsed: Duration, failure: Option<Refused>) -> FetchReport {
    FetchReport { tokens: 0, bytes: 0, transport: String::new(), elapsed, failure }
}

impl Sequence {
    /// Whether another decode node may take it: there is an output to go on with, and the next
    /// tokens would be the same there. If the prompt is of another KV compatibility class they
    /// might not be, and some may come from both nodes.
    fn wants_migration(&self, draining: bool) -> bool {
        let must_leave = draining || self.is_outgrowing();
        let waits = self.phase == Phase::Preempted || must_leave && self.has_blocks();
        // What migrated here has an output, whether or not a token was drawn since.
        let has_migrated = matches!(self.origin, Origin::Migrated);
        waits && !self.is_other_class() && (has_migrated || self.tokens.len() > self.lengths.given_tokens)
    }
}

impl DecodeCore {
    /// Offers what wants room, and was not offered lately.
    pub(super) fn send_due_migration_requests(&mut self, now: Instant) {
        self.next_migration_request = None;
        if self.waiting.is_empty() && !self.draining && !self.has_outgrowing() {
            return;
        }
        for (&key, sequence) in
            self.sequences.iter_mut().filter(|(_, sequence)| sequence.wants_migration(self.draining))
        {
            let last =
                sequence.last_migration_request.filter(|last| now < *last + self.config.migration_request_interval);
            if last.is_none() {
                let output_tokens = (sequence.tokens.len() - sequence.lengths.prompt_tokens) as u32;
                self.effects.push_back(DecodeEffect::RequestMigration {
                    conductor: sequence.conductor,
                    key,
                    output_tokens,
                });
            }
            let last = *sequence.last_migration_request.insert(last.unwrap_or(now));
            let due = last + self.config.migration_request_interval;
            self.next_migration_request = Some(self.next_migration_request.map_or(due, |next| next.min(due)));
        }
    }

    fn has_outgrowing(&self) -> bool {
        self.running.iter().filter_map(|key| self.sequences.get(key)).any(Sequence::is_outgrowing)
    }

    /// Whether a sequence of another node would get a place now, if there are blocks for it.
    pub(super) fn check_accepts_migrations(&self) -> Result<(), Refused> {
        let refuse = |kind, message: String| Err(Refused { kind, message });
        if self.draining {
            return refuse(ErrorKind::Unavailable, "the decode node is draining".into());
        }
        if self.lacks_room || !self.waiting_grants.is_empty() {
            return refuse(ErrorKind::Overloaded, "others wait for room".into());
        }
        let coming = self.sequences.values().filter(|sequence| matches!(sequence.phase, Phase::Fetching(_)));
        let occupied = self.running.len() + self.waiting.len() + coming.count();
        let slots = self.config.max_running;
        if occupied >= slots {
            let message = format!("{occupied} sequences come, wait or run, as many as run at once");
            return refuse(ErrorKind::Overloaded, message);
        }
        Ok(())
    }

    /// A sequence of another decode node is to go on here. It is taken if it need not wait; at its
    /// own node it waits already.
    pub(super) fn on_resume(&mut self, now: Instant, job: PrefillJob) {
        let key = job.key;
        let conductor = job.conductor;
        let source = job.fetch.clone();
        let occupied = self.check_accepts_migrations().and_then(|()| self.local_sequence(now, job));
        match occupied.and_then(|sequence| self.slot(key, sequence)) {
            Ok(()) => self.bring(now, key, source),
            Err(refused) => {
                self.effects.push_back(DecodeEffect::AnswerMigration { conductor, key, result: Err(refused) });
            }
        }
    }

    fn slot(&mut self, key: RequestKey, sequence: Sequence) -> Result<(), Refused> {
        let tokens = sequence.tokens.len();
        self.sequences.insert(key, sequence);
        if self.take_room(key).is_some() {
            return Ok(());
        }
        self.sequences.remove(&key);
        Err(Refused { kind: ErrorKind::Overloaded, message: format!("no room for {tokens} tokens") })
    }

    /// Fetches those of its full blocks that are not here, if the other node has them.
    fn bring(&mut self, now: Instant, key: RequestKey, source: Option<FetchSource>) {
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let held = sequence.kv.num_complete_blocks;
        let there = source.as_ref().map_or(0, |source| source.tokens as usize / block_tokens);
        let end = there.min(sequence.reusable_blocks(block_tokens));
        let Some(source) = source.filter(|_| end > held) else {
            return self.on_taken(now, key, nothing_fetched(Duration::ZERO, None));
        };
        sequence.phase = Phase::Fetching(Fetch { blocks: held..end, asked: now });
        let block_hashes = sequence.kv.hashes[held..end].into();
        let destinations = sequence.kv.blocks[held..end].to_vec();
        self.effects.push_back(DecodeEffect::Fetch { key, source, block_hashes, destinations });
    }

    /// The other node agreed, and has the first `blocks` of the blocks asked for.
    pub fn on_fetch_begun(&mut self, key: RequestKey, blocks: usize) {
        if let Some(Phase::Fetching(fetch)) = self.sequences.get_mut(&key).map(|sequence| &mut sequence.phase) {
            fetch.blocks.end = fetch.blocks.end.min(fetch.blocks.start + blocks);
        }
    }

    /// The blocks are here, or will not come: nothing is written into them any more.
    pub fn on_fetch_done(&mut self, now: Instant, key: RequestKey, result: Result<FetchedBytes, Refused>) {
        if self.release_ended(key) {
            return self.plan_step(now);
        }
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Phase::Fetching(fetch) = &sequence.phase else { return };
        let elapsed = now.saturating_duration_since(fetch.asked);
        let report = match result {
            Ok(FetchedBytes { bytes, transport }) => {
                let tokens = fetch.blocks.len() * block_tokens;
                sequence.kv.num_computed_tokens = fetch.blocks.end * block_tokens;
                self.lookups.count_fetched(tokens);
                FetchReport { tokens: tokens as u32, bytes, transport, elapsed, failure: None }
            }
            Err(refused) => nothing_fetched(elapsed, Some(refused)),
        };
        self.complete_blocks(key);
        self.on_taken(now, key, report);
    }

    /// The sequence is this node's from now on. What was not fetched comes from the tier, as far as
    /// that has it.
    fn on_taken(&mut self, now: Instant, key: RequestKey, report: FetchReport) {
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.phase = Phase::Waiting;
        self.waiting.insert(sequence.turn, key);
        let conductor = sequence.conductor;
        let held = sequence.kv.num_computed_tokens / block_tokens;
        self.effects.push_back(DecodeEffect::AnswerMigration { conductor, key, result: Ok(report) });
        self.start_load(now, key, held);
        self.plan_step(now);
    }

    /// Whether a reader is to go on with a sequence that is here: under another attempt of the
    /// request.
    pub(super) fn is_migrating(&self, reader: RequestKey) -> bool {
        let mut here = self.granted.keys().chain(self.sequences.keys()).chain(self.ended.keys());
        here.any(|key| key.request == reader.request && key.attempt != reader.attempt)
    }

    /// A sequence that is not taken yet, and younger.
    pub(super) fn arriving_younger_than(&self, turn: u64) -> Option<RequestKey> {
        let arriving = |sequence: &Sequence| matches!(sequence.phase, Phase::Fetching(_));
        let found = self.sequences.iter().find(|(_, sequence)| sequence.turn > turn && arriving(sequence));
        found.map(|(key, _)| *key)
    }

    /// A sequence is not taken after all; its blocks come free when the fetch is over.
    pub(super) fn refuse_migration(&mut self, key: RequestKey, refused: Refused) {
        let Some(sequence) = self.sequences.get(&key) else { return };
        let conductor = sequence.conductor;
        self.effects.push_back(DecodeEffect::AnswerMigration { conductor, key, result: Err(refused) });
        self.end(key, Outcome::Failed, None);
    }
}
