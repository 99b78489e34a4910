//! One conductor's part in the election: `Candidacy` decides, this asks etcd.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_runtime::{Clock, random_u64};
use baton_scheduler::{Candidacy, Candidate, Eligibility, LeaderKey, LeaderKeyState, Leadership};
use etcd_client::{
    Client, Compare, CompareOp, EventType, KeyValue, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp,
    TxnOpResponse, WatchOptions, WatchResponse, WatchStream,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::connect::{answered, connect};
use crate::{Etcd, EtcdError, LEASE};

/// How often the lease is renewed: three times in its life, and once more.
const RENEW: Duration = Duration::from_millis(500);
/// Waits between attempts while etcd cannot be reached.
const RETRY: Duration = Duration::from_millis(100);
/// Well within the lease: a leader whose etcd is back must be there before its lease ends.
const RETRY_MAX: Duration = Duration::from_millis(500);
/// Those that see the leader go do not all ask at once.
const JITTER: Duration = Duration::from_millis(50);
/// Most reasons for which etcd is unreachable that are said.
const MAX_SAID: usize = 8;
/// How soon etcd is asked again about what nodes tell of: a node may tell of another term each
/// time.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Longest lease that a leader's key may be under. Etcd may grant more than [`LEASE`].
const MAX_LEASE: Duration = Duration::from_secs(60);
/// Longest address of a leader, bytes: a name of DNS, and a port.
const MAX_ADDRESS_BYTES: usize = 272;

/// What a leader writes.
#[derive(Debug, Serialize, Deserialize)]
struct Leader {
    conductor: String,
    address: String,
}

/// Which leader etcd has named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamedLeader {
    /// Its term.
    pub term: u64,
    /// How often something was heard when etcd was asked.
    pub heard: u64,
}

/// See the module's text.
pub struct Election {
    etcd: Etcd,
    /// The member of etcd that is asked: after each error, the next one.
    member: usize,
    candidacy: Candidacy,
    /// Another conductor's lease, which is short enough.
    known_lease: i64,
    clock: Arc<dyn Clock>,
    leadership: watch::Sender<Leadership>,
    named: watch::Sender<NamedLeader>,
    /// How often a node has told of a later term than is known: each time etcd is asked.
    heard: watch::Receiver<u64>,
    /// Whether it can place well.
    standing: watch::Receiver<Eligibility>,
}

/// What is open while etcd is there.
struct Open {
    client: Client,
    lease: i64,
    keeper: LeaseKeeper,
    kept: LeaseKeepAliveStream,
}

impl Election {
    /// Of a candidate, which leads while it can place well, or if no other conductor does. Whenever
    /// something is `heard`, etcd is asked.
    pub fn new(
        etcd: Etcd,
        candidate: Candidate,
        clock: Arc<dyn Clock>,
        heard: watch::Receiver<u64>,
        standing: watch::Receiver<Eligibility>,
    ) -> Self {
        let (leadership, _) = watch::channel(Leadership::Unknown);
        Self {
            etcd,
            member: 0,
            candidacy: Candidacy::new(candidate),
            known_lease: 0,
            clock,
            leadership,
            named: watch::Sender::default(),
            heard,
            standing,
        }
    }

    /// Who leads, and each change of it.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Which leader etcd has named, and when that was asked.
    pub fn named(&self) -> watch::Receiver<NamedLeader> {
        self.named.subscribe()
    }

