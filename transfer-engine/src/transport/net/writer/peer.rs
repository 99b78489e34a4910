//! The lanes to one owner: opened when needed, shared by batches, opened again after failures; over
//! the best way that works.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::NodeStart;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::lane::{Connected, Lane};
use super::part::LaneEnd;
use super::route::{Attempts, Busy, Failure, Route, Way};
use crate::engine::Host;
use crate::path::{PathReport, PathStats};
use crate::transport::net::rdma::RdmaAddress;
use crate::transport::net::shm::ShmAddress;
use crate::{TransferError, TransportAddress, TransportChoice, TransportKind};

/// How long a part waits for one more lane, if there is one.
const PATIENCE_FOR_ANOTHER: Duration = Duration::from_millis(5);
/// Lanes over shared memory: copies are made by the owner, on as many of its threads.
const SHM_LANES: usize = 2;

/// An owner, and the ways to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PeerKey {
    pub(crate) owner: NodeStart,
    pub(crate) addresses: Vec<TransportAddress>,
}

/// Which lanes will do.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// Only those opened after this moment, of those over this route.
    pub(crate) fresh: Option<(Instant, Arc<Route>)>,
    /// None of these kinds, which cannot carry it; and why.
    pub(crate) without: Vec<(TransportKind, String)>,
}

/// One owner that this engine writes to.
pub(crate) struct Peer {
    pub(crate) host: Arc<Host>,
    pub(crate) owner: NodeStart,
    /// Permits are bytes.
    pub(crate) in_flight: Arc<Semaphore>,
    pub(crate) stats: Arc<PathStats>,
    /// Best first; those of one kind next to each other.
    routes: Vec<Arc<Route>>,
    lanes: Mutex<Vec<Arc<Lane>>>,
    next_connection: Arc<AtomicU64>,
}

impl Peer {
    pub(crate) fn new(host: Arc<Host>, choice: TransportChoice, key: PeerKey, next_connection: Arc<AtomicU64>) -> Self {
        let in_flight = Arc::new(Semaphore::new(host.config.max_bytes_in_flight_per_peer as usize));
        let allowed = key.addresses.iter().filter(|address| choice.allows(address.kind));
        let mut routes: Vec<_> = allowed.filter_map(|address| route(&host, address)).collect();
        routes.sort_by_key(|route| route.kind().rank());
        if routes.len() > 1 {
            // The last resort is taken again at once.
            let resort = routes.last().map(|route| route.kind());
            routes.iter().filter(|route| Some(route.kind()) != resort).for_each(|route| route.set_has_others());
        }
        let stats = Arc::new(PathStats::new(&key.owner.node));
        Self { host, owner: key.owner, in_flight, stats, routes, lanes: Mutex::default(), next_connection }
    }

    pub(crate) fn has_lanes(&self) -> bool {
        !self.lanes().is_empty()
    }

