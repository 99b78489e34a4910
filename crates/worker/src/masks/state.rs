//! Outputs on their way through their grammars, and what waits for which thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_grammar::{CancellationHandle, GrammarCompiler, GrammarError, Mask, Matcher};
use baton_scheduler::Turns;
use baton_types::{ConductorId, RequestKey, TokenId};

/// A mask that the masks' thread works on for so long while a step waits is given up, and made
/// anew on the grammars' threads.
const MAX_MASK_TIME: Duration = Duration::from_millis(10);

/// Whose turn it is to have a grammar compiled. Jobs do not say which client they are of.
pub(super) type Client = ConductorId;

/// Where a sequence's mask is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is made, or not asked for.
    Idle,
    /// It waits for a thread, or a thread makes it.
    Making,
}

/// An output on its way through its grammar.
pub(super) struct Output {
    pub client: Client,
    pub grammar: Arc<str>,
    pub tokens: Vec<TokenId>,
    /// `None` before its grammar is compiled, and while a thread makes a mask.
    pub matcher: Option<Matcher>,
    /// The mask of the token after `tokens`.
    pub mask: Option<Result<Mask, GrammarError>>,
    pub stage: Stage,
    /// Its masks are made on the grammars' threads.
    pub is_slow: bool,
    /// Whether the node's loop is told once the mask is made.
    pub is_awaited: bool,
}

/// What the masks' thread works on.
pub(super) struct Current {
    pub key: RequestKey,
    pub since: Instant,
    pub cancellation: Option<CancellationHandle>,
}

/// What is known of all outputs.
#[derive(Default)]
pub(super) struct State {
    pub outputs: HashMap<RequestKey, Output>,
    pub quick: VecDeque<RequestKey>,
    /// By client, and by whether the grammar is compiled: slow masks that come without end do not
    /// delay new grammars.
    pub slow: Turns<(Client, bool), RequestKey>,
    pub current: Option<Current>,
    /// A thread is gone, or the engine's is.
    pub is_closed: bool,
}

impl Output {
    /// Lets the loop be told when the mask is made; tells whether it is.
    pub(super) fn await_mask(&mut self) -> bool {
        self.is_awaited = self.mask.is_none();
        self.mask.is_some()
    }
}

impl State {
    /// Wants the mask after `output`, if it is not made or on its way.
    pub(super) fn want(
        &mut self,
        key: RequestKey,
        client: Client,
        grammar: &Arc<str>,
        output: &[TokenId],
        compiler: &GrammarCompiler,
    ) {
        let is_new = !self.outputs.contains_key(&key);
        // A grammar that was slow for another output is slow from the first token on.
        let is_slow = is_new && self.outputs.values().any(|other| other.is_slow && other.grammar == *grammar);
        let known = self.outputs.entry(key).or_insert_with(|| Output {
            client,
            grammar: Arc::clone(grammar),
            tokens: Vec::new(),
            matcher: None,
            mask: None,
            stage: Stage::Idle,
            is_slow,
            is_awaited: false,
        });
        if known.tokens != output {
            known.tokens.clear();
            known.tokens.extend_from_slice(output);
            known.mask = None;
        }
        if known.mask.is_none() && known.stage == Stage::Idle {
            if known.matcher.is_none() && !known.is_slow {
                known.matcher = compiler.kept(grammar);
            }
            self.queue(key);
        }
    }

    /// Puts a sequence in line for its mask.
    pub(super) fn queue(&mut self, key: RequestKey) {
        let Some(output) = self.outputs.get_mut(&key) else { return };
        if output.is_slow || output.matcher.is_none() {
            return self.queue_slow(key);
        }
        output.stage = Stage::Making;
        self.quick.push_back(key);
    }

    pub(super) fn queue_slow(&mut self, key: RequestKey) {
        let Some(output) = self.outputs.get_mut(&key) else { return };
        output.stage = Stage::Making;
        self.slow.push((output.client, output.matcher.is_some()), key);
    }

    /// Masks of a grammar take long: those of all its outputs are made on the grammars' threads.
    pub(super) fn slow_down(&mut self, grammar: &Arc<str>) {
        for output in self.outputs.values_mut().filter(|output| output.grammar == *grammar) {
            output.is_slow = true;
        }
    }

    pub(super) fn put_back(&mut self, key: RequestKey, matcher: Option<Matcher>) {
        if let Some(output) = self.outputs.get_mut(&key) {
            output.matcher = matcher;
        }
    }

    /// Gives up the mask that the masks' thread has worked on for too long: others wait for it.
    pub(super) fn give_up_long(&self) {
        let Some(current) = &self.current else { return };
        if current.since.elapsed() > MAX_MASK_TIME
            && let Some(cancellation) = &current.cancellation
        {
            tracing::debug!(key = ?current.key, "a mask takes too long");
            cancellation.cancel();
        }
    }
}
