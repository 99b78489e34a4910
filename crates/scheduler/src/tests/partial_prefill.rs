//! Partial prefills, each core by itself. (`world.rs` has them together.)

use std::sync::Arc;
use std::time::Duration;

use baton_types::{
    BlockId, DecodeEvent, ErrorKind, GrantId, GrantReply, GrantRequest, Handoff, PrefillEvent, PrefillJob, Reselect,
    SamplingParams,
};

use super::decode::{self, BLOCK_BYTES, Node as DecodeNode, failure, grant_request, tokens};
use super::engine::{key, outputs, target};
use super::prefill::{Node as PrefillNode, SPAN_BYTES, job, refused, shares};
use crate::config::PROGRESS_INTERVAL;
use crate::prefill::{PrefillEffect, PushId};
use crate::step::StepPlan;
use crate::{DecodeConfig, DecodeEffect, LogitsWanted};

const MS: Duration = Duration::from_millis(1);

/// Of 22 tokens in blocks of 4, the last 10.
fn partial_prefill_job(n: u64) -> PrefillJob {
    PrefillJob { partial_prefill_tokens: 10, ..job(n, 0..22, 5) }
}

fn grant(node: &mut PrefillNode, blocks: std::ops::Range<u32>, partial_prefill_tokens: u32) {
    let blocks = blocks.map(BlockId).collect();
    let reply = GrantReply { grant: GrantId(9), cached_blocks: 0, blocks, partial_prefill_tokens };
    node.after(MS, |core, now| core.on_grant_reply(now, key(0), Ok(reply)));
}

fn take_handoff(node: &mut PrefillNode) -> Handoff {
    node.take(|effect| match effect {
        PrefillEffect::Handoff { handoff, .. } => Some(handoff.clone()),
        _ => None,
    })
}

fn take_request(node: &mut PrefillNode) -> GrantRequest {
    node.take(|effect| match effect {
        PrefillEffect::RequestGrant { request, .. } => Some(request.clone()),
        _ => None,
    })
}

#[test]
fn prefill_node_computes_first_part_and_sends_handoff_with_grant() {
    let mut node = PrefillNode::new(super::prefill::config());
    node.submit(partial_prefill_job(0));
    assert_eq!(take_request(&mut node).partial_prefill_tokens, 10);
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(0), 0..12)]);
    assert_eq!((plan.sequences[0].logits, plan.sequences[0].zero_tail), (LogitsWanted::None, None));
    grant(&mut node, 30..33, 10);
    let handoff = take_handoff(&mut node);
    assert_eq!((handoff.first_token, handoff.tokens.len()), (None, 22));
    assert_eq!(handoff.expected_bytes, 3 * BLOCK_BYTES);
    node.after(MS, |core, now| core.on_handoff_reply(now, key(0), Ok(())));
    // Each batch says how many layers are whole with it.
    let mut pushes = Vec::new();
    for layer in 0..2 {
        node.after(MS, |core, now| core.on_kv_ready(now, plan.id, layer));
        pushes.push(node.take_push());
    }
    node.finish_step(MS, &plan, 7);
    node.acknowledge(0, &pushes[0]);
    pushes.push(node.take_push());
    let told: Vec<_> = pushes.iter().map(|(push, spans)| (push.number(), push.layers(), spans.len())).collect();
    assert_eq!(told, [(0, 1, 3), (1, 2, 3), (2, 3, 3)]);
    assert!(matches!(node.take_event(0), PrefillEvent::Started { .. }));
    node.acknowledge(0, &pushes[1]);
    assert!(!node.core.is_idle(), "a batch is under way");
    node.acknowledge(0, &pushes[2]);
    let PrefillEvent::HandedOff(transfer) = node.take_event(0) else { panic!("it draws no token") };
    assert_eq!(transfer.bytes, 9 * SPAN_BYTES);
    assert!(node.core.is_idle() && node.effects.is_empty(), "{:?}", node.effects);
    assert_eq!(node.core.load(node.now).blocks_cached, 3, "the head stays as cache");
}

