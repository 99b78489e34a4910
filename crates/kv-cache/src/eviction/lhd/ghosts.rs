//! Blocks that were evicted, remembered for a while by their hashes.

use std::collections::{HashMap, VecDeque};

use baton_types::BlockHash;

use super::Life;

/// At most `capacity` lives; the one evicted first is forgotten first.
#[derive(Debug)]
pub(super) struct Ghosts {
    lives: HashMap<BlockHash, Life>,
    /// In the order of eviction, each with the time that tells its life from a later one of the
    /// same hash.
    order: VecDeque<(BlockHash, u64)>,
    capacity: usize,
}

impl Ghosts {
    pub(super) fn new(capacity: usize) -> Self {
        Self { lives: HashMap::new(), order: VecDeque::new(), capacity }
    }

    /// The life of a block that comes back.
    pub(super) fn take(&mut self, hash: BlockHash) -> Option<Life> {
        self.lives.remove(&hash)
    }

    /// Remembers a block; the life returned is forgotten for it.
    pub(super) fn push(&mut self, hash: BlockHash, life: Life) -> Option<Life> {
        self.lives.insert(hash, life);
        self.order.push_back((hash, life.released));
        if self.order.len() <= self.capacity {
            return None;
        }
        let (oldest, released) = self.order.pop_front()?;
        // What came back meanwhile is alive, or remembered anew.
        let same = self.lives.get(&oldest).is_some_and(|life| life.released == released);
        if same { self.lives.remove(&oldest) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 16])
    }

    fn life(released: u64) -> Life {
        Life { uses: 1, class: 0, released }
    }

    #[test]
    fn lhd_ghosts_forget_oldest_eviction_first_but_not_a_reused_block() {
        let mut ghosts = Ghosts::new(2);
        assert!(ghosts.push(hash(1), life(1)).is_none());
        assert!(ghosts.push(hash(2), life(2)).is_none());
        assert_eq!(ghosts.take(hash(1)).map(|life| life.released), Some(1));
        assert!(ghosts.push(hash(1), life(3)).is_none(), "its first life is over already");
        assert_eq!(ghosts.push(hash(3), life(4)).map(|life| life.released), Some(2));
        assert!(ghosts.take(hash(2)).is_none());
        assert_eq!(ghosts.take(hash(1)).map(|life| life.released), Some(3));
    }

    #[test]
    fn lhd_ghosts_stay_within_their_capacity() {
        let mut ghosts = Ghosts::new(3);
        for released in 0..100 {
            ghosts.push(hash(released as u8 % 5), life(released));
            ghosts.take(hash(released as u8 % 3));
            assert!(ghosts.order.len() <= 3 && ghosts.lives.len() <= 3);
        }
    }
}
