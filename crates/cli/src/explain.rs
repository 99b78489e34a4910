//! `baton explain`.

use baton_bench::seconds;
use baton_proto::v1;
use baton_proto::v1::explain_response::Decision;
use serde_json::{Value, json};

use crate::args::ExplainArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::record;
use crate::screen::{Paint, line};
use crate::table::table;

/// Prints where a request would go now, and by what that is decided, or what was decided on one
/// that came. Nothing is generated.
pub async fn run(args: &ExplainArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    if let Some(id) = record::request_id(args) {
        return record::run(id, args, conductor, json).await;
    }
    let request = args.placement.request(args.prompt.load()?);
    let conductor = Conductor::connect(conductor).await?;
    let request = v1::ExplainRequest { request: Some(request) };
    let explained = conductor.cluster().explain(request).await?.into_inner();
    let paint = Paint::stdout();
    let text = if json {
        to_json(&explained).to_string()
    } else {
        format!("{}\n\n{}", render(&explained, paint), legend(paint))
    };
    Ok(line(&text)?)
}

/// What the columns of [`render`] mean.
pub fn legend(paint: Paint) -> String {
    paint.dim(LEGEND)
}

const LEGEND: &str = "\
All times are predictions. CACHED: tokens of the prompt that the node holds. OVERTAKES: queued prompts that go after
this one. COST: what the placement policy compares; the least is chosen. TBT: with this request in the batch. PUSH: time
to send it the prompt's KV. PREFILL HERE: queue and compute if the decode node computes the prompt; it disturbs if
running sequences would wait noticeably.";

const PREFILL: [&str; 9] =
    ["PREFILL", "VERDICT", "PENDING", "CACHED", "QUEUE", "FETCH", "COMPUTE", "OVERTAKES", "COST"];
const DECODE: [&str; 6] = ["DECODE", "VERDICT", "SEQUENCES", "TBT", "PUSH", "PREFILL HERE"];
/// Column of the verdict, which is coloured.
const VERDICT: usize = 1;

/// An explanation for people.
pub fn render(explained: &v1::ExplainResponse, paint: Paint) -> String {
    let head = format!(
        "prompt    {} tokens\npolicies  placement {}, admission {}\n{}",
        explained.prompt_tokens,
        explained.placement,
        explained.admission,
        decision(explained.decision.as_ref())
    );
    let prefill: Vec<_> = explained.prefill.iter().flat_map(prefill_rows).collect();
    let decode: Vec<_> = explained.decode.iter().map(decode_row).collect();
    let coloured = |rows: &[Vec<String>], row: usize, column: usize, cell: &str| match rows[row][column].as_str() {
        "chosen" if column == VERDICT => paint.green(cell),
        _ => cell.to_owned(),
    };
    let prefill_table = table(&PREFILL, &prefill, paint, |row, column, cell| coloured(&prefill, row, column, cell));
    let decode_table = table(&DECODE, &decode, paint, |row, column, cell| coloured(&decode, row, column, cell));
    let tables = [(prefill_table, prefill.is_empty()), (decode_table, decode.is_empty())];
    let rests = [rest("prefill", &explained.prefill_rest), rest("decode", &explained.decode_rest)];
    let tables = tables.into_iter().zip(rests).filter(|((_, empty), _)| !empty);
    let tables = tables.map(|((table, _), rest)| table + &rest);
    std::iter::once(head).chain(tables).collect::<Vec<_>>().join("\n\n")
}

/// A line for the nodes that have none of their own.
fn rest(role: &str, counts: &[v1::VerdictCount]) -> String {
    let counts: Vec<_> = counts.iter().map(|count| format!("{} {}", count.nodes, count.verdict)).collect();
    if counts.is_empty() { String::new() } else { format!("\nother {role} nodes: {}", counts.join(", ")) }
}

fn decision(decision: Option<&Decision>) -> String {
    match decision {
        Some(Decision::Placed(placed)) => {
            let decode = match (placed.decode.as_str(), placed.partial_prefill_tokens) {
                ("", _) => String::new(),
                (decode, _) if decode == placed.prefill => ", which computes the prompt and decodes".to_owned(),
                (decode, 0) => format!(", then {decode}"),
                (decode, tail) => format!(" and, with the last {tail} tokens of the prompt, {decode}"),
            };
            let tbt = placed.tbt_s.map(|tbt| format!(", TBT {}", seconds(tbt))).unwrap_or_default();
            let prefill = &placed.prefill;
            let cached = placed.cached_tokens;
            let ttft = seconds(placed.ttft_s);
            format!("goes to   {prefill}{decode}: {cached} tokens cached, TTFT {ttft}{tbt}")
        }
        Some(Decision::Rejected(rejected)) => {
            let verdict = if rejected.waits { "waits    " } else { "rejected " };
            let retry =
                rejected.retry_after_s.map(|after| format!("; retry in {}", seconds(after))).unwrap_or_default();
            format!("{verdict} {}{retry}", rejected.message)
        }
        None => "the conductor did not say".to_owned(),
    }
}

