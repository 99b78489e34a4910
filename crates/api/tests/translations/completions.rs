//! OpenAI's completions.

use baton_api::{ChatRequest, CompletionRequest, Context, Failure, TokenizeRequest};
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::structured_output::Form;
use baton_proto::v1::tool_choice::Choice;
use baton_proto::v1::{self, TopLogprob};
use baton_types::SamplingDefaults;
use serde_json::{Value, json};

use crate::support::*;

#[test]
fn completion_body_becomes_a_request() {
    let call = completion(json!({
        "model": "m", "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0.5, "top_k": -1, "seed": -1, "stop": "x",
        "logit_bias": {"7": -100}, "min_tokens": 2, "bad_words": ["no"], "user": {"any": 1}, "baton": {"ttft_slo_ms": 9}, "n": null,
    }));
    assert!(!call.streams && call.requests.len() == 2);
    let request = &call.requests[1];
    assert_eq!(request.prompt, Some(Prompt::TokenIds(v1::TokenIds { ids: vec![3] })));
    let sampling = request.sampling.clone().unwrap();
    assert_eq!(
        (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens),
        (Some(0.5), Some(0), Some(u64::MAX), Some(5))
    );
    assert_eq!(
        (sampling.stop, sampling.logit_bias.get(&7), sampling.min_tokens),
        (vec!["x".to_owned()], Some(&-100.0), 2)
    );
    assert_eq!((sampling.bad_words, request.slo.unwrap().ttft_ms), (vec!["no".to_owned()], Some(9.0)));
    let one = |prompt: Value| completion(json!({ "prompt": prompt })).requests.remove(0).prompt.unwrap();
    assert!(matches!(one(json!("hi")), Prompt::Text(text) if text.text == "hi"));
    assert!(matches!(one(json!([4, 5])), Prompt::TokenIds(ids) if ids.ids == [4, 5]));
    assert!(matches!(one(json!(["hi"])), Prompt::Text(text) if text.text == "hi"));
    assert!(matches!(one(json!([])), Prompt::TokenIds(ids) if ids.ids.is_empty()));
}

#[test]
fn chat_body_becomes_prompt_messages() {
    let call = chat(json!({
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
            {"role": "assistant", "content": null, "reasoning": null, "reasoning_content": "hm", "refusal": null,
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}},
                            {"id": "2", "type": "function", "function": {"name": "g", "arguments": null}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2", "not_known": null},
        ],
        "max_tokens": 3, "max_completion_tokens": 4, "chat_template_kwargs": {"enable_thinking": false},
    }));
    let Some(Prompt::Messages(prompt)) = &call.requests[0].prompt else { panic!("{:?}", call.requests) };
    assert_eq!(prompt.template_variables, r#"{"enable_thinking":false}"#);
    let [system, user, assistant, tool] = prompt.messages.as_slice() else { panic!("{prompt:?}") };
    assert_eq!((system.role.as_str(), user.content.as_str(), user.name.as_str()), ("system", "a\nb", "n"));
    assert_eq!((assistant.content.as_str(), assistant.reasoning.as_str()), ("", "hm"));
    assert_eq!((assistant.tool_calls[0].name.as_str(), tool.tool_call_id.as_str()), ("f", "1"));
    assert_eq!(call.requests[0].sampling.as_ref().unwrap().max_tokens, Some(4), "the newer field goes first");
}

