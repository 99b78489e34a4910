//! One conductor's part in the election.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use baton_runtime::{Clock, random_u64};
use baton_types::ConductorId;
use etcd_client::{
    Client, Compare, CompareOp, EventType, KeyValue, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp,
    TxnOpResponse, WatchOptions, WatchResponse, WatchStream,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::connect::{answered, connect};
use crate::{Candidate, Etcd, EtcdError, LEASE, Leadership};

/// How often the lease is renewed: three times in its life, and once more.
const RENEW: Duration = Duration::from_millis(500);
/// Waits between attempts while etcd cannot be reached.
const RETRY: Duration = Duration::from_millis(100);
/// Well within the lease: a leader whose etcd is back must be there before its lease ends.
const RETRY_MAX: Duration = Duration::from_millis(500);
/// Those that see the leader go do not all ask at once.
const JITTER: Duration = Duration::from_millis(50);
/// Most reasons for which etcd is away that are said.
const MAX_SAID: usize = 8;

/// What a leader writes.
#[derive(Debug, Serialize, Deserialize)]
struct Leader {
    conductor: String,
    address: String,
}

/// A lease, and the term that it was won in.
struct Own {
    create_revision: i64,
    term: u64,
}

/// See the module's text.
pub struct Election {
    etcd: Etcd,
    candidate: Candidate,
    clock: Arc<dyn Clock>,
    leadership: watch::Sender<Leadership>,
    /// The latest term that is known of, whoever's it was.
    latest: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Cancelled when it is not to lead any more.
    resigned: CancellationToken,
    /// Whether it may lead.
    campaigns: bool,
    lease: Option<i64>,
    own: Option<Own>,
    /// The revision of the last look: what happened before is in it.
    looked: i64,
}

/// What is open while etcd is there.
struct Open {
    client: Client,
    lease: i64,
    keeper: LeaseKeeper,
    kept: LeaseKeepAliveStream,
}

impl Election {
    /// Of a candidate. Terms are later than `latest`, also if etcd has lost its data.
    pub fn new(
        etcd: Etcd,
        candidate: Candidate,
        clock: Arc<dyn Clock>,
        latest: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Self {
        let (leadership, _) = watch::channel(Leadership::Unknown);
        let (latest, resigned) = (Box::new(latest), CancellationToken::new());
        Self {
            etcd,
            candidate,
            clock,
            leadership,
            latest,
            resigned,
            campaigns: true,
            lease: None,
            own: None,
            looked: 0,
        }
    }

    /// Once it is cancelled, this conductor leads no more, and only looks who does. Others need not wait for the end of its lease.
    pub fn resigned(&self) -> CancellationToken {
        self.resigned.clone()
    }

    /// Who leads, and each change of it.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Takes part for ever. While etcd is away, what is known stays.
    pub async fn run(mut self) {
        let mut wait = RETRY;
        // What was said since etcd was there.
        let mut said = BTreeSet::new();
        loop {
            if self.resigned.is_cancelled() {
                self.campaigns = false;
            }
            let Err(error) = self.take_part(&mut wait).await;
            let (endpoints, retry_in) = (self.etcd.endpoints.join(","), wait);
            if wait == RETRY {
                said.clear();
            }
            match error {
                EtcdError::LeaseEnded => tracing::warn!(etcd = endpoints, "{error}: another conductor may lead"),
                // A watch that ends begins again with what there is.
                EtcdError::WatchEnded(_) => tracing::info!(etcd = endpoints, %error, "looking again who leads"),
                _ if said.len() < MAX_SAID && said.insert(error.to_string()) => {
                    tracing::warn!(etcd = endpoints, %error, ?retry_in, "etcd is away: what is known of the leader stays");
                }
                // It was said.
                _ => tracing::debug!(etcd = endpoints, %error, "etcd is still away"),
            }
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
        tracing::info!(etcd = self.etcd.endpoints.join(","), "etcd is there");
        *wait = RETRY;
        let mut changes = self.watch(&mut open, revision + 1).await?;
        loop {
            tokio::select! {
                () = self.clock.sleep(RENEW) => {
                    self.renew(&mut open).await?;
                    // A watch may be silent at a member that is cut off.
                    self.look(&mut open).await?;
                }
                () = self.resigned.cancelled(), if self.campaigns || self.own.is_some() => return Err(self.resign(&mut open).await?),
                change = changes.message() => {
                    let change = change?.ok_or_else(|| EtcdError::WatchEnded("closed".to_owned()))?;
                    self.on_change(&mut open, &change).await?;
                }
            }
        }
    }

    /// With the lease that there was, if it lives.
    async fn open(&mut self) -> Result<Open, EtcdError> {
        let mut client = connect(&self.etcd, &*self.clock).await?;
        if let Some(lease) = self.lease {
            match answered(&*self.clock, client.lease_keep_alive(lease)).await {
                Ok((keeper, kept)) => return Ok(Open { client, lease, keeper, kept }),
                Err(EtcdError::Client(etcd_client::Error::LeaseKeepAliveError(_))) => self.lease = None,
                Err(error) => return Err(error),
            }
        }
        let ttl = LEASE.as_secs() as i64;
        let lease = answered(&*self.clock, client.lease_grant(ttl, None)).await?.id();
        self.lease = Some(lease);
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
        if renewed.ttl() <= 0 {
            self.lease = None;
            return Err(EtcdError::LeaseEnded);
        }
        self.outbid();
        Ok(())
    }

    /// The key is this conductor's, and nodes have heard of a later term, as after a loss of etcd's data: it leads in a later one.
    fn outbid(&mut self) {
        let latest = (self.latest)();
        if let Some(own) = self.own.as_mut().filter(|own| own.term < latest) {
            own.term = latest + 1;
            let term = own.term;
            self.tell(Leadership::Own { term });
        }
    }

    async fn resign(&mut self, open: &mut Open) -> Result<EtcdError, EtcdError> {
        (self.campaigns, self.own, self.lease) = (false, None, None);
        self.tell(Leadership::Unknown);
        answered(&*self.clock, open.client.lease_revoke(open.lease)).await?;
        Ok(EtcdError::WatchEnded("this conductor has resigned".to_owned()))
    }

    /// Leads if nobody does, and learns who does. Gives the revision that this is true of.
    async fn look(&mut self, open: &mut Open) -> Result<i64, EtcdError> {
        let key = self.key();
        let own = Leader { conductor: self.candidate.id.to_string(), address: self.candidate.address.clone() };
        let value = serde_json::to_vec(&own).unwrap_or_default();
        let put = TxnOp::put(key.clone(), value, Some(PutOptions::new().with_lease(open.lease)));
        let get = TxnOp::get(key.clone(), None);
        // No key was made at revision -1: it is only read.
        let nobody = Compare::create_revision(key.clone(), CompareOp::Equal, if self.campaigns { 0 } else { -1 });
        let txn = Txn::new().when([nobody]).and_then([put]).or_else([get]);
        let done = answered(&*self.clock, open.client.txn(txn)).await?;
        let revision = done.header().map_or(0, etcd_client::ResponseHeader::revision);
        self.looked = revision;
        if done.succeeded() {
            self.lead(revision);
            return Ok(revision);
        }
        for response in done.op_responses() {
            if let TxnOpResponse::Get(found) = response
                && let Some(leader) = found.kvs().first()
            {
                self.learn(leader, open.lease)?;
            }
        }
        Ok(revision)
    }

    fn lead(&mut self, create_revision: i64) {
        if self.own.as_ref().is_some_and(|own| own.create_revision == create_revision) {
            // As before: etcd was away.
            return;
        }
        let term = u64::try_from(create_revision).unwrap_or_default().max((self.latest)() + 1);
        tracing::info!(term, "elected");
        self.own = Some(Own { create_revision, term });
        self.tell(Leadership::Own { term });
    }

    fn learn(&mut self, leader: &KeyValue, lease: i64) -> Result<(), EtcdError> {
        if leader.lease() == lease {
            self.lead(leader.create_revision());
            return Ok(());
        }
        let key = self.key();
        let wrong = |problem: String| EtcdError::Key { key: key.clone(), problem };
        let Leader { conductor, address } =
            serde_json::from_slice(leader.value()).map_err(|error| wrong(error.to_string()))?;
        let id: ConductorId = conductor.parse().map_err(|error| wrong(format!("conductor: {error}")))?;
        self.own = None;
        if id == self.candidate.id {
            // Of a lease that it had before, which is about to end.
            self.tell(Leadership::Unknown);
            return Ok(());
        }
        self.tell(Leadership::Other { address });
        Ok(())
    }

    fn tell(&self, leadership: Leadership) {
        self.leadership.send_if_modified(|known| {
            let is_new = *known != leadership;
            if is_new {
                tracing::info!(?leadership, "who leads");
                *known = leadership;
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
            if event.kv().is_some_and(|key| key.mod_revision() <= self.looked) {
                continue;
            }
            match (event.event_type(), event.kv()) {
                (EventType::Put, Some(leader)) => self.learn(leader, open.lease)?,
                (EventType::Put, None) => {}
                (EventType::Delete, _) => {
                    self.own = None;
                    let jitter = JITTER.mul_f64((random_u64() % 1024) as f64 / 1024.0);
                    self.clock.sleep(jitter).await;
                    self.look(open).await?;
                }
            }
        }
        Ok(())
    }
}
