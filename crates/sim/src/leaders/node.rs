//! A node that computes in no time to speak of: what it knows of leaders is production's, and what
//! it does with jobs is not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use baton_scheduler::{RequestEvent, TermFence};
use baton_types::{
    ConductorId, DecodeEvent, DecodeTarget, ErrorKind, FetchReport, FinishReason, Generation, KvDtype, KvLayout,
    KvTransfer, Load, NodeId, NodeInfo, NodeProfile, NodeRole, PrefillEvent, PrefillJob, Refused, RequestKey,
};

use super::wire::{Command, Event, NodeMessage, Place, Wire};

/// Something that a node has to do.
#[derive(Debug)]
pub(super) enum Work {
    Computed(RequestKey),
    /// The token of that index.
    Step(RequestKey, u32),
    /// A handoff of a job by another node (and its start), to go on at that index.
    Handoff(Box<Job>, u32, (usize, u64)),
    /// Whether a job was taken by the decode node that it was handed to.
    HandedOff(Box<Job>, bool),
}

/// A job that was taken in.
#[derive(Debug, Clone)]
pub(super) struct Job {
    front: usize,
    session: u64,
    job: PrefillJob,
}

/// What nodes count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub accepted: u64,
    pub stale: u64,
    /// Orders of an earlier term than the one before.
    pub went_back: u64,
}

#[derive(Debug)]
pub(super) struct Node {
    pub place: usize,
    pub start: u64,
    role: NodeRole,
    term_fence: TermFence,
    /// The term of the last order that was carried out.
    accepted: u64,
    /// The later term that each frontend was told of.
    told_terms: Vec<u64>,
    /// Terms that frontends have denied while etcd did not name them, in their sessions.
    denied: BTreeSet<(usize, u64)>,
    /// Conductors that are none, and say what they like.
    liars: BTreeSet<u64>,
    jobs: BTreeMap<RequestKey, Job>,
    /// The number of the session with each frontend.
    pub sessions: Vec<Option<u64>>,
}

/// Who a frontend is to a node.
fn conductor(front: usize) -> ConductorId {
    ConductorId(front as u64)
}

pub(super) fn name(place: usize, prefill: usize) -> NodeId {
    let letter = if place < prefill { 'p' } else { 'd' };
    NodeId::new(&format!("{letter}{place}")).expect("letters and digits are a name")
}

impl Node {
    pub(super) fn new(place: usize, start: u64, prefill: usize, fronts: usize) -> Self {
        let role = if place < prefill { NodeRole::Prefill } else { NodeRole::Decode };
        let term_fence = TermFence::default();
        let jobs = BTreeMap::new();
        let sessions = vec![None; fronts];
        let told_terms = vec![0; fronts];
        let denied = BTreeSet::new();
        let liars = BTreeSet::new();
        Self { place, start, role, term_fence, accepted: 0, told_terms, denied, liars, jobs, sessions }
    }

    fn info(&self, name: NodeId) -> NodeInfo {
        let layout = KvLayout {
            model: 7,
            num_layers: 4,
            num_kv_heads: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 2000,
        };
        let profile = NodeProfile {
            prefill_base: 0.01,
            prefill_per_token: 0.0002,
            decode_base: 0.01,
            decode_per_sequence: 0.001,
            max_waiting: 64,
            max_running: 32,
            ..NodeProfile::default()
        };
        NodeInfo {
            node: name,
            role: self.role,
            generation: Generation(self.start),
            address: String::new(),
            model: "m".into(),
            vocab_size: 512,
            context_length: 4096,
            kv_class: "simulated".into(),
            layout,
            profile,
            vocabulary: String::new(),
        }
    }

    fn says(&self, wire: &mut Wire, to: (usize, u64), starts: &[u64], says: NodeMessage) {
        let (front, session) = to;
        if self.sessions[front] == Some(session) {
            let start = super::wire::FrontendStart { front, start: starts[front] };
            let input = super::wire::Input::Node(self.place, session, says);
            wire.send(Place::Node(self.place), Place::SimFrontend(front), Event::SimFrontend(start, input));
        }
    }

    fn says_all(&self, wire: &mut Wire, starts: &[u64], says: impl Fn() -> NodeMessage) {
        for (front, session) in self.sessions.iter().enumerate() {
            if let Some(session) = session {
                self.says(wire, (front, *session), starts, says());
            }
        }
    }

    /// A session with a frontend begins.
    pub(super) fn on_session(&mut self, wire: &mut Wire, front: usize, session: u64, starts: &[u64], name: NodeId) {
        self.sessions[front] = Some(session);
        self.told_terms[front] = 0;
        self.says(wire, (front, session), starts, NodeMessage::Joined(Box::new(self.info(name))));
        let load = NodeMessage::Load(Box::new(self.load()));
        self.says(wire, (front, session), starts, load);
        self.tell_terms(wire, starts);
    }

