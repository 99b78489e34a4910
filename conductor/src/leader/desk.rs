//! Where the questions of requests go: to this conductor's own books while it leads, to the leader while another one does. While nobody does, they wait.
//!
//! **Invariant**: whoever answers hears of an attempt in the order in which things happened to it. So every question, every entry and every change of the leader goes
//! through one lock, and what is said to a leader begins with all that it has to know.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::v1::follower_message::Message;
use baton_proto::v1::leader_message::Message as Told;
use baton_proto::{InvalidMessage, PROTOCOL_VERSION, hashes_from_bytes, key, node_id, v1};
use baton_runtime::random_u64;
use baton_scheduler::{
    Assignment, BookEntry, Declared, Explanation, Followers, MoveAssignment, Placed, PlacementRequest, Refusal,
};
use baton_types::{ConductorId, DecodeTarget, ErrorKind, NodeId, RequestKey};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::wire;
use crate::front_door::FrontDoor;
use crate::grpc::explain;

/// Messages that may wait for the leader. One that is so far behind is left, and told everything anew.
pub const QUEUED_MESSAGES: usize = 4096;
/// How long a question waits while nobody leads.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was decided on an attempt.
#[derive(Debug)]
pub struct Decided {
    /// When it was decided. What is lost later is lost to the attempt.
    pub at: Instant,
    /// Where it goes, or why nowhere.
    pub placed: Result<Assignment, Refusal>,
    /// The grounds.
    pub grounds: Grounds,
}

/// Why it was decided so.
#[derive(Debug)]
pub enum Grounds {
    /// This conductor decided.
    Own(Box<Explanation>),
    /// The leader did, and says why.
    Told(Box<v1::ExplainResponse>),
    /// Nobody did.
    NoLeader,
}

impl Grounds {
    /// What is said of the prefill and of the decode nodes, and of how many: `1 chosen, 3 not chosen, 2 left out: draining`.
    pub fn verdicts(&self) -> (String, String) {
        match self {
            Self::Own(explanation) => (counted(explanation.prefill_verdicts()), counted(explanation.decode_verdicts())),
            Self::Told(told) => {
                let rest = |rest: &[v1::VerdictCount]| {
                    rest.iter().map(|of| (of.verdict.clone(), of.nodes as usize)).collect::<Vec<_>>()
                };
                let prefill = told.prefill.iter().map(|row| (row.verdict.clone(), 1)).chain(rest(&told.prefill_rest));
                let decode = told.decode.iter().map(|row| (row.verdict.clone(), 1)).chain(rest(&told.decode_rest));
                (counted(prefill), counted(decode))
            }
            Self::NoLeader => (String::new(), String::new()),
        }
    }
}

fn counted(verdicts: impl IntoIterator<Item = (impl ToString, usize)>) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for (verdict, nodes) in verdicts {
        let verdict = verdict.to_string();
        match counts.iter_mut().find(|(of, _)| *of == verdict) {
            Some((_, count)) => *count += nodes,
            None => counts.push((verdict, nodes)),
        }
    }
    counts.iter().map(|(verdict, nodes)| format!("{nodes} {verdict}")).collect::<Vec<_>>().join(", ")
}

/// An answer.
#[derive(Debug)]
pub enum Answer {
    /// To a question for nodes.
    Placed(Box<Decided>),
    /// To a question for another decode node that grants.
    Redirected(Option<DecodeTarget>),
    /// To a question for another decode node that goes on.
    Moved(Option<MoveAssignment>),
    /// What would be decided, and why; `None`: nobody leads.
    Explained(Option<Box<v1::ExplainResponse>>),
}

/// When the answer comes.
#[derive(Debug)]
pub enum Asked {
    /// Here it is.
    Answered(Answer),
    /// It will come.
    Later(oneshot::Receiver<Answer>),
}

/// Who leads.
#[derive(Debug)]
enum Role {
    /// Nobody, as far as is known.
    Nobody,
    /// Another conductor, who is told in this way.
    Follows(mpsc::Sender<v1::FollowerMessage>),
    /// This one. Until then nothing is placed: the others declare what they have.
    Leads { term: u64, over: CancellationToken, settles: Option<Instant> },
}

