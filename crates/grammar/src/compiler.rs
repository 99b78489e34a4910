//! Compiles grammars against a vocabulary.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_text::Tokenizer;
use baton_types::{MAX_GRAMMAR_BYTES, TokenId};
use llguidance::Matcher as InnerMatcher;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::{Logger, ParserFactory};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use crate::budget::{aside, cancel_when_spent, thread_time};
use crate::matcher::{Mask, Matcher};
use crate::problem::problem;
use crate::verdicts::{Digest, Verdict, Verdicts};
use crate::{Effort, GrammarError};

/// Grammars that are kept compiled.
const KEPT: usize = 16;
/// Most processor time of a compilation that was checked before: more than a check may take, since
/// no two take the same.
const MAX_COMPILE: Duration = Effort::Full.budget().saturating_mul(4);
/// Longest token that the library takes: it panics on longer ones. In use are up to 1,024 spaces.
const MAX_WORD_BYTES: usize = 1024;
/// Before the text of a special token, so that no text is taken for one.
const SPECIAL: u8 = 0xff;

/// Compiles grammars against a vocabulary. Those used last are kept.
pub struct GrammarCompiler {
    factory: ParserFactory,
    digest: String,
    kept: Mutex<VecDeque<(Arc<str>, Matcher)>>,
    verdicts: Mutex<Verdicts>,
    compilations: AtomicU64,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// A few times what schemas of 60 KiB take. A lexer state takes one to two KiB.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 200_000,
        step_lexer_fuel: 50_000,
        step_max_items: 5_000,
        max_lexer_states: 8_000,
        max_grammar_size: 5_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A few times what schemas of some KiB take.
fn small_limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 20_000,
        step_lexer_fuel: 10_000,
        step_max_items: 500,
        max_lexer_states: 2_000,
        max_grammar_size: 1_500,
        ..limits()
    }
}

