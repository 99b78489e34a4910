//! `baton load`.

use baton_bench::seconds;
use baton_proto::v1;
use serde_json::{Value, json};

use crate::args::LoadArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::Paint;
use crate::table::{node_table, table};
use crate::watch::watch;

/// Prints the load: once, or again and again.
pub async fn run(args: &LoadArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    let look = async || {
        let load = conductor.cluster().cluster_load(v1::ClusterLoadRequest {}).await?.into_inner();
        Ok(if json { to_json(&load).to_string() } else { render(&load, Paint::stdout()) })
    };
    watch(args.watch, json, look).await
}

const PREFILL: [&str; 5] = ["PREFILL", "STATE", "PENDING", "QUEUE", "TOKENS/S"];
const DECODE: [&str; 7] = ["DECODE", "STATE", "SEQUENCES", "RUNNING", "KV BLOCKS", "TBT", "STEP"];
const LEGEND: &str = "PREDICTED and MEASURED are medians. BIAS: the sum predicted over the sum measured, minus 1.";
const ESTIMATES: [&str; 7] = ["QUANTITY", "N", "PREDICTED", "MEASURED", "BIAS", "ERROR P50", "ERROR P90"];
/// Column of the state.
const STATE: usize = 1;

fn render(load: &v1::ClusterLoadResponse, paint: Paint) -> String {
    let prefill: Vec<_> = load.prefill.iter().map(prefill_row).collect();
    let decode: Vec<_> = load.decode.iter().map(decode_row).collect();
    let estimates: Vec<_> = load.prediction_errors.iter().map(estimate_row).collect();
    let nodes = [(&PREFILL[..], prefill), (&DECODE[..], decode)].into_iter().filter(|(_, rows)| !rows.is_empty());
    let nodes = nodes.map(|(header, rows)| node_table(header, &rows, STATE, paint));
    let admission = format!("{}\n{}", admission(load.admission.as_ref()), goodput(load.goodput.unwrap_or_default()));
    let estimates = table(&ESTIMATES, &estimates, paint, |_, _, cell| cell.to_owned());
    nodes.chain([admission, estimates, paint.dim(LEGEND)]).collect::<Vec<_>>().join("\n\n")
}

fn prefill_row(node: &v1::PrefillNodeLoad) -> Vec<String> {
    vec![
        node.node.clone(),
        node.state.clone(),
        node.pending.to_string(),
        seconds(node.queue_s),
        node.tokens_per_second.map(|rate| format!("{rate:.0}")).unwrap_or_else(none),
    ]
}

fn decode_row(node: &v1::DecodeNodeLoad) -> Vec<String> {
    vec![
        node.node.clone(),
        node.state.clone(),
        node.sequences.to_string(),
        node.running.to_string(),
        format!("{}/{}", node.blocks_used, node.blocks_total),
        node.tbt_s.map(seconds).unwrap_or_else(none),
        node.step_s.map(seconds).unwrap_or_else(none),
    ]
}

fn estimate_row(estimate: &v1::PredictionError) -> Vec<String> {
    let value = |value: Option<f64>| match (value, estimate.quantity.as_str()) {
        (None, _) => none(),
        (Some(tokens), "output") => format!("{tokens:.0} tokens"),
        (Some(time), _) => seconds(time),
    };
    let percent = |part: Option<f64>| part.map(|part| format!("{:.0} %", 100.0 * part)).unwrap_or_else(none);
    vec![
        estimate.quantity.clone(),
        estimate.count.to_string(),
        value(estimate.predicted_p50),
        value(estimate.measured_p50),
        estimate.bias.map(|part| format!("{:+.0} %", 100.0 * part)).unwrap_or_else(none),
        percent(estimate.error_p50),
        percent(estimate.error_p90),
    ]
}

fn admission(admission: Option<&v1::AdmissionLoad>) -> String {
    let Some(admission) = admission else { return "the conductor did not say what it took in".to_owned() };
    let v1::AdmissionLoad { policy, admitted, rejected, queued, queued_now, .. } = admission;
    let counts = format!(
        "admission  {policy}: {admitted} admitted, {rejected} rejected, {queued} queued, {queued_now} wait now"
    );
    let rejections = admission.rejections.iter().map(rejection);
    std::iter::once(counts).chain(rejections).collect::<Vec<_>>().join("\n")
}

fn rejection(last: &v1::LastRejection) -> String {
    let retry = last.retry_after_s.map(|after| format!("; retry in {}", seconds(after))).unwrap_or_default();
    let v1::LastRejection { kind, count, message, .. } = last;
    format!("rejected   {} ago: {message}{retry} ({kind}: {count})", seconds(last.age_s))
}

fn goodput(goodput: v1::Goodput) -> String {
    let v1::Goodput { window_s, ended, within, aborted } = goodput;
    let rate = within as f64 / window_s.max(1.0);
    let aborted = if aborted == 0 { String::new() } else { format!(", {aborted} aborted") };
    format!("goodput    {rate:.2} requests/s: {within} of {ended} within their objectives{aborted} in {window_s:.0} s")
}

fn none() -> String {
    "-".to_owned()
}

