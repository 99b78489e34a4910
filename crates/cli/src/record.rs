//! `baton explain` of a request that came: what was decided, and what came of it.

use baton_bench::seconds;
use baton_proto::v1;
use baton_types::{ErrorKind, RequestIdPrefix};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::args::ExplainArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::explain;
use crate::screen::{Paint, line};
use crate::timeline::bytes;

/// Before the id of a request in answers over HTTP.
const PREFIXES: [&str; 4] = ["chatcmpl-", "cmpl-", "resp_", "msg_"];

/// The request that is meant, if the argument is called one, or looks like an id or its first
/// digits and not like a prompt.
pub fn request_id(args: &ExplainArgs) -> Option<String> {
    let text = args.prompt.prompt.as_ref().filter(|_| !args.prompt.raw)?;
    let bare = PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix));
    let ours = |id: &str| id.parse().ok().map(|prefix: RequestIdPrefix| prefix.to_string());
    if args.is_request {
        // What has no id of ours behind such a prefix is the client's own.
        Some(bare.and_then(ours).unwrap_or_else(|| text.clone()))
    } else {
        ours(bare.unwrap_or(text))
    }
}

/// Prints a request's record.
pub async fn run(id: String, args: &ExplainArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let record = match find(&id, conductor).await {
        Ok(record) => record,
        Err(CliError::Refused { kind: ErrorKind::NotFound, message, retry_after_s }) if !args.is_request => {
            let message = format!("{message} (if it is a prompt, give it on stdin: baton explain -)");
            return Err(CliError::Refused { kind: ErrorKind::NotFound, message, retry_after_s });
        }
        Err(error) => return Err(error),
    };
    let text = if json { to_json(&record).to_string() } else { render(&record, Paint::stdout()) };
    Ok(line(&text)?)
}

/// The record of a request. Only the conductor that served it has one, so each is asked.
async fn find(request_id: &str, conductors: &str) -> Result<v1::ExplainByIdResponse, CliError> {
    let conductors = Conductor::each(conductors)?;
    let addresses = conductors.iter().map(Conductor::address);
    let answers = join_all(addresses.map(|address| async move { (address, ask(address, request_id).await) })).await;
    let mut records = Vec::new();
    let mut errors = Vec::new();
    for (address, answer) in answers {
        match answer {
            Ok(record) => records.push((address, record)),
            Err(error) => errors.push((address, error)),
        }
    }
    match &*records {
        [] => Err(not_found(request_id, errors)),
        [(_, record)] => Ok(record.clone()),
        several => {
            let all: Vec<_> = several.iter().map(|(at, record)| format!("{} at {at}", record.request_id)).collect();
            let problem = format!("'{request_id}' is {}: ask one conductor for one of them", all.join(", "));
            Err(CliError::invalid("request_id", problem))
        }
    }
}

async fn ask(address: &str, request_id: &str) -> Result<v1::ExplainByIdResponse, CliError> {
    let conductor = Conductor::connect(address).await?;
    let request = v1::ExplainByIdRequest { request_id: request_id.to_owned() };
    let record = conductor.cluster().explain_by_id(request).await;
    Ok(record.map_err(|status| CliError::from(status).at(address))?.into_inner())
}

/// Why no conductor has the record, after what each said.
fn not_found(request_id: &str, mut errors: Vec<(&str, CliError)>) -> CliError {
    let knows_several =
        |(_, error): &(&str, CliError)| matches!(error, CliError::Refused { kind: ErrorKind::Invalid, .. });
    let alone = if errors.len() == 1 { Some(0) } else { errors.iter().position(knows_several) };
    if let Some(index) = alone {
        return errors.swap_remove(index).1;
    }
    let is_unknown = |(_, error): &(&str, CliError)| error.kind() == ErrorKind::NotFound;
    let (asked, mut failed): (Vec<_>, Vec<_>) = errors.into_iter().partition(is_unknown);
    if asked.is_empty() {
        return failed.swap_remove(0).1;
    }
    let asked: Vec<_> = asked.iter().map(|(address, _)| *address).collect();
    let unknown = format!("request_id: no request '{request_id}' is kept at {}", asked.join(", "));
    if failed.is_empty() {
        return CliError::Refused { kind: ErrorKind::NotFound, message: unknown, retry_after_s: None };
    }
    let failed: Vec<_> = failed.iter().map(|(_, error)| error.to_string()).collect();
    let message = format!("{unknown}; {}", failed.join("; "));
    CliError::Refused { kind: ErrorKind::Unavailable, message, retry_after_s: None }
}

