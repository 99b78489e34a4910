//! Masks of structured output, made on threads of their own while the engine computes what they
//! are for.
//!
//! ```text
//!   prepare ─▶ grammars' threads: compile, and make the first mask ─▶ MaskReady: the sequence may join
//!   begin   ─▶ the masks' thread: the next mask, while the step is computed ─▶ take, before the token is drawn
//!                    └ it takes too long ─▶ grammars' threads: this and all later ones ─▶ take is late, MaskReady
//! ```
//!
//! The grammars' threads have the lowest priority, and conductors take turns there. A step waits
//! for masks only as long as [`MAX_MASK_WAIT_PER_STEP`]: a sequence whose mask is late then sits
//! the step out.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_grammar::{GrammarCompiler, GrammarError, Mask, Matcher, lowest_priority, thread_time};
use baton_scheduler::{StepSequence, Turns};
use baton_types::{ConductorId, ErrorKind, Refused, RequestKey, TokenId};
use tokio::sync::mpsc::WeakSender;

use crate::engine_thread::EngineEvent;

/// How long a step waits for all of its masks together. Ordinary ones are made long before.
pub(crate) const MAX_MASK_WAIT_PER_STEP: Duration = Duration::from_millis(2);
/// Processor time of a mask after which a grammar's masks are made on the grammars' threads.
/// Ordinary ones take 50 us.
const SLOW_MASK: Duration = Duration::from_millis(2);
/// A mask that the masks' thread works on for so long while a step waits is given up, and made
/// anew on the grammars' threads.
const MAX_MASK_TIME: Duration = Duration::from_millis(10);

/// Whose turn it is to have a grammar compiled. Jobs do not say which client they are of.
type Client = ConductorId;

/// Where a sequence's mask is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It is made, or not asked for.
    Idle,
    /// It waits for a thread, or a thread makes it.
    Making,
}

/// An output on its way through its grammar.
struct Output {
    client: Client,
    grammar: Arc<str>,
    tokens: Vec<TokenId>,
    /// `None` before its grammar is compiled, and while a thread makes a mask.
    matcher: Option<Matcher>,
    /// The mask of the token after `tokens`.
    mask: Option<Result<Mask, GrammarError>>,
    stage: Stage,
    /// Its masks are made on the grammars' threads.
    is_slow: bool,
    /// Whether the node's loop is told once the mask is made.
    is_awaited: bool,
}

/// What the masks' thread works on.
struct Current {
    key: RequestKey,
    since: Instant,
    cancellation: Option<baton_grammar::CancellationHandle>,
}

#[derive(Default)]
struct State {
    outputs: HashMap<RequestKey, Output>,
    quick: VecDeque<RequestKey>,
    slow: Turns<Client, RequestKey>,
    current: Option<Current>,
    /// A thread is gone, or the engine's is.
    is_closed: bool,
}

/// What the engine's thread, the node's loop and the threads that make masks share.
pub(crate) struct MaskDesk {
    compiler: GrammarCompiler,
    state: Mutex<State>,
    /// There is work, or the end has come.
    work: Condvar,
    /// A mask was made.
    made: Condvar,
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

    fn state(&self) -> MutexGuard<'_, State> {
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

