//! What the HTTP port says of requests that it does not take, or takes without a part.

use super::client::http_with;
use super::world::{World, soon};

/// The header of an answer of this name.
fn header<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    let (head, _) = answer.split_once("\r\n\r\n")?;
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

pub async fn http_errors_name_methods_places_and_sizes() {
    let w = World::with(&["p0", "d0"]).await;
    let (status, answer) = w.get("/v1/completions").await;
    assert_eq!((status, header(&answer, "allow")), (405, Some("POST")));
    assert!(answer.contains("this path does not take GET; it takes POST"), "{answer}");
    let (status, answer) = soon(w.http("/v1/models", "{}")).await.unwrap();
    assert!(status == 405 && answer.contains("does not take POST; it takes GET and HEAD"), "{answer}");
    assert_eq!(w.get("/").await.0, 200);
    let (status, answer) = soon(w.http("/v1/chat/completions", "{\"messages\":\n [}")).await.unwrap();
    assert!(status == 400 && answer.contains("at line 2 column 3"), "{answer}");
    let long = "x".repeat(33 << 10);
    let asked = http_with(w.addresses.http, "/v1/models", &[("x-long", &long)], "");
    assert_eq!(soon(asked).await.unwrap().0, 431);
    let fits = "x".repeat(30 << 10);
    let asked = http_with(w.addresses.http, "/v1/models", &[("x-long", &fits)], "");
    assert_eq!(soon(asked).await.unwrap().0, 200);
}

pub async fn prompt_beyond_the_context_is_refused_in_the_words_of_each_api() {
    let w = World::with(&["p0", "d0"]).await;
    let context = w.frontend.node_limits().unwrap().context_length;
    let text = "a".repeat(context as usize * 2);
    let message = format!(r#"[{{"role":"user","content":"{text}"}}]"#);
    let refused = async |path: &str, body: String| {
        let (status, answer) = soon(w.http(path, &body)).await.unwrap();
        assert_eq!(status, 400, "{answer}");
        answer
    };
    let maximum = format!("This model's maximum context length is {context} tokens. However, ");
    let code = r#""code":"context_length_exceeded""#;
    let answer = refused("/v1/chat/completions", format!(r#"{{"messages":{message}}}"#)).await;
    assert!(answer.contains(&format!("{maximum}your messages resulted in ")) && answer.contains(code), "{answer}");
    let answer = refused("/v1/chat/completions", format!(r#"{{"messages":{message},"max_tokens":7}}"#)).await;
    assert!(answer.contains(&maximum) && answer.contains("in the messages, 7 in the completion)"), "{answer}");
    let answer = refused("/v1/completions", format!(r#"{{"prompt":"{text}"}}"#)).await;
    assert!(answer.contains(&maximum) && answer.contains("in the prompt, 16 in the completion)"), "{answer}");
    let answer = refused("/v1/responses", format!(r#"{{"input":"{text}"}}"#)).await;
    assert!(answer.contains(&maximum) && answer.contains(code), "{answer}");
    let answer = refused("/v1/messages", format!(r#"{{"messages":{message},"max_tokens":7}}"#)).await;
    let told = format!(" tokens > {context} maximum");
    assert!(answer.contains("\"message\":\"prompt is too long: ") && answer.contains(&told), "{answer}");
    let id = header(&answer, "request-id").unwrap();
    assert!(answer.contains(&format!(r#""request_id":"{id}""#)), "{answer}");
}

pub async fn part_of_a_request_that_is_left_out_is_told_in_a_header() {
    let w = World::with(&["p0", "d0"]).await;
    let body = r#"{"messages":[{"role":"user","content":"hi","mood":1}],"tools":[{"type":"web_search_20250305"}]}"#;
    let (status, answer) = soon(w.http("/v1/messages/count_tokens", body)).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let warned = header(&answer, "x-baton-warning").unwrap();
    assert!(warned.starts_with("messages[0].mood: is not known, and was left out; tools[0]: the tool"), "{warned}");
    let (_, answer) =
        soon(w.http("/v1/messages/count_tokens", r#"{"messages":[{"role":"user","content":"hi"}]}"#)).await.unwrap();
    assert_eq!(header(&answer, "x-baton-warning"), None);
}

pub async fn web_page_that_is_not_named_is_refused_before_anything_runs() {
    let w = World::with(&["p0", "d0"]).await;
    let asks = async |path: &str, header: (&str, &str), body: &str| {
        soon(http_with(w.addresses.http, path, &[header], body)).await.unwrap()
    };
    let body = r#"{"prompt":"ab","max_tokens":1}"#;
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/none"] {
        let (status, answer) = asks(path, ("origin", "https://evil.example"), body).await;
        let told = "origin: 'https://evil.example' may not call; --cors-origins names the web pages that may";
        assert!(status == 403 && answer.contains(told), "{path}: {answer}");
        assert_eq!(header(&answer, "content-type"), Some("application/json"));
    }
    for path in ["/", "/metrics", "/ready", "/health", "/v1/models", "/openapi.json"] {
        assert_eq!(asks(path, ("origin", "null"), "").await.0, 403, "{path}");
        let (status, answer) = asks(path, ("host", "evil.example"), "").await;
        assert!(
            status == 403 && answer.contains("host: 'evil.example', but this port listens on loopback"),
            "{answer}"
        );
    }
    assert_eq!(asks("/v1/completions", ("content-type", "text/plain"), body).await.0, 415, "one of two");
    assert_eq!(w.frontend.live.len(), 0);
    assert_eq!(w.get("/v1/models").await.0, 200);
}
