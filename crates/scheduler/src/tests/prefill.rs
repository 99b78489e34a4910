//! The prefill core by itself, one event at a time. Blocks have 4 tokens, the model has 3 layers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, BlockId, ConductorId, DecodeTarget, ErrorKind, FinishReason, Generation, GrantId, GrantReply, KvEvent,
    Load, NodeId, PrefillEvent, PrefillJob, QueueOrdering, Refused, RequestKey, Reselect, SamplingParams, TokenId,
};

use super::engine::{key, model, target};
use crate::{
    LogitsWanted, PrefillConfig, PrefillCore, PrefillEffect, PushId, PushReport, PushSpan, StepId, StepOutput, StepPlan,
};

pub(super) const MS: Duration = Duration::from_millis(1);
/// Bytes of one layer of one block.
pub(super) const SPAN_BYTES: u64 = 32;

/// A core, its clock, and what it asked for and was not looked at yet.
pub(super) struct Node {
    pub core: PrefillCore,
    pub now: Instant,
    pub effects: Vec<PrefillEffect>,
}

pub(super) fn config() -> PrefillConfig {
    PrefillConfig {
        token_budget: 16,
        min_chunk_tokens: 16,
        ..PrefillConfig::new(NodeId::new("p0").unwrap(), Generation(1), model(20))
    }
}

pub(super) fn job(n: u64, tokens: impl IntoIterator<Item = TokenId>, max_tokens: u32) -> PrefillJob {
    PrefillJob {
        key: key(n),
        conductor: ConductorId(0),
        tokens: tokens.into_iter().collect(),
        output_tokens: 0,
        is_migration: false,
        sampling: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
        decode: (max_tokens > 1).then(target),
        partial_prefill_tokens: 0,
        fetch: None,
        salt: Arc::from([]),
        terms: QueueOrdering::default(),
    }
}

fn with_sampling(job: PrefillJob, change: impl FnOnce(&mut SamplingParams)) -> PrefillJob {
    let mut sampling = (*job.sampling).clone();
    change(&mut sampling);
    PrefillJob { sampling: Arc::new(sampling), ..job }
}

pub(super) fn refused(kind: ErrorKind) -> Refused {
    Refused { kind, message: "no".into() }
}

impl Node {
    pub(super) fn new(config: PrefillConfig) -> Self {
        Self { core: PrefillCore::new(config).unwrap(), now: Instant::now(), effects: Vec::new() }
    }

    /// Lets time pass, tells the core something, and collects what it asks for.
    pub(super) fn after(&mut self, time: Duration, event: impl FnOnce(&mut PrefillCore, Instant)) {
        self.now += time;
        event(&mut self.core, self.now);
        self.effects.extend(std::iter::from_fn(|| self.core.poll_effect()));
        self.core.check_integrity().unwrap();
    }

    pub(super) fn submit(&mut self, job: PrefillJob) {
        self.after(MS, |core, now| core.on_submit(now, job));
    }

    /// The one effect that `pick` takes.
    pub(super) fn take<T>(&mut self, pick: impl Fn(&PrefillEffect) -> Option<T>) -> T {
        let index = self.effects.iter().position(|effect| pick(effect).is_some());
        let index = index.unwrap_or_else(|| panic!("not among {:?}", self.effects));
        pick(&self.effects.remove(index)).unwrap()
    }

    pub(super) fn take_step(&mut self) -> StepPlan {
        self.take(|effect| match effect {
            PrefillEffect::RunStep(plan) => Some(plan.clone()),
            _ => None,
        })
    }

    pub(super) fn take_event(&mut self, of: u64) -> PrefillEvent {
        self.take(|effect| match effect {
            PrefillEffect::Emit { key: whose, event, .. } if *whose == key(of) => Some(event.clone()),
            _ => None,
        })
    }

