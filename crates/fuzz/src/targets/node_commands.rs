//! What conductors and other nodes tell a node, played against the cores of both roles and the
//! fence of terms.
//!
//! **Invariants**: a node's books of its blocks agree after each message, its queues are bounded,
//! and it is idle again, without a block in use, once who called is gone. A term that a conductor
//! names lasts as long as its session.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_proto::v1 as w;
use baton_scheduler::{
    DecodeConfig, DecodeCore, DecodeEffect, LeaseEffect, LogitsWanted, ModelConfig, PrefillConfig, PrefillCore,
    PrefillEffect, StepOutput, StepPlan, StepSequence, TermFence,
};
use baton_types as d;
use prost::Message;

use super::nodes::{id, info, key};
use super::proto::commands;
use crate::input::{join_steps, steps};

const HONEST: d::ConductorId = d::ConductorId(1);
const LIAR: d::ConductorId = d::ConductorId(3);
const TERM: u64 = 5;
/// Requests that wait at a node, and those that run at a decode node.
const MAX_WAITING: usize = 8;
const MAX_RUNNING: usize = 4;
const MAX_LEASES: usize = 4;
/// Longer than a node keeps anything that nothing comes of.
const OVER: Duration = Duration::from_secs(600);
/// Rounds of answers to what a core asks for.
const MAX_ROUNDS: usize = 64;

/// What a step is of: a command to the prefill node, one to the decode node, a call of another
/// node, or time.
const CHOICES: usize = 7;

/// What a core asks for, and has no answer yet.
enum Asked {
    Prefill(PrefillEffect),
    Decode(DecodeEffect),
}

struct World {
    now: Instant,
    prefill: PrefillCore,
    decode: DecodeCore,
    fence: TermFence,
    asked: VecDeque<Asked>,
    leases: Vec<d::GrantId>,
}

fn model() -> ModelConfig {
    let info = info("p0", d::NodeRole::Prefill);
    ModelConfig { layout: info.layout, context_length: info.context_length, vocab_size: info.vocab_size }
}

fn refused() -> d::Refused {
    d::Refused { kind: d::ErrorKind::Unavailable, message: "no".into() }
}

impl World {
    fn new(now: Instant) -> Self {
        let config = PrefillConfig::new(id("p0"), d::Generation(9), model()).with_chunk_tokens(64);
        let config = PrefillConfig { max_waiting: MAX_WAITING, max_leases: MAX_LEASES, ..config };
        let prefill = PrefillCore::new(config).expect("a config");
        let config = DecodeConfig {
            max_running: MAX_RUNNING,
            max_waiting: MAX_WAITING,
            max_leases: MAX_LEASES,
            ..DecodeConfig::new(model())
        };
        let decode = DecodeCore::new(config).expect("a config");
        let mut fence = TermFence::default();
        fence.on_named(HONEST, TERM);
        Self { now, prefill, decode, fence, asked: VecDeque::new(), leases: Vec::new() }
    }

    /// As `crates/worker/src/service.rs` and the roles of both nodes do.
    fn on_command(&mut self, command: w::node_command::Command, at_prefill: bool) -> Option<()> {
        use w::node_command::Command;
        let now = self.now;
        match command {
            Command::Hello(_) | Command::KvSnapshot(_) => {}
            Command::Settings(settings) => {
                settings.log.parse::<baton_runtime::telemetry::LogFilter>().ok()?;
            }
            Command::Leader(leader) => {
                self.fence.on_named(LIAR, leader.term);
                self.fence.on_denied(now, LIAR, leader.denied);
            }
            Command::Prefill(job) => {
                self.fence.admit(now, LIAR, job.term).ok()?;
                let job = job.into_domain(LIAR).ok()?;
                if at_prefill { self.prefill.on_submit(now, job) } else { self.decode.on_submit(now, job) }
            }
            Command::Abort(key) => {
                let key = key.try_into().ok()?;
                if at_prefill { self.prefill.on_abort(now, key) } else { self.decode.on_abort(now, key) }
            }
            Command::ForgetPrefix(forget) => {
                let hashes = baton_proto::hashes_from_bytes("block_hashes", &forget.block_hashes).ok()?;
                if at_prefill { self.prefill.forget_blocks(&hashes) } else { self.decode.forget_blocks(&hashes) }
            }
            Command::ClearCache(_) if at_prefill => self.prefill.clear_cache(),
            Command::ClearCache(_) => self.decode.clear_cache(),
            Command::NodeLost(lost) => {
                let lost = lost.into_domain().ok()?;
                if at_prefill { self.prefill.on_node_lost(now, &lost) } else { self.decode.on_node_lost(now, &lost) }
            }
            Command::Reselect(reselect) => self.prefill.on_reselect(reselect.try_into().ok()?),
            Command::Drain(drain) => match (at_prefill, drain.draining) {
                (true, true) => self.prefill.on_drain(now),
                (true, false) => self.prefill.on_undrain(now),
                (false, true) => self.decode.on_drain(now),
                (false, false) => self.decode.on_undrain(now),
            },
        }
        Some(())
    }

