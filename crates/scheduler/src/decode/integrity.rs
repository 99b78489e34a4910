//! The proof that the books of a decode node balance.

use baton_kv_cache::IntegrityError;
use baton_types::BlockId;

use super::DecodeCore;
use super::batch::RunningStep;
use super::grant::GrantRecord;
use super::kv::SequenceKv;
use super::sequence::Phase;
use crate::load::ensure;

impl DecodeCore {
    /// Proves that every block is accounted for, and that no grant or sequence is forgotten: each
    /// one waits for something that will come.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let held = self.kvs().flat_map(|kv| kv.blocks.iter().copied());
        let reserved = self.kvs().map(|kv| kv.reservation.blocks()).sum();
        let elsewhere = self.closing_blocks().chain(self.leases.blocks()).chain(self.stores.blocks());
        self.pool.check_integrity_with(held.chain(elsewhere), reserved)?;
        self.check_grants()?;
        self.check_sequences()?;
        for key in self.deadlines.keys() {
            ensure(self.is_here(*key), || format!("{key:?} has a deadline, but is not here"))?;
        }
        Ok(())
    }

    fn kvs(&self) -> impl Iterator<Item = &SequenceKv> {
        let granted = self.granted.values().map(|granted| &granted.kv);
        granted.chain(self.sequences.values().chain(self.ended.values()).map(|sequence| &sequence.kv))
    }

    fn closing_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let closing = self.grants.values().filter_map(|record| match record {
            GrantRecord::Quarantined(blocks) | GrantRecord::Held(blocks) => Some(blocks),
            GrantRecord::Live(_) => None,
        });
        closing.flatten().copied()
    }

    fn check_grants(&self) -> Result<(), IntegrityError> {
        for (grant, record) in &self.grants {
            let GrantRecord::Live(key) = record else { continue };
            let owned = self.grant_of(*key).is_some_and(|granted| granted.id == *grant);
            ensure(owned, || format!("grant {} is open, but {key:?} does not have it", grant.0))?;
        }
        Ok(())
    }

    fn check_sequences(&self) -> Result<(), IntegrityError> {
        for key in self.step.iter().flat_map(RunningStep::keys) {
            let has_tokens = self.sequences.contains_key(&key) || self.ended.contains_key(&key);
            ensure(has_tokens, || format!("{key:?} is in the step, but is not here"))?;
        }
        for (key, granted) in &self.granted {
            let waits = self.grants.contains_key(&granted.grant.id);
            ensure(waits, || format!("{key:?} waits for no handoff: {granted:?}"))?;
        }
        for (key, sequence) in &self.sequences {
            let expected = match &sequence.phase {
                Phase::Receiving => sequence.grant().is_some_and(|grant| self.grants.contains_key(&grant.id)),
                Phase::Waiting | Phase::Loading(_) | Phase::Preempted => self.waiting.get(&sequence.turn) == Some(key),
                Phase::Fetching(_) => true,
                Phase::Running => self.running.contains(key),
            };
            ensure(expected, || format!("{key:?} waits for nothing: {sequence:?}"))?;
        }
        for (key, sequence) in &self.ended {
            ensure(self.is_in_use(*key, sequence), || format!("{key:?} ended, but is kept: {sequence:?}"))?;
        }
        let is_listed = |phase: &Phase| !matches!(phase, Phase::Receiving | Phase::Fetching(_));
        let listed = self.waiting.len() + self.running.len();
        let live = self.sequences.values().filter(|sequence| is_listed(&sequence.phase)).count();
        ensure(listed == live, || format!("{live} sequences wait or run, {listed} are listed"))
    }
}
