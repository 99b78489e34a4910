//! Room for what runs: growth block by block, and which sequence is preempted when there is none.
//!
//! A grant promises room for the prompt and a little of the answer, not for all of it: most answers
//! end long before their `max_tokens`. If the blocks run out, the youngest sequence is preempted.
//! Its full blocks stay in the prefix cache as long as the room is not needed. The rest is computed
//! again, here, when there is room: the sequence waits at the place that its age gives it, before
//! all that came later. The oldest one is never preempted, so one always gets on. Meanwhile another
//! decode node may take it: `migration.rs`.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{BlockId, ErrorKind, Refused, RequestKey};

use super::{DecodeCore, Phase, Sequence};

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
        self.sequences.get(&key).is_some_and(|sequence| sequence.blocks.len() * block_tokens < sequence.num_tokens())
    }

    fn grow(&mut self, key: RequestKey) -> bool {
        let Some(sequence) = self.sequences.get_mut(&key) else { return false };
        let block = match sequence.reservation.blocks() {
            0 => self.pool.allocate(1).ok().and_then(|blocks| blocks.first().copied()),
            _ => Some(self.pool.allocate_reserved(&mut sequence.reservation)),
        };
        Arc::make_mut(&mut sequence.blocks).extend(block);
        block.is_some()
    }

    /// Takes the blocks of the youngest sequence that is younger than `key`, or of itself if it is
    /// the youngest and an older one runs. `false`: none can be preempted now. What the younger
    /// ones hold until their grant is fenced comes free by itself.
    fn preempt_younger(&mut self, key: RequestKey) -> bool {
        let Some(turn) = self.sequences.get(&key).map(|sequence| sequence.turn) else { return false };
        let younger = |sequence: &&Sequence| sequence.turn > turn && !sequence.ended && !sequence.blocks.is_empty();
        if let Some(arriving) = self.arriving_younger_than(turn) {
            let message = "those who were here before need the room".to_owned();
            self.refuse_migration(arriving, Refused { kind: ErrorKind::Overloaded, message });
        }
        // What such a one has comes free once its fetch is over.
        if self.sequences.values().any(|sequence| sequence.ended && sequence.fetch.is_some()) {
            return false;
        }
        let victims = self.sequences.values().filter(younger).filter(|sequence| self.can_give_way(sequence));
        let victim = match victims.max_by_key(|sequence| sequence.turn).map(|sequence| sequence.turn) {
            Some(youngest) => youngest,
            None if self.sequences.values().any(|sequence| younger(&sequence)) => return false,
            None => turn,
        };
        // An older one that runs, or has blocks and waits for a slot: else none would get on.
        let is_older = |sequence: &Sequence| sequence.turn < turn && !sequence.ended;
        let goes_on = |sequence: &Sequence| matches!(sequence.phase, Phase::Waiting | Phase::Running);
        if victim == turn && !self.sequences.values().any(|sequence| is_older(sequence) && goes_on(sequence)) {
            return false;
        }
        let victim = self.sequences.iter().find(|(_, sequence)| sequence.turn == victim).map(|(key, _)| *key);
        let Some(victim) = victim.filter(|victim| self.sequences.get(victim).is_some_and(|it| self.can_give_way(it)))
        else {
            return false;
        };
        self.preempt(victim);
        true
    }

    /// Whether a sequence's blocks could be used at once: nothing writes them any more.
    fn can_give_way(&self, sequence: &Sequence) -> bool {
        let fenced = sequence.grant.is_none_or(|grant| !self.grants.contains_key(&grant));
        matches!(sequence.phase, Phase::Waiting | Phase::Running) && sequence.is_untouched() && fenced
    }

    fn preempt(&mut self, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let blocks = std::mem::take(&mut sequence.blocks);
        let promised = std::mem::replace(&mut sequence.reservation, baton_kv_cache::Reservation::none());
        sequence.phase = Phase::Preempted;
        // All of it is computed here now.
        sequence.is_other_class = false;
        sequence.offered = None;
        sequence.num_computed_tokens = 0;
        sequence.num_complete_blocks = 0;
        sequence.tail = None;
        if let Some(local) = sequence.local.as_mut() {
            local.prompt_logprobs.clear();
        }
        self.waiting.insert(sequence.turn, key);
        self.running.retain(|other| *other != key);
        self.preemptions += 1;
        self.lacks_room = true;
        self.pool.cancel_reservation(promised);
        self.pool.release(&blocks);
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
        let (matched, missing, spare) = self.room_for(self.sequences.get(&key)?);
        self.pool.check_fits(&matched, missing.saturating_add(spare)).ok()?;
        self.pool.acquire(&matched);
        let Ok(new) = self.pool.allocate(missing) else {
            self.pool.release(&matched);
            return None;
        };
        let sequence = self.sequences.get_mut(&key)?;
        let held = matched.len();
        sequence.num_complete_blocks = held;
        sequence.num_computed_tokens = held * self.config.model.block_tokens();
        sequence.blocks = Arc::new(matched.into_iter().chain(new).collect());
        self.prefix_queries += sequence.num_tokens() as u64;
        self.prefix_hits += sequence.num_computed_tokens as u64;
        Some(held)
    }

    /// Blocks of a sequence that are here, how many are not, and how many more it leaves for the
    /// next tokens of all.
    fn room_for(&self, sequence: &Sequence) -> (Vec<BlockId>, usize, usize) {
        let reusable = sequence.reusable_blocks(self.config.model.block_tokens());
        let matched = self.pool.match_prefix(&sequence.hashes[..reusable]);
        let missing = self.config.model.layout.blocks_for(sequence.num_tokens()) - matched.len();
        let rest =
            self.config.model.layout.blocks_for(sequence.max_total_tokens - 1).saturating_sub(missing + matched.len());
        // Alone it may take all there is.
        let spare = if self.running.is_empty() { 0 } else { self.running.len() + self.config.growth_blocks.min(rest) };
        (matched, missing, spare)
    }

    /// Blocks that must be free or cached before the first in line for room has it; `None` if none
    /// waits for room.
    pub(super) fn wanted_blocks(&self) -> Option<usize> {
        let waiting = self.waiting.values().filter_map(|key| self.sequences.get(key));
        if let Some(first) = waiting.into_iter().find(|sequence| sequence.phase == Phase::Preempted) {
            let (matched, missing, spare) = self.room_for(first);
            return Some(self.pool.count_cached(&matched) + missing + spare);
        }
        let stands = self.running.iter().any(|key| self.lacks_block(*key));
        if stands { Some(1) } else { self.asked_blocks() }
    }
}
