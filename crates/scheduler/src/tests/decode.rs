//! The decode core by itself, one event at a time. Blocks have 4 tokens, the model has 3 layers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockHasher;
use baton_types::{
    ConductorId, DecodeEvent, ErrorKind, FinishReason, Generation, GrantId, GrantReply, GrantRequest, Handoff,
    ModelFingerprint, NodeId, PrefillEvent, PrefillJob, QueueOrdering, Refused, RequestKey, SamplingParams, TokenId,
};

use super::engine::{key, model};
use crate::{DecodeConfig, DecodeCore, DecodeEffect, LogitsWanted, PushId, StepOutput, StepPlan};

pub(super) const MS: Duration = Duration::from_millis(1);
/// Bytes of all layers of one block.
pub(super) const BLOCK_BYTES: u64 = 96;

pub(super) struct Node {
    pub core: DecodeCore,
    pub now: Instant,
    pub effects: Vec<DecodeEffect>,
}

/// Room for whole answers, and no request waits for it.
pub(super) fn config(num_blocks: u32) -> DecodeConfig {
    DecodeConfig { growth_blocks: usize::MAX, grant_wait: Duration::ZERO, ..DecodeConfig::new(model(num_blocks)) }
}

pub(super) fn tokens(len: u32) -> Vec<TokenId> {
    (0..len).collect()
}

pub(super) fn grant_request(n: u64, prompt: &[TokenId], max_tokens: u32) -> GrantRequest {
    GrantRequest {
        key: key(n),
        prefill: NodeId::new("p0").unwrap(),
        prefill_generation: Generation(1),
        prompt_tokens: prompt.len() as u32,
        output_tokens: 0,
        block_hashes: BlockHasher::new(ModelFingerprint(7), b"").chain(prompt, 4).into(),
        max_tokens,
        tbt: None,
        partial_prefill_tokens: 0,
        is_other_class: false,
    }
}

pub(super) fn handoff(n: u64, prompt: &[TokenId], max_tokens: u32, grant: GrantId, blocks: u64) -> Handoff {
    Handoff {
        key: key(n),
        conductor: ConductorId(n % 2),
        grant,
        tokens: prompt.into(),
        first_token: Some(40),
        sampling: Arc::new(SamplingParams { max_tokens, stop_token_ids: vec![49], ..SamplingParams::default() }),
        expected_bytes: blocks * BLOCK_BYTES,
        salt: Arc::from([]),
    }
}

impl Node {
    pub fn new(config: DecodeConfig) -> Self {
        Self { core: DecodeCore::new(config).unwrap(), now: Instant::now(), effects: Vec::new() }
    }

    pub fn after(&mut self, time: Duration, event: impl FnOnce(&mut DecodeCore, Instant)) {
        self.now += time;
        event(&mut self.core, self.now);
        self.effects.extend(std::iter::from_fn(|| self.core.poll_effect()));
        self.core.check_integrity().unwrap();
    }

    pub fn take<T>(&mut self, pick: impl Fn(&DecodeEffect) -> Option<T>) -> T {
        let index = self.effects.iter().position(|effect| pick(effect).is_some());
        let index = index.unwrap_or_else(|| panic!("not among {:?}", self.effects));
        pick(&self.effects.remove(index)).unwrap()
    }

    pub fn ask(&mut self, request: GrantRequest) -> Result<GrantReply, Refused> {
        self.after(MS, |core, now| core.on_grant_request(now, request));
        self.take(|effect| match effect {
            DecodeEffect::OpenGrant { reply, .. } => Some(Ok(reply.clone())),
            DecodeEffect::RefuseGrant { refused, .. } => Some(Err(refused.clone())),
            _ => None,
        })
    }

    pub fn hand_off(&mut self, handoff: Handoff) -> Result<(), Refused> {
        self.after(MS, |core, now| core.on_handoff(now, handoff));
        self.take(|effect| match effect {
            DecodeEffect::HandoffReply { result, .. } => Some(result.clone()),
            _ => None,
        })
    }

    pub fn arrive(&mut self, grant: GrantId, push: u64, blocks: u64) {
        self.after(MS, |core, now| core.on_arrival(now, grant, PushId(push), blocks * BLOCK_BYTES));
    }

    /// Fences every grant that is to be revoked; how many there were.
    pub fn fence(&mut self) -> usize {
        let revoked = |effect: &DecodeEffect| match effect {
            DecodeEffect::RevokeGrant { grant } => Some(*grant),
            _ => None,
        };
        let grants: Vec<_> = self.effects.iter().filter_map(revoked).collect();
        self.effects.retain(|effect| revoked(effect).is_none());
        for grant in &grants {
            self.after(MS, |core, now| core.on_grant_fenced(now, *grant));
        }
        grants.len()
    }

