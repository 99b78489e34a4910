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
    BlockHash, ConductorId, Declared, DecodeTarget, ErrorKind, FromLeader, MigrationQuestion, NodeId, PlaceQuestion,
    Question, RequestKey, ToLeader,
};

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
    /// This conductor does not lead any more.
    ReignOver {
        /// Its last term.
        term: u64,
    },
}

/// What a later term that was heard of means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaterTerm {
    /// It is known.
    Known,
    /// This conductor leads without having been elected, and goes on in that term.
    Adopted,
    /// No conductor leads until the later leader is found.
    LeaderLost {
        /// The term that this conductor knew.
        known: u64,
    },
}

/// A leader that another one has followed greets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a leader of term {term} greets, but one of term {latest} was heard of")]
pub struct StaleLeader {
    term: u64,
    latest: u64,
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
}

/// See the module's text. The cluster's ledger is the caller's; `random` decides ties.
#[derive(Debug)]
pub struct Desk<E> {
    id: ConductorId,
    /// There are no elections: this conductor leads in whatever term nodes know of.
    alone: bool,
    role: Role,
    /// Of the last leader. What was placed in earlier terms the next leader is told: jobs are of
    /// this one.
    term: u64,
    /// The latest term that was heard of.
    latest: u64,
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
            latest: 0,
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

    /// The latest term that was heard of, from nodes too.
    pub fn latest(&self) -> u64 {
        self.latest
    }

