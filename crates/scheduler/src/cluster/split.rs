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
    /// Prompts that were admitted and would miss their objective because of it.
    pub broken: usize,
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
        let terms = self.terms(request, plan.compute);
        let (plan, broken) = self.reordered(now, terms, chosen.node, plan);
        let whole = Split { plan, terms, broken, helpers: Vec::new() };
        let Some(limit) = self.config.split_above.filter(|limit| plan.compute > limit.as_secs_f64()) else {
            return whole;
        };
        let parts = (plan.compute / limit.as_secs_f64().max(1e-3)).ceil() as usize;
        let parts = parts.min(MAX_PARTS).min(candidates.len());
        let mut others: Vec<_> = candidates.iter().filter(|candidate| candidate.node != chosen.node).collect();
        others.sort_by(|a, b| a.local.ahead.total_cmp(&b.local.ahead));
        others.truncate(parts.saturating_sub(1));
        let compute = plan.compute / parts.max(1) as f64;
        let terms = self.terms(request, compute);
        let part = PrefillPlan { compute, ahead: 0.0, ..plan };
        // The last of the parts decides when it is done, and each may make others late.
        let nodes = others.iter().map(|other| other.node).chain([chosen.node]);
        let (split, broken) = nodes.fold((part, 0), |(all, broken), node| {
            let (part, more) = self.reordered(now, terms, node, &part);
            (PrefillPlan { ahead: all.ahead.max(part.ahead), ..all }, broken + more)
        });
        if split.finish() >= plan.finish() {
            return whole;
        }
        Split { plan: split, terms, broken, helpers: others.into_iter().map(|other| other.node.clone()).collect() }
    }
}
