//! An explanation on the wire.

use baton_proto::v1;
use baton_scheduler::{DecodeExplanation, Explanation, PrefillExplanation, PrefillPlan};
use baton_types::{Tbt, Ttft};

pub(super) fn response(prompt_tokens: u32, explanation: Explanation) -> v1::ExplainResponse {
    let decision = match explanation.decision {
        Ok(placement) => {
            let Ttft(ttft) = placement.estimated_ttft;
            v1::explain_response::Decision::Placed(v1::PlacementDecision {
                prefill: placement.prefill.to_string(),
                decode: placement.decode.map(|node| node.to_string()).unwrap_or_default(),
                cached_tokens: placement.matched_tokens,
                ttft_s: (ttft + placement.pace).as_secs_f64(),
                tbt_s: placement.estimated_tbt.map(|Tbt(tbt)| tbt.as_secs_f64()),
            })
        }
        Err(refusal) => v1::explain_response::Decision::Refused(v1::RefusalDecision {
            message: refusal.message,
            retry_after_s: refusal.retry_after.map(|after| after.as_secs_f64()),
            waits: refusal.hold.is_some(),
        }),
    };
    v1::ExplainResponse {
        placement: explanation.placement.to_owned(),
        admission: explanation.admission.to_owned(),
        prompt_tokens,
        prefill: explanation.prefill.iter().map(prefill).collect(),
        decode: explanation.decode.iter().map(decode).collect(),
        decision: Some(decision),
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
        transfer_s: plan.transfer,
        compute_s: plan.compute,
        passes: plan.passed as u32,
    }
}

fn decode(row: &DecodeExplanation) -> v1::DecodeExplanation {
    v1::DecodeExplanation {
        node: row.node.to_string(),
        verdict: row.verdict.to_string(),
        sequences: row.sequences as u32,
        tbt_s: row.tbt,
        push_s: row.push,
    }
}