    /// A request in the running batch, from grant to fence.
    pub fn admit(&mut self, n: u64, prompt: &[TokenId], max_tokens: u32) -> GrantReply {
        let reply = self.ask(grant_request(n, prompt, max_tokens)).unwrap();
        let blocks = reply.blocks.len() as u64;
        self.hand_off(handoff(n, prompt, max_tokens, reply.grant, blocks)).unwrap();
        if blocks > 0 {
            self.arrive(reply.grant, n, blocks);
        }
        assert_eq!(self.fence(), 1);
        reply
    }

    pub fn take_step(&mut self) -> StepPlan {
        self.take(|effect| match effect {
            DecodeEffect::RunStep(plan) => Some(plan.clone()),
            _ => None,
        })
    }

    fn finish_step(&mut self, plan: &StepPlan, token: TokenId) {
        let output = |key: RequestKey| StepOutput {
            key,
            sampled: Some((token, None)),
            prompt_logprobs: Vec::new(),
            hidden: Vec::new(),
            failed: None,
            is_mask_late: false,
        };
        let outputs = plan.sequences.iter().map(|sequence| output(sequence.key)).collect();
        self.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(outputs)));
    }

    /// Steps until nothing runs, drawing 41; every event.
    pub fn run(&mut self) -> Vec<(RequestKey, DecodeEvent)> {
        while self.core.load().running > 0 {
            let plan = self.take_step();
            self.finish_step(&plan, 41);
        }
        self.take_events()
    }

    pub fn take_events(&mut self) -> Vec<(RequestKey, DecodeEvent)> {
        let (emits, rest) = self.effects.drain(..).partition(|effect| matches!(effect, DecodeEffect::Emit { .. }));
        self.effects = rest;
        let events = |effect| match effect {
            DecodeEffect::Emit { events, .. } => events,
            _ => Vec::new(),
        };
        Vec::into_iter(emits).flat_map(events).collect()
    }
}

pub(super) fn failure(event: &DecodeEvent) -> (ErrorKind, &str) {
    match event {
        DecodeEvent::Failed(Refused { kind, message }) => (*kind, message),
        event => panic!("{event:?} is no failure"),
    }
}

#[test]
fn sequence_runs_once_bytes_and_handoff_arrive_in_either_order() {
    for bytes_first in [false, true] {
        let mut node = Node::new(config(20));
        let prompt = tokens(10);
        let reply = node.ask(grant_request(0, &prompt, 4)).unwrap();
        assert_eq!((reply.cached_blocks, reply.blocks.len()), (0, 3));
        if bytes_first {
            node.arrive(reply.grant, 0, 3);
            node.hand_off(handoff(0, &prompt, 4, reply.grant, 3)).unwrap();
        } else {
            node.hand_off(handoff(0, &prompt, 4, reply.grant, 3)).unwrap();
            node.arrive(reply.grant, 0, 2);
            // The same batch told twice counts once.
            node.arrive(reply.grant, 0, 2);
            assert_eq!(node.core.load().running, 0);
            node.arrive(reply.grant, 1, 1);
        }
        let plan = node.take_step();
        let sequence = &plan.sequences[0];
        assert_eq!((sequence.range.clone(), sequence.prompt_tokens, sequence.tokens.len()), (10..11, 10, 11));
        assert_eq!((plan.rows(), plan.attended_tokens(), sequence.is_last_chunk), (1, 11, true));
        node.finish_step(&plan, 41);
        let DecodeEvent::Token { index: 1, token: 41, finish: None, queue: Some(queue), .. } = node.take_events()[0].1
        else {
            panic!()
        };
        assert_eq!(queue, if bytes_first { Duration::ZERO } else { 3 * MS });
        let last = node.run().pop().unwrap().1;
        assert!(matches!(last, DecodeEvent::Token { index: 3, finish: Some(FinishReason::Length), queue: None, .. }));
        assert_eq!(node.fence(), 1);
        assert!(node.core.is_idle());
        let load = node.core.load();
        assert_eq!((load.blocks_used, load.blocks_reserved, load.blocks_cached), (0, 0, 3));
    }
}