    pub(super) fn take_failure(&mut self, of: u64) -> (ErrorKind, String) {
        match self.take_event(of) {
            PrefillEvent::Failed(Refused { kind, message }) | PrefillEvent::DecodeFailed(Refused { kind, message }) => {
                (kind, message)
            }
            event => panic!("{event:?} is no failure"),
        }
    }

    pub(super) fn take_push(&mut self) -> (PushId, Vec<PushSpan>) {
        self.take(|effect| match effect {
            PrefillEffect::Push { push, spans, .. } => Some((*push, spans.clone())),
            _ => None,
        })
    }

    pub(super) fn take_release(&mut self) -> GrantId {
        self.take(|effect| match effect {
            PrefillEffect::ReleaseGrant { grant, .. } => Some(*grant),
            _ => None,
        })
    }

    pub(super) fn finish_step(&mut self, time: Duration, plan: &StepPlan, token: TokenId) {
        let outputs = plan.sequences.iter().map(|sequence| StepOutput {
            key: sequence.key,
            sampled: sequence.is_last_chunk.then_some((token, None)),
            prompt_logprobs: Vec::new(),
            hidden: Vec::new(),
            failed: None,
            is_mask_late: false,
        });
        let outputs = outputs.collect();
        self.after(time, |core, now| core.on_step_done(now, plan.id, Ok(outputs)));
    }

    /// Runs a one-token job to its end.
    pub(super) fn run_alone(&mut self, job: PrefillJob) {
        self.submit(job);
        while self.core.load(Instant::now()).running > 0 {
            let plan = self.take_step();
            self.finish_step(MS, &plan, 1);
        }
        self.effects.clear();
    }

    pub(super) fn grant(&mut self, of: u64, cached_blocks: u32, blocks: std::ops::Range<u32>) {
        let reply = GrantReply {
            grant: GrantId(9),
            cached_blocks,
            blocks: blocks.map(BlockId).collect(),
            partial_prefill_tokens: 0,
        };
        self.after(MS, |core, now| core.on_grant_reply(now, key(of), Ok(reply)));
    }

    pub(super) fn acknowledge(&mut self, of: u64, (push, spans): &(PushId, Vec<PushSpan>)) {
        let bytes = spans.len() as u64 * SPAN_BYTES;
        self.after(2 * MS, |core, now| {
            let report = PushReport { bytes, transport: "tcp".into(), started: now - 2 * MS, completed: now };
            core.on_push_done(now, key(of), *push, Ok(report));
        });
    }
}

pub(super) fn shares(plan: &StepPlan) -> Vec<(RequestKey, std::ops::Range<usize>)> {
    plan.sequences.iter().map(|sequence| (sequence.key, sequence.range.clone())).collect()
}

#[test]
fn prompts_share_a_chunk_and_shares_end_on_block_boundaries() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..6, 1));
    let first = node.take_step();
    assert_eq!(shares(&first), [(key(0), 0..6)]);
    assert_eq!((first.sequences[0].logits, first.sequences[0].is_last_chunk), (LogitsWanted::Last, true));
    assert_eq!(first.sequences[0].zero_tail, Some((first.sequences[0].block_table[1], 2)));
    node.submit(job(1, 10..16, 1));
    node.submit(job(2, 20..40, 1));
    node.submit(job(3, 40..43, 1));
    node.finish_step(MS, &first, 1);
    // 16 tokens: 6 of request 1, then whole blocks of request 2 within the 10 that are left. 2 are
    // too few for request 3 to start.
    let second = node.take_step();
    assert_eq!(shares(&second), [(key(1), 0..6), (key(2), 0..8)]);
    assert_eq!((second.sequences[1].logits, second.sequences[1].zero_tail), (LogitsWanted::None, None));
    assert_eq!((second.rows(), second.attended_tokens()), (14, 21 + 36));
    node.finish_step(MS, &second, 1);
    let third = node.take_step();
    assert_eq!(shares(&third), [(key(2), 8..20), (key(3), 0..3)]);
    assert_eq!(third.attended_tokens(), (9..=20).sum::<u64>() + 6);
    assert_eq!(third.sequences[0].zero_tail, None, "the last block is full");
    node.finish_step(MS, &third, 1);
    assert!(node.core.is_idle());
}

