//! Structured output: what waits for a mask waits alone, each core by itself.

use std::sync::Arc;

use baton_types::{Handoff, PrefillEvent, PrefillJob, SamplingParams};

use super::decode::{self, MS, Node as DecodeNode, grant_request, handoff, ranges, submitted, tokens};
use super::engine::{key, outputs};
use super::prefill::{self, Node as PrefillNode, job, shares};
use crate::{DecodeEffect, PrefillEffect, StepPlan};

fn constrained(sampling: &SamplingParams) -> Arc<SamplingParams> {
    Arc::new(SamplingParams { grammar: Some("start: \"a\"*".into()), ..sampling.clone() })
}

fn constrained_job(job: PrefillJob) -> PrefillJob {
    PrefillJob { sampling: constrained(&job.sampling), ..job }
}

/// Hands a sequence with a grammar off, whole.
fn hand_off(node: &mut DecodeNode, n: u64, max_tokens: u32) {
    let reply = node.ask(grant_request(n, &tokens(6), max_tokens)).unwrap();
    let blocks = reply.blocks.len() as u64;
    let handoff = handoff(n, &tokens(6), max_tokens, reply.grant, blocks);
    let sampling = constrained(&handoff.sampling);
    node.hand_off(Handoff { sampling, ..handoff }).unwrap();
    node.arrive(reply.grant, n, blocks);
    assert_eq!(node.fence(), 1);
}

/// Ends a step in which the masks of some were late.
fn finish_late(node: &mut DecodeNode, plan: &StepPlan, late: &[u64]) {
    let mut outputs = outputs(plan);
    for output in outputs.iter_mut().filter(|output| late.iter().any(|n| key(*n) == output.key)) {
        output.sampled = None;
        output.is_mask_late = true;
    }
    node.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(outputs)));
}

fn mask_ready(node: &mut DecodeNode, n: u64) {
    node.after(MS, |core, now| core.on_mask_ready(now, key(n)));
}

fn has_step(node: &DecodeNode) -> bool {
    node.effects.iter().any(|effect| matches!(effect, DecodeEffect::RunStep(_)))
}

#[test]
fn sequence_joins_the_batch_once_its_mask_is_made_and_sits_out_while_one_is_late() {
    let mut node = DecodeNode::new(decode::config(20));
    hand_off(&mut node, 0, 5);
    assert!(!has_step(&node) && node.core.load().running == 0);
    assert_eq!(node.core.output(key(0)), Some(&[40][..]));
    // Others do not wait for it.
    node.admit(1, &[30, 31, 32], 9);
    let plan = node.take_step();
    assert_eq!(ranges(&plan), [(1, 3..4)]);
    mask_ready(&mut node, 0);
    finish_late(&mut node, &plan, &[]);
    let plan = node.take_step();
    assert_eq!(ranges(&plan), [(0, 6..7), (1, 4..5)]);
    node.take_events();
    finish_late(&mut node, &plan, &[0]);
    assert_eq!(node.take_events().iter().map(|(whose, _)| *whose).collect::<Vec<_>>(), [key(1)]);
    for position in 5..7 {
        let plan = node.take_step();
        assert_eq!(ranges(&plan), [(1, position..position + 1)]);
        finish_late(&mut node, &plan, &[]);
    }
    // What is none, or not here, is ignored.
    mask_ready(&mut node, 7);
    mask_ready(&mut node, 0);
    let plan = node.take_step();
    assert_eq!(ranges(&plan), [(1, 7..8)], "the step in flight");
    finish_late(&mut node, &plan, &[]);
    let plan = node.take_step();
    assert_eq!(ranges(&plan), [(0, 6..7), (1, 8..9)], "its last row once more");
    finish_late(&mut node, &plan, &[]);
    assert_eq!(node.core.output(key(0)).unwrap().len(), 2);
    assert_eq!(node.core.output(key(7)), None);
}

