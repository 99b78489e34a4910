//! The desk of this conductor. `baton_scheduler::Desk` decides where questions go; this sends them
//! there and delivers the answers.
//!
//! **Invariant**: every question, every entry and every change of the leader goes through one lock,
//! and its effects are carried out under it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_runtime::random_u64;
use baton_scheduler::{Cluster, Declared, DeskEffect, LedgerEntry, LinkId, OtherTerm, PlacementRequest, StreamId};
use baton_types::{ConductorId, FromLeader, MigrationQuestion, NodeId, NodeStart, Question, RequestKey};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::frontend::Frontend;

/// Messages that may wait for the leader. One that is so far behind is left, and told everything
/// anew.
pub const QUEUED_MESSAGES: usize = 4096;

/// How long this conductor may be without a leader and still says that it is ready. It is half of
/// the time that a question waits for a leader.
const LEADERLESS: Duration = Duration::from_secs(5);

/// What was decided on an attempt.
pub type Decided = baton_scheduler::Decided<v1::ExplainResponse>;
/// Why it was decided so.
pub type DecisionReasons = baton_scheduler::DecisionReasons<v1::ExplainResponse>;
/// An answer.
pub type Answer = baton_scheduler::Answer<v1::ExplainResponse>;

/// What is said of the prefill and of the decode nodes, and of how many: `1 chosen, 3 not chosen, 2
/// left out: draining`.
pub fn verdicts(grounds: &DecisionReasons) -> (String, String) {
    match grounds {
        DecisionReasons::Own(explanation) => {
            (counted(explanation.prefill_verdicts()), counted(explanation.decode_verdicts()))
        }
        DecisionReasons::FromLeader(told) => {
            let rest = |rest: &[v1::VerdictCount]| {
                rest.iter().map(|of| (of.verdict.clone(), of.nodes as usize)).collect::<Vec<_>>()
            };
            let prefill = told.prefill.iter().map(|row| (row.verdict.clone(), 1)).chain(rest(&told.prefill_rest));
            let decode = told.decode.iter().map(|row| (row.verdict.clone(), 1)).chain(rest(&told.decode_rest));
            (counted(prefill), counted(decode))
        }
        DecisionReasons::NoLeader => (String::new(), String::new()),
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

/// When the answer comes.
#[derive(Debug)]
pub enum PendingAnswer {
    /// Here it is.
    Ready(Answer),
    /// It will come.
    Later(oneshot::Receiver<Answer>),
}

/// Whether a conductor leads.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LeaderState {
    NotYet,
    Now,
    Until(Instant),
}

struct Inner {
    core: baton_scheduler::Desk<v1::ExplainResponse>,
    led: LeaderState,
    /// It was logged that no conductor leads.
    said_leaderless: bool,
    /// The way to the leader.
    link: Option<(LinkId, mpsc::Sender<v1::FollowerMessage>)>,
    /// Who waits for answers.
    asked: BTreeMap<RequestKey, oneshot::Sender<Answer>>,
    /// Of conductors that follow.
    streams: BTreeMap<StreamId, CancellationToken>,
}

/// See the module's text.
pub struct Desk {
    inner: Mutex<Inner>,
    /// How often a node has told of a later term than is known: etcd is to be asked.
    heard: watch::Sender<u64>,
}

/// A stream of a conductor that follows.
#[derive(Debug, Clone)]
pub struct Following {
    /// Whose it is, and from when on it is read.
    pub of: baton_scheduler::Following,
    /// Cancelled at the end of the term, or when the conductor has greeted again.
    pub over: CancellationToken,
}

impl Desk {
    /// Of a conductor that neither leads nor follows.
    pub fn new(id: ConductorId) -> Self {
        let core = baton_scheduler::Desk::new(id);
        let asked = BTreeMap::new();
        let streams = BTreeMap::new();
        let inner = Inner { core, led: LeaderState::NotYet, said_leaderless: false, link: None, asked, streams };
        Self { inner: Mutex::new(inner), heard: watch::Sender::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The ledger checks itself; a panic in another request must not end all of them.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this conductor leads.
    pub fn leads(&self) -> bool {
        self.lock().core.leads()
    }

    /// Whether this conductor leads because it was elected.
    pub fn is_elected(&self) -> bool {
        self.lock().core.is_elected()
    }

    /// How often a node has told of a later term than is known, and each time that one does.
    pub fn heard(&self) -> watch::Receiver<u64> {
        self.heard.subscribe()
    }

    /// The term of the leader, or of the last one.
    pub fn term(&self) -> u64 {
        self.lock().core.term()
    }

    /// Whether a conductor leads.
    #[cfg(test)]
    pub fn has_leader(&self) -> bool {
        self.lock().core.has_leader()
    }

    /// Whether a conductor leads, or did a moment ago.
    pub fn is_led(&self, now: Instant) -> bool {
        match self.lock().led {
            LeaderState::NotYet => false,
            LeaderState::Now => true,
            LeaderState::Until(then) => now.saturating_duration_since(then) < LEADERLESS,
        }
    }
}

impl Inner {
    fn carry_out(&mut self, frontend: &Frontend) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                DeskEffect::Tell(link, message) => {
                    let is_told = |(of, to): &(LinkId, mpsc::Sender<_>)| {
                        *of == link && to.try_send(v1::FollowerMessage::from(&message)).is_ok()
                    };
                    if !self.link.as_ref().is_some_and(is_told) {
                        self.core.on_link_lost(link);
                    }
                }
                DeskEffect::Answer(key, answer) => {
                    if let Some(asked) = self.asked.remove(&key) {
                        // The request may be over.
                        let _ = asked.send(answer);
                    }
                }
                DeskEffect::EndStream(stream) => {
                    if let Some(over) = self.streams.remove(&stream) {
                        over.cancel();
                    }
                }
                DeskEffect::Observe(hashes) => frontend.hot_prefixes().observe(frontend.clock.now(), &hashes),
                DeskEffect::ReignOver { term } => tracing::info!(term, "this conductor does not lead any more"),
                DeskEffect::NameLeader { term } => frontend.nodes.send_all(&known_leader(term, 0)),
                DeskEffect::DenyTerm { node, term: denied } => {
                    let term = self.core.term();
                    tracing::warn!(%node, denied, term, "a node has told of a leader's term that etcd does not name");
                    frontend.nodes.send(&node, known_leader(term, denied));
                }
            }
        }
        // Its end ends the stream.
        self.link.take_if(|(link, _)| self.core.link() != Some(*link));
    }

    fn asked(&mut self, key: RequestKey, answered: Option<Answer>) -> PendingAnswer {
        answered.map_or_else(
            || {
                let (answer, later) = oneshot::channel();
                self.asked.insert(key, answer);
                PendingAnswer::Later(later)
            },
            PendingAnswer::Ready,
        )
    }
}

