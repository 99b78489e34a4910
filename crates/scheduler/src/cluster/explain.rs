//! Why a request goes where it goes: what placement decides, or would decide now, and what by.

use std::fmt;
use std::time::Instant;

use baton_types::{NodeId, NodeRole};

use super::at_decode::PromptAtDecode;
use super::candidates::{Matches, SizedRequest};
use super::place::{placement_of, verdict};
use super::{Cluster, ClusterNode, NodeState, PromptsAtDecode};
use crate::placement::{
    DecodeCandidate, Placement, PlacementPolicy, PlacementRequest, PrefillCandidate, PrefillPlan, Refusal,
};

/// A decision and its grounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Policy that chooses.
    pub placement: &'static str,
    /// Policy that takes in.
    pub admission: &'static str,
    /// Every prefill node that is known, by name; of many, the best candidates.
    pub prefill: Vec<PrefillExplanation>,
    /// The same of the decode nodes; none if one token is wanted.
    pub decode: Vec<DecodeExplanation>,
    /// How many prefill nodes beside those, by verdict.
    pub prefill_rest: Vec<(Verdict, usize)>,
    /// The same of the decode nodes.
    pub decode_rest: Vec<(Verdict, usize)>,
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
    /// With what it holds; none if it was left out.
    pub local: Option<PrefillPlan>,
    /// With the longest prefix that any node holds.
    pub fetch: Option<PrefillPlan>,
    /// What it was compared by, the least winning, beside the decode node that was chosen; none if
    /// the policy compares nothing.
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
    /// A step with all sequences placed there and the newcomer, as a high quantile; none if it was
    /// left out.
    pub tbt: Option<f64>,
    /// To push what it does not hold of the prompt.
    pub push: Option<f64>,
    /// What it would be to compute the prompt there, too; none if decode nodes compute none.
    pub prompt: Option<PromptAtDecode>,
}

/// What became of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The request goes there.
    Chosen,
    /// The request would have gone there, but was rejected or waits.
    Best,
    /// Another one was better, or as good and drawn.
    NotChosen,
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
    /// It has no blocks or no slot free.
    NoRoom,
    /// Its queue alone is longer than the objective.
    Busy,
    /// It joined lately and has its share.
    SlowStart,
    /// It has what it may have until it has answered more.
    Unproven,
    /// A sequence there would miss its objective.
    Breaks,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::Best => f.write_str("best"),
            Self::NotChosen => f.write_str("not chosen"),
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
            Self::NoRoom => "no blocks or no slot free",
            Self::Busy => "its queue alone is longer than the objective",
            Self::SlowStart => "it joined lately and has its share",
            Self::Unproven => "it has its share until it has answered more",
            Self::Breaks => "a sequence there would miss its objective",
        })
    }
}

/// Which nodes of a role are told one by one.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowLimit {
    /// All, if there are no more than so many.
    up_to: usize,
    /// Of more, this many of the best candidates.
    best: usize,
}

impl RowLimit {
    /// All.
    const ALL: Self = Self { up_to: usize::MAX, best: usize::MAX };
    /// What is kept of every placement: bounded, and cheap beside it.
    pub(super) const BEST: Self = Self { up_to: 64, best: 32 };
}

/// What became of the nodes.
#[derive(Debug, Default)]
pub(super) struct Rows {
    prefill: Vec<PrefillExplanation>,
    decode: Vec<DecodeExplanation>,
    prefill_rest: Vec<(Verdict, usize)>,
    decode_rest: Vec<(Verdict, usize)>,
}

impl Explanation {
    /// How many prefill nodes there were of each verdict, those that are not told one by one
    /// included.
    pub fn prefill_verdicts(&self) -> Vec<(Verdict, usize)> {
        counts(self.prefill.iter().map(|row| (row.verdict, 1)).chain(self.prefill_rest.iter().copied()))
    }

    /// The same of the decode nodes.
    pub fn decode_verdicts(&self) -> Vec<(Verdict, usize)> {
        counts(self.decode.iter().map(|row| (row.verdict, 1)).chain(self.decode_rest.iter().copied()))
    }
}

fn counts(verdicts: impl Iterator<Item = (Verdict, usize)>) -> Vec<(Verdict, usize)> {
    let mut counts: Vec<(Verdict, usize)> = Vec::new();
    for (verdict, nodes) in verdicts.filter(|(_, nodes)| *nodes > 0) {
        match counts.iter_mut().find(|(other, _)| *other == verdict) {
            Some((_, count)) => *count += nodes,
            None => counts.push((verdict, nodes)),
        }
    }
    counts
}

/// The candidates of a request, and which of them were chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Compared<'a> {
    pub sized: SizedRequest<'a>,
    pub matches: &'a Matches,
    pub prefill: &'a [PrefillCandidate<'a>],
    pub decode: &'a [DecodeCandidate<'a>],
    /// Index of the prefill candidate.
    pub chosen_prefill: Option<usize>,
    /// Index of the decode candidate.
    pub chosen_decode: Option<usize>,
}

