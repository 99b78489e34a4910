//! The proof that the books of a decode node balance.

use baton_kv_cache::IntegrityError;
use baton_types::{BlockId, RequestKey};

use super::batch::RunningStep;
use super::grant::GrantRecord;
use super::{DecodeCore, Phase};
use crate::load::ensure;

impl DecodeCore {
    /// Proves that every block is accounted for, and that no grant or sequence is forgotten: each
    /// one waits for something that will come.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let held = self.sequences.values().flat_map(|sequence| sequence.blocks.iter().copied());
        let reserved = self.sequences.values().map(|sequence| sequence.reservation.blocks()).sum();
        let elsewhere = self.closing_blocks().chain(self.leases.blocks()).chain(self.stores.blocks());
        self.pool.check_integrity_with(held.chain(elsewhere), reserved)?;
        self.check_grants()?;
        self.check_sequences()?;
        for key in self.deadlines.keys() {
            ensure(self.sequences.contains_key(key), || format!("{key:?} has a deadline, but is not here"))?;
        }
        Ok(())
    }

    fn closing_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let closing = self.grants.values().filter_map(|record| match record {
            GrantRecord::Closing { quarantined, held } => Some(quarantined.iter().chain(held)),
            GrantRecord::Live(_) => None,
        });
        closing.flatten().copied()
    }

    fn check_grants(&self) -> Result<(), IntegrityError> {
        for (grant, record) in &self.grants {
            let GrantRecord::Live(key) = record else { continue };
            let owned = self.sequences.get(key).is_some_and(|sequence| sequence.grant == Some(*grant));
            ensure(owned, || format!("grant {} is open, but {key:?} does not have it", grant.0))?;
        }
        Ok(())
    }

    fn check_sequences(&self) -> Result<(), IntegrityError> {
        let is_in = |step: &RunningStep, key: &RequestKey| {
            step.sequences.iter().any(|(other, _)| other == key) || step.slice.as_ref().is_some_and(|it| it.key == *key)
        };
        let in_step = |key: &RequestKey| self.step.as_ref().is_some_and(|step| is_in(step, key));
        for (key, sequence) in &self.sequences {
            ensure(in_step(key) == sequence.in_step, || format!("{key:?} is in the step: {}", in_step(key)))?;
            let expected = match (sequence.ended, sequence.phase) {
                (true, _) => !sequence.is_untouched(),
                (false, Phase::Granted) => sequence.grant.is_some_and(|grant| self.grants.contains_key(&grant)),
                (false, Phase::Waiting | Phase::Preempted) => self.waiting.get(&sequence.turn) == Some(key),
                (false, Phase::Fetching) => sequence.fetch.is_some(),
                (false, Phase::Running) => self.running.contains(key),
            };
            ensure(expected, || format!("{key:?} waits for nothing: {sequence:?}"))?;
        }
        let listed = self.waiting.len() + self.running.len();
        let live = self
            .sequences
            .values()
            .filter(|s| !s.ended && !matches!(s.phase, Phase::Granted | Phase::Fetching))
            .count();
        ensure(listed == live, || format!("{live} sequences wait or run, {listed} are listed"))
    }
}
