//! What one request gave: collected from its stream, and as JSON.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_sim::Spread;
use baton_types::{ErrorKind, Tbt};
use serde::Serialize;

use crate::error::CliError;

/// What a request has given so far.
#[derive(Debug, Default)]
pub struct Record {
    accepted: v1::Accepted,
    token_ids: Vec<u32>,
    text: String,
    reasoning: String,
    tool_calls: Vec<ToolCall>,
    logprobs: Vec<v1::TokenLogprobs>,
    prompt_logprobs: Vec<v1::TokenLogprobs>,
    finished: Option<v1::Finished>,
    /// When each token arrived here, since the request was sent.
    arrivals: Vec<Duration>,
    /// When the stream ended.
    ended: Duration,
    /// Completions after the first.
    others: Vec<Self>,
}

impl Record {
    /// Nothing yet of a request for `n` completions.
    pub fn of(n: u32) -> Self {
        Self { others: (1..n).map(|_| Self::default()).collect(), ..Self::default() }
    }

    /// The completions, each with what all of them share.
    pub fn completions(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.others)
    }

    /// Takes one message in, `at` after the request was sent. Returns the text of the first
    /// completion in it.
    pub fn take(&mut self, response: v1::GenerateResponse, at: Duration) -> Result<String, CliError> {
        let is_shared = matches!(response.event, Some(Event::Accepted(_) | Event::PromptLogprobs(_)));
        if is_shared {
            for other in &mut self.others {
                other.take_own(response.clone(), at)?;
            }
        }
        match response.completion.checked_sub(1) {
            None => self.take_own(response, at),
            Some(other) => {
                if let Some(other) = self.others.get_mut(other as usize) {
                    other.take_own(response, at)?;
                }
                Ok(String::new())
            }
        }
    }

    fn take_own(&mut self, response: v1::GenerateResponse, at: Duration) -> Result<String, CliError> {
        self.ended = at;
        match response.event {
            Some(Event::Accepted(accepted)) => self.accepted = accepted,
            Some(Event::PromptLogprobs(logprobs)) => self.prompt_logprobs = logprobs.positions,
            Some(Event::Finished(finished)) => self.finished = Some(*finished),
            Some(Event::Delta(delta)) => return self.take_delta(delta, at),
            // A newer conductor's event: nothing that this version could show.
            None => {}
        }
        Ok(String::new())
    }

    fn take_delta(&mut self, delta: v1::Delta, at: Duration) -> Result<String, CliError> {
        // A delta with only text that was kept back has no tokens, and its index is where the next
        // token would be.
        if !delta.token_ids.is_empty() && delta.index as usize != self.token_ids.len() {
            let message = format!("token {} came where token {} was next", delta.index, self.token_ids.len());
            return Err(CliError::Refused { kind: ErrorKind::DataLoss, message, retry_after_s: None });
        }
        self.arrivals.resize(self.arrivals.len() + delta.token_ids.len(), at);
        self.token_ids.extend(delta.token_ids);
        self.logprobs.extend(delta.logprobs);
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        for piece in delta.tool_calls {
            // A piece without a name belongs to the last call.
            if !piece.name.is_empty() {
                self.tool_calls.push(ToolCall { id: piece.id, name: piece.name, arguments: piece.arguments });
            } else if let Some(call) = self.tool_calls.last_mut() {
                call.arguments.push_str(&piece.arguments);
            }
        }
        Ok(delta.text)
    }

    /// Whether the last message has come.
    pub fn is_finished(&self) -> bool {
        self.completions().all(|completion| completion.finished.is_some())
    }

    /// Empty until the request was placed.
    pub fn request_id(&self) -> &str {
        &self.accepted.request_id
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The tools that it asks for.
    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.tool_calls
    }

    /// Log-probabilities of the output: the token, and its own beside the alternatives.
    pub fn token_logprobs(&self) -> impl Iterator<Item = (Option<u32>, &v1::TokenLogprobs)> {
        self.token_ids.iter().map(|id| Some(*id)).zip(&self.logprobs)
    }

    /// The same of the prompt. No token follows the last position.
    pub fn prompt_token_logprobs(&self) -> impl Iterator<Item = (Option<u32>, &v1::TokenLogprobs)> {
        let next = self.accepted.prompt_token_ids.iter().skip(1).map(|id| Some(*id)).chain([None]);
        next.zip(&self.prompt_logprobs)
    }

    /// Everything, in the form of `--json`.
    pub fn report(&self) -> Report {
        let finished = self.finished.clone().unwrap_or_default();
        let usage = finished.usage.unwrap_or_default();
        let timeline = finished.timeline.unwrap_or_default();
        let transfer = timeline.kv_transfer.clone().unwrap_or_default();
        Report {
            request_id: self.accepted.request_id.clone(),
            model: self.accepted.model.clone(),
            seed: self.accepted.seed,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            prompt_token_ids: self.accepted.prompt_token_ids.clone(),
            token_ids: self.token_ids.clone(),
            text: self.text.clone(),
            reasoning: self.reasoning.clone(),
            tool_calls: self.tool_calls.clone(),
            finish_reason: finished.finish_reason,
            logprobs: self
                .logprobs
                .iter()
                .zip(&self.token_ids)
                .map(|(l, &id)| Distribution::new(l, Some(id)))
                .collect(),
            prompt_logprobs: self.prompt_distributions(),
            ttft_s: timeline.ttft_s,
            tbt_s: Gaps::of(&self.arrivals),
            prefill_node: named(finished.prefill_node),
            decode_node: named(finished.decode_node),
            kv_transfer: KvTransfer {
                bytes: transfer.bytes,
                transport: named(transfer.transport),
                seconds: transfer.seconds,
                exposed_seconds: transfer.exposed_seconds,
                bytes_at_compute_end: transfer.bytes_at_compute_end,
            },
            prefix_fetch: timeline.prefix_fetch.map(|fetch| PrefixFetch {
                bytes: fetch.bytes,
                transport: named(fetch.transport),
                seconds: fetch.seconds,
            }),
            migrated: timeline.migrated.map(|migrated| Migrated {
                times: timeline.migrations,
                bytes: migrated.bytes,
                transport: named(migrated.transport),
                seconds: migrated.seconds,
            }),
            timeline: Timeline {
                placement_s: timeline.placement_s,
                prefill_queue_s: timeline.prefill_queue_s,
                prefill_compute_s: timeline.prefill_compute_s,
                ttft_s: timeline.ttft_s,
                decode_queue_s: timeline.decode_queue_s,
                total_s: timeline.total_s,
                client_ttft_s: self.arrivals.first().map(Duration::as_secs_f64),
                client_total_s: self.ended.as_secs_f64(),
            },
        }
    }

    /// Entry i is the distribution after position i; the token taken there is the prompt's next
    /// one.
    fn prompt_distributions(&self) -> Vec<Distribution> {
        let next = |position: usize| self.accepted.prompt_token_ids.get(position + 1).copied();
        self.prompt_logprobs.iter().enumerate().map(|(i, l)| Distribution::new(l, next(i))).collect()
    }
}

