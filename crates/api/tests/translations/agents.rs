//! The shapes of what agents' clients send first and second: Claude Code 2.1, Codex 0.171, Vercel's
//! AI SDK 6, litellm and langchain. Only the shapes are theirs.

use std::sync::Arc;

use baton_api::{Call, ChatRequest, MessagesRequest, ResponseStore, ResponsesRequest};
use baton_proto::v1;
use baton_proto::v1::structured_output::Form;
use baton_proto::v1::tool_choice::Choice;
use serde_json::{Value, json};

use crate::support::*;

fn schema(property: &str) -> Value {
    let properties = json!({ property: {"type": "string", "description": "what it is"} });
    json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties,
        "required": [property], "additionalProperties": false})
}

fn messages(body: &Value) -> Call {
    read::<MessagesRequest>(body.to_string().as_bytes()).expect("a body").call(&context()).expect("a call")
}

fn responses(body: &Value) -> Call {
    responses_kept(body, &Arc::new(ResponseStore::new(1 << 20, 60)))
}

fn responses_kept(body: &Value, kept: &Arc<ResponseStore>) -> Call {
    read::<ResponsesRequest>(body.to_string().as_bytes()).expect("a body").call(keeping(kept)).expect("a call")
}

fn roles(call: &Call) -> Vec<(&str, &str)> {
    prompt(call).messages.iter().map(|message| (&*message.role, &*message.content)).collect()
}

/// Names of the tools that the model is told.
fn tools(call: &Call) -> Vec<String> {
    let name = |tool: &String| {
        let tool: Value = serde_json::from_str(tool).expect("JSON");
        tool["function"]["name"].as_str().expect("a name").to_owned()
    };
    prompt(call).tools.iter().map(name).collect()
}

/// What a model answers that calls a tool.
fn called(name: &str, arguments: &str) -> Vec<v1::GenerateResponse> {
    let piece = |id: &str, name: &str, arguments: &str| {
        let tool_calls = vec![call_piece(0, id, name, arguments)];
        delta(0, v1::Delta { tool_calls, token_ids: vec![7], ..Default::default() })
    };
    let (head, tail) = arguments.split_at(arguments.len() / 2);
    vec![accepted(), piece("c0", name, ""), piece("", "", head), piece("", "", tail), finished(0, "tool_calls")]
}

fn claude_code(turns: &[Value]) -> Value {
    let ephemeral = json!({"type": "ephemeral"});
    let mut conversation = vec![
        json!({"role": "user", "content": [{"type": "text", "text": "a reminder"},
            {"type": "text", "text": "say hi", "cache_control": ephemeral}]}),
        json!({"role": "system", "content": "about this machine"}),
    ];
    conversation.extend(turns.iter().cloned());
    json!({
        "model": "m", "messages": conversation,
        "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": ephemeral}],
        "tools": [{"name": "Bash", "description": "runs", "input_schema": schema("command")}],
        "metadata": {"user_id": "u"}, "max_tokens": 32000, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "stream": true,
    })
}

#[test]
fn claude_code_bodies_are_served_without_a_warning() {
    let first = claude_code(&[]);
    assert_eq!(left_out::<MessagesRequest>(&first), "");
    let call = messages(&first);
    assert_eq!(roles(&call), [("system", "a\nb"), ("user", "a reminder\nsay hi"), ("system", "about this machine")]);
    assert_eq!(prompt(&call).template_variables, r#"{"enable_thinking":true,"reasoning_effort":"high"}"#);
    let second = claude_code(&[
        json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "c0", "name": "Bash", "input": {"command": "echo hi"}}]}),
        json!({"role": "user", "content": [{"tool_use_id": "c0", "type": "tool_result", "content": "hi", "is_error": false,
            "cache_control": {"type": "ephemeral"}}]}),
    ]);
    assert_eq!(left_out::<MessagesRequest>(&second), "");
    let call = messages(&second);
    let [.., assistant, tool] = prompt(&call).messages.as_slice() else { panic!("{call:?}", call = roles(&call)) };
    assert_eq!((&*assistant.reasoning, &*assistant.tool_calls[0].arguments), ("hm", r#"{"command":"echo hi"}"#));
    assert_eq!((&*tool.role, &*tool.name, &*tool.content), ("tool", "Bash", "hi"));
}

#[test]
fn anthropic_fields_that_ask_nothing_of_the_answer_are_left_out_with_a_warning() {
    let mut body = claude_code(&[]);
    body["context_management"] = json!({"edits": [
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}, "keep": {"type": "tool_uses", "value": 3}},
    ]});
    body["container"] = json!({"skills": []});
    body["mcp_servers"] = json!([]);
    body["tools"].as_array_mut().expect("tools").extend([
        json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "user_location": {"type": "approximate"}}),
        json!({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}),
    ]);
    assert_eq!(
        left_out::<MessagesRequest>(&body),
        "tools[1]: the tool 'web_search_20250305' is left out: only tools that the client describes are served; \
         tools[2]: the tool 'text_editor_20250728' is left out: only tools that the client describes are served; \
         context_management.edits[0]: the edit 'clear_tool_uses_20250919' is not done here; container: is not done here"
    );
    assert_eq!(tools(&messages(&body)), ["Bash"]);
}

