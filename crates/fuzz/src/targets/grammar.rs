//! Forms of structured output.

use std::sync::Arc;

use baton_grammar::{Form, GrammarCompiler};
use baton_text::Tokenizer;

use crate::input::{choice, join, parts, text};

pub(super) const WORDS: &[&str] = &[
    "\"type\":",
    "\"object\"",
    "\"array\"",
    "\"string\"",
    "\"integer\"",
    "\"number\"",
    "\"null\"",
    "\"properties\":",
    "\"required\":",
    "\"additionalProperties\":false",
    "\"items\":",
    "\"prefixItems\":",
    "\"minItems\":",
    "\"maxItems\":",
    "\"enum\":",
    "\"const\":",
    "\"anyOf\":[",
    "\"oneOf\":[",
    "\"allOf\":[",
    "\"$ref\":\"#\"",
    "\"$ref\":\"#/$defs/a\"",
    "\"$defs\":{",
    "\"pattern\":",
    "\"format\":\"date-time\"",
    "\"format\":\"uuid\"",
    "\"minLength\":",
    "\"maxLength\":",
    "\"minimum\":",
    "\"maximum\":",
    "\"exclusiveMinimum\":",
    "\"multipleOf\":",
    "\"minProperties\":",
    "\"patternProperties\":",
    "\"x-guidance\":",
    "(a|b)",
    "{1,1000}",
    "[^a]",
    "\\p{L}",
    "(?i)",
    ".*",
    "\\d",
    "(?=a)",
    "&",
    "~",
    "start:",
    "%lark {",
    "%regex {",
    "%ignore",
    "%import",
    "%json",
    "[capture]",
    "[suffix=\"a\"]",
    "[lazy]",
    "<[257]>",
    "<[0-99]>",
    "@form",
    "\"a\"..\"z\"",
    "[max_tokens=3]",
    "[temperature=0.5]",
    "[stop=\"x\"]",
    "parametric(_)",
    "::0b1",
];

/// The first byte says which form, and a text to try follows it.
pub(super) fn compile(input: &[u8]) {
    thread_local! {
        static COMPILER: GrammarCompiler = GrammarCompiler::new(&Tokenizer::bytes()).expect("a vocabulary of bytes");
    }
    let (kind, rest) = choice(input, 4);
    let [form, sample] = parts(rest);
    let form = text(form).to_owned();
    let sample = text(sample);
    let form = match kind {
        0 => Form::JsonSchema(form),
        1 => Form::Regex(form),
        2 => Form::Lark(form),
        _ => Form::Choices(form.split('\n').map(str::to_owned).collect()),
    };
    let Ok(rule) = form.rule() else { return };
    let grammar: Arc<str> = form.beside(format!("start: answer\nanswer: {rule}\n")).into();
    COMPILER.with(|compiler| {
        let Ok(mut matcher) = compiler.compile(&grammar) else { return };
        for byte in sample.bytes().take(64) {
            let Ok(mask) = matcher.mask() else { return };
            if !mask.allows(byte.into()) || matcher.take(&[byte.into()]).is_err() {
                return;
            }
        }
    });
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let forms: [(u8, &str, &str); 9] = [
        (
            0,
            r##"{"type":"object","properties":{"a":{"$ref":"#/$defs/n"},"b":{"enum":["x",1,null]}},"required":["a"],"additionalProperties":false,"$defs":{"n":{"type":"array","items":{"type":"integer","minimum":1},"maxItems":3}}}"##,
            r#"{"a": [1, 2], "b": "x"}"#,
        ),
        (
            0,
            r#"{"anyOf":[{"type":"string","pattern":"^[a-z]{2,4}$"},{"type":"number","multipleOf":0.25,"maximum":9}]}"#,
            "\"abc\"",
        ),
        (0, r#"{"type":"string","format":"date-time","minLength":3}"#, "\"2024-01-01T00:00:00Z\""),
        (
            0,
            r#"{"allOf":[{"properties":{"a":{}}},{"required":["a"]}],"patternProperties":{"^x":{"type":"boolean"}}}"#,
            "{\"a\": 1}",
        ),
        (1, r"[a-z]+/\d{2}(x|y)?", "ab/12"),
        (1, r"^a\/b$", "a/b"),
        (2, "start: \"a\" b\nb: \"b\"* | /[0-9]+/ c?\nc: \"x\"..\"z\"\n%ignore / /", "abb"),
        (2, "start: item+\nitem[suffix=\";\"]: /[a-z]*/\nOTHER: /x/ & ~/xx/", "ab;"),
        (3, "yes\nno \"never\"", "no"),
    ];
    forms
        .iter()
        .map(|(kind, form, sample)| [&[*kind][..], &join(&[form.as_bytes(), sample.as_bytes()])].concat())
        .collect()
}
