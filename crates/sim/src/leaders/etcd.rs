//! What conductors see of etcd: revisions, leases that end, one key, and watches of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_scheduler::{Candidate, LeaderKey, LeaderKeyState};

use super::wire::FrontendStart;

/// As a conductor asks for it.
const TTL: Duration = Duration::from_secs(2);

/// A change of the leader's key.
#[derive(Debug, Clone)]
pub(super) enum Change {
    Put(LeaderKey),
    Deleted,
}

/// What a conductor asks.
#[derive(Debug, Clone)]
pub(super) enum EtcdRequest {
    Grant,
    KeepAlive(i64),
    /// Look at the key, and put it under a lease if it is not there and is wanted.
    LeaderKeyState {
        candidate: Candidate,
        lease: i64,
        campaigns: bool,
    },
    Watch {
        from: i64,
    },
    Revoke(i64),
}

/// What it answers.
#[derive(Debug, Clone)]
pub(super) enum EtcdAnswer {
    Granted(i64),
    /// For so many seconds; 0: there is no such lease.
    Renewed(i64),
    Looked(i64, LeaderKeyState),
    Watches,
    Revoked,
    /// As of a put under a lease that is over.
    Error,
}

#[derive(Debug, Clone, Default)]
struct Data {
    revision: i64,
    key: Option<LeaderKey>,
    leases: BTreeMap<i64, Instant>,
    history: Vec<(i64, Change)>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Etcd {
    data: Data,
    backup: Data,
    next_lease: i64,
    /// From which revision on each conductor watches.
    watches: BTreeMap<FrontendStart, i64>,
    /// What is to be told to them.
    told: Vec<(FrontendStart, i64, Change)>,
    pub is_away: bool,
}

impl Etcd {
    pub(super) fn answer(&mut self, now: Instant, from: FrontendStart, request: EtcdRequest) -> EtcdAnswer {
        self.expire(now);
        match request {
            EtcdRequest::Grant => {
                self.next_lease += 1;
                self.data.leases.insert(self.next_lease, now + TTL);
                EtcdAnswer::Granted(self.next_lease)
            }
            EtcdRequest::KeepAlive(lease) => match self.data.leases.get_mut(&lease) {
                Some(ends) => {
                    *ends = now + TTL;
                    EtcdAnswer::Renewed(TTL.as_secs() as i64)
                }
                None => EtcdAnswer::Renewed(0),
            },
            EtcdRequest::LeaderKeyState { candidate, lease, campaigns } => match &self.data.key {
                Some(key) => EtcdAnswer::Looked(self.data.revision, LeaderKeyState::Found(key.clone())),
                None if !campaigns => EtcdAnswer::Looked(self.data.revision, LeaderKeyState::Absent),
                None if !self.data.leases.contains_key(&lease) => EtcdAnswer::Error,
                None => {
                    self.data.revision += 1;
                    let create_revision = self.data.revision;
                    let key = LeaderKey { leader: candidate, lease, create_revision };
                    self.data.key = Some(key.clone());
                    self.change(Change::Put(key));
                    EtcdAnswer::Looked(create_revision, LeaderKeyState::Put)
                }
            },
            EtcdRequest::Watch { from: first } => {
                self.watches.insert(from, first);
                let missed = self.data.history.iter().filter(|(revision, _)| *revision >= first);
                self.told.extend(missed.map(|(revision, change)| (from, *revision, change.clone())));
                EtcdAnswer::Watches
            }
            EtcdRequest::Revoke(lease) => {
                self.end_lease(lease);
                EtcdAnswer::Revoked
            }
        }
    }

    fn change(&mut self, change: Change) {
        let revision = self.data.revision;
        self.data.history.push((revision, change.clone()));
        let watching = self.watches.iter().filter(|(_, first)| revision >= **first);
        self.told.extend(watching.map(|(front, _)| (*front, revision, change.clone())));
    }

    fn end_lease(&mut self, lease: i64) {
        self.data.leases.remove(&lease);
        if self.data.key.as_ref().is_some_and(|key| key.lease == lease) {
            self.delete();
        }
    }

    /// The key is gone, as if an operator had deleted it.
    pub(super) fn delete(&mut self) {
        if self.data.key.take().is_some() {
            self.data.revision += 1;
            self.change(Change::Deleted);
        }
    }

    /// A liar overwrites the leader's key, with one that is under no lease.
    pub(super) fn put_false_key(&mut self, key: LeaderKey) {
        self.data.revision += 1;
        self.data.key = Some(key.clone());
        self.change(Change::Put(key));
    }

    /// What a liar has put there is deleted.
    pub(super) fn delete_false_key(&mut self) {
        if self.data.key.as_ref().is_some_and(|key| key.lease == 0) {
            self.delete();
        }
    }

    /// The term of the leader that the key names.
    pub(super) fn leader_term(&self) -> Option<u64> {
        self.data.key.as_ref().map(LeaderKey::term)
    }

    /// Leases that are over end.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.is_away {
            return;
        }
        let over = self.data.leases.iter().filter(|(_, ends)| **ends <= now);
        for lease in over.map(|(lease, _)| *lease).collect::<Vec<_>>() {
            self.end_lease(lease);
        }
    }

    /// All leases are over at once.
    pub(super) fn end_leases(&mut self) {
        for lease in self.data.leases.keys().copied().collect::<Vec<_>>() {
            self.end_lease(lease);
        }
    }

    /// Another client writes.
    pub(super) fn on_other_write(&mut self) {
        self.data.revision += 1;
    }

    /// What watches are told, since the last call.
    pub(super) fn told(&mut self) -> Vec<(FrontendStart, i64, Change)> {
        std::mem::take(&mut self.told)
    }

    /// It goes away. Gives whose watches end.
    pub(super) fn leave(&mut self) -> Vec<FrontendStart> {
        self.is_away = true;
        std::mem::take(&mut self.watches).into_keys().collect()
    }

    /// It is back, with what it had: leases begin anew.
    pub(super) fn come_back(&mut self, now: Instant) {
        self.is_away = false;
        self.data.leases.values_mut().for_each(|ends| *ends = now + TTL);
    }

    /// It has lost its data: revisions begin again, as do the ids of leases if they are small.
    pub(super) fn lose_data(&mut self) {
        self.data = Data { revision: 1, ..Data::default() };
        self.backup = self.data.clone();
    }

    pub(super) fn back_up(&mut self) {
        self.backup = self.data.clone();
    }

    /// It has what it had at the last backup.
    pub(super) fn restore(&mut self) {
        self.data = self.backup.clone();
    }
}
