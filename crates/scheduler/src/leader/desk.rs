//! Where the questions of requests go: to this conductor's own ledger while it leads, to the leader
//! while another one does. While no conductor leads, they wait.
//!
//! **Invariant**: the conductor that answers hears of an attempt in the order in which things
//! happened to it. So what is said to a leader begins with all that it has to know, and effects are
//! carried out in their order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, ConductorId, Declared, DecodeTarget, ErrorKind, FromLeader, MigrationQuestion, NodeId, NodeStart,
    PlaceQuestion, Question, RequestKey, ToLeader,
};

use super::term::Denials;
use super::{Followers, Placed};
use crate::cluster::{Cluster, Explanation};
use crate::placement::{PlacementRequest, Refusal};
use crate::request::{Assignment, LedgerEntry, MigrationAssignment};

/// How long a question waits while no conductor leads.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was decided on an attempt. `E` is how a leader explains it to others.
#[derive(Debug)]
pub struct Decided<E> {
    /// When it was decided. What is lost later is lost to the attempt.
    pub at: Instant,
    /// Where it goes, or why nowhere.
    pub placed: Result<Assignment, Refusal>,
    /// The grounds.
    pub grounds: DecisionReasons<E>,
}

/// Why it was decided so.
#[derive(Debug)]
pub enum DecisionReasons<E> {
    /// This conductor decided.
    Own(Box<Explanation>),
    /// The leader did, and says why.
    FromLeader(Box<E>),
    /// No conductor did.
    NoLeader,
}

/// An answer.
#[derive(Debug)]
pub enum Answer<E> {
    /// To a question for nodes.
    Placed(Box<Decided<E>>),
    /// To a question for another decode node that grants.
    Reselected(Option<DecodeTarget>),
    /// To a question for another decode node that goes on.
    Migrated(Option<MigrationAssignment>),
    /// What would be decided, and why.
    Explained(DecisionReasons<E>),
}

/// A stream of this conductor to a leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkId(u64);

/// A stream of a conductor that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

/// A conductor that follows, while its stream lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Following {
    /// The conductor.
    pub who: ConductorId,
    /// Its stream.
    pub stream: StreamId,
    /// The term in which this one leads.
    pub term: u64,
    /// What it asks is to be read from then on.
    pub settles: Option<Instant>,
}

/// What the shell carries out, in order.
#[derive(Debug)]
pub enum DeskEffect<E> {
    /// Tell the leader. If it does not keep up: [`Desk::on_link_lost`].
    Tell(LinkId, ToLeader),
    /// The answer to a question of one of this conductor's requests, which may be over.
    Answer(RequestKey, Answer<E>),
    /// A conductor that followed is told no more: the term is over, or it has another stream.
    EndStream(StreamId),
    /// A prefix that was asked for counts among the hot ones.
    Observe(Arc<[BlockHash]>),
    /// Nodes are told whose orders they get: the leader's of this term.
    NameLeader {
        /// As etcd says, or this conductor's own.
        term: u64,
    },
    /// A node has told of a term that is not the leader's, as etcd says.
    DenyTerm {
        /// The node.
        node: NodeId,
        /// What it told of.
        term: u64,
    },
    /// This conductor does not lead any more.
    ReignOver {
        /// Its last term.
        term: u64,
    },
}

/// A leader that is followed greets with another term than its key has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a leader of term {term} greets, but etcd names one of term {named}")]
pub struct OtherTerm {
    term: u64,
    named: u64,
}

/// A term that a node has told of, later than the one that is known here. Until etcd says whose it
/// is, nothing is placed: the node would refuse it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Heard {
    term: u64,
    /// Counts what is heard, of all nodes.
    number: u64,
}

/// Who leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// No conductor, as far as is known.
    Leaderless,
    /// Another conductor, which is told in this way. Until it greets, it may hang, or not lead any
    /// more.
    Follows { link: LinkId, greeted: bool },
    /// This one. Until then nothing is placed: the others declare what they have.
    Leads { settles: Option<Instant> },
}

#[derive(Debug)]
struct Waiting {
    /// As it is asked, and asked again of the next leader.
    question: Question,
    since: Instant,
    /// The leader that is followed was asked.
    is_told: bool,
}

/// See the module's text. The cluster's ledger is the caller's; `random` decides ties.
#[derive(Debug)]
pub struct Desk<E> {
    id: ConductorId,
    /// There are no elections: this conductor leads in term 0, whatever nodes tell of.
    alone: bool,
    role: Role,
    /// Of the last leader, by its key. What was placed in earlier terms the next leader is told:
    /// jobs are of this one.
    term: u64,
    /// By node: the first term that etcd is asked about, and the last one since.
    heard: BTreeMap<NodeStart, Vec<Heard>>,
    /// How often something was heard.
    heard_so_far: u64,
    /// What etcd does not name, of all nodes.
    denials: Denials,
    /// So many terms were denied that what nodes tell of is in no doubt.
    is_sure: bool,
    /// What is charged for this conductor's requests, wherever.
    placed: Placed,
    /// Questions that are not answered, by the attempt that they name.
    waiting: BTreeMap<RequestKey, Waiting>,
    followers: Followers,
    /// Their streams: a later greeting ends an earlier one.
    streams: BTreeMap<ConductorId, StreamId>,
    /// Links and streams so far.
    begun: u64,
    effects: VecDeque<DeskEffect<E>>,
}

