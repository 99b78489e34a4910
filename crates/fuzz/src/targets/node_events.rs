//! What nodes tell a conductor on their sessions, played against its picture of the cluster and
//! the requests of clients.
//!
//! Nodes `x0` and `y0` lie. A request is at both, and another one at honest nodes.
//!
//! **Invariants**: each request ends once, and its tokens come in order, no more than were asked
//! for. The one at honest nodes gets their tokens. Liars narrow no limit of others, what is kept of
//! them is bounded, and nothing stays charged.

use std::time::{Duration, Instant};

use baton_proto::{Step, v1 as w};
use baton_scheduler::{
    Cluster, Departure, NodeState, RequestCore, RequestEffect, RequestError, RequestEvent, RequestJob, RequestLimits,
};
use baton_types as d;
use prost::Message;

use super::nodes::{INDEX_ENTRIES, NODES, cluster, id, info, key, request};
use super::proto::{events, node_info};
use crate::input::{join_steps, steps};

const LIARS: [(&str, d::NodeRole); 2] = [("x0", d::NodeRole::Prefill), ("y0", d::NodeRole::Decode)];
const AT_LIARS: u128 = 1;
const AT_HONEST: u128 = 2;
const PROMPT: usize = 40;
const OUTPUT: u32 = 8;
/// What honest nodes draw.
const FIRST_TOKEN: u32 = 100;

const LENGTH: Result<d::FinishReason, RequestError> = Ok(d::FinishReason::Length);

/// What a step is of: the prefill liar, the decode liar, a node that joins, time.
const CHOICES: usize = 4;

/// A client's request, as `conductor/src/relay.rs` carries it.
struct Client {
    core: RequestCore,
    tokens: Vec<u32>,
    ended: Vec<Result<d::FinishReason, RequestError>>,
}

impl Client {
    fn new(now: Instant, n: u128) -> Self {
        let job = RequestJob {
            request: d::RequestId(n),
            conductor: d::ConductorId(1),
            tokens: vec![1; PROMPT].into(),
            sampling: d::SamplingParams { max_tokens: OUTPUT, ..Default::default() }.into(),
            block_hashes: [].into(),
            slo: d::Slo::default(),
            timeout: Duration::from_secs(3600),
            priority: 0,
            first_completion_nodes: Vec::new(),
        };
        let core = RequestCore::new(now, now, job, RequestLimits::default());
        Self { core, tokens: Vec::new(), ended: Vec::new() }
    }

    /// Carries out what the core wants. Nodes of `left_out` are not taken.
    fn carry_out(&mut self, now: Instant, cluster: &mut Cluster, left_out: &[d::NodeId]) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                RequestEffect::Place { key, exclude, waited } => {
                    let exclude: Vec<_> = exclude.into_iter().chain(left_out.iter().cloned()).collect();
                    let placed = {
                        let wanted = self.core.placement_request(key, &exclude, waited);
                        cluster.place(now, &wanted, &mut || 0)
                    };
                    self.core.on_placed(now, key, placed.map(|placement| cluster.assign(placement, None)));
                }
                RequestEffect::AskReselect { key, from, refused } => {
                    let other = cluster.reselect(now, key);
                    let to = cluster.decode_target(other.as_ref().unwrap_or(&from));
                    self.core.on_reselected(now, key, &from, refused, to);
                }
                RequestEffect::PlaceMigration(question) => {
                    let chosen = cluster.place_migration(now, &question);
                    let to = chosen.and_then(|chosen| cluster.assign_migration(&chosen));
                    self.core.on_migration_placed(question.migrated, to);
                }
                RequestEffect::UpdateLedger { key, entry } => cluster.update_ledger(now, key, &entry),
                RequestEffect::Deliver { index, tokens, .. } => {
                    assert_eq!(index as usize, self.tokens.len(), "tokens come in order");
                    self.tokens.extend(tokens.iter().map(|token| token.token));
                }
                RequestEffect::End(outcome) => self.ended.push(outcome),
                RequestEffect::Submit { .. }
                | RequestEffect::Reselect { .. }
                | RequestEffect::Abort { .. }
                | RequestEffect::PromptLogprobs(_)
                | RequestEffect::Note(_) => {}
            }
        }
        assert!(self.tokens.len() <= OUTPUT as usize && self.ended.len() <= 1, "{:?} {:?}", self.tokens, self.ended);
    }

    fn on_event(&mut self, now: Instant, from: &d::NodeId, key: d::RequestKey, event: RequestEvent) {
        if key.request == self.core.job().request && self.core.is_at(key.attempt, from) {
            self.core.on_event(now, key.attempt, event);
        }
    }
}

