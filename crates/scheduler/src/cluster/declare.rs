//! What a conductor had placed before this one placed for all: taken into the ledger as it is
//! declared.

use std::time::{Duration, Instant};

use baton_types::{Declared, DeclaredPrefill, QueueOrdering};

use super::candidates::Needs;
use super::{Cluster, ClusterNode};
use crate::backlog::QueuedPrompt;
use crate::cost::duration;
use crate::ledger::{Charge, DecodeCharge, NodeStart, Placed};

impl Cluster {
    /// Charges what was placed elsewhere. What is charged under its key already is given back
    /// first. A start of a node that is not here is not charged: it is lost, and the request's
    /// conductor knows or is about to. Numbers that the node cannot have are lowered to those that
    /// it can.
    pub fn declare(&mut self, now: Instant, declared: &Declared) {
        let key = declared.key;
        self.on_ended(now, key);
        let placed = now.checked_sub(declared.placed_ago).unwrap_or(now);
        let mut charge = Charge { prefilled: declared.prefill.is_none(), ..Charge::new(placed, now) };
        if let Some(start) = &declared.decode {
            let decode = self.declared_decode(now, declared, start);
            charge.decode = decode.map(|charge| Placed { at: start.clone(), charge });
        }
        if let Some(prefill) = &declared.prefill
            && self.nodes.is_here(&prefill.node)
            && let Some(node) = self.nodes.get(&prefill.node.node)
        {
            let tokens = prefill.tokens.clamp(1, node.info().max_prompt_tokens().max(1));
            let terms = self.declared_terms(prefill, node, tokens);
            let prompt = QueuedPrompt { key, arrived: placed, terms, tokens, deadline: None };
            charge.prefill = self.charge_prefill(now, &prefill.node.node, prompt);
        }
        self.ledger.insert(key, charge, &mut self.nodes);
    }

    /// What it costs and how long it may be passed is as this conductor would have it, at most.
    fn declared_terms(&self, prefill: &DeclaredPrefill, node: &ClusterNode, tokens: u32) -> QueueOrdering {
        // It may have attended to a cached prefix, which is not told.
        let whole = node.info().max_prompt_tokens().max(tokens);
        let compute = duration(self.predictor.prompt_seconds(node, whole, whole - tokens));
        let max_overtaken = self.config.max_overtaken;
        let terms = prefill.terms;
        QueueOrdering {
            priority: terms.priority,
            patience: terms.patience.min(max_overtaken),
            max_overtaken: terms.max_overtaken.min(max_overtaken),
            timeout: terms.timeout.min(self.config.queue_timeout),
            compute: terms.compute.min(compute),
        }
    }

    fn declared_decode(&self, now: Instant, declared: &Declared, start: &NodeStart) -> Option<DecodeCharge> {
        if !self.nodes.is_here(start) {
            return None;
        }
        let node = self.nodes.get(&start.node)?;
        let most = node.info().max_sequence_tokens();
        let prompt_tokens = declared.prompt_tokens.min(most);
        let max_tokens = declared.max_tokens.min(most);
        let output_tokens = self.predictor.output_lengths.expected_left(0, max_tokens);
        let Needs { blocks, kv_tokens } = Needs::of(prompt_tokens, output_tokens, node);
        let ago = |time: Duration| now.checked_sub(time).unwrap_or(now);
        let placed = ago(declared.placed_ago);
        let begins = declared.first_token_ago.map_or(placed + declared.ttft, ago);
        let tbt = declared.tbt;
        let begun = declared.first_token_ago.is_some();
        Some(DecodeCharge { blocks, prompt_tokens, max_tokens, kv_tokens, tbt, begins, begun, charged: placed })
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Generation, NodeRole, QueueOrdering};

    use super::super::tests::{SECOND, cluster, id, info, key};
    use super::*;
    use crate::placement::PlacementKind;

    fn declared() -> Declared {
        let start = |name| NodeStart { node: id(name), generation: Generation(1) };
        Declared {
            key: key(1),
            placed_ago: SECOND,
            ttft: SECOND / 2,
            prefill: Some(DeclaredPrefill { node: start("p0"), terms: QueueOrdering::default(), tokens: 100 }),
            decode: Some(start("d0")),
            prompt_tokens: 160,
            max_tokens: 16,
            tbt: Some(SECOND),
            first_token_ago: None,
        }
    }

    #[test]
    fn declared_request_is_charged_once_and_released_when_it_ends() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        cluster.declare(now, &declared());
        cluster.declare(now, &declared());
        let prefill = cluster.node(&id("p0")).unwrap();
        let decode = cluster.node(&id("d0")).unwrap();
        assert_eq!((prefill.charges.pending(), prefill.placed(), decode.placed()), (1, 1, 1));
        assert_eq!((decode.charges.blocks, decode.charges.sequences()), (11, 1));
        assert_eq!(decode.charges.decoding_now().sequences, 0.0, "its first token is not out");
        cluster.on_first_token(now, key(1));
        assert_eq!(cluster.node(&id("d0")).unwrap().charges.decoding_now().sequences, 1.0);
        cluster.on_ended(now, key(1));
        assert!(cluster.placed() == 0 && cluster.nodes().all(|node| node.charges.is_zero()));
    }

    #[test]
    fn declared_decoding_request_is_charged_at_its_decode_node_only() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        cluster.declare(now, &Declared { prefill: None, first_token_ago: Some(SECOND), ..declared() });
        assert!(cluster.node(&id("p0")).unwrap().charges.is_zero());
        assert_eq!(cluster.node(&id("d0")).unwrap().charges.decoding_now().sequences, 1.0);
        assert_eq!(cluster.predictor.ttft_margin(), 0.0, "nothing is learnt from it");
        cluster.on_ended(now, key(1));
        assert!(cluster.nodes().all(|node| node.charges.is_zero()));
    }

    #[test]
    fn declared_request_of_lost_generation_is_not_charged() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        cluster.on_node_left(now, &id("p0"), Generation(1));
        cluster.on_node_joined(now, info("d0", NodeRole::Decode, 2));
        cluster.declare(now, &declared());
        assert!(cluster.nodes().all(|node| node.charges.is_zero()));
        cluster.on_ended(now, key(1));
        assert_eq!(cluster.placed(), 0);
    }
}
