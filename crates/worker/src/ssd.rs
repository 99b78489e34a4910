//! The SSD below a node's arena: what its core wants written, read or forgotten, carried out on
//! threads that may wait for the disk.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_engine::KvArena;
use baton_kv_cache::BlockHasher;
use baton_kv_store::{KvStore, RecordRef, Reservation, StoreError, StoreOptions, Written};
use baton_runtime::Clock;
use baton_runtime::settings::BadSetting;
use baton_scheduler::{FetchedBytes, LAYER_DEADLINE, MAX_STORES, RequestKey, TierEffect, TieredCore};
use baton_types::{BlockHash, BlockId, ErrorKind, FetchReport, KvLayout, NodeInfo, Refused};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::fetch::{FetchEvent, Fetching};
use crate::input::Input;
use crate::layer_barrier::{LayerBarrierKeeper, layer_barrier};
use crate::metrics::SsdMetrics;
use crate::node::NodeParts;

/// Threads that read at once. If they all wait for the disk, what it holds is computed.
pub(crate) const MAX_LOADS: usize = 64;
/// A disk that fails again and again is logged once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What the loop hears of its SSD, reads apart.
#[derive(Debug)]
pub enum SsdEvent {
    /// A block was written; `None` if the thread that did it is gone.
    Stored(BlockHash, Option<Written>),
    /// A block could not be read.
    ReadFailed(RecordRef, StoreError),
}

/// The books of the store, and the arena that it backs.
pub struct Ssd {
    store: KvStore,
    arena: KvArena,
    clock: Arc<dyn Clock>,
    loads: Arc<Semaphore>,
    metrics: SsdMetrics,
    write_log: FailureLog,
    read_log: LogLimit,
}

/// Lets a line into the log once per [`LOG_INTERVAL`].
#[derive(Default)]
struct LogLimit(Option<Instant>);

impl LogLimit {
    fn allows(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|logged| now.saturating_duration_since(logged) >= LOG_INTERVAL);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

/// What the log says of writes.
#[derive(Default)]
struct FailureLog {
    limit: LogLimit,
    /// Failures since the last line.
    failed: u64,
    /// The last line says that writes fail.
    is_failing: bool,
}

impl FailureLog {
    /// A write failed. Whether to log it, and how many failed since the last line.
    fn on_failure(&mut self, now: Instant) -> Option<u64> {
        self.failed += 1;
        if !self.limit.allows(now) {
            return None;
        }
        self.is_failing = true;
        Some(std::mem::take(&mut self.failed))
    }

    /// A write did not fail. Whether to log it.
    fn on_success(&mut self) -> bool {
        std::mem::take(&mut self.is_failing)
    }
}

/// What is free on the disk of a folder, bytes; `None` if it does not say.
fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Names the setting that a store was refused for.
fn not_opened(folder: &Path, error: &StoreError) -> BadSetting {
    match error {
        StoreError::Invalid { what: "capacity_bytes", problem } => BadSetting::invalid("ssd_bytes", problem),
        StoreError::Foreign { .. } => BadSetting::invalid("ssd_folder", error.to_string()),
        StoreError::Io { .. } | StoreError::Locked { .. } => BadSetting::unavailable("ssd_folder", error.to_string()),
        error => BadSetting::unavailable("ssd_folder", format!("{}: {error}", folder.display())),
    }
}

impl Ssd {
    /// How many blocks a core may have written at once: none without a folder.
    pub fn max_stores(settings: &Settings) -> usize {
        if settings.ssd_folder.is_some() { MAX_STORES } else { 0 }
    }

    /// Opens the store that the settings name, if they do, and tells the core what is there from an
    /// earlier life.
    pub fn open<E>(
        settings: &Settings,
        parts: &NodeParts<E>,
        core: &mut impl TieredCore,
    ) -> anyhow::Result<Option<Self>> {
        let Some(folder) = settings.ssd_folder.as_deref() else { return Ok(None) };
        Self::open_in(folder, settings.ssd_bytes, parts, core).map(Some)
    }

