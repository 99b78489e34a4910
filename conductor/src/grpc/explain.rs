//! Explanations on the wire.

use baton_proto::v1;
use baton_scheduler::{DecodeExplanation, Explanation, Placement, PrefillExplanation, PrefillPlan, Refusal, Verdict};
use baton_types::{Attempt, Tbt, Ttft};

use crate::decision_log::{Decision, RequestEnd, RequestRecord};
use crate::error::GenerateError;
use crate::leader::DecisionReasons;

pub fn response(prompt_tokens: u32, explanation: &Explanation) -> v1::ExplainResponse {
    v1::ExplainResponse {
        placement: explanation.placement.to_owned(),
        admission: explanation.admission.to_owned(),
        prompt_tokens,
        prefill: explanation.prefill.iter().map(prefill).collect(),
        decode: explanation.decode.iter().map(decode).collect(),
        decision: Some(decided(&explanation.decision)),
        prefill_rest: explanation.prefill_rest.iter().map(verdict_count).collect(),
        decode_rest: explanation.decode_rest.iter().map(verdict_count).collect(),
    }
}

fn decided(decision: &Result<Placement, Refusal>) -> v1::explain_response::Decision {
    match decision {
        Ok(placement) => {
            let Ttft(ttft) = placement.predicted_ttft;
            v1::explain_response::Decision::Placed(v1::PlacementDecision {
                prefill: placement.prefill.to_string(),
                decode: placement.decode.as_ref().map(|node| node.to_string()).unwrap_or_default(),
                cached_tokens: placement.matched_tokens,
                partial_prefill_tokens: placement.partial_prefill_tokens,
                ttft_s: (ttft + placement.first_token_delay).as_secs_f64(),
                tbt_s: placement.predicted_tbt.map(|Tbt(tbt)| tbt.as_secs_f64()),
            })
        }
        Err(refusal) => v1::explain_response::Decision::Rejected(v1::RejectionDecision {
            message: refusal.message.clone(),
            retry_after_s: refusal.retry_after.map(|after| after.as_secs_f64()),
            waits: refusal.hold.is_some(),
        }),
    }
}

fn verdict_count((verdict, nodes): &(Verdict, usize)) -> v1::VerdictCount {
    v1::VerdictCount { verdict: verdict.to_string(), nodes: *nodes as u32 }
}

pub(super) fn record(record: &RequestRecord) -> v1::ExplainByIdResponse {
    v1::ExplainByIdResponse {
        request_id: record.request.to_string(),
        prompt_tokens: record.prompt_tokens,
        max_tokens: record.max_tokens,
        decisions: record.decisions.iter().map(|of| decision(record.prompt_tokens, of)).collect(),
        decisions_left_out: record.decisions_left_out,
        end: record.end.as_ref().map(|of| end(record, of)),
    }
}

fn decision(prompt_tokens: u32, decision: &Decision) -> v1::RequestDecision {
    v1::RequestDecision {
        attempt: decision.attempt.0,
        at_s: decision.at.as_secs_f64(),
        times: decision.times,
        explanation: Some(grounds(prompt_tokens, decision)),
        failure: decision.failure.clone().unwrap_or_default(),
        reselections: decision.reselections.clone(),
    }
}

/// What the leader told, if it decided; else what this conductor decided by.
fn grounds(prompt_tokens: u32, decision: &Decision) -> v1::ExplainResponse {
    match &*decision.grounds {
        DecisionReasons::Own(explanation) => response(prompt_tokens, explanation),
        DecisionReasons::FromLeader(told) => v1::ExplainResponse { prompt_tokens, ..(**told).clone() },
        DecisionReasons::NoLeader => {
            let decision = decided(&decision.placed);
            v1::ExplainResponse { prompt_tokens, decision: Some(decision), ..v1::ExplainResponse::default() }
        }
    }
}

fn end(record: &RequestRecord, end: &RequestEnd) -> v1::RequestEnd {
    let failure =
        |error: &GenerateError| v1::Failure { kind: error.kind().as_str().into(), message: error.to_string() };
    let placement = record.served_by().map(|(placement, _)| placement);
    v1::RequestEnd {
        finish_reason: end.outcome.as_ref().map(|finish| finish.as_str().to_owned()).unwrap_or_default(),
        failure: end.outcome.as_ref().err().map(failure),
        usage: Some((&end.usage).into()),
        timeline: Some((&end.timeline).into()),
        ttft_s: end.ttft().map(|ttft| ttft.as_secs_f64()),
        tbt_s: end.tbt.map(|Tbt(tbt)| tbt.as_secs_f64()),
        predicted_ttft_s: record.predicted_ttft().map(|ttft| ttft.as_secs_f64()),
        predicted_tbt_s: record.predicted_tbt(end).map(|tbt| tbt.as_secs_f64()),
        decode_node: end.decode.as_ref().map(ToString::to_string).unwrap_or_default(),
        predicted_output_tokens: placement.filter(|it| it.decode.is_some()).map(|it| it.predicted_output_tokens),
        first_token_attempt: end.first_token.map(|Attempt(attempt)| attempt),
    }
}

fn prefill(row: &PrefillExplanation) -> v1::PrefillExplanation {
    v1::PrefillExplanation {
        node: row.node.to_string(),
        verdict: row.verdict.to_string(),
        pending: row.pending as u32,
        local: row.local.as_ref().map(plan),
        fetch: row.fetch.as_ref().map(plan),
        cost: row.cost,
    }
}

fn plan(plan: &PrefillPlan) -> v1::PrefillPlan {
    v1::PrefillPlan {
        cached_tokens: plan.matched_tokens,
        queue_s: plan.ahead,
        fetch_s: plan.transfer,
        compute_s: plan.compute,
        overtakes: plan.passed as u32,
    }
}

fn decode(row: &DecodeExplanation) -> v1::DecodeExplanation {
    v1::DecodeExplanation {
        node: row.node.to_string(),
        verdict: row.verdict.to_string(),
        sequences: row.sequences as u32,
        tbt_s: row.tbt,
        push_s: row.push,
        prompt: row.prompt.as_ref().map(|prompt| plan(&prompt.unshared())),
        prompt_disturbs: row.prompt.is_some_and(|prompt| prompt.disturbs),
    }
}