#[test]
fn cached_blocks_count_as_pushed_layers_only_once_pushed() {
    let mut node = PrefillNode::new(super::prefill::config());
    node.run_alone(job(7, 0..8, 1));
    node.submit(partial_prefill_job(0));
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(0), 8..12)]);
    grant(&mut node, 30..33, 10);
    let (push, spans) = node.take_push();
    assert_eq!((push.layers(), spans.len()), (0, 6), "two of the head's three blocks");
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 0));
    assert_eq!(node.take_push().0.layers(), 1);
}

#[test]
fn prefill_node_computes_all_if_partial_prefill_is_declined() {
    // Before and after the prefill node's part is computed.
    for head_first in [false, true] {
        let mut node = PrefillNode::new(super::prefill::config());
        node.submit(partial_prefill_job(0));
        let plan = node.take_step();
        if head_first {
            node.finish_step(MS, &plan, 7);
        }
        grant(&mut node, 30..36, 0);
        if !head_first {
            node.finish_step(MS, &plan, 7);
        }
        let rest = node.take_step();
        assert_eq!(shares(&rest), [(key(0), 12..22)], "{head_first}");
        node.finish_step(MS, &rest, 7);
        assert_eq!(take_handoff(&mut node).first_token, Some(7));
    }
    // One that computes another part than was asked for has not understood.
    let mut node = PrefillNode::new(super::prefill::config());
    node.submit(partial_prefill_job(0));
    grant(&mut node, 30..34, 6);
    node.take_event(0);
    assert_eq!(node.take_failure(0), (ErrorKind::Internal, "it computes 6 tokens, 10 were asked for".into()));
}

#[test]
fn reselected_decode_node_is_not_asked_for_a_partial_prefill() {
    let mut node = PrefillNode::new(super::prefill::config());
    node.submit(partial_prefill_job(0));
    take_request(&mut node);
    let plan = node.take_step();
    node.after(MS, |core, now| core.on_grant_reply(now, key(0), Err(refused(ErrorKind::Overloaded))));
    node.finish_step(MS, &plan, 7);
    node.after(MS, |core, _| core.on_reselect(Reselect { key: key(0), decode: target() }));
    assert_eq!(take_request(&mut node).partial_prefill_tokens, 0);
    grant(&mut node, 30..36, 0);
    assert_eq!(shares(&node.take_step()), [(key(0), 12..22)]);
}

#[test]
fn invalid_partial_prefill_is_computed_by_the_prefill_node() {
    let whole = [
        PrefillJob { partial_prefill_tokens: 9, ..partial_prefill_job(0) },
        PrefillJob { decode: None, ..PrefillJob { partial_prefill_tokens: 10, ..job(0, 0..22, 1) } },
        PrefillJob {
            sampling: Arc::new(SamplingParams { max_tokens: 5, prompt_logprobs: Some(1), ..SamplingParams::default() }),
            ..partial_prefill_job(0)
        },
    ];
    for job in whole {
        let mut node = PrefillNode::new(super::prefill::config());
        node.submit(job);
        let plan = node.take_step();
        assert!(plan.sequences[0].range.end == 16, "a whole chunk: {:?}", shares(&plan));
    }
}

/// A decode node that was granted the request of 22 tokens with a partial prefill of 10, and what
/// it was handed off.
fn followed(prompt_budget: usize) -> (DecodeNode, GrantReply) {
    let mut config = decode::config(20);
    config.prompt_budget = prompt_budget;
    let mut node = DecodeNode::new(config);
    let prompt = tokens(22);
    let reply = node.ask(GrantRequest { partial_prefill_tokens: 10, ..grant_request(0, &prompt, 5) }).unwrap();
    assert_eq!((reply.blocks.len(), reply.partial_prefill_tokens), (3, 10));
    let handoff = Handoff { first_token: None, ..decode::handoff(0, &prompt, 5, reply.grant, 3) };
    node.hand_off(handoff).unwrap();
    (node, reply)
}