#[test]
fn documents_of_text_and_search_results_are_text() {
    let found = json!({"type": "search_result", "source": "https://a.example", "title": "A", "content": [{"type": "text", "text": "found"}],
        "citations": {"enabled": true}});
    let text = json!({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "all of it"},
        "title": "T", "context": "C", "citations": {"enabled": true}, "cache_control": {"type": "ephemeral"}});
    let blocks = json!({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]}});
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}});
    let body = json!({"max_tokens": 9, "messages": [
        {"role": "user", "content": [text, blocks, found]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "x", "title": "y"}]},
            {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"type": "web_fetch_tool_result_error", "error_code": "x"}},
            {"type": "text", "text": "hm", "citations": []},
            {"type": "tool_use", "id": "c0", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "text", "text": "see"}, image, found]}]},
    ]});
    let call = messages(&body);
    assert_eq!(
        roles(&call),
        [
            ("user", "T\nC\nall of it\np\nq\nA\nhttps://a.example\nfound"),
            ("assistant", "hm"),
            ("tool", "see\n[image: not shown, this model reads text alone]\nA\nhttps://a.example\nfound"),
        ]
    );
    assert_eq!(
        left_out::<MessagesRequest>(&body),
        "messages[1].content[0]: the block 'server_tool_use' is left out; \
         messages[1].content[1]: the block 'web_search_tool_result' is left out; \
         messages[1].content[2]: the block 'web_fetch_tool_result' is left out; \
         messages[2].content[0].content[1]: 'image' is left out: the model reads text alone"
    );
}

fn codex(turns: &[Value]) -> Value {
    let said = |role: &str, text: &str| json!({"type": "message", "id": "msg_0f", "role": role, "content": [{"type": "input_text", "text": text}]});
    let function = |name: &str, property: &str| json!({"type": "function", "name": name, "description": "does", "strict": false, "parameters": schema(property)});
    let patch = json!({"type": "grammar", "syntax": "lark", "definition": "start: /.+/"});
    let mut input = vec![said("developer", "be brief"), said("user", "say hi")];
    input.extend(turns.iter().cloned());
    json!({
        "model": "m", "stream": true, "input": input,
        "tools": [
            function("exec_command", "cmd"), function("wait", "for"),
            {"type": "namespace", "name": "agents_v1", "description": "others", "tools": [function("close", "target"), function("wait", "targets")]},
            {"type": "custom", "name": "apply_patch", "description": "edits", "format": patch},
            {"type": "tool_search", "execution": "client", "description": "finds", "parameters": schema("query")},
            {"type": "web_search", "external_web_access": true, "search_content_types": ["text", "image"]},
        ],
        "tool_choice": "auto", "parallel_tool_calls": true, "reasoning": {"summary": "auto"}, "store": false,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "text": {"verbosity": "low"},
        "client_metadata": {"turn_id": "t"},
    })
}

