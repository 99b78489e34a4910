//! Room for what runs: growth block by block, and which sequence is preempted when there is none.
//!
//! A grant promises room for the prompt and a little of the answer, not for all of it: most answers
//! end long before their `max_tokens`. If the blocks run out, the youngest sequence is preempted.
//! Its full blocks stay in the prefix cache as long as the room is not needed. The rest is computed
//! again, here, when there is room: the sequence waits at the place that its age gives it, before
//! all that came later. The oldest one is never preempted, so one always gets on. Meanwhile another
//! decode node may take it: `migration.rs`.

use std::time::Instant;

use baton_types::{BlockId, ErrorKind, Refused, RequestKey};

use super::DecodeCore;
use super::sequence::{Origin, Phase, Sequence};

/// What a sequence without blocks needs to run.
struct Room {
    /// Blocks that are cached.
    cached: Vec<BlockId>,
    /// Blocks to allocate beside them.
    missing: usize,
    /// Blocks that it leaves for the next tokens of all.
    spare: usize,
}

impl DecodeCore {
    /// Every running sequence gets the blocks of its next tokens, the oldest first; if there are
    /// none, the youngest make room. Those that got none sit the step out.
    pub(super) fn make_room(&mut self) {
        let mut by_age = self.running.clone();
        by_age.sort_by_key(|key| self.sequences.get(key).map(|sequence| sequence.turn));
        for key in by_age {
            while self.lacks_block(key) && self.running.contains(&key) {
                if !self.grow(key) && !self.preempt_younger(key) {
                    break;
                }
            }
        }
    }

    /// Whether the next token of a sequence has no block for its KV.
    pub(super) fn lacks_block(&self, key: RequestKey) -> bool {
        let block_tokens = self.config.model.block_tokens();
        let lacks = |sequence: &Sequence| sequence.kv.blocks.len() * block_tokens < sequence.tokens.len();
        self.sequences.get(&key).is_some_and(lacks)
    }

    fn grow(&mut self, key: RequestKey) -> bool {
        self.sequences.get_mut(&key).is_some_and(|sequence| sequence.kv.grow(&mut self.pool))
    }

    /// Takes the blocks of the youngest sequence that is younger than `key`, or of itself if it is
    /// the youngest and an older one runs. `false`: none can be preempted now. What the younger
    /// ones hold until their grant is fenced comes free by itself.
    fn preempt_younger(&mut self, key: RequestKey) -> bool {
        let Some(turn) = self.sequences.get(&key).map(|sequence| sequence.turn) else { return false };
        if let Some(arriving) = self.arriving_younger_than(turn) {
            let message = "those who were here before need the room".to_owned();
            self.refuse_migration(arriving, Refused { kind: ErrorKind::Overloaded, message });
        }
        // What such a one has comes free once its fetch is over.
        if self.ended.values().any(|sequence| matches!(sequence.phase, Phase::Fetching(_))) {
            return false;
        }
        let is_younger = |sequence: &Sequence| sequence.turn > turn && !sequence.kv.blocks.is_empty();
        let younger = self.sequences.iter().filter(|(_, sequence)| is_younger(sequence));
        let victims = younger.clone().filter(|(_, sequence)| self.can_be_preempted(sequence));
        let youngest = victims.max_by_key(|(_, sequence)| sequence.turn).map(|(victim, _)| *victim);
        let younger_keeps_blocks = younger.count() > 0 || self.granted.values().any(|granted| granted.turn > turn);
        let victim = match youngest {
            None if younger_keeps_blocks || !self.may_preempt_itself(key) => return false,
            None => key,
            Some(youngest) => youngest,
        };
        self.preempt(victim);
        true
    }

    /// Whether the youngest sequence may be preempted: an older one runs, or has blocks and waits
    /// for a slot. Else none would get on.
    fn may_preempt_itself(&self, key: RequestKey) -> bool {
        let Some(sequence) = self.sequences.get(&key) else { return false };
        let older_goes_on = |other: &Sequence| other.turn < sequence.turn && other.has_blocks();
        self.can_be_preempted(sequence) && self.sequences.values().any(older_goes_on)
    }

    /// Whether a sequence's blocks could be used at once: nothing writes them any more.
    fn can_be_preempted(&self, sequence: &Sequence) -> bool {
        let is_fenced = sequence.grant().is_none_or(|grant| !self.grants.contains_key(&grant.id));
        matches!(sequence.phase, Phase::Waiting | Phase::Running) && is_fenced
    }

    fn preempt(&mut self, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        // All of it is computed here now.
        match &mut sequence.origin {
            Origin::Granted(grant) => {
                grant.is_other_class = false;
                grant.partial_prefill = None;
            }
            Origin::Submitted(prompt) => prompt.prompt_logprobs.clear(),
            Origin::Migrated => {}
        }
        sequence.phase = Phase::Preempted;
        sequence.last_migration_request = None;
        sequence.kv.release(&mut self.pool);
        self.waiting.insert(sequence.turn, key);
        self.running.retain(|other| *other != key);
        self.preemptions += 1;
        self.lacks_room = true;
    }

    /// Gives a sequence without blocks those of all its tokens, as far as there is room for them
    /// and for the next ones of all sequences. What is not here comes from the tier, as far as that
    /// has it.
    pub(super) fn find_room(&mut self, now: Instant, key: RequestKey) -> bool {
        let Some(held) = self.take_room(key) else { return false };
        if !self.start_load(now, key, held) {
            self.on_local_started(now, key);
        }
        true
    }

    /// The same, of the arena alone: how many leading blocks were here, or `None` if there is no
    /// room.
    pub(super) fn take_room(&mut self, key: RequestKey) -> Option<usize> {
        let room = self.room_for(self.sequences.get(&key)?);
        self.pool.check_fits(&room.cached, room.missing.saturating_add(room.spare)).ok()?;
        self.pool.acquire(&room.cached);
        let Ok(new) = self.pool.allocate(room.missing) else {
            self.pool.release(&room.cached);
            return None;
        };
        let sequence = self.sequences.get_mut(&key)?;
        let held = room.cached.len();
        sequence.kv.set_blocks(room.cached, new, self.config.model.block_tokens());
        self.lookups.count(sequence.tokens.len(), sequence.kv.num_computed_tokens);
        Some(held)
    }

    fn room_for(&self, sequence: &Sequence) -> Room {
        let layout = &self.config.model.layout;
        let reusable = sequence.reusable_blocks(self.config.model.block_tokens());
        let cached = self.pool.match_prefix(&sequence.kv.hashes[..reusable]);
        let now = layout.blocks_for(sequence.tokens.len());
        let later = layout.blocks_for(sequence.lengths.max_total_tokens - 1).saturating_sub(now);
        // Alone it may take all there is.
        let spare = if self.running.is_empty() { 0 } else { self.running.len() + self.config.growth_blocks.min(later) };
        Room { missing: now - cached.len(), cached, spare }
    }

    /// Blocks that must be free or cached before the first in line for room has it; `None` if none
    /// waits for room.
    pub(super) fn wanted_blocks(&self) -> Option<usize> {
        let waiting = self.waiting.values().filter_map(|key| self.sequences.get(key));
        if let Some(first) = waiting.into_iter().find(|sequence| sequence.phase == Phase::Preempted) {
            let room = self.room_for(first);
            return Some(self.pool.count_cached(&room.cached) + room.missing + room.spare);
        }
        let stands = self.running.iter().any(|key| self.lacks_block(*key));
        if stands { Some(1) } else { self.asked_blocks() }
    }
}