/// A batch of the request, with the layers that are whole by then.
fn arrive(node: &mut DecodeNode, reply: &GrantReply, number: u32, layers: u32, bytes: u64) {
    node.after(MS, |core, now| core.on_arrival(now, reply.grant, PushId::new(number, layers), bytes));
}

fn finish(node: &mut DecodeNode, plan: &StepPlan) {
    node.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(outputs(plan))));
}

fn layers(plan: &StepPlan) -> std::ops::Range<u32> {
    plan.slice.as_ref().unwrap().layers.clone()
}

#[test]
fn partial_prefill_follows_first_part_layer_by_layer_in_mixed_batches() {
    let (mut node, reply) = followed(4);
    let layer = BLOCK_BYTES;
    // The second layer may come before the first is whole.
    arrive(&mut node, &reply, 1, 2, layer);
    assert!(node.effects.is_empty(), "{:?}", node.effects);
    arrive(&mut node, &reply, 0, 1, layer);
    let plan = node.take_step();
    let slice = plan.slice.as_ref().unwrap();
    assert_eq!((layers(&plan), slice.sequence.range.clone(), slice.hidden.len()), (0..1, 12..22, 0));
    assert!(plan.sequences.is_empty() && (plan.rows(), plan.prompt_rows()) == (0, 0));
    // Others join meanwhile.
    node.ask(grant_request(1, &tokens(8), 5)).unwrap();
    finish(&mut node, &plan);
    let plan = node.take_step();
    assert_eq!((layers(&plan), plan.slice.as_ref().unwrap().hidden.len()), (1..2, 10));
    finish(&mut node, &plan);
    assert!(node.effects.iter().all(|effect| !matches!(effect, DecodeEffect::RunStep(_))), "the third is not here");
    assert_eq!((node.core.load().queued_tokens, node.core.load().running), (10, 0));
    arrive(&mut node, &reply, 2, 3, layer);
    assert_eq!(node.fence(), 1, "nothing is to come");
    let plan = node.take_step();
    assert_eq!((layers(&plan), plan.slice.as_ref().unwrap().sequence.is_last_chunk), (2..3, true));
    finish(&mut node, &plan);
    let events = node.take_events();
    assert!(matches!(&events[..], [(_, DecodeEvent::Token { index: 0, queue: None, finish: None, .. })]), "{events:?}");
    let plan = node.take_step();
    assert_eq!((shares(&plan), plan.slice.is_none()), (vec![(key(0), 22..23)], true));
    assert_eq!(node.core.load().blocks_used, 6 + 2, "and those of the other grant");
}

#[test]
fn slow_layers_of_either_part_are_told_as_progress() {
    let mut node = PrefillNode::new(super::prefill::config());
    node.submit(partial_prefill_job(0));
    let plan = node.take_step();
    grant(&mut node, 30..33, 10);
    assert!(matches!(node.take_event(0), PrefillEvent::Started { .. }));
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 0));
    assert!(node.effects.iter().all(|effect| !matches!(effect, PrefillEffect::Emit { .. })), "{:?}", node.effects);
    node.after(PROGRESS_INTERVAL, |core, now| core.on_kv_ready(now, plan.id, 1));
    assert_eq!(node.take_event(0), PrefillEvent::Progress { tokens: 0 });

    let (mut node, reply) = followed(4);
    arrive(&mut node, &reply, 0, 3, 3 * BLOCK_BYTES);
    for layer in 0..2 {
        let plan = node.take_step();
        assert_eq!(layers(&plan), layer..layer + 1);
        node.after(PROGRESS_INTERVAL, |core, now| core.on_step_done(now, plan.id, Ok(outputs(&plan))));
        assert!(matches!(node.take_prompt_event(0), PrefillEvent::Progress { .. }), "after layer {layer}");
    }
}