fn named(name: String) -> Option<String> {
    (!name.is_empty()).then_some(name)
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    id: String,
    /// The tool.
    pub name: String,
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

/// What `baton generate --json` prints. Times in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What `baton explain` wants to know.
    pub request_id: String,
    model: String,
    seed: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Tokens of the prompt whose KV the prefill node did not have to compute.
    pub cached_tokens: u32,
    prompt_token_ids: Vec<u32>,
    token_ids: Vec<u32>,
    text: String,
    reasoning: String,
    tool_calls: Vec<ToolCall>,
    /// "stop", "length" or "tool_calls".
    pub finish_reason: String,
    logprobs: Vec<Distribution>,
    prompt_logprobs: Vec<Distribution>,
    /// From the request's arrival at the conductor to its first token there.
    pub ttft_s: f64,
    /// Time between tokens, as they arrived here.
    pub tbt_s: Gaps,
    /// Where the prompt was computed.
    pub prefill_node: Option<String>,
    /// Where the rest was generated; null if one token was enough.
    pub decode_node: Option<String>,
    /// What crossed between the two.
    pub kv_transfer: KvTransfer,
    /// What the prefill node fetched from another one; null if nothing.
    pub prefix_fetch: Option<PrefixFetch>,
    /// How it came to the decode node from others that it was on before; null if it was on none.
    pub migrated: Option<Migrated>,
    /// Where the time went.
    pub timeline: Timeline,
}

/// Log-probabilities at one position.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Distribution {
    /// The token that was taken; absent at the end of a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f32>,
    /// Pairs of token id and log-probability, best first.
    top: Vec<(u32, f32)>,
}

impl Distribution {
    fn new(wire: &v1::TokenLogprobs, taken: Option<u32>) -> Self {
        let top = wire.top.iter().map(|top| (top.token_id, finite(top.logprob))).collect();
        Self { id: taken, logprob: wire.logprob.map(finite), top }
    }
}

/// JSON has no minus infinity; a token that cannot come has the smallest number there is.
fn finite(logprob: f32) -> f32 {
    logprob.max(f32::MIN)
}

/// Gaps between tokens, seconds; null if fewer than two came.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gaps {
    /// Time per output token after the first.
    pub mean: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 99th percentile, by nearest rank.
    pub p99: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
    /// Mean of the longest tenth, at least one: the TBT of the Mooncake paper.
    pub tail10: Option<f64>,
}

