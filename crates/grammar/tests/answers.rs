//! Whatever a model draws under an answer's grammar, the parser of its family reads calls of the
//! tools, and forms, out of it.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use baton_grammar::{Answer, Calls, Form, GrammarCompiler, Thoughts, Tool};
use baton_text::{DecodeOptions, OutputEvent, OutputFormat, Tokenizer};
use serde_json::{Value, json};

/// A family: how its template spells calls, and its marks, each a special token or a token that is
/// text.
struct Family {
    name: &'static str,
    template: &'static str,
    marks: &'static [(&'static str, bool)],
}

const FAMILIES: [Family; 6] = [
    Family { name: "hermes", template: "{{ tools }}<tool_call></tool_call>", marks: &[] },
    Family {
        name: "qwen 3",
        template: "{{ tools }}<tool_call></tool_call><think></think>",
        marks: &[("<tool_call>", false), ("</tool_call>", false), ("<think>", false), ("</think>", false)],
    },
    Family {
        name: "hermes, special",
        template: "{{ tools }}<tool_call></tool_call>",
        marks: &[("<tool_call>", true), ("</tool_call>", true)],
    },
    Family { name: "llama 3", template: "{{ tools }}<|python_tag|>", marks: &[("<|python_tag|>", true)] },
    Family { name: "mistral", template: "{{ tools }}[TOOL_CALLS]", marks: &[("[TOOL_CALLS]", true)] },
    Family {
        name: "magistral",
        template: "{{ tools }}[TOOL_CALLS][ARGS][THINK][/THINK]",
        marks: &[("[TOOL_CALLS]", true), ("[ARGS]", true), ("[THINK]", true), ("[/THINK]", true)],
    },
];

fn tokenizer(family: &Family) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/fixtures/qwen2.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON");
    let vocabulary = tokenizer["model"]["vocab"].as_object().expect("a vocabulary").len();
    let added = tokenizer["added_tokens"].as_array().expect("a list").clone();
    let ids = vocabulary + added.len()..;
    let marks = family.marks.iter().zip(ids).map(|((mark, special), id)| {
        json!({"id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
    });
    tokenizer["added_tokens"] = added.iter().cloned().chain(marks).collect();
    Tokenizer::from_tokenizer_json(&serde_json::to_vec(&tokenizer).expect("JSON")).expect("a tokenizer")
}

fn tools() -> Vec<Tool> {
    let tool = |name: &str, schema: Value| {
        let Value::Object(parameters) = schema else { panic!("a schema") };
        Tool { name: name.into(), parameters, is_strict: true }
    };
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "properties": {"city": {"enum": ["Paris", "</tool_call>", "{\"]"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["city"], "additionalProperties": false}),
        ),
        tool("now", json!({"type": "object", "additionalProperties": false})),
    ]
}

/// A generator of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Draws tokens at random among those that may come; the text, with special tokens, once only an
/// end may come. Text goes on for `most` tokens at most.
fn drawn(tokenizer: &Tokenizer, grammar: &str, random: &mut Random, most: usize) -> String {
    let compiler = GrammarCompiler::new(tokenizer).expect("a vocabulary");
    let mut matcher = compiler.compile(&Arc::from(grammar)).unwrap_or_else(|error| panic!("{error}:\n{grammar}"));
    let mut tokens = Vec::new();
    let end = |id: &u32| tokenizer.eos_ids().contains(id);
    loop {
        let mask = matcher.mask().expect("a mask");
        let allowed: Vec<u32> = (0..tokenizer.vocab_size()).filter(|&id| mask.allows(id)).collect();
        assert!(!allowed.is_empty());
        let may_end = allowed.iter().any(end);
        if allowed.iter().all(end) || may_end && (tokens.len() >= most || random.below(8) == 0) {
            return tokenizer.decode(&tokens, DecodeOptions { skip_special: false, starts_text: true });
        }
        assert!(tokens.len() < 4000, "it does not end:\n{grammar}");
        // Marks are one token of many: without help free text would never lead to one.
        let marks: Vec<_> = allowed.iter().copied().filter(|id| *id + 8 > tokenizer.vocab_size() && !end(id)).collect();
        let others: Vec<_> = allowed.iter().copied().filter(|id| !end(id)).collect();
        let from = if !marks.is_empty() && (tokens.len() >= most || random.below(3) == 0) { &marks } else { &others };
        let token = from[random.below(from.len())];
        matcher.take(&[token]).expect("it may come");
        tokens.push(token);
    }
}

/// An answer of which nothing is asked.
fn any<'a>(format: &'a OutputFormat, tokenizer: &'a Tokenizer) -> Answer<'a> {
    Answer { format, tokenizer, thoughts: Thoughts::MayCome, form: None, calls: Calls::None, one_call: false }
}

struct Read {
    reasoning: String,
    text: String,
    calls: Vec<(String, Value)>,
}

fn read(format: &OutputFormat, starts_in_reasoning: bool, output: &str) -> Read {
    let mut parser = format.parser(starts_in_reasoning, tools().into_iter().map(|tool| tool.name).collect());
    let mut events = parser.push(output);
    events.extend(parser.finish());
    let mut read = Read { reasoning: String::new(), text: String::new(), calls: Vec::new() };
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events {
        match event {
            OutputEvent::Reasoning(more) => read.reasoning += &more,
            OutputEvent::Text(more) => read.text += &more,
            OutputEvent::CallBegins { name } => calls.push((name, String::new())),
            OutputEvent::CallArguments(more) => calls.last_mut().expect("a call").1 += &more,
        }
    }
    let json = |(name, arguments): (String, String)| {
        let value = serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error}: {arguments} of {output}"));
        (name, value)
    };
    read.calls = calls.into_iter().map(json).collect();
    read
}

