//! Compiles grammars against a vocabulary.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use baton_text::Tokenizer;
use baton_types::{MAX_GRAMMAR_BYTES, TokenId};
use llguidance::Matcher as InnerMatcher;
use llguidance::ParserFactory;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::GrammarError;
use crate::matcher::{Matcher, first_line};

/// Stack of a compilation: references that lead to each other take some KiB each, and a grammar of the largest size has thousands.
const STACK_BYTES: usize = 256 << 20;
/// Grammars that are kept compiled.
const KEPT: usize = 16;
/// Before the text of a special token, so that no text is taken for one.
const SPECIAL: u8 = 0xff;

/// Compiles grammars against a vocabulary. Those used last are kept.
pub struct GrammarCompiler {
    factory: ParserFactory,
    digest: String,
    kept: Mutex<VecDeque<(Arc<str>, Matcher)>>,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// At most one mask of a step may take: some milliseconds. A lexer state takes one to two KiB.
fn limits() -> ParserLimits {
    ParserLimits {
        step_lexer_fuel: 50_000,
        step_max_items: 20_000,
        max_lexer_states: 8_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
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
        let invalid = |error: &dyn fmt::Display| GrammarError::Invalid(first_line(&error.to_string()));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| invalid(&error))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, digest, kept: Mutex::default() })
    }

    /// Names the vocabulary: nodes of another one would mask other tokens.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Compiles a grammar in llguidance's dialect of Lark. Takes milliseconds, at most some hundred: not for the async threads.
    ///
    /// # Errors
    /// It is no grammar, or one that is too large or costs too much.
    pub fn compile(&self, grammar: &Arc<str>) -> Result<Matcher, GrammarError> {
        if let Some(kept) = self.kept(grammar) {
            return Ok(kept);
        }
        let bytes = grammar.len();
        if bytes > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooLarge { bytes });
        }
        let compiled = std::thread::scope(|scope| {
            let compile = || self.compile_here(grammar);
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
            let thread =
                thread.spawn_scoped(scope, compile).map_err(|error| GrammarError::Invalid(error.to_string()))?;
            thread.join().unwrap_or_else(|_| Err(GrammarError::Invalid("the grammar cannot be compiled".to_owned())))
        })?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.truncate(KEPT - 1);
        kept.push_front((Arc::clone(grammar), compiled.clone()));
        Ok(compiled)
    }

    fn kept(&self, grammar: &Arc<str>) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let position = kept.iter().position(|(other, _)| other == grammar)?;
        let found = kept.remove(position)?;
        let matcher = found.1.clone();
        kept.push_front(found);
        Some(matcher)
    }

    fn compile_here(&self, grammar: &str) -> Result<Matcher, GrammarError> {
        let parser = self.factory.create_parser(TopLevelGrammar::from_lark(grammar.to_owned()));
        let parser = parser.map_err(|error| GrammarError::Invalid(first_line(&error.to_string())))?;
        let mut matcher = Matcher::new(InnerMatcher::new(Ok(parser)));
        // What no output has is found out now.
        matcher.mask().map_err(|error| GrammarError::Invalid(error.to_string()))?;
        Ok(matcher)
    }
}

/// A token as the library knows it.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if tokenizer.is_special(id) { [&[SPECIAL], bytes].concat() } else { bytes.to_vec() }
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
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Form;

    fn compiler() -> GrammarCompiler {
        GrammarCompiler::new(&Tokenizer::bytes()).unwrap()
    }

    fn grammar(form: Form) -> Arc<str> {
        format!("start: {}", form.rule().unwrap()).into()
    }

    /// Whether a text is one of the form, and all of it.
    fn takes(form: Form, text: &str) -> bool {
        let mut matcher = compiler().compile(&grammar(form)).unwrap();
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
    fn texts_are_of_their_form() {
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
    fn at_its_end_only_an_end_token_may_come() {
        let mut matcher = compiler().compile(&grammar(Form::Choices(vec!["ok".into()]))).unwrap();
        matcher.take(&[u32::from(b'o'), u32::from(b'k')]).unwrap();
        let mask = matcher.mask().unwrap();
        assert_eq!((0..512).filter(|&token| mask.allows(token)).collect::<Vec<_>>(), [257]);
    }

    #[test]
    fn special_tokens_come_by_their_ids_and_never_as_text() {
        let mut matcher = compiler().compile(&Arc::from("start: /(.|\\n)*/ <[258]> \"x\"")).unwrap();
        let mask = matcher.mask().unwrap();
        assert!(mask.allows(u32::from(b'<')) && mask.allows(258) && !mask.allows(259));
        matcher.take(&[u32::from(b'a'), 258]).unwrap();
        let mask = matcher.mask().unwrap();
        assert!(mask.allows(u32::from(b'x')) && !mask.allows(u32::from(b'y')));
    }

    #[test]
    fn what_is_no_grammar_is_refused() {
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
        for schema in [r#"{"type": "integer", "multipleOf": 999983}"#, both, r#"{"items": {"multipleOf": 1e-9}}"#] {
            let refused = Form::JsonSchema(schema.into()).rule().unwrap_err().to_string();
            assert!(refused.contains("multipleOf"), "{refused}");
        }
        assert!(Form::Lark("start: %json {}".into()).rule().is_err());
        assert!(Form::JsonSchema("[]".into()).rule().is_err());
        assert!(Form::JsonSchema("{".into()).rule().is_err());
    }

    #[test]
    fn a_hostile_grammar_costs_little_and_ends_nothing() {
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
        ];
        for form in hostile {
            let began = Instant::now();
            let outcome = compiler.compile(&grammar(form.clone()));
            let took = began.elapsed();
            println!("{took:?}: {:?}", outcome.err());
            assert!(took < Duration::from_secs(5), "{took:?}: {form:.80?}");
        }
    }

    #[test]
    fn the_digest_is_of_the_vocabulary() {
        assert_eq!(compiler().digest(), compiler().digest());
        assert_eq!(compiler().digest().len(), 32);
    }
}
