//! Turns at work of which only so much is done at once. Clients take turns, whatever each asks for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_scheduler::Turns;
use tokio::sync::oneshot;

/// Most requests of one client that wait for a turn.
const MAX_WAITING: usize = 1024;

/// Client of a request. Requests do not say yet whose they are, so there is one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Client;

/// Gives out turns.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    free: usize,
    waiting: Turns<Client, oneshot::Sender<Turn>>,
}

/// A turn. Dropping it gives it to who is next.
#[derive(Debug)]
pub struct Turn(Option<Gate>);

impl Gate {
    /// A gate with so many turns at once.
    pub fn new(turns: usize) -> Self {
        Self(Arc::new(Mutex::new(State { free: turns, waiting: Turns::default() })))
    }

    /// Waits for a turn; `None` if as many requests of the client wait as may.
    pub async fn turn(&self, client: Client) -> Option<Turn> {
        match self.ask(client)? {
            Ok(turn) => Some(turn),
            // The gate keeps the other end until it has a turn for it.
            Err(turn) => turn.await.ok(),
        }
    }

    fn ask(&self, client: Client) -> Option<Result<Turn, oneshot::Receiver<Turn>>> {
        let mut state = self.state();
        if state.free > 0 {
            state.free -= 1;
            return Some(Ok(Turn(Some(self.clone()))));
        }
        if state.waiting.len_of(client) >= MAX_WAITING {
            return None;
        }
        let (give, turn) = oneshot::channel();
        state.waiting.push(client, give);
        Some(Err(turn))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that panics is done under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mut gate) = self.0.take() else { return };
        // Some may not wait any more: the turn comes back.
        loop {
            let next = gate.state().waiting.pop();
            let Some(next) = next else { break };
            let Err(mut back) = next.send(Self(Some(gate))) else { return };
            let Some(again) = back.0.take() else { return };
            gate = again;
        }
        gate.state().free += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn turn_passes_over_requests_that_have_left_and_their_number_is_bounded() {
        let gate = Gate::new(1);
        let first = gate.turn(Client).await.unwrap();
        let mut left: Vec<_> = (0..MAX_WAITING - 1).map(|_| gate.ask(Client).unwrap().unwrap_err()).collect();
        let stays = gate.ask(Client).unwrap().unwrap_err();
        assert!(gate.turn(Client).await.is_none(), "as many wait as may");
        left.truncate(1);
        let heard = left.pop().unwrap();
        drop(first);
        let turn = heard.await.unwrap();
        assert!(gate.ask(Client).is_some_and(|asked| asked.is_err()), "there is one turn");
        // It comes to who still waits, past all that have left.
        drop(turn);
        let turn = tokio::time::timeout(Duration::from_secs(5), stays).await.unwrap().unwrap();
        drop(turn);
        // The last one that asked has left, too.
        assert!(tokio::time::timeout(Duration::from_secs(5), gate.turn(Client)).await.unwrap().is_some());
    }
}
