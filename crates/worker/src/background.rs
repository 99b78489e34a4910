//! What a node's loop does for others that looks at every block: proofs and snapshots. Each waits
//! until the loop has had many times as long for requests.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use baton_types::{ConductorId, ErrorKind, Refused};
use tokio::sync::oneshot;

use crate::input::IntegrityReport;

/// The loop's time goes to requests for so many times as long as the last work took.
const REST: u32 = 20;
/// Callers do not wait for ever.
const LONGEST_REST: Duration = Duration::from_secs(1);
/// Callers that may wait for one proof.
const MAX_CHECKS: usize = 64;

type Answer = oneshot::Sender<Result<IntegrityReport, Refused>>;

/// What to do next.
pub(crate) enum Work {
    /// Prove that each block is accounted for, and tell all of these.
    Check(Vec<Answer>),
    /// Tell a conductor everything that is cached.
    Snapshot(ConductorId),
}

/// Who waits for what.
pub(crate) struct Background {
    checks: Vec<Answer>,
    /// At most one of each conductor: a later one says more.
    snapshots: BTreeSet<ConductorId>,
    not_before: Instant,
}

impl Background {
    /// Nothing waits, and the first work may begin at once.
    pub(crate) fn new(now: Instant) -> Self {
        Self { checks: Vec::new(), snapshots: BTreeSet::new(), not_before: now }
    }

    /// A caller wants a proof.
    pub(crate) fn check(&mut self, answer: Answer) {
        if self.checks.len() < MAX_CHECKS {
            return self.checks.push(answer);
        }
        let message = format!("{MAX_CHECKS} callers wait for the proof of this node's blocks, as many as may");
        // The caller may have given up.
        let _ = answer.send(Err(Refused { kind: ErrorKind::Overloaded, message }));
    }

    /// A conductor wants a snapshot.
    pub(crate) fn snapshot(&mut self, conductor: ConductorId) {
        self.snapshots.insert(conductor);
    }

    /// When there is something to do; `None` if there is not.
    pub(crate) fn due(&self) -> Option<Instant> {
        let waits = !self.checks.is_empty() || !self.snapshots.is_empty();
        waits.then_some(self.not_before)
    }

    /// The next work. Requests are placed by snapshots, so they go first.
    pub(crate) fn next(&mut self) -> Option<Work> {
        if let Some(conductor) = self.snapshots.pop_first() {
            return Some(Work::Snapshot(conductor));
        }
        let checks = std::mem::take(&mut self.checks);
        (!checks.is_empty()).then_some(Work::Check(checks))
    }

    /// The last work took so long.
    pub(crate) fn rest(&mut self, now: Instant, took: Duration) {
        self.not_before = now + (took * REST).min(LONGEST_REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integrity_check_is_shared_by_callers_and_followed_by_a_rest() {
        let mut background = Background::new(Instant::now());
        assert!(background.due().is_none() && background.next().is_none());
        let answers: Vec<_> = (0..MAX_CHECKS + 1)
            .map(|_| {
                let (answer, answered) = oneshot::channel();
                background.check(answer);
                answered
            })
            .collect();
        (0..9).for_each(|n| background.snapshot(ConductorId(n % 3)));
        let kinds: Vec<_> = std::iter::from_fn(|| background.next())
            .map(|work| match work {
                Work::Check(answers) => answers.len(),
                Work::Snapshot(_) => 0,
            })
            .collect();
        assert_eq!(kinds, [0, 0, 0, MAX_CHECKS]);
        let refused = answers.into_iter().next_back().unwrap().try_recv().unwrap().unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Overloaded);

        let now = Instant::now();
        background.rest(now, Duration::from_millis(3));
        background.snapshot(ConductorId(1));
        assert_eq!(background.due(), Some(now + Duration::from_millis(60)));
    }
}