/// A row for what the node holds, and one for what it could fetch.
fn prefill_rows(row: &v1::PrefillExplanation) -> Vec<Vec<String>> {
    let cells = |name: String, verdict: String, pending: String, plan: Option<&v1::PrefillPlan>, cost: String| {
        let of = |cell: fn(&v1::PrefillPlan) -> String| plan.map(cell).unwrap_or_else(none);
        vec![
            name,
            verdict,
            pending,
            of(|plan| plan.cached_tokens.to_string()),
            of(|plan| seconds(plan.queue_s)),
            of(|plan| seconds(plan.fetch_s)),
            of(|plan| seconds(plan.compute_s)),
            of(|plan| plan.overtakes.to_string()),
            cost,
        ]
    };
    let cost = row.cost.map(|cost| format!("{cost:.4}")).unwrap_or_else(none);
    let own = cells(row.node.clone(), row.verdict.clone(), row.pending.to_string(), row.local.as_ref(), cost);
    let fetch = row
        .fetch
        .as_ref()
        .map(|plan| cells("  with fetch".to_owned(), String::new(), String::new(), Some(plan), String::new()));
    std::iter::once(own).chain(fetch).collect()
}

fn decode_row(row: &v1::DecodeExplanation) -> Vec<String> {
    let time = |time: Option<f64>| time.map(seconds).unwrap_or_else(none);
    let prompt = row.prompt.as_ref().map(|plan| {
        let disturbs = if row.prompt_disturbs { ", disturbs" } else { "" };
        format!("{}{disturbs}", seconds(plan.queue_s + plan.compute_s))
    });
    let tbt = time(row.tbt_s);
    let push = time(row.push_s);
    vec![row.node.clone(), row.verdict.clone(), row.sequences.to_string(), tbt, push, prompt.unwrap_or_else(none)]
}

fn none() -> String {
    "-".to_owned()
}

