//! Shutdown in phases.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// SIGTERM and SIGINT. Listened for once: a new listener for each wait would miss those that come between two waits.
#[derive(Debug)]
pub struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// From now on the signals do not end the process by themselves.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    /// The name of the next one. Can be dropped and called again.
    pub async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}

/// Where a process is on its way down. Each later phase has a deadline of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Taking requests.
    Serving,
    /// Health checks say no; requests are still taken, so that none is lost while load balancers learn of it.
    NotReady,
    /// Nothing new is taken; what is here goes on.
    Draining,
    /// What is still here is ended.
    Closing,
    /// Nothing is left.
    Flushed,
}

/// The phase of a process, and who moves it on. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Sender<Phase>);

impl Default for Shutdown {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Serving))
    }
}

impl Shutdown {
    /// A process that serves.
    pub fn new() -> Self {
        Self::default()
    }

    /// The phase now.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Moves on to `phase`; never back.
    pub fn advance(&self, phase: Phase) {
        self.0.send_if_modified(|now| {
            let moved = *now < phase;
            *now = (*now).max(phase);
            moved
        });
    }

    /// Resolves when `phase` or a later one is reached.
    pub async fn wait_for(&self, phase: Phase) {
        // The sender lives in `self`, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(|now| *now >= phase).await;
    }

    /// Runs `drained` for as long as the grace period, or until a second signal hurries. `true` where it finished.
    pub async fn drain(&self, grace: Duration, drained: impl Future<Output = ()>) -> bool {
        self.advance(Phase::Draining);
        let again = async {
            match Signals::new() {
                Ok(mut signals) => _ = signals.recv().await,
                Err(error) => {
                    tracing::warn!(%error, "no second signal can hurry the drain");
                    std::future::pending().await
                }
            }
        };
        let finished = tokio::select! {
            () = drained => true,
            () = crate::sleep(grace) => false,
            () = again => false,
        };
        self.advance(Phase::Closing);
        finished
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn phases_only_move_on() {
        let shutdown = Shutdown::new();
        shutdown.advance(Phase::Draining);
        shutdown.advance(Phase::NotReady);
        assert_eq!(shutdown.phase(), Phase::Draining);
        shutdown.wait_for(Phase::NotReady).await;
    }

    #[tokio::test]
    async fn draining_ends_with_the_grace_period() {
        let shutdown = Shutdown::new();
        assert!(!shutdown.drain(Duration::from_millis(10), std::future::pending()).await);
        assert_eq!(shutdown.phase(), Phase::Closing);
        assert!(Shutdown::new().drain(Duration::from_secs(5), async {}).await);
    }
}
