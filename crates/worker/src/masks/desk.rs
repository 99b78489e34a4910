//! The desk that masks are asked for at, and the threads that make them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_grammar::{GrammarCompiler, GrammarError, Mask, Matcher, lowest_priority, thread_time};
use baton_types::{RequestKey, TokenId};
use tokio::sync::mpsc::WeakSender;

use super::state::{Client, Current, Output, Stage, State};
use crate::engine_thread::EngineEvent;

/// Processor time of a mask after which a grammar's masks are made on the grammars' threads.
/// Ordinary ones take 50 us.
const SLOW_MASK: Duration = Duration::from_millis(2);

/// What the engine's thread, the node's loop and the threads that make masks share.
pub(crate) struct MaskDesk {
    pub(super) compiler: GrammarCompiler,
    state: Mutex<State>,
    /// There is work, or the end has come.
    pub(super) work: Condvar,
    /// A mask was made.
    pub(super) made: Condvar,
    /// The engine's thread keeps the channel open: its end is told by that.
    events: WeakSender<EngineEvent>,
}

/// A mask and the matcher behind it; or why there is none.
type Made = (Option<Matcher>, Result<Mask, GrammarError>);

impl MaskDesk {
    /// Starts the threads, of which so many compile. They end with [`Masks`].
    pub(crate) fn start(
        compiler: GrammarCompiler,
        events: WeakSender<EngineEvent>,
        grammar_threads: usize,
    ) -> std::io::Result<Arc<Self>> {
        let desk =
            Arc::new(Self { compiler, state: Mutex::default(), work: Condvar::new(), made: Condvar::new(), events });
        desk.spawn("masks", Self::make_quick)?;
        for _ in 0..grammar_threads {
            desk.spawn("grammars", |desk| {
                lowest_priority();
                desk.make_slow();
            })?;
        }
        Ok(desk)
    }