#[test]
fn chunk_that_ends_a_prompt_is_not_filled_with_parts_of_others() {
    let mut node = Node::new(PrefillConfig { min_chunk_tokens: 6, ..config() });
    node.submit(job(0, 0..4, 1));
    let first = node.take_step();
    for (n, prompt) in [(1, 10..16), (2, 20..40), (3, 40..44)] {
        node.submit(job(n, prompt, 1));
    }
    node.finish_step(MS, &first, 1);
    let second = node.take_step();
    assert_eq!(shares(&second), [(key(1), 0..6)], "any other prompt in it would make its first token wait");
    node.finish_step(MS, &second, 1);
    assert_eq!(shares(&node.take_step()), [(key(2), 0..16)]);
}

#[test]
fn prefill_queue_serves_priorities_first_then_in_fcfs_order() {
    let mut node = Node::new(PrefillConfig { max_sequences_per_chunk: 1, ..config() });
    node.submit(job(0, 0..16, 1));
    for (n, priority) in [(1, 0), (2, 5), (3, 0), (4, 5)] {
        node.submit(PrefillJob { terms: QueueOrdering { priority, ..QueueOrdering::default() }, ..job(n, 0..16, 1) });
    }
    let mut order = Vec::new();
    for _ in 0..5 {
        let plan = node.take_step();
        order.push(plan.sequences[0].key);
        node.finish_step(MS, &plan, 1);
    }
    assert_eq!(order, [0, 2, 4, 1, 3].map(key));
}

#[test]
fn repeated_prompt_computes_only_past_its_last_full_cached_block() {
    let mut node = Node::new(config());
    node.run_alone(job(0, 0..17, 1));
    node.submit(job(1, 0..17, 1));
    assert!(matches!(node.take_event(1), PrefillEvent::Started { cached_tokens: 16, .. }));
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(1), 16..17)]);
    node.finish_step(MS, &plan, 1);
    // The last token is computed even if all blocks are cached.
    node.submit(job(2, 0..16, 1));
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(2), 12..16)]);
    node.finish_step(MS, &plan, 1);
    let salted = PrefillJob { salt: Arc::from(*b"tenant"), ..job(3, 0..16, 1) };
    node.submit(salted);
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(3), 0..16)]);
    node.finish_step(MS, &plan, 1);
    let Load { prefix_queries, prefix_hits, blocks_used, .. } = node.core.load(Instant::now());
    assert_eq!((prefix_queries, prefix_hits, blocks_used), (17 + 17 + 16 + 16, 16 + 12, 0));
}

#[test]
fn forgotten_blocks_and_those_after_them_are_computed_anew() {
    let mut node = Node::new(config());
    node.run_alone(job(0, 0..17, 1));
    let first = node.core.kv_snapshot().events.into_iter().find_map(|event| match event {
        KvEvent::Stored { hash, parent: None } => Some(hash),
        _ => None,
    });
    node.core.drain_kv_events(100).unwrap();
    node.after(MS, |core, _| core.forget_blocks(&[first.unwrap(), BlockHash([7; 16])]));
    let told = node.core.drain_kv_events(100).unwrap().events;
    let removed = told.iter().filter(|event| matches!(event, KvEvent::Removed { .. })).count();
    assert_eq!((removed, told.len()), (4, 4), "conductors hear of it");
    node.submit(job(1, 0..17, 1));
    assert!(matches!(node.take_event(1), PrefillEvent::Started { cached_tokens: 0, .. }));
}