#[test]
fn codex_namespaces_and_custom_tools_are_functions_to_the_model() {
    let first = codex(&[]);
    let call = responses(&first);
    assert_eq!(roles(&call), [("system", "be brief"), ("user", "say hi")]);
    assert_eq!(tools(&call), ["exec_command", "wait", "apply_patch", "close", "agents_v1__wait"]);
    let patch = &prompt(&call).tools[2];
    assert!(patch.contains("(lark):\\nstart: /.+/") && patch.contains(r#""required":["input"]"#), "{patch}");
    assert_eq!(
        left_out::<ResponsesRequest>(&first),
        "tools[3].format: the model is told the grammar, and is not held to it; \
         tools[4]: the tool 'tool_search' is left out: only tools that the client describes are served; \
         tools[5]: the tool 'web_search' is left out: only tools that the client describes are served"
    );
}

#[test]
fn codex_calls_come_back_under_the_names_that_the_client_knows() {
    let item = |name: &str, arguments: &str| {
        let events = named(responses(&codex(&[])), called(name, arguments));
        let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().expect("a type").to_owned()).collect();
        let done = events.iter().find(|event| event["type"] == "response.output_item.done").expect("an item");
        let last = events.last().expect("an event");
        assert_eq!(last["response"]["output"][0], done["item"]);
        (done["item"].clone(), kinds)
    };
    let target = r#"{"targets": "x"}"#;
    let (waits, _) = item("agents_v1__wait", target);
    assert_eq!(
        waits,
        json!({"type": "function_call", "id": "fc_id_0", "call_id": "c0", "name": "wait", "namespace": "agents_v1",
            "arguments": target, "status": "completed"})
    );
    let (closes, _) = item("close", target);
    assert_eq!((&closes["name"], &closes["namespace"]), (&json!("close"), &json!("agents_v1")));
    let (runs, _) = item("exec_command", target);
    assert_eq!((&runs["name"], runs.get("namespace")), (&json!("exec_command"), None));
    let (patches, kinds) = item("apply_patch", r#"{"input": "a\n\"b\""}"#);
    assert_eq!(
        patches,
        json!({"type": "custom_tool_call", "id": "ctc_id_0", "call_id": "c0", "name": "apply_patch", "input": "a\n\"b\"",
            "status": "completed"})
    );
    assert_eq!(
        kinds[3..6],
        ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "response.output_item.done"]
    );
    let (cut, _) = item("apply_patch", r#"{"input": "a"#);
    assert_eq!(cut["input"], r#"{"input": "a"#, "what came");
}

#[test]
fn codex_second_turn_is_one_conversation() {
    let body = codex(&[
        json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null}),
        json!({"type": "function_call", "status": "completed", "id": "fc_1", "name": "wait", "namespace": "agents_v1", "arguments": "{}", "call_id": "c0"}),
        json!({"type": "function_call_output", "id": "fco_1", "call_id": "c0", "output": [{"type": "input_text", "text": "ok"}, {"type": "input_image", "image_url": "x"}]}),
        json!({"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c1", "name": "apply_patch", "input": "a\nb"}),
        json!({"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "c1", "output": "done"}),
        json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}),
        json!({"type": "local_shell_call", "id": "ls_1", "call_id": "c2", "status": "completed", "action": {"type": "exec", "command": ["ls"]}}),
        json!({"type": "local_shell_call_output", "id": "c2", "output": "a.txt"}),
    ]);
    let call = responses(&body);
    let left_out = left_out::<ResponsesRequest>(&body);
    assert!(left_out.contains("the item 'web_search_call' is left out"), "{left_out}");
    let [_, _, waits, waited, patches, patched, lists, listed] = prompt(&call).messages.as_slice() else {
        panic!("{:?}", prompt(&call).messages)
    };
    assert_eq!((&*waits.reasoning, &*waits.tool_calls[0].name), ("hm", "agents_v1__wait"));
    assert_eq!(
        (&*waited.name, &*waited.content),
        ("agents_v1__wait", "ok\n[input_image: not shown, this model reads text alone]")
    );
    assert_eq!(patches.tool_calls[0].arguments, r#"{"input":"a\nb"}"#);
    assert_eq!((&*patched.name, &*patched.content), ("apply_patch", "done"));
    assert_eq!(lists.tool_calls[0].arguments, r#"{"type":"exec","command":["ls"]}"#);
    assert_eq!((&*listed.name, &*listed.content), ("local_shell", "a.txt"));
}

/// What the AI SDK sends by default: it takes it that the first answer is kept.
fn ai_sdk(input: &[Value]) -> Value {
    json!({"model": "m", "input": input, "tool_choice": "auto",
        "tools": [{"type": "function", "name": "f", "description": "does", "parameters": schema("city")}]})
}

#[test]
fn ai_sdk_second_turn_refers_to_items_of_the_first() {
    let kept = Arc::new(ResponseStore::new(1 << 20, 60));
    let asks = json!({"role": "user", "content": [{"type": "input_text", "text": "well?"}]});
    let first = whole(responses_kept(&ai_sdk(std::slice::from_ref(&asks)), &kept), thought_said_and_called());
    assert_eq!(first["store"], true);
    let id = |index: usize| first["output"][index]["id"].clone();
    let refers = |index: usize| json!({"type": "item_reference", "id": id(index)});
    let output = |call_id: &str| json!({"type": "function_call_output", "call_id": call_id, "output": "42"});
    let second = ai_sdk(&[
        asks,
        refers(0),
        refers(1),
        json!({"type": "function_call", "call_id": "c0", "name": "f", "arguments": "{\"a\": 1}"}),
        json!({"id": id(3)}),
        output("c0"),
        output("c1"),
    ]);
    let call = responses_kept(&second, &kept);
    assert!(call.warnings.is_empty());
    let [_, assistant, first_output, second_output] = prompt(&call).messages.as_slice() else {
        panic!("{:?}", roles(&call))
    };
    assert_eq!((&*assistant.reasoning, &*assistant.content), ("hmm.", "I'll look"));
    let names: Vec<_> = assistant.tool_calls.iter().map(|call| &*call.name).collect();
    assert_eq!((names, &*first_output.name, &*second_output.name), (vec!["f", "g"], "f", "g"));
    // Another conductor has nothing of the first.
    let unknown = |items: &[Value]| {
        let body = read::<ResponsesRequest>(ai_sdk(items).to_string().as_bytes()).expect("a body");
        body.call(context())
    };
    let error = unknown(&[refers(0), refers(1)]).err().expect("an error");
    assert_eq!(error.param, "input[1].id");
    assert!(error.problem.contains("send store: false"), "{}", error.problem);
    let warned = unknown(&[refers(0)]).expect("a call").warnings.line();
    assert_eq!(warned, "input[0]: this reasoning is kept no longer, and is left out");
}

#[test]
fn previous_response_is_what_a_conversation_goes_on_from() {
    let kept = Arc::new(ResponseStore::new(1 << 20, 60));
    let body = |fields: Value| {
        let mut body = json!({"instructions": "be brief", "input": "a"});
        fields.as_object().expect("fields").iter().for_each(|(field, value)| body[field] = value.clone());
        body
    };
    let first =
        whole(responses_kept(&body(json!({})), &kept), vec![accepted(), said(0, "b", None), finished(0, "stop")]);
    let goes_on = json!({"previous_response_id": first["id"], "input": "c", "instructions": "be long"});
    let call = responses_kept(&body(goes_on), &kept);
    assert_eq!(roles(&call), [("system", "be long"), ("user", "a"), ("assistant", "b"), ("user", "c")]);
    let second = whole(call, vec![accepted(), said(0, "d", None), finished(0, "stop")]);
    assert_eq!(second["previous_response_id"], "resp_id");
    let unkept = Arc::new(ResponseStore::new(1 << 20, 60));
    let answer = whole(
        responses_kept(&body(json!({"store": false})), &unkept),
        vec![accepted(), said(0, "b", None), finished(0, "stop")],
    );
    assert_eq!(answer["store"], false);
    let goes_on = body(json!({"previous_response_id": answer["id"]}));
    let request = read::<ResponsesRequest>(goes_on.to_string().as_bytes()).expect("a body");
    assert_eq!(request.call(keeping(&unkept)).err().expect("an error").param, "previous_response_id");
}

#[test]
fn unknown_fields_inside_messages_parts_tools_and_calls_are_left_out_with_a_warning() {
    let unknown = "is not known, and was left out";
    let body = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "size": 1}], "mood": "good", "nothing": null},
        {"role": "assistant", "content": "b", "tool_calls": [
            {"id": "c0", "type": "function", "colour": 1, "function": {"name": "f", "arguments": "{}", "x": 1}}]},
    ], "tools": [{"type": "function", "y": 1, "function": {"name": "f", "z": 1}}]});
    let paths = [
        "messages[0].content[0].size",
        "messages[0].mood",
        "messages[1].tool_calls[0].colour",
        "messages[1].tool_calls[0].function.x",
        "tools[0].y",
        "tools[0].function.z",
    ];
    let mut warned: Vec<_> = left_out::<ChatRequest>(&body).split("; ").map(str::to_owned).collect();
    warned.sort();
    let mut expected: Vec<_> = paths.iter().map(|path| format!("{path}: {unknown}")).collect();
    expected.sort();
    assert_eq!(warned, expected);
    assert_eq!(chat(body).requests.len(), 1);
    let item = json!({"input": [{"role": "user", "content": "x", "call_id": "c", "size": 1}], "tools": [{"type": "function", "name": "f", "y": 1}]});
    assert_eq!(
        left_out::<ResponsesRequest>(&item),
        format!(
            "input[0].size: {unknown}; input[0].call_id: is no field of message, and was left out; tools[0].y: {unknown}"
        )
    );
    let block = json!({"max_tokens": 9, "messages": [{"role": "user", "x": 1, "content": [{"type": "text", "text": "a", "id": "1", "y": 1}]}]});
    assert_eq!(
        left_out::<MessagesRequest>(&block),
        format!(
            "messages[0].x: {unknown}; messages[0].content[0].y: {unknown}; messages[0].content[0].id: is no field of text, and was left out"
        )
    );
}

