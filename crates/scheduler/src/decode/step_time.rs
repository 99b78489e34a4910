//! How long the steps take that the sequences here wait for.

use std::collections::VecDeque;
use std::time::Duration;

use baton_types::{ErrorKind, GrantRequest, Refused};

use super::DecodeCore;

/// Steps that are looked back at.
const RECENT_STEPS: usize = 16;

/// The last steps that gave tokens to sequences that had some before.
#[derive(Debug, Default)]
pub(super) struct RecentStepTime {
    recent: VecDeque<Duration>,
}

impl RecentStepTime {
    pub(super) fn observe(&mut self, step: Duration) {
        if self.recent.len() == RECENT_STEPS {
            self.recent.pop_front();
        }
        self.recent.push_back(step);
    }

    /// No sequence is here any more: what the steps took says nothing of those to come.
    pub(super) fn forget(&mut self) {
        self.recent.clear();
    }

    /// The mean of them; `None` while there are too few to go by.
    fn step(&self) -> Option<Duration> {
        (self.recent.len() == RECENT_STEPS).then(|| self.recent.iter().sum::<Duration>() / RECENT_STEPS as u32)
    }
}

impl DecodeCore {
    /// The second look at a sequence's time between tokens: placement predicted it, here the steps
    /// are measured. They will not be shorter with one more.
    pub(super) fn check_step_time(&self, request: &GrantRequest) -> Result<(), Refused> {
        let Some((step, tbt)) = self.step_time.step().zip(request.tbt).filter(|(step, tbt)| step > tbt) else {
            return Ok(());
        };
        let message = format!("the steps take {step:.0?}, the time between tokens is to be {tbt:.0?} at most");
        Err(Refused { kind: ErrorKind::Overloaded, message })
    }
}
