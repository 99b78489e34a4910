//! OpenAI's responses.

use baton_api::{Call, Failure, ResponsesRequest};
use baton_proto::v1::structured_output::Form;
use baton_proto::v1::tool_choice::Choice;
use baton_proto::v1::{self, ToolCall};
use serde_json::{Value, json};

use crate::support::*;

fn body(fields: Value) -> Value {
    let mut body = json!({"input": "x"});
    fields.as_object().expect("fields").iter().for_each(|(field, value)| body[field] = value.clone());
    body
}

fn responses(fields: Value) -> Call {
    read::<ResponsesRequest>(body(fields).to_string().as_bytes()).expect("a body").call(context()).expect("a call")
}

fn bad(fields: Value) -> String {
    let request = read::<ResponsesRequest>(body(fields).to_string().as_bytes());
    request.and_then(|request| request.call(context())).err().expect("a bad request").param
}

fn function() -> Value {
    json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true})
}

#[test]
fn responses_body_becomes_a_request() {
    let call = responses(json!({
        "model": "m", "instructions": "be brief", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.25, "store": true,
        "tools": [function()], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": 1}, "strict": true}, "verbosity": "low"},
        "top_logprobs": 2, "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "disabled", "background": false, "baton": {"ttft_slo_ms": 7},
    }));
    let request = &call.requests[0];
    assert_eq!((request.model.as_str(), request.n, request.slo.as_ref().unwrap().ttft_ms), ("m", 1, Some(7.0)));
    let sampling = request.sampling.as_ref().unwrap();
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.logprobs),
        (Some(0.5), Some(0.25), Some(5), Some(2))
    );
    assert_eq!(form(&call), Some(Form::StrictJsonSchema(r#"{"a":1}"#.into())));
    let prompt = prompt(&call);
    let messages: Vec<_> = prompt.messages.iter().map(|message| (&*message.role, &*message.content)).collect();
    assert_eq!(messages, [("system", "be brief"), ("user", "x")]);
    let function = r#"{"name":"f","parameters":{"type":"object"},"strict":true}"#;
    assert_eq!(prompt.tools, [format!(r#"{{"type":"function","function":{function}}}"#)]);
    assert_eq!(prompt.tool_choice, Some(v1::ToolChoice { choice: Some(Choice::Name("f".into())) }));
    assert!(prompt.one_tool_call);
    assert_eq!(prompt.template_variables, r#"{"reasoning_effort":"low"}"#);
    assert_eq!((call.fields.of("max_tokens"), call.fields.of("messages")), ("max_output_tokens", "input"));
}

#[test]
fn responses_allowed_tools_keep_all_tools_in_the_prompt() {
    let choice = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]});
    let other = json!({"type": "function", "name": "g"});
    let call = responses(json!({"tools": [function(), other], "tool_choice": choice, "priority": 3}));
    let prompt = prompt(&call);
    assert_eq!((prompt.tools.len(), &prompt.allowed_tools), (2, &vec!["g".to_owned()]));
    assert_eq!(prompt.tool_choice, Some(v1::ToolChoice { choice: Some(Choice::Required(true)) }));
    assert_eq!(call.requests[0].priority, 3);
    assert_eq!(whole(call, thought_said_and_called())["tool_choice"], choice, "the response repeats it");
}

#[test]
fn input_items_become_template_messages() {
    let output = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    let call = responses(json!({"input": [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": output("reasoning_text", "hm"), "encrypted_content": null},
        {"type": "message", "id": "msg", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I'll look", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc", "call_id": "c0", "name": "f", "arguments": "{\"a\": 1}", "status": "completed"},
        {"type": "function_call", "call_id": "c1", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": "42"},
        {"type": "function_call_output", "call_id": "c1", "output": output("input_text", "no")},
        {"type": "reasoning", "id": "rs", "summary": output("summary_text", "so")},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "done"},
    ]}));
    let message = |role: &str, content: &str| v1::ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    };
    let call_of = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    let said = |id: &str, name: &str, content: &str| v1::ChatMessage {
        name: name.into(),
        tool_call_id: id.into(),
        ..message("tool", content)
    };
    assert_eq!(
        prompt(&call).messages,
        [
            message("system", "be brief"),
            message("user", "a\nb"),
            v1::ChatMessage {
                reasoning: "hm".into(),
                tool_calls: vec![call_of("c0", "f", r#"{"a": 1}"#), call_of("c1", "g", "{}")],
                ..message("assistant", "I'll look")
            },
            said("c0", "f", "42"),
            said("c1", "g", "no"),
            v1::ChatMessage {
                reasoning: "so".into(),
                tool_calls: vec![call_of("c2", "f", "{}")],
                ..message("assistant", "")
            },
            message("assistant", "done"),
        ]
    );
}

#[test]
fn unsupported_responses_values_are_refused_by_param() {
    assert_eq!(bad(json!({"colour": 1})), "colour");
    assert_eq!(bad(json!({"previous_response_id": "resp_1"})), "previous_response_id");
    assert_eq!(bad(json!({"conversation": "c"})), "conversation");
    assert_eq!(bad(json!({"prompt": {"id": "p"}})), "prompt");
    assert_eq!(bad(json!({"background": true})), "background");
    assert_eq!(bad(json!({"truncation": "some"})), "truncation");
    assert_eq!(bad(json!({"include": ["colours"]})), "include[0]");
    assert_eq!(bad(json!({"tools": [{"type": "functions", "name": "f", "parameters": {}}]})), "tools[0].type");
    assert_eq!(bad(json!({"tools": [{"type": "function"}]})), "tools[0].name");
    assert_eq!(bad(json!({"tool_choice": "required"})), "tool_choice");
    assert_eq!(bad(json!({"tool_choice": {"type": "allowed_tools", "mode": "auto"}})), "tool_choice.tools");
    assert_eq!(bad(json!({"tool_choice": {"type": "file_search"}})), "tool_choice");
    assert_eq!(bad(json!({"tool_choice": {"type": "function", "name": "f", "mode": "auto"}})), "tool_choice.mode");
    assert_eq!(bad(json!({"text": {"format": {"type": "grammar"}}})), "text.format.type");
    assert_eq!(bad(json!({"text": {"format": {"type": "json_schema", "name": "x"}}})), "text.format.schema");
    assert_eq!(bad(json!({"text": {"format": {"type": "text", "schema": {}}}})), "text.format.schema");
    assert_eq!(bad(json!({"reasoning": {"effort": "huge"}})), "reasoning.effort");
    assert_eq!(bad(json!({"metadata": {"a": 1}})), "metadata.a");
    let item = |item: Value| bad(json!({ "input": [item] }));
    assert_eq!(item(json!({"status": "x"})), "input[0].type");
    assert_eq!(item(json!({"type": "mesage", "role": "user", "content": "x"})), "input[0].type");
    assert_eq!(item(json!({"type": "compaction", "encrypted_content": "x"})), "input[0].type");
    assert_eq!(item(json!({"role": "tool", "content": "x"})), "input[0].role");
    assert_eq!(item(json!({"role": "user"})), "input[0].content");
    let image = json!([{"type": "input_image", "image_url": "x"}]);
    assert_eq!(item(json!({"role": "user", "content": image})), "input[0].content[0].type");
    assert_eq!(item(json!({"type": "function_call_output", "call_id": "1"})), "input[0].output");
    assert_eq!(item(json!({"type": "function_call", "call_id": "1", "name": "f"})), "input[0].arguments");
    assert_eq!(bad(json!({"input": {}})), "input");
}

fn item(index: u32) -> Value {
    match index {
        0 => json!({"type": "reasoning", "id": "rs_id_0", "summary": [], "status": "completed",
            "content": [{"type": "reasoning_text", "text": "hmm."}]}),
        1 => json!({"type": "message", "id": "msg_id_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I'll look", "annotations": [], "logprobs": []}]}),
        2 => json!({"type": "function_call", "id": "fc_id_2", "call_id": "c0", "name": "f", "arguments": "{\"a\": 1}",
            "status": "completed"}),
        _ => json!({"type": "function_call", "id": "fc_id_3", "call_id": "c1", "name": "g", "arguments": "{}",
            "status": "completed"}),
    }
}

fn expected(status: &str, output: Value, usage: Value) -> Value {
    json!({
        "id": "resp_id", "object": "response", "created_at": 7, "status": status, "error": null, "incomplete_details": null,
        "model": "m", "output": output, "usage": usage, "instructions": "be brief", "max_output_tokens": null,
        "metadata": {"k": "v"}, "parallel_tool_calls": true, "reasoning": {"effort": null, "summary": null},
        "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [{"type": "function", "name": "f", "description": null, "parameters": {"type": "object"}, "strict": true}],
        "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "background": false, "store": true,
        "previous_response_id": null,
    })
}

fn usage() -> Value {
    json!({
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 13,
    })
}

fn asked(stream: bool) -> Call {
    responses(json!({"instructions": "be brief", "metadata": {"k": "v"}, "tools": [function()], "stream": stream}))
}

#[test]
fn response_has_its_output_items_in_order_and_echoes_its_request() {
    let answer = whole(asked(false), thought_said_and_called());
    assert_eq!(answer, expected("completed", (0..4).map(item).collect(), usage()));
}

#[test]
fn response_that_ends_at_max_tokens_is_incomplete() {
    let answer = whole(responses(json!({})), vec![accepted(), said(0, "a", None), finished(0, "length")]);
    assert_eq!(
        (&answer["status"], &answer["incomplete_details"], &answer["output"][0]["status"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}), &json!("incomplete"))
    );
    let events = named(responses(json!({"stream": true})), vec![accepted(), finished(0, "length")]);
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
}

#[test]
fn responses_stream_numbers_events_and_closes_each_item() {
    let events = named(asked(true), thought_said_and_called());
    let numbers: Vec<_> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    let without_number = |mut event: Value| {
        event.as_object_mut().unwrap().remove("sequence_number");
        event
    };
    let events: Vec<_> = events.into_iter().map(without_number).collect();
    let of_response = |name: &str, status: &str, output: Value, usage: Value| json!({"type": name, "response": expected(status, output, usage)});
    let added = |index: u32| {
        let mut item = item(index);
        item["status"] = json!("in_progress");
        match item["type"].as_str() {
            Some("function_call") => item["arguments"] = json!(""),
            _ => item["content"] = json!([]),
        }
        json!({"type": "response.output_item.added", "output_index": index, "item": item})
    };
    let done = |index: u32| json!({"type": "response.output_item.done", "output_index": index, "item": item(index)});
    let of = |name: &str, index: u32, fields: Value| {
        let mut event = json!({"type": name, "item_id": item(index)["id"], "output_index": index});
        if index < 2 {
            event["content_index"] = json!(0);
        }
        fields.as_object().unwrap().iter().for_each(|(field, value)| event[field] = value.clone());
        event
    };
    let reasoning = |text: &str| json!({"part": {"type": "reasoning_text", "text": text}});
    let text = |text: &str| json!({"part": {"type": "output_text", "text": text, "annotations": [], "logprobs": []}});
    assert_eq!(
        events,
        [
            of_response("response.created", "in_progress", json!([]), Value::Null),
            of_response("response.in_progress", "in_progress", json!([]), Value::Null),
            added(0),
            of("response.content_part.added", 0, reasoning("")),
            of("response.reasoning_text.delta", 0, json!({"delta": "hm"})),
            of("response.reasoning_text.delta", 0, json!({"delta": "m."})),
            of("response.reasoning_text.done", 0, json!({"text": "hmm."})),
            of("response.content_part.done", 0, reasoning("hmm.")),
            done(0),
            added(1),
            of("response.content_part.added", 1, text("")),
            of("response.output_text.delta", 1, json!({"delta": "I'll", "logprobs": []})),
            of("response.output_text.delta", 1, json!({"delta": " look", "logprobs": []})),
            of("response.output_text.done", 1, json!({"text": "I'll look", "logprobs": []})),
            of("response.content_part.done", 1, text("I'll look")),
            done(1),
            added(2),
            of("response.function_call_arguments.delta", 2, json!({"delta": "{\"a\":"})),
            of("response.function_call_arguments.delta", 2, json!({"delta": " 1}"})),
            of("response.function_call_arguments.done", 2, json!({"arguments": "{\"a\": 1}", "name": "f"})),
            done(2),
            added(3),
            of("response.function_call_arguments.delta", 3, json!({"delta": "{}"})),
            of("response.function_call_arguments.done", 3, json!({"arguments": "{}", "name": "g"})),
            done(3),
            of_response("response.completed", "completed", (0..4).map(item).collect(), usage()),
        ]
    );
}

#[test]
fn responses_logprobs_are_of_the_output_text() {
    let events = || vec![accepted(), said(0, "a", Some(-1.0)), said(0, "\u{fffd}", Some(-2.0)), finished(0, "stop")];
    let asked = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1});
    let answer = whole(responses(asked.clone()), events());
    let logprobs = &answer["output"][0]["content"][0]["logprobs"];
    let top = json!([{"token": "z", "logprob": -0.5, "bytes": [122]}]);
    assert_eq!(
        *logprobs,
        json!([
            {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": top},
            {"token": "\u{fffd}", "logprob": -2.0, "bytes": [0xef, 0xbf, 0xbd], "top_logprobs": top},
        ])
    );
    let streamed =
        named(responses(body(json!({"stream": true, "include": asked["include"], "top_logprobs": 1}))), events());
    assert_eq!((&streamed[4]["logprobs"][0], &streamed[6]["logprobs"]), (&logprobs[0], logprobs));
}

#[test]
fn failed_responses_stream_ends_with_an_error_event() {
    let mut call = asked(true);
    let early = call.answer.failed(&Failure::new(429, "busy"));
    let error = json!({"code": "rate_limit_exceeded", "message": "busy", "param": null});
    let mut event = json!({"type": "error", "sequence_number": 0, "error": error});
    error.as_object().unwrap().iter().for_each(|(field, value)| event[field] = value.clone());
    assert_eq!((early.event, serde_json::from_str::<Value>(&early.data).unwrap()), (Some("error"), event));
    let mut call = asked(true);
    call.answer.take(0, accepted());
    call.answer.take(0, said(0, "a", None));
    let failed: Value = serde_json::from_str(&call.answer.failed(&Failure::new(500, "a bug")).data).unwrap();
    assert_eq!((&failed["type"], &failed["sequence_number"]), (&json!("response.failed"), &json!(5)));
    let response = &failed["response"];
    assert_eq!(
        (&response["status"], &response["error"]),
        (&json!("failed"), &json!({"code": "server_error", "message": "a bug"}))
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
}