#[test]
fn last_layers_of_a_partial_prefill_wait_for_the_mask() {
    let mut node = DecodeNode::new(DecodeConfig { prompt_budget: 400, ..decode::config(20) });
    let prompt = tokens(22);
    let reply = node.ask(GrantRequest { partial_prefill_tokens: 10, ..grant_request(0, &prompt, 5) }).unwrap();
    let handoff = Handoff { first_token: None, ..decode::handoff(0, &prompt, 5, reply.grant, 3) };
    let sampling = Arc::new(SamplingParams { grammar: Some("start: \"a\"".into()), ..(*handoff.sampling).clone() });
    node.hand_off(Handoff { sampling, ..handoff }).unwrap();
    for number in 0..2 {
        arrive(&mut node, &reply, number, number + 1, BLOCK_BYTES);
    }
    let plan = node.take_step();
    assert_eq!(layers(&plan).end, 1);
    finish(&mut node, &plan);
    let plan = node.take_step();
    assert_eq!(layers(&plan), 1..2);
    arrive(&mut node, &reply, 2, 3, BLOCK_BYTES);
    assert_eq!(node.fence(), 1);
    finish(&mut node, &plan);
    assert!(node.effects.iter().all(|effect| !matches!(effect, DecodeEffect::RunStep(_))));
    node.after(MS, |core, now| core.on_mask_ready(now, key(0)));
    let plan = node.take_step();
    assert_eq!(layers(&plan), 2..3);
    finish(&mut node, &plan);
    assert_eq!(node.core.output(key(0)).unwrap().len(), 1);
}

#[test]
fn partial_prefill_slices_fit_the_budget_and_oldest_goes_first() {
    // 27 tokens through three layers are two layers of four times 10 tokens.
    let (mut node, reply) = followed(27);
    let second = node.ask(GrantRequest { partial_prefill_tokens: 14, ..grant_request(1, &tokens(18), 5) }).unwrap();
    let handoff = Handoff { first_token: None, ..decode::handoff(1, &tokens(18), 5, second.grant, 1) };
    node.hand_off(handoff).unwrap();
    arrive(&mut node, &second, 0, 3, BLOCK_BYTES);
    let plan = node.take_step();
    assert_eq!((plan.slice.as_ref().unwrap().sequence.key, layers(&plan)), (key(1), 0..1), "27 x 3 / (4 x 14)");
    arrive(&mut node, &reply, 0, 3, 3 * BLOCK_BYTES);
    finish(&mut node, &plan);
    let plan = node.take_step();
    assert_eq!((plan.slice.as_ref().unwrap().sequence.key, layers(&plan)), (key(0), 0..2), "the older one goes first");
}

#[test]
fn partial_prefill_fails_if_its_first_part_does_not_arrive() {
    // The prefill node gives up, under a step.
    let (mut node, reply) = followed(4);
    arrive(&mut node, &reply, 0, 1, BLOCK_BYTES);
    let plan = node.take_step();
    node.after(MS, |core, now| core.on_release_grant(now, key(0), reply.grant));
    let events = node.take_events();
    assert_eq!(failure(&events[0].1), (ErrorKind::Unavailable, "the prefill node gave up the handoff"));
    assert_eq!(node.fence(), 0, "its blocks are read");
    finish(&mut node, &plan);
    assert_eq!(node.fence(), 1);
    assert!(node.core.is_idle() && node.take_events().is_empty());
    // It is silent.
    let (mut node, reply) = followed(4);
    arrive(&mut node, &reply, 0, 1, BLOCK_BYTES);
    let plan = node.take_step();
    finish(&mut node, &plan);
    let ttl = decode::config(20).grant_ttl;
    node.after(ttl, |core, now| core.on_wakeup(now));
    assert_eq!(failure(&node.take_events()[0].1).0, ErrorKind::Unavailable);
    assert_eq!(node.fence(), 1);
    assert!(node.core.is_idle());
    // It says that all is here, and it is not.
    let (mut node, reply) = followed(4);
    arrive(&mut node, &reply, 0, 200, BLOCK_BYTES);
    for layer in 0..3 {
        let plan = node.take_step();
        assert_eq!(layers(&plan), layer..layer + 1);
        finish(&mut node, &plan);
    }
    assert_eq!(failure(&node.take_events()[0].1).0, ErrorKind::DataLoss);
    assert_eq!(node.fence(), 1);
    assert!(node.core.is_idle());
}

