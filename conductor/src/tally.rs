//! What operators are told of the requests served so far.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::accuracy::Accuracy;

/// See the module's text. Everything in it is bounded.
#[derive(Debug, Default)]
pub struct Tally {
    /// How good the predictions were.
    pub accuracy: Accuracy,
}

/// A tally that requests share.
#[derive(Default)]
pub struct SharedTally(Mutex<Tally>);

impl SharedTally {
    /// Never held across an await.
    pub fn lock(&self) -> MutexGuard<'_, Tally> {
        // Every critical section leaves the counts whole, so a panic elsewhere does not spoil them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