/// The tokens are those of an output whose masks were in time, whichever were late.
#[test]
fn late_masks_change_no_token_and_no_logprob_of_the_prompt() {
    let run = |late: &dyn Fn(usize) -> bool| {
        let mut node = DecodeNode::new(crate::DecodeConfig { prompt_budget: 4, ..decode::config(20) });
        let job = submitted(0, &tokens(10), 6);
        let sampling = SamplingParams { prompt_logprobs: Some(0), ..(*job.sampling).clone() };
        node.after(MS, |core, now| core.on_submit(now, PrefillJob { sampling: constrained(&sampling), ..job }));
        assert!(!has_step(&node));
        mask_ready(&mut node, 0);
        let mut steps = 0;
        while has_step(&node) {
            let plan = node.take_step();
            steps += 1;
            let is_late = plan.sequences[0].is_last_chunk && late(steps);
            finish_late(&mut node, &plan, if is_late { &[0] } else { &[] });
            if is_late {
                assert!(!has_step(&node) && !node.core.is_idle());
                mask_ready(&mut node, 0);
            }
        }
        assert!(node.core.is_idle());
        let first = node.take(|effect| match effect {
            DecodeEffect::EmitPrefill { event: event @ PrefillEvent::FirstToken { .. }, .. } => Some(event.clone()),
            _ => None,
        });
        let PrefillEvent::FirstToken { token, prompt_logprobs, .. } = first else { panic!() };
        (token, prompt_logprobs.len(), node.take_events())
    };
    let in_time = run(&|_| false);
    assert_eq!((in_time.1, in_time.2.len()), (10, 5));
    assert_eq!(run(&|step| step % 2 == 1), in_time);
    assert_eq!(run(&|step| step % 3 != 0), in_time);
}

#[test]
fn aborted_sequence_that_awaits_its_mask_is_gone() {
    let mut node = DecodeNode::new(decode::config(20));
    hand_off(&mut node, 0, 5);
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    mask_ready(&mut node, 0);
    assert!(!has_step(&node) && node.core.is_idle());
}

#[test]
fn chunk_that_draws_waits_for_the_mask_and_other_prompts_do_not() {
    let mut node = PrefillNode::new(prefill::config());
    node.submit(constrained_job(job(0, 0..20, 1)));
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(0), 0..16)], "what draws no token needs no mask");
    node.submit(job(1, 30..36, 1));
    node.finish_step(MS, &plan, 7);
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(1), 0..6)]);
    node.finish_step(MS, &plan, 7);
    assert!(node.effects.iter().all(|effect| !matches!(effect, PrefillEffect::RunStep(_))));
    assert_eq!(node.core.output(key(0)), Some(&[][..]));
    node.after(MS, |core, now| core.on_mask_ready(now, key(0)));
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(0), 16..20)]);
    node.finish_step(MS, &plan, 7);
    assert!(node.core.is_idle() && node.core.output(key(0)).is_none());
    // One that comes with some of its output, and is given up.
    node.submit(PrefillJob { output_tokens: 2, ..constrained_job(job(2, 40..46, 3)) });
    assert_eq!(node.core.output(key(2)), Some(&[44, 45][..]));
    node.after(MS, |core, now| core.on_abort(now, key(2)));
    node.after(MS, |core, now| core.on_mask_ready(now, key(2)));
    assert!(node.core.is_idle());
}

/// A step that meant nothing has used the mask that was made ahead; the next one may be late.
#[test]
fn prompt_whose_mask_is_late_sits_the_step_out_and_draws_from_its_last_row() {
    let mut node = PrefillNode::new(prefill::config());
    let job = constrained_job(job(0, 0..10, 5));
    let sampling = SamplingParams { prompt_logprobs: Some(0), ..(*job.sampling).clone() };
    node.submit(PrefillJob { sampling: Arc::new(sampling), ..job });
    node.after(MS, |core, now| core.on_mask_ready(now, key(0)));
    node.grant(0, 0, 30..33);
    let mut late = |expected: std::ops::Range<usize>| {
        let plan = node.take_step();
        assert_eq!(shares(&plan), [(key(0), expected)]);
        let mut outputs = outputs(&plan);
        outputs[0].sampled = None;
        outputs[0].is_mask_late = true;
        outputs[0].prompt_logprobs = vec![Default::default(); plan.rows() as usize];
        node.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(outputs)));
        assert!(node.effects.iter().all(|effect| !matches!(effect, PrefillEffect::RunStep(_))), "it waits");
        node.after(MS, |core, now| core.on_mask_ready(now, key(0)));
    };
    late(0..10);
    late(9..10);
    let plan = node.take_step();
    let mut outputs = outputs(&plan);
    outputs[0].prompt_logprobs = vec![Default::default(); plan.rows() as usize];
    node.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(outputs)));
    assert!(matches!(node.take_event(0), PrefillEvent::Started { .. }));
    let PrefillEvent::FirstToken { prompt_logprobs, .. } = node.take_event(0) else { panic!() };
    assert_eq!(prompt_logprobs.len(), 10);
    let pushes = node.effects.iter().filter_map(|effect| match effect {
        PrefillEffect::Push { spans, .. } => Some(spans.len()),
        _ => None,
    });
    assert_eq!(pushes.sum::<usize>(), 3 * 3, "each block once");
}
