//! The SSD below a prefill node's arena: what its core wants written, read or forgotten, carried out on threads that may wait for the disk.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use baton_engine::KvArena;
use baton_kv_cache::BlockHasher;
use baton_kv_store::{KvStore, RecordRef, Reservation, StoreError, StoreOptions, Written};
use baton_scheduler::{FetchedBytes, PrefillCore, RequestKey};
use baton_types::{BlockHash, BlockId, ErrorKind, FetchReport, NodeInfo, Refused};
use baton_worker::{Fetching, Input, LayerGateKeeper, NodeParts, layer_gate};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::metrics::SsdMetrics;
use crate::role::PrefillInput;

/// The books of the store, and the arena that it backs.
pub struct Ssd {
    store: KvStore,
    arena: KvArena,
    metrics: SsdMetrics,
    /// Whether the last write failed: a disk that is full is told once.
    failing: bool,
}

impl Ssd {
    /// Opens the store in `folder` and tells the core what is there from an earlier life.
    pub fn open(
        folder: &Path,
        capacity_bytes: u64,
        parts: &NodeParts<PrefillInput>,
        core: &mut PrefillCore,
    ) -> anyhow::Result<Self> {
        let layout = parts.arena.layout();
        let options = StoreOptions {
            fingerprint: fingerprint(&parts.info),
            parts: layout.num_layers,
            part_bytes: layout.block_bytes() as u32,
            capacity_bytes,
        };
        let store = KvStore::open(folder, &options).with_context(|| format!("ssd_folder: {}", folder.display()))?;
        let recovery = store.recovery();
        tracing::info!(folder = %folder.display(), ?recovery, capacity = store.capacity(), "SSD tier open");
        core.on_store_recovered(store.iter());
        Ok(Self { store, arena: parts.arena.clone(), metrics: SsdMetrics::default(), failing: false })
    }

    /// Writes a block; the answer goes to the node's loop.
    pub fn store(
        &mut self,
        parts: &NodeParts<PrefillInput>,
        core: &mut PrefillCore,
        hash: BlockHash,
        parent: Option<BlockHash>,
        block: BlockId,
    ) {
        let reserved = self.store.reserve(hash, parent);
        let reservation = match reserved {
            Ok(Some(reservation)) => reservation,
            Ok(None) => return core.on_stored(Instant::now(), hash, self.store.contains(hash)),
            Err(error) => {
                self.on_write(&Err(error));
                return core.on_stored(Instant::now(), hash, false);
            }
        };
        if let Some(evicted) = reservation.evicted() {
            self.metrics.evicted.increment(1);
            core.on_store_lost(evicted);
        }
        let (arena, inputs) = (self.arena.clone(), parts.inputs.clone());
        parts.tasks.spawn_request("SSD write", async move {
            let written = tokio::task::spawn_blocking(move || write(&arena, block, reservation)).await;
            // A write that panicked gave its slot back.
            let _ = inputs.send(Input::Role(PrefillInput::Stored(hash, written.ok()))).await;
        });
    }

    /// A write is over.
    pub fn on_stored(&mut self, core: &mut PrefillCore, hash: BlockHash, written: Option<Written>) {
        let result = written.map(|written| self.store.commit(written));
        if let Some(result) = &result {
            self.on_write(result);
        }
        core.on_stored(Instant::now(), hash, matches!(result, Some(Ok(()))));
        self.metrics.bytes.set(self.store.bytes() as f64);
    }