fn check_calls(calls: &[(String, Value)], output: &str) {
    for (name, arguments) in calls {
        match name.as_str() {
            "now" => assert_eq!(*arguments, json!({}), "{output}"),
            "get_weather" => {
                let city = arguments["city"].as_str().expect("a city");
                assert!(["Paris", "</tool_call>", "{\"]"].contains(&city), "{output}");
                assert!(
                    arguments.get("days").is_none_or(|days| days.as_i64().is_some_and(|days| (1..=9).contains(&days))),
                    "{output}"
                );
            }
            other => panic!("{other}: {output}"),
        }
    }
}

#[test]
fn required_tool_calls_are_generated() {
    for family in &FAMILIES {
        let tokenizer = tokenizer(family);
        let format = OutputFormat::detect(family.template, &tokenizer);
        let mut most_calls = 0;
        for (seed, one_call) in (0..12).zip([false, true].into_iter().cycle()) {
            let calls = Calls::Must(tools());
            let answer = Answer { calls, one_call, ..any(&format, &tokenizer) };
            let grammar = answer.grammar().unwrap().unwrap();
            let output = drawn(&tokenizer, &grammar, &mut Random(seed), 60);
            let read = read(&format, false, &output);
            check_calls(&read.calls, &output);
            assert!(!read.calls.is_empty() && (!one_call || read.calls.len() == 1), "{}: {output:?}", family.name);
            assert_eq!(read.text.trim(), "", "{}: {output:?}", family.name);
            most_calls = most_calls.max(read.calls.len());
        }
        assert!(most_calls > 1, "{}: several calls can be asked for", family.name);
    }
}

#[test]
fn optional_tool_calls_conform_to_their_tools() {
    for family in &FAMILIES {
        let tokenizer = tokenizer(family);
        let format = OutputFormat::detect(family.template, &tokenizer);
        let mut with_calls = 0;
        let mut without = 0;
        for seed in 0..40 {
            let calls = Calls::May(tools());
            let answer = Answer { calls, ..any(&format, &tokenizer) };
            let grammar = answer.grammar().unwrap().unwrap();
            let output = drawn(&tokenizer, &grammar, &mut Random(seed), 40);
            let read = read(&format, false, &output);
            check_calls(&read.calls, &output);
            *if read.calls.is_empty() { &mut without } else { &mut with_calls } += 1;
        }
        println!("{}: {with_calls} with calls, {without} without", family.name);
        // A mark that is text is hardly ever drawn at random, and neither is a brace first.
        let draws_marks = family.marks.iter().any(|(mark, _)| ["[TOOL_CALLS]", "<tool_call>"].contains(mark));
        assert!(without > 0 && (with_calls > 0 || !draws_marks), "{}", family.name);
    }
}

#[test]
fn structured_output_follows_reasoning() {
    let schema = r#"{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}"#;
    for family in &FAMILIES {
        let tokenizer = tokenizer(family);
        let format = OutputFormat::detect(family.template, &tokenizer);
        let thinks = format.reasoning().is_some();
        let kinds = [Thoughts::MayCome, Thoughts::Begun, Thoughts::Over];
        for (seed, thoughts) in (0..18).zip(kinds.into_iter().cycle()) {
            let form = Some(Form::JsonSchema(schema.into()));
            // A model without marks has begun nothing.
            let thoughts = if thinks { thoughts } else { Thoughts::MayCome };
            let answer = Answer { thoughts, form, ..any(&format, &tokenizer) };
            let output = drawn(&tokenizer, &answer.grammar().unwrap().unwrap(), &mut Random(seed), 40);
            let read = read(&format, thoughts == Thoughts::Begun, &output);
            assert!(thoughts != Thoughts::Over || read.reasoning.is_empty(), "{output:?}");
            let value: Value =
                serde_json::from_str(&read.text).unwrap_or_else(|error| panic!("{}: {error}: {output:?}", family.name));
            assert!(value["ok"].is_boolean(), "{output:?}");
        }
        let calls = Calls::May(tools());
        let form = Some(Form::JsonSchema(schema.into()));
        let thoughts = if thinks { Thoughts::Begun } else { Thoughts::MayCome };
        let answer = Answer { thoughts, form, calls, one_call: true, ..any(&format, &tokenizer) };
        for seed in 0..12 {
            let output = drawn(&tokenizer, &answer.grammar().unwrap().unwrap(), &mut Random(seed), 40);
            let read = read(&format, thinks, &output);
            check_calls(&read.calls, &output);
            assert!(
                read.calls.len() == 1 || serde_json::from_str::<Value>(&read.text).is_ok(),
                "{}: {output:?}",
                family.name
            );
        }
    }
}

#[test]
fn tool_calls_of_model_without_tool_format_are_refused() {
    let tokenizer = Tokenizer::bytes();
    let format = OutputFormat::detect("{{ messages }}", &tokenizer);
    let of = |calls| Answer { calls, ..any(&format, &tokenizer) }.grammar();
    assert_eq!(of(Calls::None), Ok(None));
    assert!(of(Calls::Must(tools())).unwrap_err().to_string().contains("chat template"));
    assert!(of(Calls::May(tools())).is_err());
}