struct World {
    now: Instant,
    cluster: Cluster,
    clients: [Client; 2],
}

impl World {
    fn new(now: Instant) -> Self {
        let mut cluster = cluster(now);
        let names = |nodes: &[(&str, d::NodeRole)]| nodes.iter().map(|(name, _)| id(name)).collect::<Vec<_>>();
        let mut at_honest = Client::new(now, AT_HONEST);
        at_honest.carry_out(now, &mut cluster, &[]);
        for (name, role) in LIARS {
            cluster.on_node_joined(now, info(name, role));
        }
        let mut at_liars = Client::new(now, AT_LIARS);
        at_liars.carry_out(now, &mut cluster, &names(&NODES));
        let is_at_liars = LIARS.iter().all(|(name, _)| at_liars.core.is_at(d::Attempt(0), &id(name)));
        assert!(is_at_liars, "{:?}", at_liars.core.placement());
        Self { now, cluster, clients: [at_liars, at_honest] }
    }

    /// As `conductor/src/membership.rs` does.
    fn on_event(&mut self, info: &d::NodeInfo, event: w::node_event::Event) -> Result<(), baton_proto::InvalidMessage> {
        use w::node_event::Event;
        let now = self.now;
        let node = &info.node;
        match event {
            Event::Welcome(_) | Event::LeaderTerm(_) => {}
            Event::Load(load) => self.cluster.on_load(now, node, load.try_into()?),
            Event::Prefill(event) => {
                let (key, event) = event.into_domain()?;
                self.tell(node, key, RequestEvent::Prefill(event));
            }
            Event::Decode(events) => {
                for event in events.events {
                    let Ok((key, event)) = event.into_domain() else { continue };
                    self.tell(node, key, RequestEvent::Decode(event));
                }
            }
            Event::MigrationRequest(offer) => {
                let key = baton_proto::key(offer.key)?;
                self.tell(node, key, RequestEvent::MigrationRequested(offer.output_tokens));
            }
            Event::Kv(events) => {
                let changes = events.events.into_iter().map(TryInto::try_into).collect::<Result<Vec<_>, _>>()?;
                let index = self.cluster.index();
                if events.goes_on {
                    index.more_of_snapshot(node, info.generation, events.sequence, &changes);
                } else {
                    index.on_events(node, info.generation, events.sequence, events.snapshot, &changes);
                }
            }
            Event::Transfer(report) => {
                let report = d::TransferReport::try_from(report)?;
                assert!(report.paths.len() <= d::TransferReport::MAX_PATHS);
            }
            Event::Step(step) => {
                let of = Step::of(step.rows, step.attended_tokens, step.seconds)?;
                self.cluster.on_step(now, node, of.rows, of.attended_tokens, of.seconds);
                if let Some(slice) = step.slice {
                    let slice = Step::of(slice.rows, slice.attended_tokens, slice.seconds)?;
                    self.cluster.on_slice(node, slice.rows, slice.attended_tokens, slice.seconds);
                }
            }
        }
        Ok(())
    }

    fn tell(&mut self, from: &d::NodeId, key: d::RequestKey, event: RequestEvent) {
        for client in &mut self.clients {
            client.on_event(self.now, from, key, event.clone());
            client.carry_out(self.now, &mut self.cluster, &[]);
        }
    }