#[test]
fn unsupported_completion_values_are_refused_by_param() {
    let completion = |body: Value| {
        read::<CompletionRequest>(body.to_string().as_bytes()).and_then(|it| it.call(context())).err().unwrap()
    };
    assert_eq!(completion(json!({"prompt": "x", "n": 129})).param, "n");
    assert_eq!(completion(json!({"prompt": vec!["x"; 100], "n": 11})).param, "n");
    assert_eq!(completion(json!({"prompt": ["x", "y"], "n": 65, "echo": true})).param, "n");
    assert_eq!(completion(json!({"prompt": "x", "n": 3, "best_of": 2})).param, "best_of");
    assert_eq!(completion(json!({"prompt": "x", "best_of": 2, "stream": true})).param, "best_of");
    assert_eq!(completion(json!({"prompt": "x", "suffix": "y"})).param, "suffix");
    assert_eq!(completion(json!({"prompt": "x", "model": "m".repeat(70_000)})).param, "model");
    assert_eq!(completion(json!({"prompt": "x", "top_k": -2})).param, "top_k");
    assert_eq!(completion(json!({"prompt": "x", "logit_bias": {"a": 1}})).param, "logit_bias.a");
    assert_eq!(completion(json!({"prompt": "x", "stream_options": {}})).param, "stream_options");
    let chat = |field: &str, value: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body[field] = value;
        let request = read::<ChatRequest>(body.to_string().as_bytes());
        request.and_then(|request| request.call(context())).err().unwrap().param
    };
    assert_eq!(chat("tools", json!([{"type": "function"}])), "tools[0].function");
    assert_eq!(chat("tools", json!([{"type": "custom", "custom": {"name": "x"}}])), "tools[0].type");
    assert_eq!(chat("tools", json!([tool("a b")])), "tools[0].function.name");
    assert_eq!(chat("tools", json!([tool("a"), tool("a")])), "tools[1].function.name");
    assert_eq!(chat("tool_choice", json!("required")), "tool_choice");
    assert_eq!(chat("tool_choice", json!("some")), "tool_choice");
    assert_eq!(chat("tool_choice", json!({"type": "function", "function": {"name": "f"}})), "tool_choice");
    assert_eq!(chat("tool_choice", json!({"type": "allowed_tools"})), "tool_choice.allowed_tools");
    assert_eq!(chat("tool_choice", json!({"type": "custom"})), "tool_choice");
    let allowed = |mode: &str, tools: Value| {
        chat("tool_choice", json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}))
    };
    let named = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(allowed("auto", json!([])), "tool_choice.allowed_tools.tools");
    assert_eq!(allowed("auto", json!([{"type": "mcp"}])), "tool_choice");
    assert_eq!(allowed("some", named.clone()), "tool_choice.allowed_tools.mode");
    assert_eq!(allowed("auto", named), "tool_choice", "there is no tool of that name");
    assert_eq!(chat("response_format", json!({"type": "xml"})), "response_format.type");
    assert_eq!(chat("response_format", json!({"type": "text", "x": 1})), "response_format.x");
    assert_eq!(chat("response_format", json!({"type": "json_schema"})), "response_format.json_schema");
    let nameless = json!({"type": "json_schema", "json_schema": {"name": "", "schema": {}}});
    assert_eq!(chat("response_format", nameless), "response_format.json_schema.name");
    assert_eq!(chat("structured_outputs", json!({})), "structured_outputs");
    assert_eq!(chat("structured_outputs", json!({"regex": "a", "json_object": true})), "structured_outputs");
    assert_eq!(chat("structured_outputs", json!({"json": 1})), "structured_outputs.json");
    assert_eq!(chat("structured_outputs", json!({"json": false})), "structured_outputs.json");
    assert_eq!(chat("reasoning_effort", json!("huge")), "reasoning_effort");
    assert_eq!(chat("n", json!(0)), "n");
    assert_eq!(chat("max_tokens", json!(0)), "max_tokens");
    assert_eq!(chat("max_completion_tokens", json!(0)), "max_completion_tokens");
    assert_eq!(chat("modalities", json!(["audio"])), "modalities");
    assert_eq!(chat("top_logprobs", json!(2)), "top_logprobs");
    assert_eq!(
        chat("messages", json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
        "messages[0].content[0].type"
    );
    let call = json!({"id": "1", "function": {"name": "f", "arguments": [1]}});
    assert_eq!(
        chat("messages", json!([{"role": "assistant", "tool_calls": [call]}])),
        "messages[0].tool_calls[0].function.arguments"
    );
    assert_eq!(chat("chat_template_kwargs", json!({"a": vec![1; 9000]})), "chat_template_kwargs.a");
    assert_eq!(chat("response_format", json!({"type": "text", "schema": {}})), "response_format.schema");
    let call = json!({"id": "1", "type": "custom", "custom": {}});
    assert_eq!(
        chat("messages", json!([{"role": "assistant", "tool_calls": [call]}])),
        "messages[0].tool_calls[0].type"
    );
}