    fn open_in<E>(
        folder: &Path,
        capacity_bytes: u64,
        parts: &NodeParts<E>,
        core: &mut impl TieredCore,
    ) -> anyhow::Result<Self> {
        let layout = parts.arena.layout();
        let options = StoreOptions {
            fingerprint: fingerprint(&parts.info),
            parts: layout.num_layers,
            part_bytes: layout.block_bytes() as u32,
            capacity_bytes,
        };
        let store = KvStore::open(folder, &options).map_err(|error| not_opened(folder, &error))?;
        let recovery = store.recovery();
        tracing::info!(folder = %folder.display(), ?recovery, capacity = store.capacity(), "SSD tier open");
        let room = free_bytes(folder).zip(store.disk_bytes().ok()).map(|(free, own)| free.saturating_add(own));
        if let Some(room) = room.filter(|room| *room < capacity_bytes) {
            let folder = folder.display();
            tracing::warn!(%folder, ssd_bytes = capacity_bytes, room, "ssd_bytes is more than the disk of ssd_folder has room for; lower it, or free the disk");
        }
        core.on_store_recovered(store.iter());
        let arena = parts.arena.clone();
        let clock = Arc::clone(&parts.clock);
        let loads = Arc::new(Semaphore::new(MAX_LOADS));
        Ok(Self {
            store,
            arena,
            clock,
            loads,
            metrics: SsdMetrics::default(),
            write_log: FailureLog::default(),
            read_log: LogLimit::default(),
        })
    }

    /// Carries out what the core decided. Gives back a load that has begun.
    pub fn carry_out<E: Send + 'static>(
        &mut self,
        parts: &NodeParts<E>,
        core: &mut impl TieredCore,
        effect: TierEffect,
    ) -> Option<(RequestKey, Fetching)> {
        #[cfg(any(test, feature = "testing"))]
        crate::testing::note(parts.info.role.as_str(), effect.name());
        match effect {
            TierEffect::Store { hash, parent, block } => self.store(parts, core, hash, parent, block),
            TierEffect::Load { key, hashes, destinations } => {
                return Some((key, self.load(parts, core, key, &hashes, destinations)));
            }
            TierEffect::Forget(hashes) => hashes.into_iter().for_each(|hash| self.forget(hash)),
            TierEffect::Clear => self.clear(),
        }
        None
    }