    /// Takes part for ever. While etcd is unreachable, what is known stays.
    pub async fn run(mut self) {
        let mut wait = RETRY;
        // What was said since etcd was there.
        let mut said = BTreeSet::new();
        loop {
            let Err(error) = self.take_part(&mut wait).await;
            let member = self.etcd.member(self.member).to_owned();
            let retry_in = wait;
            if wait == RETRY {
                said.clear();
            }
            match error {
                EtcdError::LeaseEnded => tracing::warn!(etcd = member, "{error}: another conductor may lead"),
                // A watch that ends begins again with what there is.
                EtcdError::WatchEnded(_) => tracing::info!(etcd = member, %error, "restarting the leader watch"),
                _ if said.len() < MAX_SAID && said.insert(error.to_string()) => {
                    let then = match self.candidacy.leadership() {
                        Leadership::Unknown => "no leader is known",
                        Leadership::Own { .. } | Leadership::Other { .. } => "what is known of the leader stays",
                    };
                    tracing::warn!(etcd = member, %error, ?retry_in, "etcd is unreachable: {then}");
                }
                // It was said.
                _ => tracing::debug!(etcd = member, %error, "etcd is still unreachable"),
            }
            self.member = self.member.wrapping_add(1);
            self.clock.sleep(wait).await;
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    fn key(&self) -> String {
        format!("{}/leader", self.etcd.prefix)
    }

    async fn take_part(&mut self, wait: &mut Duration) -> Result<std::convert::Infallible, EtcdError> {
        let mut open = self.open().await?;
        let revision = self.look(&mut open).await?;
        tracing::info!(etcd = self.etcd.member(self.member), "etcd is there");
        *wait = RETRY;
        let mut changes = self.watch(&mut open, revision.saturating_add(1)).await?;
        let mut ask_again = self.clock.now();
        let mut renew_at = self.clock.now() + RENEW;
        loop {
            if self.candidacy.is_to_resign() {
                return Err(self.resign(&mut open).await?);
            }
            tokio::select! {
                // At a time that nothing else that happens puts off.
                () = self.clock.sleep_until(renew_at) => {
                    renew_at = self.clock.now() + RENEW;
                    self.renew(&mut open).await?;
                    // A watch may be silent at a member that is cut off.
                    self.look(&mut open).await?;
                }
                Ok(()) = self.standing.changed() => self.stand(),
                () = is_heard(&mut self.heard, ask_again, &*self.clock) => {
                    ask_again = self.clock.now() + ASK_AGAIN;
                    self.look(&mut open).await?;
                }
                change = changes.message() => {
                    let change = change?.ok_or_else(|| EtcdError::WatchEnded("closed".to_owned()))?;
                    self.on_change(&mut open, &change).await?;
                }
            }
        }
    }

    fn stand(&mut self) {
        self.candidacy.on_standing(*self.standing.borrow_and_update());
    }

    /// With the lease that there was, if it lives.
    async fn open(&mut self) -> Result<Open, EtcdError> {
        let mut client = connect(&self.etcd, self.member, &*self.clock).await?;
        if let Some(lease) = self.candidacy.lease() {
            match answered(&*self.clock, client.lease_keep_alive(lease)).await {
                Ok((keeper, kept)) => return Ok(Open { client, lease, keeper, kept }),
                Err(EtcdError::Client(etcd_client::Error::LeaseKeepAliveError(_))) => self.candidacy.on_lease_ended(),
                Err(error) => return Err(error),
            }
        }
        let ttl = LEASE.as_secs() as i64;
        let lease = answered(&*self.clock, client.lease_grant(ttl, None)).await?.id();
        self.candidacy.on_lease(lease);
        let (keeper, kept) = answered(&*self.clock, client.lease_keep_alive(lease)).await?;
        Ok(Open { client, lease, keeper, kept })
    }

    async fn renew(&mut self, open: &mut Open) -> Result<(), EtcdError> {
        let renewed = async {
            open.keeper.keep_alive().await?;
            open.kept.message().await
        };
        let renewed = answered(&*self.clock, renewed).await?;
        // Its end says nothing of the lease.
        let renewed = renewed.ok_or_else(|| EtcdError::WatchEnded("the renewals' stream closed".to_owned()))?;
        if !self.candidacy.on_renewed(renewed.ttl()) {
            return Err(EtcdError::LeaseEnded);
        }
        self.tell();
        Ok(())
    }

    async fn resign(&mut self, open: &mut Open) -> Result<EtcdError, EtcdError> {
        self.candidacy.on_resigned();
        // A conductor that drains ends once it has heard that it does not lead: by then another one
        // may.
        let revoked = answered(&*self.clock, open.client.lease_revoke(open.lease)).await;
        self.tell();
        revoked?;
        Ok(EtcdError::WatchEnded("this conductor has resigned".to_owned()))
    }

    /// Leads if no conductor does, and learns which one does. Gives the revision that this is true
    /// of.
    async fn look(&mut self, open: &mut Open) -> Result<i64, EtcdError> {
        self.stand();
        let heard = *self.heard.borrow_and_update();
        let key = self.key();
        let Candidate { id, address } = self.candidacy.candidate().clone();
        let own = Leader { conductor: id.to_string(), address };
        let value = serde_json::to_vec(&own).unwrap_or_default();
        let put = TxnOp::put(key.clone(), value, Some(PutOptions::new().with_lease(open.lease)));
        let get = TxnOp::get(key.clone(), None);
        // No key was made at revision -1: it is only read.
        let is_vacant =
            Compare::create_revision(key.clone(), CompareOp::Equal, if self.candidacy.campaigns() { 0 } else { -1 });
        let txn = Txn::new().when([is_vacant]).and_then([put]).or_else([get]);
        let done = answered(&*self.clock, open.client.txn(txn)).await?;
        let revision = done.header().map_or(0, etcd_client::ResponseHeader::revision);
        let found = done.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Get(found) => found.kvs().first().cloned(),
            _ => None,
        });
        let look = match found {
            _ if done.succeeded() => LeaderKeyState::Put,
            Some(key) => self.found(open, &key).await?,
            None => LeaderKeyState::Absent,
        };
        let term = self.candidacy.on_looked(revision, look);
        self.tell();
        if let Some(term) = term {
            let named = NamedLeader { term, heard };
            self.named.send_if_modified(|known| std::mem::replace(known, named) != named);
        }
        Ok(revision)
    }