#[test]
fn prompt_logprobs_bypass_prefix_cache_and_come_with_first_token() {
    let mut node = Node::new(config());
    node.run_alone(job(0, 0..20, 1));
    node.submit(with_sampling(job(1, 0..20, 1), |sampling| sampling.prompt_logprobs = Some(5)));
    assert!(matches!(node.take_event(1), PrefillEvent::Started { cached_tokens: 0, .. }));
    for expected in [0..16, 16..20] {
        let plan = node.take_step();
        let sequence = &plan.sequences[0];
        assert_eq!((sequence.range.clone(), sequence.logits), (expected.clone(), LogitsWanted::All));
        let output = StepOutput {
            key: key(1),
            sampled: sequence.is_last_chunk.then_some((7, None)),
            prompt_logprobs: vec![Default::default(); expected.len()],
            hidden: Vec::new(),
            failed: None,
            is_mask_late: false,
        };
        node.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(vec![output])));
    }
    let PrefillEvent::FirstToken { token: 7, prompt_logprobs, finish, .. } = node.take_event(1) else { panic!() };
    assert_eq!((prompt_logprobs.len(), finish), (20, Some(FinishReason::Length)));
}

#[test]
fn layers_are_pushed_while_later_ones_compute() {
    let mut node = Node::new(PrefillConfig { max_inflight_pushes: 2, ..config() });
    node.submit(job(0, 0..10, 5));
    let request = node.take(|effect| match effect {
        PrefillEffect::RequestGrant { request, .. } => Some(request.clone()),
        _ => None,
    });
    assert_eq!((request.prompt_tokens, request.block_hashes.len(), request.max_tokens), (10, 2, 5));
    let plan = node.take_step();
    let sources = plan.sequences[0].block_table.clone();
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 0));
    assert!(node.effects.iter().all(|effect| !matches!(effect, PrefillEffect::Push { .. })), "no grant yet");
    // The decode node holds the first block: two are pushed.
    node.grant(0, 1, 30..32);
    let first = node.take_push();
    let span =
        |layer, index: usize| PushSpan { layer, source: sources[index], destination: BlockId(29 + index as u32) };
    assert_eq!(first.1, [span(0, 1), span(0, 2)]);
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 1));
    let second = node.take_push();
    assert_eq!(second.1, [span(1, 1), span(1, 2)]);
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 1));
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 2));
    assert!(node.effects.iter().all(|effect| !matches!(effect, PrefillEffect::Push { .. })), "two are under way");
    node.acknowledge(0, &first);
    let third = node.take_push();
    node.acknowledge(0, &second);
    node.finish_step(MS, &plan, 7);
    assert!(matches!(node.take_event(0), PrefillEvent::Started { .. }));
    let PrefillEvent::FirstToken { token: 7, finish: None, .. } = node.take_event(0) else { panic!() };
    let handoff = node.take(|effect| match effect {
        PrefillEffect::Handoff { handoff, .. } => Some(handoff.clone()),
        _ => None,
    });
    assert_eq!((handoff.grant, handoff.first_token, handoff.expected_bytes), (GrantId(9), Some(7), 6 * SPAN_BYTES));
    node.after(MS, |core, now| core.on_handoff_reply(now, key(0), Ok(())));
    assert_eq!(node.core.load(Instant::now()).blocks_used, 3, "pinned until the last push is acknowledged");
    node.acknowledge(0, &third);
    let PrefillEvent::HandedOff(transfer) = node.take_event(0) else { panic!() };
    assert_eq!((transfer.bytes, transfer.bytes_at_compute_end), (6 * SPAN_BYTES, 4 * SPAN_BYTES));
    assert_eq!((transfer.exposed, transfer.transport.as_str()), (3 * MS, "tcp"));
    assert_eq!(transfer.elapsed, 8 * MS);
    assert!(node.core.is_idle() && node.effects.is_empty());
    assert_eq!((node.core.load(Instant::now()).blocks_cached, node.core.load(Instant::now()).blocks_used), (2, 0));
}

