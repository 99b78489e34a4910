//! The grants of an engine.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use baton_memory::MemoryRegion;
use baton_types::GrantId;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use metrics::Gauge;
use tokio::sync::{Notify, mpsc};

use super::{Access, Arrival, ArrivalReceiver, Arrived, BatchKey, Grant, GrantSpec, Trailer, ended};
use crate::error::{Refusal, RefusalReason as Reason};
use crate::{SegmentId, TransferError};

/// Ended grants that are remembered.
const REMEMBERED_ENDS: usize = 1024;
/// Batches that are remembered to have arrived under ended grants.
const REMEMBERED_BATCHES: usize = 1 << 16;

#[derive(Default)]
struct Table {
    live: HashMap<GrantId, Arc<Grant>>,
    by_expiry: BTreeSet<(Instant, GrantId)>,
    /// Oldest first.
    ended: VecDeque<Ended>,
    /// Batches in `ended`.
    remembered: usize,
}

/// A grant that has ended, and how: for the text of a refusal, and for writers who missed an
/// answer.
struct Ended {
    id: GrantId,
    reason: Reason,
    /// What has arrived under it.
    complete: Arrived,
}

impl Table {
    /// Remembers a grant as ended. Returns those that are forgotten for it.
    fn remove(&mut self, id: GrantId, reason: Reason) -> Vec<Ended> {
        let mut forgotten = Vec::new();
        let Some(grant) = self.live.remove(&id) else { return forgotten };
        self.by_expiry.remove(&(grant.expires, id));
        let complete = grant.take_complete();
        self.remembered += complete.len();
        self.ended.push_back(Ended { id, reason, complete });
        while self.ended.len() > REMEMBERED_ENDS || self.remembered > REMEMBERED_BATCHES {
            let Some(oldest) = self.ended.pop_front() else { break };
            self.remembered -= oldest.complete.len();
            forgotten.push(oldest);
        }
        forgotten
    }

    fn ended(&self, id: GrantId) -> Option<&Ended> {
        self.ended.iter().rev().find(|ended| ended.id == id)
    }
}

/// The grants of an engine, and the channel to the reader of arrivals.
pub(crate) struct GrantTable {
    table: Mutex<Table>,
    /// A grant that expires before all others was added.
    earlier: Notify,
    max_grants: usize,
    /// Live grants, as others see it.
    gauge: Gauge,
    arrivals: mpsc::Sender<Arrival>,
    fence: OnceLock<Fence>,
}

/// Ends what writers may do under a closed grant without this processor's help.
type Fence = Box<dyn Fn(GrantId) -> BoxFuture<'static, ()> + Send + Sync>;

impl GrantTable {
    pub(crate) fn new(max_grants: usize, arrival_queue: usize, gauge: Gauge) -> (Self, ArrivalReceiver) {
        let (arrivals, receiver) = mpsc::channel(arrival_queue);
        let table = Mutex::default();
        let earlier = Notify::new();
        let fence = OnceLock::new();
        (Self { table, earlier, max_grants, gauge, arrivals, fence }, ArrivalReceiver(receiver))
    }

    /// Has `fence` run for each grant that ends, before that is said.
    pub(crate) fn set_fence(&self, fence: impl Fn(GrantId) -> BoxFuture<'static, ()> + Send + Sync + 'static) {
        // A second one would be a bug, and not be run.
        let _ = self.fence.set(Box::new(fence));
    }

    /// Resolves when nothing can land under a grant whose fence guard is closed.
    async fn fenced(&self, grant: &Grant) {
        grant.fence.drained().await;
        if let Some(fence) = self.fence.get() {
            fence(grant.id).await;
        }
    }

    pub(crate) fn open(&self, spec: GrantSpec, access: Access, region: Arc<MemoryRegion>) -> Result<(), TransferError> {
        let grant = Grant::new(spec, access, region)?;
        let id = grant.id;
        let expires = grant.expires;
        let mut table = self.lock();
        if table.live.len() >= self.max_grants {
            return Err(TransferError::Overloaded { what: "grants", limit: self.max_grants });
        }
        if table.live.contains_key(&id) {
            return Err(TransferError::invalid("grant.id", format!("{} is in use", id.0)));
        }
        table.live.insert(id, Arc::new(grant));
        table.by_expiry.insert((expires, id));
        self.gauge.set(table.live.len() as f64);
        if table.by_expiry.first() == Some(&(expires, id)) {
            self.earlier.notify_one();
        }
        Ok(())
    }

    pub(crate) fn find(&self, id: GrantId) -> Result<Arc<Grant>, Refusal> {
        let table = self.lock();
        if let Some(grant) = table.live.get(&id) {
            return Ok(Arc::clone(grant));
        }
        Err(ended(id, table.ended(id).map_or(Reason::UnknownGrant, |ended| ended.reason)))
    }

