//! Where the engine waits for a prefix that is still coming in, layer by layer.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// How far a prefix has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The first so many layers are here.
    Coming(u32),
    /// Nothing waits any more: all is here, or it failed and the node's core knows, which throws away what the step gives.
    Over,
    /// Whoever brought it is gone and nobody was told.
    Lost,
}

#[derive(Debug)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
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
pub struct LayerGate(Arc<Gate>);

/// The side of whoever brings the layers. Where it is dropped before [`Self::finish`], steps that wait fail: their bytes would mean nothing.
#[derive(Debug)]
pub struct LayerGateKeeper(Arc<Gate>);

/// Both sides, with no layer here.
pub fn layer_gate() -> (LayerGateKeeper, LayerGate) {
    let gate = Arc::new(Gate { state: Mutex::new(State::Coming(0)), changed: Condvar::new() });
    (LayerGateKeeper(Arc::clone(&gate)), LayerGate(gate))
}

impl LayerGate {
    /// Waits for a layer, no longer than its keeper lives. `false`: it will never come, and nobody knows.
    pub fn wait(&self, layer: u32) -> bool {
        let closed = |state: &mut State| matches!(state, State::Coming(here) if *here <= layer);
        let state = self.0.changed.wait_while(self.0.lock(), closed).unwrap_or_else(PoisonError::into_inner);
        *state != State::Lost
    }
}

impl LayerGateKeeper {
    /// The first `layers` layers are here.
    pub fn open(&self, layers: u32) {
        self.0.set(State::Coming(layers));
    }

    /// The core knows how it ended.
    pub fn finish(self) {
        self.0.set(State::Over);
    }
}

impl Drop for LayerGateKeeper {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if *state != State::Over {
            *state = State::Lost;
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_waits_for_each_layer() {
        let (keeper, gate) = layer_gate();
        let (told, heard) = std::sync::mpsc::channel();
        let engine = std::thread::spawn(move || {
            for layer in 0..4 {
                let here = gate.wait(layer);
                told.send((layer, here)).unwrap();
            }
        });
        keeper.open(1);
        assert_eq!(heard.recv().unwrap(), (0, true));
        assert!(heard.try_recv().is_err(), "layer 1 is not here");
        keeper.open(3);
        assert_eq!([heard.recv().unwrap(), heard.recv().unwrap()], [(1, true), (2, true)]);
        keeper.finish();
        assert_eq!(heard.recv().unwrap(), (3, true));
        engine.join().unwrap();
    }

    #[test]
    fn a_keeper_that_is_lost_is_noticed() {
        let (keeper, gate) = layer_gate();
        keeper.open(1);
        drop(keeper);
        assert!(!gate.wait(0) && !gate.wait(1));
    }
}