impl Gaps {
    fn of(arrivals: &[Duration]) -> Self {
        let mut gaps: Vec<_> = arrivals.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        let tail10 = Tbt::of_gaps(&mut gaps).map(|Tbt(tail)| tail.as_secs_f64());
        let spread = Spread::of(gaps.iter().map(Duration::as_secs_f64));
        let figure = |seconds: f64| (!gaps.is_empty()).then_some(seconds);
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|q| figure(spread.quantile(q)));
        Self { mean: figure(spread.mean()), p50, p99, max, tail10 }
    }
}

/// What crossed between the nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KvTransfer {
    /// Layers x blocks x block bytes of the blocks pushed.
    pub bytes: u64,
    /// Null if nothing was transferred.
    pub transport: Option<String>,
    /// From the first push to the last confirmation.
    pub seconds: f64,
    /// The part after the last layer's compute.
    pub exposed_seconds: f64,
    /// Confirmed when the last layer's compute ended.
    pub bytes_at_compute_end: u64,
}

/// A prefix that another node held.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefixFetch {
    /// Of the blocks brought, all layers.
    pub bytes: u64,
    /// What carried them.
    pub transport: Option<String>,
    /// From the question to the holder to the last byte.
    pub seconds: f64,
}

/// Ways from decode node to decode node, because one had no room or was on its way out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Migrated {
    /// How many.
    pub times: u32,
    /// Of the blocks brought, all layers.
    pub bytes: u64,
    /// What carried the last of them.
    pub transport: Option<String>,
    /// From the questions to the last bytes.
    pub seconds: f64,
}