    fn tell_ready(&self, key: RequestKey) {
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

    fn close(&self) {
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

impl Output {
    /// Lets the loop be told when the mask is made; tells whether it is.
    fn await_mask(&mut self) -> bool {
        self.is_awaited = self.mask.is_none();
        self.mask.is_some()
    }
}

impl State {
    /// Wants the mask after `output`, if it is not made or on its way.
    fn want(
        &mut self,
        key: RequestKey,
        client: Client,
        grammar: &Arc<str>,
        output: &[TokenId],
        compiler: &GrammarCompiler,
    ) {
        let is_slow = || self.outputs.values().any(|other| other.is_slow && other.grammar == *grammar);
        if !self.outputs.contains_key(&key) {
            let new = Output {
                client,
                grammar: Arc::clone(grammar),
                tokens: Vec::new(),
                matcher: None,
                mask: None,
                stage: Stage::Idle,
                is_slow: is_slow(),
                is_awaited: false,
            };
            self.outputs.insert(key, new);
        }
        let Some(known) = self.outputs.get_mut(&key) else { return };
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
    fn queue(&mut self, key: RequestKey) {
        let Some(output) = self.outputs.get_mut(&key) else { return };
        if output.is_slow || output.matcher.is_none() {
            return self.queue_slow(key);
        }
        output.stage = Stage::Making;
        self.quick.push_back(key);
    }

    fn queue_slow(&mut self, key: RequestKey) {
        let Some(output) = self.outputs.get_mut(&key) else { return };
        output.stage = Stage::Making;
        self.slow.push(output.client, key);
    }

    /// Masks of a grammar take long: those of all its outputs are made on the grammars' threads.
    fn slow_down(&mut self, grammar: &Arc<str>) {
        for output in self.outputs.values_mut().filter(|output| output.grammar == *grammar) {
            output.is_slow = true;
        }
    }

    fn put_back(&mut self, key: RequestKey, matcher: Option<Matcher>) {
        if let Some(output) = self.outputs.get_mut(&key) {
            output.matcher = matcher;
        }
    }

    /// Gives up the mask that the masks' thread has worked on for too long: others wait for it.
    fn give_up_long(&self) {
        let Some(current) = &self.current else { return };
        if current.since.elapsed() > MAX_MASK_TIME
            && let Some(cancellation) = &current.cancellation
        {
            tracing::debug!(key = ?current.key, "a mask takes too long");
            cancellation.cancel();
        }
    }
}

/// Closes the desk when a thread ends, by a panic too.
struct Closing(Arc<MaskDesk>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The engine's side: one step at a time. Dropping it ends the threads.
pub(crate) struct Masks {
    desk: Closing,
    /// How long the step may still wait.
    wait: Duration,
    /// Sequences of the step whose mask was late.
    late: Vec<RequestKey>,
}

impl Masks {
    pub(crate) fn new(desk: Arc<MaskDesk>) -> Self {
        Self { desk: Closing(desk), wait: Duration::ZERO, late: Vec::new() }
    }

    /// A step begins: those of its masks that it draws by are made from now on.
    pub(crate) fn begin<'a>(&mut self, sequences: impl Iterator<Item = &'a StepSequence>) {
        self.wait = MAX_MASK_WAIT_PER_STEP;
        let desk = &self.desk.0;
        let mut wanted = sequences.filter(|sequence| sequence.is_last_chunk).peekable();
        if wanted.peek().is_none() {
            return;
        }
        let mut state = desk.state();
        for sequence in wanted {
            if let Some(grammar) = &sequence.sampling.grammar {
                let output = &sequence.tokens[sequence.prompt_tokens..];
                state.want(sequence.key, Client::default(), grammar, output, &desk.compiler);
            }
        }
        drop(state);
        desk.work.notify_all();
    }

    /// The mask of a sequence of this step; `None` if it is late.
    pub(crate) fn take(&mut self, key: RequestKey) -> Result<Option<Mask>, Refused> {
        let began = baton_runtime::now();
        let mut state = self.desk.0.state();
        loop {
            if state.is_closed {
                let message = "the threads that make masks are gone".to_owned();
                return Err(Refused { kind: ErrorKind::Internal, message });
            }
            let waited = began.elapsed();
            let Some(output) = state.outputs.get_mut(&key) else { break };
            if let Some(made) = output.mask.take() {
                self.wait = self.wait.saturating_sub(waited);
                // Of the request, and not of this node: no other one would do better.
                let refused =
                    |error| Refused { kind: ErrorKind::Invalid, message: format!("structured_output: {error}") };
                return made.map(Some).map_err(refused);
            }
            if output.is_slow || waited >= self.wait {
                break;
            }
            let made = &self.desk.0.made;
            state = made.wait_timeout(state, self.wait - waited).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.give_up_long();
        self.wait = self.wait.saturating_sub(began.elapsed());
        self.late.push(key);
        Ok(None)
    }

    /// The loop has heard of the step: it is told of masks that were late when they are made.
    pub(crate) fn end(&mut self) {
        for key in self.late.drain(..) {
            crate::metrics::on_mask_late();
            let is_made = self.desk.0.state().outputs.get_mut(&key).is_none_or(Output::await_mask);
            if is_made {
                self.desk.0.tell_ready(key);
            }
        }
    }
}

/// Takes in what is new of the output, and makes the mask of the next token.
fn advance(matcher: &mut Matcher, output: &[TokenId]) -> Result<Mask, GrammarError> {
    matcher.take(&output[matcher.taken()..])?;
    matcher.mask()
}

#[cfg(test)]
mod tests {
    use baton_grammar::Form;
    use baton_text::Tokenizer;
    use baton_types::{Attempt, RequestId, SamplingParams};
    use tokio::sync::mpsc;

    use super::*;

    fn sequence(n: u128, output: &str, grammar: Option<&str>) -> StepSequence {
        let prompt = [1, 2, 3];
        let tokens: Vec<_> = prompt.into_iter().chain(output.bytes().map(u32::from)).collect();
        StepSequence {
            key: RequestKey { request: RequestId(n), attempt: Attempt(0) },
            range: tokens.len() - 1..tokens.len(),
            tokens: Arc::new(tokens),
            prompt_tokens: prompt.len(),
            block_table: Arc::new(Vec::new()),
            logits: baton_scheduler::LogitsWanted::Last,
            zero_tail: None,
            sampling: Arc::new(SamplingParams { grammar: grammar.map(Into::into), ..SamplingParams::default() }),
            is_last_chunk: true,
            awaits_prefix: false,
        }
    }

    struct Node {
        masks: Masks,
        events: mpsc::Receiver<EngineEvent>,
        /// Keeps the channel open, as the engine's thread does.
        _open: mpsc::Sender<EngineEvent>,
    }

    impl Node {
        fn new() -> Self {
            let (open, events) = mpsc::channel(100);
            let compiler = GrammarCompiler::new(&Tokenizer::bytes()).unwrap();
            let desk = MaskDesk::start(compiler, open.downgrade(), 1).unwrap();
            Self { masks: Masks::new(desk), events, _open: open }
        }

        fn prepare(&self, sequence: &StepSequence, client: u64) {
            let grammar = sequence.sampling.grammar.as_ref().unwrap();
            let output = &sequence.tokens[sequence.prompt_tokens..];
            assert!(!self.masks.desk.0.prepare(sequence.key, ConductorId(client), grammar, output));
        }

        /// The next request whose mask is made.
        fn ready(&mut self) -> RequestKey {
            match self.events.blocking_recv() {
                Some(EngineEvent::MaskReady(key)) => key,
                other => panic!("{other:?}"),
            }
        }

        /// The mask, in as many steps as it takes.
        fn mask(&mut self, of: &StepSequence) -> Result<Mask, Refused> {
            loop {
                self.masks.begin(std::iter::once(of));
                if let Some(mask) = self.masks.take(of.key)? {
                    return Ok(mask);
                }
                self.masks.end();
                while self.ready() != of.key {}
            }
        }
    }

    fn allowed(mask: &Mask) -> String {
        (0..=255).filter(|&byte: &u8| mask.allows(byte.into())).map(char::from).collect()
    }

    #[test]
    fn grammar_mask_follows_the_output_from_any_position() {
        let grammar = format!("start: {}", Form::Choices(vec!["one".into(), "other".into()]).rule().unwrap());
        let mut node = Node::new();
        for (output, next) in [("", "o"), ("o", "nt"), ("ot", "h"), ("other", ""), ("o", "nt")] {
            let of = sequence(7, output, Some(&grammar));
            assert_eq!(allowed(&node.mask(&of).unwrap()), next, "{output}");
            assert_eq!(Arc::strong_count(&of.tokens), 1, "the core appends in place");
        }
        // Seen for the first time in the middle.
        let of = sequence(9, "oth", Some(&grammar));
        node.prepare(&of, 1);
        assert_eq!(node.ready(), of.key);
        node.masks.begin([&of, &sequence(8, "x", None)].into_iter());
        assert_eq!(allowed(&node.masks.take(of.key).unwrap().unwrap()), "e", "made ahead");
        node.masks.desk.0.forget(&[of.key, sequence(7, "", None).key]);
        assert!(node.masks.desk.0.state().outputs.is_empty());
    }

    /// All outputs of a grammar share the states of its lexer, which have a bound.
    #[test]
    fn grammar_shared_by_many_outputs_does_not_wear_out() {
        let rule = Form::Regex(".{0,200}and.{0,250}".into()).rule().unwrap();
        let grammar = format!("start: {rule}");
        let mut node = Node::new();
        let mut state = 1_u64;
        for n in 0..200 {
            // Each has a history of its own of where the word was.
            let word = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if state >> 63 == 0 { "and" } else { "xyz" }
            };
            let text: String = (0..40).map(word).collect();
            for length in [40, 80, 120] {
                let of = sequence(n, &text[..length], Some(&grammar));
                assert!(node.mask(&of).is_ok(), "output {n}, {length} characters");
            }
        }
    }

    #[test]
    fn failed_grammar_mask_fails_only_its_own_request() {
        let mut node = Node::new();
        let bad = sequence(1, "", Some("start: ("));
        let strays = sequence(2, "b", Some("start: \"a\""));
        let good = sequence(3, "", Some("start: \"a\""));
        assert_eq!(node.mask(&bad).unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(node.mask(&strays).unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(allowed(&node.mask(&good).unwrap()), "a");
        // A mask that was not taken is there at the next step.
        node.masks.begin([&good].into_iter());
        assert_eq!(allowed(&node.mask(&good).unwrap()), "a");
    }

    /// One that takes a while to compile, and is another one for each number.
    fn large(n: u32) -> String {
        let properties: String =
            (0..60).map(|i| format!(r#""p{i}": {{"type": "string", "maxLength": {}}}, "#, i + n)).collect();
        let schema = format!(r#"{{"properties": {{{properties} "n": {{"const": {n}}}}}}}"#);
        format!("start: {}", Form::JsonSchema(schema).rule().unwrap())
    }

    #[test]
    fn step_does_not_wait_for_grammars_that_are_compiled() {
        let mut node = Node::new();
        let quick = sequence(1, "", Some("start: \"a\"*"));
        node.mask(&quick).unwrap();
        let slow: Vec<_> = (2..10).map(|n| sequence(n.into(), "", Some(&large(n)))).collect();
        let began = Instant::now();
        node.masks.begin(slow.iter().chain([&quick]));
        for of in &slow {
            assert!(node.masks.take(of.key).unwrap().is_none());
        }
        let waited = began.elapsed();
        assert!(waited < Duration::from_millis(100), "{waited:?}");
        node.masks.end();
        // They are told in any order, once each, and then there are all of them.
        let mut ready: Vec<_> = slow.iter().map(|_| node.ready()).collect();
        ready.sort();
        assert_eq!(ready, slow.iter().map(|of| of.key).collect::<Vec<_>>());
        let compiled = began.elapsed();
        assert!(compiled > waited, "{compiled:?}");
        node.masks.begin(slow.iter());
        assert!(slow.iter().all(|of| node.masks.take(of.key).unwrap().is_some()));
        assert!(node.mask(&quick).is_ok());
    }

    #[test]
    fn conductors_take_turns_at_compiling() {
        let mut node = Node::new();
        let of_one: Vec<_> = (0..6).map(|n| sequence(n.into(), "", Some(&large(n)))).collect();
        for of in &of_one {
            node.prepare(of, 1);
        }
        let other = sequence(9, "", Some("start: \"b\""));
        node.prepare(&other, 2);
        let order: Vec<_> = (0..7).map(|_| node.ready()).collect();
        let place = order.iter().position(|key| *key == other.key).unwrap();
        assert!(place <= 2, "{order:?}");
    }

    #[test]
    fn end_of_the_threads_is_told() {
        let mut node = Node::new();
        let of = sequence(1, "", Some("start: \"a\""));
        node.mask(&of).unwrap();
        node.masks.desk.0.close();
        node.masks.begin(std::iter::once(&of));
        assert_eq!(node.masks.take(of.key).unwrap_err().kind, ErrorKind::Internal);
    }
}