    fn spawn(self: &Arc<Self>, name: &str, run: fn(&Self)) -> std::io::Result<()> {
        let desk = Closing(Arc::clone(self));
        std::thread::Builder::new().name(name.into()).spawn(move || run(&desk.0)).map(drop)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // A panic of a thread closes the desk.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request was taken in: its grammar is compiled and the mask after `output` made, and then
    /// the loop is told. `true`: it is made already.
    pub(crate) fn prepare(&self, key: RequestKey, client: Client, grammar: &Arc<str>, output: &[TokenId]) -> bool {
        let mut state = self.state();
        state.want(key, client, grammar, output, &self.compiler);
        let is_made = state.outputs.get_mut(&key).is_some_and(Output::await_mask);
        // At the end, who asks for the mask is told so.
        let is_over = state.is_closed;
        drop(state);
        self.work.notify_all();
        is_made || is_over
    }

    /// Forgets requests that are over here.
    pub(crate) fn forget(&self, keys: &[RequestKey]) {
        let mut state = self.state();
        for key in keys {
            state.outputs.remove(key);
        }
    }

    pub(super) fn tell_ready(&self, key: RequestKey) {
        if let Some(events) = self.events.upgrade() {
            // The loop is gone only when the process ends.
            let _ = events.blocking_send(EngineEvent::MaskReady(key));
        }
    }

    fn make_quick(&self) {
        while let Some((key, output)) = self.next(|state| state.quick.pop_front()) {
            let Some(mut matcher) = output.matcher.or_else(|| self.compiler.kept(&output.grammar)) else {
                // It was kept when the mask was asked for.
                self.state().queue_slow(key);
                self.work.notify_all();
                continue;
            };
            let cancellation = matcher.cancellation();
            let began = thread_time();
            self.state().current =
                Some(Current { key, since: baton_runtime::now(), cancellation: cancellation.clone() });
            let mask = advance(&mut matcher, &output.tokens);
            let is_slow = thread_time() - began > SLOW_MASK;
            let mut state = self.state();
            state.current = None;
            let is_given_up = cancellation.is_some_and(|cancellation| cancellation.is_cancelled());
            if is_slow || is_given_up {
                state.slow_down(&output.grammar);
            }
            let matcher = (!is_given_up).then_some(matcher);
            if let Err(GrammarError::Stuck(_)) = mask {
                // What other outputs used up of the grammar may be the reason: then it is compiled
                // anew.
                state.put_back(key, matcher);
                state.queue_slow(key);
                drop(state);
                self.work.notify_all();
            } else {
                self.put(state, key, output.tokens.len(), (matcher, mask));
            }
        }
    }

    fn make_slow(&self) {
        while let Some((key, output)) = self.next(|state| state.slow.pop()) {
            let made = self.compiled(output.matcher, &output.grammar, &output.tokens);
            self.put(self.state(), key, output.tokens.len(), made);
        }
    }

    /// The mask, with a grammar compiled for it if need be.
    fn compiled(&self, matcher: Option<Matcher>, grammar: &Arc<str>, tokens: &[TokenId]) -> Made {
        let matcher = matcher.map_or_else(|| self.compiler.compile(grammar), Ok);
        let mut matcher = match matcher {
            Ok(matcher) => matcher,
            Err(error) => return (None, Err(error)),
        };
        let mask = self.advance_aside(&mut matcher, tokens);
        if !matches!(mask, Err(GrammarError::Stuck(_))) {
            return (Some(matcher), mask);
        }
        // By others, it may be.
        match self.compiler.renew(grammar, &matcher) {
            Ok(mut renewed) => {
                let mask = self.advance_aside(&mut renewed, tokens);
                (Some(renewed), mask)
            }
            Err(error) => (None, Err(error)),
        }
    }

    fn advance_aside(&self, matcher: &mut Matcher, output: &[TokenId]) -> Result<Mask, GrammarError> {
        let taken = matcher.taken();
        self.compiler.mask_aside(matcher, &output[taken..])
    }

    /// The next mask to be made, once there is one; `None` at the end. Its matcher is the thread's
    /// until it is put back.
    fn next(&self, pop: impl Fn(&mut State) -> Option<RequestKey>) -> Option<(RequestKey, Job)> {
        let mut state = self.state();
        while !state.is_closed {
            let Some(key) = pop(&mut state) else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // What was forgotten meanwhile is passed over.
            let Some(output) = state.outputs.get_mut(&key) else { continue };
            let matcher = output.matcher.take().filter(|matcher| matcher.taken() <= output.tokens.len());
            return Some((key, Job { grammar: Arc::clone(&output.grammar), tokens: output.tokens.clone(), matcher }));
        }
        None
    }

    fn put(&self, mut state: MutexGuard<'_, State>, key: RequestKey, tokens: usize, (matcher, mask): Made) {
        state.put_back(key, matcher);
        let Some(output) = state.outputs.get_mut(&key) else { return };
        output.stage = Stage::Idle;
        if output.tokens.len() != tokens {
            // The output went on without it.
            state.queue(key);
            drop(state);
            return self.work.notify_all();
        }
        output.mask = Some(mask);
        let is_awaited = std::mem::take(&mut output.is_awaited);
        drop(state);
        self.made.notify_all();
        if is_awaited {
            self.tell_ready(key);
        }
    }

    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        let awaited: Vec<_> =
            state.outputs.iter().filter(|(_, output)| output.is_awaited).map(|(key, _)| *key).collect();
        drop(state);
        self.work.notify_all();
        self.made.notify_all();
        // They are told so when they ask for the mask.
        awaited.into_iter().for_each(|key| self.tell_ready(key));
    }
}

/// What a thread makes a mask of.
struct Job {
    grammar: Arc<str>,
    tokens: Vec<TokenId>,
    matcher: Option<Matcher>,
}

/// Closes the desk when a thread ends, by a panic too.
pub(super) struct Closing(pub Arc<MaskDesk>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Takes in what is new of the output, and makes the mask of the next token.
fn advance(matcher: &mut Matcher, output: &[TokenId]) -> Result<Mask, GrammarError> {
    matcher.take(&output[matcher.taken()..])?;
    matcher.mask()
}
