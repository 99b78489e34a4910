//! Which block goes where.

use std::ops::Range;

use baton_types::Random;

use crate::plan::{Method, Plan};

/// The order of blocks on both sides. Block number `k` of a run goes from one place in the source
/// to one place in the destination. After the last block, number 0 comes again.
#[derive(Debug)]
pub struct Layout {
    block_bytes: u64,
    source: Vec<u32>,
    destination: Vec<u32>,
}

impl Layout {
    /// The engine's blocks are scattered, each side in an order of its own, so that neighbours
    /// hardly ever meet. A baseline goes through memory in order.
    pub fn new(plan: &Plan) -> Self {
        let order = |stream| match plan.carrier {
            Method::CopyLoop | Method::Memcpy => (0..plan.blocks() as u32).collect(),
            _ => permutation(plan.blocks() as u32, plan.seed.wrapping_mul(2).wrapping_add(stream)),
        };
        Self { block_bytes: plan.block_bytes, source: order(0), destination: order(1) }
    }

    /// Blocks of one round.
    pub fn blocks(&self) -> u64 {
        self.source.len() as u64
    }

    /// Source and destination offset of block number `k`.
    pub fn places(&self, k: u64) -> (u64, u64) {
        let index = (k % self.blocks()) as usize;
        (u64::from(self.source[index]) * self.block_bytes, u64::from(self.destination[index]) * self.block_bytes)
    }

    /// Places of consecutive block numbers.
    pub fn all(&self, blocks: Range<u64>) -> impl Iterator<Item = (u64, u64)> + '_ {
        blocks.map(|k| self.places(k))
    }
}

/// Fisher and Yates' shuffle.
fn permutation(len: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..len).collect();
    let mut random = Random::new(seed);
    for last in (1..order.len()).rev() {
        // The bias of the remainder is below 2^-32.
        order.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{TCP, plan};

    #[test]
    fn layout_places_each_block_once_and_seldom_beside_the_last() {
        let plan = plan(TCP);
        let layout = Layout::new(&plan);
        let (mut sources, mut destinations): (Vec<u64>, Vec<u64>) = layout.all(0..256).unzip();
        let touching = layout.all(0..255).zip(layout.all(1..256));
        let touching = touching.filter(|(a, b)| a.0 + 4096 == b.0 || a.1 + 4096 == b.1).count();
        assert!(touching < 10, "{touching} of 255");
        assert_ne!(sources, destinations);
        sources.sort_unstable();
        destinations.sort_unstable();
        let all: Vec<u64> = (0..256).map(|block| block * 4096).collect();
        assert_eq!((&sources, &destinations), (&all, &all));
        assert_eq!(layout.places(256), layout.places(0));
    }

    #[test]
    fn layout_order_is_decided_by_the_seed() {
        let plan = plan(TCP);
        let first = |plan: &Plan| Layout::new(plan).all(0..256).collect::<Vec<_>>();
        assert_eq!(first(&plan), first(&plan));
        assert_ne!(first(&plan), first(&Plan { seed: 2, ..plan }));
        assert_eq!(Layout::new(&Plan { carrier: Method::CopyLoop, ..plan }).places(3), (3 * 4096, 3 * 4096));
    }
}