#[test]
fn prefill_node_resumes_output_after_a_node_loss() {
    let mut node = Node::new(config());
    // A prompt of 6 tokens, and 4 of at most 6 of the output.
    node.submit(PrefillJob { output_tokens: 4, ..job(0, 0..10, 6) });
    let request = node.take(|effect| match effect {
        PrefillEffect::RequestGrant { request, .. } => Some(request.clone()),
        _ => None,
    });
    assert_eq!((request.prompt_tokens, request.output_tokens, request.max_tokens), (6, 4, 6));
    assert_eq!((request.tokens(), request.block_hashes.len()), (10, 2));
    node.grant(0, 0, 30..33);
    let plan = node.take_step();
    // The draw is number 4, and the penalties and the grammar are those of four tokens.
    assert_eq!((plan.sequences[0].prompt_tokens, plan.sequences[0].range.clone()), (6, 0..10));
    node.finish_step(MS, &plan, 7);
    let handoff = node.take(|effect| match effect {
        PrefillEffect::Handoff { handoff, .. } => Some(handoff.clone()),
        _ => None,
    });
    assert_eq!((handoff.tokens.len(), handoff.first_token), (10, Some(7)));
    // The last of them ends here, although others were named for more.
    node.submit(PrefillJob { output_tokens: 5, decode: Some(target()), ..job(1, 20..26, 6) });
    let plan = node.take_step();
    node.finish_step(MS, &plan, 8);
    node.take_event(1);
    let PrefillEvent::FirstToken { token: 8, finish: Some(FinishReason::Length), .. } = node.take_event(1) else {
        panic!()
    };
    for (output_tokens, is_migration) in [(10, false), (6, false), (4, true)] {
        node.submit(PrefillJob { output_tokens, is_migration, ..job(2, 0..10, 6) });
        assert_eq!(node.take_failure(2).0, ErrorKind::Invalid);
    }
}

#[test]
fn cached_blocks_are_pushed_at_once_without_layer_reports() {
    let mut node = Node::new(config());
    node.run_alone(job(0, 0..12, 1));
    node.submit(job(1, 0..12, 5));
    let plan = node.take_step();
    node.grant(1, 0, 30..33);
    let (_, cached) = node.take_push();
    assert_eq!(cached.iter().map(|span| span.layer).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2]);
    assert_eq!(cached.iter().map(|span| span.destination.0).collect::<Vec<_>>(), [30, 31, 30, 31, 30, 31]);
    node.finish_step(MS, &plan, 7);
    let rest: Vec<_> = (0..3).flat_map(|_| node.take_push().1).map(|span| (span.layer, span.destination.0)).collect();
    assert_eq!(rest, [(0, 32), (1, 32), (2, 32)]);
}

#[test]
fn decode_node_that_has_every_block_is_pushed_no_bytes() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..8, 5));
    node.grant(0, 2, 0..0);
    let plan = node.take_step();
    node.finish_step(MS, &plan, 7);
    node.after(MS, |core, now| core.on_handoff_reply(now, key(0), Ok(())));
    node.take_event(0);
    node.take_event(0);
    let PrefillEvent::HandedOff(transfer) = node.take_event(0) else { panic!() };
    assert_eq!((transfer.bytes, transfer.elapsed, transfer.transport.as_str()), (0, Duration::ZERO, ""));
}

#[test]
fn request_that_ends_at_prefill_releases_its_grant() {
    let mut node = Node::new(config());
    node.submit(with_sampling(job(0, 0..8, 5), |sampling| sampling.stop_token_ids = vec![7]));
    let plan = node.take_step();
    node.finish_step(MS, &plan, 7);
    node.take_event(0);
    let PrefillEvent::FirstToken { finish: Some(FinishReason::Stop), .. } = node.take_event(0) else { panic!() };
    assert!(node.core.is_idle());
    // The grant that was asked for comes late.
    node.grant(0, 0, 30..32);
    assert_eq!(node.take_release(), GrantId(9));
    // One token for a decode node that was named anyway: none is asked.
    node.submit(PrefillJob { decode: Some(target()), ..job(1, 0..8, 1) });
    assert!(
        !node.effects.iter().any(|e| matches!(e, PrefillEffect::RequestGrant { request, .. } if request.key == key(1)))
    );
}