impl Cluster {
    /// What [`Cluster::place`] would decide now, with the same `rng`, and why. Nothing is charged,
    /// and no policy learns of it.
    pub fn explain(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        rng: &mut impl FnMut() -> u64,
    ) -> Explanation {
        self.on_tick(now);
        let request = &self.bounded(request);
        let sized = self.predictor.sized(request);
        let matches = self.matches(request);
        let policy = self.policies.placement.boxed_clone();
        let mut admission = self.policies.admission.boxed_clone();
        let (chosen, rows) = self.look(now, sized, &matches, &*policy, Some(RowLimit::ALL), rng);
        let decision = chosen.and_then(|chosen| {
            let assessment = self.assess(now, sized, &chosen);
            let first_token_delay =
                verdict(&mut *admission, &assessment).map_err(|excess| self.refusal_of(&assessment, excess))?;
            let fetch = self.fetch_of(now, &chosen, &matches);
            Ok(placement_of(chosen, fetch, first_token_delay))
        });
        self.explanation(decision, rows.unwrap_or_default())
    }

    pub(super) fn explanation(&self, decision: Result<Placement, Refusal>, rows: Rows) -> Explanation {
        let Rows { mut prefill, mut decode, prefill_rest, decode_rest } = rows;
        if decision.is_err() {
            // The nodes were compared first. Then the request was rejected, and goes nowhere.
            let verdicts = prefill.iter_mut().map(|row| &mut row.verdict);
            for verdict in verdicts.chain(decode.iter_mut().map(|row| &mut row.verdict)) {
                if *verdict == Verdict::Chosen {
                    *verdict = Verdict::Best;
                }
            }
        }
        Explanation {
            placement: self.policies.placement.name(),
            admission: self.policies.admission.name(),
            prefill,
            decode,
            prefill_rest,
            decode_rest,
            decision,
        }
    }

    /// What became of the nodes, from the candidates that were compared. Those are in the order of
    /// the nodes.
    pub(super) fn rows(
        &self,
        now: Instant,
        compared: Compared<'_>,
        policy: &dyn PlacementPolicy,
        keep: RowLimit,
    ) -> Rows {
        let Compared { sized, matches, prefill, decode, chosen_prefill, chosen_decode } = compared;
        let target = chosen_decode.map(|index| &decode[index]);
        let prefill_row = |index: usize, candidate: &PrefillCandidate<'_>| PrefillExplanation {
            node: candidate.node.clone(),
            verdict: verdict_on(index, chosen_prefill),
            pending: candidate.pending,
            local: Some(candidate.local),
            fetch: candidate.fetch,
            cost: policy.cost(sized.request, candidate, target),
        };
        let decode_row = |index: usize, candidate: &DecodeCandidate<'_>| DecodeExplanation {
            node: candidate.node.clone(),
            verdict: verdict_on(index, chosen_decode),
            sequences: candidate.sequences,
            tbt: Some(candidate.tbt),
            push: Some(candidate.push),
            prompt: self
                .nodes
                .get(candidate.node)
                .filter(|_| self.config.prompts_at_decode != PromptsAtDecode::Never)
                .map(|node| self.predictor.prompt_at_decode(now, sized, node, matches.of(node))),
        };
        let sooner = |candidate: &PrefillCandidate<'_>| {
            candidate.plans().map(|(plan, _)| plan.finish()).fold(f64::INFINITY, f64::min)
        };
        let why_not_prefill = |node: &ClusterNode| Verdict::LeftOut(self.why_not_prefill(now, sized.request, node));
        let why_not_decode = |node: &ClusterNode| Verdict::LeftOut(self.why_not_decode(now, sized, node));
        let mut rows = Rows::default();
        (rows.prefill, rows.prefill_rest) = match self.nodes.count(NodeRole::Prefill) {
            nodes if nodes <= keep.up_to => {
                let all = self.with_candidates(NodeRole::Prefill, prefill, |candidate| candidate.node);
                let row = |(node, candidate): (&ClusterNode, Option<usize>)| match candidate {
                    Some(index) => prefill_row(index, &prefill[index]),
                    None => left_out_prefill(node, why_not_prefill(node)),
                };
                (all.map(row).collect(), Vec::new())
            }
            _ => {
                let best = best_of(prefill, keep.best, chosen_prefill, sooner);
                let rest = self.rest(NodeRole::Prefill, prefill, best.len(), |it| it.node, why_not_prefill);
                (best.into_iter().map(|index| prefill_row(index, &prefill[index])).collect(), rest)
            }
        };
        if !sized.request.wants_decode {
            return rows;
        }
        (rows.decode, rows.decode_rest) = match self.nodes.count(NodeRole::Decode) {
            nodes if nodes <= keep.up_to => {
                let all = self.with_candidates(NodeRole::Decode, decode, |candidate| candidate.node);
                let row = |(node, candidate): (&ClusterNode, Option<usize>)| match candidate {
                    Some(index) => decode_row(index, &decode[index]),
                    None => left_out_decode(node, why_not_decode(node)),
                };
                (all.map(row).collect(), Vec::new())
            }
            _ => {
                let best = best_of(decode, keep.best, chosen_decode, |candidate| candidate.tbt);
                let rest = self.rest(NodeRole::Decode, decode, best.len(), |it| it.node, why_not_decode);
                (best.into_iter().map(|index| decode_row(index, &decode[index])).collect(), rest)
            }
        };
        rows
    }

    /// The nodes of a role, each with the index of its candidate.
    fn with_candidates<'a, C>(
        &'a self,
        role: NodeRole,
        candidates: &'a [C],
        node_of: impl Fn(&'a C) -> &'a NodeId + 'a,
    ) -> impl Iterator<Item = (&'a ClusterNode, Option<usize>)> {
        let mut next = candidates.iter().map(node_of).enumerate().peekable();
        // A candidate's name is its node's own: no need to compare letters.
        let mut of = move |node: &'a ClusterNode| next.next_if(|(_, name)| std::ptr::eq(*name, &node.info().node));
        self.nodes.of_role(role).map(move |node| (node, of(node).map(|(index, _)| index)))
    }

    /// How many nodes are not told one by one, by verdict.
    fn rest<'a, C>(
        &'a self,
        role: NodeRole,
        candidates: &'a [C],
        told: usize,
        node_of: impl Fn(&'a C) -> &'a NodeId + 'a,
        why_not: impl Fn(&ClusterNode) -> Verdict,
    ) -> Vec<(Verdict, usize)> {
        let others = (Verdict::NotChosen, candidates.len() - told);
        if candidates.len() == self.nodes.count(role) {
            return counts(std::iter::once(others));
        }
        let left_out = self.with_candidates(role, candidates, node_of).filter(|(_, candidate)| candidate.is_none());
        counts(std::iter::once(others).chain(left_out.map(|(node, _)| (why_not(node), 1))))
    }
}

