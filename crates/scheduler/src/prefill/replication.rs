//! Replications of hot prefixes, which a conductor orders before a prompt here begins with one.
//!
//! ```text
//!   on_replicate ─▶ Fetch (bulk) ─▶ on_fetch_begun ─▶ on_fetched, layer by layer ─▶ on_fetch_done: blocks to the cache, Replicated
//! ```
//!
//! It is a fetch like a request's, but no request waits for it. It takes room that is free or has
//! been unused for long, and proceeds when nothing urgent does. It is given up when a request lacks
//! room.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{
    BlockHash, BlockId, ConductorId, ErrorKind, FetchReport, LeaseRequest, PrefillEvent, PrefixReplication, Refused,
    RequestKey,
};

use super::{FetchedBytes, PrefillCore, PrefillEffect};
use crate::tier::stored_after;

/// A prefix on its way.
#[derive(Debug)]
pub(super) struct Incoming {
    conductor: ConductorId,
    hashes: Arc<[BlockHash]>,
    /// Those that were here, pinned so that what comes can follow on them, and those that the rest
    /// is written to.
    pub blocks: Vec<BlockId>,
    /// How many were here.
    held: usize,
    /// How many will be, with what the holder has.
    end: usize,
    /// Layers that are here.
    layers: u32,
    asked: Instant,
    /// Why it was given up, once it was.
    given_up: Option<Refused>,
}

fn refuse<T>(kind: ErrorKind, message: String) -> Result<T, Refused> {
    Err(Refused { kind, message })
}

impl PrefillCore {
    /// A conductor wants a prefix here. Answered once by [`PrefillEvent::Replicated`]; one that is
    /// under way is not ordered again.
    pub fn on_replicate(&mut self, now: Instant, order: PrefixReplication) {
        if self.replications.contains_key(&order.key) || self.knows(order.key) {
            return;
        }
        self.pool.pass_time(now);
        let conductor = order.conductor;
        let key = order.key;
        let failure = match self.start_replication(now, order) {
            Ok(true) => return,
            // It is all here.
            Ok(false) => None,
            Err(refused) => Some(refused),
        };
        let report = FetchReport { failure, ..FetchReport::default() };
        self.emit(conductor, key, PrefillEvent::Replicated(report));
    }

    /// Whether anything has to come.
    fn start_replication(&mut self, now: Instant, order: PrefixReplication) -> Result<bool, Refused> {
        let PrefixReplication { key, conductor, source, block_hashes: hashes } = order;
        let node = &self.config.node;
        if self.draining {
            return refuse(ErrorKind::Unavailable, format!("node {node} is draining"));
        }
        if source.node == *node {
            return refuse(ErrorKind::Invalid, format!("source.node: {node} itself"));
        }
        if self.replications.len() >= self.config.max_replications {
            return refuse(
                ErrorKind::Overloaded,
                format!("{} replications are under way, as many as may", self.replications.len()),
            );
        }
        if !self.queued.is_empty() {
            return refuse(ErrorKind::Overloaded, format!("{} requests wait", self.queued.len()));
        }
        let mut blocks = self.pool.match_prefix(&hashes);
        let held = blocks.len();
        if held + stored_after(&self.pool, &hashes, held) == hashes.len() {
            return Ok(false);
        }
        let no_room = |error: baton_kv_cache::OutOfBlocks| Refused {
            kind: ErrorKind::Overloaded,
            message: format!("no unneeded room: {error}"),
        };
        self.pool.check_fits(&blocks, hashes.len() - held).map_err(no_room)?;
        self.pool.acquire(&blocks);
        match self.pool.allocate_cold(hashes.len() - held, self.config.cold_after) {
            Ok(new) => blocks.extend(new),
            Err(error) => {
                self.pool.release(&blocks);
                return Err(no_room(error));
            }
        }
        let lease = LeaseRequest {
            key,
            reader: self.config.node.clone(),
            reader_generation: self.config.generation,
            block_hashes: hashes[held..].into(),
        };
        let destinations = blocks[held..].to_vec();
        self.effects.push_back(PrefillEffect::Fetch { source, lease, destinations, is_replication: true });
        let end = hashes.len();
        let replication = Incoming { conductor, hashes, blocks, held, end, layers: 0, asked: now, given_up: None };
        self.replications.insert(key, replication);
        Ok(true)
    }

    /// Whether the event was of a replication.
    pub(super) fn on_replication_begun(&mut self, key: RequestKey, blocks: usize) -> bool {
        let Some(replication) = self.replications.get_mut(&key) else { return false };
        replication.end = replication.end.min(replication.held + blocks);
        true
    }

    /// Whether the event was of a replication.
    pub(super) fn on_replicated(&mut self, key: RequestKey, layer: u32) -> bool {
        let Some(replication) = self.replications.get_mut(&key) else { return false };
        assert_eq!(layer, replication.layers, "layers of a prefix come in order");
        replication.layers += 1;
        true
    }

    /// Nothing is written into the replication's blocks any more.
    pub(super) fn end_replication(&mut self, now: Instant, key: RequestKey, result: Result<FetchedBytes, Refused>) {
        let Some(replication) = self.replications.remove(&key) else { return };
        let result = self.whole(replication.layers, replication.given_up.map_or(result, Err));
        let elapsed = now.saturating_duration_since(replication.asked);
        let report = match result {
            Ok(FetchedBytes { bytes, transport }) => {
                self.share(&replication.blocks, &replication.hashes, replication.held..replication.end);
                let tokens = ((replication.end - replication.held) * self.config.model.block_tokens()) as u32;
                FetchReport { tokens, bytes, transport, elapsed, failure: None }
            }
            Err(refused) => FetchReport { elapsed, failure: Some(refused), ..FetchReport::default() },
        };
        self.pool.release(&replication.blocks);
        self.emit(replication.conductor, key, PrefillEvent::Replicated(report));
    }

    /// Gives up the replications of which `which` is true. Their blocks come free once nothing is
    /// written into them.
    pub(super) fn give_up_replications(
        &mut self,
        kind: ErrorKind,
        reason: &str,
        which: impl Fn(RequestKey, ConductorId) -> bool,
    ) {
        for (&key, replication) in &mut self.replications {
            if replication.given_up.is_none() && which(key, replication.conductor) {
                replication.given_up = Some(Refused { kind, message: reason.to_owned() });
                self.effects.push_back(PrefillEffect::CancelFetch { key });
            }
        }
    }
}