#[test]
fn decode_node_resumes_output_after_a_node_loss() {
    // A prompt of 6 tokens, and 4 of at most 7 of the output: with a grant, and computed here.
    let mut node = Node::new(config(20));
    let given = tokens(10);
    let reply = node.ask(GrantRequest { prompt_tokens: 6, output_tokens: 4, ..grant_request(0, &given, 7) }).unwrap();
    assert_eq!((reply.blocks.len(), node.core.load().blocks_reserved), (3, 0), "12 tokens have their KV in the end");
    node.hand_off(handoff(0, &given, 7, reply.grant, 3)).unwrap();
    node.arrive(reply.grant, 0, 3);
    let plan = node.take_step();
    assert_eq!((plan.sequences[0].prompt_tokens, plan.sequences[0].range.clone()), (6, 10..11));
    node.finish_step(&plan, 41);
    let plan = node.take_step();
    node.finish_step(&plan, 41);
    let indices = |events: Vec<(RequestKey, DecodeEvent)>| -> Vec<_> {
        let token = |(_, event)| match event {
            DecodeEvent::Token { index, finish, .. } => (index, finish.is_some()),
            event => panic!("{event:?}"),
        };
        events.into_iter().map(token).collect()
    };
    assert_eq!(indices(node.take_events()), [(5, false), (6, true)]);

    let mut node = Node::new(config(20));
    node.after(MS, |core, now| core.on_submit(now, PrefillJob { output_tokens: 4, ..submitted(0, &given, 7) }));
    let plan = node.take_step();
    assert_eq!((plan.sequences[0].prompt_tokens, plan.sequences[0].range.clone()), (6, 0..10));
    node.finish(&plan, 41);
    assert!(matches!(node.take_prompt_event(0), PrefillEvent::Started { .. }));
    assert!(matches!(node.take_prompt_event(0), PrefillEvent::FirstToken { token: 41, finish: None, .. }));
    assert!(matches!(node.take_prompt_event(0), PrefillEvent::HandedOff(_)));
    assert_eq!(indices(node.run()), [(5, false), (6, true)]);
    let refused = node.ask(GrantRequest { prompt_tokens: 6, output_tokens: 4, ..grant_request(1, &given, 5) });
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid, "nothing to decode");
}

#[test]
fn next_turn_finds_prompt_and_answer_in_prefix_cache() {
    let mut node = Node::new(config(20));
    node.admit(0, &tokens(6), 8);
    node.run();
    // Tokens 0 to 12 have their KV here; the last one drawn does not.
    let mut next: Vec<_> = tokens(6);
    next.extend([40, 41, 41, 41, 41, 41, 41, 41, 3, 3]);
    let reply = node.ask(grant_request(1, &next, 4)).unwrap();
    assert_eq!((reply.cached_blocks, reply.blocks.len()), (3, 1));
    assert_eq!((node.core.load().prefix_queries, node.core.load().prefix_hits), (22, 12));
    let mut events = Vec::new();
    while let Some(batch) = node.core.drain_kv_events(2) {
        events.extend(batch.events);
    }
    assert_eq!(events.len(), 3);
    assert_eq!(node.core.kv_snapshot().events.len(), 3);
}

#[test]
fn grant_reserves_blocks_of_whole_answer_and_refusal_names_numbers() {
    let mut node = Node::new(config(10));
    // 8 + 13 tokens, of which the last needs no KV: 5 blocks.
    node.ask(grant_request(0, &tokens(8), 13)).unwrap();
    assert_eq!((node.core.load().blocks_used, node.core.load().blocks_reserved), (2, 3));
    let refused = node.ask(grant_request(1, &tokens(8), 14)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Overloaded);
    let expected = "no room for 8 prompt and 14 output tokens: 6 blocks wanted, 5 of 10 available";
    assert_eq!(refused.message, expected);
    node.ask(grant_request(1, &tokens(8), 13)).unwrap();
    let more_than_the_node = node.ask(grant_request(2, &tokens(4), 38)).unwrap_err();
    assert_eq!(more_than_the_node.kind, ErrorKind::Overloaded, "a limit is no demand");
    let refused = node.ask(grant_request(2, &tokens(40), 38)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Invalid);
    let expected = "40 prompt and 38 output tokens, of which 0 are given, and this node holds 41: nothing to decode";
    assert_eq!(refused.message, expected);
    let mut odd = grant_request(2, &tokens(8), 4);
    odd.prompt_tokens = 12;
    assert_eq!(node.ask(odd).unwrap_err().message, "2 block hashes for 3 full blocks of the prompt");
    assert_eq!(node.ask(grant_request(2, &tokens(4), 1)).unwrap_err().kind, ErrorKind::Invalid);
    let again = node.ask(grant_request(0, &tokens(8), 13)).unwrap_err();
    assert_eq!((again.kind, again.message.as_str()), (ErrorKind::Invalid, "the request has grant 0 already"));
    node.after(MS, |core, now| core.on_drain(now));
    assert_eq!(node.ask(grant_request(3, &tokens(4), 4)).unwrap_err().kind, ErrorKind::Unavailable);
}