struct Waiting {
    /// As it is asked, and asked again of the next leader.
    message: Message,
    since: Instant,
    answer: oneshot::Sender<Answer>,
}

struct Inner {
    role: Role,
    /// Of the last leader. What was placed in earlier terms the next leader is told: jobs are of this one.
    term: u64,
    /// The latest term that was heard of.
    latest: u64,
    /// What is charged for this conductor's requests, wherever.
    placed: Placed,
    /// Questions that are not answered, by the attempt that they name.
    waiting: BTreeMap<RequestKey, Waiting>,
    followers: Followers,
    /// Their streams: a later greeting ends an earlier one.
    streams: BTreeMap<ConductorId, CancellationToken>,
}

/// See the module's text.
pub struct Desk(Mutex<Inner>);

/// A reign of this conductor.
#[derive(Debug, Clone)]
pub struct Reign {
    /// Grows with each leader.
    pub term: u64,
    /// Cancelled at its end, or when the conductor has greeted again.
    pub over: CancellationToken,
    /// Nothing is placed before.
    pub settles: Option<Instant>,
}

/// A stream of this conductor to a leader.
#[derive(Debug)]
pub struct Link(mpsc::WeakSender<v1::FollowerMessage>);

/// A stream of a conductor that follows.
#[derive(Debug, Clone)]
pub struct Following {
    /// The conductor.
    pub who: ConductorId,
    /// Whom it follows.
    pub reign: Reign,
}