    /// A session is over: what its conductor asked for and said ends.
    pub(super) fn on_session_over(&mut self, wire: &mut Wire, front: usize, session: u64, starts: &[u64]) {
        if self.sessions[front].take_if(|known| *known == session).is_some() {
            self.jobs.retain(|_, job| job.front != front);
            self.term_fence.on_gone(conductor(front));
            self.denied.retain(|(of, _)| *of != front);
            self.tell_terms(wire, starts);
        }
    }

    fn tell_terms(&mut self, wire: &mut Wire, starts: &[u64]) {
        for front in 0..self.sessions.len() {
            let term = self.term_fence.later_than_named_by(wire.now(), conductor(front)).unwrap_or(0);
            if let Some(session) = self.sessions[front]
                && std::mem::replace(&mut self.told_terms[front], term) != term
            {
                self.says(wire, (front, session), starts, NodeMessage::LeaderTerm(term));
            }
        }
    }

    /// A liar that has a session names a term, and sends jobs of it and of others.
    pub(super) fn on_lie(&mut self, wire: &mut Wire, liar: u64, term: u64, starts: &[u64]) {
        self.liars.insert(liar);
        self.term_fence.on_named(ConductorId(liar), term);
        assert!(
            self.term_fence.admit(wire.now(), ConductorId(liar), term.wrapping_add(1).max(1)).is_err(),
            "it is not named"
        );
        // They may deny what they like, too: that lets only their own jobs through.
        self.term_fence.on_denied(wire.now(), ConductorId(liar), self.accepted);
        let _ = self.term_fence.admit(wire.now(), ConductorId(liar), term);
        self.tell_terms(wire, starts);
    }

    pub(super) fn on_liar_gone(&mut self, wire: &mut Wire, liar: u64, starts: &[u64]) {
        if self.liars.remove(&liar) {
            self.term_fence.on_gone(ConductorId(liar));
            self.tell_terms(wire, starts);
        }
    }

    /// The node itself lies to all frontends.
    pub(super) fn tell_lie(&self, wire: &mut Wire, term: u64, starts: &[u64]) {
        self.says_all(wire, starts, || NodeMessage::LeaderTerm(term));
    }

    /// Whether a frontend names that term.
    fn is_named(&self, term: u64) -> bool {
        (0..self.sessions.len()).any(|front| self.term_fence.named_by(conductor(front)) == term)
    }

    fn load(&self) -> Load {
        let running = self.jobs.len() as u32;
        Load { running, blocks_total: 2000, accepts_migrations: true, ..Load::default() }
    }

    pub(super) fn report(&self, wire: &mut Wire, starts: &[u64]) {
        self.says_all(wire, starts, || NodeMessage::Load(Box::new(self.load())));
    }

    pub(super) fn on_command(
        &mut self,
        wire: &mut Wire,
        from: (usize, u64),
        command: Command,
        starts: &[u64],
        leader_term: Option<u64>,
        counts: &mut Counts,
    ) {
        let (front, session) = from;
        if self.sessions[front] != Some(session) {
            return;
        }
        match command {
            Command::Abort(key) => {
                self.jobs.remove(&key);
            }
            Command::Reselect(reselect) => {
                if let Some(job) = self.jobs.get_mut(&reselect.key) {
                    job.job.decode = Some(reselect.decode);
                    self.after(wire, 20, Work::Computed(reselect.key));
                }
            }
            Command::Leader { term, denied } => {
                self.term_fence.on_named(conductor(front), term);
                if denied != 0 {
                    self.term_fence.on_denied(wire.now(), conductor(front), denied);
                }
                if leader_term != Some(denied) {
                    self.denied.insert((front, denied));
                }
                self.tell_terms(wire, starts);
            }
            Command::Job(term, job) => {
                let key = job.key;
                if let Err(stale) = self.term_fence.admit(wire.now(), conductor(front), term) {
                    counts.stale += 1;
                    // It may have been sure until now.
                    self.tell_terms(wire, starts);
                    let refused = Refused { kind: ErrorKind::Unavailable, message: stale.to_string() };
                    let failed = RequestEvent::Prefill(PrefillEvent::Failed(refused));
                    return self.says(wire, from, starts, NodeMessage::Event(key, Box::new(failed)));
                }
                let before = self.accepted;
                let is_over = leader_term != Some(before) || !self.is_named(before);
                // Etcd may have it again, as after it was restored.
                let is_denied = self.denied.contains(&(front, before));
                // It could not deny each: for two seconds none stands in its way.
                let is_sure = self.term_fence.is_sure(wire.now(), conductor(front));
                assert!(
                    term >= before || is_over || is_denied || is_sure,
                    "an order of term {term} after one of term {before}"
                );
                counts.went_back += u64::from(term < before);
                self.accepted = term;
                counts.accepted += 1;
                self.jobs.insert(key, Job { front, session, job: *job });
                self.begin(wire, from, key, starts);
            }
        }
    }