fn render(record: &v1::ExplainByIdResponse, paint: Paint) -> String {
    let mut parts = vec![format!("request   {}", record.request_id)];
    for (index, decision) in record.decisions.iter().enumerate() {
        if index == 1 && record.decisions_left_out > 0 {
            parts.push(format!("({} decisions are not kept)", record.decisions_left_out));
        }
        parts.push(render_decision(decision, paint));
    }
    parts.push(match &record.end {
        Some(end) => render_end(end, record.decisions.last(), paint),
        None => "it runs".to_owned(),
    });
    if record.decisions.iter().any(|decision| decision.explanation.is_some()) {
        parts.push(explain::legend(paint));
    }
    parts.join("\n\n")
}

fn render_decision(decision: &v1::RequestDecision, paint: Paint) -> String {
    let asked = if decision.times > 1 { format!(", asked {} times", decision.times) } else { String::new() };
    let at = seconds(decision.at_s);
    let head = paint.bold(&format!("attempt {}, decided {at} after it came{asked}", decision.attempt));
    let explained = decision.explanation.as_ref().map(|it| explain::render(it, paint)).unwrap_or_default();
    let failure = match decision.failure.as_str() {
        "" => String::new(),
        failure => format!("\n\nfailed    {failure}"),
    };
    let reselections: String = decision.reselections.iter().map(|turn| format!("\n\nwent on   {turn}")).collect();
    format!("{head}\n{explained}{reselections}{failure}")
}

/// `last` is the last attempt.
fn render_end(end: &v1::RequestEnd, last: Option<&v1::RequestDecision>, paint: Paint) -> String {
    let outcome = match &end.failure {
        Some(failure) => paint.red(&format!("{}: {}", failure.kind, failure.message)),
        None => paint.green(&end.finish_reason),
    };
    let compared = |measured: Option<f64>, predicted: Option<f64>| {
        let known = |time: Option<f64>| time.map(seconds).unwrap_or_else(|| "-".to_owned());
        format!("{}, predicted {}", known(measured), known(predicted))
    };
    let usage = end.usage.unwrap_or_default();
    let timeline = end.timeline.clone().unwrap_or_default();
    let transfer = timeline.kv_transfer.clone().unwrap_or_default();
    let predicted = end.predicted_output_tokens.map(|tokens| format!(", predicted {tokens:.0}")).unwrap_or_default();
    let first = in_attempt(end.first_token_attempt, last);
    let rows = [
        ("ended", format!("{outcome}, {} after it came", seconds(timeline.total_s))),
        ("TTFT", compared(end.ttft_s, end.predicted_ttft_s) + &before_last(end, last)),
        ("TBT", compared(end.tbt_s, end.predicted_tbt_s)),
        ("cached", format!("{} of {} tokens", usage.cached_tokens, usage.prompt_tokens)),
        ("output", format!("{} tokens{predicted}", usage.completion_tokens)),
        (
            "queue",
            format!(
                "{} for prefill{first}, {} for decode",
                seconds(timeline.prefill_queue_s),
                seconds(timeline.decode_queue_s)
            ),
        ),
        ("prefill", seconds(timeline.prefill_compute_s) + &first),
        ("decoded", decoded(end, &timeline)),
        ("KV transferred", format!("{}, {} of it exposed", bytes(transfer.bytes), seconds(transfer.exposed_seconds))),
    ];
    rows.map(|(name, value)| format!("{name:<9} {value}")).join("\n")
}