#[test]
fn tool_schema_and_document_json_is_bounded() {
    let chat = |field: &str, value: String| {
        let body = format!(r#"{{"messages": [], "{field}": {value}}}"#);
        read::<ChatRequest>(body.as_bytes()).unwrap_err().param
    };
    let long = json!({"a": "x".repeat(70_000)}).to_string();
    let deep = format!("{{\"a\": {}{}}}", "[".repeat(5000), "]".repeat(5000));
    for schema in [long, deep, "[1]".to_owned()] {
        let tool = format!(r#"[{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]"#);
        assert_eq!(chat("tools", tool), "tools[0].function.parameters");
        let format = format!(r#"{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}"#);
        assert_eq!(chat("response_format", format), "response_format.json_schema.schema");
    }
    for document in ["[]".to_owned(), json!({"text": "x".repeat(5 << 20)}).to_string()] {
        assert_eq!(chat("documents", format!("[{document}]")), "documents[0]");
    }
}

#[test]
fn completion_logprobs_are_parallel_lists() {
    let call = completion(json!({"prompt": "x", "logprobs": 1}));
    let body = whole(call, brought(true));
    assert_eq!(
        (&body["id"], &body["object"], &body["created"]),
        (&json!("cmpl-id"), &json!("text_completion"), &json!(7))
    );
    let choice = &body["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abc"), &json!("stop")));
    assert_eq!(
        choice["logprobs"],
        json!({
            "tokens": ["ab", "c"], "token_logprobs": [-1.0, -2.0], "text_offset": [0, 2],
            "top_logprobs": [{"z": -0.5, "ab": -1.0}, {"z": -0.5, "c": -2.0}],
        })
    );
    assert_eq!(body["usage"]["total_tokens"], 4);
}

#[test]
fn completion_echo_is_the_prompt_with_its_logprobs() {
    let scored = || {
        let positions = vec![logprobs("<2>", -3.0), logprobs("ab", -1.0)];
        let mut responses = brought(true);
        responses.insert(1, response(Event::PromptLogprobs(v1::PromptLogprobs { positions })));
        responses
    };
    let both = whole(completion(json!({"prompt": [1, 2], "logprobs": 1, "echo": true})), scored());
    assert_eq!(both["choices"][0]["text"], "<1><2>abc");
    assert_eq!(both["choices"][0]["logprobs"]["tokens"], json!(["<1>", "<2>", "ab", "c"]));
    assert_eq!(both["choices"][0]["logprobs"]["token_logprobs"], json!([null, -3.0, -1.0, -2.0]));
    assert_eq!(both["choices"][0]["logprobs"]["text_offset"], json!([0, 3, 6, 8]));
    let call = completion(json!({"prompt": [1, 2], "logprobs": 1, "echo": true, "max_tokens": 0}));
    assert_eq!(call.requests[0].sampling.as_ref().unwrap().max_tokens, Some(1));
    let scoring = whole(call, scored());
    assert_eq!(
        (&scoring["choices"][0]["text"], &scoring["choices"][0]["finish_reason"]),
        (&json!("<1><2>"), &json!("length"))
    );
    assert_eq!(scoring["choices"][0]["logprobs"]["tokens"], json!(["<1>", "<2>"]));
    assert_eq!(scoring["usage"]["completion_tokens"], 0, "the client did not ask for the one that was drawn");
    let text = whole(completion(json!({"prompt": "hi ", "echo": true})), brought(false));
    assert_eq!((&text["choices"][0]["text"], &text["choices"][0]["logprobs"]), (&json!("hi abc"), &Value::Null));
}

#[test]
fn completion_stream_ends_with_usage() {
    let plain = streamed(completion(json!({"prompt": "x", "stream": true})), brought(false));
    assert_eq!(plain.len(), 3);
    assert_eq!(
        (&plain[2]["choices"][0]["finish_reason"], &plain[2]["usage"]["completion_tokens"]),
        (&json!("stop"), &json!(2))
    );
    let never = json!({"stream": true, "prompt": "x", "stream_options": {"include_usage": false}});
    let never = streamed(completion(never), brought(false));
    assert!(never.len() == 3 && never.iter().all(|chunk| chunk.get("usage").is_none()), "{never:?}");
    let options = json!({"include_usage": true, "include_obfuscation": false});
    let asked = streamed(completion(json!({"prompt": "x", "stream": true, "stream_options": options})), brought(false));
    assert_eq!((asked.len(), &asked[0]["usage"], &asked[3]["choices"]), (4, &Value::Null, &json!([])));
    assert_eq!(asked[3]["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
}

#[test]
fn empty_stream_chunks_are_not_sent() {
    let responses = |logprob| vec![accepted(), said(0, "", logprob), said(0, "a", None), finished(0, "stop")];
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let user = json!([{"role": "user", "content": "x"}]);
    let chat = |fields: Value| {
        let mut body = json!({"messages": user, "stream": true});
        fields.as_object().unwrap().iter().for_each(|(field, value)| body[field] = value.clone());
        chat(body)
    };
    assert_eq!(streamed(chat(json!({})), responses(None)).len(), 3, "the role, the text and the end");
    assert_eq!(streamed(chat(json!({"stream_options": options})), responses(None)).len(), 5, "and usage");
    let completion = |body: Value| streamed(completion(body), responses(Some(-1.0)));
    assert_eq!(completion(json!({"prompt": "x", "stream": true})).len(), 3, "its log-probability comes with its text");
    let asked = completion(json!({"prompt": "x", "stream": true, "stream_options": options}));
    assert_eq!(asked.len(), 4);
}

#[test]
fn stop_token_is_left_out_of_chat_logprobs() {
    let end = said(0, "", Some(-3.0));
    let responses = || vec![accepted(), said(0, "a", Some(-1.0)), end.clone(), finished(0, "stop")];
    let body = json!({"messages": [], "logprobs": true});
    let content = whole(chat(body), responses())["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(content.as_array().unwrap().iter().map(|token| &token["token"]).collect::<Vec<_>>(), ["a"]);
    let chunks = streamed(chat(json!({"messages": [], "logprobs": true, "stream": true})), responses());
    assert_eq!(chunks.len(), 3);
    let logprobs =
        whole(completion(json!({"prompt": "x", "logprobs": 1})), responses())["choices"][0]["logprobs"].clone();
    assert_eq!((&logprobs["tokens"], &logprobs["token_logprobs"]), (&json!(["a", ""]), &json!([-1.0, -3.0])));
    assert_eq!(logprobs["text_offset"], json!([0, 1]), "clients that score prompts drop the last entry");
}

#[test]
fn chat_stream_sends_its_role_once_and_then_text() {
    let user = json!([{"role": "user", "content": "x"}]);
    let body = json!({"messages": user, "stream": true, "logprobs": true, "top_logprobs": 1});
    let chunks = streamed(chat(body), brought(true));
    let deltas: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    assert_eq!(
        deltas,
        [json!({"role": "assistant", "content": ""}), json!({"content": "ab"}), json!({"content": "c"}), json!({})]
    );
    assert!(chunks.iter().all(|chunk| chunk["id"] == "chatcmpl-id" && chunk["object"] == "chat.completion.chunk"));
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "stop");
    let of_ab = &chunks[1]["choices"][0]["logprobs"]["content"][0];
    assert_eq!((&of_ab["token"], &of_ab["bytes"]), (&json!("ab"), &json!([97, 98])));
    assert_eq!(of_ab["top_logprobs"][0]["token"], "z");
    let whole = whole(chat(json!({"messages": user})), brought(false));
    assert_eq!(whole["choices"][0]["message"], json!({"role": "assistant", "content": "abc", "refusal": null}));
    assert_eq!((&whole["choices"][0]["logprobs"], &whole["usage"]["prompt_tokens"]), (&Value::Null, &json!(2)));
}

#[test]
fn tokenize_request_takes_text_or_messages() {
    let prompt = |body: Value| read::<TokenizeRequest>(body.to_string().as_bytes()).unwrap().prompt();
    assert!(matches!(prompt(json!({"prompt": "x"})), Ok((Prompt::Text(_), false))));
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "return_token_strs": true});
    assert!(matches!(prompt(chat), Ok((Prompt::Messages(_), true))));
    assert_eq!(prompt(json!({})).unwrap_err().param, "prompt");
}

#[test]
fn top_logprobs_with_equal_text_are_all_listed() {
    let mut responses = brought(true);
    let Some(Event::Delta(delta)) = &mut responses[1].event else { panic!("{responses:?}") };
    let top = |token_id, text: &str, logprob| TopLogprob { token_id, logprob, text: text.into(), ..Default::default() };
    delta.logprobs[0].top = vec![top(5, "\u{fffd}", -0.25), top(6, "\u{fffd}", -0.5), top(7, "ab", f32::NEG_INFINITY)];
    let body = whole(completion(json!({"prompt": "x", "logprobs": 3})), responses);
    assert_eq!(
        body["choices"][0]["logprobs"]["top_logprobs"][0],
        json!({"\u{fffd}": -0.25, "token_id:6": -0.5, "ab": -9999.0, "token_id:0": -1.0})
    );
}

#[test]
fn openai_stream_error_is_an_event_without_name() {
    let mut call = chat(json!({"messages": [], "stream": true}));
    let chunk = call.answer.failed(&Failure::new(503, "no node is ready"));
    let error = json!({"error": {"message": "no node is ready", "type": "unavailable", "param": null, "code": null}});
    assert_eq!((chunk.event, chunk.data), (None, error.to_string()));
}

#[test]
fn conductor_error_fields_get_openai_names() {
    let old = chat(json!({"messages": [], "max_tokens": 1})).fields;
    let new = chat(json!({"messages": [], "max_completion_tokens": 1})).fields;
    assert_eq!((old.of("max_tokens"), new.of("max_tokens")), ("max_tokens", "max_completion_tokens"));
    assert_eq!((new.of("prompt"), new.of("logprobs"), new.of("stop")), ("messages", "top_logprobs", "stop"));
    assert_eq!(completion(json!({"prompt": "x"})).fields.of("token_ids"), "prompt");
    let outputs = completion(json!({"prompt": "x", "structured_outputs": {"regex": "a"}, "best_of": 2})).fields;
    assert_eq!((outputs.of("structured_output"), outputs.of("n")), ("structured_outputs", "best_of"));
}

#[test]
fn chat_tools_enter_the_prompt_verbatim() {
    let parameters = r#"{"type": "object",  "properties": {"b": {}, "a": {}}}"#;
    let body = format!(
        r#"{{"messages": [{{"role": "user", "content": "x"}}], "parallel_tool_calls": false, "reasoning_effort": "low",
            "documents": [{{"title": "t",  "text": "d"}}], "tool_choice": {{"type": "function", "function": {{"name": "f"}}}},
            "tools": [{{"type": "function", "function": {{"name": "f", "description": "d", "parameters": {parameters}}}}}]}}"#
    );
    let call = read::<ChatRequest>(body.as_bytes()).expect("a body").call(context()).expect("a call");
    let prompt = prompt(&call);
    let tool =
        format!(r#"{{"type":"function","function":{{"name":"f","description":"d","parameters":{parameters}}}}}"#);
    assert_eq!((&prompt.tools, &prompt.documents), (&vec![tool], &vec![r#"{"title": "t",  "text": "d"}"#.to_owned()]));
    assert_eq!(prompt.tool_choice, Some(v1::ToolChoice { choice: Some(Choice::Name("f".into())) }));
    assert!(prompt.one_tool_call);
    assert_eq!(prompt.template_variables, r#"{"reasoning_effort":"low"}"#);
    let choice = |choice: &str| {
        let call = chat(json!({"messages": [], "tools": [crate::support::tool("f")], "tool_choice": choice}));
        crate::support::prompt(&call).tool_choice.clone().map(|choice| choice.choice.unwrap())
    };
    assert_eq!(choice("auto"), None);
    assert_eq!((choice("none"), choice("required")), (Some(Choice::None(true)), Some(Choice::Required(true))));
}

#[test]
fn chat_allowed_tools_keep_all_tools_in_the_prompt() {
    let of = |mode: &str| {
        let allowed = json!({"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]});
        let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
        let call = chat(json!({"messages": [], "tools": [tool("f"), tool("g")], "tool_choice": choice}));
        let prompt = prompt(&call);
        assert_eq!((prompt.tools.len(), &prompt.allowed_tools), (2, &vec!["g".to_owned()]));
        prompt.tool_choice.clone().and_then(|choice| choice.choice)
    };
    assert_eq!((of("auto"), of("required")), (None, Some(Choice::Required(true))));
}

#[test]
fn integer_fields_accept_a_fraction_of_zero() {
    let call = chat(json!({"messages": [], "max_tokens": 5.0, "n": 2.0, "seed": -1.0, "top_k": 3.0, "priority": -2.0}));
    let request = &call.requests[0];
    let sampling = request.sampling.as_ref().unwrap();
    assert_eq!((sampling.max_tokens, sampling.seed, sampling.top_k), (Some(5), Some(u64::MAX), Some(3)));
    assert_eq!((request.n, request.priority), (2, -2));
}

#[test]
fn neutral_values_of_unsupported_fields_are_accepted() {
    let neutral = json!({
        "skip_special_tokens": true, "spaces_between_special_tokens": true, "include_stop_str_in_output": false,
        "use_beam_search": false, "length_penalty": 1,
    });
    let others = json!({
        "skip_special_tokens": false, "spaces_between_special_tokens": false, "include_stop_str_in_output": true,
        "use_beam_search": true, "length_penalty": 0.5,
    });
    let given = |field: &str, value: &Value| {
        let body = json!({"messages": [], field: value}).to_string();
        read::<ChatRequest>(body.as_bytes()).map(|_| ()).map_err(|bad| (bad.param, bad.problem))
    };
    for (field, value) in neutral.as_object().unwrap() {
        assert_eq!(given(field, value), Ok(()));
        let (param, problem) = given(field, &others[field]).unwrap_err();
        assert!(param == *field && problem.ends_with("is served here"), "{param}: {problem}");
    }
}

#[test]
fn response_format_and_structured_outputs_become_a_form() {
    let of = |field: &str, value: Value| form(&chat(json!({"messages": [], field: value})));
    assert_eq!(of("response_format", json!({"type": "text"})), None);
    assert_eq!(of("response_format", json!({"type": "json_object"})), Some(Form::JsonObject(true)));
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": true}});
    assert_eq!(of("response_format", schema), Some(Form::StrictJsonSchema(r#"{"type":"object"}"#.into())));
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": false}});
    assert_eq!(of("response_format", schema), Some(Form::JsonSchema("{}".into())));
    assert_eq!(of("structured_outputs", json!({"json": {"a": 1}})), Some(Form::JsonSchema(r#"{"a":1}"#.into())));
    assert_eq!(of("structured_outputs", json!({"json": "{\"a\": 1}"})), Some(Form::JsonSchema(r#"{"a": 1}"#.into())));
    assert_eq!(of("structured_outputs", json!({"json": true})), Some(Form::JsonSchema("true".into())), "any JSON");
    assert_eq!(of("structured_outputs", json!({"regex": "a+"})), Some(Form::Regex("a+".into())));
    assert_eq!(
        of("structured_outputs", json!({"grammar": "g", "json_object": false})),
        Some(Form::Grammar("g".into()))
    );
    let choices = Form::Choices(v1::Choices { texts: vec!["a".into(), "b".into()] });
    assert_eq!(of("structured_outputs", json!({"choice": ["a", "b"]})), Some(choices));
    assert_eq!(
        form(&completion(json!({"prompt": "x", "response_format": {"type": "json_object"}}))),
        Some(Form::JsonObject(true))
    );
}

#[test]
fn chat_stream_sends_tool_call_ids_and_names_once() {
    let chunks =
        streamed(chat(json!({"messages": [], "tools": [tool("f")], "stream": true})), thought_said_and_called());
    let deltas: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    assert_eq!(
        deltas,
        [
            json!({"role": "assistant", "content": ""}),
            json!({"reasoning_content": "hm"}),
            json!({"reasoning_content": "m."}),
            json!({"content": "I'll"}),
            json!({"content": " look", "tool_calls":
                [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]}),
            json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"a\":"}}]}),
            json!({"tool_calls": [
                {"index": 0, "function": {"arguments": " 1}"}},
                {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ]}),
            json!({}),
        ]
    );
    assert_eq!(chunks[7]["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn chat_message_has_reasoning_and_tool_calls() {
    let body = whole(chat(json!({"messages": []})), thought_said_and_called());
    let calls = json!([
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]);
    assert_eq!(
        body["choices"][0],
        json!({
            "index": 0, "logprobs": null, "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": "I'll look", "refusal": null, "reasoning_content": "hmm.", "tool_calls": calls},
        })
    );
    assert_eq!(
        body["usage"],
        json!({
            "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2},
        })
    );
    let call = v1::Delta { tool_calls: vec![call_piece(0, "c", "f", "{}")], ..Default::default() };
    let body = whole(chat(json!({"messages": []})), vec![accepted(), delta(0, call), finished(0, "tool_calls")]);
    assert_eq!(body["choices"][0]["message"]["content"], Value::Null);
}

#[test]
fn n_answers_become_choices() {
    let responses =
        || vec![accepted(), said(1, "b", None), said(0, "a", None), finished(1, "length"), finished(0, "stop")];
    let call = chat(json!({"messages": [], "n": 2}));
    assert_eq!(call.requests[0].n, 2);
    let body = whole(call, responses());
    let texts: Vec<_> = body["choices"].as_array().unwrap().iter().map(|c| c["message"]["content"].clone()).collect();
    assert_eq!((texts, &body["choices"][1]["finish_reason"]), (vec![json!("a"), json!("b")], &json!("length")));
    assert_eq!((&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]), (&json!(9), &json!(8)));
    let chunks = streamed(chat(json!({"messages": [], "n": 2, "stream": true})), responses());
    let indexes: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 1, 0, 1, 0], "clients take the first chunk for that of choice 0");
}

#[test]
fn completion_choices_are_numbered_across_prompts() {
    let mut call = completion(json!({"prompt": ["x", "y"], "n": 2, "echo": true, "stream": true}));
    assert_eq!((call.requests.len(), call.requests[1].n), (2, 2));
    let mut chunks = Vec::new();
    for (index, response) in [(1, accepted()), (1, said(0, "a", None)), (1, said(1, "b", None))] {
        chunks.extend(call.answer.take(index, response));
    }
    let chunks: Vec<Value> = chunks.iter().map(|chunk| serde_json::from_str(&chunk.data).unwrap()).collect();
    let told: Vec<_> = chunks.iter().map(|c| (&c["choices"][0]["index"], &c["choices"][0]["text"])).collect();
    assert_eq!(
        told,
        [(&json!(2), &json!("y")), (&json!(3), &json!("y")), (&json!(2), &json!("a")), (&json!(3), &json!("b"))]
    );
}

#[test]
fn best_of_keeps_answers_of_best_mean_logprob() {
    let call = completion(json!({"prompt": "x", "n": 2, "best_of": 3}));
    assert_eq!((call.requests[0].n, call.requests[0].sampling.as_ref().unwrap().logprobs), (3, Some(0)));
    let responses = vec![
        accepted(),
        said(0, "a", Some(-2.0)),
        said(1, "b", Some(-1.0)),
        said(2, "c", Some(-0.25)),
        said(2, "d", Some(-0.5)),
        finished(0, "stop"),
        finished(1, "stop"),
        finished(2, "stop"),
    ];
    let body = whole(call, responses);
    let choices = body["choices"].as_array().unwrap();
    let told: Vec<_> = choices.iter().map(|c| (&c["index"], &c["text"], &c["logprobs"])).collect();
    assert_eq!(told, [(&json!(0), &json!("cd"), &Value::Null), (&json!(1), &json!("b"), &Value::Null)]);
    assert_eq!(body["usage"]["completion_tokens"], 12, "all that were generated");
}

#[test]
fn count_out_of_range_is_told_what_is_taken() {
    let problem = |field: &str, value: Value| {
        let mut body = json!({"messages": []});
        body[field] = value;
        let bad = read::<ChatRequest>(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(bad.param, field);
        bad.problem
    };
    for field in ["max_tokens", "max_completion_tokens"] {
        assert_eq!(problem(field, json!(-5)), "-5, but must be at least 1");
        assert_eq!(problem(field, json!(0)), "0, but must be at least 1");
        assert_eq!(problem(field, json!(5.5)), "5.5, but must be an integer");
    }
    assert_eq!(problem("n", json!(0)), "0, but must be from 1 to 128");
    assert_eq!(problem("n", json!(-1)), "-1, but must be from 1 to 128");
    assert_eq!(problem("top_logprobs", json!(21)), "21, but must be from 0 to 20");
    let completion = |body: Value| {
        let body = read::<CompletionRequest>(body.to_string().as_bytes());
        body.and_then(|body| body.call(context())).err().unwrap().problem
    };
    assert_eq!(completion(json!({"prompt": "x", "max_tokens": -5})), "-5, but must be at least 1, or 0 with echo");
    assert_eq!(completion(json!({"prompt": "x", "max_tokens": 0})), "0, but must be at least 1, or 0 with echo");
    assert_eq!(completion(json!({"prompt": "x", "max_tokens": -5, "echo": true})), "-5, but must be at least 0");
}

#[test]
fn too_large_limit_is_no_limit() {
    for limit in [json!(1_i64 << 40), json!(i64::MAX), json!(u64::MAX), json!(1e12)] {
        let call = chat(json!({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": limit}));
        assert_eq!(call.requests[0].sampling.as_ref().unwrap().max_tokens, Some(u32::MAX), "{limit}");
    }
}

#[test]
fn open_sampling_is_what_the_models_authors_advise() {
    let defaults = SamplingDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        max_tokens: Some(99),
        ..SamplingDefaults::default()
    };
    let sampling = |body: Value| {
        let chat: ChatRequest = read(body.to_string().as_bytes()).expect("a body");
        let call = chat.call(Context { defaults, ..context() }).expect("a call");
        call.requests[0].sampling.clone().expect("sampling")
    };
    let messages = json!([{"role": "user", "content": "x"}]);
    let open = sampling(json!({"messages": messages}));
    assert_eq!((open.temperature, open.top_k, open.top_p), (Some(0.6), Some(20), Some(0.95)));
    assert_eq!((open.min_p, open.max_tokens), (None, Some(99)));
    let own = sampling(json!({"messages": messages, "temperature": 0, "top_k": 0, "top_p": 1, "max_tokens": 5000}));
    assert_eq!((own.temperature, own.top_k, own.top_p), (Some(0.0), Some(0), Some(1.0)));
    assert_eq!(own.max_tokens, Some(5000));
}

#[test]
fn chat_goes_on_with_its_last_message_if_it_says_so() {
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "{\"a\":"}]);
    let call = |fields: Value| {
        let mut body = fields;
        body["messages"] = messages.clone();
        let chat: ChatRequest = read(body.to_string().as_bytes()).expect("a body");
        chat.call(context()).map(|call| match &call.requests[0].prompt {
            Some(Prompt::Messages(prompt)) => prompt.continue_final_message,
            other => panic!("{other:?}"),
        })
    };
    assert!(call(json!({"continue_final_message": true, "add_generation_prompt": false})).is_ok_and(|goes_on| goes_on));
    assert!(call(json!({"continue_final_message": true})).is_ok_and(|goes_on| goes_on));
    assert!(call(json!({"add_generation_prompt": true})).is_ok_and(|goes_on| !goes_on));
    for wrong in [
        json!({"continue_final_message": true, "add_generation_prompt": true}),
        json!({"add_generation_prompt": false}),
    ] {
        assert_eq!(call(wrong).err().map(|bad| bad.param).as_deref(), Some("add_generation_prompt"));
    }
}