#[test]
fn prompt_that_cannot_be_taken_is_refused_with_the_numbers() {
    let mut node = Node::new(PrefillConfig { max_waiting: 1, ..config() });
    let cases = [
        (job(0, [], 1), "the prompt is empty"),
        (job(0, std::iter::repeat_n(1, 60), 1), "the prompt has 60 tokens, the context holds 60, the output included"),
        (job(0, [3, 50], 1), "token 50 is not in the vocabulary of 50"),
        (PrefillJob { decode: None, ..job(0, 0..4, 9) }, "max_tokens is 9, but no decode node was named"),
        (with_sampling(job(0, 0..4, 1), |s| s.temperature = -1.0), "temperature is -1, but must be from 0 to 100"),
    ];
    for (job, expected) in cases {
        node.submit(job);
        assert_eq!(node.take_failure(0), (ErrorKind::Invalid, expected.to_owned()));
    }
    let mut small = Node::new(PrefillConfig::new(NodeId::new("p0").unwrap(), Generation(1), model(3)));
    small.submit(job(0, 0..13, 1));
    let expected = "the prompt has 13 tokens in 4 blocks, the node has 3 blocks";
    assert_eq!(small.take_failure(0), (ErrorKind::Invalid, expected.to_owned()));
    node.submit(job(1, 0..16, 1));
    node.submit(job(2, 0..16, 1));
    node.submit(job(3, 0..16, 1));
    assert_eq!(node.take_failure(3), (ErrorKind::Overloaded, "1 requests wait at node p0, as many as may".into()));
    node.submit(job(2, 0..16, 1));
    assert_eq!(node.core.load(Instant::now()).waiting, 1, "a job that is told twice counts once");
    node.after(MS, |core, now| core.on_drain(now));
    node.submit(job(4, 0..4, 1));
    assert_eq!(node.take_failure(4), (ErrorKind::Unavailable, "node p0 is draining".into()));
    let plan = node.take_step();
    node.finish_step(MS, &plan, 1);
    let plan = node.take_step();
    node.finish_step(MS, &plan, 1);
    assert!(node.core.is_idle(), "what was taken before is finished");
}

#[test]
fn prefill_waits_for_grant_and_for_blocks_time_out() {
    let mut node = Node::new(PrefillConfig { model: model(4), grant_timeout: Duration::from_secs(15), ..config() });
    node.submit(job(0, 0..16, 5));
    node.submit(job(1, 20..36, 1));
    let plan = node.take_step();
    node.finish_step(MS, &plan, 7);
    let wakeup = node.core.next_wakeup().unwrap();
    node.after(wakeup - node.now, |core, now| core.on_wakeup(now));
    node.take_event(0);
    node.take_event(0);
    let expected = "decode node d0 did not grant room within 15s";
    assert_eq!(node.take_failure(0), (ErrorKind::Unavailable, expected.into()));
    let plan = node.take_step();
    assert_eq!(plan.sequences[0].key, key(1), "its blocks are free for the next");
    node.submit(job(2, 0..16, 1));
    let wakeup = node.core.next_wakeup().unwrap();
    node.after(wakeup - node.now, |core, now| core.on_wakeup(now));
    assert_eq!(node.take_failure(2), (ErrorKind::Overloaded, "no room at node p0 within 60s".into()));
    node.finish_step(MS, &plan, 1);
    assert_eq!((node.core.is_idle(), node.core.next_wakeup()), (true, None));
}