#[test]
fn parts_of_earlier_messages_are_served_as_text() {
    let call = chat(json!({"messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": null, "refusal": "never", "annotations": [], "audio": null, "function_call": null,
         "provider_specific_fields": {"x": 1}, "reasoning_details": []},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ], "store": true, "metadata": {}, "safety_identifier": "s", "verbosity": "low", "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": true, "service_tier": "auto",
        "web_search_options": {}, "tools": [{"type": "web_search"}]}));
    assert_eq!(roles(&call), [("assistant", "no"), ("assistant", "never"), ("user", "a\nb")]);
    assert_eq!((&*prompt(&call).messages[0].reasoning, prompt(&call).tools.len()), ("hm", 0));
    let refused = json!([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "x"}]}]);
    assert_eq!(roles(&responses(&json!({ "input": refused }))), [("assistant", "nox")]);
}

#[test]
fn malformed_text_part_is_told_what_is_missing() {
    let problem = |body: Value| {
        let bad = read::<ChatRequest>(body.to_string().as_bytes()).and_then(|body| body.call(context()).map(|_| ()));
        let bad = bad.expect_err("a bad body");
        (bad.param, bad.problem)
    };
    let part = |part: Value| problem(json!({"messages": [{"role": "user", "content": [part]}]}));
    let param = "messages[0].content[0]";
    assert_eq!(part(json!({"type": "text"})), (format!("{param}.text"), "is missing".to_owned()));
    assert_eq!(
        part(json!({"type": "txt", "text": "x"})),
        (format!("{param}.type"), "'txt', but only text, refusal or thinking is served here".to_owned())
    );
    let text = json!({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]});
    assert_eq!(roles(&responses(&text)), [("user", "x")]);
}