impl<E> Desk<E> {
    /// Of a conductor that neither leads nor follows.
    pub fn new(id: ConductorId) -> Self {
        Self {
            id,
            alone: false,
            role: Role::Leaderless,
            term: 0,
            heard: BTreeMap::new(),
            heard_so_far: 0,
            denials: Denials::default(),
            is_sure: false,
            placed: Placed::default(),
            waiting: BTreeMap::new(),
            followers: Followers::default(),
            streams: BTreeMap::new(),
            begun: 0,
            effects: VecDeque::new(),
        }
    }

    /// What to do next; to be called until `None` after each event.
    pub fn poll_effect(&mut self) -> Option<DeskEffect<E>> {
        self.effects.pop_front()
    }

    /// Whether this conductor leads.
    pub fn leads(&self) -> bool {
        matches!(self.role, Role::Leads { .. })
    }

    /// Whether this conductor leads because it was elected.
    pub fn is_elected(&self) -> bool {
        self.leads() && !self.alone
    }

    /// The term of the leader, or of the last one.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Whether there is a leader that places: this conductor, or one that has greeted.
    pub fn has_leader(&self) -> bool {
        self.is_certain() && matches!(self.role, Role::Leads { .. } | Role::Follows { greeted: true, .. })
    }

    /// Whether no node tells of a later leader than this conductor knows, or etcd has named none
    /// again and again.
    pub fn is_certain(&self) -> bool {
        self.heard.is_empty() || self.is_sure
    }

    /// The stream to the leader that is followed.
    pub fn link(&self) -> Option<LinkId> {
        if let Role::Follows { link, .. } = self.role { Some(link) } else { None }
    }

    /// Questions that are not answered.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What is charged for this conductor's requests.
    pub fn placed(&self) -> &Placed {
        &self.placed
    }

    /// Conductors that follow this one.
    pub fn followers(&self) -> usize {
        self.followers.len()
    }

    fn decides(&self) -> bool {
        self.is_certain() && self.role == Role::Leads { settles: None }
    }

    fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    fn tell(&mut self, message: ToLeader) {
        if let Role::Follows { link, .. } = self.role {
            self.effects.push_back(DeskEffect::Tell(link, message));
        }
    }
}

/// What requests ask and say. `None`: the answer comes as an effect.
impl<E> Desk<E> {
    /// Asks for nodes, and charges them.
    pub fn on_ask_for_nodes(
        &mut self,
        now: Instant,
        wanted: &PlacementRequest<'_>,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<Answer<E>> {
        self.settle(now, cluster, random);
        if !self.decides() {
            return self.ask(now, Question::Place(wanted.into()));
        }
        let decided = decide(now, wanted, cluster, random);
        if let Ok(to) = &decided.placed {
            self.placed.on_placed(now, wanted, to);
        }
        Some(Answer::Placed(Box::new(decided)))
    }

    /// Asks what would be decided now. Nothing is charged.
    pub fn on_ask_why(
        &mut self,
        now: Instant,
        wanted: &PlacementRequest<'_>,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<Answer<E>> {
        self.settle(now, cluster, random);
        if !self.decides() {
            return self.ask(now, Question::Explain(wanted.into()));
        }
        Some(Answer::Explained(DecisionReasons::Own(Box::new(cluster.explain(now, wanted, random)))))
    }

