//! The tables of fields in docs/api.md are what is served, and what openapi.json has.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use baton_api::{BadRequest, ChatRequest, CompletionRequest, DetokenizeRequest, MessagesRequest, OPENAPI};
use baton_api::{ResponsesRequest, TokenizeRequest, read};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Fields and how they are handled, of the tables before the heading `until`, after `from`.
fn table(from: &str, until: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    let text = fs::read_to_string(path).expect("docs/api.md");
    let (_, text) = text.split_once(from).expect(from);
    let (text, _) = text.split_once(until).expect(until);
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split('|');
        let field = cells.next()?.trim().trim_end_matches('`').to_owned();
        Some((field, cells.next()?.trim().to_owned()))
    };
    text.lines().filter_map(row).collect()
}

/// The fields that a schema of openapi.json has.
fn properties(schema: &str) -> BTreeSet<String> {
    let document: Value = serde_json::from_str(OPENAPI).expect("JSON");
    let properties = document["components"]["schemas"][schema]["properties"].as_object().expect(schema);
    properties.keys().cloned().collect()
}

fn openai() -> Vec<(String, String)> {
    table("Of OpenAI's completions, both:", "Of `/v1/completions`:")
}

fn check<T: DeserializeOwned>(schema: &str, needed: Value, fields: &[(String, String)]) {
    let taken = fields.iter().filter(|(_, handling)| handling != "refused").map(|(field, _)| field.clone());
    assert_eq!(taken.collect::<BTreeSet<_>>(), properties(schema));
    let taken = |field: &str, value: Value| -> Result<(), BadRequest> {
        let mut body = needed.clone();
        body[field] = value;
        read::<T>(body.to_string().as_bytes()).map(|_| ())
    };
    for (field, handling) in fields {
        match handling.as_str() {
            "honoured" if needed.get(field).is_some() => {}
            // Anything at all would be taken by one that is ignored.
            "honoured" => {
                let wrong = [json!([[{"no": "such"}]]), json!({"no": "such"}), json!("such")];
                assert!(wrong.into_iter().any(|value| taken(field, value).is_err()), "{field}");
                assert_eq!(taken(field, Value::Null), Ok(()), "{field}");
            }
            "ignored" => assert_eq!(taken(field, json!([[{"no": "such"}]])), Ok(()), "{field}"),
            "refused" => {
                let error = taken(field, json!({"any": 1})).expect_err(field);
                assert!(error.param == *field && error.problem.starts_with("is not served here"), "{error:?}");
                assert_eq!(taken(field, Value::Null), Ok(()), "{field}");
            }
            other => panic!("{field}: {other}"),
        }
    }
    assert_eq!(taken("colour", json!(1)).expect_err("unknown").problem, "this field is not known");
}

#[test]
fn completions_fields_match_the_api_page() {
    let own = table("Of `/v1/completions`:", "Of `/v1/chat/completions`:");
    check::<CompletionRequest>("CompletionRequest", json!({"prompt": "x"}), &[openai(), own].concat());
}

#[test]
fn chat_completions_fields_match_the_api_page() {
    let own = table("Of `/v1/chat/completions`:", "A schema has");
    check::<ChatRequest>("ChatRequest", json!({"messages": []}), &[openai(), own].concat());
}

#[test]
fn messages_fields_match_the_api_page() {
    check::<MessagesRequest>(
        "MessagesRequest",
        json!({"messages": []}),
        &table("Of `/v1/messages`:", "A message is of"),
    );
}

#[test]
fn responses_fields_match_the_api_page() {
    check::<ResponsesRequest>("ResponsesRequest", json!({"input": "x"}), &table("Of `/v1/responses`:", "An item is"));
}

#[test]
fn tokenize_and_detokenize_fields_match_the_api_page() {
    check::<TokenizeRequest>("TokenizeRequest", json!({}), &table("Of `/tokenize`:", "Of `/detokenize`:"));
    let needed = json!({"tokens": []});
    check::<DetokenizeRequest>("DetokenizeRequest", needed, &table("Of `/detokenize`:", "**Special-token injection"));
}

#[test]
fn openapi_paths_are_all_on_the_api_page() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    let text = fs::read_to_string(path).expect("docs/api.md");
    let document: Value = serde_json::from_str(OPENAPI).expect("JSON");
    for path in document["paths"].as_object().expect("paths").keys() {
        assert!(text.contains(&format!("{path}`")), "{path}");
    }
}
