//! What a conductor had placed, as it would declare it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{Declared, DeclaredPrefill, DecodeTarget, MigrationQuestion, NodeId, RequestKey, Tbt, Ttft};

use crate::ledger::NodeStart;
use crate::placement::PlacementRequest;
use crate::request::{Assignment, LedgerEntry, MigrationAssignment};

#[derive(Debug, Clone)]
struct Attempt {
    placed: Instant,
    ttft: Duration,
    prefill: Option<DeclaredPrefill>,
    decode: Option<NodeStart>,
    prompt_tokens: u32,
    max_tokens: u32,
    tbt: Option<Duration>,
    first_token: Option<Instant>,
}

/// A conductor's attempts that are charged. It keeps them whether or not it is the one that places:
/// that may change at any time.
#[derive(Debug, Default)]
pub struct Placed(BTreeMap<RequestKey, Attempt>);

impl Placed {
    /// An attempt was placed.
    pub fn on_placed(&mut self, now: Instant, request: &PlacementRequest<'_>, to: &Assignment) {
        let (placement, Ttft(ttft)) = (&to.placement, to.placement.predicted_ttft);
        let start = |node: &NodeId| to.starts.iter().find(|start| start.node == *node).cloned();
        let tokens = request.prompt_tokens.saturating_sub(placement.matched_tokens + placement.partial_prefill_tokens);
        let attempt = Attempt {
            placed: now,
            ttft,
            prefill: start(&placement.prefill).map(|node| DeclaredPrefill { node, terms: placement.terms, tokens }),
            decode: placement.decode.as_ref().and_then(start),
            prompt_tokens: request.prompt_tokens,
            max_tokens: request.max_tokens,
            tbt: request.slo.tbt.map(|Tbt(limit)| limit),
            first_token: None,
        };
        self.0.insert(request.key, attempt);
    }

    /// Another decode node is asked to go on with an attempt, as another attempt.
    pub fn on_migrated(&mut self, now: Instant, question: &MigrationQuestion, to: &MigrationAssignment) {
        if let Some(from) = self.0.get(&question.key).cloned() {
            let decode = Some(to.to.clone());
            let first_token = from.first_token.or(Some(now));
            self.0.insert(question.migrated, Attempt { placed: now, prefill: None, decode, first_token, ..from });
        }
    }

    /// An attempt's decode node is another one.
    pub fn on_reselected(&mut self, key: RequestKey, to: &DecodeTarget) {
        if let Some(attempt) = self.0.get_mut(&key) {
            attempt.decode = Some(NodeStart { node: to.node.clone(), generation: to.generation });
        }
    }

    /// Something happened to an attempt.
    pub fn on_ledger_update(&mut self, now: Instant, key: RequestKey, entry: &LedgerEntry) {
        match entry {
            LedgerEntry::FirstToken => {
                if let Some(attempt) = self.0.get_mut(&key) {
                    attempt.prefill = None;
                    attempt.first_token = Some(now);
                }
            }
            LedgerEntry::Finished { .. } | LedgerEntry::Ended => self.on_ended(key),
            LedgerEntry::Fetched { .. } | LedgerEntry::Pushed { .. } | LedgerEntry::Decodes => {}
        }
    }

    /// An attempt is over.
    pub fn on_ended(&mut self, key: RequestKey) {
        self.0.remove(&key);
    }

    /// All of them.
    pub fn declared(&self, now: Instant) -> Vec<Declared> {
        let ago = |time: Instant| now.saturating_duration_since(time);
        let declared = |(key, attempt): (&RequestKey, &Attempt)| Declared {
            key: *key,
            placed_ago: ago(attempt.placed),
            ttft: attempt.ttft,
            prefill: attempt.prefill.clone(),
            decode: attempt.decode.clone(),
            prompt_tokens: attempt.prompt_tokens,
            max_tokens: attempt.max_tokens,
            tbt: attempt.tbt,
            first_token_ago: attempt.first_token.map(ago),
        };
        self.0.iter().map(declared).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Attempt, Generation};

    use super::*;
    use crate::cluster::tests::{cluster, id, key, place, request};
    use crate::placement::PlacementKind;

    /// What the ledger of a conductor that begins to place says, beside that of the one before.
    #[test]
    fn declared_charges_equal_those_of_the_earlier_leader() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let mut before = cluster(now, PlacementKind::MinTotalDelay);
        let mut placed = Placed::default();
        for n in 0..6 {
            let request = request(n, &[]);
            let placement = place(&mut before, now, &request).unwrap();
            placed.on_placed(now, &request, &before.assign(placement, None));
        }
        let book = |before: &mut crate::Cluster, placed: &mut Placed, n, entry: LedgerEntry| {
            before.update_ledger(now + second, key(n), &entry);
            placed.on_ledger_update(now + second, key(n), &entry);
        };
        (0..3).for_each(|n| book(&mut before, &mut placed, n, LedgerEntry::FirstToken));
        book(&mut before, &mut placed, 2, LedgerEntry::Finished { output_tokens: 3 });
        book(&mut before, &mut placed, 5, LedgerEntry::Ended);
        let mut after = cluster(now, PlacementKind::MinTotalDelay);
        placed.declared(now + second).iter().for_each(|declared| after.declare(now + second, declared));
        assert_eq!((before.placed(), after.placed(), placed.len()), (4, 4, 4));
        for (a, b) in before.nodes().zip(after.nodes()) {
            let sums = |node: &crate::ClusterNode| {
                // Prompts that are computed count for nothing at their prefill nodes.
                (node.charges.blocks, node.charges.sequences(), node.charges.pending())
            };
            assert_eq!(sums(a), sums(b), "{}", a.info().node);
            assert_eq!(a.charges.decoding_now().sequences, b.charges.decoding_now().sequences);
        }
    }

    #[test]
    fn reselected_and_migrated_attempts_are_declared_at_their_nodes() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        let mut placed = Placed::default();
        let request = request(1, &[]);
        let placement = place(&mut cluster, now, &request).unwrap();
        placed.on_placed(now, &request, &cluster.assign(placement, None));
        let d8 = NodeStart { node: id("d8"), generation: Generation(2) };
        let d9 = NodeStart { node: id("d9"), generation: Generation(4) };
        let NodeStart { node, generation } = d9.clone();
        placed.on_reselected(key(1), &DecodeTarget { node, generation, address: String::new(), tbt: None });
        let migrated = RequestKey { attempt: Attempt(1), ..key(1) };
        let question = MigrationQuestion { key: key(1), migrated, tokens: 8, exclude: Vec::new() };
        placed.on_migrated(now, &question, &MigrationAssignment { to: d8.clone(), source: None });
        let of = |declared: &Declared| (declared.key, declared.decode.clone(), declared.prefill.is_some());
        let declared: Vec<_> = placed.declared(now).iter().map(of).collect();
        assert_eq!(declared, [(key(1), Some(d9), true), (migrated, Some(d8), false)]);
        placed.on_ledger_update(now, key(1), &LedgerEntry::Ended);
        placed.on_ledger_update(now, migrated, &LedgerEntry::Ended);
        assert!(placed.is_empty());
    }
}