impl GrammarCompiler {
    /// A compiler for the vocabulary of a tokenizer.
    ///
    /// # Errors
    /// The model has no end token, or the vocabulary is none that the library takes.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let words: Vec<_> = (0..tokenizer.vocab_size()).map(|id| word(tokenizer, id)).collect();
        let digest = digest(&words, tokenizer.eos_ids());
        let Some(&eos) = tokenizer.eos_ids().first() else {
            return Err(GrammarError::Invalid("the model has no end token".to_owned()));
        };
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos), &words).with_eos_tokens(tokenizer.eos_ids());
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let factory = ParserFactory::new_simple(&environment);
        let mut factory = factory.map_err(|error| GrammarError::Invalid(error.to_string()))?;
        factory.quiet();
        Ok(Self {
            factory,
            digest,
            kept: Mutex::default(),
            verdicts: Mutex::default(),
            compilations: AtomicU64::new(0),
        })
    }

    /// Names the vocabulary: nodes of another one would mask other tokens.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether nodes may be given this grammar: one that compiles, and soon enough. What this
    /// thread has done before counts, too.
    pub(crate) fn check_here(&self, grammar: &str, effort: Effort) -> Result<(), GrammarError> {
        self.compile_here(grammar, effort)?;
        let took = thread_time().as_millis();
        let most = Effort::Full.budget().as_millis();
        if took > most {
            return Err(GrammarError::Invalid(format!("it takes {took} ms to compile, but at most {most} are taken")));
        }
        Ok(())
    }

    /// What came of the check with this digest, if that was done lately.
    pub(crate) fn verdict(&self, digest: &Digest) -> Option<Verdict> {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner).of(digest)
    }

    pub(crate) fn remember(&self, digest: Digest, verdict: &Verdict) {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner).remember(digest, verdict);
    }

    /// Compiles a grammar in llguidance's dialect of Lark, or a list of such. Takes milliseconds,
    /// or what a check lets pass: not for the async threads.
    ///
    /// # Errors
    /// It is no grammar, or one that is too large or costs too much.
    pub fn compile(&self, grammar: &Arc<str>) -> Result<Matcher, GrammarError> {
        if let Some(kept) = self.kept(grammar) {
            return Ok(kept);
        }
        let matcher = self.compile_aside(grammar)?;
        self.keep(grammar, matcher.clone());
        Ok(matcher)
    }

    /// The same for an output that a matcher could not go on with. All outputs of a compiled
    /// grammar share the states of its lexer, which have a bound. What other outputs used must not
    /// count against this one. So it gets a fresh compilation, and so does the next output.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub fn renew(&self, grammar: &Arc<str>, worn: &Matcher) -> Result<Matcher, GrammarError> {
        if let Some(kept) = self.kept(grammar).filter(|kept| kept.compilation() != worn.compilation()) {
            return Ok(kept);
        }
        let matcher = self.compile_aside(grammar)?;
        self.keep(grammar, matcher.clone());
        Ok(matcher)
    }

    /// Compiles on a thread with a stack that is large enough.
    fn compile_aside(&self, grammar: &str) -> Result<Matcher, GrammarError> {
        aside(MAX_COMPILE, || self.compile_here(grammar, Effort::Full))
    }

    /// The mask after the rest of an output, made aside: one that takes too long is an error.
    ///
    /// # Errors
    /// As [`Matcher::take`] and [`Matcher::mask`].
    pub fn mask_aside(&self, matcher: &mut Matcher, rest: &[TokenId]) -> Result<Mask, GrammarError> {
        aside(Effort::Full.budget(), || {
            cancel_when_spent(matcher.cancellation());
            matcher.take(rest)?;
            matcher.mask()
        })
    }

    fn keep(&self, grammar: &Arc<str>, matcher: Matcher) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(other, _)| other != grammar);
        kept.truncate(KEPT - 1);
        kept.push_front((Arc::clone(grammar), matcher));
    }

    /// The grammar, if it is kept compiled.
    pub fn kept(&self, grammar: &Arc<str>) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let position = kept.iter().position(|(other, _)| other == grammar)?;
        let found = kept.remove(position)?;
        let matcher = found.1.clone();
        kept.push_front(found);
        Some(matcher)
    }

    /// Compiles on this thread: a grammar may need a large stack.
    pub(crate) fn compile_here(&self, grammar: &str, effort: Effort) -> Result<Matcher, GrammarError> {
        let bytes = grammar.len();
        if bytes > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooLarge { bytes });
        }
        let invalid = |error: &dyn fmt::Display| GrammarError::Invalid(problem(grammar, &error.to_string()));
        let top = TopLevelGrammar::from_lark_or_grammar_list(grammar).map_err(|error| invalid(&error))?;
        let limits = if effort == Effort::Full { limits() } else { small_limits() };
        let init = GrammarInit::Serialized(top);
        let capabilities = InferenceCapabilities::default();
        let parser = self.factory.create_parser_from_init_ext(init, Logger::new(0, 0), capabilities, limits);
        let parser = parser.map_err(|error| invalid(&error))?;
        let compilation = self.compilations.fetch_add(1, Ordering::Relaxed);
        let matcher = Matcher::new(InnerMatcher::new(Ok(parser)).into_cancellable(), compilation);
        // What no output has is found out now, and what costs too much from the first token on.
        matcher.try_one(self.factory.tok_env().tok_trie().eos_tokens()).map_err(|error| match error {
            GrammarError::Stuck(problem) => GrammarError::Invalid(problem),
            other => other,
        })?;
        Ok(matcher)
    }
}

/// A token as the library knows it; one that is too long is none of any grammar.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    let word = if tokenizer.is_special(id) { [&[SPECIAL], bytes].concat() } else { bytes.to_vec() };
    if word.len() > MAX_WORD_BYTES { Vec::new() } else { word }
}

