//! Where the questions of requests go: to this conductor's own ledger while it leads, to the leader
//! while another one does. While no conductor leads, they wait.
//!
//! **Invariant**: the conductor that answers hears of an attempt in the order in which things
//! happened to it. So what is said to a leader begins with all that it has to know, and effects are
//! carried out in their order.

mod decide;
mod followers;
mod reign;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, ConductorId, DecodeTarget, MigrationQuestion, NodeId, NodeStart, Question, RequestKey, ToLeader,
};

use super::term::Denials;
use decide::{decide, migration_target, reselect};

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
