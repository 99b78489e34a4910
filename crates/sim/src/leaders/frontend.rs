//! A frontend: production's cores of the election, of the desk, of the cluster's ledger and of
//! requests. What is here is their shell: it carries messages, and it keeps time by a clock of its
//! own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_scheduler::{
    Answer, Candidate, Cluster, ClusterConfig, DecisionReasons, Departure, Desk, DeskEffect, Following, Leadership,
    LedgerEntry, LinkId, Policies, PromptsAtDecode, RequestCore, RequestEffect, RequestJob, RequestKey, RequestLimits,
};
use baton_types::{
    ConductorId, FromLeader, Generation, NodeId, NodeStart, Question, Refused, RequestId, SamplingParams, Slo, ToLeader,
};

use super::election::{Election, Timer};
use super::net::Net;
use super::wire::{Command, Event, FrontendStart, Input, NodeMessage, Place};
use crate::Random;

/// As the conductor's.
const SETTLE: Duration = Duration::from_millis(250);
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);

/// A question that is open, and what its request has to tell again with the answer.
#[derive(Debug)]
enum OpenQuestion {
    Nodes,
    Other { from: NodeId, refused: Refused },
    Migrate,
}

#[derive(Debug)]
struct Live {
    core: RequestCore,
    timer: Option<Instant>,
    asked: Option<(RequestKey, OpenQuestion)>,
}

/// A conductor that follows this one.
#[derive(Debug)]
struct Stream {
    following: Following,
    /// What came before this one has settled.
    held: Option<Vec<ToLeader>>,
}

/// The way to the leader.
#[derive(Debug)]
struct Follow {
    turn: u64,
    wait: Duration,
    conn: Option<u64>,
    link: Option<LinkId>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct SimFrontend {
    pub at: FrontendStart,
    pub id: ConductorId,
    timer: Timer,
    began: Instant,
    election: Election,
    pub desk: Desk<()>,
    pub cluster: Cluster,
    ties: Random,
    live: BTreeMap<u128, Live>,
    names: Arc<[NodeId]>,
    sessions: Vec<Option<(u64, Generation)>>,
    obeyed: Leadership,
    follow: Follow,
    streams: BTreeMap<u64, Stream>,
    requests: u128,
}

impl SimFrontend {
    pub(super) fn new(net: &mut Net, at: FrontendStart, names: Arc<[NodeId]>) -> Self {
        let wire = &mut net.wire;
        let id = ConductorId(wire.chance.next_u64());
        // Clocks are a tenth fast or slow.
        let timer = Timer { at, rate: 0.9 + 0.2 * wire.chance.unit() };
        let candidate = Candidate { id, address: at.front.to_string() };
        let election = Election::new(wire, candidate, timer);
        let config = ClusterConfig {
            prompts_at_decode: PromptsAtDecode::Never,
            takes_partial_prefills: false,
            ..ClusterConfig::default()
        };
        timer.after(wire, TICK, Input::Tick);
        Self {
            at,
            id,
            timer,
            began: wire.now(),
            election,
            desk: Desk::new(id),
            cluster: Cluster::new(config, Policies::default()),
            ties: Random::new(wire.chance.next_u64()),
            live: BTreeMap::new(),
            sessions: vec![None; names.len()],
            names,
            obeyed: Leadership::Unknown,
            follow: Follow { turn: 0, wait: RETRY, conn: None, link: None },
            streams: BTreeMap::new(),
            requests: 0,
        }
    }

    /// The time by its own clock.
    fn now(&self, net: &Net) -> Instant {
        self.began + (net.wire.now() - self.began).mul_f64(self.timer.rate)
    }

    /// Until a time by its own clock.
    fn until(&self, net: &Net, time: Instant) -> Duration {
        time.saturating_duration_since(self.now(net))
    }

    /// Whether it is about to end.
    pub(super) fn drains(&self) -> bool {
        self.election.drains
    }