    /// What other nodes call.
    fn on_call(&mut self, of: usize, bytes: &[u8]) -> Option<()> {
        let now = self.now;
        match of {
            2 => {
                let request = w::GrantRequest::decode(bytes).ok()?.try_into().ok()?;
                self.decode.on_grant_request(now, request);
            }
            3 => {
                let request = d::LeaseRequest::try_from(w::LeaseRequest::decode(bytes).ok()?).ok()?;
                self.prefill.on_lease_request(now, request.clone());
                self.decode.on_lease_request(now, request);
            }
            4 => {
                let release = d::LeaseRelease::try_from(w::ReleaseLeaseRequest::decode(bytes).ok()?).ok()?;
                self.prefill.on_release_lease(now, release.clone());
                self.decode.on_release_lease(now, release);
            }
            _ => {
                let handoff = w::HandoffRequest::decode(bytes).ok()?.try_into().ok()?;
                self.decode.on_handoff(now, handoff);
            }
        }
        Some(())
    }

    fn check(&mut self) {
        while let Some(effect) = self.prefill.poll_effect() {
            self.asked.push_back(Asked::Prefill(effect));
        }
        while let Some(effect) = self.decode.poll_effect() {
            self.asked.push_back(Asked::Decode(effect));
        }
        self.prefill.check_integrity().expect("the prefill node's blocks");
        self.decode.check_integrity().expect("the decode node's blocks");
        let at_prefill = self.prefill.load(self.now).waiting as usize;
        let at_decode = self.decode.load().waiting as usize;
        assert!(at_prefill <= MAX_WAITING, "{at_prefill} requests wait for the prefill node");
        // Requests for room wait for themselves.
        assert!(at_decode <= MAX_RUNNING + 2 * MAX_WAITING, "{at_decode} requests wait for the decode node");
    }

    /// Time passes, and what was asked for is answered. Other nodes say no.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now;
        for _ in 0..MAX_ROUNDS {
            let Some(asked) = self.asked.pop_front() else { break };
            match asked {
                Asked::Prefill(effect) => self.answer_prefill(now, effect),
                Asked::Decode(effect) => self.answer_decode(now, effect),
            }
            self.check();
        }
        if self.prefill.next_wakeup().is_some_and(|due| due <= now) {
            self.prefill.on_wakeup(now);
        }
        if self.decode.next_wakeup().is_some_and(|due| due <= now) {
            self.decode.on_wakeup(now);
        }
        self.check();
    }

    fn answer_prefill(&mut self, now: Instant, effect: PrefillEffect) {
        let core = &mut self.prefill;
        match effect {
            PrefillEffect::RequestGrant { request, .. } => core.on_grant_reply(now, request.key, Err(refused())),
            PrefillEffect::RunStep(plan) => {
                let num_layers = model().layout.num_layers;
                (0..num_layers).for_each(|layer| core.on_kv_ready(now, plan.id, layer));
                core.on_step_done(now, plan.id, Ok(outputs(&plan)));
            }
            PrefillEffect::Fetch { lease, .. } => core.on_fetch_done(now, lease.key, Err(refused())),
            PrefillEffect::Push { key, push, .. } => core.on_push_done(now, key, push, Err(refused())),
            PrefillEffect::Handoff { handoff, .. } => core.on_handoff_reply(now, handoff.key, Err(refused())),
            PrefillEffect::Lease(lease) => self.on_lease(lease),
            PrefillEffect::Tier(_)
            | PrefillEffect::CancelFetch { .. }
            | PrefillEffect::CancelPushes { .. }
            | PrefillEffect::ReleaseGrant { .. }
            | PrefillEffect::Emit { .. } => {}
        }
    }

    fn answer_decode(&mut self, now: Instant, effect: DecodeEffect) {
        let core = &mut self.decode;
        match effect {
            DecodeEffect::RevokeGrant { grant } => core.on_grant_fenced(now, grant),
            DecodeEffect::RunStep(plan) => core.on_step_done(now, plan.id, Ok(outputs(&plan))),
            DecodeEffect::Fetch { key, .. } => core.on_fetch_done(now, key, Err(refused())),
            DecodeEffect::Lease(lease) => self.on_lease(lease),
            DecodeEffect::OpenGrant { .. }
            | DecodeEffect::RefuseGrant { .. }
            | DecodeEffect::HandoffReply { .. }
            | DecodeEffect::Tier(_)
            | DecodeEffect::Emit { .. }
            | DecodeEffect::RequestMigration { .. }
            | DecodeEffect::AnswerMigration { .. }
            | DecodeEffect::CancelFetch { .. }
            | DecodeEffect::EmitPrefill { .. } => {}
        }
    }

    fn on_lease(&mut self, effect: LeaseEffect) {
        match effect {
            LeaseEffect::Open { reply, .. } => self.leases.push(reply.lease),
            LeaseEffect::End { lease } => self.leases.retain(|open| *open != lease),
            LeaseEffect::Refuse { .. } => {}
        }
        assert!(self.leases.len() <= 2 * MAX_LEASES, "{} leases", self.leases.len());
    }

    /// Ends the liar's session, and demands that nothing of it is left at either node.
    fn finish(&mut self) {
        self.fence.on_gone(LIAR);
        assert_eq!(self.fence.admit(self.now, HONEST, TERM), Ok(()), "a liar's term ends with its session");
        self.prefill.on_conductor_lost(self.now, LIAR);
        self.decode.on_conductor_lost(self.now, LIAR);
        // A handoff names any conductor.
        self.check();
        for _ in 0..100 {
            if self.asked.is_empty() && self.prefill.is_idle() && self.decode.is_idle() {
                break;
            }
            self.pass(OVER / 20);
        }
        assert!(self.prefill.is_idle(), "{:?}", self.prefill.load(self.now));
        assert!(self.decode.is_idle(), "{:?}", self.decode.load());
        let used = [self.prefill.load(self.now).blocks_used, self.decode.load().blocks_used];
        assert_eq!(used, [0, 0], "blocks in use");
    }
}

