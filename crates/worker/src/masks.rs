//! Masks of structured output, made on a thread of their own while the engine computes what they
//! are for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc;

use baton_grammar::{GrammarCompiler, GrammarError, Mask, Matcher};
use baton_scheduler::{StepId, StepSequence};
use baton_types::{ErrorKind, Refused, RequestKey, TokenId};

/// Steps that may wait for the thread: the engine has one in hand.
const QUEUED_STEPS: usize = 2;
/// An output that no step was for in so many is forgotten: should it go on, its way through the
/// grammar is made again.
const KEPT_STEPS: u64 = 64;

/// What a step wants of the thread.
type StepMasks = (StepId, Vec<Wanted>);
/// What the thread made.
type MaskResult = (StepId, RequestKey, Result<Mask, GrammarError>);

/// The mask of one sequence.
struct Wanted {
    key: RequestKey,
    grammar: Arc<str>,
    tokens: Arc<Vec<TokenId>>,
    prompt_tokens: usize,
    /// A prompt that goes on in a later step wants its grammar compiled by then.
    draws: bool,
}

/// Makes masks. Dropping it ends the thread.
pub(crate) struct Masks {
    wanted: mpsc::SyncSender<StepMasks>,
    made: mpsc::Receiver<MaskResult>,
    step: StepId,
    ready: HashMap<RequestKey, Result<Mask, GrammarError>>,
}

impl Masks {
    /// Starts the thread.
    pub(crate) fn start(compiler: GrammarCompiler) -> std::io::Result<Self> {
        let (wanted, queue) = mpsc::sync_channel(QUEUED_STEPS);
        let (done, made) = mpsc::channel();
        std::thread::Builder::new().name("masks".into()).spawn(move || run(&compiler, &queue, &done))?;
        Ok(Self { wanted, made, step: StepId(0), ready: HashMap::new() })
    }

    /// A step begins: its masks are made from now on.
    pub(crate) fn begin<'a>(&mut self, step: StepId, sequences: impl Iterator<Item = &'a StepSequence>) {
        self.step = step;
        self.ready = HashMap::new();
        let wanted: Vec<_> = sequences.filter_map(wanted).collect();
        if !wanted.is_empty() {
            // A thread that is gone gives no masks, and a step that waits for one is told.
            let _ = self.wanted.send((step, wanted));
        }
    }

    /// The mask of a sequence of this step, once it is made.
    pub(crate) fn take(&mut self, key: RequestKey) -> Result<Mask, Refused> {
        let refused = |kind, message| Refused { kind, message };
        loop {
            if let Some(made) = self.ready.remove(&key) {
                // Of the request, and not of this node: no other one would do better.
                return made.map_err(|error| refused(ErrorKind::Invalid, format!("structured_output: {error}")));
            }
            let (step, key, mask) = self
                .made
                .recv()
                .map_err(|_| refused(ErrorKind::Internal, "the thread that makes masks is gone".to_owned()))?;
            // Of a step before: a sequence that drew no token after all.
            if step == self.step {
                self.ready.insert(key, mask);
            }
        }
    }
}

fn wanted(sequence: &StepSequence) -> Option<Wanted> {
    Some(Wanted {
        key: sequence.key,
        grammar: sequence.sampling.grammar.clone()?,
        tokens: Arc::clone(&sequence.tokens),
        prompt_tokens: sequence.prompt_tokens,
        draws: sequence.is_last_chunk,
    })
}

/// An output on its way.
struct PendingOutput {
    matcher: Matcher,
    used: StepId,
}

fn run(compiler: &GrammarCompiler, queue: &mpsc::Receiver<StepMasks>, made: &mpsc::Sender<MaskResult>) {
    let mut pending: HashMap<RequestKey, PendingOutput> = HashMap::new();
    while let Ok((step, wanted)) = queue.recv() {
        for wanted in wanted {
            let key = wanted.key;
            let draws = wanted.draws;
            let mask = mask(compiler, &mut pending, step, wanted);
            if draws && made.send((step, key, mask)).is_err() {
                return;
            }
        }
        pending.retain(|_, pending| pending.used.0 + KEPT_STEPS > step.0);
    }
}