    fn begin(&mut self, wire: &mut Wire, from: (usize, u64), key: RequestKey, starts: &[u64]) {
        let Some(Job { job, .. }) = self.jobs.get(&key) else { return };
        if job.is_migration {
            let fetched = RequestEvent::Prefill(PrefillEvent::Fetched(FetchReport::default()));
            let first = job.output_tokens;
            self.says(wire, from, starts, NodeMessage::Event(key, Box::new(fetched)));
            return self.after(wire, 50, Work::Step(key, first));
        }
        let refuses = job.decode.is_some() && wire.chance.below(20) == 0;
        let started = PrefillEvent::Started { queue: Duration::ZERO, cached_tokens: 0 };
        self.says(wire, from, starts, NodeMessage::Event(key, Box::new(RequestEvent::Prefill(started))));
        if refuses {
            let refused = Refused { kind: ErrorKind::Overloaded, message: "no blocks".into() };
            let refused = RequestEvent::Prefill(PrefillEvent::GrantRefused(refused));
            return self.says(wire, from, starts, NodeMessage::Event(key, Box::new(refused)));
        }
        self.after(wire, 200, Work::Computed(key));
    }

    fn after(&self, wire: &mut Wire, most_ms: u64, work: Work) {
        let after = wire.up_to(Duration::from_millis(most_ms)) + Duration::from_millis(1);
        wire.queue.after(after, Event::Work { node: self.place, start: self.start, work });
    }

    /// A handoff came to this decode node.
    pub(super) fn on_handoff(&mut self, wire: &mut Wire, job: Job, index: u32) -> bool {
        // Without a session with its conductor, no conductor would hear of its tokens.
        let Some(session) = self.sessions[job.front] else { return false };
        let key = job.job.key;
        self.jobs.insert(key, Job { session, ..job });
        self.after(wire, 50, Work::Step(key, index));
        true
    }

    /// It has done something. Gives where a sequence goes on, and after which token.
    pub(super) fn on_work(&mut self, wire: &mut Wire, work: Work, starts: &[u64]) -> Option<(DecodeTarget, Job, u32)> {
        match work {
            Work::Handoff(..) => None,
            Work::HandedOff(of, is_taken) => {
                let refused = || Refused { kind: ErrorKind::Unavailable, message: "not taken".into() };
                let event = if is_taken {
                    PrefillEvent::HandedOff(KvTransfer::default())
                } else {
                    PrefillEvent::DecodeFailed(refused())
                };
                let says = NodeMessage::Event(of.job.key, Box::new(RequestEvent::Prefill(event)));
                self.says(wire, (of.front, of.session), starts, says);
                None
            }
            Work::Computed(key) => {
                let of = self.jobs.remove(&key)?;
                let to = (of.front, of.session);
                let index = of.job.output_tokens;
                let target = of.job.decode.clone();
                let finish = target.is_none().then_some(FinishReason::Length);
                let logprobs = None;
                let prompt_logprobs = Vec::new();
                let compute = Duration::from_millis(1);
                let first = PrefillEvent::FirstToken { token: index + 1, logprobs, prompt_logprobs, finish, compute };
                self.says(wire, to, starts, NodeMessage::Event(key, Box::new(RequestEvent::Prefill(first))));
                Some((target?, of, index + 1))
            }
            Work::Step(key, index) => {
                let of = self.jobs.get(&key)?;
                let to = (of.front, of.session);
                let most = of.job.sampling.max_tokens;
                let finish = (index + 1 >= most).then_some(FinishReason::Length);
                let token = DecodeEvent::Token { index, token: index + 1, logprobs: None, finish, queue: None };
                self.says(wire, to, starts, NodeMessage::Event(key, Box::new(RequestEvent::Decode(token))));
                if finish.is_some() {
                    self.jobs.remove(&key);
                    return None;
                }
                if wire.chance.below(40) == 0 {
                    self.says(
                        wire,
                        to,
                        starts,
                        NodeMessage::Event(key, Box::new(RequestEvent::MigrationRequested(index + 1))),
                    );
                }
                self.after(wire, 60, Work::Step(key, index + 1));
                None
            }
        }
    }

    /// Requests that it has.
    pub(super) fn jobs(&self) -> usize {
        self.jobs.len()
    }
}