#[test]
fn invalid_partial_prefill_is_declined_and_handoff_must_match() {
    let mut node = DecodeNode::new(decode::config(20));
    let prompt = tokens(22);
    let ask = |node: &mut DecodeNode, n, partial_prefill_tokens, is_other_class| {
        node.ask(GrantRequest { partial_prefill_tokens, is_other_class, ..grant_request(n, &prompt, 5) }).unwrap()
    };
    for (n, (tail, is_other_class)) in (1..).zip([(9, false), (22, false), (30, false), (10, true)]) {
        let reply = ask(&mut node, n, tail, is_other_class);
        assert_eq!((reply.partial_prefill_tokens, reply.blocks.len()), (0, 6), "{tail}");
        node.after(MS, |core, now| core.on_abort(now, key(n)));
        node.fence();
    }
    // A token if none was drawn.
    let reply = ask(&mut node, 5, 10, false);
    let refused = node.hand_off(decode::handoff(5, &prompt, 5, reply.grant, 3)).unwrap_err();
    assert!(refused.kind == ErrorKind::Invalid && refused.message.starts_with("first_token: 40"), "{refused}");
    node.fence();
    // None if one was.
    let reply = ask(&mut node, 6, 0, false);
    let none = Handoff { first_token: None, ..decode::handoff(6, &prompt, 5, reply.grant, 6) };
    let refused = node.hand_off(none).unwrap_err();
    assert!(refused.kind == ErrorKind::Invalid && refused.message.starts_with("first_token: none"), "{refused}");
    node.fence();
    // What it holds already it need not wait for.
    node.admit(7, &prompt, 5);
    assert_eq!(node.run().len(), 4);
    let reply = ask(&mut node, 8, 10, false);
    assert_eq!((reply.partial_prefill_tokens, reply.cached_blocks), (0, 5));
}

#[test]
fn partial_prefills_that_have_begun_go_before_new_ones() {
    let mut node = DecodeNode::new(decode::config(100));
    let heads: Vec<_> = (0..6)
        .map(|n| {
            let prompt: Vec<_> = (n as u32..n as u32 + 12).collect();
            let reply = node.ask(GrantRequest { partial_prefill_tokens: 4, ..grant_request(n, &prompt, 5) }).unwrap();
            assert_eq!(reply.partial_prefill_tokens, 4);
            let handoff = Handoff { first_token: None, ..decode::handoff(n, &prompt, 5, reply.grant, 2) };
            node.hand_off(handoff).unwrap();
            reply
        })
        .collect();
    let next = |node: &mut DecodeNode, n: u64, expected: std::ops::Range<u32>| {
        let plan = node.take_step();
        assert_eq!((plan.slice.as_ref().unwrap().sequence.key, layers(&plan)), (key(n), expected));
        finish(node, &plan);
    };
    // One layer of the first four is here, and they begin.
    let layer = 2 * BLOCK_BYTES / 3;
    heads[..4].iter().for_each(|reply| arrive(&mut node, reply, 0, 1, layer));
    (0..4).for_each(|n| next(&mut node, n, 0..1));
    // The fifth waits while one of them can go on.
    arrive(&mut node, &heads[4], 0, 1, layer);
    let fifth = node.take_step();
    assert_eq!(fifth.slice.as_ref().unwrap().sequence.key, key(4), "none of them can");
    arrive(&mut node, &heads[5], 0, 1, layer);
    arrive(&mut node, &heads[3], 1, 2, layer);
    finish(&mut node, &fifth);
    next(&mut node, 3, 1..2);
    next(&mut node, 5, 0..1);
}