    /// Reads the leader's key, or deletes it if no conductor has put it.
    async fn found(&mut self, open: &mut Open, key: &KeyValue) -> Result<LeaderKeyState, EtcdError> {
        let problem = match read(key) {
            Ok(found) if self.has_own_lease(open, &found).await? => return Ok(LeaderKeyState::Found(found)),
            Ok(_) => format!("under another's lease, or one of more than {} s", MAX_LEASE.as_secs()),
            Err(problem) => problem,
        };
        self.delete(open, key, &problem).await?;
        Ok(LeaderKeyState::Absent)
    }

    /// Whether the lease of a key may be that of the conductor that it names. Asks once for each.
    async fn has_own_lease(&mut self, open: &mut Open, found: &LeaderKey) -> Result<bool, EtcdError> {
        let lease = found.lease;
        if self.candidacy.lease() == Some(lease) {
            return Ok(found.leader == *self.candidacy.candidate());
        }
        if lease == self.known_lease {
            return Ok(true);
        }
        let granted = answered(&*self.clock, open.client.lease_time_to_live(lease, None)).await?.granted_ttl();
        let is_short = granted <= MAX_LEASE.as_secs() as i64;
        if is_short {
            self.known_lease = lease;
        }
        Ok(is_short)
    }

    /// Deletes a key that no conductor has put, if it is there as it was read: it might stay for
    /// ever. The watch sees it go.
    async fn delete(&self, open: &mut Open, key: &KeyValue, problem: &str) -> Result<(), EtcdError> {
        let etcd = self.etcd.member(self.member);
        let error = EtcdError::key(self.key(), problem);
        tracing::warn!(etcd, %error, "the leader's key is not a conductor's: deleting it");
        let is_same = Compare::mod_revision(self.key(), CompareOp::Equal, key.mod_revision());
        let delete = TxnOp::delete(self.key(), None);
        answered(&*self.clock, open.client.txn(Txn::new().when([is_same]).and_then([delete]))).await?;
        Ok(())
    }

    /// Tells who leads, if that is new.
    fn tell(&self) {
        let leadership = self.candidacy.leadership();
        self.leadership.send_if_modified(|known| {
            let is_new = known != leadership;
            if is_new {
                tracing::info!(?leadership, "who leads");
                known.clone_from(leadership);
            }
            is_new
        });
    }

    async fn watch(&self, open: &mut Open, revision: i64) -> Result<WatchStream, EtcdError> {
        let from = WatchOptions::new().with_start_revision(revision);
        answered(&*self.clock, open.client.watch(self.key(), Some(from))).await
    }

    async fn on_change(&mut self, open: &mut Open, change: &WatchResponse) -> Result<(), EtcdError> {
        if change.canceled() {
            let reason = match (change.compact_revision(), change.cancel_reason()) {
                // Changes may be gone that were not seen. The next look sees what there is.
                (compacted @ 1.., _) => format!("compacted up to revision {compacted}"),
                (_, reason) => reason.to_owned(),
            };
            return Err(EtcdError::WatchEnded(reason));
        }
        for event in change.events() {
            let Some(key) = event.kv() else { continue };
            match event.event_type() {
                EventType::Put => match read(key) {
                    Ok(found) => {
                        self.candidacy.on_put(key.mod_revision(), found);
                        self.tell();
                    }
                    Err(_) => drop(self.look(open).await?),
                },
                EventType::Delete if self.candidacy.on_deleted(key.mod_revision()) => {
                    let jitter = JITTER.mul_f64((random_u64() % 1024) as f64 / 1024.0);
                    self.clock.sleep(jitter).await;
                    self.look(open).await?;
                }
                EventType::Delete => {}
            }
        }
        Ok(())
    }
}

/// Reads the leader's key. What is wrong with it, if no conductor has put it.
fn read(key: &KeyValue) -> Result<LeaderKey, String> {
    let Leader { conductor, address } = serde_json::from_slice(key.value()).map_err(|error| error.to_string())?;
    let id = conductor.parse().map_err(|error| format!("conductor: {error}"))?;
    if !(1..=MAX_ADDRESS_BYTES).contains(&address.len()) {
        let bytes = address.len();
        return Err(format!("address: {bytes} bytes, but must be 1 to {MAX_ADDRESS_BYTES}"));
    }
    let lease = key.lease();
    if lease == 0 {
        return Err("under no lease".to_owned());
    }
    let create_revision = key.create_revision();
    Ok(LeaderKey { leader: Candidate { id, address }, lease, create_revision })
}

/// Something was heard, and etcd was not asked just now.
async fn is_heard(heard: &mut watch::Receiver<u64>, ask_again: Instant, clock: &dyn Clock) {
    clock.sleep_until(ask_again).await;
    if heard.changed().await.is_err() {
        // The one that hears is gone, and the conductor with it.
        std::future::pending().await
    }
}