fn to_json(load: &v1::ClusterLoadResponse) -> Value {
    let prefill = load.prefill.iter().map(|node| {
        json!({
            "node": node.node, "state": node.state, "pending": node.pending, "queue_s": node.queue_s,
            "tokens_per_second": node.tokens_per_second,
        })
    });
    let decode = load.decode.iter().map(|node| {
        json!({
            "node": node.node, "state": node.state, "sequences": node.sequences, "running": node.running,
            "blocks_used": node.blocks_used, "blocks_total": node.blocks_total, "tbt_s": node.tbt_s,
            "step_s": node.step_s,
        })
    });
    let admission = load.admission.clone().unwrap_or_default();
    let rejections = admission.rejections.iter().map(|last| {
        json!({
            "kind": last.kind, "count": last.count, "age_s": last.age_s, "message": last.message,
            "retry_after_s": last.retry_after_s,
        })
    });
    let rejections: Vec<_> = rejections.collect();
    let goodput = load.goodput.unwrap_or_default();
    let estimates = load.prediction_errors.iter().map(|estimate| {
        json!({
            "quantity": estimate.quantity, "count": estimate.count, "predicted_p50": estimate.predicted_p50,
            "measured_p50": estimate.measured_p50, "bias": estimate.bias, "error_p50": estimate.error_p50,
            "error_p90": estimate.error_p90,
        })
    });
    json!({
        "prefill": prefill.collect::<Vec<_>>(),
        "decode": decode.collect::<Vec<_>>(),
        "admission": {
            "policy": admission.policy, "admitted": admission.admitted, "rejected": admission.rejected,
            "queued": admission.queued, "queued_now": admission.queued_now, "rejections": rejections,
        },
        "goodput": { "window_s": goodput.window_s, "ended": goodput.ended, "within": goodput.within, "aborted": goodput.aborted },
        "prediction_errors": estimates.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> v1::ClusterLoadResponse {
        let prefill = v1::PrefillNodeLoad {
            node: "p0".into(),
            state: "ready".into(),
            pending: 3,
            queue_s: 1.25,
            tokens_per_second: Some(8000.4),
        };
        let decode = v1::DecodeNodeLoad {
            node: "d0".into(),
            state: "suspect".into(),
            sequences: 7,
            running: 6,
            blocks_used: 40,
            blocks_total: 100,
            tbt_s: Some(0.012),
            step_s: None,
        };
        let last = v1::LastRejection {
            age_s: 3.0,
            message: "full".into(),
            retry_after_s: Some(0.5),
            kind: "overloaded".into(),
            count: 2,
        };
        let earlier = v1::LastRejection {
            age_s: 300.0,
            message: "no node is ready".into(),
            retry_after_s: None,
            kind: "unavailable".into(),
            count: 5,
        };
        let admission = v1::AdmissionLoad {
            policy: "value-density".into(),
            admitted: 9,
            rejected: 2,
            queued: 1,
            rejections: vec![last, earlier],
            ..v1::AdmissionLoad::default()
        };
        let measured = v1::PredictionError {
            quantity: "ttft".into(),
            count: 9,
            predicted_p50: Some(0.1),
            measured_p50: Some(0.2),
            error_p50: Some(0.5),
            error_p90: Some(0.75),
            bias: Some(-0.5),
        };
        let unknown = v1::PredictionError { quantity: "output".into(), ..v1::PredictionError::default() };
        v1::ClusterLoadResponse {
            prefill: vec![prefill],
            decode: vec![decode],
            admission: Some(admission),
            goodput: Some(v1::Goodput { window_s: 60.0, ended: 33, within: 30, aborted: 2 }),
            prediction_errors: vec![measured, unknown],
        }
    }

    #[test]
    fn load_table_shows_nodes_admission_and_estimates() {
        let expected = "\
PREFILL  STATE  PENDING  QUEUE   TOKENS/S
p0       ready  3        1.25 s  8000

DECODE  STATE    SEQUENCES  RUNNING  KV BLOCKS  TBT      STEP
d0      suspect  7          6        40/100     12.0 ms  -

admission  value-density: 9 admitted, 2 rejected, 1 queued, 0 wait now
rejected   3.00 s ago: full; retry in 500.0 ms (overloaded: 2)
rejected   300.00 s ago: no node is ready (unavailable: 5)
goodput    0.50 requests/s: 30 of 33 within their objectives, 2 aborted in 60 s

QUANTITY  N  PREDICTED  MEASURED  BIAS   ERROR P50  ERROR P90
ttft      9  100.0 ms   200.0 ms  -50 %  50 %       75 %
output    0  -          -         -      -          -

PREDICTED and MEASURED are medians. BIAS: the sum predicted over the sum measured, minus 1.";
        assert_eq!(render(&load(), Paint::none()), expected);
    }

    #[test]
    fn load_json_has_null_for_unknown_figures() {
        let json = to_json(&load());
        assert_eq!(json["admission"]["rejections"][1]["count"], 5);
        assert_eq!(
            (&json["decode"][0]["step_s"], &json["prediction_errors"][1]["error_p50"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(
            (&json["admission"]["rejections"][0]["message"], &json["goodput"]["within"]),
            (&json!("full"), &json!(30))
        );
    }
}