    /// How this owner is reached.
    pub(crate) fn path(&self) -> PathReport {
        self.stats.report(&self.owner, self.lanes().len())
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every lane.
    pub(crate) fn disconnect(&self) {
        self.lanes().iter().for_each(|lane| lane.end());
    }

    /// A lane to send over, of the best kind that works. It is the one with the least to do, or a
    /// new one if all have much to do.
    pub(crate) async fn lane(self: &Arc<Self>, wanted: &Wanted) -> Result<Arc<Lane>, TransferError> {
        let mut failed = None;
        let mut last = None;
        let usable = |routes: &&[Arc<Route>]| wanted.without.iter().all(|(kind, _)| *kind != routes[0].kind());
        let mut ways = self.routes.chunk_by(|a, b| a.kind() == b.kind()).filter(usable).peekable();
        while let Some(routes) = ways.next() {
            let found = match ways.peek() {
                Some(_) => self.try_lane(routes, wanted).await,
                None => self.insist_on_lane(routes, wanted).await,
            };
            match found {
                Ok(lane) => {
                    self.stats.on_choice(lane.kind, failed, self.is_detour(&lane, wanted));
                    return Ok(lane);
                }
                // What no other way would change.
                Err(stale @ TransferError::StaleGeneration { .. }) => return Err(stale),
                Err(failure) => {
                    failed = failed.or_else(|| Some((routes[0].kind(), failure.clone())));
                    last = Some(failure);
                }
            }
        }
        Err(last.unwrap_or_else(|| self.no_way(wanted)))
    }

    /// Whether a lane was chosen because a better kind cannot carry this part: that says nothing
    /// about the path of the others.
    fn is_detour(&self, lane: &Lane, wanted: &Wanted) -> bool {
        let better = |route: &Arc<Route>| route.kind().rank() < lane.kind.rank();
        let mut better = self.routes.iter().filter(|route| better(route)).map(|route| route.kind());
        better.any(|kind| wanted.without.iter().any(|(without, _)| *without == kind))
    }

    fn no_way(&self, wanted: &Wanted) -> TransferError {
        let mut problem = format!("node {} cannot be reached by {}", self.owner.node, self.host.config.transport);
        for (kind, reason) in &wanted.without {
            problem.push_str(&format!("; {kind}: {reason}"));
        }
        TransferError::invalid("segment descriptor", problem)
    }

    /// A lane over one kind of routes while there are others to fall back on. Each is tried once,
    /// and then again when its pause is over. After a failure it is tried in the background; the
    /// batch goes another way meanwhile.
    async fn try_lane(self: &Arc<Self>, routes: &[Arc<Route>], wanted: &Wanted) -> Result<Arc<Lane>, TransferError> {
        if let Some(lane) = self.open_lane(routes, wanted).await {
            return Ok(lane);
        }
        let mut error = self.no_way(wanted);
        for route in routes {
            if route.probing.load(Relaxed) {
                continue;
            }
            let asked = baton_runtime::now();
            let mut attempts = route.attempts.lock().await;
            if let Some(lane) = self.best(routes, wanted) {
                return Ok(lane);
            }
            if let Some(failure) = attempts.failure_since(asked) {
                error = failure;
            } else if let Some(failure) = attempts.take_turn() {
                error = failure;
                self.probe(route);
            } else {
                drop(attempts);
                match self.open_beside(route, wanted).await {
                    Ok(lane) => return Ok(lane),
                    Err(failure) => error = failure,
                }
            }
        }
        Err(error)
    }

    /// Tries a route that failed before, beside everything else.
    fn probe(self: &Arc<Self>, route: &Arc<Route>) {
        let peer = Arc::clone(self);
        let route = Arc::clone(route);
        route.probing.store(true, Relaxed);
        self.host.tasks.spawn_request("transfer probe", async move {
            let _busy = Busy(&route.probing);
            let mut attempts = route.attempts.lock().await;
            // The outcome is in `attempts` and among the lanes.
            let _ = peer.open_or_mark(&route, &mut attempts).await;
        });
    }

    /// Connects, whether or not the batch lives to see it: what comes of it is for those after it,
    /// too.
    async fn open_beside(self: &Arc<Self>, route: &Arc<Route>, wanted: &Wanted) -> Result<Arc<Lane>, TransferError> {
        let (done, result) = oneshot::channel();
        let peer = Arc::clone(self);
        let route = Arc::clone(route);
        let wanted = wanted.clone();
        let asked = baton_runtime::now();
        self.host.tasks.spawn_request("transfer connect", async move {
            let mut attempts = route.attempts.lock().await;
            // Another task may have been first.
            let found = match (peer.best(std::slice::from_ref(&route), &wanted), attempts.failed_after(asked)) {
                (Some(lane), _) => Ok(lane),
                (None, Some(error)) => Err(error),
                (None, None) => peer.open_or_mark(&route, &mut attempts).await,
            };
            // The batch may be over.
            let _ = done.send(found);
        });
        result.await.unwrap_or(Err(TransferError::Closed))
    }

    /// The best lane there is over these routes, or one more if it has much to do.
    async fn open_lane(self: &Arc<Self>, routes: &[Arc<Route>], wanted: &Wanted) -> Option<Arc<Lane>> {
        let best = self.best(routes, wanted)?;
        if best.load() < self.host.config.stripe_bytes {
            return Some(best);
        }
        for route in routes.iter().filter(|route| self.lanes_of(route) < route.max_lanes) {
            let Ok(attempts) = route.attempts.try_lock() else { continue };
            let due = attempts.another_is_due();
            let first = attempts.another_is_first();
            drop(attempts);
            if due && !route.opening.swap(true, Relaxed) {
                let opened = self.open_another(route);
                // Mostly a matter of a round trip. If it is not, this part goes over the best there
                // is, and later ones do not wait at all.
                if first && let Ok(Ok(lane)) = timeout(PATIENCE_FOR_ANOTHER, opened).await {
                    return Some(lane);
                }
                break;
            }
        }
        Some(best)
    }

    fn lanes_of(&self, route: &Arc<Route>) -> usize {
        self.lanes().iter().filter(|lane| Arc::ptr_eq(&lane.route, route)).count()
    }

    fn best(&self, routes: &[Arc<Route>], wanted: &Wanted) -> Option<Arc<Lane>> {
        let usable = |lane: &&Arc<Lane>| {
            lane.is_open()
                && wanted
                    .fresh
                    .as_ref()
                    .is_none_or(|(moment, route)| lane.opened > *moment || !Arc::ptr_eq(&lane.route, route))
                && routes.iter().any(|route| Arc::ptr_eq(&lane.route, route))
        };
        // Among equals the one opened first, so that the others become idle and close.
        self.lanes().iter().filter(usable).max_by_key(|lane| (Reverse(lane.load()), Reverse(lane.id))).cloned()
    }

    /// Connects over the last kind of routes there is. Tries them again and again, route by route,
    /// until there is a lane, the owner is gone, or the time for connecting is over. Of many that
    /// wait here, one connects and all see what it comes to.
    async fn insist_on_lane(
        self: &Arc<Self>,
        routes: &[Arc<Route>],
        wanted: &Wanted,
    ) -> Result<Arc<Lane>, TransferError> {
        if let Some(lane) = self.open_lane(routes, wanted).await {
            return Ok(lane);
        }
        let asked = baton_runtime::now();
        let mut error = self.no_way(wanted);
        let limit = asked + self.host.config.connect_timeout;
        loop {
            let mut gone = true;
            let mut next = limit;
            for route in routes {
                let mut attempts = route.attempts.lock().await;
                if let Some(lane) = self.best(routes, wanted) {
                    return Ok(lane);
                }
                if baton_runtime::now() >= limit {
                    return Err(attempts.failed_after(asked).unwrap_or(error));
                }
                let opened = match attempts.pausing() {
                    Some(failed) => Err(failed),
                    None => self.open_or_mark(route, &mut attempts).await,
                };
                match opened {
                    Ok(lane) => return Ok(lane),
                    // What no attempt would change.
                    Err(end @ (TransferError::StaleGeneration { .. } | TransferError::Incompatible { .. })) => {
                        return Err(end);
                    }
                    Err(failed) => error = failed,
                }
                gone &= attempts.is_gone(asked);
                next = next.min(attempts.next().unwrap_or(limit));
            }
            if gone || baton_runtime::now() >= limit {
                return Err(error);
            }
            baton_runtime::sleep_until(next).await;
        }
    }

    async fn open(self: &Arc<Self>, route: &Arc<Route>, attempts: &mut Attempts) -> Result<Arc<Lane>, Failure> {
        let id = self.next_connection.fetch_add(1, Relaxed);
        let metrics = self.host.metrics.of(route.kind());
        match route.connect(self, id).await {
            Ok(connected) => {
                metrics.connects_ok.increment(1);
                attempts.connected();
                Ok(self.start(route, connected, id))
            }
            Err(failure) => {
                metrics.connects_failed.increment(1);
                tracing::debug!(node = %self.owner.node, way = ?route.way, error = %failure.error, "cannot connect");
                Err(failure)
            }
        }
    }

    async fn open_or_mark(
        self: &Arc<Self>,
        route: &Arc<Route>,
        attempts: &mut Attempts,
    ) -> Result<Arc<Lane>, TransferError> {
        self.open(route, attempts).await.map_err(|failure| {
            let error = failure.error.clone();
            attempts.failed(failure);
            error
        })
    }

    /// Opens one more lane, whether or not a part waits for it.
    fn open_another(self: &Arc<Self>, route: &Arc<Route>) -> oneshot::Receiver<Arc<Lane>> {
        let (done, opened) = oneshot::channel();
        let peer = Arc::clone(self);
        let route = Arc::clone(route);
        self.host.tasks.spawn_request("transfer connect", async move {
            let _busy = Busy(&route.opening);
            let mut attempts = route.attempts.lock().await;
            match peer.open(&route, &mut attempts).await {
                // Who waited may have gone on.
                Ok(lane) => drop(done.send(lane)),
                Err(_) => attempts.no_more_for_now(),
            }
        });
        opened
    }

    fn start(self: &Arc<Self>, route: &Arc<Route>, connected: Connected, id: u64) -> Arc<Lane> {
        let Connected { stream, carrier } = connected;
        let (lane, task) = Lane::new(self, Arc::clone(route), stream, id);
        self.lanes().push(Arc::clone(&lane));
        let listed = Listed { peer: Arc::clone(self), id };
        let route = Arc::clone(route);
        self.host.tasks.spawn_request("transfer lane", async move {
            let end = carrier.run(task).await;
            let node = listed.peer.owner.node.clone();
            drop(listed);
            if let LaneEnd::Failed(reason) | LaneEnd::Protocol(reason) = end {
                tracing::info!(%node, way = ?route.way, reason, "a transfer connection failed");
            }
        });
        lane
    }
}

/// A lane's place among its peer's, until its task has ended, however that comes.
struct Listed {
    peer: Arc<Peer>,
    id: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.peer.lanes().retain(|lane| lane.id != self.id);
    }
}

/// The route to an address, if it leads anywhere from here.
fn route(host: &Host, address: &TransportAddress) -> Option<Arc<Route>> {
    match address.kind {
        TransportKind::Tcp => Some(Route::new(Way::Tcp(address.address.clone()), host.config.lanes_per_peer)),
        TransportKind::Shm => {
            let shm = ShmAddress::parse(&address.address).filter(ShmAddress::is_here)?;
            Some(Route::new(Way::Shm(shm), SHM_LANES.min(host.config.lanes_per_peer)))
        }
        TransportKind::Rdma => {
            host.rdma.get()?;
            Some(Route::new(Way::Rdma(RdmaAddress::parse(&address.address)?), 1))
        }
        TransportKind::Fake => None,
    }
    .map(Arc::new)
}
