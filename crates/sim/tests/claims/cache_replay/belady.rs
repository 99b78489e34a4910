//! The cache that knows what will be asked for.

use std::collections::{BTreeSet, HashMap};

use baton_sim::Trace;

/// No request asks for the block any more.
const NEVER: usize = usize::MAX;

/// Evicts what is asked for last; of what the same request asks for, its last block.
#[derive(Debug)]
pub(super) struct Belady {
    /// Per request and block: the next request that asks for it.
    next: Vec<Vec<usize>>,
    /// What is here, by the request that asks for it next, and the place there.
    order: BTreeSet<(usize, usize, u64)>,
    /// Of what is here, the same.
    here: HashMap<u64, (usize, usize)>,
    request: usize,
    num_blocks: usize,
}

impl Belady {
    pub(super) fn new(trace: &Trace, num_blocks: usize) -> Self {
        let next = next_uses(trace, num_blocks);
        Self { next, order: BTreeSet::new(), here: HashMap::new(), request: 0, num_blocks }
    }

    /// Serves the next request of the trace; how many of its leading blocks were here.
    pub(super) fn request(&mut self, ids: &[u64]) -> usize {
        let ids = &ids[..ids.len().min(self.num_blocks)];
        let hits = ids.iter().take_while(|id| self.here.contains_key(*id)).count();
        for id in ids {
            if let Some((next, depth)) = self.here.remove(id) {
                self.order.remove(&(next, depth, *id));
            }
        }
        while self.order.len() + ids.len() > self.num_blocks {
            let (_, _, id) = self.order.pop_last().expect("a request fits into the cache");
            self.here.remove(&id);
        }
        for (depth, (id, next)) in ids.iter().zip(&self.next[self.request]).enumerate() {
            self.here.insert(*id, (*next, depth));
            self.order.insert((*next, depth, *id));
        }
        self.request += 1;
        hits
    }
}

/// Blocks that do not fit with the rest of their prompt are not asked for.
fn next_uses(trace: &Trace, num_blocks: usize) -> Vec<Vec<usize>> {
    let mut known = HashMap::new();
    let requests = trace.requests.iter().enumerate().rev();
    let mut next: Vec<Vec<_>> = requests
        .map(|(index, request)| {
            let ids = request.hash_ids.iter().take(num_blocks);
            ids.map(|id| known.insert(*id, index).unwrap_or(NEVER)).collect()
        })
        .collect();
    next.reverse();
    next
}
