//! The proof that the books of a prefill node balance.

use baton_kv_cache::IntegrityError;

use super::{Active, PrefillCore};
use crate::load::ensure;

impl PrefillCore {
    /// Proves that every block is accounted for and that no request is forgotten: each one waits
    /// for something that will come.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let held = self.active.values().flat_map(|request| request.blocks.iter().copied());
        let others = self.leases.blocks().chain(self.stores.blocks());
        self.pool.check_integrity_with(held.chain(others), 0)?;
        for key in &self.computing {
            ensure(self.active.contains_key(key), || format!("{key:?} is to be computed, but is not here"))?;
        }
        for key in &self.awaiting_mask {
            ensure(self.output(*key).is_some(), || format!("{key:?} waits for a mask, but is not here"))?;
        }
        for key in self.deadlines.keys() {
            let known = self.queued.contains_key(key) || self.active.contains_key(key);
            ensure(known, || format!("{key:?} has a deadline, but is not here"))?;
        }
        for (key, request) in &self.active {
            let in_step = self.step.as_ref().is_some_and(|step| step.sequences.iter().any(|(other, _)| other == key));
            ensure(in_step == request.is_in_step(), || format!("{key:?} is in the step: {in_step}"))?;
            ensure(request.is_in_step() || self.waits(request), || format!("{key:?} waits for nothing: {request:?}"))?;
        }
        Ok(())
    }

    fn waits(&self, request: &Active) -> bool {
        if request.ended {
            return request.is_pushing() || request.fetch.is_some();
        }
        let computing = self.computing.contains(&request.job.key);
        let transferring = request.transfer.as_ref().is_some_and(|transfer| !transfer.is_complete(&self.config.model));
        computing || transferring
    }
}