/// What an engine gives for a step, with the same token each time.
fn outputs(plan: &StepPlan) -> Vec<StepOutput> {
    let output = |sequence: &StepSequence| StepOutput {
        key: sequence.key,
        sampled: sequence.is_last_chunk.then_some((7, None)),
        prompt_logprobs: match sequence.logits {
            LogitsWanted::All => vec![Default::default(); sequence.range.len()],
            _ => Vec::new(),
        },
        hidden: Vec::new(),
        failed: None,
        is_mask_late: false,
    };
    let slice = plan.slice.iter().map(|slice| {
        let is_last = slice.layers.end == model().layout.num_layers;
        let hidden = if is_last { Vec::new() } else { vec![0.0; slice.sequence.range.len()] };
        let whole = output(&slice.sequence);
        StepOutput { sampled: whole.sampled.filter(|_| is_last), hidden, ..whole }
    });
    plan.sequences.iter().map(output).chain(slice).collect()
}

/// Plays the steps of an input. The first byte of each says what it is.
pub(super) fn play(input: &[u8]) {
    let mut world = World::new(baton_runtime::now());
    for (of, bytes) in steps(input, CHOICES) {
        match of {
            0 | 1 => {
                let command = w::NodeCommand::decode(bytes).ok().and_then(|message| message.command);
                let Some(command) = command else { continue };
                // What is not understood is logged.
                let _ = world.on_command(command, of == 0);
            }
            2..=5 => drop(world.on_call(of, bytes)),
            _ => world.pass(Duration::from_millis(100) * bytes.first().copied().unwrap_or(1).into()),
        }
        world.check();
    }
    world.finish();
}

fn command(at: u8, command: w::node_command::Command) -> (u8, Vec<u8>) {
    (at, w::NodeCommand { command: Some(command) }.encode_to_vec())
}

fn job(n: u128, max_tokens: u32) -> w::PrefillJob {
    let sampling = w::NodeSampling { top_p: 1.0, repetition_penalty: 1.0, max_tokens, ..Default::default() };
    let queue = w::QueueOrdering { overtake_window_s: 1.0, max_overtaken_s: 2.0, timeout_s: 3.0, compute_s: 0.5 };
    w::PrefillJob {
        key: Some(key(n).into()),
        tokens: (0..40).collect(),
        sampling: Some(sampling),
        queue: Some(queue),
        ..Default::default()
    }
}

/// Requests from their job to their end, and more than may wait.
fn jobs(at: u8) -> Vec<(u8, Vec<u8>)> {
    use w::node_command::Command;
    let target = w::DecodeTarget {
        node: "d0".into(),
        generation: d::Generation(9).to_string(),
        address: "http://127.0.0.1:1".into(),
        tbt_s: None,
    };
    // A prefill node answers with one token, or hands off.
    let handed = |n| w::PrefillJob { decode: (at == 0).then(|| target.clone()), ..job(n, 8) };
    let answered = |n| job(n, if at == 0 { 1 } else { 8 });
    let many = (10..30).map(|n| command(at, Command::Prefill(answered(n))));
    let reselect = w::ReselectCommand { key: Some(key(1).into()), decode: Some(target.clone()) };
    let one = [
        command(at, Command::Prefill(answered(0))),
        (6, vec![1]),
        command(at, Command::Prefill(handed(1))),
        command(at, Command::Reselect(reselect)),
        (6, vec![1]),
    ];
    let end = [command(at, Command::Abort(key(12).into())), (6, vec![5]), (6, vec![255])];
    one.into_iter().chain(many).chain(end).collect()
}