#[test]
fn sequences_join_and_leave_batch_at_every_step_in_fcfs_order() {
    let mut node = Node::new(DecodeConfig { max_running: 2, ..config(40) });
    for (n, max_tokens) in [(0, 3), (1, 5), (2, 4), (3, 2)] {
        node.admit(n, &tokens(5 + n as u32), max_tokens);
    }
    assert_eq!((node.core.load().running, node.core.load().waiting), (1, 3));
    let mut batches = Vec::new();
    while node.core.load().running > 0 {
        let plan = node.take_step();
        batches.push(plan.sequences.iter().map(|sequence| sequence.key.request.0).collect::<Vec<_>>());
        node.finish_step(&plan, 41);
    }
    assert_eq!(batches, [vec![0], vec![0, 1], vec![1, 2], vec![1, 2], vec![1, 2], vec![3]]);
    let emits = node.effects.iter().filter(|effect| matches!(effect, DecodeEffect::Emit { .. })).count();
    assert_eq!(emits, 10, "one per conductor and step");
    assert!(node.core.is_idle());
}

#[test]
fn stop_token_ends_the_output_and_is_its_last_token() {
    let mut node = Node::new(config(20));
    node.admit(0, &tokens(5), 20);
    let plan = node.take_step();
    node.finish_step(&plan, 49);
    let events = node.take_events();
    assert!(matches!(events[0].1, DecodeEvent::Token { token: 49, finish: Some(FinishReason::Stop), .. }));
    assert!(node.core.is_idle());
}

#[test]
fn context_length_ends_the_output_before_larger_max_tokens() {
    let mut node = Node::new(config(20));
    node.admit(0, &tokens(40), u32::MAX);
    let events = node.run();
    assert_eq!(events.len(), 19, "60 less 40 of the prompt and the first token");
    assert!(matches!(events[18].1, DecodeEvent::Token { index: 19, finish: Some(FinishReason::Length), .. }));
}

#[test]
fn grant_with_stalled_transfer_expires_and_its_blocks_wait_for_fence() {
    let mut node = Node::new(config(10));
    let prompt = tokens(8);
    let reply = node.ask(grant_request(0, &prompt, 4)).unwrap();
    node.after(50_000 * MS, |_, _| {});
    node.arrive(reply.grant, 0, 1);
    node.after(50_000 * MS, |core, now| core.on_wakeup(now));
    assert_eq!(node.core.load().waiting, 1, "bytes came: the time begins anew");
    node.hand_off(handoff(0, &prompt, 4, reply.grant, 2)).unwrap();
    node.after(60_001 * MS, |core, now| core.on_wakeup(now));
    let events = node.take_events();
    assert_eq!(failure(&events[0].1), (ErrorKind::Unavailable, "96 of 192 bytes came, and no more within 60s"));
    assert_eq!((node.core.load().waiting, node.core.load().blocks_used), (0, 2), "in quarantine");
    node.arrive(reply.grant, 1, 1);
    assert_eq!(node.fence(), 1);
    assert_eq!(node.core.load().blocks_used, 0);
    let late = node.hand_off(handoff(0, &prompt, 4, reply.grant, 2)).unwrap_err();
    assert_eq!((late.kind, late.message.as_str()), (ErrorKind::Unavailable, "grant 0 is not open"));
}

#[test]
fn grant_ended_by_transfer_engine_fails_its_sequence() {
    let mut node = Node::new(config(10));
    let prompt = tokens(8);
    let reply = node.ask(grant_request(0, &prompt, 4)).unwrap();
    node.hand_off(handoff(0, &prompt, 4, reply.grant, 2)).unwrap();
    node.after(MS, |core, now| core.on_grant_fenced(now, reply.grant));
    assert_eq!(failure(&node.take_events()[0].1).0, ErrorKind::Unavailable);
    assert!(node.core.is_idle() && node.effects.is_empty());
}

#[test]
fn blocks_of_a_finished_sequence_wait_for_the_fence_of_its_grant() {
    let mut node = Node::new(config(10));
    let prompt = tokens(4);
    let reply = node.ask(grant_request(0, &prompt, 2)).unwrap();
    node.hand_off(handoff(0, &prompt, 2, reply.grant, 1)).unwrap();
    node.arrive(reply.grant, 0, 1);
    node.run();
    assert_eq!((node.core.load().blocks_used, node.core.is_idle()), (2, false));
    assert_eq!(node.fence(), 1);
    assert_eq!((node.core.load().blocks_used, node.core.is_idle()), (0, true));
}

