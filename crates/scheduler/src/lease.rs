//! Leases: blocks of a node's cache that other nodes read, on either kind of node.
//!
//! ```text
//!   on_lease_request ─▶ blocks held, Open ─▶ the reader reads ─▶ on_release_lease, or the time is up ─▶ End, blocks let go
//! ```
//!
//! **Invariant**: leased blocks are held, so nobody evicts or writes them. A lease that ends needs no fence: its reader does not believe what it read while the
//! lease ended.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockPool;
use baton_types::{BlockId, ErrorKind, Generation, GrantId, LeaseReply, LeaseRequest, NodeId, Refused, RequestKey};

/// What the shell carries out about leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseEffect {
    /// Open the lease in the transfer engine, then give `reply` to the reader. Where that fails, answer the reader with the error and call `on_release_lease`.
    Open {
        /// The reader's request.
        key: RequestKey,
        /// Who may read.
        reader: NodeId,
        /// Its start.
        reader_generation: Generation,
        /// The lease, and where its blocks are.
        reply: LeaseReply,
    },
    /// Tell the reader that it gets no lease.
    Refuse {
        /// The reader's request.
        key: RequestKey,
        /// Why.
        refused: Refused,
    },
    /// Close the lease in the transfer engine, before anything else is carried out. No answer.
    End {
        /// The lease.
        lease: GrantId,
    },
}

#[derive(Debug)]
struct Lease {
    blocks: Vec<BlockId>,
    expires: Instant,
}

/// The leases of a node. Their ids come from the caller: the transfer engine keeps grants and leases in one space.
#[derive(Debug)]
pub(crate) struct Leases {
    open: BTreeMap<GrantId, Lease>,
    max: usize,
    ttl: Duration,
}

impl Leases {
    /// At most `max` at once, each for at most `ttl`.
    pub fn new(max: usize, ttl: Duration) -> Self {
        Self { open: BTreeMap::new(), max, ttl }
    }

    /// Takes hold of what is still here of the blocks asked for: the first ones without a gap.
    pub fn open(&mut self, now: Instant, pool: &mut BlockPool, id: GrantId, request: LeaseRequest) -> LeaseEffect {
        let LeaseRequest { key, reader, reader_generation, block_hashes } = request;
        let refuse = |kind, message| LeaseEffect::Refuse { key, refused: Refused { kind, message } };
        if self.open.len() >= self.max {
            return refuse(ErrorKind::Overloaded, format!("{} leases are open, as many as may", self.open.len()));
        }
        let blocks = pool.match_prefix(&block_hashes);
        if blocks.is_empty() {
            return refuse(ErrorKind::NotFound, format!("none of the {} blocks is here any more", block_hashes.len()));
        }
        if let Err(error) = pool.check_fits(&blocks, 0) {
            return refuse(error.kind(), format!("no block can be kept for a reader: {error}"));
        }
        pool.acquire(&blocks);
        let reply = LeaseReply { lease: id, blocks: blocks.clone() };
        self.open.insert(id, Lease { blocks, expires: now + self.ttl });
        LeaseEffect::Open { key, reader, reader_generation, reply }
    }

    /// No lease of a node that is on its way out.
    pub fn refuse_draining(&self, request: &LeaseRequest) -> LeaseEffect {
        let refused = Refused { kind: ErrorKind::Unavailable, message: "the node is draining".into() };
        LeaseEffect::Refuse { key: request.key, refused }
    }

    /// The reader is done. Leases that ended already are ignored.
    pub fn release(&mut self, pool: &mut BlockPool, lease: GrantId) -> Option<LeaseEffect> {
        let ended = self.open.remove(&lease)?;
        pool.release(&ended.blocks);
        Some(LeaseEffect::End { lease })
    }

    /// Ends a lease whose time is up; to be called until `None`.
    pub fn expire(&mut self, now: Instant, pool: &mut BlockPool) -> Option<LeaseEffect> {
        let (&lease, _) = self.open.iter().find(|(_, lease)| lease.expires <= now)?;
        self.release(pool, lease)
    }

    /// When the first one's time is up.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.open.values().map(|lease| lease.expires).min()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Every leased block, once per lease.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.open.values().flat_map(|lease| lease.blocks.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_types::{Attempt, BlockHash, RequestId};

    use super::*;

    fn request(hashes: &[BlockHash]) -> LeaseRequest {
        let key = RequestKey { request: RequestId(1), attempt: Attempt(0) };
        let reader = NodeId::new("p0").unwrap();
        LeaseRequest { key, reader, reader_generation: Generation(1), block_hashes: Arc::from(hashes) }
    }

    /// A pool of four blocks, of which the first three are cached.
    fn pool() -> (BlockPool, [BlockHash; 3]) {
        let hashes = [1, 2, 3].map(|n| BlockHash([n; 16]));
        let mut pool = BlockPool::new(4, 100);
        let blocks = pool.allocate(3).unwrap();
        for (index, (&block, &hash)) in blocks.iter().zip(&hashes).enumerate() {
            pool.complete(block, hash, index.checked_sub(1).map(|parent| hashes[parent]));
        }
        pool.release(&blocks);
        (pool, hashes)
    }

    fn opened(effect: LeaseEffect) -> usize {
        match effect {
            LeaseEffect::Open { reply, .. } => reply.blocks.len(),
            other => panic!("{other:?}"),
        }
    }

    fn refusal(effect: LeaseEffect) -> ErrorKind {
        match effect {
            LeaseEffect::Refuse { refused, .. } => refused.kind,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn leased_blocks_stay_until_the_reader_is_done() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(2, Duration::from_secs(5));
        let beyond = [hashes[1], hashes[2], BlockHash([9; 16]), hashes[0]];
        assert_eq!(opened(leases.open(now, &mut pool, GrantId(1), request(&beyond))), 2, "up to the first gap");
        assert_eq!(pool.available(), 2);
        assert!(pool.allocate(3).is_err(), "leased blocks are not evicted");
        pool.check_integrity_with(leases.blocks(), 0).unwrap();
        assert_eq!(leases.release(&mut pool, GrantId(1)), Some(LeaseEffect::End { lease: GrantId(1) }));
        assert_eq!(leases.release(&mut pool, GrantId(1)), None);
        assert_eq!(pool.available(), 4);
    }

    #[test]
    fn what_cannot_be_leased_is_refused() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(1, Duration::from_secs(5));
        let gone = request(&[BlockHash([9; 16])]);
        assert_eq!(refusal(leases.open(now, &mut pool, GrantId(1), gone)), ErrorKind::NotFound);
        let promised = pool.reserve(3).unwrap();
        assert_eq!(refusal(leases.open(now, &mut pool, GrantId(2), request(&hashes))), ErrorKind::Overloaded);
        pool.cancel_reservation(promised);
        assert_eq!(opened(leases.open(now, &mut pool, GrantId(3), request(&hashes))), 3);
        assert_eq!(refusal(leases.open(now, &mut pool, GrantId(4), request(&hashes))), ErrorKind::Overloaded);
    }

    #[test]
    fn a_forgotten_lease_ends_by_itself() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(1, Duration::from_secs(5));
        opened(leases.open(now, &mut pool, GrantId(1), request(&hashes)));
        let due = leases.next_expiry().unwrap();
        assert_eq!(due, now + Duration::from_secs(5));
        assert_eq!(leases.expire(now, &mut pool), None);
        assert_eq!(leases.expire(due, &mut pool), Some(LeaseEffect::End { lease: GrantId(1) }));
        assert!(leases.is_empty() && leases.next_expiry().is_none() && pool.available() == 4);
    }
}