/// Which attempt a figure is of, if there were several.
fn in_attempt(attempt: Option<u32>, last: Option<&v1::RequestDecision>) -> String {
    match (attempt, last) {
        (Some(attempt), Some(last)) if last.attempt > 0 => format!(" in attempt {attempt}"),
        _ => String::new(),
    }
}

/// What failed attempts took of the time to first token: queue and prefill are those of the attempt
/// that gave the token.
fn before_last(end: &v1::RequestEnd, last: Option<&v1::RequestDecision>) -> String {
    match (end.ttft_s, last) {
        (Some(ttft_s), Some(last)) if last.attempt > 0 && last.at_s <= ttft_s => {
            format!("; {} of it before attempt {} was placed", seconds(last.at_s), last.attempt)
        }
        _ => String::new(),
    }
}

/// Where, and how it came there if that is not the node that was chosen first.
fn decoded(end: &v1::RequestEnd, timeline: &v1::Timeline) -> String {
    let node = if end.decode_node.is_empty() { "-" } else { &end.decode_node };
    match &timeline.migrated {
        Some(migrated) => {
            format!("on {node}, migrated there with {} in {}", bytes(migrated.bytes), seconds(migrated.seconds))
        }
        None => format!("on {node}"),
    }
}

fn to_json(record: &v1::ExplainByIdResponse) -> Value {
    let decisions = record.decisions.iter().map(|decision| {
        json!({
            "attempt": decision.attempt, "at_s": decision.at_s, "times": decision.times,
            "explanation": decision.explanation.as_ref().map(explain::to_json),
            "reselections": decision.reselections,
            "failure": (!decision.failure.is_empty()).then_some(&decision.failure),
        })
    });
    json!({
        "request_id": record.request_id, "prompt_tokens": record.prompt_tokens, "max_tokens": record.max_tokens,
        "decisions": decisions.collect::<Vec<_>>(), "decisions_left_out": record.decisions_left_out,
        "end": record.end.as_ref().map(end_json),
    })
}