#[test]
fn handoff_that_does_not_match_its_grant_is_refused() {
    let mut node = Node::new(config(20));
    let prompt = tokens(8);
    type Spoil = fn(&mut Handoff);
    let cases: [(Spoil, &str); 6] = [
        (|h| h.tokens = tokens(7).into(), "tokens: 8 granted, 7 handed off"),
        (|h| h.expected_bytes = 5, "bytes: 192 granted, 5 handed off"),
        (|h| Arc::make_mut(&mut h.sampling).max_tokens = 5, "max_tokens: 4 granted, 5 handed off"),
        (|h| h.first_token = Some(50), "token 50 is not in the vocabulary of 50"),
        (|h| h.salt = Arc::from(*b"x"), "the prompt does not have the block hashes that the grant was asked with"),
        (|h| Arc::make_mut(&mut h.sampling).top_p = 0.0, "top_p is 0, but must be above 0 and at most 1"),
    ];
    for (n, (spoil, expected)) in (0..).zip(cases) {
        let reply = node.ask(grant_request(n, &prompt, 4)).unwrap();
        let mut handoff = handoff(n, &prompt, 4, reply.grant, 2);
        spoil(&mut handoff);
        let refused = node.hand_off(handoff).unwrap_err();
        assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Invalid, expected));
        node.fence();
        assert!(node.core.is_idle());
    }
    let reply = node.ask(grant_request(9, &prompt, 4)).unwrap();
    let other = node.hand_off(handoff(9, &prompt, 4, GrantId(77), 2)).unwrap_err();
    assert_eq!(other.message, format!("the handoff names grant 77, the request has {}", reply.grant.0));
    // Told twice: accepted twice, runs once. And after its end, too.
    for _ in 0..2 {
        node.hand_off(handoff(9, &prompt, 4, reply.grant, 2)).unwrap();
    }
    node.arrive(reply.grant, 0, 2);
    assert_eq!(node.run().len(), 3);
    node.hand_off(handoff(9, &prompt, 4, reply.grant, 2)).unwrap();
    assert_eq!((node.core.load().running, node.core.load().waiting), (0, 0));
}

#[test]
fn sequence_with_more_bytes_than_granted_fails() {
    let mut node = Node::new(config(20));
    let prompt = tokens(8);
    let reply = node.ask(grant_request(0, &prompt, 4)).unwrap();
    node.hand_off(handoff(0, &prompt, 4, reply.grant, 2)).unwrap();
    node.arrive(reply.grant, 0, 1);
    node.arrive(reply.grant, 1, 2);
    assert_eq!(failure(&node.take_events()[0].1), (ErrorKind::DataLoss, "288 bytes arrived under a grant of 192"));
    // While it runs and its grant is not fenced yet, the same.
    let reply = node.ask(grant_request(1, &prompt, 4)).unwrap();
    node.hand_off(handoff(1, &prompt, 4, reply.grant, 2)).unwrap();
    node.arrive(reply.grant, 2, 2);
    let plan = node.take_step();
    node.arrive(reply.grant, 3, 1);
    assert_eq!(failure(&node.take_events()[0].1).0, ErrorKind::DataLoss);
    node.finish_step(&plan, 41);
    node.fence();
    assert!(node.core.is_idle());
}

#[test]
fn decode_abort_sends_no_event_and_late_messages_are_refused() {
    let mut node = Node::new(config(20));
    let prompt = tokens(8);
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    assert_eq!(node.ask(grant_request(0, &prompt, 4)).unwrap_err().kind, ErrorKind::Cancelled);
    let reply = node.ask(grant_request(1, &prompt, 4)).unwrap();
    node.after(MS, |core, now| core.on_abort(now, key(1)));
    let refused = node.hand_off(handoff(1, &prompt, 4, reply.grant, 2)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Cancelled);
    assert_eq!(node.fence(), 1);
    node.admit(2, &prompt, 4);
    let plan = node.take_step();
    node.after(MS, |core, now| core.on_conductor_lost(now, ConductorId(0)));
    assert_eq!((node.core.load().running, node.core.load().blocks_used), (0, 3), "the engine still works on it");
    node.finish_step(&plan, 41);
    assert_eq!(node.effects, []);
    assert!(node.core.is_idle());
}

#[test]
fn grant_release_ends_its_sequence_in_any_state() {
    let mut node = Node::new(config(20));
    let reply = node.ask(grant_request(0, &tokens(8), 4)).unwrap();
    node.after(MS, |core, now| core.on_release_grant(now, key(0), GrantId(55)));
    assert_eq!(node.core.load().waiting, 1, "another grant");
    node.after(MS, |core, now| core.on_release_grant(now, key(0), reply.grant));
    assert_eq!(node.fence(), 1);
    let reply = node.admit(1, &tokens(8), 4);
    node.after(MS, |core, now| core.on_release_grant(now, key(1), reply.grant));
    assert_eq!(failure(&node.take_events()[0].1).0, ErrorKind::Unavailable);
    let plan = node.take_step();
    node.finish_step(&plan, 41);
    assert!(node.core.is_idle() && node.effects.is_empty());
}

