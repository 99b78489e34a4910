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

mod desk;
mod state;

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use baton_grammar::Mask;
use baton_scheduler::StepSequence;
use baton_types::{ErrorKind, Refused, RequestKey};

pub(crate) use desk::MaskDesk;

use desk::Closing;
use state::{Client, Output};

/// How long a step waits for all of its masks together. Ordinary ones are made long before.
pub(crate) const MAX_MASK_WAIT_PER_STEP: Duration = Duration::from_millis(2);

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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use baton_grammar::{Form, GrammarCompiler};
    use baton_text::Tokenizer;
    use baton_types::{Attempt, ConductorId, RequestId, SamplingParams};
    use tokio::sync::mpsc;

    use crate::engine_thread::EngineEvent;

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