    /// Asks for another decode node that grants what this one refused.
    pub fn on_ask_for_other(
        &mut self,
        now: Instant,
        key: RequestKey,
        from: &NodeId,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<Answer<E>> {
        self.settle(now, cluster, random);
        if !self.decides() {
            return self.ask(now, Question::Reselect { key, from: from.clone() });
        }
        let to = reselect(now, key, from, cluster);
        if let Some(to) = &to {
            self.placed.on_reselected(key, to);
        }
        Some(Answer::Reselected(to))
    }

    /// Asks for another decode node that goes on with an attempt, as another one.
    pub fn on_ask_for_migration(
        &mut self,
        now: Instant,
        question: MigrationQuestion,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<Answer<E>> {
        self.settle(now, cluster, random);
        if !self.decides() {
            return self.ask(now, Question::Migrate(question));
        }
        let to = migration_target(now, &question, cluster);
        if let Some(to) = &to {
            self.placed.on_migrated(now, &question, to);
        }
        Some(Answer::Migrated(to))
    }

    /// Enters what happened to an attempt into the ledger.
    pub fn on_ledger_update(&mut self, now: Instant, key: RequestKey, entry: &LedgerEntry, cluster: &mut Cluster) {
        self.placed.on_ledger_update(now, key, entry);
        if matches!(entry, LedgerEntry::Ended) {
            // Whatever it asked, no request waits for the answer.
            self.waiting.remove(&key);
        }
        match self.role {
            Role::Leads { .. } => cluster.update_ledger(now, key, entry),
            Role::Follows { .. } => self.tell(ToLeader::LedgerUpdate(key, entry.clone())),
            Role::Leaderless => {}
        }
    }

    fn ask(&mut self, now: Instant, question: Question) -> Option<Answer<E>> {
        self.waiting.insert(question.key(), Waiting { question, since: now, is_told: false });
        self.tell_waiting();
        None
    }

    /// Asks the leader that is followed what it was not asked yet.
    fn tell_waiting(&mut self) {
        let Role::Follows { link, .. } = self.role else { return };
        if !self.is_certain() {
            return;
        }
        for waiting in self.waiting.values_mut().filter(|waiting| !waiting.is_told) {
            waiting.is_told = true;
            self.effects.push_back(DeskEffect::Tell(link, ToLeader::Ask(waiting.question.clone())));
        }
    }

    fn answer(&mut self, now: Instant, key: RequestKey, answer: Answer<E>) {
        let Some(Waiting { question, .. }) = self.waiting.remove(&key) else { return };
        match (&answer, &question) {
            (Answer::Placed(decided), Question::Place(question)) => {
                if let Ok(to) = &decided.placed {
                    self.placed.on_placed(now, &question.into(), to);
                }
            }
            (Answer::Reselected(Some(to)), _) => self.placed.on_reselected(key, to),
            (Answer::Migrated(Some(to)), Question::Migrate(question)) => {
                self.placed.on_migrated(now, question, to);
            }
            _ => {}
        }
        self.effects.push_back(DeskEffect::Answer(key, answer));
    }
}

/// Who leads.
impl<E> Desk<E> {
    /// This conductor leads from now on. What others have they declare; until `settle` has passed,
    /// nothing is placed without it.
    pub fn on_elected(
        &mut self,
        now: Instant,
        term: u64,
        settle: Duration,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) {
        self.end_term(now, cluster);
        self.alone = false;
        self.on_term(term);
        self.role = Role::Leads { settles: Some(now + settle) };
        self.placed.declared(now).iter().for_each(|declared| cluster.declare(now, declared));
        self.settle(now, cluster, random);
    }

    /// There are no elections: this conductor leads, in term 0.
    pub fn on_alone(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.on_elected(now, 0, Duration::ZERO, cluster, random);
        self.alone = true;
    }

    /// Another conductor leads from now on, in the term that its key has.
    pub fn on_other_leads(&mut self, now: Instant, term: u64, cluster: &mut Cluster) {
        self.end_term(now, cluster);
        self.alone = false;
        self.role = Role::Leaderless;
        self.on_term(term);
    }

    fn on_term(&mut self, term: u64) {
        self.term = term;
        self.denials = Denials::default();
        self.is_sure = false;
        self.keep_heard(|heard| heard.term > term);
        self.effects.push_back(DeskEffect::NameLeader { term });
    }

    fn keep_heard(&mut self, keeps: impl Fn(&Heard) -> bool) {
        self.heard.values_mut().for_each(|heard| heard.retain(&keeps));
        self.heard.retain(|_, heard| !heard.is_empty());
    }

    /// The conductor that leads is reached, and is told all from the beginning.
    pub fn on_follows(&mut self, now: Instant, cluster: &mut Cluster) -> LinkId {
        self.end_term(now, cluster);
        let link = LinkId(self.begin());
        self.role = Role::Follows { link, greeted: false };
        let attempts = self.placed.declared(now);
        self.tell(ToLeader::Greet { conductor: self.id, attempts });
        self.waiting.values_mut().for_each(|waiting| waiting.is_told = false);
        self.tell_waiting();
        link
    }

    /// A stream to a leader is over, or it does not keep up and is told all anew.
    pub fn on_link_lost(&mut self, link: LinkId) {
        if self.link() == Some(link) {
            self.role = Role::Leaderless;
        }
    }

    /// This conductor does not lead any more, and no other is known to.
    pub fn on_step_down(&mut self, now: Instant, cluster: &mut Cluster) {
        if self.leads() {
            self.end_term(now, cluster);
            self.role = Role::Leaderless;
        }
    }

    /// A node tells of a leader of that term, as another conductor has named it; 0: of none that is
    /// later than what this one has named. It is a claim: nothing is placed until etcd was asked.
    /// Gives its number, if etcd is to be.
    pub fn on_heard(
        &mut self,
        now: Instant,
        node: &NodeStart,
        term: u64,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<u64> {
        if self.alone || term <= self.term {
            if self.heard.remove(node).is_some() {
                self.go_on(now, cluster, random);
            }
            return None;
        }
        self.is_sure = self.denials.is_sure(now);
        self.heard_so_far += 1;
        let heard = self.heard.entry(node.clone()).or_default();
        // The first one stays: etcd's answer to it would always be too old for the last one.
        heard.truncate(1);
        heard.push(Heard { term, number: self.heard_so_far });
        Some(self.heard_so_far)
    }

    /// Etcd has named the leader of that term. It was asked after everything up to a number was
    /// heard: what nodes told of until then is true or false.
    pub fn on_etcd_named(
        &mut self,
        now: Instant,
        term: u64,
        heard: u64,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) {
        // What is true is taken with its leader.
        let is_false = |of: &Heard| of.number <= heard && of.term != term;
        let told = self.heard.iter().flat_map(|(node, told)| told.iter().map(move |told| (node, told)));
        let denied = told.filter(|(_, of)| is_false(of));
        let denied: Vec<_> =
            denied.map(|(node, of)| DeskEffect::DenyTerm { node: node.node.clone(), term: of.term }).collect();
        if !denied.is_empty() {
            self.denials.on_denied(now);
        }
        self.effects.extend(denied);
        self.keep_heard(|of| !is_false(of));
        self.is_sure = term == self.term && self.denials.is_sure(now);
        self.go_on(now, cluster, random);
    }

    /// What waited is placed, or asked of the leader, if nothing is in doubt any more.
    fn go_on(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.tell_waiting();
        if self.decides() {
            self.place_waiting(now, cluster, random);
        }
    }

    /// The ledger of a term ends with it.
    fn end_term(&mut self, now: Instant, cluster: &mut Cluster) {
        if self.leads() {
            let streams = std::mem::take(&mut self.streams);
            self.effects.push_back(DeskEffect::ReignOver { term: self.term });
            self.effects.extend(streams.into_values().map(DeskEffect::EndStream));
            self.followers = Followers::default();
            cluster.forget_charges(now);
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.is_sure &= self.denials.is_sure(now);
        if self.leads() {
            self.settle(now, cluster, random);
            self.followers.on_tick(now, cluster);
        }
        if !self.leads() || !self.is_certain() {
            // A leader answers at once, unless it hangs, is unreachable or is in doubt.
            self.refuse_patient(now);
        }
    }

    /// Who declares does so at once: what waited for it is placed.
    fn settle(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        let Role::Leads { settles } = &mut self.role else { return };
        if settles.take_if(|at| *at <= now).is_some() {
            self.go_on(now, cluster, random);
        }
    }

    fn place_waiting(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        let asked: Vec<_> = self.waiting.values().map(|waiting| waiting.question.clone()).collect();
        for question in asked {
            let answer = answer_to(now, &question, cluster, random);
            self.answer(now, question.key(), answer);
        }
    }

    /// A question that has waited for long enough for a leader is refused.
    fn refuse_patient(&mut self, now: Instant) {
        let due = |waiting: &Waiting| now.saturating_duration_since(waiting.since) >= PATIENCE;
        let due: Vec<_> = self.waiting.iter().filter(|(_, waiting)| due(waiting)).map(|(key, _)| *key).collect();
        for key in due {
            let Some(waiting) = self.waiting.get(&key) else { continue };
            let answer = match waiting.question {
                Question::Place(_) => {
                    let kind = ErrorKind::Unavailable;
                    let retry_after = Some(Duration::from_secs(1));
                    let message = format!("no conductor has led for {} s: nothing is placed", PATIENCE.as_secs());
                    let placed = Err(Refusal { kind, message, retry_after, hold: None, objective: None });
                    Answer::Placed(Box::new(Decided { at: now, placed, grounds: DecisionReasons::NoLeader }))
                }
                Question::Reselect { .. } => Answer::Reselected(None),
                Question::Explain(_) => Answer::Explained(DecisionReasons::NoLeader),
                Question::Migrate(_) => Answer::Migrated(None),
            };
            self.answer(now, key, answer);
        }
    }

    /// The leader said something. What comes from one that is followed no more is not heard: it is
    /// asked of the next one.
    pub fn on_told(&mut self, now: Instant, link: LinkId, told: FromLeader<E>) -> Result<(), OtherTerm> {
        if self.link() != Some(link) {
            return Ok(());
        }
        let grounds =
            |why: Option<E>| why.map_or(DecisionReasons::NoLeader, |why| DecisionReasons::FromLeader(Box::new(why)));
        let (key, answer) = match told {
            FromLeader::Greeted { term } if term != self.term => return Err(OtherTerm { term, named: self.term }),
            FromLeader::Greeted { .. } => {
                self.role = Role::Follows { link, greeted: true };
                return Ok(());
            }
            FromLeader::Placed { key, placed, why } => {
                (key, Answer::Placed(Box::new(Decided { at: now, placed: *placed, grounds: grounds(why) })))
            }
            FromLeader::Reselected(key, to) => (key, Answer::Reselected(to)),
            FromLeader::Migrated(key, to) => (key, Answer::Migrated(to)),
            FromLeader::Explained(key, why) => (key, Answer::Explained(grounds(why))),
        };
        self.answer(now, key, answer);
        Ok(())
    }
}

/// What other conductors ask and say.
impl<E> Desk<E> {
    /// Another conductor follows. `None` if this one does not lead.
    pub fn on_follower(
        &mut self,
        now: Instant,
        who: ConductorId,
        attempts: &[Declared],
        cluster: &mut Cluster,
    ) -> Option<Following> {
        let Role::Leads { settles } = self.role else { return None };
        if !self.followers.on_greeted(now, cluster, who, attempts) {
            return None;
        }
        // It made room for this one.
        let forgotten = self.streams.extract_if(.., |who, _| !self.followers.knows(*who));
        self.effects.extend(forgotten.map(|(_, stream)| DeskEffect::EndStream(stream)));
        let stream = StreamId(self.begin());
        if let Some(before) = self.streams.insert(who, stream) {
            // What it still has to say was said before what is declared now.
            self.effects.push_back(DeskEffect::EndStream(before));
        }
        Some(Following { who, stream, term: self.term, settles })
    }

    fn is_current(&self, from: &Following) -> bool {
        self.streams.get(&from.who) == Some(&from.stream)
    }

    /// It asks. After the end of a term nothing is answered.
    pub fn on_follower_asked(
        &mut self,
        now: Instant,
        from: &Following,
        question: &Question,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<Answer<E>> {
        if !self.is_current(from) {
            return None;
        }
        // Of another conductor's attempts it has nothing to ask.
        if question.names().into_iter().any(|key| cluster.is_of_other(from.who, key)) {
            return None;
        }
        if let Question::Place(_) = question
            && let Some(refusal) = cluster.claims_refused(now, from.who)
        {
            let grounds = DecisionReasons::NoLeader;
            return Some(Answer::Placed(Box::new(Decided { at: now, placed: Err(refusal), grounds })));
        }
        let answer = answer_to(now, question, cluster, random);
        cluster.claim(from.who, question.key());
        match (&answer, question) {
            (Answer::Placed(decided), Question::Place(of))
                if decided.placed.is_ok() && !of.is_admitted && !of.bypass_cache =>
            {
                self.effects.push_back(DeskEffect::Observe(Arc::clone(&of.block_hashes)));
            }
            _ => {}
        }
        Some(answer)
    }

    /// Something happened to one of its attempts.
    pub fn on_follower_ledger_update(
        &mut self,
        now: Instant,
        from: &Following,
        key: RequestKey,
        entry: &LedgerEntry,
        cluster: &mut Cluster,
    ) {
        if !self.is_current(from) {
            return;
        }
        if !cluster.is_of_other(from.who, key) {
            cluster.update_ledger(now, key, entry);
        }
    }

    /// Its stream is over.
    pub fn on_follower_gone(&mut self, now: Instant, gone: &Following) {
        if self.is_current(gone) {
            self.streams.remove(&gone.who);
            self.followers.on_gone(now, gone.who);
        }
    }
}

/// Decides what is asked, in this conductor's ledger.
fn answer_to<E>(
    now: Instant,
    question: &Question,
    cluster: &mut Cluster,
    random: &mut impl FnMut() -> u64,
) -> Answer<E> {
    match question {
        Question::Place(question) => Answer::Placed(Box::new(decide(now, &question.into(), cluster, random))),
        Question::Reselect { key, from } => Answer::Reselected(reselect(now, *key, from, cluster)),
        Question::Migrate(question) => Answer::Migrated(migration_target(now, question, cluster)),
        Question::Explain(question) => {
            Answer::Explained(DecisionReasons::Own(Box::new(cluster.explain(now, &question.into(), random))))
        }
    }
}

fn decide<E>(
    now: Instant,
    wanted: &PlacementRequest<'_>,
    cluster: &mut Cluster,
    random: &mut impl FnMut() -> u64,
) -> Decided<E> {
    let explanation = Box::new(cluster.place_explained(now, wanted, random));
    let placed = explanation.decision.clone();
    let placed = placed.map(|placement| cluster.assign(placement, wanted.slo.tbt));
    Decided { at: now, placed, grounds: DecisionReasons::Own(explanation) }
}

fn reselect(now: Instant, key: RequestKey, from: &NodeId, cluster: &mut Cluster) -> Option<DecodeTarget> {
    let other = cluster.reselect(now, key);
    cluster.decode_target(other.as_ref().unwrap_or(from))
}

fn migration_target(now: Instant, question: &MigrationQuestion, cluster: &mut Cluster) -> Option<MigrationAssignment> {
    let chosen = cluster.place_migration(now, question)?;
    let to = cluster.assign_migration(&chosen);
    if to.is_none() {
        cluster.on_ended(now, question.migrated);
    }
    to
}

impl From<&PlacementRequest<'_>> for PlaceQuestion {
    fn from(request: &PlacementRequest<'_>) -> Self {
        Self {
            key: request.key,
            prompt_tokens: request.prompt_tokens,
            block_hashes: request.block_hashes.into(),
            max_tokens: request.max_tokens,
            wants_decode: request.wants_decode,
            slo: request.slo,
            waited: request.waited,
            priority: request.priority,
            bypass_cache: request.bypass_cache,
            exclude: request.exclude.to_vec(),
            first_completion_nodes: request.first_completion_nodes.to_vec(),
            output_tokens: request.output_tokens,
            is_admitted: request.is_admitted,
        }
    }
}

impl<'a> From<&'a PlaceQuestion> for PlacementRequest<'a> {
    fn from(question: &'a PlaceQuestion) -> Self {
        Self {
            key: question.key,
            prompt_tokens: question.prompt_tokens,
            block_hashes: &question.block_hashes,
            max_tokens: question.max_tokens,
            wants_decode: question.wants_decode,
            slo: question.slo,
            waited: question.waited,
            // The leader's own setting.
            max_wait: None,
            priority: question.priority,
            bypass_cache: question.bypass_cache,
            exclude: &question.exclude,
            first_completion_nodes: &question.first_completion_nodes,
            output_tokens: question.output_tokens,
            is_admitted: question.is_admitted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::tests::{cluster, id, key, request};
    use crate::placement::PlacementKind;

    const SECOND: Duration = Duration::from_secs(1);

    fn start(node: &str) -> NodeStart {
        NodeStart { node: id(node), generation: baton_types::Generation(1) }
    }

    fn desk(id: u64) -> (Desk<()>, Cluster, Instant) {
        let now = Instant::now();
        (Desk::new(ConductorId(id)), cluster(now, PlacementKind::MinTotalDelay), now)
    }

    fn effects(desk: &mut Desk<()>) -> Vec<DeskEffect<()>> {
        std::iter::from_fn(|| desk.poll_effect()).collect()
    }

    #[test]
    fn placement_question_is_asked_of_each_leader_until_answered() {
        let (mut desk, mut cluster, now) = desk(1);
        assert!(desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0).is_none());
        assert!(effects(&mut desk).is_empty() && desk.waiting() == 1);
        desk.on_other_leads(now, 4, &mut cluster);
        assert!(matches!(&effects(&mut desk)[..], [DeskEffect::NameLeader { term: 4 }]));
        for _ in 0..2 {
            let link = desk.on_follows(now, &mut cluster);
            let told = effects(&mut desk);
            assert!(matches!(&told[..], [
                DeskEffect::Tell(a, ToLeader::Greet { .. }),
                DeskEffect::Tell(b, ToLeader::Ask(Question::Place(of))),
            ] if (*a, *b, of.key) == (link, link, key(1))));
            desk.on_link_lost(link);
            // What comes yet from a leader that is not followed any more is not heard.
            desk.on_told(now, link, FromLeader::Migrated(key(1), None)).unwrap();
        }
        desk.on_elected(now, 5, SECOND, &mut cluster, &mut || 0);
        let told = effects(&mut desk);
        assert!(matches!(&told[..], [DeskEffect::NameLeader { term: 5 }]), "others may declare what they have");
        desk.on_tick(now + SECOND, &mut cluster, &mut || 0);
        assert!(matches!(&effects(&mut desk)[..], [DeskEffect::Answer(of, Answer::Placed(_))] if *of == key(1)));
        assert_eq!((desk.waiting(), desk.placed().len(), cluster.placed()), (0, 1, 1));
    }

    #[test]
    fn placement_question_of_ended_attempt_is_not_answered() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0);
        desk.on_ledger_update(now, key(1), &LedgerEntry::Ended, &mut cluster);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        assert!(matches!(&effects(&mut desk)[..], [DeskEffect::NameLeader { .. }]) && cluster.placed() == 0);
    }

    fn asks(desk: &mut Desk<()>, n: u128, cluster: &mut Cluster, now: Instant) -> Option<Answer<()>> {
        desk.on_ask_for_nodes(now, &request(n, &[]), cluster, &mut || 0)
    }

    #[test]
    fn leader_places_nothing_while_a_node_tells_of_a_later_term_that_etcd_was_not_asked_about() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        for (n, term) in [6, u64::MAX - 1, u64::MAX].into_iter().enumerate() {
            let now = now + 10 * SECOND * n as u32;
            let number = desk.on_heard(now, &start("p0"), term, &mut cluster, &mut || 0).unwrap();
            desk.on_heard(now, &start("d0"), term, &mut cluster, &mut || 0).unwrap();
            assert!(asks(&mut desk, 2 * n as u128, &mut cluster, now).is_none() && !desk.has_leader());
            effects(&mut desk);
            desk.on_etcd_named(now, 5, number, &mut cluster, &mut || 0);
            let told = effects(&mut desk);
            assert!(matches!(&told[..], [DeskEffect::DenyTerm { node, term: of }] if *node == id("p0") && *of == term));
            assert!(!desk.has_leader(), "etcd was asked before d0 told of it");
            desk.on_etcd_named(now, 5, number + 1, &mut cluster, &mut || 0);
            let told = effects(&mut desk);
            assert!(
                matches!(&told[..], [DeskEffect::DenyTerm { node, .. }, DeskEffect::Answer(..)] if *node == id("d0"))
            );
            assert!(asks(&mut desk, 2 * n as u128 + 1, &mut cluster, now).is_some() && desk.term() == 5);
        }
    }

    #[test]
    fn end_of_an_earlier_start_of_a_node_takes_nothing_back_that_the_later_one_told() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        let later = NodeStart { generation: baton_types::Generation(2), ..start("p0") };
        desk.on_heard(now, &start("p0"), 9, &mut cluster, &mut || 0);
        desk.on_heard(now, &later, 9, &mut cluster, &mut || 0);
        desk.on_heard(now, &start("p0"), 0, &mut cluster, &mut || 0);
        assert!(!desk.is_certain(), "the later one still refuses");
        desk.on_heard(now, &later, 0, &mut cluster, &mut || 0);
        assert!(desk.is_certain());
    }