#[test]
fn failed_decode_step_fails_all_its_sequences() {
    let mut node = Node::new(config(20));
    node.admit(0, &tokens(8), 4);
    let plan = node.take_step();
    let error = Refused { kind: ErrorKind::Internal, message: "no".into() };
    node.after(MS, |core, now| core.on_step_done(now, plan.id, Err(error)));
    assert_eq!(failure(&node.take_events()[0].1), (ErrorKind::Internal, "the engine failed: no"));
    assert!(node.core.is_idle());
}

#[test]
fn number_of_grants_is_bounded() {
    let mut node = Node::new(DecodeConfig { max_running: 1, max_waiting: 2, ..config(50) });
    for n in 0..3 {
        node.ask(grant_request(n, &tokens(4), 2)).unwrap();
    }
    let refused = node.ask(grant_request(3, &tokens(4), 2)).unwrap_err();
    assert_eq!(refused.message, "3 sequences are granted or running, as many as may");
}

pub(super) fn submitted(n: u64, prompt: &[TokenId], max_tokens: u32) -> PrefillJob {
    PrefillJob {
        key: key(n),
        conductor: ConductorId(n % 2),
        tokens: prompt.into(),
        output_tokens: 0,
        is_migration: false,
        sampling: Arc::new(SamplingParams { max_tokens, stop_token_ids: vec![49], ..SamplingParams::default() }),
        decode: None,
        partial_prefill_tokens: 0,
        fetch: None,
        salt: Arc::from([]),
        terms: QueueOrdering::default(),
    }
}

impl Node {
    pub fn take_prompt_event(&mut self, of: u64) -> PrefillEvent {
        self.take(|effect| match effect {
            DecodeEffect::EmitPrefill { key: whose, event, .. } if *whose == key(of) => Some(event.clone()),
            _ => None,
        })
    }

    /// As the engine does it: a token if one is due.
    pub fn finish(&mut self, plan: &StepPlan, token: TokenId) {
        let output = |sequence: &crate::StepSequence| StepOutput {
            key: sequence.key,
            sampled: sequence.is_last_chunk.then_some((token, None)),
            prompt_logprobs: Vec::new(),
            hidden: Vec::new(),
            failed: None,
            is_mask_late: false,
        };
        let outputs = plan.sequences.iter().map(output).collect();
        self.after(MS, |core, now| core.on_step_done(now, plan.id, Ok(outputs)));
    }
}

pub(super) fn ranges(plan: &StepPlan) -> Vec<(u128, std::ops::Range<usize>)> {
    plan.sequences.iter().map(|sequence| (sequence.key.request.0, sequence.range.clone())).collect()
}

#[test]
fn youngest_sequence_is_preempted_and_recomputed_before_newcomers() {
    let mut node = Node::new(DecodeConfig { growth_blocks: 0, prompt_budget: 6, ..config(5) });
    node.admit(0, &tokens(7), 10);
    node.admit(1, &[30, 31, 32, 33, 34, 35, 36], 6);
    assert_eq!((node.core.load().running, node.core.load().blocks_used), (1, 4));
    let alone = node.take_step();
    node.finish(&alone, 41);
    // Both need a third block for their ninth token; there is one.
    let mut plan = node.take_step();
    while node.core.load().preemptions == 0 {
        assert_eq!(plan.sequences.len(), 2);
        node.finish(&plan, 41);
        plan = node.take_step();
    }
    assert_eq!(ranges(&plan), [(0, 9..10)]);
    assert_eq!((node.core.load().running, node.core.load().waiting), (1, 1));
    // A newcomer waits behind it, though there would be room.
    node.after(MS, |core, now| core.on_grant_request(now, grant_request(2, &[45], 2)));
    let refused = node.take_refusal();
    assert_eq!(refused.kind, ErrorKind::Overloaded);
    assert_eq!(refused.message, "no room for 1 prompt and 2 output tokens: others wait for it, too");
    // When the first one is done, its tokens are computed again, six at a time, but for what is
    // still in the cache.
    while node.core.load().running == 1 && plan.sequences[0].key == key(0) {
        node.finish(&plan, 41);
        plan = node.take_step();
    }
    let again = ranges(&plan);
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].0, 1);
    assert!(again[0].1.start.is_multiple_of(4) && again[0].1.len() <= 6, "{again:?}");
    while node.core.load().running > 0 {
        node.finish(&plan, 41);
        if node.core.load().running > 0 {
            plan = node.take_step();
        }
    }
    let indices = |n: u64, node: &[(RequestKey, DecodeEvent)]| -> Vec<u32> {
        let index = |(whose, event): &(RequestKey, DecodeEvent)| match event {
            DecodeEvent::Token { index, .. } if *whose == key(n) => Some(*index),
            _ => None,
        };
        node.iter().filter_map(index).collect()
    };
    let events = node.take_events();
    assert_eq!(indices(0, &events), (1..10).collect::<Vec<_>>());
    assert_eq!(indices(1, &events), (1..6).collect::<Vec<_>>(), "none lost, none twice");
    assert!(node.core.is_idle());
}