    fn on_write(&mut self, result: &Result<(), StoreError>) {
        match result {
            Ok(()) => {
                self.metrics.written.increment(1);
                if std::mem::take(&mut self.failing) {
                    tracing::info!("the SSD tier takes blocks again");
                }
            }
            Err(error) => {
                self.metrics.write_errors.increment(1);
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%error, "the SSD tier cannot take a block; prompts are served without");
                }
            }
        }
    }

    /// Reads blocks into the arena, layer by layer; the answers are those of a fetch from another node.
    pub fn load(
        &mut self,
        parts: &NodeParts<PrefillInput>,
        core: &mut PrefillCore,
        key: RequestKey,
        hashes: &[BlockHash],
        destinations: Vec<BlockId>,
    ) -> Fetching {
        let (keeper, gate) = layer_gate();
        let cancel = CancellationToken::new();
        // As many as are still here, without a gap: each is held from here on.
        let records: Vec<_> = hashes.iter().map_while(|hash| self.store.locate(*hash)).collect();
        let missing = hashes.get(records.len()).copied();
        if let Some(lost) = missing {
            core.on_store_lost(lost);
        }
        let load = Load { key, records, destinations, arena: self.arena.clone(), inputs: parts.inputs.clone() };
        let (cancelled, inputs) = (cancel.clone(), parts.inputs.clone());
        parts.tasks.spawn_request("SSD read", async move {
            // It waits for the disk, and for the loop to take what it says.
            let read = tokio::task::spawn_blocking(move || load.run(missing, keeper, &cancelled)).await;
            if let Err(panic) = read {
                let done = PrefillInput::FetchDone(key, Err(refused(format!("reading failed: {panic}"))));
                let _ = inputs.send(Input::Role(done)).await;
            }
        });
        Fetching { gate, cancel }
    }

    /// A read failed: its record is none any more.
    pub fn on_read_failed(&mut self, core: &mut PrefillCore, record: &RecordRef, error: &StoreError) {
        self.metrics.read_errors.increment(1);
        tracing::warn!(%error, hash = %record.hash(), "a block on the SSD is no good; it is computed");
        if self.store.on_read_failed(record, error) {
            core.on_store_lost(record.hash());
        }
    }

    /// A prefix is here, wherever it came from.
    pub fn on_fetched(&self, fetched: &FetchedBytes) {
        if fetched.transport == FetchReport::SSD {
            self.metrics.read.increment(fetched.bytes / self.arena.layout().block_bytes_all_layers() as u64);
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        if let Err(error) = self.store.clear() {
            tracing::warn!(%error, "the SSD tier could not be cleared whole; what is left may come back after a restart");
        }
    }
}

/// Blocks of another model, layout or arithmetic are not these.
fn fingerprint(info: &NodeInfo) -> [u8; 16] {
    let layout = &info.layout;
    let shape =
        [layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens, layout.dtype.bytes() as u32];
    let what = format!("{}/{}", layout.dtype.as_str(), info.numerics);
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

/// Blocks on their way from the disk to the arena.
struct Load {
    key: RequestKey,
    records: Vec<RecordRef>,
    destinations: Vec<BlockId>,
    arena: KvArena,
    inputs: mpsc::Sender<Input<PrefillInput>>,
}

impl Load {
    fn run(self, missing: Option<BlockHash>, keeper: LayerGateKeeper, cancel: &CancellationToken) {
        let (key, inputs) = (self.key, self.inputs.clone());
        let result = match self.records.is_empty() {
            true => Err(refused(format!(
                "block {} is not on the SSD any more",
                missing.map_or_else(String::new, |hash| hash.to_string())
            ))),
            false => self.read(&keeper, cancel),
        };
        // The core first: what the engine computes after a failure must not count.
        let _ = inputs.blocking_send(Input::Role(PrefillInput::FetchDone(key, result)));
        keeper.finish();
    }

    fn tell(&self, input: PrefillInput) {
        // The loop is gone only when the process ends.
        let _ = self.inputs.blocking_send(Input::Role(input));
    }

    fn read(self, keeper: &LayerGateKeeper, cancel: &CancellationToken) -> Result<FetchedBytes, Refused> {
        let (layers, blocks) = (self.arena.layout().num_layers, self.records.len());
        self.tell(PrefillInput::FetchBegun(self.key, blocks));
        let mut part = vec![0; self.arena.layout().block_bytes()];
        for layer in 0..layers {
            for (index, &block) in self.destinations.iter().enumerate().take(blocks) {
                if cancel.is_cancelled() {
                    return Err(refused("the request ended".to_owned()));
                }
                if let Err(error) = self.records[index].read_part(layer, &mut part) {
                    return Err(self.failed(index, error));
                }
                self.arena.copy_in(layer, block, &part);
            }
            self.tell(PrefillInput::Fetched(self.key, layer));
            // The last one is passed when the core knows that all is here.
            if layer + 1 < layers {
                keeper.open(layer + 1);
            }
        }
        let bytes = (blocks * self.arena.layout().block_bytes_all_layers()) as u64;
        Ok(FetchedBytes { bytes, transport: FetchReport::SSD.to_owned() })
    }

    fn failed(mut self, index: usize, error: StoreError) -> Refused {
        let refusal = refused(format!("reading block {}: {error}", self.records[index].hash()));
        let record = self.records.swap_remove(index);
        self.tell(PrefillInput::LoadFailed(record, error));
        refusal
    }
}

fn refused(message: String) -> Refused {
    Refused { kind: ErrorKind::Unavailable, message }
}