    /// As `conductor/src/membership.rs` does. A start under the name of an honest node takes its
    /// place, which is known.
    fn on_joined(&mut self, joined: d::NodeInfo) {
        let honest = info(NODES[0].0, NODES[0].1);
        let is_known = NODES.iter().chain(&LIARS).any(|(name, _)| joined.node == id(name));
        let fits = honest.layout.check_compatible(&joined.layout).is_ok() && joined.context_length >= 32;
        if !is_known && fits {
            let limits = d::NodeInfo {
                context_length: joined.context_length.min(honest.context_length),
                vocab_size: honest.vocab_size,
                ..joined
            };
            self.cluster.on_node_joined(self.now, limits);
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for (name, _) in NODES {
            self.cluster.on_load(self.now, &id(name), d::Load::default());
        }
        self.cluster.on_tick(self.now);
        for client in &mut self.clients {
            if client.core.next_wakeup().is_some_and(|due| due <= self.now) {
                client.core.on_wakeup(self.now);
            }
            client.carry_out(self.now, &mut self.cluster, &[]);
        }
    }

    fn check(&self) {
        for (name, _) in NODES {
            let node = self.cluster.node(&id(name)).expect("it is here");
            assert_eq!(node.state(), NodeState::Ready, "{name}");
        }
        let limits = self.cluster.sequence_limits(self.now).expect("nodes are ready");
        assert!(limits.prompt >= 255 && limits.sequence >= 256 && limits.vocab_size == 512, "{limits:?}");
        for node in self.cluster.nodes() {
            assert!(self.cluster.index().entries(&node.info().node) <= INDEX_ENTRIES);
        }
    }

    /// The liars are gone, and what is left is served by honest nodes.
    fn finish(&mut self) {
        let others: Vec<_> = self.cluster.nodes().map(|node| node.info().clone()).collect();
        for gone in others.iter().filter(|of| !NODES.iter().any(|(name, _)| of.node == id(name))) {
            self.cluster.on_node_left(self.now, &gone.node, gone.generation);
            for client in &mut self.clients {
                client.core.on_node_away(self.now, self.now, &gone.start(), Departure::Died);
                client.carry_out(self.now, &mut self.cluster, &[]);
            }
        }
        // Or a node said that it has failed: then it is placed again after a while.
        for _ in 0..100 {
            if self.clients.iter().all(|client| !client.ended.is_empty()) {
                break;
            }
            self.answer_honestly();
            self.pass(Duration::from_millis(500));
        }
        let [at_liars, at_honest] = &self.clients;
        assert_eq!(at_liars.ended.len(), 1, "it ends, whatever its nodes said");
        let expected: Vec<_> = (FIRST_TOKEN..FIRST_TOKEN + OUTPUT).collect();
        assert_eq!((&at_honest.tokens, &at_honest.ended[..]), (&expected, &[LENGTH][..]), "no liar had it");
        assert_eq!(self.cluster.placed(), 0, "nothing stays charged");
        self.cluster.place(self.now, &request(9), &mut || 0).expect("there is room for others");
    }

    /// The nodes of each request do all that it asks of them.
    fn answer_honestly(&mut self) {
        for of in 0..self.clients.len() {
            let core = &self.clients[of].core;
            let attempt = core.attempt();
            let first = core.first_index();
            let Some(placement) = core.placement().cloned() else { continue };
            let key = d::RequestKey { request: core.job().request, attempt };
            let finish = |index| (index + 1 == OUTPUT).then_some(d::FinishReason::Length);
            let told = d::PrefillEvent::FirstToken {
                token: FIRST_TOKEN + first,
                logprobs: None,
                prompt_logprobs: Vec::new(),
                finish: finish(first),
                compute: Duration::ZERO,
            };
            let handed_off = d::PrefillEvent::HandedOff(d::KvTransfer::default());
            for event in [d::PrefillEvent::Started { queue: Duration::ZERO, cached_tokens: 0 }, told, handed_off] {
                self.tell(&placement.prefill, key, RequestEvent::Prefill(event));
            }
            let Some(decode) = placement.decode else { continue };
            for index in first + 1..OUTPUT {
                let token = d::DecodeEvent::Token {
                    index,
                    token: FIRST_TOKEN + index,
                    logprobs: None,
                    finish: finish(index),
                    queue: None,
                };
                self.tell(&decode, key, RequestEvent::Decode(token));
            }
        }
    }
}

/// Plays the steps of an input. The first byte of each says of whom it is.
pub(super) fn play(input: &[u8]) {
    let mut world = World::new(baton_runtime::now());
    for (of, bytes) in steps(input, CHOICES) {
        match of {
            0 | 1 => {
                let (name, role) = LIARS[of];
                let Some(event) = w::NodeEvent::decode(bytes).ok().and_then(|message| message.event) else { continue };
                // What is not understood is logged.
                let _ = world.on_event(&info(name, role), event);
            }
            2 => {
                let request = w::RegisterRequest::decode(bytes).ok().and_then(|request| request.node);
                let Some(Ok(joined)) = request.map(d::NodeInfo::try_from) else { continue };
                world.on_joined(joined);
            }
            _ => world.pass(Duration::from_millis(200) * bytes.first().copied().unwrap_or(1).into()),
        }
        world.check();
    }
    world.finish();
}

fn told(liar: u8, event: w::node_event::Event) -> (u8, Vec<u8>) {
    (liar, w::NodeEvent { event: Some(event) }.encode_to_vec())
}

fn wire_key(n: u128) -> Option<w::RequestKey> {
    Some(key(n).into())
}

fn prefill(n: u128, event: w::prefill_event::Event) -> (u8, Vec<u8>) {
    told(0, w::node_event::Event::Prefill(w::PrefillEvent { key: wire_key(n), event: Some(event) }))
}

fn tokens(n: u128, tokens: impl IntoIterator<Item = (u32, &'static str)>) -> (u8, Vec<u8>) {
    let event = |(index, finish_reason): (u32, &str)| {
        let token = w::DecodedToken { index, token: 7, finish_reason: finish_reason.into(), ..Default::default() };
        w::DecodeEvent { key: wire_key(n), event: Some(w::decode_event::Event::Token(token)) }
    };
    let events = tokens.into_iter().map(event).collect();
    told(1, w::node_event::Event::Decode(w::DecodeEvents { events }))
}

/// What nodes say of a request from its beginning to its end.
fn a_life(n: u128) -> Vec<(u8, Vec<u8>)> {
    use w::prefill_event::Event;
    vec![
        prefill(n, Event::Started(w::PrefillStarted { queue_s: 0.1, cached_tokens: 1 << 28 })),
        prefill(n, Event::FirstToken(w::FirstToken { token: 7, compute_s: 0.1, ..Default::default() })),
        prefill(n, Event::HandedOff(w::KvTransfer { bytes: 9, transport: "tcp".into(), ..Default::default() })),
        tokens(n, [(1, ""), (3, ""), (2, ""), (2, "")]),
        told(1, w::node_event::Event::MigrationRequest(w::MigrationRequest { key: wire_key(n), output_tokens: 4 })),
        tokens(n, [(4, ""), (5, ""), (6, ""), (7, "length")]),
    ]
}

fn failures() -> Vec<(u8, Vec<u8>)> {
    let failure = || w::Failure { kind: "unavailable".into(), message: "gone".into() };
    let failed = w::DecodeEvent { key: wire_key(AT_LIARS), event: Some(w::decode_event::Event::Failed(failure())) };
    vec![
        prefill(AT_LIARS, w::prefill_event::Event::Failed(failure())),
        prefill(AT_HONEST, w::prefill_event::Event::Failed(failure())),
        told(1, w::node_event::Event::Decode(w::DecodeEvents { events: vec![failed] })),
        (3, vec![10]),
        tokens(AT_LIARS, (0..200).map(|index| (index, ""))),
        tokens(AT_HONEST, (0..8).map(|index| (index, "stop"))),
    ]
}

/// Claims of what a node is and has.
fn claims() -> Vec<(u8, Vec<u8>)> {
    let load = w::Load {
        running: 1 << 28,
        waiting: 1 << 28,
        queued_tokens: 1 << 28,
        blocks_total: 1,
        draining: true,
        ..Default::default()
    };
    let step = w::StepReport { rows: 1, attended_tokens: 1 << 56, seconds: 1e6, ..Default::default() };
    let joined = |name: &str, role: &str| {
        let mut node = w::NodeInfo::from(&info("x0", d::NodeRole::Prefill));
        node.name = name.into();
        node.role = role.into();
        node.context_length = 33;
        (2, w::RegisterRequest { node: Some(node), ..Default::default() }.encode_to_vec())
    };
    let stored = |n: u8| w::KvEvent {
        event: Some(w::kv_event::Event::Stored(w::KvStored { hash: vec![n; 16], parent: vec![] })),
    };
    let kv = w::KvEvents { events: (0..100).map(stored).collect(), snapshot: true, ..Default::default() };
    vec![
        joined("z0", "decode"),
        joined("z1", "prefill"),
        joined("p0", "prefill"),
        told(0, w::node_event::Event::Load(load)),
        told(0, w::node_event::Event::Step(step)),
        told(0, w::node_event::Event::Kv(kv)),
        (3, vec![5]),
    ]
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let all: Vec<_> = events().into_iter().map(|event| told(0, event)).collect();
    let registered = w::RegisterRequest { node: Some(node_info()), ..Default::default() };
    let all: Vec<_> = all.into_iter().chain([(2, registered.encode_to_vec()), (3, vec![1])]).collect();
    let mixed = [&claims()[..], &a_life(AT_HONEST), &a_life(AT_LIARS)[..4], &failures()].concat();
    [all, a_life(AT_LIARS), a_life(AT_HONEST), failures(), claims(), mixed].iter().map(|s| join_steps(s)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_event_seeds_are_read_step_by_step() {
        for (of, bytes) in seeds().iter().flat_map(|seed| steps(seed, CHOICES)) {
            let is_read = match of {
                0 | 1 => w::NodeEvent::decode(bytes).is_ok_and(|message| message.event.is_some()),
                2 => w::RegisterRequest::decode(bytes).is_ok_and(|request| request.node.is_some()),
                _ => bytes.len() == 1,
            };
            assert!(is_read, "{of}: {bytes:?}");
        }
    }

    #[test]
    fn node_events_seeds_reach_the_end_of_a_request() {
        let mut world = World::new(baton_runtime::now());
        for (of, bytes) in a_life(AT_LIARS) {
            let (name, role) = LIARS[usize::from(of)];
            let event = w::NodeEvent::decode(&bytes[..]).unwrap().event.unwrap();
            world.on_event(&info(name, role), event).unwrap();
        }
        assert_eq!((world.clients[0].tokens.len(), &world.clients[0].ended[..]), (8, &[LENGTH][..]));
    }

    #[test]
    #[should_panic(expected = "no liar had it")]
    fn node_events_target_sees_tokens_of_a_liar() {
        let mut world = World::new(baton_runtime::now());
        let prefill = world.clients[1].core.placement().unwrap().prefill.clone();
        let (_, bytes) = a_life(AT_HONEST).remove(1);
        let Some(w::node_event::Event::Prefill(event)) = w::NodeEvent::decode(&bytes[..]).unwrap().event else {
            panic!()
        };
        let (key, event) = event.into_domain().unwrap();
        world.tell(&prefill, key, RequestEvent::Prefill(event));
        world.finish();
    }
}