#[test]
fn grant_is_refused_while_recent_step_time_exceeds_its_tbt() {
    let mut node = Node::new(DecodeConfig { grant_wait: Duration::from_secs(4), ..config(20) });
    node.admit(0, &tokens(8), 40);
    let ask = |n, tbt| GrantRequest { tbt, ..grant_request(n, &[20, 21, 22], 5) };
    let step = |node: &mut Node| {
        let plan = node.take_step();
        node.now += 48 * MS;
        node.finish_step(&plan, 41);
    };
    (0..15).for_each(|_| step(&mut node));
    assert!(node.ask(ask(1, Some(MS))).is_ok(), "too few to go by");
    step(&mut node);
    let refused = node.ask(ask(2, Some(48 * MS))).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Overloaded, "it does not wait in line: {refused}");
    assert_eq!(refused.message, "the steps take 49ms, the time between tokens is to be 48ms at most");
    assert!(node.ask(ask(3, Some(50 * MS))).is_ok() && node.ask(ask(4, None)).is_ok());
    // Once none runs, what the steps took is forgotten.
    let _ = node.run();
    assert!(node.ask(ask(5, Some(MS))).is_ok());
}

#[test]
fn grant_request_waits_for_room_and_is_refused_in_time() {
    let wait = Duration::from_secs(4);
    let mut node = Node::new(DecodeConfig { grant_wait: wait, ..config(6) });
    node.admit(0, &tokens(8), 13);
    node.after(MS, |core, now| core.on_grant_request(now, grant_request(1, &[20, 21, 22, 23, 24, 25, 26, 27], 5)));
    node.after(MS, |core, now| core.on_grant_request(now, grant_request(2, &[40, 41], 3)));
    assert!(
        !node
            .effects
            .iter()
            .any(|effect| matches!(effect, DecodeEffect::OpenGrant { .. } | DecodeEffect::RefuseGrant { .. }))
    );
    assert_eq!((node.core.load().waiting, node.core.is_idle()), (2, false));
    // Both have room when the first is done, in their order.
    let _ = node.run();
    let granted: Vec<_> = node
        .effects
        .iter()
        .filter_map(|effect| match effect {
            DecodeEffect::OpenGrant { key, reply, .. } => Some((*key, reply.cached_blocks)),
            _ => None,
        })
        .collect();
    assert_eq!(granted, [(key(1), 0), (key(2), 0)]);
    node.effects.clear();
    node.after(MS, |core, now| core.on_grant_request(now, grant_request(3, &[44; 20], 2)));
    let due = node.core.next_wakeup().unwrap();
    node.after(due - node.now, |core, now| core.on_wakeup(now));
    let refused = node.take_refusal();
    assert_eq!(refused.kind, ErrorKind::Overloaded);
    assert!(
        refused.message.starts_with("no room came free in time: no room for 20 prompt and 2 output tokens"),
        "{refused}"
    );
    // Its place is kept for a moment, and no request waits behind it once it is given up.
    node.after(MS, |core, now| core.on_grant_request(now, grant_request(9, &[45, 46], 3)));
    let is_granted = |node: &Node| {
        let granted =
            |effect: &DecodeEffect| matches!(effect, DecodeEffect::OpenGrant { key: whose, .. } if *whose == key(9));
        node.effects.iter().any(granted)
    };
    assert!(!is_granted(&node));
    node.after(MS, |core, now| core.on_release_grant(now, key(3), GrantId::NONE));
    assert!(is_granted(&node));
    node.after(MS, |core, now| core.on_abort(now, key(9)));
    for (cause, kind) in [(0, ErrorKind::Cancelled), (1, ErrorKind::Unavailable)] {
        node.after(MS, |core, now| core.on_grant_request(now, grant_request(4 + cause, &[44; 20], 2)));
        node.after(MS, |core, now| match cause {
            0 => core.on_abort(now, key(4)),
            _ => core.on_drain(now),
        });
        assert_eq!(node.take_refusal().kind, kind);
    }
}

