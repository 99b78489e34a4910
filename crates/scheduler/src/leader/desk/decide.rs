//! Decisions on questions, in this conductor's ledger.

use std::time::Instant;

use baton_types::{DecodeTarget, MigrationAssignment, MigrationQuestion, NodeId, PlaceQuestion, Question, RequestKey};

use super::{Answer, Decided, DecisionReasons};
use crate::cluster::Cluster;
use crate::placement::PlacementRequest;

/// Decides what is asked, in this conductor's ledger.
pub(super) fn answer_to<E>(
    now: Instant,
    question: &Question,
    cluster: &mut Cluster,
    random: &mut impl FnMut() -> u64,
) -> Answer<E> {
    match question {
        Question::Place(question) => Answer::Placed(Box::new(decide(now, &question.into(), cluster, random))),
        Question::Reselect { key, from } => Answer::Reselected(reselect(now, *key, from, cluster)),
        Question::Migrate(question) => Answer::Migrated(migration_target(now, question, cluster)),
        Question::Explain(question) => {
            Answer::Explained(DecisionReasons::Own(Box::new(cluster.explain(now, &question.into(), random))))
        }
    }
}

pub(super) fn decide<E>(
    now: Instant,
    wanted: &PlacementRequest<'_>,
    cluster: &mut Cluster,
    random: &mut impl FnMut() -> u64,
) -> Decided<E> {
    let explanation = Box::new(cluster.place_explained(now, wanted, random));
    let placed = explanation.decision.clone();
    let placed = placed.map(|placement| cluster.assign(placement, wanted.slo.tbt));
    Decided { at: now, placed, grounds: DecisionReasons::Own(explanation) }
}

pub(super) fn reselect(now: Instant, key: RequestKey, from: &NodeId, cluster: &mut Cluster) -> Option<DecodeTarget> {
    let other = cluster.reselect(now, key);
    cluster.decode_target(other.as_ref().unwrap_or(from))
}

pub(super) fn migration_target(
    now: Instant,
    question: &MigrationQuestion,
    cluster: &mut Cluster,
) -> Option<MigrationAssignment> {
    let chosen = cluster.place_migration(now, question)?;
    let to = cluster.assign_migration(&chosen);
    if to.is_none() {
        cluster.on_ended(now, question.migrated);
    }
    to
}

impl From<&PlacementRequest<'_>> for PlaceQuestion {
    fn from(request: &PlacementRequest<'_>) -> Self {
        Self {
            key: request.key,
            prompt_tokens: request.prompt_tokens,
            block_hashes: request.block_hashes.into(),
            max_tokens: request.max_tokens,
            wants_decode: request.wants_decode,
            slo: request.slo,
            waited: request.waited,
            priority: request.priority,
            bypass_cache: request.bypass_cache,
            exclude: request.exclude.to_vec(),
            first_completion_nodes: request.first_completion_nodes.to_vec(),
            output_tokens: request.output_tokens,
            is_admitted: request.is_admitted,
        }
    }
}

impl<'a> From<&'a PlaceQuestion> for PlacementRequest<'a> {
    fn from(question: &'a PlaceQuestion) -> Self {
        Self {
            key: question.key,
            prompt_tokens: question.prompt_tokens,
            block_hashes: &question.block_hashes,
            max_tokens: question.max_tokens,
            wants_decode: question.wants_decode,
            slo: question.slo,
            waited: question.waited,
            // The leader's own setting.
            max_wait: None,
            priority: question.priority,
            bypass_cache: question.bypass_cache,
            exclude: &question.exclude,
            first_completion_nodes: &question.first_completion_nodes,
            output_tokens: question.output_tokens,
            is_admitted: question.is_admitted,
        }
    }
}
