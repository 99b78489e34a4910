//! Readers of a node's cache beside its own requests, on both cores. Blocks have 4 tokens.

use std::time::Instant;

use baton_kv_cache::BlockHasher;
use baton_types::{Attempt, ErrorKind, Generation, GrantId, LeaseRelease, LeaseRequest, NodeStart, TokenId};

use super::engine::{BLOCK_TOKENS, key, model, target};
use super::prefill::{MS, Node, config, job};
use crate::{DecodeConfig, DecodeCore, DecodeEffect, LeaseEffect, PrefillConfig, PrefillEffect, StepOutput, StepPlan};

const BLOCKS: u32 = 12;

fn reader(generation: u64) -> NodeStart {
    NodeStart { node: target().node, generation: Generation(generation) }
}

fn lease(n: u64, prompt: impl IntoIterator<Item = TokenId>) -> LeaseRequest {
    let hasher = BlockHasher::new(model(BLOCKS).layout.fingerprint(), b"");
    let prompt: Vec<_> = prompt.into_iter().collect();
    let block_hashes = hasher.chain(&prompt, BLOCK_TOKENS as u32).into();
    LeaseRequest { key: key(n), reader: target().node, reader_generation: Generation(1), block_hashes }
}

fn given(effect: &LeaseEffect) -> Option<Result<GrantId, ErrorKind>> {
    match effect {
        LeaseEffect::Open { reply, .. } => Some(Ok(reply.lease)),
        LeaseEffect::Refuse { refused, .. } => Some(Err(refused.kind)),
        LeaseEffect::End { .. } => None,
    }
}

impl Node {
    fn lease(&mut self, request: LeaseRequest) -> Result<GrantId, ErrorKind> {
        self.after(MS, |core, now| core.on_lease_request(now, request));
        self.take(|effect| match effect {
            PrefillEffect::Lease(effect) => given(effect),
            _ => None,
        })
    }
}

#[test]
fn prompt_that_needs_leased_blocks_is_not_delayed_by_new_leases() {
    let mut node = Node::new(PrefillConfig { model: model(BLOCKS), ..config() });
    node.run_alone(job(0, 0..16, 1));
    let first = node.lease(lease(7, 0..16)).unwrap();
    assert!(node.lease(lease(8, 0..16)).is_ok(), "no request waits");
    // 10 of 12 blocks, and four are read.
    node.submit(job(1, 5..45, 1));
    assert_eq!(node.lease(lease(9, 0..16)), Err(ErrorKind::Overloaded));
    let of_another = LeaseRelease { lease: first, reader: Some(reader(2)) };
    node.after(MS, |core, now| core.on_release_lease(now, of_another));
    node.after(MS, |core, now| core.on_release_lease(now, first));
    node.after(MS, |core, now| core.on_node_lost(now, &reader(2)));
    assert_eq!(node.core.load(node.now).waiting, 1, "one reader is left");
    node.after(MS, |core, now| core.on_wakeup(now + 45_000 * MS));
    assert_eq!(node.core.load(node.now).running, 1);
}

#[test]
fn cleared_cache_ends_its_leases() {
    let mut node = Node::new(PrefillConfig { model: model(BLOCKS), ..config() });
    node.run_alone(job(0, 0..16, 1));
    let given = node.lease(lease(7, 0..16)).unwrap();
    assert_eq!(node.core.load(node.now).blocks_used, 4, "for the reader");
    node.after(MS, |core, _| core.clear_cache());
    let ended = node.take(|effect| match effect {
        PrefillEffect::Lease(LeaseEffect::End { lease }) => Some(*lease),
        _ => None,
    });
    let load = node.core.load(node.now);
    assert_eq!((ended, load.blocks_used, load.blocks_cached), (given, 0, 0));
}