#[test]
fn handoff_without_an_answer_fails_and_releases_the_grant() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..8, 5));
    node.grant(0, 2, 0..0);
    let plan = node.take_step();
    node.finish_step(MS, &plan, 7);
    let wakeup = node.core.next_wakeup().unwrap();
    node.after(wakeup - node.now, |core, now| core.on_wakeup(now));
    node.take_event(0);
    node.take_event(0);
    assert_eq!(node.take_failure(0).1, "decode node d0 did not answer the handoff within 15s");
    assert_eq!(node.take_release(), GrantId(9));
    node.after(MS, |core, now| core.on_handoff_reply(now, key(0), Ok(())));
    assert!(node.core.is_idle());
}

#[test]
fn grant_refusal_fails_the_request_with_its_error_kind() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..8, 5));
    let plan = node.take_step();
    node.after(MS, |core, now| core.on_grant_reply(now, key(0), Err(refused(ErrorKind::Unavailable))));
    node.take_event(0);
    assert_eq!(node.take_failure(0), (ErrorKind::Unavailable, "decode node d0: no".into()));
    assert_eq!(node.core.load(Instant::now()).blocks_used, 2, "the engine still works on it");
    node.finish_step(MS, &plan, 7);
    assert_eq!(node.core.load(Instant::now()).blocks_used, 0);
    node.submit(job(1, 0..8, 5));
    let plan = node.take_step();
    node.grant(1, 1, 30..32);
    node.take_event(1);
    let (kind, message) = node.take_failure(1);
    assert_eq!(kind, ErrorKind::Internal);
    assert_eq!(message, "the grant holds 1 and takes 2 blocks of a prompt of 2 full and 2 blocks in all");
    node.finish_step(MS, &plan, 7);
    assert!(node.core.is_idle());
}

#[test]
fn reselected_decode_node_is_asked_for_a_grant_until_timeout() {
    let mut node = Node::new(config());
    let asked = |node: &mut Node| {
        node.take(|effect| match effect {
            PrefillEffect::RequestGrant { target, request, delay } => {
                Some((target.node.to_string(), request.tbt, *delay))
            }
            _ => None,
        })
    };
    let to =
        |name: &str| Reselect { key: key(0), decode: DecodeTarget { node: NodeId::new(name).unwrap(), ..target() } };
    let mut wanted = job(0, 0..8, 5);
    wanted.decode = wanted.decode.map(|target| DecodeTarget { tbt: Some(MS), ..target });
    node.submit(wanted);
    assert_eq!(asked(&mut node), ("d0".into(), Some(MS), Duration::ZERO));
    node.take_event(0);
    let mut before = "d0";
    for (next, delay) in [("d0", 100 * MS), ("d1", Duration::ZERO), ("d1", 100 * MS), ("d0", 100 * MS)] {
        node.after(MS, |core, _| core.on_reselect(to("d9")));
        node.after(MS, |core, now| core.on_grant_reply(now, key(0), Err(refused(ErrorKind::Overloaded))));
        let PrefillEvent::GrantRefused(refused) = node.take_event(0) else { panic!("it was refused") };
        assert_eq!(refused.kind, ErrorKind::Overloaded);
        assert!(!node.effects.iter().any(|effect| matches!(effect, PrefillEffect::RequestGrant { .. })));
        node.after(MS, |core, _| core.on_reselect(to(next)));
        assert_eq!(asked(&mut node), (next.into(), None, delay), "another one at once, but once");
        let given_up =
            |effect: &PrefillEffect| matches!(effect, PrefillEffect::ReleaseGrant { grant: GrantId::NONE, .. });
        let places = node.effects.iter().filter(|effect| given_up(effect)).count();
        assert_eq!(places, usize::from(next != before), "the place in the line of the one that was asked");
        node.effects.retain(|effect| !given_up(effect));
        before = next;
    }
    let due = node.core.next_wakeup().unwrap();
    assert_eq!(due - node.now, Duration::from_secs(60) - 12 * MS, "from the first question on");
    node.after(due - node.now, |core, now| core.on_wakeup(now));
    assert_eq!(node.take_failure(0), (ErrorKind::Unavailable, "decode node d0 did not grant room within 60s".into()));
}

