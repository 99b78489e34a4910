//! Whether a node takes requests: what its ports say, and conductors are told.

use tokio::sync::watch;

/// Whether it does, and why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// It does.
    Serving,
    /// It finishes what it has.
    Draining,
    /// Its engine makes no progress.
    Stalled,
}

impl Ready {
    /// `serving`, `draining` or `stalled`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Stalled => "stalled",
        }
    }
}

/// The node's loop sets it, and the ports read it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Readiness(watch::Sender<Ready>);

impl Default for Readiness {
    fn default() -> Self {
        Self(watch::Sender::new(Ready::Serving))
    }
}

impl Readiness {
    /// What it is now.
    pub fn get(&self) -> Ready {
        *self.0.borrow()
    }

    pub(crate) fn set(&self, ready: Ready) {
        self.0.send_if_modified(|now| std::mem::replace(now, ready) != ready);
    }

    /// What it is after it was something else than `known`.
    pub(crate) async fn changed_from(&self, known: Ready) -> Ready {
        // The sender lives in `self`, so the channel cannot close.
        self.0.subscribe().wait_for(|now| *now != known).await.map_or(known, |now| *now)
    }
}