#[test]
fn lease_has_each_block_once_and_one_reader_cannot_take_all() {
    let mut node = Node::new(PrefillConfig { model: model(BLOCKS), max_leases: 8, ..config() });
    node.run_alone(job(0, 0..16, 1));
    let mut again = lease(7, 0..16);
    again.block_hashes = again.block_hashes.iter().chain(again.block_hashes.iter()).copied().collect();
    node.after(MS, |core, now| core.on_lease_request(now, again));
    let blocks = node.take(|effect| match effect {
        PrefillEffect::Lease(LeaseEffect::Open { reply, .. }) => Some(reply.blocks.len()),
        _ => None,
    });
    assert_eq!(blocks, 4);
    assert!(node.lease(lease(8, 0..16)).is_ok());
    assert_eq!(node.lease(lease(9, 0..16)), Err(ErrorKind::Overloaded), "two of eight are enough for one");
    let other = LeaseRequest { reader: baton_types::NodeId::new("another").unwrap(), ..lease(10, 0..16) };
    assert!(node.lease(other).is_ok());
}

#[test]
fn leases_of_lost_reader_end_and_waiting_prompt_runs() {
    let mut node = Node::new(PrefillConfig { model: model(BLOCKS), ..config() });
    node.run_alone(job(0, 0..16, 1));
    for n in [7, 8] {
        node.lease(lease(n, 0..16)).unwrap();
    }
    node.submit(job(1, 5..45, 1));
    node.after(MS, |core, now| core.on_node_lost(now, &reader(1)));
    assert_eq!(node.core.load(node.now).running, 1);
    let ended = |effect: &&PrefillEffect| matches!(effect, PrefillEffect::Lease(LeaseEffect::End { .. }));
    assert_eq!(node.effects.iter().filter(ended).count(), 2);
}

/// A decode core alone, without leave to pass time.
struct Decode(DecodeCore, Instant);

impl Decode {
    fn effects(&mut self) -> Vec<DecodeEffect> {
        self.0.check_integrity().unwrap();
        std::iter::from_fn(|| self.0.poll_effect()).collect()
    }

    fn step(&mut self) -> Option<StepPlan> {
        self.effects().into_iter().find_map(|effect| match effect {
            DecodeEffect::RunStep(plan) => Some(plan),
            _ => None,
        })
    }

    fn lease(&mut self, request: LeaseRequest) -> Result<GrantId, ErrorKind> {
        self.0.on_lease_request(self.1, request);
        let given = self.effects().into_iter().find_map(|effect| match effect {
            DecodeEffect::Lease(effect) => given(&effect),
            _ => None,
        });
        given.unwrap()
    }
}

#[test]
fn decode_node_refuses_new_leases_while_a_prompt_waits_for_blocks() {
    let config = DecodeConfig { prompt_budget: 64, ..DecodeConfig::new(model(BLOCKS)) };
    let mut node = Decode(DecodeCore::new(config).unwrap(), Instant::now());
    node.0.on_submit(node.1, job(0, 0..16, 1));
    let plan = node.step().unwrap();
    let output = StepOutput {
        key: key(0),
        sampled: Some((41, None)),
        prompt_logprobs: Vec::new(),
        hidden: Vec::new(),
        failed: None,
        is_mask_late: false,
    };
    node.0.on_step_done(node.1, plan.id, Ok(vec![output]));
    let first = node.lease(lease(7, 0..16)).unwrap();
    node.0.on_submit(node.1, job(1, 5..45, 1));
    assert_eq!(node.step(), None, "10 of 12 blocks, and four are read");
    assert_eq!(node.lease(lease(8, 0..16)), Err(ErrorKind::Overloaded));
    // Who takes the sequence elsewhere relieves the node.
    let mut takes_over = lease(1, 0..16);
    takes_over.key.attempt = Attempt(1);
    let second = node.lease(takes_over).unwrap();
    node.0.on_release_lease(node.1, second);
    assert_eq!(node.step(), None, "the first reader is left");
    node.0.on_node_lost(node.1, &reader(1));
    assert_eq!(node.step().unwrap().sequences[0].key, key(1));
    node.0.on_release_lease(node.1, first);
}