fn known_leader(term: u64, denied: u64) -> Command {
    Command::Leader(v1::KnownLeader { term, denied })
}

impl Frontend {
    fn at_desk<T>(&self, event: impl FnOnce(&mut Inner, Instant, &mut Cluster) -> T) -> T {
        let mut desk = self.desk.lock();
        let mut cluster = self.cluster();
        // While no node can be lost: what is lost later is lost to what is placed now.
        let now = self.clock.now();
        let done = event(&mut desk, now, &mut cluster);
        drop(cluster);
        desk.carry_out(self);
        desk.led = match (desk.core.has_leader(), desk.led) {
            (true, _) => {
                if std::mem::take(&mut desk.said_leaderless) {
                    tracing::info!(term = desk.core.term(), "a conductor leads again");
                }
                LeaderState::Now
            }
            (false, LeaderState::Now) => LeaderState::Until(now),
            (false, before) => before,
        };
        done
    }
}

/// What requests ask and say.
impl Frontend {
    /// Asks for nodes, and charges them.
    pub fn ask_for_nodes(&self, wanted: &PlacementRequest<'_>) -> PendingAnswer {
        self.at_desk(|desk, now, cluster| {
            let answered = desk.core.on_ask_for_nodes(now, wanted, cluster, &mut random_u64);
            desk.asked(wanted.key, answered)
        })
    }

    /// Asks what would be decided now. Nothing is charged.
    pub fn ask_why(&self, wanted: &PlacementRequest<'_>) -> PendingAnswer {
        self.at_desk(|desk, now, cluster| {
            let answered = desk.core.on_ask_why(now, wanted, cluster, &mut random_u64);
            desk.asked(wanted.key, answered)
        })
    }

    /// Asks for another decode node that grants what this one refused.
    pub fn ask_for_other(&self, key: RequestKey, from: &NodeId) -> PendingAnswer {
        self.at_desk(|desk, now, cluster| {
            let answered = desk.core.on_ask_for_other(now, key, from, cluster, &mut random_u64);
            desk.asked(key, answered)
        })
    }

    /// Asks for another decode node that goes on with an attempt, as the second one.
    pub fn ask_for_migration(&self, question: MigrationQuestion) -> PendingAnswer {
        let migrated = question.migrated;
        self.at_desk(|desk, now, cluster| {
            let answered = desk.core.on_ask_for_migration(now, question, cluster, &mut random_u64);
            desk.asked(migrated, answered)
        })
    }

    /// Enters what happened to an attempt into the ledger.
    pub fn update_ledger(&self, key: RequestKey, entry: &LedgerEntry) {
        self.at_desk(|desk, now, cluster| {
            desk.core.on_ledger_update(now, key, entry, cluster);
            if matches!(entry, LedgerEntry::Ended) {
                desk.asked.remove(&key);
            }
        });
    }
}