/// An explanation for programs.
pub fn to_json(explained: &v1::ExplainResponse) -> Value {
    let plan = |plan: &v1::PrefillPlan| {
        json!({
            "cached_tokens": plan.cached_tokens, "queue_s": plan.queue_s, "fetch_s": plan.fetch_s,
            "compute_s": plan.compute_s, "overtakes": plan.overtakes,
        })
    };
    let prefill = explained.prefill.iter().map(|row| {
        json!({
            "node": row.node, "verdict": row.verdict, "pending": row.pending, "cost": row.cost,
            "local": row.local.as_ref().map(plan), "fetch": row.fetch.as_ref().map(plan),
        })
    });
    let decode = explained.decode.iter().map(|row| {
        json!({
            "node": row.node, "verdict": row.verdict, "sequences": row.sequences, "tbt_s": row.tbt_s,
            "push_s": row.push_s, "prompt": row.prompt.as_ref().map(plan), "prompt_disturbs": row.prompt_disturbs,
        })
    });
    let rest = |counts: &[v1::VerdictCount]| -> Vec<_> {
        counts.iter().map(|count| json!({ "verdict": count.verdict, "nodes": count.nodes })).collect()
    };
    let (placed, rejected) = match &explained.decision {
        Some(Decision::Placed(placed)) => (
            json!({
                "prefill": placed.prefill, "decode": (!placed.decode.is_empty()).then_some(&placed.decode),
                "cached_tokens": placed.cached_tokens, "partial_prefill_tokens": placed.partial_prefill_tokens, "ttft_s": placed.ttft_s, "tbt_s": placed.tbt_s,
            }),
            Value::Null,
        ),
        Some(Decision::Rejected(rejected)) => (
            Value::Null,
            json!({
                "message": rejected.message, "retry_after_s": rejected.retry_after_s, "waits": rejected.waits,
            }),
        ),
        None => (Value::Null, Value::Null),
    };
    json!({
        "prompt_tokens": explained.prompt_tokens, "placement": explained.placement, "admission": explained.admission,
        "placed": placed, "rejected": rejected, "prefill": prefill.collect::<Vec<_>>(), "decode": decode.collect::<Vec<_>>(),
        "prefill_rest": rest(&explained.prefill_rest), "decode_rest": rest(&explained.decode_rest),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(decision: Decision) -> v1::ExplainResponse {
        let plan = v1::PrefillPlan { cached_tokens: 64, queue_s: 0.0021, fetch_s: 0.0, compute_s: 1.5, overtakes: 2 };
        let fetch = v1::PrefillPlan { cached_tokens: 96, fetch_s: 0.01, ..plan };
        v1::ExplainResponse {
            placement: "min-total-delay".to_owned(),
            admission: "value-density".to_owned(),
            prompt_tokens: 100,
            prefill: vec![
                v1::PrefillExplanation {
                    node: "p0".to_owned(),
                    verdict: "chosen".to_owned(),
                    pending: 3,
                    local: Some(plan),
                    fetch: Some(fetch),
                    cost: Some(1.25),
                },
                v1::PrefillExplanation {
                    node: "p1".to_owned(),
                    verdict: "left out: draining".to_owned(),
                    ..v1::PrefillExplanation::default()
                },
            ],
            decode: vec![v1::DecodeExplanation {
                node: "d0".to_owned(),
                verdict: "chosen".to_owned(),
                sequences: 7,
                tbt_s: Some(0.012),
                push_s: Some(0.0),
                prompt: Some(v1::PrefillPlan { queue_s: 0.5, compute_s: 1.5, ..v1::PrefillPlan::default() }),
                prompt_disturbs: true,
            }],
            decision: Some(decision),
            ..v1::ExplainResponse::default()
        }
    }

    fn placed() -> v1::ExplainResponse {
        explained(Decision::Placed(v1::PlacementDecision {
            prefill: "p0".to_owned(),
            decode: "d0".to_owned(),
            cached_tokens: 64,
            ttft_s: 1.502,
            tbt_s: Some(0.012),
            partial_prefill_tokens: 0,
        }))
    }

    #[test]
    fn explain_shows_partial_prefill_at_the_decode_node() {
        let mut split = placed();
        if let Some(Decision::Placed(placed)) = &mut split.decision {
            placed.partial_prefill_tokens = 16;
        }
        let text = render(&split, Paint::none());
        assert!(
            text.contains("goes to   p0 and, with the last 16 tokens of the prompt, d0: 64 tokens cached"),
            "{text}"
        );
        assert_eq!(to_json(&split)["placed"]["partial_prefill_tokens"], 16);
    }

    #[test]
    fn explain_names_a_node_once_that_computes_and_decodes() {
        let mut one = placed();
        if let Some(Decision::Placed(placed)) = &mut one.decision {
            placed.prefill = "d0".to_owned();
        }
        let text = render(&one, Paint::none());
        assert!(text.contains("goes to   d0, which computes the prompt and decodes: 64 tokens cached"), "{text}");
    }

    #[test]
    fn explain_table_shows_every_node_and_the_decision() {
        let text = render(&placed(), Paint::none());
        let expected = "\
prompt    100 tokens
policies  placement min-total-delay, admission value-density
goes to   p0, then d0: 64 tokens cached, TTFT 1.50 s, TBT 12.0 ms

PREFILL       VERDICT             PENDING  CACHED  QUEUE   FETCH    COMPUTE  OVERTAKES  COST
p0            chosen              3        64      2.1 ms  0 us     1.50 s   2          1.2500
  with fetch                               96      2.1 ms  10.0 ms  1.50 s   2
p1            left out: draining  0        -       -       -        -        -          -

DECODE  VERDICT  SEQUENCES  TBT      PUSH  PREFILL HERE
d0      chosen   7          12.0 ms  0 us  2.00 s, disturbs";
        assert_eq!(text, expected);
    }

    #[test]
    fn explain_counts_nodes_without_a_row() {
        let count = |verdict: &str, nodes| v1::VerdictCount { verdict: verdict.to_owned(), nodes };
        let prefill_rest = vec![count("not chosen", 60), count("left out: draining", 8)];
        let text = render(&v1::ExplainResponse { prefill_rest, ..placed() }, Paint::none());
        assert!(text.contains("\nother prefill nodes: 60 not chosen, 8 left out: draining\n\nDECODE"), "{text}");
    }

    #[test]
    fn explain_shows_why_a_request_is_refused_and_when_to_retry() {
        let rejected = |waits| {
            let message = "the time to first token would be 31s".to_owned();
            let decision = v1::RejectionDecision { message, retry_after_s: Some(2.5), waits };
            explained(Decision::Rejected(decision))
        };
        let text = render(&rejected(false), Paint::none());
        assert!(text.contains("rejected  the time to first token would be 31s; retry in 2.50 s"), "{text}");
        assert!(render(&rejected(true), Paint::none()).contains("\nwaits     the time"));
        let json = to_json(&rejected(false));
        assert_eq!((&json["placed"], &json["rejected"]["waits"]), (&Value::Null, &Value::Bool(false)));
    }

    #[test]
    fn explain_json_has_the_cost_terms() {
        let json = to_json(&placed());
        assert_eq!(json["prefill"][0]["fetch"]["cached_tokens"], 96);
        assert_eq!(json["prefill"][1]["local"], Value::Null);
        assert_eq!((&json["placed"]["decode"], &json["decode"][0]["tbt_s"]), (&"d0".into(), &0.012.into()));
    }
}
