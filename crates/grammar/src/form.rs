//! Forms of an answer, as grammars.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::GrammarError;
use crate::schema::{Demand, Problem, Translated, translated};

/// White space between two tokens of JSON: a space, or a new line and its indentation. Without a
/// bound a model can write spaces for ever.
const WHITE_SPACE: &str = r"( |\n[ \t]{0,16})";
/// What errors call the schema of an answer.
pub(crate) const THE_SCHEMA: &str = "the schema";
/// Name of a client's grammar.
const OWN_GRAMMAR: &str = "form";
/// Fields of a schema that speak to the library and not of the answer.
const OPTIONS: &str = "x-guidance";

/// The form of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// A JSON object.
    JsonObject,
    /// JSON of a schema. Formats that are not known say nothing.
    JsonSchema(String),
    /// JSON of a schema whose formats are known. Objects have no properties but those it names.
    StrictJsonSchema(String),
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
            Self::JsonObject => Ok(library_rule(json!({ "type": "object" }), false)),
            Self::JsonSchema(_) | Self::StrictJsonSchema(_) => {
                let (schema, demand) = self.schema()?.unwrap_or((Value::Bool(true), Demand::Plain));
                let rule = json_rule(&schema, "", demand, &HashSet::new());
                rule.map(|(rule, _)| rule).map_err(|problem| problem.of(THE_SCHEMA))
            }
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

    /// The schema, and how exactly it is to be held to.
    pub(crate) fn schema(&self) -> Result<Option<(Value, Demand)>, GrammarError> {
        let (text, demand) = match self {
            Self::JsonSchema(text) => (text, Demand::Plain),
            Self::StrictJsonSchema(text) => (text, Demand::Strict),
            _ => return Ok(None),
        };
        let invalid = |problem: String| GrammarError::Invalid(format!("{THE_SCHEMA} {problem}"));
        match serde_json::from_str(text) {
            Ok(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Some((schema, demand))),
            Ok(_) => Err(invalid("is no JSON object".to_owned())),
            Err(error) => Err(invalid(format!("is no JSON: {error}"))),
        }
    }

    /// A grammar with [`Self::rule`] in it, and what that needs beside it. A client's grammar stays
    /// one of its own: in the other one a brace could end it, and errors would name other lines.
    pub fn beside(&self, grammar: String) -> String {
        let Self::Lark(own) = self else { return grammar };
        json!({ "grammars": [{ "lark_grammar": grammar }, { "name": OWN_GRAMMAR, "lark_grammar": own }] }).to_string()
    }
}

/// JSON of a schema as a rule, with what was left out of the schema.
pub(crate) fn json_rule(
    schema: &Value,
    pointer: &str,
    demand: Demand,
    loosened: &HashSet<String>,
) -> Result<(String, Vec<Problem>), Problem> {
    let Translated { schema, dropped } = translated(schema, pointer, demand, loosened)?;
    Ok((library_rule(schema, demand == Demand::Lenient), dropped))
}

/// `lenient`: what the library does not know of a schema is left out, and not an error.
fn library_rule(mut schema: Value, lenient: bool) -> String {
    if let Value::Object(fields) = &mut schema {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": WHITE_SPACE, "lenient": lenient }));
    }
    format!("%json {schema}")
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