impl Node {
    pub fn take_refusal(&mut self) -> Refused {
        self.take(|effect| match effect {
            DecodeEffect::RefuseGrant { refused, .. } => Some(refused.clone()),
            _ => None,
        })
    }
}

#[test]
fn prompt_at_decode_node_is_computed_in_chunks_in_mixed_batches() {
    let mut node = Node::new(DecodeConfig { prompt_budget: 6, ..config(40) });
    node.admit(0, &tokens(5), 20);
    let first = node.take_step();
    node.after(MS, |core, now| core.on_submit(now, submitted(1, &tokens(9), 3)));
    node.finish(&first, 41);
    let started = node.take_prompt_event(1);
    assert_eq!(
        started,
        PrefillEvent::Started { queue: MS, cached_tokens: 4 },
        "a block of the other prompt is the same"
    );
    let second = node.take_step();
    assert_eq!(ranges(&second), [(0, 6..7), (1, 4..9)]);
    assert_eq!((second.sequences[1].logits, second.sequences[1].is_last_chunk), (LogitsWanted::Last, true));
    node.finish(&second, 42);
    let PrefillEvent::FirstToken { token: 42, finish: None, compute, .. } = node.take_prompt_event(1) else { panic!() };
    assert_eq!(compute, MS);
    assert!(matches!(node.take_prompt_event(1), PrefillEvent::HandedOff(transfer) if transfer.bytes == 0));
    let third = node.take_step();
    assert_eq!(ranges(&third), [(0, 7..8), (1, 9..10)]);
    node.finish(&third, 43);
    let events = node.take_events();
    assert!(events.iter().any(|(whose, event)| *whose == key(1)
        && matches!(event, DecodeEvent::Token { index: 1, token: 43, queue: None, .. })));

    // Twice is once, too long is refused, and a failure before the first token is the prompt's.
    node.after(MS, |core, now| core.on_submit(now, submitted(1, &tokens(9), 3)));
    node.after(MS, |core, now| core.on_submit(now, submitted(2, &tokens(48), 300)));
    node.after(MS, |core, now| core.on_submit(now, submitted(3, &[77], 3)));
    let PrefillEvent::Failed(refused) = node.take_prompt_event(3) else { panic!() };
    assert_eq!(
        (refused.kind, refused.message.as_str()),
        (ErrorKind::Invalid, "token 77 is not in the vocabulary of 50")
    );
    let fourth = node.take_step();
    node.finish(&fourth, 41);
    let fifth = node.take_step();
    assert_eq!(ranges(&fifth)[1], (2, 8..14), "six of its tokens a step");
    let error = Refused { kind: ErrorKind::Internal, message: "no".into() };
    node.after(MS, |core, now| core.on_step_done(now, fifth.id, Err(error)));
    let _ = node.take_prompt_event(2);
    assert!(matches!(node.take_prompt_event(2), PrefillEvent::Failed(_)));
    assert!(node.core.is_idle());
}

#[test]
fn one_token_request_at_decode_node_ends_with_its_first_token() {
    let mut node = Node::new(config(10));
    node.after(MS, |core, now| core.on_submit(now, submitted(0, &tokens(6), 1)));
    let plan = node.take_step();
    node.finish(&plan, 41);
    node.effects.remove(0);
    let PrefillEvent::FirstToken { finish: Some(FinishReason::Length), .. } = node.take_prompt_event(0) else {
        panic!()
    };
    assert!(node.core.is_idle() && node.effects.is_empty());
}

#[test]
fn blocks_of_other_kv_class_are_neither_reused_nor_cached() {
    let mut node = Node::new(config(20));
    node.admit(0, &tokens(9), 2);
    let plan = node.take_step();
    node.finish(&plan, 41);
    assert_eq!(node.core.load().blocks_cached, 2);
    let ask = |n| GrantRequest { is_other_class: true, ..grant_request(n, &tokens(9), 9) };
    let reply = node.ask(ask(1)).unwrap();
    assert_eq!((reply.cached_blocks, reply.blocks.len()), (0, 3), "all of it has to come");
    node.hand_off(handoff(1, &tokens(9), 9, reply.grant, 3)).unwrap();
    node.arrive(reply.grant, 1, 3);
    assert_eq!(node.fence(), 1);
    for _ in 0..8 {
        let plan = node.take_step();
        node.finish(&plan, 41);
    }
    assert!(node.core.is_idle());
    assert_eq!(node.core.load().blocks_cached, 2, "nor is what was generated from it");
    assert_eq!(node.ask(grant_request(2, &tokens(9), 9)).unwrap().cached_blocks, 2, "its own are as they were");
}