/// Where the time went, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Timeline {
    /// In the frontend: template, tokenizing, placement.
    pub placement_s: f64,
    /// Waiting for the prefill node.
    pub prefill_queue_s: f64,
    /// From the first chunk's start to the first token.
    pub prefill_compute_s: f64,
    ttft_s: f64,
    /// From the handoff to the decode node's first step.
    pub decode_queue_s: f64,
    /// In the conductor, from arrival to the end.
    pub total_s: f64,
    client_ttft_s: Option<f64>,
    client_total_s: f64,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn response(event: Event) -> v1::GenerateResponse {
        v1::GenerateResponse { event: Some(event), completion: 0 }
    }

    fn top(token_id: u32, logprob: f32) -> v1::TopLogprob {
        v1::TopLogprob { token_id, logprob, ..Default::default() }
    }

    fn delta(index: u32, token_ids: &[u32], text: &str, logprob: f32) -> v1::GenerateResponse {
        let top = vec![top(5, logprob), top(6, f32::NEG_INFINITY)];
        let logprobs = token_ids
            .iter()
            .map(|_| v1::TokenLogprobs { logprob: Some(logprob), top: top.clone(), ..Default::default() })
            .collect();
        response(Event::Delta(v1::Delta {
            index,
            token_ids: token_ids.to_vec(),
            text: text.into(),
            logprobs,
            ..v1::Delta::default()
        }))
    }

    fn stream() -> Vec<v1::GenerateResponse> {
        let position = |logprob| v1::TokenLogprobs { logprob, top: vec![top(2, -0.25)], ..Default::default() };
        let transfer = v1::KvTransfer {
            bytes: 640,
            transport: "tcp".into(),
            seconds: 0.5,
            exposed_seconds: 0.1,
            bytes_at_compute_end: 600,
        };
        let timeline = v1::Timeline { ttft_s: 0.75, kv_transfer: Some(transfer), total_s: 2.0, ..Default::default() };
        vec![
            response(Event::Accepted(v1::Accepted {
                request_id: "r1".into(),
                model: "m".into(),
                prompt_token_ids: vec![1, 2],
                seed: 7,
            })),
            response(Event::PromptLogprobs(v1::PromptLogprobs {
                positions: vec![position(Some(-0.25)), position(None)],
            })),
            delta(0, &[5], "a", -0.1),
            delta(1, &[6, 7], "", -0.2),
            delta(3, &[], "bc", 0.0),
            response(Event::Finished(Box::new(v1::Finished {
                finish_reason: "stop".into(),
                usage: Some(v1::Usage { prompt_tokens: 2, completion_tokens: 3, cached_tokens: 1 }),
                timeline: Some(timeline),
                prefill_node: "p".into(),
                ..v1::Finished::default()
            }))),
        ]
    }

    #[test]
    fn generate_json_has_the_documented_keys() {
        let mut record = Record::default();
        let mut texts = String::new();
        for (index, response) in stream().into_iter().enumerate() {
            texts += &record.take(response, Duration::from_secs(index as u64)).unwrap();
        }
        assert!(record.is_finished());
        assert_eq!((texts.as_str(), record.text()), ("abc", "abc"));
        let json: Value = serde_json::from_str(&serde_json::to_string(&record.report()).unwrap()).unwrap();
        for (key, value) in [
            ("request_id", json!("r1")),
            ("prompt_tokens", json!(2)),
            ("cached_tokens", json!(1)),
            ("prompt_token_ids", json!([1, 2])),
            ("token_ids", json!([5, 6, 7])),
            ("text", json!("abc")),
            ("finish_reason", json!("stop")),
            ("ttft_s", json!(0.75)),
            ("prefill_node", json!("p")),
            ("decode_node", Value::Null),
            ("tbt_s", json!({"mean": 0.5, "p50": 0.0, "p99": 1.0, "max": 1.0, "tail10": 1.0})),
        ] {
            assert_eq!(json[key], value, "{key}");
        }
        let transfer = json!({"bytes": 640, "transport": "tcp", "seconds": 0.5, "exposed_seconds": 0.1, "bytes_at_compute_end": 600});
        assert_eq!(json["kv_transfer"], transfer);
        assert_eq!(json["timeline"]["client_ttft_s"], 2.0);
        assert_eq!(json["timeline"]["total_s"], 2.0);
    }

    #[test]
    fn completions_of_one_request_are_kept_apart() {
        let delta = |completion, text: &str, name: &str, arguments: &str| {
            let call = v1::ToolCallDelta { name: name.into(), arguments: arguments.into(), ..Default::default() };
            let tool_calls = if arguments.is_empty() { Vec::new() } else { vec![call] };
            let delta = v1::Delta { text: text.into(), tool_calls, ..v1::Delta::default() };
            v1::GenerateResponse { event: Some(Event::Delta(delta)), completion }
        };
        let mut record = Record::of(2);
        let accepted = v1::Accepted { request_id: "r1".into(), ..v1::Accepted::default() };
        let mut shown = String::new();
        for response in [
            response(Event::Accepted(accepted)),
            delta(1, "b", "f", "{\"a\""),
            delta(0, "a", "", ""),
            delta(1, "", "", ": 1}"),
            delta(7, "of no completion", "", ""),
        ] {
            shown += &record.take(response, Duration::ZERO).unwrap();
        }
        let texts: Vec<_> = record.completions().map(|one| (one.text(), one.request_id())).collect();
        assert_eq!((texts, shown.as_str()), (vec![("a", "r1"), ("b", "r1")], "a"));
        let [_, other] = &record.completions().map(Record::tool_calls).collect::<Vec<_>>()[..] else { panic!() };
        assert_eq!((&*other[0].name, &*other[0].arguments), ("f", "{\"a\": 1}"));
        for completion in [1, 0] {
            assert!(!record.is_finished());
            let event = Some(Event::Finished(Box::default()));
            record.take(v1::GenerateResponse { event, completion }, Duration::ZERO).unwrap();
        }
        assert!(record.is_finished());
    }

    #[test]
    fn generate_json_logprobs_have_no_nulls() {
        let mut record = Record::default();
        for response in stream() {
            record.take(response, Duration::ZERO).unwrap();
        }
        let text = serde_json::to_string(&record.report().prompt_logprobs).unwrap();
        assert_eq!(text, r#"[{"id":2,"logprob":-0.25,"top":[[2,-0.25]]},{"top":[[2,-0.25]]}]"#);
        let text = serde_json::to_string(&record.report().logprobs).unwrap();
        assert!(text.starts_with(r#"[{"id":5,"logprob":-0.1,"top":[[5,-0.1],[6,-3.4028235e+38]]},{"id":6,"#), "{text}");
        assert!(!text.contains("null"));
    }

    #[test]
    fn lost_token_in_stream_is_a_data_loss_error() {
        let mut record = Record::default();
        record.take(delta(0, &[1], "a", 0.0), Duration::ZERO).unwrap();
        let error = record.take(delta(2, &[1], "b", 0.0), Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DataLoss);
    }

    #[test]
    fn tbt_statistics_are_taken_by_rank() {
        let millis = |list: &[u64]| list.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>();
        assert_eq!(Gaps::of(&millis(&[5])).mean, None);
        // 20 gaps: 1 ms to 20 ms.
        let mut at = 0;
        let arrivals: Vec<u64> = (0..=20)
            .map(|gap| {
                at += gap;
                at
            })
            .collect();
        let gaps = Gaps::of(&millis(&arrivals));
        let near = |value: Option<f64>, ms: f64| (value.unwrap() * 1e3 - ms).abs() < 1e-9;
        assert!(
            near(gaps.mean, 10.5) && near(gaps.p50, 10.0) && near(gaps.p99, 20.0) && near(gaps.max, 20.0),
            "{gaps:?}"
        );
        assert!(near(gaps.tail10, 19.5), "the longest two of twenty: {gaps:?}");
    }
}
