//! The cluster's load on the wire.

use std::time::Instant;

use baton_proto::v1;
use baton_scheduler::{Cluster, ClusterNode};
use baton_types::NodeRole;

use crate::frontend::Frontend;
use crate::prediction_errors::{Estimate, PredictionErrors};
use crate::window_stats::{AdmissionStats, Goodput, LastRejection};

pub(super) fn response(frontend: &Frontend) -> v1::ClusterLoadResponse {
    let now = frontend.clock.now();
    let (prefill, decode, policy, queued_now) = {
        let cluster = frontend.cluster();
        let of = |role| cluster.nodes().filter(move |node| node.info().role == role);
        let prefill = of(NodeRole::Prefill).map(|node| prefill_load(&cluster, now, node)).collect();
        let decode = of(NodeRole::Decode).map(|node| decode_load(&cluster, now, node)).collect();
        (prefill, decode, cluster.admission_policy(), cluster.requests_queued() as u32)
    };
    let window_stats = frontend.window_stats.lock();
    let admission =
        v1::AdmissionLoad { policy: policy.into(), queued_now, ..admission_load(now, &window_stats.admission) };
    v1::ClusterLoadResponse {
        prefill,
        decode,
        admission: Some(admission),
        goodput: Some(goodput(now, &window_stats.goodput)),
        prediction_errors: Estimate::ALL
            .map(|estimate| prediction_error(&window_stats.prediction_errors, estimate))
            .to_vec(),
    }
}

fn prefill_load(cluster: &Cluster, now: Instant, node: &ClusterNode) -> v1::PrefillNodeLoad {
    let forecast = cluster.node_forecast(now, node);
    v1::PrefillNodeLoad {
        node: node.info().node.to_string(),
        state: node.state().as_str().into(),
        pending: forecast.pending as u32,
        queue_s: forecast.queue.as_secs_f64(),
        tokens_per_second: forecast.rows_per_second,
    }
}

fn decode_load(cluster: &Cluster, now: Instant, node: &ClusterNode) -> v1::DecodeNodeLoad {
    let forecast = cluster.node_forecast(now, node);
    let load = node.load();
    v1::DecodeNodeLoad {
        node: node.info().node.to_string(),
        state: node.state().as_str().into(),
        sequences: forecast.sequences as u32,
        running: load.running,
        blocks_used: load.blocks_used,
        blocks_total: load.blocks_total,
        tbt_s: forecast.tbt.map(|tbt| tbt.as_secs_f64()),
        step_s: forecast.step.map(|step| step.as_secs_f64()),
    }
}

fn admission_load(now: Instant, window_stats: &AdmissionStats) -> v1::AdmissionLoad {
    let last_rejection = |rejection: &LastRejection| v1::LastRejection {
        age_s: now.saturating_duration_since(rejection.at).as_secs_f64(),
        message: rejection.message.clone(),
        retry_after_s: rejection.retry_after.map(|after| after.as_secs_f64()),
        kind: rejection.kind.as_str().into(),
        count: rejection.count,
    };
    v1::AdmissionLoad {
        admitted: window_stats.admitted,
        rejected: window_stats.rejected,
        queued: window_stats.queued,
        rejections: window_stats.last_rejections.iter().map(last_rejection).collect(),
        ..v1::AdmissionLoad::default()
    }
}

fn goodput(now: Instant, goodput: &Goodput) -> v1::Goodput {
    let (count, window) = goodput.window(now);
    v1::Goodput { window_s: window.as_secs_f64(), ended: count.ended, within: count.within, aborted: count.aborted }
}

fn prediction_error(prediction_errors: &PredictionErrors, estimate: Estimate) -> v1::PredictionError {
    let summary = prediction_errors.summary(estimate);
    v1::PredictionError {
        quantity: estimate.as_str().into(),
        count: summary.map_or(0, |summary| summary.count as u32),
        predicted_p50: summary.map(|summary| summary.predicted_p50),
        measured_p50: summary.map(|summary| summary.measured_p50),
        error_p50: summary.map(|summary| summary.error_p50),
        error_p90: summary.map(|summary| summary.error_p90),
        bias: summary.map(|summary| summary.bias),
    }
}
