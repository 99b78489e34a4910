//! Long prompts over several nodes: each computes a part of the layers, chunk after chunk, so that the parts overlap but for one chunk (chunked pipeline parallelism; Mooncake, section 5.1).

use std::time::Instant;

use baton_types::NodeId;

use super::Cluster;
use crate::cost::duration;
use crate::placement::{PlacementRequest, PrefillCandidate, PrefillPlan};

/// Most nodes of one prompt.
const MAX_PARTS: usize = 4;

/// Who computes a prompt, and what becomes of its plan.
pub(super) struct Split {
    pub plan: PrefillPlan,
    pub helpers: Vec<NodeId>,
}

impl Cluster {
    /// Splits a plan that takes too long over the chosen node and those with the least work, where that is sooner.
    pub(super) fn split(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        chosen: &PrefillCandidate,
        plan: &PrefillPlan,
        candidates: &[PrefillCandidate],
    ) -> Split {
        let whole = Split { plan: *plan, helpers: Vec::new() };
        let Some(limit) = self.config.split_above.filter(|limit| plan.compute > *limit) else { return whole };
        let parts = (plan.compute.as_secs_f64() / limit.as_secs_f64().max(1e-3)).ceil() as usize;
        let parts = parts.min(MAX_PARTS).min(candidates.len());
        let mut others: Vec<_> = candidates.iter().filter(|candidate| candidate.node != chosen.node).collect();
        others.sort_by_key(|candidate| candidate.local.ahead);
        others.truncate(parts.saturating_sub(1));
        let compute = plan.compute / parts.max(1) as u32;
        let terms = self.placement.terms(request, compute);
        let wait = |node: &NodeId| {
            let backlog = self.nodes.get(node).map(|node| node.charges.backlog.impact(now, terms, 0.0).ahead);
            duration(backlog.unwrap_or(0.0))
        };
        let ahead = others.iter().map(|other| wait(&other.node)).chain([wait(&chosen.node)]).max();
        let split = PrefillPlan { compute, terms, ahead: ahead.unwrap_or_default(), ..*plan };
        if split.finish() >= plan.finish() {
            return whole;
        }
        Split { plan: split, helpers: others.into_iter().map(|other| other.node.clone()).collect() }
    }
}