/// Advances an output's matcher to its last token. The step's tokens are released before its mask
/// is known: the core appends to them in place.
fn mask(
    compiler: &GrammarCompiler,
    pending: &mut HashMap<RequestKey, PendingOutput>,
    step: StepId,
    Wanted { key, grammar, tokens, prompt_tokens, draws }: Wanted,
) -> Result<Mask, GrammarError> {
    let output = &tokens[prompt_tokens..];
    let known = pending.remove(&key).map(|pending| pending.matcher).filter(|matcher| matcher.taken() <= output.len());
    let mut matcher = known.map_or_else(|| compiler.compile(&grammar), Ok)?;
    let mut mask = advance(&mut matcher, output, draws);
    if let Err(GrammarError::Stuck(_)) = mask {
        // By others, it may be.
        matcher = compiler.renew(&grammar, &matcher)?;
        mask = advance(&mut matcher, output, draws);
    }
    pending.insert(key, PendingOutput { matcher, used: step });
    // Of a prompt that goes on, no mask is asked for.
    mask.and_then(|mask| mask.ok_or_else(|| GrammarError::Stuck(String::new())))
}

/// Takes in what is new of the output; the mask of the next token, if one is drawn.
fn advance(matcher: &mut Matcher, output: &[TokenId], draws: bool) -> Result<Option<Mask>, GrammarError> {
    let taken = matcher.taken();
    matcher.take(&output[taken..])?;
    draws.then(|| matcher.mask()).transpose()
}

#[cfg(test)]
mod tests {
    use baton_grammar::Form;
    use baton_text::Tokenizer;
    use baton_types::{Attempt, RequestId, SamplingParams};

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

    fn masks() -> Masks {
        Masks::start(GrammarCompiler::new(&Tokenizer::bytes()).unwrap()).unwrap()
    }

    fn allowed(mask: &Mask) -> String {
        (0..=255).filter(|&byte: &u8| mask.allows(byte.into())).map(char::from).collect()
    }

    #[test]
    fn grammar_mask_follows_the_output_from_any_position() {
        let grammar = format!("start: {}", Form::Choices(vec!["one".into(), "other".into()]).rule().unwrap());
        let mut masks = masks();
        for (step, (output, next)) in
            [("", "o"), ("o", "nt"), ("ot", "h"), ("other", ""), ("o", "nt")].into_iter().enumerate()
        {
            let of = sequence(7, output, Some(&grammar));
            masks.begin(StepId(step as u64), [&of, &sequence(8, "x", None)].into_iter());
            let mask = masks.take(of.key).unwrap();
            assert_eq!(allowed(&mask), next, "{output}");
            assert_eq!(Arc::strong_count(&of.tokens), 1, "released before the mask is known");
        }
        // Seen for the first time in the middle.
        let of = sequence(9, "oth", Some(&grammar));
        masks.begin(StepId(70), std::iter::once(&of));
        assert_eq!(allowed(&masks.take(of.key).unwrap()), "e");
    }

    /// All outputs of a grammar share the states of its lexer, which have a bound.
    #[test]
    fn grammar_shared_by_many_outputs_does_not_wear_out() {
        let rule = Form::Regex(".{0,200}and.{0,250}".into()).rule().unwrap();
        let grammar = format!("start: {rule}");
        let mut masks = masks();
        let mut state = 1_u64;
        let mut step = 0;
        for n in 0..200 {
            // Each has a history of its own of where the word was.
            let word = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if state >> 63 == 0 { "and" } else { "xyz" }
            };
            let text: String = (0..40).map(word).collect();
            for length in [40, 80, 120] {
                let of = sequence(n, &text[..length], Some(&grammar));
                step += 1;
                masks.begin(StepId(step), std::iter::once(&of));
                assert!(masks.take(of.key).is_ok(), "output {n}, {length} characters");
            }
        }
    }

    #[test]
    fn failed_grammar_mask_fails_only_its_own_request() {
        let mut masks = masks();
        let bad = sequence(1, "", Some("start: ("));
        let strays = sequence(2, "b", Some("start: \"a\""));
        let good = sequence(3, "", Some("start: \"a\""));
        masks.begin(StepId(1), [&bad, &strays, &good].into_iter());
        assert!(masks.take(bad.key).is_err());
        assert_eq!(masks.take(strays.key).unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(allowed(&masks.take(good.key).unwrap()), "a");
        // A mask that was not taken is not mistaken for another step's.
        masks.begin(StepId(2), [&good].into_iter());
        masks.begin(StepId(3), [&good].into_iter());
        assert_eq!(allowed(&masks.take(good.key).unwrap()), "a");
    }
}
