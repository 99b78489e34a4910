//! The cluster's load on the wire.

use std::time::Instant;

use baton_proto::v1;
use baton_scheduler::{Cluster, ClusterNode};
use baton_types::NodeRole;

use crate::accuracy::{Accuracy, Estimate};
use crate::frontend::Frontend;
use crate::tally::{AdmissionTally, Goodput, LastRefusal};

pub(super) fn response(frontend: &Frontend) -> v1::ClusterLoadResponse {
    let now = frontend.clock.now();
    let (prefill, decode, policy, queued_now) = {
        let cluster = frontend.cluster();
        let of = |role| cluster.nodes().filter(move |node| node.info().role == role);
        let prefill = of(NodeRole::Prefill).map(|node| prefill_load(&cluster, now, node)).collect();
        let decode = of(NodeRole::Decode).map(|node| decode_load(&cluster, now, node)).collect();
        (prefill, decode, cluster.admission_policy(), cluster.requests_queued() as u32)
    };
    let tally = frontend.tally.lock();
    let admission = v1::AdmissionLoad { policy: policy.into(), queued_now, ..admission_load(now, &tally.admission) };
    v1::ClusterLoadResponse {
        prefill,
        decode,
        admission: Some(admission),
        goodput: Some(goodput(now, &tally.goodput)),
        estimates: Estimate::ALL.map(|estimate| estimate_accuracy(&tally.accuracy, estimate)).to_vec(),
    }
}

fn prefill_load(cluster: &Cluster, now: Instant, node: &ClusterNode) -> v1::PrefillNodeLoad {
    let outlook = cluster.outlook(now, node);
    v1::PrefillNodeLoad {
        node: node.info().node.to_string(),
        state: node.state().as_str().into(),
        pending: outlook.pending as u32,
        queue_s: outlook.queue.as_secs_f64(),
        tokens_per_second: outlook.rows_per_second,
    }
}

fn decode_load(cluster: &Cluster, now: Instant, node: &ClusterNode) -> v1::DecodeNodeLoad {
    let (outlook, load) = (cluster.outlook(now, node), node.load());
    v1::DecodeNodeLoad {
        node: node.info().node.to_string(),
        state: node.state().as_str().into(),
        sequences: outlook.sequences as u32,
        running: load.running,
        blocks_used: load.blocks_used,
        blocks_total: load.blocks_total,
        tbt_s: outlook.tbt.map(|tbt| tbt.as_secs_f64()),
        step_s: outlook.step.map(|step| step.as_secs_f64()),
    }
}

fn admission_load(now: Instant, tally: &AdmissionTally) -> v1::AdmissionLoad {
    let last_refusal = |refusal: &LastRefusal| v1::LastRefusal {
        age_s: now.saturating_duration_since(refusal.at).as_secs_f64(),
        message: refusal.message.clone(),
        retry_after_s: refusal.retry_after.map(|after| after.as_secs_f64()),
    };
    v1::AdmissionLoad {
        accepted: tally.accepted,
        refused: tally.refused,
        queued: tally.queued,
        last_refusal: tally.last_refusal.as_ref().map(last_refusal),
        ..v1::AdmissionLoad::default()
    }
}

fn goodput(now: Instant, goodput: &Goodput) -> v1::Goodput {
    let (count, window) = goodput.window(now);
    v1::Goodput { window_s: window.as_secs_f64(), ended: count.ended, within: count.within, aborted: count.aborted }
}

fn estimate_accuracy(accuracy: &Accuracy, estimate: Estimate) -> v1::EstimateAccuracy {
    let summary = accuracy.summary(estimate);
    v1::EstimateAccuracy {
        estimate: estimate.as_str().into(),
        count: summary.map_or(0, |summary| summary.count as u32),
        predicted_p50: summary.map(|summary| summary.predicted_p50),
        measured_p50: summary.map(|summary| summary.measured_p50),
        error_p50: summary.map(|summary| summary.error_p50),
        error_p90: summary.map(|summary| summary.error_p90),
        bias: summary.map(|summary| summary.bias),
    }
}