    /// What it knows of the leader, for who reads of a check that failed.
    pub(super) fn state(&self) -> String {
        let term = self.desk.term();
        let obeyed = &self.obeyed;
        let follow = &self.follow;
        let election = &self.election;
        format!("{:?}, term {term}, {obeyed:?}, {follow:?}, {election:?}", self.at)
    }

    /// Requests that are not over.
    pub(super) fn live(&self) -> usize {
        self.live.len()
    }

    /// Whether something that a conductor has said waits until this one has settled, or this one
    /// asks etcd whether a term that a node tells of is a leader's.
    pub(super) fn holds_back(&self) -> bool {
        !self.desk.is_certain()
            || self.streams.values().any(|stream| stream.held.as_ref().is_some_and(|held| !held.is_empty()))
    }

    pub(super) fn on_input(&mut self, net: &mut Net, input: Input) {
        let now = self.now(net);
        self.election.reaches_nodes = self.cluster.reaches_nodes();
        match input {
            Input::Arrival => self.on_arrival(net),
            Input::Leaves => self.on_client_left(net),
            Input::RequestTimer(request) => self.on_request_timer(net, request),
            Input::Tick => {
                self.cluster.on_tick(now);
                let ties = &mut self.ties;
                self.desk.on_tick(now, &mut self.cluster, &mut || ties.next_u64());
                self.timer.after(&mut net.wire, TICK, Input::Tick);
            }
            // The world ends its process.
            Input::Ends => {}
            Input::Drains => self.election.on_drain(&mut net.wire),
            Input::Node(node, session, says) => self.on_said(net, node, session, says),
            Input::SessionOver(node, session) => self.on_session_over(net, node, session),
            Input::Etcd(asked, answer) => self.election.on_answer(&mut net.wire, asked, answer),
            Input::EtcdSilent(asked) => self.election.on_silent(&mut net.wire, asked),
            Input::ElectionTimer(turn) => self.election.on_timer(&mut net.wire, turn),
            Input::Watch(revision, change) => self.election.on_watch(&mut net.wire, revision, change),
            Input::WatchEnded => self.election.on_watch_ended(&mut net.wire),
            Input::FollowTimer(turn) => {
                if turn == self.follow.turn {
                    self.connect(net);
                }
            }
            Input::Connected(conn) => self.on_connected(net, conn),
            Input::ToLeader(conn, message) => self.on_to_leader(net, conn, *message),
            Input::FromLeader(conn, told) => self.on_from_leader(net, conn, *told),
            Input::Settled(conn) => {
                let held = self.streams.get_mut(&conn).and_then(|stream| stream.held.take());
                held.into_iter().flatten().for_each(|message| self.on_follower_said(net, conn, message));
            }
            Input::Closed(conn) => self.on_closed(net, conn),
        }
        self.obey(net);
        if let Some((term, heard)) = self.election.named.take() {
            let ties = &mut self.ties;
            self.desk.on_etcd_named(now, term, heard, &mut self.cluster, &mut || ties.next_u64());
        }
        self.carry_out_desk(net);
    }

    /// Does what was decided on who leads.
    fn obey(&mut self, net: &mut Net) {
        if *self.election.candidacy.leadership() == self.obeyed {
            return;
        }
        self.obeyed = self.election.candidacy.leadership().clone();
        self.unfollow(net);
        let now = self.now(net);
        match &self.obeyed {
            Leadership::Unknown => self.desk.on_step_down(now, &mut self.cluster),
            Leadership::Own { term } => {
                net.log.elections += 1;
                let ties = &mut self.ties;
                self.desk.on_elected(now, *term, SETTLE, &mut self.cluster, &mut || ties.next_u64());
            }
            Leadership::Other { term, .. } => {
                self.desk.on_other_leads(now, *term, &mut self.cluster);
                self.follow.wait = RETRY;
                self.connect(net);
            }
        }
    }