    /// Whether a batch has arrived, all of it, under a grant that is about to end or remembered.
    pub(crate) fn has_arrived(&self, id: GrantId, key: &BatchKey) -> bool {
        let table = self.lock();
        match table.live.get(&id) {
            Some(grant) => grant.is_complete(key),
            None => table.ended(id).is_some_and(|ended| ended.complete.contains(key)),
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lock().live.len()
    }

    /// Ends a grant. From this call on nothing new lands; the future resolves when what was landing
    /// has.
    pub(crate) fn revoke(self: &Arc<Self>, id: GrantId) -> impl Future<Output = ()> + Send + use<> {
        let table = Arc::clone(self);
        let grant = self.find(id).ok();
        if let Some(grant) = &grant {
            grant.fence.close();
        }
        async move {
            // It stays in the table until it is fenced, so that a second call waits as well.
            if let Some(grant) = grant {
                table.fenced(&grant).await;
                table.remove(&grant, Reason::Revoked);
            }
        }
    }

    /// Ends every grant, at shutdown.
    pub(crate) fn close_all(&self) {
        let grants: Vec<_> = self.lock().live.values().cloned().collect();
        grants.iter().for_each(|grant| {
            grant.fence.close();
        });
    }

    /// Ends grants when their time is over. Runs as long as the engine.
    pub(crate) async fn expire(&self) {
        // At most one for each grant. None waits for another: a fence takes its time, and who hears
        // of the end may be slow.
        let mut ending = FuturesUnordered::new();
        loop {
            let earlier = self.earlier.notified();
            let next = self.lock().by_expiry.first().copied();
            let due = async {
                match next {
                    Some((at, _)) => baton_runtime::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {
                    let expired = self.take_expired().into_iter();
                    ending.extend(expired.map(|(grant, first)| self.expire_one(grant, first)));
                }
                Some(()) = ending.next() => {}
                () = earlier => {}
            }
        }
    }

    /// Closes the grants whose time is over.
    fn take_expired(&self) -> Vec<(Arc<Grant>, bool)> {
        let mut table = self.lock();
        let now = baton_runtime::now();
        let mut expired = Vec::new();
        while let Some(&(at, id)) = table.by_expiry.first()
            && at <= now
        {
            table.by_expiry.pop_first();
            expired.extend(table.live.get(&id).map(|grant| (Arc::clone(grant), grant.fence.close())));
        }
        expired
    }

    /// `first`: it has not been revoked before.
    async fn expire_one(&self, grant: Arc<Grant>, first: bool) {
        self.fenced(&grant).await;
        // It counts among the live ones until this can be said, so that there are never more of
        // these than grants may be. An owner that dropped the receiver does not want to know.
        let room = if first { self.room().await } else { None };
        self.remove(&grant, Reason::Expired);
        if let Some(room) = room {
            room.send(Arrival::GrantExpired { grant: grant.id });
        }
    }

    /// Of a grant that is fenced.
    fn remove(&self, grant: &Grant, reason: Reason) {
        grant.forget_incomplete();
        let mut table = self.lock();
        let forgotten = table.remove(grant.id, reason);
        self.gauge.set(table.live.len() as f64);
        drop(table);
        // Many batches, perhaps: no task waits for that.
        drop(forgotten);
    }

    /// Room for one arrival. Waits while the owner's queue is full; `None`: the receiver was
    /// dropped.
    pub(crate) async fn room(&self) -> Option<mpsc::Permit<'_, Arrival>> {
        self.arrivals.reserve().await.ok()
    }

    /// Takes account of a landed part and, if this completes its batch, tells the owner. The room
    /// comes first: between account and notification there is no point at which this could be
    /// dropped.
    pub(crate) fn commit(
        &self,
        room: Option<mpsc::Permit<'_, Arrival>>,
        id: GrantId,
        key: &BatchKey,
        segment: SegmentId,
        trailer: &Trailer,
    ) -> Result<(), Refusal> {
        let settled = self.find(id).and_then(|grant| {
            // A fence waits for the notification, too: none comes after it.
            let _pass = grant.fence.enter().ok_or_else(|| ended(id, Reason::Revoked))?;
            let complete = grant.commit(key, segment, trailer, baton_runtime::now())?;
            if let (Some(room), Some(bytes)) = (room, complete) {
                room.send(Arrival::Batch { grant: id, tag: trailer.tag, bytes, from: key.writer.node.clone() });
            }
            Ok(())
        });
        match settled {
            // Its writer has missed the answer.
            Err(_) if self.has_arrived(id, key) => Ok(()),
            settled => settled,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{Generation, NodeStart};

    use super::*;
    use crate::grant::tests::{reason, spec};

    #[tokio::test]
    async fn grant_revoke_waits_for_landing_writes_and_is_remembered() {
        let (table, _arrivals) = GrantTable::new(1, 1, Gauge::noop());
        let table = Arc::new(table);
        let region = Arc::new(MemoryRegion::allocate(200).unwrap());
        table.open(spec(vec![0..10]), Access::Write, Arc::clone(&region)).unwrap();
        let full =
            table.open(GrantSpec { id: GrantId(2), ..spec(vec![]) }, Access::Write, Arc::clone(&region)).unwrap_err();
        assert!(matches!(full, TransferError::Overloaded { what: "grants", limit: 1 }), "{full}");
        let grant = table.find(GrantId(1)).unwrap();
        let pass = grant.fence.enter().unwrap();
        let first = table.revoke(GrantId(1));
        let second = table.revoke(GrantId(1));
        assert!(grant.fence.enter().is_none(), "closed from the call on");
        let mut both = Box::pin(async { tokio::join!(first, second) });
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut both).await.is_err());
        drop(pass);
        both.await;
        assert_eq!(reason(table.find(GrantId(1)).map(|_| ())), Reason::Revoked);
        assert_eq!(reason(table.find(GrantId(9)).map(|_| ())), Reason::UnknownGrant);
        assert_eq!(table.len(), 0);
    }

    #[tokio::test]
    async fn grants_expire_in_order_and_report_it() {
        let (table, mut arrivals) = GrantTable::new(10, 10, Gauge::noop());
        let table = Arc::new(table);
        let region = Arc::new(MemoryRegion::allocate(200).unwrap());
        let open = |id, after| {
            let expires = Instant::now() + Duration::from_millis(after);
            table
                .open(GrantSpec { id: GrantId(id), expires, ..spec(vec![0..10]) }, Access::Write, Arc::clone(&region))
                .unwrap();
        };
        open(1, 60_000);
        open(2, 30);
        let events = async {
            open(3, 10);
            [arrivals.recv().await.unwrap(), arrivals.recv().await.unwrap()]
        };
        let events = tokio::select! {
            events = events => events,
            () = table.expire() => unreachable!("runs for ever"),
        };
        assert_eq!(events, [3, 2].map(|id| Arrival::GrantExpired { grant: GrantId(id) }));
        assert_eq!(reason(table.find(GrantId(2)).map(|_| ())), Reason::Expired);
        assert!(table.find(GrantId(1)).is_ok());
    }

    #[tokio::test]
    async fn batch_that_arrived_stays_acknowledged_after_its_grant_ended() {
        let (table, mut arrivals) = GrantTable::new(10, 10, Gauge::noop());
        let table = Arc::new(table);
        let region = Arc::new(MemoryRegion::allocate(200).unwrap());
        let id = GrantId(1);
        table.open(spec(vec![0..10]), Access::Write, region).unwrap();
        let writer = NodeStart { node: "w".parse().unwrap(), generation: Generation(5) };
        let key = |batch| BatchKey { writer: writer.clone(), batch };
        let commit = |batch, parts| {
            let trailer = Trailer { part: 0, parts, bytes: 9, tag: 0 };
            (table.clone(), key(batch), trailer)
        };
        let run = |(table, key, trailer): (Arc<GrantTable>, BatchKey, Trailer)| async move {
            table.commit(table.room().await, id, &key, SegmentId(3), &trailer)
        };
        assert_eq!(run(commit(1, 1)).await, Ok(()));
        assert_eq!(run(commit(2, 2)).await, Ok(()));
        table.revoke(id).await;
        assert_eq!((run(commit(1, 1)).await, table.has_arrived(id, &key(1))), (Ok(()), true));
        assert_eq!(reason(run(commit(2, 2)).await), Reason::Revoked);
        assert!(matches!(arrivals.try_recv(), Some(Arrival::Batch { .. })));
        assert_eq!(arrivals.try_recv(), None, "once");
    }

    #[tokio::test]
    async fn slow_expiry_of_a_grant_delays_no_other() {
        let (table, mut arrivals) = GrantTable::new(10, 10, Gauge::noop());
        let table = Arc::new(table);
        let region = Arc::new(MemoryRegion::allocate(200).unwrap());
        for id in [1, 2] {
            let expires = Instant::now() + Duration::from_millis(id);
            let spec = GrantSpec { id: GrantId(id), expires, ..spec(vec![0..10]) };
            table.open(spec, Access::Write, Arc::clone(&region)).unwrap();
        }
        let first = table.find(GrantId(1)).unwrap();
        let pass = first.fence.enter().unwrap();
        let events = async {
            let second = arrivals.recv().await.unwrap();
            drop(pass);
            [second, arrivals.recv().await.unwrap()]
        };
        let events = tokio::select! {
            events = events => events,
            () = table.expire() => unreachable!("runs for ever"),
        };
        assert_eq!(events, [2, 1].map(|id| Arrival::GrantExpired { grant: GrantId(id) }));
        assert_eq!(table.len(), 0);
    }
}
