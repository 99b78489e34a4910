//! Why a request goes where it goes: what placement would decide now, and what it would decide it by.

use std::fmt;
use std::time::Instant;

use baton_types::{NodeId, NodeRole};

use super::place::{placement_of, verdict};
use super::{Cluster, NodeState};
use crate::placement::{Placement, PlacementRequest, PrefillPlan, Refusal};

/// A decision and its grounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Policy that chooses.
    pub placement: &'static str,
    /// Policy that takes in.
    pub admission: &'static str,
    /// Every prefill node that is known, by name.
    pub prefill: Vec<PrefillExplanation>,
    /// Every decode node that is known, by name; none where one token is wanted.
    pub decode: Vec<DecodeExplanation>,
    /// Where it goes, or why it does not.
    pub decision: Result<Placement, Refusal>,
}

/// What a prefill node would do with the request. Times are seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillExplanation {
    /// The node.
    pub node: NodeId,
    /// What became of it.
    pub verdict: Verdict,
    /// Prompts placed there whose first token has not come.
    pub pending: usize,
    /// With what it holds; none where it was left out.
    pub local: Option<PrefillPlan>,
    /// With the longest prefix that any node holds.
    pub fetch: Option<PrefillPlan>,
    /// What it was compared by, the least winning, beside the decode node that was chosen; none where the policy compares nothing.
    pub cost: Option<f64>,
}

/// What a decode node would do with the request. Times are seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeExplanation {
    /// The node.
    pub node: NodeId,
    /// What became of it.
    pub verdict: Verdict,
    /// Sequences placed there.
    pub sequences: usize,
    /// A step with everybody placed there and the newcomer, as a high quantile; none where it was left out.
    pub tbt: Option<f64>,
    /// To push what it does not hold of the prompt.
    pub push: Option<f64>,
}

/// What became of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The request goes there, if it is taken in.
    Chosen,
    /// Another one was better, or as good and drawn.
    Lost,
    /// It was not among those that were compared.
    LeftOut(LeftOut),
}

/// Why a node was not among those that were compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftOut {
    /// It does not take requests, or others are in a better state.
    State(NodeState),
    /// The request was there before.
    Excluded,
    /// The request does not fit it.
    TooSmall,
    /// Its queue is full.
    QueueFull,
    /// It has no blocks or no seat free.
    NoRoom,
    /// Its queue alone is longer than the objective.
    Busy,
    /// It joined lately and has its share.
    SlowStart,
    /// A sequence there would miss its objective.
    Breaks,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::Lost => f.write_str("lost"),
            Self::LeftOut(reason) => write!(f, "left out: {reason}"),
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::State(state) => state.as_str(),
            Self::Excluded => "the request was there before",
            Self::TooSmall => "the request does not fit it",
            Self::QueueFull => "its queue is full",
            Self::NoRoom => "no blocks or no seat free",
            Self::Busy => "its queue alone is longer than the objective",
            Self::SlowStart => "it joined lately and has its share",
            Self::Breaks => "a sequence there would miss its objective",
        })
    }
}

impl Cluster {
    /// What [`Cluster::place`] would decide now, with the same `rng`, and why. Nothing is charged, and no policy learns of it.
    pub fn explain(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        rng: &mut impl FnMut() -> u64,
    ) -> Explanation {
        self.on_tick(now);
        let (asked, matches) = (self.asked(request), self.matches(request));
        let (policy, mut admission) = (self.placement.boxed_clone(), self.admission.boxed_clone());
        let prefill = self.prefill_candidates(now, request, &matches);
        let decode = match request.wants_decode {
            true => self.decode_candidates(now, asked, &matches),
            false => Ok(Vec::new()),
        };
        let chosen = match (&prefill, &decode) {
            (Ok(prefill), Ok(decode)) => Ok(self.choose(now, asked, (prefill, decode), &*policy, rng)),
            (Err(refusal), _) => Err(refusal.clone()),
            (_, Err(refusal)) => Err(self.held(refusal.clone(), request.slo)),
        };
        let names = chosen.as_ref().ok().map(|chosen| (chosen.prefill.clone(), chosen.decode_node().cloned()));
        let decision = chosen.and_then(|chosen| {
            let assessment = self.assess(now, asked, &chosen);
            let pace = verdict(&mut *admission, &assessment)?;
            let fetch = self.fetch_of(&chosen, &matches);
            Ok(placement_of(chosen, fetch, pace))
        });
        let (prefill, decode) = (prefill.unwrap_or_default(), decode.unwrap_or_default());
        let (chosen_prefill, chosen_decode) = names.unzip();
        let target =
            decode.iter().find(|candidate| Some(Some(candidate.node)) == chosen_decode.as_ref().map(Option::as_ref));
        let prefill_rows = self.nodes.of_role(NodeRole::Prefill).map(|node| {
            let candidate = prefill.iter().find(|candidate| *candidate.node == node.info().node);
            let verdict = verdict_on(candidate.map(|candidate| candidate.node), chosen_prefill.as_ref());
            PrefillExplanation {
                node: node.info().node.clone(),
                verdict: verdict.unwrap_or_else(|| Verdict::LeftOut(self.why_not_prefill(now, request, node))),
                pending: node.charges.pending(),
                local: candidate.map(|candidate| candidate.local),
                fetch: candidate.and_then(|candidate| candidate.fetch),
                cost: candidate.and_then(|candidate| policy.cost(request, candidate, target)),
            }
        });
        let decode_rows = self.nodes.of_role(NodeRole::Decode).filter(|_| request.wants_decode).map(|node| {
            let candidate = decode.iter().find(|candidate| *candidate.node == node.info().node);
            let chosen = chosen_decode.as_ref().and_then(Option::as_ref);
            let verdict = verdict_on(candidate.map(|candidate| candidate.node), chosen);
            DecodeExplanation {
                node: node.info().node.clone(),
                verdict: verdict.unwrap_or_else(|| Verdict::LeftOut(self.why_not_decode(now, asked, node))),
                sequences: node.charges.sequences(),
                tbt: candidate.map(|candidate| candidate.tbt),
                push: candidate.map(|candidate| candidate.push),
            }
        });
        Explanation {
            placement: self.config.placement.as_str(),
            admission: self.config.admission.as_str(),
            prefill: prefill_rows.collect(),
            decode: decode_rows.collect(),
            decision,
        }
    }
}

/// On a candidate; none where it is none.
fn verdict_on(candidate: Option<&NodeId>, chosen: Option<&NodeId>) -> Option<Verdict> {
    candidate.map(|node| if Some(node) == chosen { Verdict::Chosen } else { Verdict::Lost })
}
