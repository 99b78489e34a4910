//! What a `tokenizer.json` may have the library do: regular expressions, replacements, and the
//! steps that they are in. The file is untrusted, and each of these is a program.

use fancy_regex::Expr;
use serde_json::Value;

use crate::error::TextError;

/// Parts of the file that the library compiles.
const PARTS: [&str; 3] = ["normalizer", "pre_tokenizer", "decoder"];
/// Most steps; the longest pipelines in use have about ten.
const MAX_STEPS: usize = 64;
/// Longest pattern, bytes; the longest in use have about 1,000.
const MAX_PATTERN_BYTES: usize = 4096;
/// Most classes, literals and assertions of all patterns, repetitions written out. Those in use
/// have about 50.
const MAX_STATES: usize = 1024;
/// Most bytes that replacements may make of one, in sequence. SentencePiece's make three of a
/// space.
const MAX_GROWTH: usize = 64;

/// Checks the pipeline before the library reads it.
pub(crate) fn check(json: &Value) -> Result<(), TextError> {
    let mut sizes = Sizes { steps: 0, states: 0, growth: 1 };
    PARTS.iter().try_for_each(|part| sizes.add(&json[part], part))
}

/// What the steps so far come to.
struct Sizes {
    steps: usize,
    states: usize,
    growth: usize,
}