impl Desk {
    /// Of a conductor that leads nobody and follows nobody.
    pub fn new() -> Self {
        let (placed, waiting, followers) = (Placed::default(), BTreeMap::new(), Followers::default());
        Self(Mutex::new(Inner {
            role: Role::Nobody,
            term: 0,
            latest: 0,
            placed,
            waiting,
            followers,
            streams: BTreeMap::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The books check themselves; a panic in another request must not end all of them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this conductor leads.
    pub fn leads(&self) -> bool {
        matches!(self.lock().role, Role::Leads { .. })
    }

    /// The term of the leader, or of the last one.
    pub fn term(&self) -> u64 {
        self.lock().term
    }

    /// The latest term that was heard of, from nodes too.
    pub fn latest(&self) -> u64 {
        self.lock().latest
    }

    /// Whether anybody leads.
    pub fn has_leader(&self) -> bool {
        !matches!(self.lock().role, Role::Nobody)
    }
}

impl Inner {
    /// Sends to the leader; if it is not keeping up, nobody leads until it is told everything anew.
    fn tell(&mut self, message: Message) {
        if let Role::Follows(to) = &self.role
            && to.try_send(v1::FollowerMessage { message: Some(message) }).is_err()
        {
            self.role = Role::Nobody;
        }
    }

    fn ask(&mut self, now: Instant, key: RequestKey, message: Message) -> Asked {
        let (answer, later) = oneshot::channel();
        self.waiting.insert(key, Waiting { message: message.clone(), since: now, answer });
        self.tell(message);
        Asked::Later(later)
    }

    fn answer(&mut self, now: Instant, key: RequestKey, answer: Answer) {
        let Some(waiting) = self.waiting.remove(&key) else { return };
        match (&answer, &waiting.message) {
            (Answer::Placed(decided), Message::Place(question)) => {
                if let (Ok(to), Ok(question)) = (&decided.placed, wire::PlaceQuestion::try_from(question.clone())) {
                    self.placed.on_placed(now, &question.request(), to);
                }
            }
            (Answer::Redirected(Some(to)), _) => self.placed.on_redirected(key, to),
            (Answer::Moved(Some(to)), Message::Move(question)) => {
                if let Ok((keys, ..)) = wire::move_question(question.clone()) {
                    self.placed.on_moved(now, keys, to);
                }
            }
            _ => {}
        }
        // The request may be over.
        let _ = waiting.answer.send(answer);
    }
}

/// What requests ask and say.
impl FrontDoor {
    /// Asks for nodes, and charges them.
    pub fn ask_for_nodes(&self, wanted: &PlacementRequest<'_>) -> Asked {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        self.settle(&mut desk, now);
        match &desk.role {
            Role::Leads { settles: None, .. } => {
                let decided = self.decide(wanted);
                if let Ok(to) = &decided.placed {
                    desk.placed.on_placed(now, wanted, to);
                }
                Asked::Answered(Answer::Placed(Box::new(decided)))
            }
            _ => desk.ask(now, wanted.key, Message::Place(wire::question_to_wire(wanted))),
        }
    }

    /// Asks what would be decided now. Nothing is charged.
    pub fn ask_why(&self, wanted: &PlacementRequest<'_>) -> Asked {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        self.settle(&mut desk, now);
        match &desk.role {
            Role::Leads { settles: None, .. } => Asked::Answered(self.explained(now, wanted)),
            _ => desk.ask(now, wanted.key, Message::Explain(wire::question_to_wire(wanted))),
        }
    }

    fn explained(&self, now: Instant, wanted: &PlacementRequest<'_>) -> Answer {
        let explanation = self.cluster().explain(now, wanted, &mut random_u64);
        Answer::Explained(Some(Box::new(explain::response(wanted.prompt_tokens, &explanation))))
    }

    fn decide(&self, wanted: &PlacementRequest<'_>) -> Decided {
        let mut cluster = self.cluster();
        // While no node can be lost: what is lost later is lost to this placement.
        let at = self.clock.now();
        let explanation = Box::new(cluster.place_explained(at, wanted, &mut random_u64));
        let placed = explanation.decision.clone();
        let placed = placed.map(|placement| cluster.assign(placement, wanted.slo.tbt));
        Decided { at, placed, grounds: Grounds::Own(explanation) }
    }

    /// Asks for another decode node that grants what this one refused.
    pub fn ask_for_other(&self, key: RequestKey, from: &NodeId) -> Asked {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        self.settle(&mut desk, now);
        match &desk.role {
            Role::Leads { settles: None, .. } => {
                let to = self.redirect(now, key, from);
                if let Some(to) = &to {
                    desk.placed.on_redirected(key, to);
                }
                Asked::Answered(Answer::Redirected(to))
            }
            _ => {
                let question = v1::RedirectQuestion { key: Some(key.into()), from: from.to_string() };
                desk.ask(now, key, Message::Redirect(question))
            }
        }
    }

    fn redirect(&self, now: Instant, key: RequestKey, from: &NodeId) -> Option<DecodeTarget> {
        let mut cluster = self.cluster();
        let other = cluster.redirect(now, key);
        cluster.decode_target(other.as_ref().unwrap_or(from))
    }

    /// Asks for another decode node that goes on with an attempt, as the second one.
    pub fn ask_for_move(&self, keys: (RequestKey, RequestKey), tokens: u32, exclude: &[NodeId]) -> Asked {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        self.settle(&mut desk, now);
        match &desk.role {
            Role::Leads { settles: None, .. } => {
                let to = self.move_to(now, keys, tokens, exclude);
                if let Some(to) = &to {
                    desk.placed.on_moved(now, keys, to);
                }
                Asked::Answered(Answer::Moved(to))
            }
            _ => desk.ask(now, keys.1, Message::Move(wire::move_question_to_wire(keys, tokens, exclude))),
        }
    }

    fn move_to(
        &self,
        now: Instant,
        keys: (RequestKey, RequestKey),
        tokens: u32,
        exclude: &[NodeId],
    ) -> Option<MoveAssignment> {
        let mut cluster = self.cluster();
        let chosen = cluster.place_move(now, keys, tokens, exclude)?;
        let to = cluster.assign_move(&chosen);
        if to.is_none() {
            cluster.on_ended(now, keys.1);
        }
        to
    }

    /// Enters what happened to an attempt into the books.
    pub fn book(&self, key: RequestKey, entry: &BookEntry) {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        desk.placed.on_booked(now, key, entry);
        if matches!(entry, BookEntry::Ended) {
            // Whatever it asked, nobody waits for the answer.
            desk.waiting.remove(&key);
        }
        match &desk.role {
            Role::Leads { .. } => self.cluster().book(now, key, entry),
            Role::Follows(_) => desk.tell(Message::Book(wire::booked_to_wire(key, entry))),
            Role::Nobody => {}
        }
    }
}

/// Who leads.
impl FrontDoor {
    /// This conductor leads from now on. What others have they declare; until `settle` has passed, nothing is placed without it.
    pub fn lead(&self, term: u64, settle: Duration) {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        self.end_reign(&mut desk, now);
        tracing::info!(term, "this conductor leads");
        desk.term = term;
        desk.latest = desk.latest.max(term);
        desk.role = Role::Leads { term, over: CancellationToken::new(), settles: Some(now + settle) };
        let mut cluster = self.cluster();
        desk.placed.declared(now).iter().for_each(|declared| cluster.declare(now, declared));
        drop(cluster);
        self.settle(&mut desk, now);
    }

    /// Another conductor leads from now on. Gives what it is to be told, from the beginning, and what names the stream.
    pub fn follow(&self) -> (mpsc::Receiver<v1::FollowerMessage>, Link) {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        self.end_reign(&mut desk, now);
        // All of these, and then what may be behind.
        let (to, messages) = mpsc::channel(QUEUED_MESSAGES + desk.waiting.len() + 1);
        let greet = v1::Greet {
            protocol_version: PROTOCOL_VERSION,
            conductor_id: self.id.to_string(),
            attempts: desk.placed.declared(now).iter().map(wire::declared_to_wire).collect(),
        };
        let link = Link(to.downgrade());
        desk.role = Role::Follows(to);
        desk.tell(Message::Greet(greet));
        let asked: Vec<_> = desk.waiting.values().map(|waiting| waiting.message.clone()).collect();
        asked.into_iter().for_each(|question| desk.tell(question));
        (messages, link)
    }

    /// This conductor does not lead any more, and nobody is known to.
    pub fn step_down(&self) {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        if matches!(desk.role, Role::Leads { .. }) {
            self.end_reign(&mut desk, now);
            desk.role = Role::Nobody;
        }
    }

    /// A node has heard of a leader of that term. If it is a later one than this conductor knows of, nobody leads here until it is found.
    pub fn on_later_term(&self, term: u64) {
        let mut desk = self.desk.lock();
        desk.latest = desk.latest.max(term);
        if term <= desk.term || matches!(desk.role, Role::Nobody) {
            return;
        }
        if desk.term == 0 {
            // Nobody elected this one: it is alone now, and was not always.
            tracing::info!(term, "nodes have heard of a leader: this conductor, which is alone, goes on in its term");
            desk.term = term;
            return;
        }
        tracing::warn!(term, known = desk.term, "a later leader places than the one that this conductor knows");
        let now = self.clock.now();
        self.end_reign(&mut desk, now);
        desk.role = Role::Nobody;
    }

    /// A stream to a leader is over.
    pub fn lose_leader(&self, Link(link): &Link) {
        let mut desk = self.desk.lock();
        if let (Role::Follows(to), Some(link)) = (&desk.role, link.upgrade())
            && to.same_channel(&link)
        {
            desk.role = Role::Nobody;
        }
    }

    /// The books of a reign end with it.
    fn end_reign(&self, desk: &mut Inner, now: Instant) {
        if let Role::Leads { term, over, .. } = &desk.role {
            tracing::info!(term, "this conductor does not lead any more");
            over.cancel();
            self.cluster().forget_charges(now);
            desk.followers = Followers::default();
            desk.streams.clear();
        }
    }

    /// Time has passed.
    pub fn on_desk_tick(&self) {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        match &desk.role {
            Role::Leads { .. } => {
                self.settle(&mut desk, now);
                let mut cluster = self.cluster();
                desk.followers.on_tick(now, &mut cluster);
            }
            // A leader answers at once, unless it hangs or is cut off.
            Role::Follows(_) | Role::Nobody => self.refuse_patient(&mut desk, now),
        }
    }

    /// Who declares does so at once: what waited for it is placed.
    fn settle(&self, desk: &mut Inner, now: Instant) {
        let Role::Leads { settles, .. } = &mut desk.role else { return };
        if settles.take_if(|at| *at <= now).is_none() {
            return;
        }
        let asked: Vec<_> = desk.waiting.iter().map(|(key, waiting)| (*key, waiting.message.clone())).collect();
        for (key, question) in asked {
            // It is this conductor's own: it can be read.
            if let Ok((_, answer)) = self.answer_to(now, question) {
                desk.answer(now, key, answer);
            }
        }
    }

    /// Whoever has waited for long enough for a leader is refused.
    fn refuse_patient(&self, desk: &mut Inner, now: Instant) {
        let due = |waiting: &Waiting| now.saturating_duration_since(waiting.since) >= PATIENCE;
        let due: Vec<_> = desk.waiting.iter().filter(|(_, waiting)| due(waiting)).map(|(key, _)| *key).collect();
        for key in due {
            let Some(waiting) = desk.waiting.get(&key) else { continue };
            let answer = match waiting.message {
                Message::Place(_) => {
                    let (kind, retry_after) = (ErrorKind::Unavailable, Some(Duration::from_secs(1)));
                    let message = format!("no conductor has led for {} s: nothing is placed", PATIENCE.as_secs());
                    let placed = Err(Refusal { kind, message, retry_after, hold: None });
                    Answer::Placed(Box::new(Decided { at: now, placed, grounds: Grounds::NoLeader }))
                }
                Message::Redirect(_) => Answer::Redirected(None),
                Message::Explain(_) => Answer::Explained(None),
                _ => Answer::Moved(None),
            };
            desk.answer(now, key, answer);
        }
    }

    /// The leader answered.
    pub fn on_answer(&self, message: Told) -> Result<(), InvalidMessage> {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        let (answered, answer) = match message {
            Told::Greeted(greeted) if greeted.term < desk.latest => {
                let found = format!("{}, but a leader of term {} was heard of", greeted.term, desk.latest);
                return Err(InvalidMessage { field: "greeted.term", found });
            }
            Told::Greeted(greeted) => {
                desk.term = greeted.term;
                desk.latest = desk.latest.max(greeted.term);
                return Ok(());
            }
            Told::Placed(placed) => {
                let grounds = placed.explanation.map_or(Grounds::NoLeader, |of| Grounds::Told(Box::new(of)));
                let decided = Decided { at: now, placed: wire::answer(placed.answer)?, grounds };
                (key(placed.key)?, Answer::Placed(Box::new(decided)))
            }
            Told::Redirected(to) => (key(to.key)?, Answer::Redirected(to.decode.map(TryInto::try_into).transpose()?)),
            Told::Moved(to) => {
                let (moved, to) = wire::moved(to)?;
                (moved, Answer::Moved(to))
            }
            Told::Explained(told) => (key(told.key)?, Answer::Explained(told.explanation.map(Box::new))),
        };
        desk.answer(now, answered, answer);
        Ok(())
    }
}

/// What other conductors ask and say.
impl FrontDoor {
    /// Another conductor follows. `None` if this one does not lead.
    pub fn on_follower(&self, who: ConductorId, attempts: &[Declared]) -> Option<Following> {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        let Role::Leads { term, over, settles } = &desk.role else { return None };
        let reign = Reign { term: *term, over: over.child_token(), settles: *settles };
        if let Some(before) = desk.streams.insert(who, reign.over.clone()) {
            // What it still has to say was said before what is declared now.
            before.cancel();
        }
        desk.followers.on_greeted(now, &mut self.cluster(), who, attempts);
        Some(Following { who, reign })
    }

    /// One of its messages, and what is answered. After the end of a reign nothing is.
    pub fn on_follower_message(&self, from: &Following, message: Message) -> Result<Option<Told>, InvalidMessage> {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        if from.reign.over.is_cancelled() {
            return Ok(None);
        }
        if let Message::Book(entry) = message {
            let (key, entry) = wire::booked(entry)?;
            self.cluster().book(now, key, &entry);
            if matches!(entry, BookEntry::Ended | BookEntry::Finished { .. }) {
                desk.followers.on_ended(from.who, key);
            }
            return Ok(None);
        }
        let (charged, hashes) = match &message {
            Message::Place(question) => {
                let counts = !question.accepted && !question.bypass_cache;
                let hashes = counts.then(|| hashes_from_bytes("block_hashes", &question.block_hashes)).transpose()?;
                (Some(key(question.key.clone())?), hashes)
            }
            Message::Move(question) => (Some(key(question.moved.clone())?), None),
            _ => (None, None),
        };
        if let Some(key) = charged {
            desk.followers.on_charged(from.who, key);
        }
        let (key, answer) = self.answer_to(now, message)?;
        if matches!(answer, Answer::Moved(None)) {
            // Nothing was charged, and no end follows.
            desk.followers.on_ended(from.who, key);
        }
        if let (Some(hashes), Answer::Placed(decided)) = (hashes, &answer)
            && decided.placed.is_ok()
        {
            self.hot_prefixes().observe(now, &hashes);
        }
        Ok(Some(to_wire(key, answer)))
    }

    /// Decides what is asked, in this conductor's books.
    fn answer_to(&self, now: Instant, question: Message) -> Result<(RequestKey, Answer), InvalidMessage> {
        match question {
            Message::Place(question) => {
                let question = wire::PlaceQuestion::try_from(question)?;
                let wanted = question.request();
                Ok((wanted.key, Answer::Placed(Box::new(self.decide(&wanted)))))
            }
            Message::Redirect(question) => {
                let (key, from) = (key(question.key)?, node_id("from", &question.from)?);
                Ok((key, Answer::Redirected(self.redirect(now, key, &from))))
            }
            Message::Move(question) => {
                let (keys, tokens, exclude) = wire::move_question(question)?;
                Ok((keys.1, Answer::Moved(self.move_to(now, keys, tokens, &exclude))))
            }
            Message::Explain(question) => {
                let question = wire::PlaceQuestion::try_from(question)?;
                let wanted = question.request();
                Ok((wanted.key, self.explained(now, &wanted)))
            }
            Message::Greet(_) | Message::Book(_) => {
                Err(InvalidMessage { field: "message", found: "no question".to_owned() })
            }
        }
    }

    /// Another conductor's stream is over.
    pub fn on_follower_gone(&self, gone: &Following) {
        let mut desk = self.desk.lock();
        let now = self.clock.now();
        if !gone.reign.over.is_cancelled() {
            desk.streams.remove(&gone.who);
            desk.followers.on_gone(now, gone.who);
        }
    }
}

/// An answer as it is told to the conductor that asked.
fn to_wire(asked: RequestKey, answer: Answer) -> Told {
    let key = Some(asked.into());
    match answer {
        Answer::Placed(decided) => Told::Placed(v1::PlaceAnswer {
            key,
            answer: Some(wire::answer_to_wire(&decided.placed)),
            explanation: match decided.grounds {
                Grounds::Own(explanation) => Some(explain::response(0, &explanation)),
                Grounds::Told(explanation) => Some(*explanation),
                Grounds::NoLeader => None,
            },
        }),
        Answer::Redirected(to) => Told::Redirected(v1::RedirectAnswer { key, decode: to.as_ref().map(Into::into) }),
        Answer::Moved(to) => Told::Moved(wire::move_to_wire(asked, to.as_ref())),
        Answer::Explained(explanation) => {
            Told::Explained(v1::ExplainAnswer { key, explanation: explanation.map(|explanation| *explanation) })
        }
    }
}