#[test]
fn image_that_a_tool_returned_is_told_to_the_model() {
    let said = json!([{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": "data:x"}}]);
    let call = json!({"id": "c0", "type": "", "function": {"name": "look", "arguments": {"at": [1, "\u{e4}"]}}});
    let body = json!({"messages": [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"role": "assistant", "tool_calls": [call], "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}, {"type": "text", "text": "m"}], "closed": true},
            {"type": "output_text", "text": "I look"},
        ]},
        {"role": "tool", "tool_call_id": "c0", "content": said},
    ]});
    let call = chat(body.clone());
    assert_eq!(
        roles(&call),
        [
            ("user", "look"),
            ("assistant", "I look"),
            ("tool", "seen\n[image_url: not shown, this model reads text alone]")
        ]
    );
    let assistant = &prompt(&call).messages[1];
    assert_eq!((&*assistant.reasoning, &*assistant.tool_calls[0].arguments), ("hmm", "{\"at\":[1,\"\u{e4}\"]}"));
    assert_eq!(
        left_out::<ChatRequest>(&body),
        "messages[2].content[1]: 'image_url' is left out: the model reads text alone"
    );
}

#[test]
fn older_and_shorter_shapes_of_chats_are_read() {
    let call = json!({"id": "c0", "function": {"name": "now", "arguments": []}});
    let body = |choice: Value| {
        json!({"tools": [tool("now")], "tool_choice": choice, "messages": [
            {"role": "user", "content": ["a", {"text": "b"}]},
            {"role": "assistant", "tool_calls": [call], "content": [
                {"type": "redacted_thinking", "data": "x"}, {"type": "reasoning", "text": "hm"}]},
        ]})
    };
    let auto = chat(body(json!({"type": "auto"})));
    assert_eq!(roles(&auto), [("user", "a\nb"), ("assistant", "")]);
    let assistant = &prompt(&auto).messages[1];
    assert_eq!((&*assistant.reasoning, &*assistant.tool_calls[0].arguments), ("hm", "{}"));
    let choice =
        |kind: &str| prompt(&chat(body(json!({"type": kind})))).tool_choice.as_ref().and_then(|it| it.choice.clone());
    assert_eq!(choice("auto"), None);
    assert_eq!(choice("none"), Some(Choice::None(true)));
    assert_eq!([choice("any"), choice("required")], [Some(Choice::Required(true)), Some(Choice::Required(true))]);
}

#[test]
fn hints_for_other_servers_are_left_out() {
    let body = json!({"messages": [], "cache_prompt": true, "usage": {"include": true}, "provider": {"order": ["x"]}});
    assert_eq!(
        left_out::<ChatRequest>(&body),
        "cache_prompt: is not known, and was left out; usage: is not known, and was left out; \
         provider: is not known, and was left out"
    );
    let inside = json!({"messages": [], "stream": true, "stream_options": {"usage": true}});
    let bad = read::<ChatRequest>(inside.to_string().as_bytes()).unwrap_err();
    assert_eq!(bad.param, "stream_options.usage", "it is a hint in a body alone");
}

#[test]
fn schema_is_taken_where_other_servers_take_it() {
    let schema = json!({"type": "object"});
    for format in [
        json!({"type": "json_object", "schema": schema}),
        json!({"type": "json_schema", "schema": schema}),
        json!({"type": "json_schema", "json_schema": {"schema": schema}}),
    ] {
        let call = chat(json!({"messages": [{"role": "user", "content": "x"}], "response_format": format}));
        assert_eq!(form(&call), Some(Form::JsonSchema(schema.to_string())), "{format}");
    }
}

#[test]
fn empty_list_is_the_schema_of_no_arguments() {
    let function = json!({"name": "now", "parameters": []});
    let say = json!([{"role": "user", "content": "x"}]);
    let chat = chat(json!({"messages": say, "tools": [{"type": "function", "function": function}]}));
    let messages = messages(&json!({"messages": say, "max_tokens": 9, "tools": [{"name": "now", "input_schema": []}]}));
    let responses = responses(&json!({"input": "x", "tools": [{"type": "function", "name": "now", "parameters": []}]}));
    for call in [chat, messages, responses] {
        let tool: Value = serde_json::from_str(&prompt(&call).tools[0]).unwrap();
        assert_eq!(tool["function"]["parameters"], json!({}));
    }
}

#[test]
fn variables_of_the_template_may_be_lists_and_objects() {
    let variables = json!({"languages": ["de", "fr"], "style": {"tone": "dry"}, "enable_thinking": false});
    let body = json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": variables,
        "reasoning_effort": "low"});
    let given: Value = serde_json::from_str(&prompt(&chat(body)).template_variables).unwrap();
    assert_eq!(given["languages"], variables["languages"]);
    assert_eq!((&given["style"]["tone"], &given["reasoning_effort"]), (&json!("dry"), &json!("low")));
}

