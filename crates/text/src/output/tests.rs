use proptest::prelude::*;

use super::*;
use crate::Tokenizer;

const LLAMA_TEMPLATE: &str = r#"{%- if tools %}<|start_header_id|>Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}"#;
const HERMES_TEMPLATE: &str = "{% if tools %}<tool_call></tool_call>{% endif %}";
const QWEN3_TEMPLATE: &str = "{% if tools %}<tool_call></tool_call>{% endif %}<think></think>";
const MISTRAL_TEMPLATE: &str = "{% if tools %}[TOOL_CALLS]{% endif %}";
const MAGISTRAL_TEMPLATE: &str = "{% if tools %}[TOOL_CALLS]{% endif %}[THINK][/THINK]";
const TEMPLATES: [&str; 5] = [LLAMA_TEMPLATE, HERMES_TEMPLATE, QWEN3_TEMPLATE, MISTRAL_TEMPLATE, MAGISTRAL_TEMPLATE];
const TOOLS: [&str; 3] = ["get_weather", "add", "now"];

fn parser(template: &str, starts_in_reasoning: bool, tools: &[&str]) -> OutputParser {
    let format = OutputFormat::detect(template, &Tokenizer::bytes());
    format.parser(starts_in_reasoning, tools.iter().map(|&tool| tool.to_owned()).collect())
}

fn events<'t>(mut parser: OutputParser, pieces: impl IntoIterator<Item = &'t str>) -> Vec<OutputEvent> {
    let mut events = Events::default();
    for piece in pieces {
        parser.push(piece).into_iter().for_each(|event| events.add(event));
    }
    parser.finish().into_iter().for_each(|event| events.add(event));
    events.into_vec()
}

impl Events {
    fn add(&mut self, event: OutputEvent) {
        match event {
            OutputEvent::Reasoning(more) => self.reasoning(&more),
            OutputEvent::Text(more) => self.text(&more),
            OutputEvent::CallBegins { name } => self.begin(name),
            OutputEvent::CallArguments(more) => self.arguments(&more),
        }
    }
}

/// Reasoning in angle brackets, text in quotes, calls as in a program.
fn shown(events: &[OutputEvent]) -> String {
    let mut shown = String::new();
    for (at, event) in events.iter().enumerate() {
        let is_first = at == 0 || matches!(event, OutputEvent::CallArguments(_));
        shown.push_str(if is_first { "" } else { " " });
        match event {
            OutputEvent::Reasoning(text) => shown.push_str(&format!("‹{text}›")),
            OutputEvent::Text(text) => shown.push_str(&format!("“{text}”")),
            OutputEvent::CallBegins { name } => shown.push_str(name),
            OutputEvent::CallArguments(text) => shown.push_str(&format!("({text})")),
        }
    }
    shown
}

fn assert_cases(template: &str, starts_in_reasoning: bool, cases: &[(&str, &str)]) {
    for (output, expected) in cases {
        let whole = events(parser(template, starts_in_reasoning, &TOOLS), [*output]);
        assert_eq!(shown(&whole), *expected, "{output}");
        let characters = output.char_indices().map(|(at, character)| &output[at..at + character.len_utf8()]);
        assert_eq!(events(parser(template, starts_in_reasoning, &TOOLS), characters), whole, "{output}");
    }
}

/// These outputs are text.
fn assert_text(template: &str, outputs: &[&str]) {
    for output in outputs {
        assert_cases(template, false, &[(output, &format!("“{output}”"))]);
    }
}