/// Indices of the candidates with the least of something, the chosen one always among them,
/// ascending.
fn best_of<C>(candidates: &[C], most: usize, chosen: Option<usize>, value: impl Fn(&C) -> f64) -> Vec<usize> {
    let rank = |(index, candidate): (usize, &C)| {
        let value = if Some(index) == chosen { f64::NEG_INFINITY } else { value(candidate) };
        (value, index)
    };
    let mut ranked: Vec<_> = candidates.iter().enumerate().map(rank).collect();
    if ranked.len() > most {
        ranked.select_nth_unstable_by(most, |a, b| a.0.total_cmp(&b.0));
        ranked.truncate(most);
    }
    let mut best: Vec<_> = ranked.into_iter().map(|(_, index)| index).collect();
    best.sort_unstable();
    best
}

fn verdict_on(candidate: usize, chosen: Option<usize>) -> Verdict {
    if Some(candidate) == chosen { Verdict::Chosen } else { Verdict::NotChosen }
}

fn left_out_prefill(node: &ClusterNode, verdict: Verdict) -> PrefillExplanation {
    let pending = node.charges.pending();
    let node = node.info().node.clone();
    PrefillExplanation { node, verdict, pending, local: None, fetch: None, cost: None }
}

fn left_out_decode(node: &ClusterNode, verdict: Verdict) -> DecodeExplanation {
    let sequences = node.charges.sequences();
    let node = node.info().node.clone();
    DecodeExplanation { node, verdict, sequences, tbt: None, push: None, prompt: None }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{cluster, id, info, place, request};
    use super::*;
    use crate::placement::PlacementKind;

    #[test]
    fn decision_log_lists_the_soonest_nodes() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        cluster.config.slow_start = Duration::ZERO;
        (0..100).for_each(|n| cluster.on_node_joined(now, info(&format!("q{n:03}"), NodeRole::Prefill, 1)));
        // Prompts wait at all but 40 of them.
        for n in 40..100 {
            let others: Vec<_> = cluster.nodes().map(|node| node.info().node.clone()).collect();
            let others: Vec<_> = others.into_iter().filter(|node| *node != id(&format!("q{n:03}"))).collect();
            let one_token = PlacementRequest { wants_decode: false, exclude: &others, ..request(n, &[]) };
            place(&mut cluster, now, &one_token).unwrap();
        }
        let sized = request(1000, &[]);
        let all = cluster.explain(now, &sized, &mut || 0);
        let record = cluster.place_explained(now, &sized, &mut || 0);
        assert_eq!((record.decision, all.prefill.len(), record.prefill.len()), (all.decision, 102, 32));
        assert!(record.prefill.iter().all(|row| row.pending == 0 && all.prefill.contains(row)));
        assert_eq!(record.prefill_rest, [(Verdict::NotChosen, 70)]);
        assert_eq!(record.decode, all.decode, "of few, all are told");
    }
}
