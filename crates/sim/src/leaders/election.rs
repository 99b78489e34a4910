//! The order in which a conductor asks etcd, as `baton-membership` does. `Candidacy` decides.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_scheduler::{Candidacy, Candidate, Eligibility};

use super::etcd::{Change, EtcdAnswer, EtcdRequest};
use super::wire::{Event, FrontendStart, Input, Place, Wire};

/// As in `baton-membership`.
const RENEW: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_millis(500);
const JITTER: Duration = Duration::from_millis(50);
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// What was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    OpenKeep,
    Grant,
    LeaderKeyState,
    Watch,
    Renew,
    Revoke,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Retrying,
    Campaigning(Pending),
    Idle,
    Jitter,
}

/// How a frontend keeps time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timer {
    pub at: FrontendStart,
    pub rate: f64,
}

impl Timer {
    /// Something happens here after so long, by the clock of the frontend.
    pub(super) fn after(self, wire: &mut Wire, time: Duration, input: Input) {
        wire.queue.after(time.div_f64(self.rate), Event::SimFrontend(self.at, input));
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Election {
    pub candidacy: Candidacy,
    timer: Timer,
    step: Step,
    asked: u64,
    turn: u64,
    wait: Duration,
    watches: bool,
    changes: VecDeque<(i64, Change)>,
    renew_at: Instant,
    /// How often a node has told of a later term, and how often it had when etcd was asked.
    heard: u64,
    heard_at_look: u64,
    /// The leader that etcd has named, and what was heard by then.
    pub named: Option<(u64, u64)>,
    /// Whether it is about to end.
    pub drains: bool,
    pub reaches_nodes: bool,
}

impl Election {
    pub(super) fn new(wire: &mut Wire, candidate: Candidate, timer: Timer) -> Self {
        let mut election = Self {
            candidacy: Candidacy::new(candidate),
            timer,
            step: Step::Retrying,
            asked: 0,
            turn: 0,
            wait: RETRY,
            watches: false,
            changes: VecDeque::new(),
            renew_at: wire.now(),
            heard: 0,
            heard_at_look: 0,
            named: None,
            drains: false,
            reaches_nodes: false,
        };
        election.open(wire);
        election
    }

    fn ask(&mut self, wire: &mut Wire, pending: Pending, request: EtcdRequest) {
        self.asked += 1;
        self.step = Step::Campaigning(pending);
        let to_etcd = Event::Etcd(self.timer.at, self.asked, request);
        wire.send(Place::SimFrontend(self.timer.at.front), Place::Etcd, to_etcd);
        self.timer.after(wire, ANSWER, Input::EtcdSilent(self.asked));
    }

    fn wait(&mut self, wire: &mut Wire, step: Step, time: Duration) {
        self.turn += 1;
        self.step = step;
        self.timer.after(wire, time, Input::ElectionTimer(self.turn));
    }

    fn open(&mut self, wire: &mut Wire) {
        self.watches = false;
        self.changes.clear();
        match self.candidacy.lease() {
            Some(lease) => self.ask(wire, Pending::OpenKeep, EtcdRequest::KeepAlive(lease)),
            None => self.ask(wire, Pending::Grant, EtcdRequest::Grant),
        }
    }

    fn stand(&mut self) {
        self.candidacy.on_standing(match (self.drains, self.reaches_nodes) {
            (true, _) => Eligibility::Drains,
            (false, true) => Eligibility::Ready,
            (false, false) => Eligibility::NoNodes,
        });
    }

    fn look(&mut self, wire: &mut Wire) {
        self.stand();
        let Some(lease) = self.candidacy.lease() else { return self.fail(wire) };
        self.heard_at_look = self.heard;
        let candidate = self.candidacy.candidate().clone();
        let campaigns = self.candidacy.campaigns();
        self.ask(wire, Pending::LeaderKeyState, EtcdRequest::LeaderKeyState { candidate, lease, campaigns });
    }

    /// What it has asked fails: it begins again.
    fn fail(&mut self, wire: &mut Wire) {
        self.watches = false;
        let wait = self.wait;
        self.wait = (wait * 2).min(RETRY_MAX);
        self.wait(wire, Step::Retrying, wait);
    }

    pub(super) fn on_silent(&mut self, wire: &mut Wire, asked: u64) {
        if asked == self.asked && matches!(self.step, Step::Campaigning(_)) {
            self.fail(wire);
        }
    }

    pub(super) fn on_timer(&mut self, wire: &mut Wire, turn: u64) {
        if turn != self.turn {
            return;
        }
        match self.step {
            Step::Retrying => self.open(wire),
            Step::Jitter => self.look_or_renew(wire),
            Step::Idle => self.renew(wire),
            Step::Campaigning(_) => {}
        }
    }

    fn renew(&mut self, wire: &mut Wire) {
        match self.candidacy.lease() {
            Some(lease) => self.ask(wire, Pending::Renew, EtcdRequest::KeepAlive(lease)),
            None => self.fail(wire),
        }
    }

    fn look_or_renew(&mut self, wire: &mut Wire) {
        if wire.now() < self.renew_at { self.look(wire) } else { self.renew(wire) }
    }

    /// A node has told of a later term, so often by now: etcd is asked.
    pub(super) fn on_heard(&mut self, wire: &mut Wire, heard: u64) {
        self.heard = heard;
        if self.step == Step::Idle {
            self.look_or_renew(wire);
        }
    }

    /// Etcd has answered.
    pub(super) fn on_answer(&mut self, wire: &mut Wire, asked: u64, answer: EtcdAnswer) {
        let Step::Campaigning(pending) = self.step else { return };
        if asked != self.asked {
            return;
        }
        match (pending, answer) {
            (Pending::OpenKeep, EtcdAnswer::Renewed(0)) => {
                self.candidacy.on_lease_ended();
                self.ask(wire, Pending::Grant, EtcdRequest::Grant);
            }
            (Pending::OpenKeep, EtcdAnswer::Renewed(_)) => self.look(wire),
            (Pending::Grant, EtcdAnswer::Granted(lease)) => {
                self.candidacy.on_lease(lease);
                self.look(wire);
            }
            (Pending::LeaderKeyState, EtcdAnswer::Looked(revision, look)) => {
                if let Some(term) = self.candidacy.on_looked(revision, look) {
                    self.named = Some((term, self.heard_at_look));
                }
                if self.watches {
                    return self.idle(wire);
                }
                self.wait = RETRY;
                self.ask(wire, Pending::Watch, EtcdRequest::Watch { from: revision + 1 });
            }
            (Pending::Watch, EtcdAnswer::Watches) => {
                self.watches = true;
                self.idle(wire);
            }
            (Pending::Renew, EtcdAnswer::Renewed(ttl)) => {
                self.renew_at = wire.now() + RENEW;
                if self.candidacy.on_renewed(ttl) { self.look(wire) } else { self.fail(wire) }
            }
            _ => self.fail(wire),
        }
    }

    /// Nothing is asked: it takes in what the watch said, and waits.
    fn idle(&mut self, wire: &mut Wire) {
        if !self.watches {
            return self.fail(wire);
        }
        self.stand();
        if self.candidacy.is_to_resign() {
            return match self.candidacy.on_resigned() {
                Some(lease) => self.ask(wire, Pending::Revoke, EtcdRequest::Revoke(lease)),
                None => self.fail(wire),
            };
        }
        while let Some((revision, change)) = self.changes.pop_front() {
            match change {
                Change::Put(key) => self.candidacy.on_put(revision, key),
                Change::Deleted if self.candidacy.on_deleted(revision) => {
                    let jitter = wire.up_to(JITTER);
                    return self.wait(wire, Step::Jitter, jitter);
                }
                Change::Deleted => {}
            }
        }
        if self.heard > self.heard_at_look {
            return self.wait(wire, Step::Jitter, ASK_AGAIN);
        }
        self.wait(wire, Step::Idle, RENEW);
    }

    pub(super) fn on_watch(&mut self, wire: &mut Wire, revision: i64, change: Change) {
        self.changes.push_back((revision, change));
        if self.step == Step::Idle {
            self.idle(wire);
        }
    }

    pub(super) fn on_watch_ended(&mut self, wire: &mut Wire) {
        self.watches = false;
        if self.step == Step::Idle {
            self.fail(wire);
        }
    }

    pub(super) fn on_drain(&mut self, wire: &mut Wire) {
        self.drains = true;
        if self.step == Step::Idle {
            self.idle(wire);
        }
    }
}