    fn unfollow(&mut self, net: &mut Net) {
        self.follow.turn += 1;
        if let Some(link) = self.follow.link.take() {
            self.desk.on_link_lost(link);
        }
        if let Some(conn) = self.follow.conn.take() {
            net.close(conn);
        }
    }

    fn connect(&mut self, net: &mut Net) {
        let Leadership::Other { address, .. } = &self.obeyed else { return };
        let leader: usize = address.parse().expect("addresses are numbers");
        let own = Place::SimFrontend(self.at.front);
        let other = Place::SimFrontend(leader);
        if !net.runs[leader] {
            return self.connect_later(net, Duration::ZERO);
        }
        if net.is_stopped(leader) || net.wire.cut_until(own, other).is_some() {
            return self.connect_later(net, GREETING_TIMEOUT);
        }
        let leader = FrontendStart { front: leader, start: net.starts[leader] };
        let conn = net.open(self.at, leader);
        self.follow.conn = Some(conn);
        net.wire.send(other, own, Event::SimFrontend(self.at, Input::Connected(conn)));
    }

    fn connect_later(&mut self, net: &mut Net, more: Duration) {
        self.follow.turn += 1;
        let wait = self.follow.wait + more;
        self.follow.wait = (self.follow.wait * 2).min(RETRY_MAX);
        self.timer.after(&mut net.wire, wait, Input::FollowTimer(self.follow.turn));
    }

    fn on_connected(&mut self, net: &mut Net, conn: u64) {
        if self.follow.conn == Some(conn) {
            let now = self.now(net);
            self.follow.link = Some(self.desk.on_follows(now, &mut self.cluster));
        }
    }

    fn on_closed(&mut self, net: &mut Net, conn: u64) {
        if let Some(stream) = self.streams.remove(&conn) {
            let now = self.now(net);
            self.desk.on_follower_gone(now, &stream.following);
        } else if self.follow.conn == Some(conn) {
            self.unfollow(net);
            self.connect_later(net, Duration::ZERO);
        }
    }

    fn on_from_leader(&mut self, net: &mut Net, conn: u64, told: FromLeader<()>) {
        let Some(link) = self.follow.link.filter(|_| self.follow.conn == Some(conn)) else { return };
        if matches!(told, FromLeader::Greeted { .. }) {
            self.follow.wait = RETRY;
        }
        let now = self.now(net);
        if self.desk.on_told(now, link, told).is_err() {
            self.unfollow(net);
            self.connect_later(net, Duration::ZERO);
        }
    }

    fn on_to_leader(&mut self, net: &mut Net, conn: u64, message: ToLeader) {
        if let ToLeader::Greet { conductor, attempts } = message {
            let now = self.now(net);
            let Some(following) = self.desk.on_follower(now, conductor, &attempts, &mut self.cluster) else {
                return net.close(conn);
            };
            let term = net.false_greeting.take().unwrap_or(following.term);
            net.tell_follower(conn, FromLeader::Greeted { term });
            let held = following.settles.filter(|at| *at > now).map(|at| {
                let wait = self.until(net, at);
                self.timer.after(&mut net.wire, wait, Input::Settled(conn));
                Vec::new()
            });
            self.streams.insert(conn, Stream { following, held });
            return;
        }
        match self.streams.get_mut(&conn) {
            Some(Stream { held: Some(held), .. }) => held.push(message),
            Some(_) => self.on_follower_said(net, conn, message),
            None => {}
        }
    }

    fn on_follower_said(&mut self, net: &mut Net, conn: u64, message: ToLeader) {
        let Some(Stream { following, .. }) = self.streams.get(&conn) else { return };
        let now = self.now(net);
        match message {
            ToLeader::Ask(question) => {
                let ties = &mut self.ties;
                let cluster = &mut self.cluster;
                let answer = self.desk.on_follower_asked(now, following, &question, cluster, &mut || ties.next_u64());
                if let Some(answer) = answer {
                    net.log.decided(self.desk.term(), self.id);
                    net.tell_follower(conn, told(&question, answer));
                }
            }
            ToLeader::LedgerUpdate(key, entry) => {
                self.desk.on_follower_ledger_update(now, following, key, &entry, &mut self.cluster);
            }
            ToLeader::Greet { .. } => {}
        }
    }

