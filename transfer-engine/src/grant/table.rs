//! The grants of an engine.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use baton_memory::MemoryRegion;
use baton_types::GrantId;
use tokio::sync::{Notify, mpsc};

use super::{Access, Arrival, ArrivalReceiver, BatchKey, Grant, GrantSpec, Trailer, ended};
use crate::error::{Refusal, RefusalReason as Reason};
use crate::{SegmentId, TransferError};

/// Ended grants of which the reason is remembered, for the text of a refusal.
const REMEMBERED_ENDS: usize = 256;

#[derive(Default)]
struct Table {
    live: HashMap<GrantId, Arc<Grant>>,
    by_expiry: BTreeSet<(Instant, GrantId)>,
    ended: VecDeque<(GrantId, Reason)>,
}

impl Table {
    fn remove(&mut self, id: GrantId, reason: Reason) {
        let Some(grant) = self.live.remove(&id) else { return };
        self.by_expiry.remove(&(grant.expires, id));
        if self.ended.len() == REMEMBERED_ENDS {
            self.ended.pop_front();
        }
        self.ended.push_back((id, reason));
    }
}

/// The grants of an engine, and the way to whoever hears of what they bring.
pub(crate) struct GrantTable {
    table: Mutex<Table>,
    /// A grant that expires before all others was added.
    earlier: Notify,
    max_grants: usize,
    arrivals: mpsc::Sender<Arrival>,
    fence: OnceLock<Fence>,
}

/// Ends what writers may do under a closed grant without this processor's help.
type Fence = Box<dyn Fn(GrantId) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

impl GrantTable {
    pub(crate) fn new(max_grants: usize, arrival_queue: usize) -> (Self, ArrivalReceiver) {
        let (arrivals, receiver) = mpsc::channel(arrival_queue);
        let table =
            Self { table: Mutex::default(), earlier: Notify::new(), max_grants, arrivals, fence: OnceLock::new() };
        (table, ArrivalReceiver(receiver))
    }

    /// Has `fence` run for each grant that ends, before that is said.
    pub(crate) fn set_fence(
        &self,
        fence: impl Fn(GrantId) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync + 'static,
    ) {
        // A second one would be a bug, and not be run.
        let _ = self.fence.set(Box::new(fence));
    }

    /// Resolves when nothing can land under a grant whose gate is closed.
    async fn fenced(&self, grant: &Grant) {
        grant.gate.drained().await;
        if let Some(fence) = self.fence.get() {
            fence(grant.id).await;
        }
    }

    pub(crate) fn open(&self, spec: GrantSpec, access: Access, region: Arc<MemoryRegion>) -> Result<(), TransferError> {
        let grant = Grant::new(spec, access, region)?;
        let (id, expires) = (grant.id, grant.expires);
        let mut table = self.lock();
        if table.live.len() >= self.max_grants {
            return Err(TransferError::Overloaded { what: "grants", limit: self.max_grants });
        }
        if table.live.contains_key(&id) {
            return Err(TransferError::invalid("grant.id", format!("{} is in use", id.0)));
        }
        table.live.insert(id, Arc::new(grant));
        table.by_expiry.insert((expires, id));
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
        let reason = table.ended.iter().rev().find(|(ended, _)| *ended == id).map(|(_, reason)| *reason);
        Err(ended(id, reason.unwrap_or(Reason::UnknownGrant)))
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().live.len()
    }

    /// Ends a grant. From this call on nothing new lands; the future resolves when what was landing has.
    pub(crate) fn revoke(self: &Arc<Self>, id: GrantId) -> impl Future<Output = ()> + Send + use<> {
        let (table, grant) = (Arc::clone(self), self.find(id).ok());
        if let Some(grant) = &grant {
            grant.gate.close();
        }
        async move {
            // It stays in the table until it is fenced, so that a second call waits as well.
            if let Some(grant) = grant {
                table.fenced(&grant).await;
                table.lock().remove(id, Reason::Revoked);
            }
        }
    }

    /// Ends every grant, at shutdown.
    pub(crate) fn close_all(&self) {
        let grants: Vec<_> = self.lock().live.values().cloned().collect();
        grants.iter().for_each(|grant| {
            grant.gate.close();
        });
    }

    /// Ends grants when their time is over. Runs as long as the engine.
    pub(crate) async fn expire(&self) {
        loop {
            let earlier = self.earlier.notified();
            let next = self.lock().by_expiry.first().copied();
            match next {
                None => earlier.await,
                Some((at, id)) if at <= Instant::now() => self.expire_one(id).await,
                Some((at, _)) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at.into()) => {}
                        () = earlier => {}
                    }
                }
            }
        }
    }

    async fn expire_one(&self, id: GrantId) {
        let Ok(grant) = self.find(id) else { return };
        let expired = grant.gate.close();
        self.fenced(&grant).await;
        self.lock().remove(id, Reason::Expired);
        if expired {
            // Whoever dropped the receiver does not want to know.
            let _ = self.arrivals.send(Arrival::GrantExpired { grant: id }).await;
        }
    }

    /// Takes account of a landed part and, where its batch is complete by it, tells the owner. Waits while the owner's queue is full.
    pub(crate) async fn commit(
        &self,
        grant: &Grant,
        key: &BatchKey,
        segment: SegmentId,
        trailer: &Trailer,
    ) -> Result<(), Refusal> {
        // The place in the queue comes first: between account and notification there is no point at which this could be dropped.
        let place = self.arrivals.reserve().await.ok();
        // A fence waits for the notification, too: none comes after it.
        let _pass = grant.gate.enter().ok_or_else(|| ended(grant.id, Reason::Revoked))?;
        let complete = grant.commit(key, segment, trailer, Instant::now())?;
        if let (Some(place), Some(bytes)) = (place, complete) {
            place.send(Arrival::Batch { grant: grant.id, tag: trailer.tag, bytes, from: key.writer.node.clone() });
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::grant::tests::{reason, spec};

    #[tokio::test]
    async fn revoke_waits_for_what_is_landing_and_is_remembered() {
        let (table, _arrivals) = GrantTable::new(1, 1);
        let table = Arc::new(table);
        let region = Arc::new(MemoryRegion::allocate(200).unwrap());
        table.open(spec(vec![0..10]), Access::Write, Arc::clone(&region)).unwrap();
        let full =
            table.open(GrantSpec { id: GrantId(2), ..spec(vec![]) }, Access::Write, Arc::clone(&region)).unwrap_err();
        assert!(matches!(full, TransferError::Overloaded { what: "grants", limit: 1 }), "{full}");
        let grant = table.find(GrantId(1)).unwrap();
        let pass = grant.gate.enter().unwrap();
        let (first, second) = (table.revoke(GrantId(1)), table.revoke(GrantId(1)));
        assert!(grant.gate.enter().is_none(), "closed from the call on");
        let mut both = Box::pin(async { tokio::join!(first, second) });
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut both).await.is_err());
        drop(pass);
        both.await;
        assert_eq!(reason(table.find(GrantId(1)).map(|_| ())), Reason::Revoked);
        assert_eq!(reason(table.find(GrantId(9)).map(|_| ())), Reason::UnknownGrant);
        assert_eq!(table.len(), 0);
    }

    #[tokio::test]
    async fn grants_expire_in_order_and_say_so() {
        let (table, mut arrivals) = GrantTable::new(10, 10);
        let (table, region) = (Arc::new(table), Arc::new(MemoryRegion::allocate(200).unwrap()));
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
}
