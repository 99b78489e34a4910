//! What models say: reasoning and tool calls in a text, and strings that end it. A client has much
//! of it in its hand.

use baton_text::{DecodeOptions, OutputFormat, StopStrings, Tokenizer};

use crate::input::{choice, parts, text};

pub(super) const WORDS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "{\"name\": \"f\", \"arguments\": {",
    "\"parameters\": {",
    "}}",
    "; ",
    "[{",
    "\\u00e9",
    "\\ud800",
];

/// Templates of the families that call tools in their own ways.
const TEMPLATES: [&str; 4] = [
    "{{ tools }}<tool_call></tool_call><think></think>",
    "{{ tools }}<|python_tag|>",
    "{{ tools }}[TOOL_CALLS]",
    "{{ tools }}[TOOL_CALLS][ARGS][THINK][/THINK]",
];

/// Parts: a string that ends the output, and the output. It comes in pieces of as many bytes as the
/// second byte says.
pub(super) fn parse(input: &[u8]) {
    thread_local! {
        static TOKENIZER: Tokenizer = Tokenizer::bytes();
    }
    let (family, rest) = choice(input, TEMPLATES.len() * 2);
    let (piece, rest) = choice(rest, 64);
    let [stop, output] = parts(rest);
    TOKENIZER.with(|tokenizer| {
        let format = OutputFormat::detect(TEMPLATES[family / 2], tokenizer);
        let mut parser = format.parser(family % 2 == 1, vec!["f".into(), "get".into()]);
        let Ok(mut stops) = StopStrings::new(&[text(stop)]) else { return };
        let mut detokenizer = tokenizer.detokenizer_with(DecodeOptions::default());
        for bytes in output.chunks(piece + 1) {
            let said: String = bytes.iter().map(|byte| detokenizer.push(u32::from(*byte))).collect();
            stops.push(&said);
            parser.push(&said);
        }
        let rest = detokenizer.finish();
        parser.push(&rest);
        parser.finish();
        stops.push(&rest);
        stops.finish();
    });
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let outputs = [
        "hm</think>I look.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call> done",
        "{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"get\", \"parameters\": {}}",
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}]",
        "[THINK]x[/THINK][TOOL_CALLS]f[ARGS]{\"a\": 1}",
    ];
    let family = |index: usize, output: &str| [&[2 * index as u8, 7][..], b"STOP\xff", output.as_bytes()].concat();
    outputs.iter().enumerate().map(|(index, output)| family(index, output)).collect()
}
