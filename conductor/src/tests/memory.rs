//! A request takes no more memory than its body is charged with.

use std::sync::Arc;

use baton_api::{ChatRequest, CompletionRequest, Context, MessagesRequest, ResponseStore, ResponsesRequest, Weight};
use baton_fuzz::{CountingAllocator, peak_bytes};
use baton_scheduler::SequenceLimits;
use baton_text::{ChatTemplate, MOCK_CHAT_TEMPLATE};
use baton_types::SamplingDefaults;

use crate::prompt::TextModel;
use crate::prompt::tests::{LIMITS, model};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// What other threads of the tests, and tables of the model's, take meanwhile.
const SLACK: usize = 1 << 20;

fn large_model() -> TextModel {
    let model = model();
    let template = Some(ChatTemplate::from_source(MOCK_CHAT_TEMPLATE, &model.tokenizer).unwrap());
    TextModel { template, max_prompt_bytes: 8 << 20, ..model }
}

/// Reads a body and makes a prompt of it, as far as it gets; gives what was asked for.
fn take(model: &TextModel, path: &str, body: &[u8]) -> Result<(), String> {
    let responses = Arc::new(ResponseStore::new(1 << 20, 60));
    let defaults = SamplingDefaults::default();
    let context =
        || Context { created: 7, decode: Arc::new(|_: &[u32]| Vec::new()), responses: responses.clone(), defaults };
    let call = match path {
        "chat" => baton_api::read::<ChatRequest>(body).and_then(|(request, _)| request.call(context())),
        "completions" => baton_api::read::<CompletionRequest>(body).and_then(|(request, _)| request.call(context())),
        "responses" => baton_api::read::<ResponsesRequest>(body).and_then(|(request, _)| request.call(context())),
        _ => baton_api::read::<MessagesRequest>(body).and_then(|(request, _)| request.call(&context())),
    };
    let limits = SequenceLimits { prompt_soon: 8 << 20, context_length: 8 << 20, ..LIMITS };
    for request in call.map_err(|bad| bad.problem)?.requests {
        model.tokenized(request, limits, 1).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn list(item: &str, count: usize) -> String {
    vec![item; count].join(",")
}

#[test]
fn request_takes_no_more_memory_than_its_body_is_charged_with() {
    let model = large_model();
    let user = r#"{"role":"user","content":"x"}"#;
    let chat = |fields: &str| ("chat", format!(r#"{{"messages":[{user}],{fields}}}"#));
    let said = |message: &str| ("chat", format!(r#"{{"messages":[{message},{user}]}}"#));
    let objects = list(r#"{"":0}"#, 20_000);
    let quoted = objects.replace('"', r#"\""#);
    let call = |arguments: &str| format!(r#"{{"id":"a","function":{{"name":"f","arguments":{arguments}}}}}"#);
    let calls = |calls: &str| said(&format!(r#"{{"role":"assistant","tool_calls":[{calls}]}}"#));
    let tool = |parameters: &str| {
        format!(r#"{{"type":"function","function":{{"name":"f","parameters":{{"a":[{parameters}]}}}}}}"#)
    };
    let bodies = [
        chat(&format!(r#""documents":[{{"a":[{objects}]}}]"#)),
        chat(&format!(r#""documents":[{{"a":[{}]}}]"#, list("[[[]]]", 9000))),
        chat(&format!(r#""documents":[{}]"#, list(r#"{"a":{"b":{}}}"#, 1024))),
        chat(&format!(r#""tools":[{}]"#, tool(&list(r#"{"":0}"#, 8000)))),
        chat(&format!(r#""metadata":[{objects}]"#)),
        calls(&list(&call("{}"), 1000)),
        calls(&call(&format!(r#"{{"a":[{objects}]}}"#))),
        calls(&call(&format!(r#""{{\"a\":[{quoted}]}}""#))),
        said(&list(r#"{"role":"u"}"#, 60_000)),
        said(&list(&format!(r#"{{"role":"user","content":[{}]}}"#, list(r#""""#, 4000)), 50)),
        said(&format!(r#"{{"role":"user","content":"{}"}}"#, "x".repeat(2 << 20))),
        ("completions", format!(r#"{{"prompt":"{}"}}"#, "x".repeat(2 << 20))),
        ("completions", format!(r#"{{"prompt":[{}]}}"#, list("7", 1_000_000))),
        ("completions", format!(r#"{{"prompt":[{}]}}"#, list(&format!("[{}]", list("7", 9000)), 100))),
        ("responses", format!(r#"{{"input":[{}]}}"#, list(r#"{"role":"user","content":""}"#, 60_000))),
        ("responses", format!(r#"{{"input":"{}"}}"#, "x".repeat(2 << 20))),
        ("messages", format!(r#"{{"max_tokens":1,"messages":[{}]}}"#, list(user, 60_000))),
        (
            "messages",
            format!(
                r#"{{"max_tokens":1,"messages":[{{"role":"assistant","content":[{}]}},{user}]}}"#,
                list(r#"{"type":"tool_use","id":"","name":"","input":{}}"#, 4000)
            ),
        ),
    ];
    let mut fullest: f64 = 0.0;
    for (path, body) in bodies {
        // What came is charged, too, and goes once it is read.
        let charged = body.len() + Weight::of_body(body.as_bytes()).unwrap().memory();
        let (taken, peak) = peak_bytes(|| take(&model, path, body.as_bytes()));
        let begins = &body[..body.len().min(90)];
        println!(
            "{path}: {} KiB, charged {} KiB, took {} KiB, {taken:?}: {begins}",
            body.len() >> 10,
            charged >> 10,
            peak >> 10
        );
        assert!(peak <= charged + SLACK, "{peak} bytes, but it is charged with {charged}: {begins}");
        fullest = fullest.max(peak as f64 / charged as f64);
    }
    assert!(fullest > 0.5, "bodies are charged with far more than they take: {fullest}");
}

#[test]
fn json_values_of_a_prompt_are_bounded_before_trees_are_made() {
    let model = large_model();
    let user = r#"{"role":"user","content":"x"}"#;
    let objects = list(r#"{"":0}"#, 150_000 / 2);
    let call = |arguments: &str| {
        let call = format!(r#"{{"id":"a","function":{{"name":"f","arguments":{arguments}}}}}"#);
        format!(r#"{{"messages":[{{"role":"assistant","tool_calls":[{call}]}},{user}]}}"#)
    };
    let half = list(r#"{"":0}"#, 20_000);
    for body in [
        format!(r#"{{"messages":[{user}],"documents":[{{"a":[{objects}]}}]}}"#),
        call(&format!(r#"{{"a":[{objects}]}}"#)),
        call(&format!(r#""{{\"a\":[{}]}}""#, objects.replace('"', r#"\""#))),
        // Broken, after a large tree.
        call(&format!(r#""{{\"a\":[{}""#, objects.replace('"', r#"\""#))),
        format!(r#"{{"messages":[{user}],"documents":[{{"a":[{half}]}},{{"a":[{half}]}}]}}"#),
        format!(
            r#"{{"messages":[{user}],"tools":[{}]}}"#,
            (0..8)
                .map(|tool| format!(
                    r#"{{"type":"function","function":{{"name":"f{tool}","parameters":{{"a":[{}]}}}}}}"#,
                    list(r#"{"":0}"#, 8000)
                ))
                .collect::<Vec<_>>()
                .join(",")
        ),
    ] {
        let (taken, peak) = peak_bytes(|| take(&model, "chat", body.as_bytes()));
        let error = taken.unwrap_err();
        assert!(error.contains("more than 65536 JSON values"), "{error}");
        assert!(peak < body.len() * 3 + SLACK, "{peak} bytes for {}", body.len());
    }
}
