//! Leases: blocks of a node's cache that other nodes read, on either kind of node.
//!
//! ```text
//!   on_lease_request ─▶ blocks pinned, Open ─▶ the reader reads ─▶ on_release_lease, or the time is up ─▶ End, blocks released
//! ```
//!
//! **Invariant**: leased blocks are pinned, so they are neither evicted nor written. A lease that
//! ends needs no fence: its reader does not believe what it read while the lease ended. Readers
//! come and go, so blocks that many ask for might be leased without end. So if one of the node's
//! own requests waits for room that it would have without readers, no lease is given until it has
//! it. A node that takes one of the sequences off this one still gets its lease.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_kv_cache::{BlockPool, BlockState};
use baton_types::{
    BlockId, ErrorKind, GrantId, LeaseRelease, LeaseReply, LeaseRequest, NodeStart, Refused, RequestKey,
};

/// What the shell carries out about leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseEffect {
    /// Open the lease in the transfer engine, then give `reply` to the reader. If that fails,
    /// answer the reader with the error and call `on_release_lease`.
    Open {
        /// The reader's request.
        key: RequestKey,
        /// Who may read.
        reader: NodeStart,
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

crate::named!(LeaseEffect: Open, Refuse, End);

#[derive(Debug)]
struct Lease {
    reader: NodeStart,
    blocks: Vec<BlockId>,
    expires: Instant,
}

/// One reader has at most one of so many of the leases.
const READERS: usize = 4;

/// The leases of a node. Their ids come from the caller: the transfer engine keeps grants and
/// leases in one space.
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

    /// Pins what is still here of the blocks asked for: the first ones without a gap. `wanted`:
    /// blocks that have to be free or cached before the first of the node's own requests that wait
    /// for room has it. `migrates`: the reader goes on with a sequence of this node, and is not one
    /// of those that come without end.
    pub fn open(
        &mut self,
        now: Instant,
        pool: &mut BlockPool,
        id: GrantId,
        request: LeaseRequest,
        wanted: Option<usize>,
        migrates: bool,
    ) -> LeaseEffect {
        let LeaseRequest { key, reader: node, reader_generation: generation, block_hashes } = request;
        let refuse = |kind, message| LeaseEffect::Refuse { key, refused: Refused { kind, message } };
        if self.open.len() >= self.max {
            return refuse(ErrorKind::Overloaded, format!("{} leases are open, as many as may", self.open.len()));
        }
        let theirs = self.open.values().filter(|lease| lease.reader.node == node).count();
        if theirs >= self.max.div_ceil(READERS) && !migrates {
            return refuse(ErrorKind::Overloaded, format!("{node} has {theirs} leases, as many as one node may"));
        }
        let mut blocks = pool.match_prefix(&block_hashes);
        let mut seen = BTreeSet::new();
        // A prefix has each of its blocks once.
        let once = blocks.iter().take_while(|block| seen.insert(**block)).count();
        blocks.truncate(once);
        if blocks.is_empty() {
            return refuse(ErrorKind::NotFound, format!("none of the {} blocks is here any more", block_hashes.len()));
        }
        if let Err(error) = pool.check_fits(&blocks, 0) {
            return refuse(error.kind(), format!("no block can be kept for a reader: {error}"));
        }
        if wanted.is_some_and(|wanted| self.would_hold_up(pool, &blocks, wanted)) {
            return refuse(ErrorKind::Overloaded, "a request of this node waits for the room that readers hold".into());
        }
        pool.acquire(&blocks);
        let reply = LeaseReply { lease: id, blocks: blocks.clone() };
        let reader = NodeStart { node, generation };
        self.open.insert(id, Lease { reader: reader.clone(), blocks, expires: now + self.ttl });
        LeaseEffect::Open { key, reader, reply }
    }

    /// No lease of a node that is on its way out.
    pub fn refuse_draining(&self, request: &LeaseRequest) -> LeaseEffect {
        let refused = Refused { kind: ErrorKind::Unavailable, message: "the node is draining".into() };
        LeaseEffect::Refuse { key: request.key, refused }
    }

    /// Whether a request that wants so many blocks would have them without readers here, and would
    /// not with one more reader.
    fn would_hold_up(&self, pool: &BlockPool, blocks: &[BlockId], wanted: usize) -> bool {
        let mut readers: BTreeMap<BlockId, u32> = BTreeMap::new();
        self.blocks().for_each(|block| *readers.entry(block).or_default() += 1);
        let read_only =
            |(block, readers): &(&BlockId, &u32)| pool.state(**block) == BlockState::Complete { refs: **readers };
        let read = readers.iter().filter(read_only).count();
        let available = pool.available();
        let taken = pool.count_cached(blocks);
        available.saturating_sub(taken) < wanted && wanted <= available + read
    }

    /// The reader is done. Leases that ended already, and those of others, are ignored.
    pub fn release(&mut self, pool: &mut BlockPool, release: &LeaseRelease) -> Option<LeaseEffect> {
        let lease = release.lease;
        let reader = &self.open.get(&lease)?.reader;
        if release.reader.as_ref().is_some_and(|gives_back| gives_back != reader) {
            return None;
        }
        let ended = self.open.remove(&lease)?;
        pool.release(&ended.blocks);
        Some(LeaseEffect::End { lease })
    }

    /// Ends a lease whose time is up; to be called until `None`.
    pub fn expire(&mut self, now: Instant, pool: &mut BlockPool) -> Option<LeaseEffect> {
        let (&lease, _) = self.open.iter().find(|(_, lease)| lease.expires <= now)?;
        self.release(pool, &lease.into())
    }

    /// Ends all of them: what they read is to be forgotten. To be called until `None`.
    pub fn end(&mut self, pool: &mut BlockPool) -> Option<LeaseEffect> {
        let lease = *self.open.keys().next()?;
        self.release(pool, &lease.into())
    }

    /// A reader is gone: the time of its leases is up.
    pub fn on_reader_lost(&mut self, now: Instant, reader: &NodeStart) {
        let its = self.open.values_mut().filter(|lease| lease.reader == *reader);
        its.for_each(|lease| lease.expires = lease.expires.min(now));
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

    use baton_types::{Attempt, BlockHash, Generation, NodeId, RequestId};

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
    fn leased_blocks_are_not_evicted_until_the_reader_releases_them() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(2, Duration::from_secs(5));
        let beyond = [hashes[1], hashes[2], BlockHash([9; 16]), hashes[0]];
        assert_eq!(
            opened(leases.open(now, &mut pool, GrantId(1), request(&beyond), None, false)),
            2,
            "up to the first gap"
        );
        assert_eq!(pool.available(), 2);
        assert!(pool.allocate(3).is_err(), "leased blocks are not evicted");
        pool.check_integrity_with(leases.blocks(), 0).unwrap();
        assert_eq!(leases.release(&mut pool, &GrantId(1).into()), Some(LeaseEffect::End { lease: GrantId(1) }));
        assert_eq!(leases.release(&mut pool, &GrantId(1).into()), None);
        assert_eq!(pool.available(), 4);
    }

    #[test]
    fn lease_is_refused_if_blocks_are_lost_reserved_or_too_many_are_open() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(1, Duration::from_secs(5));
        let gone = request(&[BlockHash([9; 16])]);
        assert_eq!(refusal(leases.open(now, &mut pool, GrantId(1), gone, None, false)), ErrorKind::NotFound);
        let promised = pool.reserve(3).unwrap();
        assert_eq!(
            refusal(leases.open(now, &mut pool, GrantId(2), request(&hashes), None, false)),
            ErrorKind::Overloaded
        );
        pool.cancel_reservation(promised);
        assert_eq!(opened(leases.open(now, &mut pool, GrantId(3), request(&hashes), None, false)), 3);
        assert_eq!(
            refusal(leases.open(now, &mut pool, GrantId(4), request(&hashes), None, false)),
            ErrorKind::Overloaded
        );
    }

    #[test]
    fn lease_is_released_only_by_its_reader() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(2, Duration::from_secs(5));
        opened(leases.open(now, &mut pool, GrantId(1), request(&hashes), None, false));
        let mut by = |name: &str, generation| {
            let node = NodeId::new(name).unwrap();
            let reader = Some(NodeStart { node, generation: Generation(generation) });
            leases.release(&mut pool, &LeaseRelease { lease: GrantId(1), reader }).is_some()
        };
        assert_eq!([by("p1", 1), by("p0", 2), by("p0", 1), by("p0", 1)], [false, false, true, false]);
        assert_eq!(pool.available(), 4);
    }

    #[test]
    fn lease_is_refused_while_a_request_needs_leased_blocks() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(9, Duration::from_secs(5));
        let own = pool.allocate(1).unwrap();
        let two = request(&hashes[..2]);
        assert_eq!(opened(leases.open(now, &mut pool, GrantId(1), two.clone(), Some(1), false)), 2, "one is left");
        // A request needs what readers hold: no more of them, whether they want the same blocks or
        // others.
        assert_eq!(
            refusal(leases.open(now, &mut pool, GrantId(2), two.clone(), Some(3), false)),
            ErrorKind::Overloaded
        );
        let third = request(&hashes[2..]);
        assert_eq!(refusal(leases.open(now, &mut pool, GrantId(3), third, Some(1), false)), ErrorKind::Overloaded);
        // If the node's own blocks are what it waits for, readers do no harm.
        assert_eq!(opened(leases.open(now, &mut pool, GrantId(4), two.clone(), Some(4), false)), 2);
        pool.release(&own);
        assert_eq!(refusal(leases.open(now, &mut pool, GrantId(5), two, Some(4), false)), ErrorKind::Overloaded);
        for lease in [1, 4] {
            leases.release(&mut pool, &GrantId(lease).into());
        }
        assert_eq!(pool.available(), 4);
    }

    #[test]
    fn lease_expires_if_it_is_not_released() {
        let ((mut pool, hashes), now) = (pool(), Instant::now());
        let mut leases = Leases::new(1, Duration::from_secs(5));
        opened(leases.open(now, &mut pool, GrantId(1), request(&hashes), None, false));
        let due = leases.next_expiry().unwrap();
        assert_eq!(due, now + Duration::from_secs(5));
        assert_eq!(leases.expire(now, &mut pool), None);
        assert_eq!(leases.expire(due, &mut pool), Some(LeaseEffect::End { lease: GrantId(1) }));
        assert!(leases.is_empty() && leases.next_expiry().is_none() && pool.available() == 4);
    }
}