#[test]
fn built_in_calls_and_their_outputs_are_told() {
    let outcome = json!({"type": "exit", "exit_code": 2});
    let body = json!({"input": [
        {"type": "program_output", "id": "p"},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a\n", "stderr": "no b", "outcome": outcome}]},
        {"type": "apply_patch_call", "call_id": "p", "status": "completed",
            "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "failed", "output": ""},
    ]});
    let call = responses(&body);
    assert_eq!(
        roles(&call),
        [
            ("assistant", ""),
            ("tool", "a\n\nno b\n{\"type\":\"exit\",\"exit_code\":2}"),
            ("assistant", ""),
            ("tool", "failed"),
        ]
    );
    let messages = &prompt(&call).messages;
    let called = |index: usize| (&*messages[index].tool_calls[0].name, &*messages[index].tool_calls[0].arguments);
    assert_eq!(called(0), ("shell", "{\"commands\":[\"ls\"]}"));
    assert_eq!(called(2), ("apply_patch", "{\"type\":\"delete_file\",\"path\":\"a\"}"));
    assert_eq!(left_out::<ResponsesRequest>(&body), "input[0]: the item 'program_output' is left out");
}

#[test]
fn choice_of_a_custom_tool_is_repeated_as_one() {
    let choice = json!({"type": "custom", "name": "sh"});
    let call = responses(&json!({"input": "x", "tools": [{"type": "custom", "name": "sh"}], "tool_choice": choice}));
    assert_eq!(whole(call, brought(false))["tool_choice"], choice);
}

#[test]
fn what_only_anthropics_servers_do_is_left_out_of_messages() {
    let body = json!({"max_tokens": u64::MAX, "fallback_credit_token": "x", "output_config": {"task_budget": {"total": 9}},
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [
            {"type": "fallback"}, {"type": "advisor_tool_result", "content": []}, {"type": "text", "text": "y"}]},
            {"role": "user", "content": "z"}, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t", "name": "now", "input": []}]}]});
    let call = messages(&body);
    assert_eq!(roles(&call), [("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "")]);
    assert_eq!(prompt(&call).messages[3].tool_calls[0].arguments, "{}", "as PHP writes it");
    assert_eq!(call.requests[0].sampling.as_ref().unwrap().max_tokens, Some(u32::MAX));
    assert!(left_out::<MessagesRequest>(&body).contains("output_config.task_budget: is not done here"));
}

#[test]
fn broken_json_is_told_its_line_and_column() {
    for (body, place) in [
        ("{\"messages\": [\n{\"role\": user}]}", "line 2 column 10"),
        ("{\"messages\": [{\"role\": \"user\", \"content\": [", "line 1 column 43"),
        ("{\"messages\": []} x", "line 1 column 18"),
        ("", "line 1 column 0"),
    ] {
        let bad = read::<ChatRequest>(body.as_bytes()).expect_err(body);
        assert!(bad.param == "body" && bad.problem.ends_with(place), "{bad:?}");
    }
}

#[test]
fn choice_of_a_tool_that_is_left_out_is_left_out_too() {
    let own = json!({"name": "f", "input_schema": {"type": "object"}});
    let search = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 5});
    let message = |tools: Value, choice: Value| {
        let messages = json!([{"role": "user", "content": "x"}]);
        let body = json!({"max_tokens": 9, "messages": messages, "tools": tools, "tool_choice": choice});
        let call = read::<MessagesRequest>(body.to_string().as_bytes()).expect("a body").call(&context());
        call.map(|call| prompt(&call).tool_choice.clone())
    };
    let named = json!({"type": "tool", "name": "web_search"});
    assert_eq!(message(json!([search]), named.clone()).ok(), Some(None));
    assert_eq!(message(json!([search]), json!({"type": "any"})).ok(), Some(None));
    assert_eq!(message(json!([own]), named).err().map(|bad| bad.param).as_deref(), Some("tool_choice"));
    let response = |choice: Value| {
        let function = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
        let body = json!({"input": "x", "tools": [function, {"type": "web_search"}], "tool_choice": choice});
        let call = responses(&body);
        (prompt(&call).tool_choice.is_some(), prompt(&call).allowed_tools.clone())
    };
    assert_eq!(response(json!({"type": "web_search"})), (false, vec![]));
    let both = json!([{"type": "function", "name": "f"}, {"type": "web_search"}]);
    assert_eq!(
        response(json!({"type": "allowed_tools", "mode": "auto", "tools": both})),
        (false, vec!["f".to_owned()])
    );
    let hosted = json!([{"type": "web_search"}]);
    assert_eq!(response(json!({"type": "allowed_tools", "mode": "auto", "tools": hosted})), (true, vec![]), "none");
}