    /// Writes a block; the answer goes to the node's loop.
    fn store<E: Send + 'static>(
        &mut self,
        parts: &NodeParts<E>,
        core: &mut impl TieredCore,
        hash: BlockHash,
        parent: Option<BlockHash>,
        block: BlockId,
    ) {
        let reserved = self.store.reserve(hash, parent);
        let reservation = match reserved {
            Ok(Some(reservation)) => reservation,
            Ok(None) => return core.on_stored(self.clock.now(), hash, self.store.contains(hash)),
            Err(error) => {
                self.on_write(&Err(error));
                return core.on_stored(self.clock.now(), hash, false);
            }
        };
        if let Some(evicted) = reservation.evicted() {
            self.metrics.evicted.increment(1);
            core.on_store_lost(evicted);
        }
        let arena = self.arena.clone();
        let inputs = parts.inputs.clone();
        parts.tasks.spawn_request("SSD write", async move {
            let written = tokio::task::spawn_blocking(move || write(&arena, block, reservation)).await;
            // A write that panicked gave its slot back.
            let _ = inputs.send(Input::Ssd(SsdEvent::Stored(hash, written.ok()))).await;
        });
    }

    /// Takes in what is only about the store itself.
    pub fn on_event(&mut self, core: &mut impl TieredCore, event: SsdEvent) {
        match event {
            SsdEvent::Stored(hash, written) => self.on_stored(core, hash, written),
            SsdEvent::ReadFailed(record, error) => self.on_read_failed(core, &record, &error),
        }
    }

    /// A write is over.
    fn on_stored(&mut self, core: &mut impl TieredCore, hash: BlockHash, written: Option<Written>) {
        let result = written.map(|written| self.store.commit(written));
        if let Some(result) = &result {
            self.on_write(result);
        }
        core.on_stored(self.clock.now(), hash, matches!(result, Some(Ok(()))));
        self.metrics.bytes.set(self.store.bytes() as f64);
    }

    fn on_write(&mut self, result: &Result<(), StoreError>) {
        match result {
            Ok(()) => {
                self.metrics.written.increment(1);
                if self.write_log.on_success() {
                    tracing::info!("the SSD tier stores blocks again");
                }
            }
            Err(error) => {
                self.metrics.write_errors.increment(1);
                if let Some(failed) = self.write_log.on_failure(self.clock.now()) {
                    tracing::warn!(%error, failed, "the SSD tier cannot store a block; prompts are served without it");
                }
            }
        }
    }

    /// Reads blocks into the arena, layer by layer; the answers are those of a fetch from another
    /// node.
    fn load<E: Send + 'static>(
        &mut self,
        parts: &NodeParts<E>,
        core: &mut impl TieredCore,
        key: RequestKey,
        hashes: &[BlockHash],
        destinations: Vec<BlockId>,
    ) -> Fetching {
        let (keeper, barrier) = layer_barrier();
        let cancel = CancellationToken::new();
        // As many as are still here, without a gap: each is kept from here on.
        let records: Vec<_> = hashes.iter().map_while(|hash| self.store.locate(*hash)).collect();
        let missing = hashes.get(records.len()).copied();
        if let Some(lost) = missing {
            core.on_store_lost(lost);
        }
        let load = Load {
            key,
            layout: self.arena.layout().clone(),
            blocks: records.len(),
            clock: Arc::clone(&self.clock),
            inputs: parts.inputs.clone(),
        };
        let thread = self.loads.clone().try_acquire_owned().map(|place| LoadThread {
            records,
            destinations,
            arena: self.arena.clone(),
            landing: Landing::default(),
            _place: place,
        });
        let cancelled = cancel.clone();
        parts.tasks.spawn_request("SSD read", async move {
            let result = match (thread, missing) {
                (_, Some(lost)) if load.blocks == 0 => Err(refused(format!("block {lost} is not on the SSD any more"))),
                (Ok(thread), _) => load.run(thread, &keeper, &cancelled).await,
                (Err(_), _) => Err(refused(format!("{MAX_LOADS} reads wait for the SSD, as many as may"))),
            };
            // The core first: what the engine computes after a failure must not count.
            load.tell(FetchEvent::Done(key, result)).await;
            keeper.end();
        });
        Fetching { barrier, cancel }
    }

    /// A read failed: its record is none any more.
    fn on_read_failed(&mut self, core: &mut impl TieredCore, record: &RecordRef, error: &StoreError) {
        self.metrics.read_errors.increment(1);
        if self.read_log.allows(self.clock.now()) {
            tracing::warn!(%error, hash = %record.hash(), "a block on the SSD is corrupt; recomputing it");
        }
        if self.store.on_read_failed(record, error) {
            core.on_store_lost(record.hash());
        }
    }

    /// Blocks are here, wherever they came from.
    pub fn on_fetched(&self, fetched: &FetchedBytes) {
        if fetched.transport == FetchReport::SSD {
            self.metrics.read.increment(fetched.bytes / self.arena.layout().block_bytes_all_layers() as u64);
        }
    }

    /// Writes in a row that failed, if it takes no blocks since; else 0.
    pub fn write_failures(&self) -> u32 {
        self.store.failures_if_degraded()
    }

    /// Forgets a block that is no good.
    fn forget(&mut self, hash: BlockHash) {
        if let Err(error) = self.store.remove(hash) {
            tracing::warn!(%error, %hash, "a block that is no good stays on the SSD, and may come back after a restart");
        }
    }

    /// Forgets everything.
    fn clear(&mut self) {
        if let Err(error) = self.store.clear() {
            tracing::warn!(%error, "the SSD tier could not be cleared whole; what is left may come back after a restart");
        }
    }
}

/// Blocks of another model, layout or KV compatibility class are not these.
fn fingerprint(info: &NodeInfo) -> [u8; 16] {
    let layout = &info.layout;
    let shape =
        [layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens, layout.row_bytes() as u32];
    let what = format!("{}/{}", layout.dtype.as_str(), info.kv_class);
    BlockHasher::new(layout.fingerprint(), what.as_bytes()).next(None, &shape).0
}

