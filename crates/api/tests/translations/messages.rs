//! Anthropic's messages.

use baton_api::{Call, Failure, MessagesRequest, counted};
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::structured_output::Form;
use baton_proto::v1::tool_choice::Choice;
use baton_proto::v1::{self, ToolCall};
use serde_json::{Value, json};

use crate::support::*;

fn user() -> Value {
    json!([{"role": "user", "content": "x"}])
}

fn body(fields: Value) -> Value {
    let mut body = json!({"messages": user(), "max_tokens": 9});
    fields.as_object().expect("fields").iter().for_each(|(field, value)| body[field] = value.clone());
    body
}

fn messages(fields: Value) -> Call {
    read::<MessagesRequest>(body(fields).to_string().as_bytes()).expect("a body").call(&context()).expect("a call")
}

fn bad(fields: Value) -> String {
    let request = read::<MessagesRequest>(body(fields).to_string().as_bytes());
    request.and_then(|request| request.call(&context())).err().expect("a bad request").param
}

#[test]
fn messages_body_becomes_a_request() {
    let call = messages(json!({
        "model": "m", "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        "stop_sequences": ["S"], "top_k": 5, "top_p": 0.5, "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": true}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "baton": {"tbt_slo_ms": 7}, "priority": 3,
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"a": 1}}},
    }));
    let request = &call.requests[0];
    assert_eq!((request.model.as_str(), request.n, request.slo.as_ref().unwrap().tbt_ms), ("m", 1, Some(7.0)));
    assert_eq!(request.priority, 3);
    let sampling = request.sampling.as_ref().unwrap();
    assert_eq!(
        (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens),
        (Some(1.0), Some(5), Some(0.5), Some(9))
    );
    assert_eq!(sampling.stop, ["S"]);
    assert_eq!(form(&call), Some(Form::JsonSchema(r#"{"a":1}"#.into())));
    let prompt = prompt(&call);
    assert_eq!((prompt.messages[0].role.as_str(), prompt.messages[0].content.as_str()), ("system", "a\nb"));
    let function = r#"{"name":"f","description":"d","parameters":{"type":"object"},"strict":true}"#;
    assert_eq!(prompt.tools, [format!(r#"{{"type":"function","function":{function}}}"#)]);
    assert_eq!(prompt.tool_choice, Some(v1::ToolChoice { choice: Some(Choice::Required(true)) }));
    assert!(prompt.one_tool_call);
    assert_eq!(prompt.template_variables, r#"{"enable_thinking":true,"reasoning_effort":"high"}"#);
    assert_eq!(call.fields.of("stop"), "stop_sequences");
}

#[test]
fn content_blocks_become_template_messages() {
    let call = messages(json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "I'll"},
            {"type": "text", "text": " look"},
            {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": [1]}},
            {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "well?"},
            {"type": "tool_result", "tool_use_id": "c0", "content": "42"},
            {"type": "tool_result", "tool_use_id": "c1", "is_error": true, "content": [{"type": "text", "text": "no"}]},
        ]},
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
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
            message("user", "a\nb"),
            v1::ChatMessage {
                reasoning: "hm".into(),
                tool_calls: vec![call_of("c0", "f", r#"{"a":[1]}"#), call_of("c1", "g", "{}")],
                ..message("assistant", "I'll look")
            },
            said("c0", "f", "42"),
            said("c1", "g", "Error: no"),
            message("user", "well?"),
            message("system", "be brief"),
        ]
    );
}

#[test]
fn unsupported_messages_values_are_refused_by_param() {
    let blocks = |role: &str, block: Value| bad(json!({"messages": [{"role": role, "content": [block]}]}));
    assert_eq!(bad(json!({"max_tokens": null})), "max_tokens");
    assert_eq!(bad(json!({"messages": [], "system": "x"})), "messages");
    assert_eq!(bad(json!({ "context_management": {"edits": [{"keep": "all"}]} })), "context_management.edits[0].type");
    for nothing in [json!(null), json!({}), json!({"edits": []})] {
        messages(json!({ "context_management": nothing }));
    }
    assert_eq!(bad(json!({"colour": 1})), "colour");
    assert_eq!(bad(json!({"messages": [{"role": "tool", "content": "x"}]})), "messages[0].role");
    let image = json!({"type": "image", "source": {"type": "url", "url": "x"}});
    assert_eq!(blocks("user", image.clone()), "messages[0].content[0].type");
    assert_eq!(blocks("assistant", json!({"type": "tool_results", "id": "x"})), "messages[0].content[0].type");
    assert_eq!(
        blocks("user", json!({"type": "tool_use", "id": "x", "name": "f", "input": {}})),
        "messages[0].content[0].type"
    );
    let pdf = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}});
    assert_eq!(blocks("user", pdf), "messages[0].content[0].type");
    let document = json!({"type": "document", "source": {"type": "text"}});
    assert_eq!(blocks("user", document), "messages[0].content[0].source.data");
    assert_eq!(blocks("user", json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id");
    assert_eq!(
        blocks("assistant", json!({"type": "tool_use", "id": "x", "name": "f", "input": [1]})),
        "messages[0].content[0].input"
    );
    assert_eq!(bad(json!({"tools": [{"type": "other", "name": "f", "input_schema": {}}]})), "tools[0].type");
    assert_eq!(bad(json!({"tools": [{"type": "function", "function": {"name": "f"}}]})), "tools[0].type");
    assert_eq!(bad(json!({"tools": [{"name": "f"}]})), "tools[0].input_schema");
    assert_eq!(bad(json!({"tool_choice": {"type": "any"}})), "tool_choice");
    assert_eq!(bad(json!({"tool_choice": {"type": "tool"}})), "tool_choice.name");
    assert_eq!(bad(json!({"tool_choice": {"type": "some"}})), "tool_choice.type");
    assert_eq!(bad(json!({"thinking": {"type": "between_tools"}})), "thinking.type");
    assert_eq!(bad(json!({"output_config": {"format": {"type": "xml"}}})), "output_config.format.type");
    assert_eq!(bad(json!({"output_format": {"type": "json_schema"}})), "output_format.schema");
    assert_eq!(bad(json!({"system": [{"type": "image"}]})), "system[0].type");
    assert_eq!(bad(json!({"system": {"text": "x"}})), "system");
    assert_eq!(bad(json!({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]})), "mcp_servers[0]");
    assert_eq!(bad(json!({"max_tokens": 0})), "max_tokens");
}

#[test]
fn count_tokens_needs_no_max_tokens() {
    let mut request = read::<MessagesRequest>(json!({ "messages": user() }).to_string().as_bytes()).expect("a body");
    assert_eq!(request.prompt().expect("a prompt").messages.len(), 1);
    assert_eq!(counted(5), json!({"input_tokens": 5}));
}

fn usage(cached: bool, output_tokens: u32) -> Value {
    let (input, read) = if cached { (6, 3) } else { (9, 0) };
    json!({
        "input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": read,
        "output_tokens": output_tokens,
    })
}

#[test]
fn message_has_its_content_blocks_in_order() {
    let answer = whole(messages(json!({})), thought_said_and_called());
    assert_eq!(
        answer,
        json!({
            "id": "msg_id", "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "hmm.", "signature": ""},
                {"type": "text", "text": "I'll look"},
                {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
            ],
            "stop_reason": "tool_use", "stop_sequence": null, "usage": usage(true, 4),
        })
    );
}

#[test]
fn message_stop_reason_follows_finish_reason() {
    let why = |reason: &str, stop_sequence: &str| {
        let finished =
            v1::Finished { finish_reason: reason.into(), stop_sequence: stop_sequence.into(), ..Default::default() };
        let answer = whole(messages(json!({})), vec![accepted(), response(Event::Finished(Box::new(finished)))]);
        assert_eq!(answer["content"], json!([]));
        (answer["stop_reason"].clone(), answer["stop_sequence"].clone())
    };
    assert_eq!(why("stop", ""), (json!("end_turn"), Value::Null));
    assert_eq!(why("stop", "S"), (json!("stop_sequence"), json!("S")));
    assert_eq!(why("length", ""), (json!("max_tokens"), Value::Null));
    // What a call was to be is not known.
    let cut = v1::Delta { tool_calls: vec![call_piece(0, "c", "f", "{\"a\":")], ..Default::default() };
    let answer = whole(messages(json!({})), vec![accepted(), delta(0, cut), finished(0, "length")]);
    assert_eq!(answer["content"][0]["input"], json!({}));
}

#[test]
fn messages_stream_opens_and_closes_each_content_block() {
    let events = named(messages(json!({"stream": true})), thought_said_and_called());
    let block =
        |index: u32, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
    let grew = |index: u32, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let stop = |index: u32| json!({"type": "content_block_stop", "index": index});
    let thinking = |text: &str| json!({"type": "thinking_delta", "thinking": text});
    let text = |text: &str| json!({"type": "text_delta", "text": text});
    let input = |json: &str| json!({"type": "input_json_delta", "partial_json": json});
    assert_eq!(
        events,
        [
            json!({"type": "message_start", "message": {
                "id": "msg_id", "type": "message", "role": "assistant", "model": "m", "content": [],
                "stop_reason": null, "stop_sequence": null, "usage": usage(false, 0),
            }}),
            block(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
            grew(0, thinking("hm")),
            grew(0, thinking("m.")),
            stop(0),
            block(1, json!({"type": "text", "text": ""})),
            grew(1, text("I'll")),
            grew(1, text(" look")),
            stop(1),
            block(2, json!({"type": "tool_use", "id": "c0", "name": "f", "input": {}})),
            grew(2, input("{\"a\":")),
            grew(2, input(" 1}")),
            stop(2),
            block(3, json!({"type": "tool_use", "id": "c1", "name": "g", "input": {}})),
            grew(3, input("{}")),
            stop(3),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": usage(true, 4)}),
            json!({"type": "message_stop"}),
        ]
    );
}

#[test]
fn messages_stream_error_is_an_event_named_error() {
    let chunk = messages(json!({"stream": true})).answer.failed(&Failure::new(500, "a bug"));
    let error = json!({"type": "error", "error": {"type": "api_error", "message": "a bug"}});
    assert_eq!((chunk.event, chunk.data), (Some("error"), error.to_string()));
}

#[test]
fn answer_goes_on_with_the_assistants_last_message() {
    let goes_on = |messages: Value| match &self::messages(json!({"messages": messages})).requests[0].prompt {
        Some(Prompt::Messages(prompt)) => prompt.continue_final_message,
        other => panic!("{other:?}"),
    };
    let question = json!({"role": "user", "content": "x"});
    assert!(goes_on(json!([question, {"role": "assistant", "content": "The answer is ("}])));
    assert!(!goes_on(json!([question])));
}