    #[test]
    fn false_terms_faster_than_etcd_can_be_asked_stop_no_placement() {
        let (mut desk, mut cluster, began) = desk(1);
        desk.on_elected(began, 5, Duration::ZERO, &mut cluster, &mut || 0);
        let step = Duration::from_millis(1);
        let mut stopped = Duration::ZERO;
        let mut asked = 0;
        // A thousand a second, of three nodes in turn and of starts that come and go. Etcd answers
        // to what was heard a tenth of a second before.
        for n in 0..10_000_u32 {
            let now = began + step * n;
            let node = NodeStart {
                generation: baton_types::Generation(u64::from(n / 50)),
                ..start(["p0", "p1", "d0"][n as usize % 3])
            };
            let number = desk.on_heard(now, &node, 1000 + u64::from(n), &mut cluster, &mut || 0).unwrap();
            if n % 100 == 0 {
                desk.on_etcd_named(now, 5, asked, &mut cluster, &mut || 0);
                desk.on_tick(now, &mut cluster, &mut || 0);
                asked = number;
            }
            if !desk.is_certain() {
                stopped += step;
            }
        }
        assert!(stopped < SECOND, "{stopped:?} of 10 s");
        // What etcd names then is true, however sure it was.
        let now = began + 10 * SECOND;
        desk.on_heard(now, &start("p0"), 1 << 40, &mut cluster, &mut || 0).unwrap();
        desk.on_etcd_named(now, 1 << 40, u64::MAX, &mut cluster, &mut || 0);
        assert!(!desk.is_certain() && asks(&mut desk, 1, &mut cluster, now).is_none());
    }

