//! Where the engine waits for a prefix that is still coming in, layer by layer. It waits on a
//! thread of its own, so by the machine's clock.
//!
//! A step begins when the layers keep ahead of it by what is known then, so it should hardly ever
//! wait. If it has to, all sequences in the step wait, so its patience is short. It is some layers'
//! time, and [`MAX_PREFIX_WAIT_PER_STEP`] for all prefixes of a step together. A sequence whose
//! prefix has not come by then is computed again later.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[cfg(doc)]
use baton_scheduler::MAX_PREFIX_WAIT_PER_STEP;
use baton_scheduler::prefix_patience;

/// How far a prefix has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The first so many layers are here, the last of them since then.
    Coming(u32, Instant),
    /// Nothing waits any more: all is here, or it failed and the node's core knows, which throws
    /// away what the step gives.
    Over,
    /// The fetch or SSD read is gone and did not tell the core.
    Lost,
}

#[derive(Debug)]
struct Barrier {
    made: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

impl Barrier {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A state is replaced as a whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }
}

/// The engine's side.
#[derive(Debug, Clone)]
pub struct LayerBarrier(Arc<Barrier>);

/// The side of the fetch or SSD read that delivers the layers. If it is dropped before
/// [`Self::end`], the steps that wait go on without: their bytes would mean nothing.
#[derive(Debug)]
pub struct LayerBarrierKeeper {
    barrier: Arc<Barrier>,
    /// How it ended is on its way to the core.
    is_told: bool,
}

/// Both sides, with no layer here.
pub fn layer_barrier() -> (LayerBarrierKeeper, LayerBarrier) {
    let now = baton_runtime::now();
    let barrier = Arc::new(Barrier { made: now, state: Mutex::new(State::Coming(0, now)), changed: Condvar::new() });
    (LayerBarrierKeeper { barrier: Arc::clone(&barrier), is_told: false }, LayerBarrier(barrier))
}

impl LayerBarrier {
    /// Waits for a layer, for `at_most` and no longer than its rate so far allows. `false`: it has
    /// not come, and the caller has to tell the node's core before it goes on.
    pub(crate) fn wait(&self, layer: u32, at_most: Duration) -> bool {
        let closed = |state: &mut State| matches!(state, State::Coming(here, _) if *here <= layer);
        let mut state = self.0.lock();
        if closed(&mut state) {
            let patience = self.patience(*state).min(at_most);
            let waited = self.0.changed.wait_timeout_while(state, patience, closed);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        !closed(&mut state) && *state != State::Lost
    }

    /// The core knows how it ended.
    ///
    /// Not before: a node's loop takes what the engine says first. So the end of a step would pass
    /// that of its prefix.
    pub fn finish(&self) {
        self.0.set(State::Over);
    }

    fn patience(&self, state: State) -> Duration {
        let per_layer = match state {
            State::Coming(layers, since) => since.saturating_duration_since(self.0.made) / layers.max(1),
            State::Over | State::Lost => Duration::ZERO,
        };
        prefix_patience(per_layer)
    }
}

impl LayerBarrierKeeper {
    /// The first `layers` layers are here.
    pub fn open(&self, layers: u32) {
        self.barrier.set(State::Coming(layers, baton_runtime::now()));
    }

    /// The core is told how it ended, and lets the engine go on when it knows:
    /// [`LayerBarrier::finish`].
    pub fn end(mut self) {
        self.is_told = true;
    }
}

impl Drop for LayerBarrierKeeper {
    fn drop(&mut self) {
        let mut state = self.barrier.lock();
        if *state != State::Over && !self.is_told {
            *state = State::Lost;
            self.barrier.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const MIN_PATIENCE: Duration = Duration::from_millis(100);

    #[test]
    fn engine_waits_at_layer_barrier_for_each_fetched_layer() {
        // One that takes its time, so that patience does not end the test: 10 s a layer, as far as
        // can be told.
        let now = Instant::now();
        let made = now - Duration::from_secs(10);
        let state = Mutex::new(State::Coming(0, now));
        let barrier = LayerBarrier(Arc::new(Barrier { made, state, changed: Condvar::new() }));
        let keeper = LayerBarrierKeeper { barrier: Arc::clone(&barrier.0), is_told: false };
        let core = barrier.clone();
        let (told, heard) = std::sync::mpsc::channel();
        let engine = std::thread::spawn(move || {
            for layer in 0..4 {
                let here = barrier.wait(layer, LONG);
                told.send((layer, here)).unwrap();
            }
        });
        keeper.open(1);
        assert_eq!(heard.recv().unwrap(), (0, true));
        assert!(heard.try_recv().is_err(), "layer 1 is not here");
        keeper.open(3);
        assert_eq!([heard.recv().unwrap(), heard.recv().unwrap()], [(1, true), (2, true)]);
        keeper.end();
        assert!(heard.try_recv().is_err(), "the core does not know yet");
        core.finish();
        assert_eq!(heard.recv().unwrap(), (3, true));
        engine.join().unwrap();
    }

    #[test]
    fn layer_barrier_gives_up_on_a_layer_that_does_not_come() {
        let (keeper, barrier) = layer_barrier();
        keeper.open(1);
        let began = Instant::now();
        assert!(barrier.wait(0, LONG) && !barrier.wait(1, LONG));
        assert!((MIN_PATIENCE..10 * MIN_PATIENCE).contains(&began.elapsed()), "{:?}", began.elapsed());
        assert!(!barrier.wait(1, Duration::ZERO), "no patience is left");
        keeper.open(2);
        assert!(barrier.wait(1, Duration::ZERO), "what is here need not be waited for");
    }

    #[test]
    fn layer_barrier_patience_grows_with_the_time_of_a_layer() {
        let (keeper, barrier) = layer_barrier();
        let after = |millis| keeper.barrier.made + Duration::from_millis(millis);
        assert_eq!(barrier.patience(State::Coming(1, after(2))), MIN_PATIENCE);
        assert_eq!(barrier.patience(State::Coming(3, after(150))), Duration::from_millis(400));
    }

    #[test]
    fn layer_barrier_fails_if_its_keeper_is_lost() {
        let (keeper, barrier) = layer_barrier();
        keeper.open(1);
        drop(keeper);
        assert!(!barrier.wait(0, LONG) && !barrier.wait(1, LONG));
    }
}