    fn carry_out_desk(&mut self, net: &mut Net) {
        while let Some(effect) = self.desk.poll_effect() {
            match effect {
                DeskEffect::Tell(link, message) => {
                    let conn = self.follow.conn.filter(|_| self.follow.link == Some(link));
                    // Now and then the leader does not keep up.
                    match conn.filter(|_| net.wire.chance.below(1000) >= net.behind) {
                        Some(conn) => net.tell_leader(conn, message),
                        None => self.desk.on_link_lost(link),
                    }
                }
                DeskEffect::Answer(key, answer) => {
                    let is_own = matches!(&answer, Answer::Placed(of) if matches!(of.grounds, DecisionReasons::Own(_)));
                    if is_own {
                        net.log.decided(self.desk.term(), self.id);
                    }
                    let live = self.live.get_mut(&key.request.0);
                    let asked = live.and_then(|live| live.asked.take()).filter(|(asked, _)| *asked == key);
                    let (_, asked) = asked.unwrap_or_else(|| panic!("an answer to {key:?}, which none waits for"));
                    self.on_answer(net, key, asked, answer);
                }
                DeskEffect::EndStream(stream) => {
                    let ended = self.streams.iter().find(|(_, of)| of.following.stream == stream);
                    if let Some(conn) = ended.map(|(conn, _)| *conn) {
                        self.streams.remove(&conn);
                        net.close(conn);
                    }
                }
                DeskEffect::NameLeader { term } => {
                    for node in self.names.iter() {
                        self.tell_node(net, node, Command::Leader { term, denied: 0 });
                    }
                }
                DeskEffect::DenyTerm { node, term: denied } => {
                    let term = self.desk.term();
                    self.tell_node(net, &node, Command::Leader { term, denied });
                }
                DeskEffect::Observe(_) | DeskEffect::ReignOver { .. } => {}
            }
        }
        // Its end ends the stream.
        if self.follow.link.is_some() && self.desk.link() != self.follow.link {
            self.unfollow(net);
            self.connect_later(net, Duration::ZERO);
        }
    }

    fn on_arrival(&mut self, net: &mut Net) {
        self.requests += 1;
        let number = (self.at.front as u128) << 96 | u128::from(self.at.start) << 64 | self.requests;
        let chance = &mut net.wire.chance;
        let prompt = 16 + chance.below(800) as usize;
        let output = 1 + chance.below(12) as u32;
        let sampling = SamplingParams { max_tokens: output, ..SamplingParams::default() };
        let job = RequestJob {
            request: RequestId(number),
            conductor: self.id,
            tokens: vec![1; prompt].into(),
            sampling: Arc::new(sampling),
            block_hashes: Arc::from([]),
            slo: Slo::default(),
            timeout: Duration::from_secs(60),
            priority: 0,
            first_completion_nodes: Vec::new(),
        };
        let now = self.now(net);
        let core = RequestCore::new(now, now, job, RequestLimits::default());
        self.live.insert(number, Live { core, timer: None, asked: None });
        self.carry_out(net, number);
    }

    /// The client of one of the requests leaves.
    fn on_client_left(&mut self, net: &mut Net) {
        let count = self.live.len() as u64;
        let now = self.now(net);
        if count > 0 {
            let turn = net.wire.chance.below(count) as usize;
            let chosen = self.live.iter_mut().nth(turn).map(|(request, live)| {
                live.core.on_abort(now);
                *request
            });
            chosen.into_iter().for_each(|request| self.carry_out(net, request));
        }
    }