#[test]
fn llama3_tool_calls_are_parsed() {
    let cases = [
        (r#"{"name": "add", "parameters": {"a": 1, "b": "2"}}"#, r#"add({"a": 1, "b": "2"})"#),
        ("<|python_tag|>{\"name\": \"now\", \"parameters\": {}}", "now({})"),
        (r#" {"type": "function", "name": "now", "parameters": {}}"#, "now({})"),
        (r#"{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}"#, r#"add({"a": 1}) now({})"#),
        ("{\"name\": \"now\", \"parameters\": {}};\n<|python_tag|>{\"name\": \"now\"}\n", "now({}) now({})"),
        ("{\"name\": \"now\", \"arguments\": {}}\n{\"name\": \"now\", \"parameters\": null}", "now({}) now({})"),
        (
            r#"{"name": "get_weather", "parameters": {"city": "São {Paulo}; \"}\""}}"#,
            r#"get_weather({"city": "São {Paulo}; \"}\""})"#,
        ),
        ("{\"name\": \"now\", \"parameters\": {}}\nThat is all; {}", "now({}) “\nThat is all; {}”"),
        (
            r#"{"name": "now", "parameters": {}}; {"name": "delete"}; {"name": "now"}"#,
            r#"now({}) “; {"name": "delete"}; {"name": "now"}”"#,
        ),
        (r#"{"name": "add", "parameters": {"a": [1, 2"#, r#"add({"a": [1, 2)"#),
    ];
    assert_cases(LLAMA_TEMPLATE, false, &cases);
    let texts = [
        "The capital is Paris.",
        r#"I call {"name": "now", "parameters": {}}"#,
        r#"{"name": "delete", "parameters": {}}; {"name": "now"}"#,
        r#"{"name": "Ada", "born": 1815}"#,
        "<|python_tag|>brave_search.call(query=\"now\")",
        "<|python_tag",
        " \n{\"na",
        "{}",
        r#"{"name": now}"#,
        r#"{"a" = 1}"#,
    ];
    assert_text(LLAMA_TEMPLATE, &texts);
}

#[test]
fn hermes_tool_calls_are_parsed() {
    let cases = [
        (
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
            r#"get_weather({"city": "Paris"})"#,
        ),
        (
            "I'll look.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n",
            r#"“I'll look.” now({}) add({"a": 1})"#,
        ),
        ("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"add\"}</tool_call> Done.", r#"add({"a": 1}) “ Done.”"#),
        (
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"</tool_call><tool_call>{\"}}\n</tool_call>",
            r#"add({"a": "</tool_call><tool_call>{"})"#,
        ),
        (
            r#"<tool_call>{"name": "add", "arguments": "{\"a\": \"\\u00e9\\n\"}"}</tool_call>"#,
            r#"add({"a": "\u00e9\n"})"#,
        ),
        (r#"<tool_call>{"name": "add", "arguments": "", "id": -1.5e3}</tool_call>"#, "add({})"),
        (r#"<tool_call>{"name": "add", "arguments": "\"x\""}"#, r#"add("\"x\"")"#),
        (r#"<tool_call>{"name": "add", "arguments": 3, "x": null}"#, "add(3)"),
        ("<tool_call>{\"name\": \"now\"}<tool_call>{\"name\": \"now\"}", "now({}) now({})"),
        ("<tool_call>{\"name\": \"now\"}}</tool_call>", "now({}) “}</tool_call>”"),
        ("<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"x\n", "add({\"a\": \"x\n)"),
        ("<tool_call>\n{\"name\": \"add\"", "add"),
        (
            "<tool_call>\n{\"name\": \"delete\", \"arguments\": {\"x\": \"<tool_call>{\\\"name\\\": \"}}\n</tool_call>\n<tool_call>{\"name\": \"now\"}</tool_call>",
            "“<tool_call>\n{\"name\": \"delete\", \"arguments\": {\"x\": \"<tool_call>{\\\"name\\\": \"}}\n</tool_call>” now({})",
        ),
        ("<tool_<tool_call><tool_call>\n{\"name\": \"now\"}", "“<tool_<tool_call>” now({})"),
        ("<tool_call>{\"\\u006eame\": 1, \"name\": \"\\u006eow\"}", "now({})"),
    ];
    assert_cases(HERMES_TEMPLATE, false, &cases);
    let texts = [
        "a <b> c \n\n <tool",
        "Write `<tool_call>` and {\"name\": \"now\"} ",
        "<tool_call>\n{\"name\": \"now",
        "<tool_call>\n{\"name\": 3}",
        "<tool_call></tool_call>",
        "{\"name\": \"now\"}</tool_call>",
        "<think>text</think>",
    ];
    assert_text(HERMES_TEMPLATE, &texts);
}

#[test]
fn mistral_tool_calls_are_parsed() {
    let cases = [
        (
            r#"[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]"#,
            r#"get_weather({"city": "Paris"})"#,
        ),
        (
            r#"Sure.[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": "]"}}]"#,
            r#"“Sure.” now({}) add({"a": "]"})"#,
        ),
        (r#"[TOOL_CALLS][{"name": "now", "arguments": {}}"#, "now({})"),
        ("[TOOL_CALLS]add[ARGS]{\"a\": {}}[TOOL_CALLS]now[ARGS]{}", r#"add({"a": {}}) now({})"#),
        ("[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{\"a\": \"[ARGS]\"}", r#"add({"a": "[ARGS]"})"#),
        ("[TOOL_CALLS]now{}\n[TOOL_CALLS]now {}\n", "now({}) now({})"),
        ("[TOOL_CALLS]{\"name\": \"now\", \"arguments\": {}}", "now({})"),
        (
            r#"[TOOL_CALLS][{"name": "delete"}, {"name": "now"}, {"name": "drop"}]"#,
            r#"“[TOOL_CALLS][{"name": "delete"}, ” now({}) “, {"name": "drop"}]”"#,
        ),
        (
            "[TOOL_CALLS]delete[ARGS]{\"x\": \"[TOOL_CALLS]now{}\"}[TOOL_CALLS]now{}",
            "“[TOOL_CALLS]delete[ARGS]{\"x\": \"[TOOL_CALLS]now{}\"}” now({})",
        ),
        ("[TOOL_CALLS]ad[TOOL_CALLS]now{}", "“[TOOL_CALLS]ad” now({})"),
        ("[TOOL_CALLS]now[ARGS]{}, and so on", "now({}) “, and so on”"),
    ];
    assert_cases(MISTRAL_TEMPLATE, false, &cases);
    let texts = [
        "[1, 2] [TOOL_CALL]",
        "[TOOL_CALLS] are written so.",
        "[TOOL_CALLS]now[ARGS]",
        "[TOOL_CALLS]now[ARGS]x{}",
        "[TOOL_CALLS]now[CALL_ID]x",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][{\"name\": \"delete\"}] ",
        "[TOOL_CALLS]delete{\"a\": [1]}",
    ];
    assert_text(MISTRAL_TEMPLATE, &texts);
}

#[test]
fn reasoning_before_the_answer_is_parsed() {
    let cases = [
        ("<think>\nOkay. 1 < 2,\n\nso yes.\n</think>\n\nYes.\n", "‹Okay. 1 < 2,\n\nso yes.› “Yes.\n”"),
        ("\n<think>\n\n</think>\n\nYes.", "“Yes.”"),
        ("<think>Still </thinking", "‹Still </thinking›"),
        (
            "<think>\nI write <tool_call>.\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
            "‹I write <tool_call>.› now({})",
        ),
        ("\n Yes <think>no</think>", "“\n Yes <think>no</think>”"),
        ("<think>a</think>b<think>c</think>", "‹a› “b<think>c</think>”"),
        ("<thin", "“<thin”"),
        (" \n", "“ \n”"),
    ];
    assert_cases(QWEN3_TEMPLATE, false, &cases);
    let cases = [
        ("\nOkay.\n</think>\n\nYes.", "‹Okay.› “Yes.”"),
        ("<think>\nOkay.</think>Yes.", "‹Okay.› “Yes.”"),
        ("<thin air </think>", "‹<thin air›"),
        ("Okay. \n", "‹Okay. \n›"),
        ("<th", "‹<th›"),
    ];
    assert_cases(QWEN3_TEMPLATE, true, &cases);
    assert_cases(QWEN3_TEMPLATE, true, &[("</think>\n\nYes.", "“Yes.”")]);
    let cases = [("[THINK]Hm [/x].[/THINK]Hello.[TOOL_CALLS]now[ARGS]{}", "‹Hm [/x].› “Hello.” now({})")];
    assert_cases(MAGISTRAL_TEMPLATE, false, &cases);
}

#[test]
fn tool_call_without_tools_is_text() {
    let output = "<think>\nx\n</think>\n\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>\n";
    let whole = events(parser(QWEN3_TEMPLATE, false, &[]), [output]);
    assert_eq!(shown(&whole), "‹x› “<tool_call>\n{\"name\": \"now\"}\n</tool_call>\n”");
}

#[test]
fn output_events_come_as_soon_as_they_are_certain() {
    let mut parser = parser(QWEN3_TEMPLATE, false, &TOOLS);
    let mut push = |text: &str| shown(&parser.push(text));
    assert_eq!(push("<think>\nHm"), "‹Hm›");
    assert_eq!(push("m <"), "‹m›");
    assert_eq!(push("b>\n</think>\n"), "‹ <b>›");
    assert_eq!(push("See: <tool"), "“See:”");
    assert_eq!(push("_call>\n{\"name\": \"add\""), "add");
    assert_eq!(push(", \"arguments\": {\"a"), "({\"a)");
    assert_eq!(push("\": 1}"), "(\": 1})");
    assert_eq!(push("}\n</tool_call>"), "");
}

#[test]
fn withheld_output_is_bounded() {
    let long = |part: &str| part.repeat(20_000);
    let outputs = [
        (HERMES_TEMPLATE, long(" ")),
        (HERMES_TEMPLATE, "<tool_call>".to_owned() + &long(" ")),
        (HERMES_TEMPLATE, "<tool_call>{".to_owned() + &long(" ")),
        (HERMES_TEMPLATE, "<tool_call>{\"arguments\": {\"x\": \"".to_owned() + &long("<tool_call>{\\\"")),
        (HERMES_TEMPLATE, "<tool_call>{\"name\": \"".to_owned() + &long("x")),
        (HERMES_TEMPLATE, "<tool_call>{\"".to_owned() + &long("x")),
        (HERMES_TEMPLATE, long("<tool_call>")),
        (LLAMA_TEMPLATE, long("\n")),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]".to_owned() + &long("x")),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS][{\"name\": \"delete\"}".to_owned() + &long(" ")),
        (QWEN3_TEMPLATE, long(" ")),
    ];
    for (template, output) in outputs {
        let mut parser = parser(template, false, &TOOLS);
        let mut taken = 0;
        let mut given = String::new();
        for piece in output.as_bytes().chunks(7) {
            taken += piece.len();
            let piece = str::from_utf8(piece).unwrap();
            given.extend(parser.push(piece).into_iter().map(text));
            assert!(taken - given.len() <= MAX_HELD_BYTES + 16, "{}", &output[..30]);
        }
        given.extend(parser.finish().into_iter().map(text));
        assert!(given == output, "{}", &output[..30]);
    }
}

/// Of text; anything else fails.
fn text(event: OutputEvent) -> String {
    match event {
        OutputEvent::Text(text) => text,
        other => panic!("{other:?} is no text"),
    }
}

#[test]
fn tool_call_with_long_name_is_text_and_with_long_argument_is_not() {
    let name = "x".repeat(300);
    assert_text(HERMES_TEMPLATE, &[&format!("<tool_call>{{\"name\": \"{name}\"}}")]);
    let output =
        format!("<tool_call>{{\"{name}\": 1, \"name\": \"add\", \"arguments\": {{\"a\": \"{}\"}}}}", name.repeat(100));
    let whole = events(parser(HERMES_TEMPLATE, false, &TOOLS), [output.as_str()]);
    assert_eq!(shown(&whole), format!("add({{\"a\": \"{}\"}})", name.repeat(100)));
}

#[test]
fn tool_call_and_reasoning_formats_are_detected_by_marks() {
    let detected = |source: &str| {
        let format = OutputFormat::detect(source, &Tokenizer::bytes());
        (format.tool_calls(), format.reasoning())
    };
    let llama3 = r#"{%- if tools is not none %}{{ "<|python_tag|>" + tool_call.name + ".call(" }}{% endif %}"#;
    assert_eq!(detected(llama3), (Some(ToolCallFormat::Llama3), None));
    assert_eq!(detected(LLAMA_TEMPLATE), (Some(ToolCallFormat::Llama3), None));
    assert_eq!(detected("<|start_header_id|>{{ message.role }}"), (None, None));
    assert_eq!(detected(HERMES_TEMPLATE), (Some(ToolCallFormat::Hermes), None));
    assert_eq!(detected(QWEN3_TEMPLATE), (Some(ToolCallFormat::Hermes), Some(ReasoningMarks::Think)));
    assert_eq!(detected("<tool_call>\n<function=f>\n"), (None, None));
    assert_eq!(detected("<tool_call>f\n<arg_key>x</arg_key>"), (None, None));
    assert_eq!(detected(MAGISTRAL_TEMPLATE), (Some(ToolCallFormat::Mistral), Some(ReasoningMarks::BracketThink)));
    assert_eq!(detected("{{ content.split('</think>')[-1] }}"), (None, Some(ReasoningMarks::Think)));
    assert_eq!(detected(crate::MOCK_CHAT_TEMPLATE), (Some(ToolCallFormat::Hermes), None));
}

/// A tokenizer whose only tokens are marks: special ones, but for the last.
fn tokenizer(marks: &[&str]) -> Tokenizer {
    let added = (0..).zip(marks).map(|(id, mark)| {
        serde_json::json!({"id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": id + 1 < marks.len()})
    });
    let json = serde_json::json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "decoder": {"type": "ByteLevel",
        "add_prefix_space": false, "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "vocab": {}, "merges": []}});
    Tokenizer::from_tokenizer_json(&serde_json::to_vec(&json).unwrap()).unwrap()
}

#[test]
fn special_tokens_that_are_marks_of_the_format_are_shown() {
    let tokenizer = tokenizer(&["</s>", "[TOOL_CALLS]", "<tool_call>", "[ARGS]", "[THINK]", "[/THINK]"]);
    let format = OutputFormat::detect(MAGISTRAL_TEMPLATE, &tokenizer);
    assert_eq!(format.shown_tokens(), [1, 3, 4], "not those of other formats, and not text");
    let mut detokenizer = tokenizer.detokenizer_showing(format.shown_tokens());
    let text: String = (0..6).map(|token| detokenizer.push(token)).collect();
    assert_eq!(text, "[TOOL_CALLS][ARGS][THINK][/THINK]");
}

#[test]
fn prompt_that_ends_with_think_mark_starts_in_reasoning() {
    let tokenizer = tokenizer(&["<|im_end|>", "<think>"]);
    let starts = |end: &str| {
        let source = "{% for m in messages %}{{ m.content }}{% endfor %}".to_owned() + end;
        let template = crate::ChatTemplate::from_source(&source, &tokenizer).unwrap();
        let message = crate::ChatMessage { role: "user".into(), content: "x <think>".into(), ..Default::default() };
        let prompt = template.render(&crate::Conversation::new(vec![message]), std::time::UNIX_EPOCH).unwrap();
        template.output_format().starts_in_reasoning(&prompt)
    };
    assert!(starts("<think>") && starts("<|im_end|>assistant\n<think>\n"));
    assert!(!starts("<think>\n\n</think>\n\n"));
    assert!(!starts("{# <think> #}"), "what a user says is no mark");
    assert!(!starts(""));
}

/// Text that is nearly a call, or one.
fn adversarial() -> impl Strategy<Value = String> {
    let parts = [
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "{\"name\": \"add\", \"arguments\": {\"a\": 1}}",
        "{\"name\": \"",
        "\"add\"",
        "add",
        "delete",
        "\"name\"",
        "\"arguments\"",
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        "\\u00e9",
        "null",
        "1",
        " ",
        "\n",
        ";",
        "é",
        "😀",
        "<",
        "<tool",
        "_call>",
        "</",
        "[TOOL",
        "text",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..24).prop_map(|parts| parts.concat())
}

fn cut<'t>(text: &'t str, lengths: &[usize]) -> Vec<&'t str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    for &length in lengths {
        let end = (length..=rest.len()).find(|&end| rest.is_char_boundary(end)).unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// An answer of a model that follows its format, and the events that it is.
fn well_formed(mistral: bool) -> impl Strategy<Value = (String, Vec<OutputEvent>)> {
    let arguments = prop::sample::select(vec![
        "{}",
        "{\"a\": \"}</tool_call>[TOOL_CALLS]add{\"}",
        "{\"a\": [1, {\"b\": \"\\\"\\\\\"}]}",
        "{\"é\": \"<tool_call>\\n{\"}",
    ]);
    let call = (prop::sample::select(TOOLS.to_vec()), arguments);
    let part = ("[a-c<>{}é ]{0,8}", prop::collection::vec(call, 0..3));
    prop::collection::vec(part, 0..4).prop_map(move |parts| {
        let mut output = String::new();
        let mut events = Events::default();
        for (text, calls) in parts {
            let text = format!("{}.", text);
            output.push_str(&text);
            events.text(&text);
            for (name, arguments) in calls {
                output.push_str(&if mistral {
                    format!("[TOOL_CALLS]{name}[ARGS]{arguments}")
                } else {
                    format!("\n<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
                });
                events.begin(name.to_owned());
                events.arguments(arguments);
            }
        }
        (output, events.into_vec())
    })
}

proptest! {
    #[test]
    fn output_events_are_the_same_for_any_chunking(
        template in prop::sample::select(TEMPLATES.to_vec()),
        starts_in_reasoning in any::<bool>(),
        output in adversarial(),
        lengths in prop::collection::vec(0usize..12, 0..24),
    ) {
        let whole = events(parser(template, starts_in_reasoning, &TOOLS), [output.as_str()]);
        let pieces = events(parser(template, starts_in_reasoning, &TOOLS), cut(&output, &lengths));
        prop_assert_eq!(pieces, whole);
    }

    #[test]
    fn tool_calls_of_unknown_tools_are_text(
        template in prop::sample::select(vec![LLAMA_TEMPLATE, HERMES_TEMPLATE, MISTRAL_TEMPLATE]),
        tools in prop::sample::select(vec![&[][..], &["other"]]),
        output in adversarial(),
    ) {
        let given: String = events(parser(template, false, tools), [output.as_str()]).into_iter().map(text).collect();
        prop_assert_eq!(given, output);
    }

    #[test]
    fn output_events_keep_their_order_without_repeats(
        template in prop::sample::select(TEMPLATES.to_vec()),
        output in adversarial(),
    ) {
        // Without what is passed on in other words: escapes, and no arguments.
        let output = output.replace('\\', "").replace("null", "").replace("\"\"", "");
        let mut rest = output.as_str();
        for event in events(parser(template, false, &TOOLS), [output.as_str()]) {
            let piece = match event {
                OutputEvent::CallBegins { .. } => continue,
                OutputEvent::CallArguments(text) if text == "{}" => continue,
                OutputEvent::Reasoning(text) | OutputEvent::Text(text) | OutputEvent::CallArguments(text) => text,
            };
            let at = rest.find(&piece);
            prop_assert!(at.is_some(), "{:?} is not in the rest of {:?}", piece, output);
            rest = &rest[at.unwrap() + piece.len()..];
        }
    }

    #[test]
    fn well_formed_hermes_output_gives_its_parts((output, expected) in well_formed(false)) {
        prop_assert_eq!(events(parser(HERMES_TEMPLATE, false, &TOOLS), [output.as_str()]), expected);
    }

    #[test]
    fn well_formed_mistral_output_gives_its_parts((output, expected) in well_formed(true)) {
        prop_assert_eq!(events(parser(MISTRAL_TEMPLATE, false, &TOOLS), [output.as_str()]), expected);
    }
}