    #[test]
    fn later_term_is_in_doubt_until_it_is_taken_or_no_node_tells_of_it() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        let number = desk.on_heard(now, &start("p0"), 9, &mut cluster, &mut || 0).unwrap();
        desk.on_etcd_named(now, 9, number, &mut cluster, &mut || 0);
        assert!(asks(&mut desk, 1, &mut cluster, now).is_none(), "it is true");
        desk.on_other_leads(now, 9, &mut cluster);
        let link = desk.on_follows(now, &mut cluster);
        desk.on_told(now, link, FromLeader::Greeted { term: 9 }).unwrap();
        assert!(desk.has_leader());
        effects(&mut desk);
        // The session with the liar ends, or its node's does: etcd need not be there.
        desk.on_heard(now, &start("p0"), u64::MAX, &mut cluster, &mut || 0);
        assert!(asks(&mut desk, 2, &mut cluster, now).is_none() && effects(&mut desk).is_empty());
        assert_eq!(desk.on_heard(now, &start("p0"), 0, &mut cluster, &mut || 0), None);
        assert!(matches!(&effects(&mut desk)[..], [DeskEffect::Tell(_, ToLeader::Ask(of))] if of.key() == key(2)));
        assert!(desk.has_leader());
    }

    #[test]
    fn question_in_doubt_is_refused_after_ten_seconds() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        desk.on_heard(now, &start("p0"), 9, &mut cluster, &mut || 0);
        assert!(asks(&mut desk, 1, &mut cluster, now).is_none());
        effects(&mut desk);
        desk.on_tick(now + PATIENCE, &mut cluster, &mut || 0);
        assert!(matches!(&effects(&mut desk)[..], [DeskEffect::Answer(of, _)] if *of == key(1)));
    }

    #[test]
    fn conductor_without_elections_leads_in_term_0_whatever_nodes_tell_of() {
        let (mut desk, mut cluster, now) = desk(1);
        for term in [7, u64::MAX] {
            desk.on_heard(now, &start("p0"), term, &mut cluster, &mut || 0);
            desk.on_alone(now, &mut cluster, &mut || 0);
            assert_eq!(desk.on_heard(now, &start("p0"), term, &mut cluster, &mut || 0), None);
            assert_eq!((desk.leads(), desk.has_leader(), desk.term()), (true, true, 0));
            assert!(asks(&mut desk, term.into(), &mut cluster, now).is_some());
        }
    }

    #[test]
    fn follower_cannot_change_attempts_of_others() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0);
        let follow = |desk: &mut Desk<()>, cluster: &mut Cluster, id, attempts: &[Declared]| {
            desk.on_follower(now, ConductorId(id), attempts, cluster).unwrap()
        };
        let honest = follow(&mut desk, &mut cluster, 2, &[]);
        let place = |n| Question::Place((&request(n, &[])).into());
        let asked = desk.on_follower_asked(now, &honest, &place(2), &mut cluster, &mut || 0);
        assert!(matches!(asked, Some(Answer::Placed(_))));
        let own = desk.placed().declared(now);
        let liar = follow(&mut desk, &mut cluster, 3, &own);
        for n in [1, 2] {
            let migrate = |from, to| {
                let migrated = RequestKey { attempt: baton_types::Attempt(1), ..key(to) };
                Question::Migrate(MigrationQuestion { key: key(from), migrated, tokens: 8, exclude: Vec::new() })
            };
            let from = NodeId::new("d0").unwrap();
            for question in [place(n), Question::Reselect { key: key(n), from }, migrate(n, n), migrate(n, 9)] {
                assert!(desk.on_follower_asked(now, &liar, &question, &mut cluster, &mut || 0).is_none());
            }
            for entry in [LedgerEntry::FirstToken, LedgerEntry::Ended, LedgerEntry::Finished { output_tokens: 1 }] {
                desk.on_follower_ledger_update(now, &liar, key(n), &entry, &mut cluster);
            }
        }
        desk.on_follower_gone(now, &liar);
        desk.on_tick(now + 20 * SECOND, &mut cluster, &mut || 0);
        assert_eq!(cluster.placed(), 2);
    }

    #[test]
    fn followers_are_bounded_and_keep_no_other_out_unless_reports_show_what_they_placed() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        let follow = |desk: &mut Desk<()>, cluster: &mut Cluster, at: u64, id| {
            desk.on_follower(now + SECOND * at as u32 / 100, ConductorId(id), &[], cluster).unwrap()
        };
        let honest = follow(&mut desk, &mut cluster, 1, 2);
        let question = Question::Place((&request(1, &[])).into());
        assert!(desk.on_follower_asked(now, &honest, &question, &mut cluster, &mut || 0).is_some());
        for node in ["p0", "p1"] {
            let load = baton_types::Load { running: 1, ..Default::default() };
            cluster.on_load(now + SECOND, &NodeId::new(node).unwrap(), load);
        }
        cluster.on_tick(now + SECOND);
        assert!(cluster.is_proven(honest.who));
        let streams: Vec<_> = (3..66).map(|id| follow(&mut desk, &mut cluster, id, id)).collect();
        effects(&mut desk);
        // One that was restarted, beside 63 that place nothing.
        let restarted = follow(&mut desk, &mut cluster, 99, 99);
        assert!(matches!(&effects(&mut desk)[..], [DeskEffect::EndStream(first)] if *first == streams[0].stream));
        assert!(desk.is_current(&honest) && desk.is_current(&restarted) && !desk.is_current(&streams[0]));
        desk.on_follower_gone(now, &streams[4]);
        follow(&mut desk, &mut cluster, 100, 100);
        assert!(effects(&mut desk).is_empty(), "one that went away makes room first");
        assert_eq!(desk.followers(), 64);
    }

    #[test]
    fn leader_counts_only_after_its_greeting() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_other_leads(now, 3, &mut cluster);
        let link = desk.on_follows(now, &mut cluster);
        assert!(!desk.has_leader(), "it may hang");
        desk.on_told(now, link, FromLeader::Greeted { term: 3 }).unwrap();
        assert!(desk.has_leader());
        desk.on_link_lost(link);
        assert!(!desk.has_leader());
    }

    #[test]
    fn leader_is_followed_in_the_term_of_its_key_only() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_other_leads(now, 9, &mut cluster);
        let link = desk.on_follows(now, &mut cluster);
        for term in [0, 8, 10, u64::MAX] {
            assert_eq!(desk.on_told(now, link, FromLeader::Greeted { term }), Err(OtherTerm { term, named: 9 }));
            assert!(!desk.has_leader() && desk.term() == 9);
        }
        desk.on_told(now, link, FromLeader::Greeted { term: 9 }).unwrap();
        assert!(desk.has_leader());
    }
}