fn digest(words: &[Vec<u8>], eos: &[TokenId]) -> String {
    let mut hasher = blake3::Hasher::new();
    for word in words {
        hasher.update(&(word.len() as u32).to_le_bytes());
        hasher.update(word);
    }
    for token in eos {
        hasher.update(&token.to_le_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::Form;

    fn compiler() -> GrammarCompiler {
        GrammarCompiler::new(&Tokenizer::bytes()).unwrap()
    }

    fn check(compiler: &GrammarCompiler, grammar: &Arc<str>) -> Result<(), GrammarError> {
        aside(Effort::Full.budget(), || compiler.check_here(grammar, Effort::Full))
    }

    fn grammar(form: &Form) -> Arc<str> {
        form.beside(format!("start: {}", form.rule().unwrap())).into()
    }

    /// Whether a text is one of the form, and all of it.
    fn takes(form: Form, text: &str) -> bool {
        let mut matcher = compiler().compile(&grammar(&form)).unwrap();
        let tokens: Vec<_> = text.bytes().map(u32::from).collect();
        for token in tokens {
            if !matcher.mask().unwrap().allows(token) {
                return false;
            }
            matcher.take(&[token]).unwrap();
        }
        matcher.mask().unwrap().allows(257)
    }

    #[test]
    fn grammar_accepts_only_texts_of_its_form() {
        let schema = r##"{"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"], "additionalProperties": false, "$defs": {"n": {"type": "array", "items": {"type": "integer"}}}}"##;
        let schema = || Form::JsonSchema(schema.to_owned());
        assert!(takes(schema(), r#"{"a": [1, 2], "b": "x"}"#));
        assert!(takes(schema(), "{\n  \"a\": [],\n  \"b\": \"y\"\n}"));
        assert!(!takes(schema(), r#"{"a": [1, 2], "b": "z"}"#));
        assert!(!takes(schema(), r#"{"a": [1, 2]}"#));
        assert!(!takes(schema(), "{  ") && !takes(schema(), "{\n \n"), "white space has a bound");
        assert!(takes(Form::JsonObject, r#"{"any": {"thing": [null, "é"]}}"#));
        assert!(!takes(Form::JsonObject, "[]"));
        assert!(takes(Form::Regex(r"[a-z]+/\d{2}".to_owned()), "ab/12"));
        assert!(takes(Form::Regex(r"^a\/b$".to_owned()), "a/b"));
        assert!(takes(Form::Regex(r"a\$".to_owned()), "a$"));
        assert!(!takes(Form::Regex(r"[a-z]+/\d{2}".to_owned()), "ab/1"));
        let choices = || Form::Choices(vec!["yes".into(), "no \"never\"".into()]);
        assert!(takes(choices(), "no \"never\"") && takes(choices(), "yes") && !takes(choices(), "ye"));
        assert!(takes(Form::Choices(vec!["\u{7f}".into()]), "\u{7f}") && takes(Form::Regex("a\\\nb".into()), "a\nb"));
        let cents = r#"{"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3}"#;
        assert!(takes(Form::JsonSchema(cents.into()), "1.75") && !takes(Form::JsonSchema(cents.into()), "1.7"));
        assert!(takes(Form::Lark("start: \"a\" b\nb: \"b\"*".into()), "abbb"));
    }

    #[test]
    fn finished_grammar_allows_only_an_end_token() {
        let mut matcher = compiler().compile(&grammar(&Form::Choices(vec!["ok".into()]))).unwrap();
        matcher.take(&[u32::from(b'o'), u32::from(b'k')]).unwrap();
        let mask = matcher.mask().unwrap();
        assert_eq!((0..512).filter(|&token| mask.allows(token)).collect::<Vec<_>>(), [257]);
    }

    #[test]
    fn grammar_matches_special_tokens_by_id_and_never_as_text() {
        let mut matcher = compiler().compile(&Arc::from("start: /(.|\\n)*/ <[258]> \"x\"")).unwrap();
        let mask = matcher.mask().unwrap();
        assert!(mask.allows(u32::from(b'<')) && mask.allows(258) && !mask.allows(259));
        matcher.take(&[u32::from(b'a'), 258]).unwrap();
        let mask = matcher.mask().unwrap();
        assert!(mask.allows(u32::from(b'x')) && !mask.allows(u32::from(b'y')));
    }

    #[test]
    fn invalid_grammar_is_refused() {
        let compiler = compiler();
        let refused = |text: &str| compiler.compile(&Arc::from(text)).err().unwrap().to_string();
        for text in [
            "",
            "start: nothing",
            "start: %json {\"type\": \"colour\"}",
            "start: /(/",
            "start: %json {\"allOf\": [{\"type\": \"string\"}, {\"type\": \"number\"}]}",
        ] {
            assert!(!refused(text).is_empty(), "{text}");
        }
        assert_eq!(refused(&" ".repeat(70_000)), "70000 bytes, but at most 65536 are taken");
        let both = r#"{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}"#;
        for (schema, place) in [
            (r#"{"type": "integer", "multipleOf": 999983}"#, "the schema at #/multipleOf: "),
            (both, "the schema at #/allOf/1/multipleOf: "),
            (r#"{"items": {"multipleOf": 1e-9}}"#, "the schema at #/items/multipleOf: "),
        ] {
            let refused = Form::JsonSchema(schema.into()).rule().unwrap_err().to_string();
            assert!(refused.starts_with(place), "{refused}");
        }
        assert!(Form::Lark("start: %json {}".into()).rule().is_err());
        assert!(Form::JsonSchema("[]".into()).rule().is_err());
        assert!(Form::JsonSchema("{".into()).rule().is_err());
    }

    fn nested_arrays(depth: usize) -> String {
        let open = r#"{"type": "array", "minItems": 90000, "maxItems": 100000, "items": "#;
        format!("{}{{\"type\": \"null\"}}{}", open.repeat(depth), "}".repeat(depth))
    }

    fn many_patterns(count: usize) -> String {
        (0..count).map(|n| format!(r#""^(a{{{n},500}}b?){{1,90}}$": {{"type": "null"}}"#)).collect::<Vec<_>>().join(",")
    }

    #[test]
    fn hostile_grammar_is_compiled_or_refused_within_bounds() {
        let compiler = compiler();
        let chain = |n: usize| {
            let definitions: Vec<_> =
                (0..n).map(|i| format!("\"d{i}\": {{\"$ref\": \"#/$defs/d{}\"}}", i + 1)).collect();
            format!(
                "{{\"$ref\": \"#/$defs/d0\", \"$defs\": {{{}, \"d{n}\": {{\"type\": \"string\"}}}}}}",
                definitions.join(",")
            )
        };
        let hostile = [
            Form::JsonSchema(chain(1500)),
            Form::JsonSchema(r##"{"$ref": "#"}"##.into()),
            Form::JsonSchema(r#"{"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}"#.into()),
            Form::JsonSchema(r#"{"type": "array", "minItems": 100000, "items": {"type": "string"}}"#.into()),
            Form::JsonSchema(r#"{"type": "integer", "multipleOf": 9973, "minimum": -100000000000000000}"#.into()),
            Form::Regex("(x?){5000}x{5000}".into()),
            Form::Regex(format!("({})*", "(a|b|ab)*c?".repeat(2000))),
            Form::Lark(format!("start: {}\na: \"x\"?", "a ".repeat(20_000))),
            Form::Regex("(a{1000}){1000}".into()),
            Form::Regex("((((((a{50}){50}){50}){50}){50}){50}){50}".into()),
            Form::Regex(r"\w{500}".into()),
            Form::Regex(r"(\w{1,60}){1,60}".into()),
            Form::Regex(r"(?i)(\p{L}\p{M}?){1,400}".into()),
            Form::Regex(".*a.{60}b".into()),
            Form::Regex("a{4000000000}".into()),
            Form::Regex(format!("{}a{}", "(".repeat(30_000), ")".repeat(30_000))),
            Form::Regex((0..9000).map(|n| format!("{n:x}")).collect::<Vec<_>>().join("|")),
            Form::Regex("(?=(a{1,1000}){1,1000}$)a*".into()),
            Form::JsonSchema(r#"{"type": "string", "pattern": "^(?=(a?){900}$)(?!.*b.{40}c)a{900}"}"#.into()),
            Form::JsonSchema(r#"{"type": "string", "pattern": "^(?:(?:a|b|ab)*c?){1,900}$"}"#.into()),
            Form::JsonSchema(r#"{"type": "string", "minLength": 1000000000}"#.into()),
            Form::JsonSchema(nested_arrays(60)),
            Form::JsonSchema(format!(r#"{{"patternProperties": {{{}}}}}"#, many_patterns(300))),
            Form::Lark("start: /(a{1000}){1000}/".into()),
            Form::Lark("start: \"a\"{1,1000000000}".into()),
            Form::Lark("start: a{1,90000}\na: b{1,90000}\nb: c{1,90000}\nc: \"x\"{1,90000}".into()),
            Form::Lark(format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000))),
            Form::Lark(format!("start: {}", "\"a\" | ".repeat(8_000) + "\"b\"")),
        ];
        for form in hostile {
            let grammar = form.rule().map(|rule| form.beside(format!("start: {rule}")));
            // Others may take the processors meanwhile: what it takes of them counts.
            let timed = aside(MAX_COMPILE, || {
                let matcher = grammar.and_then(|grammar| compiler.compile_here(&grammar, Effort::Full));
                // What an output costs, too: states are made as it goes on.
                let outcome = matcher.and_then(|mut matcher| {
                    (0..40).try_for_each(|_| {
                        let next = [b'a', b'"', b'x'].map(u32::from);
                        let mask = matcher.mask()?;
                        let next = next.into_iter().find(|token| mask.allows(*token));
                        next.map_or(Ok(()), |token| matcher.take(&[token]))
                    })
                });
                Ok((thread_time(), outcome.err()))
            });
            let (took, problem) = timed.unwrap();
            println!("{took:?}: {problem:?}");
            assert!(took < Duration::from_secs(5), "{took:?}: {form:.80?}");
        }
    }

    /// Its first mask takes seconds, and the library does not look at the clock.
    #[test]
    fn ambiguous_grammar_ends_with_its_budget() {
        let compiler = compiler();
        let form = Form::Lark(format!("start: s\ns: {} | \"x\" | \"\"", vec!["s s"; 400].join(" | ")));
        let (took, problem) = aside(Effort::Full.budget(), || {
            let problem = compiler.check_here(&grammar(&form), Effort::Full).unwrap_err();
            Ok((thread_time(), problem))
        })
        .unwrap();
        assert!(problem.to_string().contains("it is too complex"), "{problem}");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }

    #[test]
    fn too_complex_grammar_is_refused_and_large_schema_accepted() {
        let compiler = compiler();
        let field = |n: usize| match n % 5 {
            0 => json!({ "type": "string", "format": "date-time", "description": "when it was last changed" }),
            1 => json!({ "enum": ["draft", "open", "closed", "cancelled"], "description": "how far it is" }),
            2 => json!({ "type": "string", "pattern": "^[A-Z]{2}[0-9]{4,12}$" }),
            3 => json!({ "type": "array", "items": { "$ref": format!("#/$defs/kind_{}", n % 40) }, "maxItems": 20 }),
            _ => json!({ "anyOf": [{ "type": "integer", "minimum": 0, "maximum": 100_000 }, { "type": "null" }] }),
        };
        let kind = |n: usize| {
            let properties: Map<_, _> = (0..14).map(|i| (format!("field_{n}_{i}"), field(n * 7 + i))).collect();
            let required: Vec<_> = properties.keys().take(7).cloned().collect();
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
        };
        let kinds: Map<_, _> = (0..40).map(|n| (format!("kind_{n}"), kind(n))).collect();
        let schema = json!({ "$ref": "#/$defs/kind_0", "$defs": kinds }).to_string();
        assert!((40_000..60_000).contains(&schema.len()), "{}", schema.len());
        check(&compiler, &grammar(&Form::JsonSchema(schema))).unwrap();

        let integers: Vec<_> = (0..500)
            .map(|n| json!({ "type": "integer", "minimum": n * 13 - 100_000_000_000_i64, "maximum": 100_000_000_000_i64 + n * 7 }))
            .collect();
        let properties: Map<_, _> = (0..2000).map(|n| (format!("p{n}"), json!({ "type": "string" }))).collect();
        let slow = [
            Form::JsonSchema(json!({ "anyOf": integers }).to_string()),
            Form::JsonSchema(json!({ "properties": properties }).to_string()),
            Form::Regex(r"\w".repeat(30_000)),
            Form::Lark(format!("start: {}\na: \"x\"?", "a ".repeat(20_000))),
        ];
        for form in slow {
            let refused = check(&compiler, &grammar(&form)).unwrap_err().to_string();
            println!("{refused}");
            assert!(refused.contains("it is too complex") || refused.contains("ms to compile"), "{refused}");
        }
    }

    #[test]
    fn grammar_error_refers_to_the_text_given() {
        let compiler = compiler();
        let problem = |form: Form| check(&compiler, &grammar(&form)).unwrap_err().to_string();
        let regex = |regex: &str| problem(Form::Regex(regex.into()));
        assert_eq!(regex("("), "invalid regex: unclosed group");
        assert_eq!(
            regex(&format!("{}[z-a]", "x".repeat(1000))),
            "invalid regex: invalid character class range, the start must be <= the end"
        );
        assert_eq!(regex(r"(a)\1"), "invalid regex: backreferences are not supported");
        let lark = |text: &str| problem(Form::Lark(text.into()));
        assert_eq!(lark("begin: \"a\""), "no start rule found");
        assert_eq!(lark("start: a b\na: \"x\"\n\nb: c+"), "line 4: unknown name: \"c\"");
        assert_eq!(lark("start: x\nx: \"a\" \"b"), "line 2: no token of a grammar begins or goes on like this");
        assert_eq!(lark("start: \"a\"\nb: (("), "line 2: Expected token ')', found '\\n'");
        assert_eq!(lark("start: /[/"), "line 1: invalid regex: unclosed character class");
    }

    #[test]
    fn client_grammar_cannot_reach_the_rules_around_it() {
        let compiler = compiler();
        let checked =
            |text: &str| check(&compiler, &grammar(&Form::Lark(text.into()))).map_err(|error| error.to_string());
        // A brace is no way out into the rules around it, and neither is a name.
        for outside in ["start: \"a\"\n}\nx: \"b\"", "start: \"a\"\n}\n%ignore /z/\nx: %lark {\nstart: \"b\""] {
            assert!(checked(outside).is_err(), "{outside}");
        }
        assert_eq!(checked("start: \"a\" thoughts").unwrap_err(), "line 1: unknown name: \"thoughts\"");
        assert!(
            checked("start: @start").is_err() && checked("start: @other").is_err() && checked("start: @form").is_err()
        );
        assert!(checked("start: \"x\" @form | \"}\"").is_ok());
        // There are no files to read, and no tokens beyond the vocabulary.
        assert!(
            checked("%import \"/etc/passwd\"\nstart: A").is_err()
                && checked("%import etc.passwd\nstart: passwd").is_err()
        );
        assert!(checked("%import common.INT\nstart: INT").is_ok());
        assert_eq!(checked("start: <[99999]>").unwrap_err(), "line 1: Token range end too large: 99999");
        assert!(checked("start: <|nothing|>").unwrap_err().starts_with("line 1: unknown special token"));
        // What steers other libraries' drawing changes nothing here.
        for taken in [
            "start: <[^5]>*",
            "start: <[*]>*",
            "start: <|im_start|>",
            "start: g\ng[lazy]: /.*/ \"x\"",
            "start[temperature=0.1, max_tokens=5]: /.*/",
        ] {
            assert_eq!(checked(taken), Ok(()), "{taken}");
        }
    }

    #[test]
    fn token_that_is_too_long_is_none_of_a_grammar() {
        let byte_level =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let special = |id: u32, content: &str| {
            json!({ "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false })
        };
        let json = |longest: usize| {
            let vocab = json!({ "a": 0, "b".repeat(longest): 1 });
            json!({ "added_tokens": [special(2, &"<s>".repeat(longest / 3)), special(3, "<|im_end|>")],
                "model": { "type": "BPE", "vocab": vocab, "merges": [] },
                "decoder": byte_level, "pre_tokenizer": byte_level })
        };
        for longest in [1023, 1024, 1025, 9000] {
            let tokenizer = Tokenizer::from_tokenizer_json(json(longest).to_string().as_bytes()).unwrap();
            let compiler = GrammarCompiler::new(&tokenizer).unwrap();
            let mask = compiler.compile(&Arc::from("start: /[ab]*/")).unwrap().mask().unwrap();
            assert!(mask.allows(0) && mask.allows(1) == (longest <= 1024), "{longest}");
        }
    }

    #[test]
    fn grammar_compiler_digest_is_the_same_for_a_vocabulary() {
        assert_eq!(compiler().digest(), compiler().digest());
        assert_eq!(compiler().digest().len(), 32);
    }
}
