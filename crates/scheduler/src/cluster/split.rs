//! Long prompts over several nodes: each computes a part of the layers, chunk after chunk, so that the parts overlap but for one chunk (chunked pipeline parallelism; Mooncake, section 5.1).

use std::time::Instant;

use baton_types::{NodeId, QueueTerms};

use super::Cluster;
use crate::placement::{PlacementRequest, PrefillCandidate, PrefillPlan};

/// Most nodes of one prompt.
const MAX_PARTS: usize = 4;

/// Who computes a prompt, on which terms, and what becomes of it.
pub(super) struct Split {
    pub plan: PrefillPlan,
    pub terms: QueueTerms,
    pub helpers: Vec<NodeId>,
}

impl Cluster {
    /// Splits a plan that takes too long over the chosen node and those with the least work, where that is sooner.
    pub(super) fn split(
        &self,
        now: Instant,
        request: &PlacementRequest<'_>,
        chosen: &PrefillCandidate<'_>,
        plan: &PrefillPlan,
        candidates: &[PrefillCandidate<'_>],
    ) -> Split {
        let terms = self.placement.terms(request, plan.compute);
        let plan = self.reordered(now, terms, chosen.node, plan);
        let whole = Split { plan, terms, helpers: Vec::new() };
        let Some(limit) = self.config.split_above.filter(|limit| plan.compute > limit.as_secs_f64()) else {
            return whole;
        };
        let parts = (plan.compute / limit.as_secs_f64().max(1e-3)).ceil() as usize;
        let parts = parts.min(MAX_PARTS).min(candidates.len());
        let mut others: Vec<_> = candidates.iter().filter(|candidate| candidate.node != chosen.node).collect();
        others.sort_by(|a, b| a.local.ahead.total_cmp(&b.local.ahead));
        others.truncate(parts.saturating_sub(1));
        let compute = plan.compute / parts.max(1) as f64;
        let terms = self.placement.terms(request, compute);
        let part = PrefillPlan { compute, ..plan };
        let own = self.reordered(now, terms, chosen.node, &part);
        // The last of the parts decides when it is done, and each may make others late.
        let split = others.iter().map(|other| self.reordered(now, terms, other.node, &part)).fold(own, |all, part| {
            PrefillPlan {
                ahead: all.ahead.max(part.ahead),
                passed: all.passed + part.passed,
                broken: all.broken + part.broken,
                ..all
            }
        });
        if split.finish() >= plan.finish() {
            return whole;
        }
        Split { plan: split, terms, helpers: others.into_iter().map(|other| other.node.clone()).collect() }
    }
}