    /// Whether there is a leader that places: this conductor, or one that has greeted.
    pub fn has_leader(&self) -> bool {
        matches!(self.role, Role::Leads { .. } | Role::Follows { greeted: true, .. })
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
        self.role == Role::Leads { settles: None }
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
        self.waiting.insert(question.key(), Waiting { question: question.clone(), since: now });
        self.tell(ToLeader::Ask(question));
        None
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
    /// nothing is placed without it. `false`: a later term was heard of. No conductor leads until
    /// this one is elected in a later one yet.
    pub fn on_elected(
        &mut self,
        now: Instant,
        term: u64,
        settle: Duration,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> bool {
        self.end_term(now, cluster);
        self.alone = false;
        if term < self.latest {
            self.role = Role::Leaderless;
            return false;
        }
        self.term = term;
        self.latest = term;
        self.role = Role::Leads { settles: Some(now + settle) };
        self.placed.declared(now).iter().for_each(|declared| cluster.declare(now, declared));
        self.settle(now, cluster, random);
        true
    }

    /// There are no elections: this conductor leads, in whatever term nodes have heard of.
    pub fn on_alone(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.on_elected(now, self.latest, Duration::ZERO, cluster, random);
        self.alone = true;
    }

    /// Another conductor leads from now on, and is told all from the beginning.
    pub fn on_follows(&mut self, now: Instant, cluster: &mut Cluster) -> LinkId {
        self.end_term(now, cluster);
        let link = LinkId(self.begin());
        self.role = Role::Follows { link, greeted: false };
        let attempts = self.placed.declared(now);
        self.tell(ToLeader::Greet { conductor: self.id, latest_term: self.latest, attempts });
        let asked: Vec<_> = self.waiting.values().map(|waiting| waiting.question.clone()).collect();
        asked.into_iter().for_each(|question| self.tell(ToLeader::Ask(question)));
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

    /// A node has heard of a leader of that term. If it is a later one than this conductor knows
    /// of, no conductor leads here until it is found.
    pub fn on_later_term(&mut self, now: Instant, term: u64, cluster: &mut Cluster) -> LaterTerm {
        self.latest = self.latest.max(term);
        if term <= self.term || self.role == Role::Leaderless {
            return LaterTerm::Known;
        }
        let known = self.term;
        if self.alone {
            self.term = term;
            return LaterTerm::Adopted;
        }
        self.end_term(now, cluster);
        self.role = Role::Leaderless;
        LaterTerm::LeaderLost { known }
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
        if self.leads() {
            self.settle(now, cluster, random);
            self.followers.on_tick(now, cluster);
        } else {
            // A leader answers at once, unless it hangs or is unreachable.
            self.refuse_patient(now);
        }
    }

    /// Who declares does so at once: what waited for it is placed.
    fn settle(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        let Role::Leads { settles } = &mut self.role else { return };
        if settles.take_if(|at| *at <= now).is_none() {
            return;
        }
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
    pub fn on_told(&mut self, now: Instant, link: LinkId, told: FromLeader<E>) -> Result<(), StaleLeader> {
        if self.link() != Some(link) {
            return Ok(());
        }
        let grounds =
            |why: Option<E>| why.map_or(DecisionReasons::NoLeader, |why| DecisionReasons::FromLeader(Box::new(why)));
        let (key, answer) = match told {
            FromLeader::Greeted { term } if term < self.latest => {
                return Err(StaleLeader { term, latest: self.latest });
            }
            FromLeader::Greeted { term } => {
                self.term = term;
                self.latest = term;
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
    /// Another conductor follows, which has heard of leaders up to a term. `None` if this one does
    /// not lead, or not in a term that is as late: it is elected in a later one first. Nodes may
    /// not know of that term, and the follower would take no earlier one.
    pub fn on_follower(
        &mut self,
        now: Instant,
        who: ConductorId,
        latest: u64,
        attempts: &[Declared],
        cluster: &mut Cluster,
    ) -> Option<Following> {
        self.on_later_term(now, latest, cluster);
        let Role::Leads { settles } = self.role else { return None };
        if !self.followers.on_greeted(now, cluster, who, attempts) {
            return None;
        }
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
    use crate::cluster::tests::{cluster, key, request};
    use crate::placement::PlacementKind;

    const SECOND: Duration = Duration::from_secs(1);

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
        assert!(desk.on_elected(now, 5, SECOND, &mut cluster, &mut || 0));
        assert!(effects(&mut desk).is_empty(), "others may declare what they have");
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
        assert!(effects(&mut desk).is_empty() && cluster.placed() == 0);
    }

    #[test]
    fn leader_is_elected_again_if_a_follower_knows_a_later_term() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        assert!(desk.on_follower(now, ConductorId(2), 9, &[], &mut cluster).is_none());
        assert!(!desk.leads() && desk.latest() == 9);
        assert!(!desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0), "that term is over");
        assert!(desk.on_elected(now, 10, Duration::ZERO, &mut cluster, &mut || 0));
        let following = desk.on_follower(now, ConductorId(2), 9, &[], &mut cluster).unwrap();
        assert_eq!(following.term, 10);
    }

    #[test]
    fn conductor_without_elections_adopts_later_term_of_its_nodes() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_later_term(now, 7, &mut cluster);
        desk.on_alone(now, &mut cluster, &mut || 0);
        assert_eq!((desk.leads(), desk.term()), (true, 7), "a node said so before it began to lead");
        for term in [9, 12] {
            assert_eq!(desk.on_later_term(now, term, &mut cluster), LaterTerm::Adopted);
            assert_eq!((desk.leads(), desk.term()), (true, term), "nodes differ in what they have heard of");
        }
    }

    #[test]
    fn follower_cannot_change_attempts_of_others() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0);
        let follow = |desk: &mut Desk<()>, cluster: &mut Cluster, id, attempts: &[Declared]| {
            desk.on_follower(now, ConductorId(id), 5, attempts, cluster).unwrap()
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
    fn followers_are_bounded_and_those_that_went_away_make_room() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
        let streams: Vec<_> =
            (2..66).map(|id| desk.on_follower(now, ConductorId(id), 5, &[], &mut cluster).unwrap()).collect();
        assert!(desk.on_follower(now, ConductorId(99), 5, &[], &mut cluster).is_none());
        assert!(desk.on_follower(now, ConductorId(3), 5, &[], &mut cluster).is_some(), "it is known");
        desk.on_follower_gone(now, &streams[4]);
        assert!(desk.on_follower(now, ConductorId(99), 5, &[], &mut cluster).is_some());
        assert_eq!(desk.followers(), 64);
    }

    #[test]
    fn leader_counts_only_after_its_greeting() {
        let (mut desk, mut cluster, now) = desk(1);
        let link = desk.on_follows(now, &mut cluster);
        assert!(!desk.has_leader(), "it may hang");
        desk.on_told(now, link, FromLeader::Greeted { term: 3 }).unwrap();
        assert!(desk.has_leader());
        desk.on_link_lost(link);
        assert!(!desk.has_leader());
    }

    #[test]
    fn leader_of_earlier_term_is_not_followed() {
        let (mut desk, mut cluster, now) = desk(1);
        desk.on_later_term(now, 9, &mut cluster);
        let link = desk.on_follows(now, &mut cluster);
        assert!(desk.on_told(now, link, FromLeader::Greeted { term: 8 }).is_err());
        desk.on_told(now, link, FromLeader::Greeted { term: 9 }).unwrap();
        assert_eq!(desk.term(), 9);
    }
}
