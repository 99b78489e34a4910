//! Log-probabilities of tokens that are parts of characters: their bytes, and their offsets.

use baton_api::{Call, ResponsesRequest};
use baton_proto::token_text;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::{self, TokenLogprobs, TopLogprob};
use serde_json::{Value, json};

use crate::support::*;

/// An emoji in three tokens, the last of which also ends a combining character's base.
const TOKENS: [&[u8]; 5] = [b"a \xf0\x9f", b"\x98", b"\x80e", b"\xcc\x81", b"!"];
const TEXT: &str = "a 😀e\u{301}!";

fn scored(token: &[u8]) -> TokenLogprobs {
    let (text, token_bytes) = token_text(token);
    let other = |token_id, bytes: &[u8], logprob| {
        let (text, token_bytes) = token_text(bytes);
        TopLogprob { token_id, logprob, text, token_bytes }
    };
    let top = vec![other(7, b"\xf0", -0.25), other(8, b"\xe2\x80", -0.5)];
    TokenLogprobs { logprob: Some(-1.0), top, text, token_bytes }
}

/// The tokens of an answer, with its text as it becomes final.
fn answer(completion: u32) -> Vec<v1::GenerateResponse> {
    let texts = ["a ", "", "😀e", "\u{301}", "!"];
    let token = |(token, text): (&[u8], &str)| {
        let logprobs = vec![scored(token)];
        delta(completion, v1::Delta { text: text.into(), token_ids: vec![1], logprobs, ..Default::default() })
    };
    let mut responses: Vec<_> = TOKENS.into_iter().zip(texts).map(token).collect();
    responses.push(finished(completion, "length"));
    responses
}

fn with_prompt(prompt: &[&[u8]], completions: u32) -> Vec<v1::GenerateResponse> {
    let prompt_token_ids = (1..=prompt.len() as u32).collect();
    let accepted = v1::Accepted { request_id: "id".into(), model: "m".into(), prompt_token_ids, seed: 1 };
    let behind = prompt.iter().skip(1).map(|token| scored(token)).chain([scored(TOKENS[0])]);
    let positions = v1::PromptLogprobs { positions: behind.collect() };
    let mut responses = vec![response(Event::Accepted(accepted)), response(Event::PromptLogprobs(positions))];
    responses.extend((0..completions).flat_map(answer));
    responses
}

fn responses(body: Value) -> Call {
    read::<ResponsesRequest>(body.to_string().as_bytes()).expect("a body").call(context()).expect("a call")
}

fn bytes(tokens: &Value) -> Vec<u8> {
    let tokens = tokens.as_array().expect("a list").iter();
    tokens.flat_map(|token| serde_json::from_value::<Vec<u8>>(token["bytes"].clone()).expect("bytes")).collect()
}

#[test]
fn chat_logprobs_have_the_bytes_of_parts_of_characters() {
    let body = json!({"messages": [], "logprobs": true, "top_logprobs": 2});
    let asked = || [vec![accepted()], answer(0)].concat();
    let content = whole(chat(body.clone()), asked())["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(bytes(&content), TEXT.as_bytes());
    assert_eq!(content[1]["token"], "\\x98");
    assert_eq!(content[2]["token"], "\\x80e");
    let top = json!([
        {"token": "\\xf0", "logprob": -0.25, "bytes": [0xf0]},
        {"token": "\\xe2\\x80", "logprob": -0.5, "bytes": [0xe2, 0x80]},
    ]);
    assert_eq!(content[0]["top_logprobs"], top);
    let mut streaming = body;
    streaming["stream"] = json!(true);
    let chunks = streamed(chat(streaming), asked());
    let parts =
        chunks.iter().flat_map(|chunk| bytes(chunk["choices"][0]["logprobs"].get("content").unwrap_or(&json!([]))));
    assert_eq!(parts.collect::<Vec<_>>(), TEXT.as_bytes());
}

#[test]
fn responses_logprobs_have_the_bytes_of_parts_of_characters() {
    let body = json!({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let response = whole(responses(body), [vec![accepted()], answer(0)].concat());
    let content = &response["output"][0]["content"][0];
    assert_eq!((bytes(&content["logprobs"]), &content["text"]), (TEXT.as_bytes().to_vec(), &json!(TEXT)));
    assert_eq!(content["logprobs"][1]["top_logprobs"][1]["bytes"], json!([0xe2, 0x80]));
}

#[test]
fn completion_offsets_are_of_the_text_after_an_emoji() {
    let body = json!({"prompt": "x", "logprobs": 2, "n": 2});
    let asked = [vec![accepted()], answer(0), answer(1)].concat();
    for choice in whole(completion(body), asked)["choices"].as_array().unwrap() {
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["text_offset"], json!([0, 2, 2, 4, 5]));
        assert_eq!(logprobs["tokens"], json!(["bytes:a \\xf0\\x9f", "bytes:\\x98", "bytes:\\x80e", "\u{301}", "!"]));
        let top = json!({"bytes:\\xf0": -0.25, "bytes:\\xe2\\x80": -0.5, "bytes:\\x98": -1.0});
        assert_eq!(logprobs["top_logprobs"][1], top);
        assert_eq!(choice["text"].as_str().unwrap().chars().nth(4), Some('\u{301}'));
    }
}

#[test]
fn echo_offsets_count_what_the_prompt_shows() {
    // The tokenizer puts a special token before the text, and a space.
    let prompt: [&[u8]; 4] = [b"<s>", b" \xf0\x9f", b"\x98\x80", b" hi"];
    let body = json!({"prompt": "😀 hi", "logprobs": 2, "echo": true, "n": 2, "stream": true});
    let chunks = streamed(completion(body.clone()), with_prompt(&prompt, 2));
    let of = |choice: u64| {
        let own = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|own| own["index"] == choice);
        let offsets = own.clone().flat_map(|own| own["logprobs"]["text_offset"].as_array().unwrap().clone());
        let text: String = own.map(|own| own["text"].as_str().unwrap()).collect();
        (text, Value::from_iter(offsets))
    };
    let expected = (format!("😀 hi{TEXT}"), json!([0, 0, 0, 1, 4, 6, 6, 8, 9]));
    assert_eq!((of(0), of(1)), (expected.clone(), expected.clone()));
    let mut not_streamed = body;
    not_streamed["stream"] = json!(false);
    let choice = whole(completion(not_streamed), with_prompt(&prompt, 2))["choices"][1].clone();
    assert_eq!((choice["text"].as_str().unwrap(), &choice["logprobs"]["text_offset"]), (&*expected.0, &expected.1));
}

#[test]
fn offset_of_a_token_that_a_stop_string_cuts_off_is_the_end_of_the_text() {
    let cut = |text: &str, token: &[u8]| {
        let logprobs = vec![scored(token)];
        delta(0, v1::Delta { text: text.into(), token_ids: vec![1], logprobs, ..Default::default() })
    };
    let asked = vec![accepted(), cut("a", b"a"), cut("", b"EN"), cut("", b"D"), finished(0, "stop")];
    let body = whole(completion(json!({"prompt": "x", "logprobs": 0, "stop": "END"})), asked);
    assert_eq!(body["choices"][0]["logprobs"]["text_offset"], json!([0, 1, 1]));
}