fn end_json(end: &v1::RequestEnd) -> Value {
    let usage = end.usage.unwrap_or_default();
    let timeline = end.timeline.clone().unwrap_or_default();
    let transfer = timeline.kv_transfer.clone().unwrap_or_default();
    let failure = end.failure.as_ref().map(|it| json!({ "kind": it.kind, "message": it.message }));
    json!({
        "finish_reason": (!end.finish_reason.is_empty()).then_some(&end.finish_reason), "failure": failure,
        "ttft_s": end.ttft_s, "predicted_ttft_s": end.predicted_ttft_s,
        "tbt_s": end.tbt_s, "predicted_tbt_s": end.predicted_tbt_s,
        "cached_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
        "predicted_output_tokens": end.predicted_output_tokens, "first_token_attempt": end.first_token_attempt,
        "prefill_queue_s": timeline.prefill_queue_s, "prefill_compute_s": timeline.prefill_compute_s,
        "decode_node": (!end.decode_node.is_empty()).then_some(&end.decode_node), "migrations": timeline.migrations,
        "decode_queue_s": timeline.decode_queue_s, "total_s": timeline.total_s,
        "kv_transfer": {
            "bytes": transfer.bytes, "seconds": transfer.seconds, "exposed_seconds": transfer.exposed_seconds,
            "transport": (!transfer.transport.is_empty()).then_some(&transfer.transport),
        },
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn record() -> v1::ExplainByIdResponse {
        let decision = |attempt, times, failure: &str| v1::RequestDecision {
            attempt,
            at_s: 0.002,
            times,
            explanation: Some(v1::ExplainResponse { placement: "min-total-delay".into(), ..Default::default() }),
            failure: failure.into(),
            reselections: if attempt == 1 { vec!["d1 instead of d0: no room".into()] } else { Vec::new() },
        };
        let end = v1::RequestEnd {
            finish_reason: "length".into(),
            usage: Some(v1::Usage { prompt_tokens: 100, completion_tokens: 7, cached_tokens: 64 }),
            ttft_s: Some(0.2),
            decode_node: "d1".into(),
            predicted_ttft_s: Some(0.1),
            first_token_attempt: Some(0),
            ..Default::default()
        };
        v1::ExplainByIdResponse {
            request_id: "ab".into(),
            decisions: vec![decision(0, 3, "the node was lost"), decision(1, 1, "")],
            decisions_left_out: 2,
            end: Some(end),
            ..Default::default()
        }
    }

    #[test]
    fn explain_table_of_request_shows_attempts_and_end() {
        let text = render(&record(), Paint::none());
        for part in [
            "request   ab\n\nattempt 0, decided 2.0 ms after it came, asked 3 times\nprompt    0 tokens",
            "failed    the node was lost\n\n(2 decisions are not kept)\n\nattempt 1, decided 2.0 ms after it came\n",
            "ended     length, 0 us after it came\n",
            "TTFT      200.0 ms, predicted 100.0 ms; 2.0 ms of it before attempt 1 was placed\nTBT       -, predicted -",
            "cached    64 of 100 tokens\noutput    7 tokens\n",
            "\n\nwent on   d1 instead of d0: no room\n\nended",
            "\nqueue     0 us for prefill in attempt 0, 0 us for decode\n",
            "\nprefill   0 us in attempt 0\ndecoded   on d1\n",
        ] {
            assert!(text.contains(part), "'{part}' in:\n{text}");
        }
        assert!(
            render(&v1::ExplainByIdResponse { end: None, ..record() }, Paint::none()).contains("\n\nit runs\n\nAll")
        );
    }

    #[test]
    fn explain_json_of_request_has_attempts_and_end() {
        let json = to_json(&record());
        assert_eq!(
            (&json["decisions"][0]["failure"], &json["decisions"][1]["failure"]),
            (&json!("the node was lost"), &Value::Null)
        );
        assert_eq!((&json["end"]["output_tokens"], &json["end"]["tbt_s"]), (&json!(7), &Value::Null));
        assert_eq!(json["decisions"][1]["explanation"]["placement"], "min-total-delay");
        assert_eq!(
            (&json["decisions"][1]["reselections"][0], &json["end"]["decode_node"]),
            (&json!("d1 instead of d0: no room"), &json!("d1"))
        );
    }

    #[test]
    fn explain_argument_is_recognised_as_request_id_or_prompt() {
        let id = |line: &[&str]| {
            let cli = Cli::try_parse_from([&["baton", "explain"], line].concat()).unwrap();
            let Command::Explain(args) = cli.command else { panic!("another command") };
            request_id(&args)
        };
        let text = "0123456789abcdef0123456789abcdef";
        assert_eq!(id(&[text]).as_deref(), Some(text));
        assert_eq!(id(&[&format!("chatcmpl-{text}")]).as_deref(), Some(text));
        assert_eq!(id(&["4F0C1a"]).as_deref(), Some("4f0c1a"), "its first digits");
        assert_eq!(id(&["--request", "mine 7"]).as_deref(), Some("mine 7"), "the client's own");
        assert_eq!(id(&["--request", "msg_7"]).as_deref(), Some("msg_7"));
        assert_eq!(id(&["--request", &format!("msg_{text}")]).as_deref(), Some(text));
        let refused = |line: &[&str]| Cli::try_parse_from([&["baton", "explain", "--request"], line].concat()).is_err();
        assert!(refused(&["--raw", "mine"]) && refused(&["--prompt-file", "mine"]));
        for prompt in [&["face"][..], &["-"], &["4f0c1a is what?"], &["--raw", text], &["--prompt-file", "4f0c1a"]] {
            assert_eq!(id(prompt), None, "{prompt:?}");
        }
    }
}