fn calls() -> Vec<(u8, Vec<u8>)> {
    let generation = d::Generation(9).to_string();
    let grant = |n, partial_prefill_tokens| w::GrantRequest {
        key: Some(key(n).into()),
        prefill_node: "p0".into(),
        prefill_generation: generation.clone(),
        prompt_tokens: 40,
        block_hashes: vec![n as u8; 160],
        max_tokens: 8,
        partial_prefill_tokens,
        ..Default::default()
    };
    let handoff = |n, grant| w::HandoffRequest {
        key: Some(key(n).into()),
        conductor_id: LIAR.to_string(),
        grant,
        tokens: (0..41).collect(),
        sampling: job(n, 8).sampling,
        expected_bytes: u64::MAX >> 8,
        ..Default::default()
    };
    let lease = w::LeaseRequest {
        key: Some(key(9).into()),
        reader_node: "p1".into(),
        reader_generation: generation.clone(),
        block_hashes: vec![1; 160],
        ..Default::default()
    };
    let release = w::ReleaseLeaseRequest {
        lease: 1,
        reader_node: "p1".into(),
        reader_generation: generation.clone(),
        target_generation: generation.clone(),
    };
    let grants = (1..12).map(|n| (2, grant(n, if n == 3 { 8 } else { 0 }).encode_to_vec()));
    let rest = [
        (5, handoff(1, 1).encode_to_vec()),
        (5, handoff(2, 9).encode_to_vec()),
        (3, lease.encode_to_vec()),
        (6, vec![1]),
        (4, release.encode_to_vec()),
        (6, vec![255]),
    ];
    grants.chain(rest).collect()
}

fn orders() -> Vec<(u8, Vec<u8>)> {
    use w::node_command::Command;
    let leader = |term| command(0, Command::Leader(w::KnownLeader { term, denied: TERM }));
    let drain = |draining| command(1, Command::Drain(w::DrainCommand { draining }));
    let later = command(0, Command::Prefill(w::PrefillJob { term: u64::MAX, ..job(50, 1) }));
    vec![leader(u64::MAX), later, leader(6), drain(true), (6, vec![1]), drain(false), leader(0)]
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let told = |at| commands().into_iter().map(move |of| command(at, of)).collect::<Vec<_>>();
    let mixed = [&jobs(1)[..10], &calls()[..8], &jobs(0)[..12], &orders(), &calls()[8..]].concat();
    [told(0), told(1), jobs(0), jobs(1), calls(), orders(), mixed].iter().map(|steps| join_steps(steps)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_command_seeds_are_read_step_by_step() {
        for (of, bytes) in seeds().iter().flat_map(|seed| steps(seed, CHOICES)) {
            let is_read = match of {
                0 | 1 => w::NodeCommand::decode(bytes).is_ok_and(|message| message.command.is_some()),
                2 => w::GrantRequest::decode(bytes).is_ok_and(|of| d::GrantRequest::try_from(of).is_ok()),
                3 => w::LeaseRequest::decode(bytes).is_ok_and(|of| d::LeaseRequest::try_from(of).is_ok()),
                4 => w::ReleaseLeaseRequest::decode(bytes).is_ok_and(|of| d::LeaseRelease::try_from(of).is_ok()),
                5 => w::HandoffRequest::decode(bytes).is_ok_and(|of| d::Handoff::try_from(of).is_ok()),
                _ => bytes.len() == 1,
            };
            assert!(is_read, "{of}: {bytes:?}");
        }
    }

    /// What the target watches is reached: requests wait, and blocks are in use.
    #[test]
    fn node_command_seeds_fill_both_nodes() {
        let mut world = World::new(baton_runtime::now());
        let mut most = [0; 4];
        for (of, bytes) in jobs(0).iter().chain(&jobs(1)).chain(&calls()).map(|(of, bytes)| (usize::from(*of), bytes)) {
            match of {
                0 | 1 => {
                    let command = w::NodeCommand::decode(&bytes[..]).unwrap().command.unwrap();
                    world.on_command(command, of == 0).unwrap();
                }
                2..=5 => world.on_call(of, bytes).unwrap(),
                _ => world.pass(Duration::from_millis(10)),
            }
            world.check();
            let prefill = world.prefill.load(world.now);
            let decode = world.decode.load();
            let now =
                [prefill.waiting, prefill.blocks_used, decode.waiting, decode.blocks_used + decode.blocks_reserved];
            most = std::array::from_fn(|at| most[at].max(now[at]));
        }
        assert!(most.iter().all(|most| *most > 0), "{most:?}");
        world.finish();
    }
}