impl Sizes {
    /// Adds a step, or a list of steps. The parser of JSON bounds how deep they are.
    fn add(&mut self, step: &Value, field: &str) -> Result<(), TextError> {
        match step {
            Value::Array(steps) => steps.iter().try_for_each(|step| self.add(step, field)),
            Value::Object(fields) => {
                self.steps += 1;
                within(self.steps, MAX_STEPS, field, "steps")?;
                for (name, value) in fields {
                    self.add_field(name, value, field)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn add_field(&mut self, name: &str, value: &Value, field: &str) -> Result<(), TextError> {
        match (name, value) {
            ("Regex" | "String", Value::String(pattern)) => {
                within(pattern.len(), MAX_PATTERN_BYTES, field, "bytes in a pattern")?;
                if name == "Regex" {
                    self.states = self.states.saturating_add(states(pattern, field)?);
                    within(self.states, MAX_STATES, field, "states of patterns, repetitions written out")?;
                }
                Ok(())
            }
            ("content" | "prepend", Value::String(text)) => {
                self.growth = self.growth.saturating_mul(text.len().max(1));
                within(self.growth, MAX_GROWTH, field, "bytes that replacements make of one")
            }
            // The library divides a text by it.
            ("length", Value::Number(length)) if length.as_u64() == Some(0) => {
                Err(TextError::model(field, "a length of 0"))
            }
            _ => self.add(value, field),
        }
    }
}

fn within(count: usize, most: usize, field: &str, what: &str) -> Result<(), TextError> {
    if count <= most {
        return Ok(());
    }
    Err(TextError::model(field, format!("{count} {what}, but at most {most} are taken")))
}

/// Size of a pattern's automaton, in classes, literals and assertions.
fn states(pattern: &str, field: &str) -> Result<usize, TextError> {
    let shown = || pattern.chars().take(64).collect::<String>().escape_debug().to_string();
    let tree = Expr::parse_tree(pattern)
        .map_err(|error| TextError::model(field, format!("the pattern '{}': {error}", shown())))?;
    size(&tree.expr).ok_or_else(|| {
        let problem = format!("the pattern '{}' has a reference to a group, which is not served", shown());
        TextError::model(field, problem)
    })
}

/// The parser bounds how deep an expression is. `None`: it refers to a group.
fn size(expression: &Expr) -> Option<usize> {
    let all = |parts: &[Expr]| parts.iter().try_fold(1, |sum: usize, part| Some(sum.saturating_add(size(part)?)));
    match expression {
        Expr::Empty | Expr::Any { .. } | Expr::Assertion(_) | Expr::Delegate { .. } => Some(1),
        Expr::KeepOut | Expr::ContinueFromPreviousMatchEnd => Some(1),
        Expr::Literal { val, .. } => Some(val.len()),
        Expr::Concat(parts) | Expr::Alt(parts) => all(parts),
        Expr::Group(child) | Expr::LookAround(child, _) | Expr::AtomicGroup(child) => size(child),
        Expr::Repeat { child, lo, hi, .. } => {
            let times = if *hi == usize::MAX { lo.saturating_add(1) } else { *hi };
            Some(size(child)?.saturating_mul(times.max(1)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pre_tokenizer::PATTERNS;

    fn split(pattern: &str) -> Value {
        json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
    }

    fn checked(pre_tokenizer: Value) -> Result<(), String> {
        check(&json!({ "pre_tokenizer": pre_tokenizer })).map_err(|error| error.to_string())
    }

    /// Of GPT-4o and of DeepSeek V3.
    const OTHERS: [&str; 3] = [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[!#-\-/:-@\[-`{-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "[一-龥぀-ゟ゠-ヿ]+",
    ];

    #[test]
    fn patterns_in_use_are_far_from_the_bound() {
        for pattern in PATTERNS.into_iter().chain(OTHERS) {
            let states = states(pattern, "pre_tokenizer").unwrap();
            assert!(states <= MAX_STATES / 8, "{states}: {pattern}");
        }
    }

    #[test]
    fn pattern_beyond_the_bound_is_refused_by_its_states() {
        let wide = "(?=\\w{200})".repeat(300);
        let nested = "((((((a{9}){9}){9}){9}){9}){9}){9}";
        for pattern in
            ["(a{1000}){1000}", r"\w{2000}", "(a?){1100}a", &wide, nested, "a{4000000000}", &"a".repeat(1100)]
        {
            let error = checked(split(pattern)).unwrap_err();
            assert!(error.starts_with("tokenizer: pre_tokenizer: ") && error.contains("at most 1024"), "{error}");
        }
        let many = vec![split(r"\p{L}{100}"); 11];
        assert!(checked(json!({ "type": "Sequence", "pretokenizers": many })).unwrap_err().contains("1100 states"));
        assert!(checked(split(&"a|".repeat(3000))).unwrap_err().contains("6000 bytes in a pattern"));
        for part in ["decoder", "normalizer"] {
            let replace = json!({ "type": "Replace", "pattern": { "Regex": wide }, "content": "" });
            let error = check(&json!({ part: { "type": "Sequence", "decoders": [replace] } })).unwrap_err().to_string();
            assert!(error.starts_with(&format!("tokenizer: {part}: 60001 states")), "{error}");
        }
        let deep = format!("{}a{}", "(".repeat(1000), ")".repeat(1000));
        assert!(checked(split(&deep)).is_err());
        for reference in [r"(a)\1", r"(?<x>a)(?<y>\g<x>\g<x>)", r"(a)?(?(1)b|c)"] {
            assert!(checked(split(reference)).is_err(), "{reference}");
        }
    }

    #[test]
    fn pipeline_is_bounded_in_steps_and_growth() {
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let sequence = |steps: Vec<Value>| json!({ "type": "Sequence", "pretokenizers": steps });
        assert!(checked(sequence(vec![digits.clone(); 60])).is_ok());
        assert!(checked(sequence(vec![digits.clone(); 64])).unwrap_err().contains("at most 64"));
        let nested = (0..70).fold(digits, |inner, _| sequence(vec![inner]));
        assert!(checked(nested).unwrap_err().contains("at most 64"));
        assert!(checked(json!({ "type": "FixedLength", "length": 0 })).unwrap_err().contains("a length of 0"));
        let replace = |content: &str| json!({ "type": "Replace", "pattern": { "String": " " }, "content": content });
        let normalizers = |contents: &[&str]| {
            let steps: Vec<_> = contents.iter().map(|content| replace(content)).collect();
            let normalizer = json!({ "type": "Sequence", "normalizers": steps });
            check(&json!({ "normalizer": normalizer })).map_err(|error| error.to_string())
        };
        assert!(normalizers(&["▁", "", "▁", "\""]).is_ok());
        for growing in [&[&*"x".repeat(100)][..], &["abc"; 8]] {
            assert!(normalizers(growing).unwrap_err().contains("bytes that replacements make of one"));
        }
    }
}
