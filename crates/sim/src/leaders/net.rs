//! What all processes share: the network, the connections between conductors, and what is counted.

use std::collections::BTreeMap;
use std::time::Instant;

use baton_scheduler::RequestError;
use baton_types::{ConductorId, FinishReason, FromLeader, ToLeader};

use super::wire::{Event, FrontendStart, Input, Place, Wire};

/// What is checked, and counted.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// Who decided in each term.
    pub deciders: BTreeMap<u64, ConductorId>,
    pub decided: u64,
    pub elections: u64,
    pub asked: u64,
    pub finished: u64,
    pub failed: BTreeMap<String, u64>,
}

impl Log {
    /// A conductor has decided where something goes.
    pub(super) fn decided(&mut self, term: u64, who: ConductorId) {
        self.decided += 1;
        let first = *self.deciders.entry(term).or_insert(who);
        assert_eq!(first, who, "two conductors decide in term {term}");
    }

    pub(super) fn ended(&mut self, outcome: &Result<FinishReason, RequestError>) {
        match outcome {
            Ok(_) => self.finished += 1,
            Err(error) => *self.failed.entry(error.name().to_owned()).or_default() += 1,
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Net {
    pub wire: Wire,
    /// Follower and leader of each connection.
    conns: BTreeMap<u64, (FrontendStart, FrontendStart)>,
    begun: u64,
    /// The start of each frontend, whether it runs, and until when it is stopped.
    pub starts: Vec<u64>,
    pub runs: Vec<bool>,
    pub stopped_until: Vec<Option<Instant>>,
    /// Messages to a leader that find no room, of a thousand.
    pub behind: u64,
    /// The term that the next leader greets with, in place of its own.
    pub false_greeting: Option<u64>,
    pub log: Log,
}

impl Net {
    pub(super) fn new(seed: u64, fronts: usize) -> Self {
        Self {
            wire: Wire::new(seed),
            conns: BTreeMap::new(),
            begun: 0,
            starts: vec![0; fronts],
            runs: vec![false; fronts],
            stopped_until: vec![None; fronts],
            behind: 0,
            false_greeting: None,
            log: Log::default(),
        }
    }

    pub(super) fn is_stopped(&self, front: usize) -> bool {
        self.stopped_until[front].is_some_and(|until| until > self.wire.now())
    }

    pub(super) fn open(&mut self, follower: FrontendStart, leader: FrontendStart) -> u64 {
        self.begun += 1;
        self.conns.insert(self.begun, (follower, leader));
        self.begun
    }

    /// One end closes a connection.
    pub(super) fn close(&mut self, conn: u64) {
        let Some((follower, leader)) = self.conns.remove(&conn) else { return };
        let a = Place::SimFrontend(follower.front);
        let b = Place::SimFrontend(leader.front);
        self.wire.send(b, a, Event::SimFrontend(follower, Input::Closed(conn)));
        self.wire.send(a, b, Event::SimFrontend(leader, Input::Closed(conn)));
    }

    /// Connections break: each end finds that out by itself.
    pub(super) fn break_all(&mut self, is: impl Fn(FrontendStart, FrontendStart) -> bool) {
        let now = self.wire.now();
        for (conn, (follower, leader)) in self.conns.extract_if(.., |_, (follower, leader)| is(*follower, *leader)) {
            self.wire.queue.at(now, Event::SimFrontend(follower, Input::Closed(conn)));
            self.wire.queue.at(now, Event::SimFrontend(leader, Input::Closed(conn)));
        }
    }

    pub(super) fn tell_leader(&mut self, conn: u64, message: ToLeader) {
        let Some((follower, leader)) = self.conns.get(&conn).copied() else { return };
        self.wire.in_flight += 1;
        let event = Event::SimFrontend(leader, Input::ToLeader(conn, Box::new(message)));
        self.wire.send(Place::SimFrontend(follower.front), Place::SimFrontend(leader.front), event);
    }

    pub(super) fn tell_follower(&mut self, conn: u64, told: FromLeader<()>) {
        let Some((follower, leader)) = self.conns.get(&conn).copied() else { return };
        self.wire.in_flight += 1;
        let event = Event::SimFrontend(follower, Input::FromLeader(conn, Box::new(told)));
        self.wire.send(Place::SimFrontend(leader.front), Place::SimFrontend(follower.front), event);
    }
}
