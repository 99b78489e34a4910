//! Bodies of the HTTP APIs.

use std::sync::Arc;

use baton_api::{
    Call, ChatRequest, CompletionRequest, Context, DetokenizeRequest, ErrorForm, Failure, MessagesRequest,
    ResponseStore, ResponsesRequest, TokenizeRequest, read, tokenized,
};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_types::SamplingDefaults;

use crate::input::choice;

/// What bodies are made of besides the fields of the seeds.
pub(super) const WORDS: &[&str] = &[
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    ",",
    ":",
    "\"type\":",
    "\"function\":",
    "\"content\":",
    "\"role\":\"tool\"",
    "\"stop\":",
    "\"logit_bias\":",
    "\"n\":",
    "\"best_of\":",
    "\"echo\":true",
    "\"stream\":true",
    "\"seed\":",
    "\"tools\":",
    "\"tool_choice\":",
    "\"required\"",
    "\"allowed_tools\":",
    "\"response_format\":",
    "\"json_schema\":",
    "\"schema\":",
    "\"strict\":true",
    "\"regex\":",
    "\"grammar\":",
    "\"choice\":",
    "\"reasoning_effort\":",
    "\"baton\":",
    "\"ttft_slo_ms\":",
    "\"metadata\":",
    "\"thinking\":",
    "\"input\":",
    "\"instructions\":",
    "\"tool_use\"",
    "\"tool_result\"",
    "\"function_call_output\"",
    "\"call_id\":",
    "\"logprobs\":",
    "\"top_logprobs\":",
    "\\u0000",
    "\\ud800",
    "\u{1}",
];

/// A body: the first byte says of which API.
pub(super) fn body(input: &[u8]) {
    let (api, body) = choice(input, 7);
    let refused = match api {
        0 => read::<ChatRequest>(body).and_then(|(request, _)| request.call(context())).map(answer),
        1 => read::<CompletionRequest>(body).and_then(|(request, _)| request.call(context())).map(answer),
        2 => read::<ResponsesRequest>(body).and_then(|(request, _)| request.call(context())).map(answer),
        3 => read::<MessagesRequest>(body).and_then(|(request, _)| request.call(&context())).map(answer),
        4 => read::<MessagesRequest>(body).and_then(|(mut request, _)| request.prompt()).map(drop),
        5 => read::<TokenizeRequest>(body).and_then(|(request, _)| request.prompt()).map(|(_, texts)| {
            tokenized(&[1], 10, texts.then(Vec::new));
        }),
        _ => read::<DetokenizeRequest>(body).map(drop),
    };
    if let Err(bad) = refused {
        let failure = Failure::from(bad);
        for form in [ErrorForm::OpenAi, ErrorForm::Anthropic] {
            let said = form.body(&failure, "id");
            assert!(said.len() < 4096, "an error repeats the body: {} bytes", said.len());
        }
    }
}

fn context() -> Context {
    let responses = Arc::new(ResponseStore::new(1 << 20, 60));
    let decode = |tokens: &[u32]| vec![b'x'; tokens.len().min(100)];
    Context { created: 7, decode: Arc::new(decode), responses, defaults: SamplingDefaults::default() }
}

/// Answers the call as nodes would.
fn answer(mut call: Call) {
    for index in 0..call.requests.len().min(8) {
        for event in events() {
            call.answer.take(index, v1::GenerateResponse { event: Some(event), completion: 0 });
        }
    }
    if call.streams {
        call.answer.last();
    } else if call.answer.is_whole() {
        call.answer.body();
    }
    call.answer.failed(&Failure::new(503, "gone"));
}

fn events() -> [Event; 4] {
    let accepted = v1::Accepted { request_id: "id".into(), model: "m".into(), prompt_token_ids: vec![1], seed: 1 };
    let logprobs = v1::TokenLogprobs { logprob: Some(-1.0), text: "ab".into(), ..Default::default() };
    let said = v1::Delta { text: "ab".into(), token_ids: vec![3], logprobs: vec![logprobs], ..Default::default() };
    let call = v1::ToolCallDelta { index: 0, id: "c".into(), name: "f".into(), arguments: "{".into() };
    let called = v1::Delta { reasoning: "hm".into(), tool_calls: vec![call], token_ids: vec![4], ..Default::default() };
    let usage = Some(v1::Usage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: 0 });
    let finished = v1::Finished { finish_reason: "stop".into(), usage, ..Default::default() };
    [Event::Accepted(accepted), Event::Delta(called), Event::Delta(said), Event::Finished(Box::new(finished))]
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let bodies: [(u8, &str); 12] = [
        (
            0,
            r#"{"model":"m","messages":[{"role":"system","content":"x"},{"role":"user","content":[{"type":"text","text":"é"}]},{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"4"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},"strict":true}}],"tool_choice":"auto","parallel_tool_calls":false,"max_completion_tokens":9}"#,
        ),
        (
            0,
            r#"{"messages":[{"role":"user","content":"x","name":"n"}],"stream":true,"stream_options":{"include_usage":true},"n":2,"logprobs":true,"top_logprobs":2,"stop":["a","b"],"logit_bias":{"5":-1.5},"temperature":0.5,"seed":-3,"chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low","baton":{"ttft_slo_ms":100}}"#,
        ),
        (
            0,
            r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"object","properties":{"a":{"type":"integer"}}},"strict":true}},"tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[]}},"documents":[{"title":"t","text":"x"}]}"#,
        ),
        (
            1,
            r#"{"prompt":["a","b"],"echo":true,"logprobs":3,"best_of":2,"n":1,"suffix":null,"max_tokens":5,"stop":"x","structured_outputs":{"regex":"a+"}}"#,
        ),
        (
            1,
            r#"{"prompt":[[1,2],[3]],"stream":true,"min_tokens":1,"bad_words":["x"],"stop_token_ids":[2],"top_k":-1,"ignore_eos":true}"#,
        ),
        (
            2,
            r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"x"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"4"},{"type":"reasoning","summary":[]}],"instructions":"i","tools":[{"type":"function","name":"f","parameters":{}}],"text":{"format":{"type":"text"}},"reasoning":{"effort":"low"},"max_output_tokens":20,"store":false}"#,
        ),
        (
            2,
            r#"{"input":"x","stream":true,"temperature":1,"metadata":{"a":"b"},"tool_choice":{"type":"function","name":"f"}}"#,
        ),
        (
            3,
            r#"{"model":"m","max_tokens":9,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"tool_result","tool_use_id":"c","content":[{"type":"text","text":"4"}]}]},{"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"tool_use","id":"c","name":"f","input":{"a":1}}]}],"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"any","disable_parallel_tool_use":true},"stop_sequences":["a"],"thinking":{"type":"disabled"}}"#,
        ),
        (
            3,
            r#"{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"stream":true,"top_k":3,"output_config":{"effort":"low","format":{"type":"json_schema","schema":{}}}}"#,
        ),
        (4, r#"{"messages":[{"role":"user","content":"x"}],"system":"s"}"#),
        (5, r#"{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true,"return_token_strs":true}"#),
        (6, r#"{"tokens":[1,2,3],"model":""}"#),
    ];
    bodies.iter().map(|(api, body)| [&[*api][..], body.as_bytes()].concat()).collect()
}