#[test]
fn failed_push_cancels_the_others_and_blocks_stay_until_they_end() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..8, 5));
    let plan = node.take_step();
    node.grant(0, 0, 30..32);
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 0));
    node.after(MS, |core, now| core.on_kv_ready(now, plan.id, 1));
    let first = node.take_push();
    let second = node.take_push();
    node.after(MS, |core, now| core.on_push_done(now, key(0), first.0, Err(refused(ErrorKind::Unavailable))));
    node.take_event(0);
    assert_eq!(node.take_failure(0), (ErrorKind::Unavailable, "push to d0 failed: no".into()));
    node.take(|effect| matches!(effect, PrefillEffect::CancelPushes { .. }).then_some(()));
    assert_eq!(node.take_release(), GrantId(9));
    node.finish_step(MS, &plan, 7);
    assert_eq!(node.core.load(Instant::now()).blocks_used, 2);
    assert!(node.core.knows(key(0)));
    node.effects.clear();
    node.after(MS, |core, now| core.on_push_done(now, key(0), second.0, Err(refused(ErrorKind::Cancelled))));
    assert_eq!((node.core.load(Instant::now()).blocks_used, node.core.knows(key(0))), (0, false));
    assert!(node.effects.is_empty());
}

#[test]
fn failed_prefill_step_fails_all_its_requests_and_no_other() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..8, 1));
    let plan = node.take_step();
    node.submit(job(1, 0..16, 1));
    node.after(MS, |core, now| core.on_step_done(now, plan.id, Err(refused(ErrorKind::Internal))));
    node.take_event(0);
    assert_eq!(node.take_failure(0), (ErrorKind::Internal, "the engine failed: no".into()));
    let plan = node.take_step();
    assert_eq!(shares(&plan), [(key(1), 0..16)], "nothing of the failed step is cached");
    // An output is missing.
    node.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(Vec::new())));
    node.take_event(1);
    assert_eq!(node.take_failure(1).0, ErrorKind::Internal);
    assert!(node.core.is_idle());
}

#[test]
fn prefill_abort_sends_no_event_in_every_state() {
    let mut node = Node::new(config());
    node.submit(job(0, 0..16, 5));
    node.submit(job(1, 0..8, 5));
    node.after(MS, |core, now| core.on_abort(now, key(1)));
    assert_eq!(node.core.load(Instant::now()).waiting, 0);
    let plan = node.take_step();
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    node.effects.clear();
    assert_eq!(node.core.load(Instant::now()).blocks_used, 4, "the engine still works on it");
    node.finish_step(MS, &plan, 7);
    node.after(MS, |core, now| core.on_abort(now, key(77)));
    assert_eq!(node.effects, []);
    node.grant(0, 0, 30..34);
    assert_eq!(node.take_release(), GrantId(9));
    assert!(node.core.is_idle());
    node.submit(PrefillJob { conductor: ConductorId(5), ..job(2, 0..8, 5) });
    node.submit(job(3, 0..8, 1));
    node.after(MS, |core, now| core.on_conductor_lost(now, ConductorId(5)));
    assert!(!node.core.is_idle() && node.core.load(Instant::now()).running == 0);
}

#[test]
#[should_panic(expected = "the step reported is not the step in flight")]
fn report_of_a_step_not_in_flight_panics() {
    let mut node = Node::new(config());
    node.after(MS, |core, now| core.on_step_done(now, StepId(3), Ok(Vec::new())));
}

#[test]
fn invalid_prefill_config_names_the_field() {
    let odd = PrefillConfig { token_budget: 6, ..config() };
    let error = PrefillCore::new(odd).unwrap_err();
    assert_eq!(error.to_string(), "token_budget is 6, but must be a multiple of the block's tokens");
    let none = PrefillConfig { max_inflight_pushes: 0, ..config() };
    assert_eq!(PrefillCore::new(none).unwrap_err().field, "max_inflight_pushes");
}
