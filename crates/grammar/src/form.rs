//! Forms of an answer, as grammars.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::GrammarError;

/// White space between two tokens of JSON: a space, or a new line and its indentation. Without a
/// bound a model can write spaces for ever.
const WHITE_SPACE: &str = r"( |\n[ \t]{0,16})";
/// Largest common multiple of the values of `multipleOf`.
const MOST_REMAINDERS: u64 = 10_000;
/// Name of a client's grammar.
const OWN_GRAMMAR: &str = "form";
/// Fields of a schema that speak to the library and not of the answer.
const OPTIONS: &str = "x-guidance";

/// The form of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// A JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema(String),
    /// A text that the whole regular expression matches.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark; its rule `start`.
    Lark(String),
    /// One of these texts.
    Choices(Vec<String>),
}

impl Form {
    /// What a rule of a Lark grammar is to be: `answer: ` and this. The grammar needs
    /// [`Self::beside`] then.
    ///
    /// # Errors
    /// A schema is no JSON object or boolean, a regular expression or a list of choices is empty.
    pub fn rule(&self) -> Result<String, GrammarError> {
        match self {
            Self::JsonObject => json_rule(json!({ "type": "object" }), false),
            Self::JsonSchema(schema) => schema_rule(schema),
            Self::Regex(regex) if whole(regex).is_empty() => {
                Err(GrammarError::Invalid("the regex is empty".to_owned()))
            }
            Self::Regex(regex) => Ok(format!("%lark {{\nstart: /{}/\n}}", escaped_regex(whole(regex)))),
            // A schema in a grammar could not be looked at before it is compiled.
            Self::Lark(grammar) if grammar.contains("%json") => {
                Err(GrammarError::Invalid("%json is not taken in a grammar: give the schema by itself".to_owned()))
            }
            Self::Lark(_) => Ok(format!("@{OWN_GRAMMAR}")),
            Self::Choices(texts) if texts.is_empty() => Err(GrammarError::Invalid("there is no choice".to_owned())),
            Self::Choices(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| lark_string(text)).collect();
                Ok(format!("({})", texts.join(" | ")))
            }
        }
    }

    /// A grammar with [`Self::rule`] in it, and what that needs beside it. A client's grammar stays
    /// one of its own: in the other one a brace could end it, and errors would name other lines.
    pub fn beside(&self, grammar: String) -> String {
        let Self::Lark(own) = self else { return grammar };
        json!({ "grammars": [{ "lark_grammar": grammar }, { "name": OWN_GRAMMAR, "lark_grammar": own }] }).to_string()
    }
}

/// JSON of a schema as a rule.
fn schema_rule(schema: &str) -> Result<String, GrammarError> {
    let invalid = |problem: String| GrammarError::Invalid(format!("the schema {problem}"));
    match serde_json::from_str(schema) {
        Ok(Value::Object(schema)) => json_rule(Value::Object(schema), false),
        // Any JSON.
        Ok(Value::Bool(true)) => json_rule(Value::Object(Map::new()), false),
        Ok(_) => Err(invalid("is no JSON object".to_owned())),
        Err(error) => Err(invalid(format!("is no JSON: {error}"))),
    }
}

/// `lenient`: what the library does not know of a schema is left out, and not an error.
pub(crate) fn json_rule(mut schema: Value, lenient: bool) -> Result<String, GrammarError> {
    check_multiples(&schema)?;
    if let Value::Object(fields) = &mut schema {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": WHITE_SPACE, "lenient": lenient }));
    }
    Ok(format!("%json {schema}"))
}

/// The library has a state for each remainder, and for several at once, for each remainder by their
/// least common multiple. A million takes half a minute.
fn check_multiples(schema: &Value) -> Result<(), GrammarError> {
    let mut common = 1;
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        match value {
            Value::Array(items) => left.extend(items),
            Value::Object(fields) => {
                if let Some(divisor) = fields.get("multipleOf").and_then(Value::as_number) {
                    common = least_common_multiple(common, coefficient(&divisor.to_string()));
                }
                left.extend(fields.values());
            }
            _ => {}
        }
    }
    if common <= MOST_REMAINDERS {
        return Ok(());
    }
    Err(GrammarError::Invalid(format!(
        "the values of multipleOf have a common multiple of more than {MOST_REMAINDERS}, without their decimal point"
    )))
}

/// The digits of a number as a whole number: 125 of 1.25.
fn coefficient(number: &str) -> u64 {
    let digits: String = number.chars().take_while(|c| !matches!(c, 'e' | 'E')).filter(char::is_ascii_digit).collect();
    // What is written with an exponent may have many more.
    let is_plain = !number.contains(['e', 'E']);
    digits.parse().ok().filter(|_| is_plain).unwrap_or(u64::MAX)
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let mut divisor = a;
    let mut rest = b;
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1)).saturating_mul(b)
}

/// A text as a literal of Lark.
pub(crate) fn lark_string(text: &str) -> String {
    // Lark's strings are those of JSON, but for one control character.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Without the anchors that it has in any case.
fn whole(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    regex.strip_suffix('$').filter(|before| !before.ends_with('\\')).unwrap_or(regex)
}

/// A regular expression between slashes.
fn escaped_regex(regex: &str) -> String {
    let mut escaped = String::with_capacity(regex.len());
    let mut is_escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !is_escaped => escaped.push_str("\\/"),
            '\n' => {
                // The backslash that is there is this one's.
                escaped.push_str(if is_escaped { "n" } else { "\\n" });
            }
            c => {
                // Nothing is ever written that `String` cannot take.
                let _ = escaped.write_char(c);
            }
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    escaped
}