/// Who leads.
impl Frontend {
    /// This conductor leads from now on. What others have they declare; until `settle` has passed,
    /// nothing is placed without it.
    pub fn lead(&self, term: u64, settle: Duration) {
        self.at_desk(|desk, now, cluster| {
            tracing::info!(term, "this conductor leads");
            desk.core.on_elected(now, term, settle, cluster, &mut random_u64);
        });
    }

    /// There are no elections: this conductor leads.
    pub fn lead_alone(&self) {
        self.at_desk(|desk, now, cluster| desk.core.on_alone(now, cluster, &mut random_u64));
        tracing::info!("this conductor leads: there is no etcd, so it is alone");
    }

    /// Another conductor leads from now on, in the term that its key has.
    pub fn other_leads(&self, term: u64) {
        self.at_desk(|desk, now, cluster| desk.core.on_other_leads(now, term, cluster));
    }

    /// The conductor that leads is reached. Gives what it is to be told, from the beginning, and
    /// what names the stream.
    pub fn follow(&self) -> (mpsc::Receiver<v1::FollowerMessage>, LinkId) {
        self.at_desk(|desk, now, cluster| {
            // All of these, and then what may be behind.
            let (to, messages) = mpsc::channel(QUEUED_MESSAGES + desk.core.waiting() + 1);
            let link = desk.core.on_follows(now, cluster);
            desk.link = Some((link, to));
            (messages, link)
        })
    }

    /// This conductor does not lead any more, and no other is known to.
    pub fn step_down(&self) {
        self.at_desk(|desk, now, cluster| desk.core.on_step_down(now, cluster));
    }

    /// Tells a node that joins who leads.
    pub fn tell_leader(&self, node: &NodeId) {
        // Under the desk's lock, so that a change comes after it.
        self.at_desk(|desk, _, _| self.nodes.send(node, known_leader(desk.core.term(), 0)));
    }

    /// A node tells of a leader of that term; 0: of none that is later than what this conductor has
    /// named. Etcd is asked whether that is so.
    pub fn on_leader_term(&self, node: &NodeStart, term: u64) {
        self.at_desk(|desk, now, cluster| {
            if let Some(number) = desk.core.on_heard(now, node, term, cluster, &mut random_u64) {
                tracing::info!(node = %node.node, term, "a node tells of a later leader: asking etcd");
                self.desk.heard.send_replace(number);
            }
        });
    }

    /// Etcd has named the leader of that term, and was asked after so much was heard.
    pub fn on_etcd_named(&self, term: u64, heard: u64) {
        self.at_desk(|desk, now, cluster| desk.core.on_etcd_named(now, term, heard, cluster, &mut random_u64));
    }

    /// A stream to a leader is over.
    pub fn lose_leader(&self, link: LinkId) {
        self.at_desk(|desk, _, _| desk.core.on_link_lost(link));
    }

    /// Time has passed.
    pub fn on_desk_tick(&self) {
        self.at_desk(|desk, now, cluster| {
            desk.core.on_tick(now, cluster, &mut random_u64);
            if let LeaderState::Until(then) = desk.led
                && now.saturating_duration_since(then) >= LEADERLESS
                && !std::mem::replace(&mut desk.said_leaderless, true)
            {
                let waiting = desk.core.waiting();
                tracing::warn!(waiting, "no conductor leads: this one is not ready, and nothing is placed here");
            }
        });
    }

    /// The leader said something.
    pub fn on_told(&self, link: LinkId, told: FromLeader<v1::ExplainResponse>) -> Result<(), OtherTerm> {
        self.at_desk(|desk, now, _| desk.core.on_told(now, link, told))
    }
}

/// What other conductors ask and say.
impl Frontend {
    /// Another conductor follows. `None` if this one does not lead.
    pub fn on_follower(&self, who: ConductorId, attempts: &[Declared]) -> Option<Following> {
        self.at_desk(|desk, now, cluster| {
            let of = desk.core.on_follower(now, who, attempts, cluster)?;
            let over = CancellationToken::new();
            desk.streams.insert(of.stream, over.clone());
            Some(Following { of, over })
        })
    }

    /// It asks. After the end of a term nothing is answered.
    pub fn on_follower_asked(&self, from: &Following, question: &Question) -> Option<Answer> {
        self.at_desk(|desk, now, cluster| {
            desk.core.on_follower_asked(now, &from.of, question, cluster, &mut random_u64)
        })
    }

    /// Something happened to one of its attempts.
    pub fn on_follower_ledger_update(&self, from: &Following, key: RequestKey, entry: &LedgerEntry) {
        self.at_desk(|desk, now, cluster| desk.core.on_follower_ledger_update(now, &from.of, key, entry, cluster));
    }

    /// Its stream is over.
    pub fn on_follower_gone(&self, gone: &Following) {
        self.at_desk(|desk, now, _| {
            desk.core.on_follower_gone(now, &gone.of);
            desk.streams.remove(&gone.of.stream);
        });
    }
}