    fn on_request_timer(&mut self, net: &mut Net, request: u128) {
        let now = self.now(net);
        let Some(live) = self.live.get_mut(&request) else { return };
        if live.timer.is_some_and(|timer| timer <= now + Duration::from_micros(1)) {
            live.timer = None;
            live.core.on_wakeup(now + Duration::from_micros(1));
            self.carry_out(net, request);
        }
    }

    fn on_said(&mut self, net: &mut Net, node: usize, session: u64, says: NodeMessage) {
        let now = self.now(net);
        if let NodeMessage::Joined(info) = says {
            self.sessions[node] = Some((session, info.generation));
            let leader = Command::Leader { term: self.desk.term(), denied: 0 };
            self.tell_node(net, &info.node, leader);
            return self.cluster.on_node_joined(now, *info);
        }
        let Some((_, generation)) = self.sessions[node].filter(|(known, _)| *known == session) else { return };
        match says {
            NodeMessage::Joined(_) => {}
            NodeMessage::Load(load) => self.cluster.on_load(now, &self.names[node], *load),
            NodeMessage::LeaderTerm(term) => {
                if let Some(heard) = self.on_leader_term(net, node, generation, term) {
                    self.election.on_heard(&mut net.wire, heard);
                }
            }
            NodeMessage::Event(key, event) => {
                if let Some(live) = self.live.get_mut(&key.request.0) {
                    live.core.on_event(now, key.attempt, *event);
                    self.carry_out(net, key.request.0);
                }
            }
        }
    }

    fn on_leader_term(&mut self, net: &Net, node: usize, generation: Generation, term: u64) -> Option<u64> {
        let now = self.now(net);
        let ties = &mut self.ties;
        let start = NodeStart { node: self.names[node].clone(), generation };
        self.desk.on_heard(now, &start, term, &mut self.cluster, &mut || ties.next_u64())
    }

    fn on_session_over(&mut self, net: &mut Net, node: usize, session: u64) {
        let Some((_, generation)) = self.sessions[node].take_if(|(known, _)| *known == session) else { return };
        self.on_leader_term(net, node, generation, 0);
        let now = self.now(net);
        let lost = NodeStart { node: self.names[node].clone(), generation };
        self.cluster.on_node_goodbye(now, &lost.node, generation);
        for request in self.live.keys().copied().collect::<Vec<_>>() {
            if let Some(live) = self.live.get_mut(&request) {
                live.core.on_node_away(now, now, &lost, Departure::Died);
                self.carry_out(net, request);
            }
        }
    }

    fn tell_node(&self, net: &mut Net, node: &NodeId, command: Command) -> bool {
        let node = self.names.iter().position(|name| name == node).expect("a node of this cluster");
        let Some((session, _)) = self.sessions[node] else { return false };
        let event = Event::Command { node, session, front: self.at.front, command };
        net.wire.send(Place::SimFrontend(self.at.front), Place::Node(node), event);
        true
    }

    fn on_answer(&mut self, net: &mut Net, key: RequestKey, asked: OpenQuestion, answer: Answer<()>) {
        let now = self.now(net);
        let Some(live) = self.live.get_mut(&key.request.0) else { return };
        tell_core(&mut live.core, now, key, asked, answer);
        self.carry_out(net, key.request.0);
    }