fn write(arena: &KvArena, block: BlockId, reservation: Reservation) -> Written {
    let bytes = arena.layout().block_bytes();
    let mut copy = vec![0; arena.layout().block_bytes_all_layers()];
    for (layer, part) in (0..).zip(copy.chunks_exact_mut(bytes)) {
        arena.copy_out(layer, block, part);
    }
    let parts: Vec<_> = copy.chunks_exact(bytes).collect();
    reservation.write(&parts)
}

/// Whether what comes from the disk may still be written into the arena.
#[derive(Clone, Default)]
struct Landing(Arc<Mutex<bool>>);

impl Landing {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is written from here on, whatever the disk still gives.
    fn close(&self) {
        *self.lock() = true;
    }

    /// `false`: it was closed before.
    fn write(&self, write: impl FnOnce()) -> bool {
        let is_closed = self.lock();
        if !*is_closed {
            write();
        }
        !*is_closed
    }
}

/// What the thread that waits for the disk has to say.
enum Read {
    /// One more layer of all blocks is in the arena.
    Layer,
    /// A record could not be read; nothing follows.
    Failed(RecordRef, StoreError),
}

/// Blocks on their way from the disk to the arena: the thread that waits for the disk.
struct LoadThread {
    records: Vec<RecordRef>,
    destinations: Vec<BlockId>,
    arena: KvArena,
    landing: Landing,
    _place: OwnedSemaphorePermit,
}

impl LoadThread {
    fn run(mut self, told: &mpsc::Sender<Read>) {
        let mut part = vec![0; self.arena.layout().block_bytes()];
        for layer in 0..self.arena.layout().num_layers {
            for index in 0..self.records.len() {
                if let Err(error) = self.records[index].read_part(layer, &mut part) {
                    // If the receiver is gone, the next request that reads it finds out.
                    let _ = told.blocking_send(Read::Failed(self.records.swap_remove(index), error));
                    return;
                }
                let block = self.destinations[index];
                if !self.landing.write(|| self.arena.copy_in(layer, block, &part)) {
                    return;
                }
            }
            if told.blocking_send(Read::Layer).is_err() {
                return;
            }
        }
    }
}

/// The same load, as the node sees it.
struct Load<E> {
    key: RequestKey,
    layout: KvLayout,
    blocks: usize,
    clock: Arc<dyn Clock>,
    inputs: mpsc::Sender<Input<E>>,
}

impl<E> Load<E> {
    async fn tell(&self, event: FetchEvent) {
        // The loop is gone only when the process ends.
        let _ = self.inputs.send(Input::SsdRead(event)).await;
    }

    /// Returns once nothing is written into the destinations any more, however long the disk takes.
    async fn run(
        &self,
        thread: LoadThread,
        keeper: &LayerBarrierKeeper,
        cancel: &CancellationToken,
    ) -> Result<FetchedBytes, Refused> {
        self.tell(FetchEvent::Begun(self.key, self.blocks)).await;
        let landing = thread.landing.clone();
        let (told, mut heard) = mpsc::channel(self.layout.num_layers as usize);
        let _reading = tokio::task::spawn_blocking(move || thread.run(&told));
        let result = self.layers(&mut heard, keeper, cancel).await;
        landing.close();
        let bytes = (self.blocks * self.layout.block_bytes_all_layers()) as u64;
        result.map(|()| FetchedBytes { bytes, transport: FetchReport::SSD.to_owned() })
    }

