//! Shutdown in phases.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::clock::{Clock, SystemClock, within};

/// SIGTERM and SIGINT. Listened for once: a new listener for each wait would miss those that come
/// between two waits.
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
    /// Health checks say no; requests are still taken, so that none is lost while load balancers
    /// learn of it.
    NotReady,
    /// Nothing new is taken; what is here goes on.
    Draining,
    /// What is still here is ended.
    Closing,
    /// Nothing is left.
    Flushed,
}

/// How long the phases of a drain may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drain {
    /// [`Phase::NotReady`].
    pub not_ready: Duration,
    /// [`Phase::Draining`].
    pub grace: Duration,
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

    /// Goes down as far as to [`Phase::Closing`]: says for `not_ready` that it does, then runs
    /// `drained` for as long as `grace`. A signal ends both at once. `true` if `drained` finished.
    pub async fn drain(&self, terms: Drain, signals: &mut Signals, drained: impl Future<Output = ()>) -> bool {
        self.drain_by(&SystemClock, terms, signals.recv(), drained).await
    }

    /// The same by a clock, and with another source of the signal that ends it at once.
    pub async fn drain_by(
        &self,
        clock: &dyn Clock,
        terms: Drain,
        signal: impl Future<Output = &'static str>,
        drained: impl Future<Output = ()>,
    ) -> bool {
        self.advance(Phase::NotReady);
        let finished = tokio::select! {
            finished = async {
                clock.sleep(terms.not_ready).await;
                self.advance(Phase::Draining);
                within(clock, terms.grace, drained).await.is_some()
            } => finished,
            signal = signal => {
                tracing::warn!(signal, "a second signal: ending what is left");
                false
            }
        };
        self.advance(Phase::Closing);
        finished
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn shutdown_phases_never_go_back() {
        let shutdown = Shutdown::new();
        shutdown.advance(Phase::Draining);
        shutdown.advance(Phase::NotReady);
        assert_eq!(shutdown.phase(), Phase::Draining);
        shutdown.wait_for(Phase::NotReady).await;
    }

    #[tokio::test]
    async fn drain_phases_last_as_configured_and_a_signal_ends_them() {
        let mut signals = Signals::new().unwrap();
        let ms = Duration::from_millis;
        let shutdown = Shutdown::new();
        let terms = Drain { not_ready: ms(30), grace: ms(30) };
        let began = std::time::Instant::now();
        let phase = async {
            shutdown.wait_for(Phase::NotReady).await;
            (shutdown.phase(), shutdown.wait_for(Phase::Draining).await, began.elapsed())
        };
        let (finished, (first, (), draining_after)) =
            tokio::join!(shutdown.drain(terms, &mut signals, std::future::pending()), phase);
        assert!(!finished && began.elapsed() >= ms(60));
        assert_eq!((first, shutdown.phase()), (Phase::NotReady, Phase::Closing));
        assert!(draining_after >= ms(30));

        let long = Drain { not_ready: Duration::ZERO, grace: Duration::from_secs(60) };
        assert!(Shutdown::new().drain(long, &mut signals, async {}).await);

        let shutdown = Shutdown::new();
        let forever = Drain { not_ready: Duration::from_secs(60), ..long };
        let raise = async {
            tokio::time::sleep(ms(20)).await;
            // To this process, which listens: it goes on.
            let id = std::process::id().to_string();
            assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        };
        let (finished, ()) = tokio::join!(shutdown.drain(forever, &mut signals, async {}), raise);
        assert!(!finished && shutdown.phase() == Phase::Closing);
    }
}