    /// Carries out what a request's core wants.
    fn carry_out(&mut self, net: &mut Net, request: u128) {
        let now = self.now(net);
        let Some(mut live) = self.live.remove(&request) else { return };
        while let Some(effect) = live.core.poll_effect() {
            let ties = &mut self.ties;
            let cluster = &mut self.cluster;
            let mut random = || ties.next_u64();
            match effect {
                RequestEffect::Place { key, exclude, waited } => {
                    let wanted = live.core.placement_request(key, &exclude, waited);
                    let answer = self.desk.on_ask_for_nodes(now, &wanted, cluster, &mut random);
                    self.on_asked(net, &mut live, (key, OpenQuestion::Nodes), answer);
                }
                RequestEffect::AskReselect { key, from, refused } => {
                    let answer = self.desk.on_ask_for_other(now, key, &from, cluster, &mut random);
                    self.on_asked(net, &mut live, (key, OpenQuestion::Other { from, refused }), answer);
                }
                RequestEffect::PlaceMigration(question) => {
                    let migrated = question.migrated;
                    let answer = self.desk.on_ask_for_migration(now, question, cluster, &mut random);
                    self.on_asked(net, &mut live, (migrated, OpenQuestion::Migrate), answer);
                }
                RequestEffect::Submit { node, job } => {
                    let needed = live.core.needed();
                    let gone = needed.iter().find(|start| !cluster.is_here(start)).map(|start| start.node.clone());
                    let gone = gone.or_else(|| {
                        let command = Command::Job(self.desk.term(), Box::new(job));
                        (!self.tell_node(net, &node, command)).then(|| node.clone())
                    });
                    if let Some(node) = gone {
                        live.core.on_unreachable(now, &node);
                    }
                }
                RequestEffect::Reselect { node, reselect } => {
                    self.tell_node(net, &node, Command::Reselect(Box::new(reselect)));
                }
                RequestEffect::Abort { node, key } => {
                    self.tell_node(net, &node, Command::Abort(key));
                }
                RequestEffect::UpdateLedger { key, entry } => {
                    self.desk.on_ledger_update(now, key, &entry, cluster);
                    if entry == LedgerEntry::Ended {
                        live.asked.take_if(|(asked, _)| *asked == key);
                    }
                }
                RequestEffect::End(outcome) => {
                    assert!(live.asked.is_none(), "a request ends, and its question is open: {:?}", live.asked);
                    return net.log.ended(&outcome);
                }
                RequestEffect::Deliver { .. } | RequestEffect::PromptLogprobs(_) | RequestEffect::Note(_) => {}
            }
        }
        if let Some(due) = live.core.next_wakeup()
            && live.timer.is_none_or(|set| due < set)
        {
            live.timer = Some(due);
            let wait = self.until(net, due);
            self.timer.after(&mut net.wire, wait, Input::RequestTimer(request));
        }
        self.live.insert(request, live);
    }

    fn on_asked(
        &mut self,
        net: &mut Net,
        live: &mut Live,
        asked: (RequestKey, OpenQuestion),
        answer: Option<Answer<()>>,
    ) {
        net.log.asked += 1;
        let before = live.asked.take();
        assert!(before.is_none(), "a second question first_completion_nodes {before:?}");
        match answer {
            Some(answer) => {
                net.log.decided(self.desk.term(), self.id);
                let now = self.now(net);
                tell_core(&mut live.core, now, asked.0, asked.1, answer);
            }
            None => live.asked = Some(asked),
        }
    }
}

fn tell_core(core: &mut RequestCore, now: Instant, key: RequestKey, asked: OpenQuestion, answer: Answer<()>) {
    match (asked, answer) {
        (OpenQuestion::Nodes, Answer::Placed(decided)) => core.on_placed(decided.at, key, decided.placed),
        (OpenQuestion::Other { from, refused }, Answer::Reselected(to)) => {
            core.on_reselected(now, key, &from, refused, to)
        }
        (OpenQuestion::Migrate, Answer::Migrated(to)) => core.on_migration_placed(key, to),
        (asked, answer) => panic!("{answer:?} to {asked:?}"),
    }
}

fn told(question: &Question, answer: Answer<()>) -> FromLeader<()> {
    let key = question.key();
    match answer {
        Answer::Placed(decided) => FromLeader::Placed { key, placed: Box::new(decided.placed), why: Some(()) },
        Answer::Reselected(to) => FromLeader::Reselected(key, to),
        Answer::Migrated(to) => FromLeader::Migrated(key, to),
        Answer::Explained(_) => FromLeader::Explained(key, Some(())),
    }
}