    async fn layers(
        &self,
        heard: &mut mpsc::Receiver<Read>,
        keeper: &LayerBarrierKeeper,
        cancel: &CancellationToken,
    ) -> Result<(), Refused> {
        for layer in 0..self.layout.num_layers {
            let read = tokio::select! {
                read = heard.recv() => read,
                () = cancel.cancelled() => {
                    return Err(Refused { kind: ErrorKind::Cancelled, message: "it is not needed any more".to_owned() });
                }
                () = self.clock.sleep(LAYER_DEADLINE) => {
                    let message = format!("the SSD did not give layer {layer} within {LAYER_DEADLINE:?}");
                    return Err(Refused { kind: ErrorKind::DeadlineExceeded, message });
                }
            };
            match read {
                Some(Read::Layer) => self.tell(FetchEvent::Layer(self.key, layer)).await,
                Some(Read::Failed(record, error)) => {
                    let message = format!("reading block {}: {error}", record.hash());
                    // As in `tell`.
                    let _ = self.inputs.send(Input::Ssd(SsdEvent::ReadFailed(record, error))).await;
                    return Err(refused(message));
                }
                None => return Err(refused("the thread that reads the SSD panicked".to_owned())),
            }
            // The last one is passed when the core knows that all is here.
            if layer + 1 < self.layout.num_layers {
                keeper.open(layer + 1);
            }
        }
        Ok(())
    }
}

fn refused(message: String) -> Refused {
    Refused { kind: ErrorKind::Unavailable, message }
}

#[cfg(test)]
mod tests {
    use baton_runtime::ManualClock;
    use baton_types::{Attempt, KvDtype, RequestId};

    use super::*;

    #[tokio::test]
    async fn ssd_read_from_a_disk_that_hangs_fails_at_its_deadline() {
        let layout = KvLayout {
            model: 7,
            num_layers: 3,
            num_kv_heads: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 4,
        };
        let key = RequestKey { request: RequestId(1), attempt: Attempt(0) };
        let (inputs, mut told) = mpsc::channel::<Input<()>>(10);
        let clock = ManualClock::default();
        let load = Load { key, layout, blocks: 2, clock: Arc::new(clock.clone()), inputs };
        let (keeper, _gate) = layer_barrier();
        let (thread, mut heard) = mpsc::channel(3);
        thread.send(Read::Layer).await.unwrap();
        let never = CancellationToken::new();
        let hung = async {
            // The first layer is told, and the next one waited for.
            while told.is_empty() {
                tokio::task::yield_now().await;
            }
            clock.advance(LAYER_DEADLINE);
        };
        let (failure, ()) = tokio::join!(load.layers(&mut heard, &keeper, &never), hung);
        let failure = failure.unwrap_err();
        assert_eq!(failure.kind, ErrorKind::DeadlineExceeded, "{failure:?}");
        assert!(matches!(told.recv().await, Some(Input::SsdRead(FetchEvent::Layer(_, 0)))));
        let cancel = CancellationToken::new();
        cancel.cancel();
        assert_eq!(load.layers(&mut heard, &keeper, &cancel).await.unwrap_err().kind, ErrorKind::Cancelled);
        drop(thread);
        let panicked = load.layers(&mut heard, &keeper, &CancellationToken::new()).await.unwrap_err();
        assert_eq!(panicked.kind, ErrorKind::Unavailable);
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn free_bytes_are_those_of_the_folders_disk() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(folder.path()).unwrap() > 0);
        assert_eq!(free_bytes(&folder.path().join("none")), None);
    }

    #[test]
    fn ssd_that_fails_and_recovers_is_logged_once_a_minute() {
        let mut log = FailureLog::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert!(!log.on_success(), "nothing has failed");
        let failures: Vec<_> = (0..=60).filter_map(|seconds| log.on_failure(at(seconds))).collect();
        assert_eq!(failures, [1, 60], "it fails every second");
        assert!(log.on_success() && !log.on_success());
        // It stores every other block.
        let lines: Vec<_> = (61..=180).map(|seconds| (log.on_failure(at(seconds)), log.on_success())).collect();
        let logged: Vec<_> = lines.into_iter().filter(|(fails, stores)| fails.is_some() || *stores).collect();
        assert_eq!(logged, [(Some(60), true), (Some(60), true)]);
    }

    #[test]
    fn ssd_read_writes_no_block_after_its_request_left() {
        let landing = Landing::default();
        let mut written = 0;
        assert!(landing.clone().write(|| written += 1));
        landing.close();
        assert!(!landing.write(|| written += 1));
        assert_eq!(written, 1);
    }
}
