//! What both kinds of node report about their blocks and their prefix cache.

use baton_kv_cache::{BlockPool, IntegrityError};
use baton_types::Load;

/// Prompt tokens that were looked up in the prefix cache so far, and where they were found.
#[derive(Debug, Default)]
pub(crate) struct PrefixLookups {
    queries: u64,
    hits_arena: u64,
    hits_ssd: u64,
    hits_fetched: u64,
}

impl PrefixLookups {
    /// A prompt of this many tokens, of which the arena has so many.
    pub fn count(&mut self, tokens: usize, found: usize) {
        self.queries += tokens as u64;
        self.hits_arena += found as u64;
    }

    /// Tokens of a counted prompt that the SSD had.
    pub fn count_ssd(&mut self, tokens: usize) {
        self.hits_ssd += tokens as u64;
    }

    /// Tokens of a counted prompt that came from another node.
    pub fn count_fetched(&mut self, tokens: usize) {
        self.hits_fetched += tokens as u64;
    }
}

/// The part of a load report that comes from the pool and its prefix cache.
pub(crate) fn cache_load(pool: &BlockPool, lookups: &PrefixLookups) -> Load {
    let counts = pool.counts();
    Load {
        prefix_queries: lookups.queries,
        prefix_hits: lookups.hits_arena + lookups.hits_ssd + lookups.hits_fetched,
        prefix_hits_ssd: lookups.hits_ssd,
        prefix_hits_fetched: lookups.hits_fetched,
        blocks_ssd: pool.len_below() as u32,
        blocks_total: counts.total as u32,
        blocks_used: counts.used as u32,
        blocks_cached: counts.cached as u32,
        blocks_reserved: counts.reserved as u32,
        ..Load::default()
    }
}

/// `Err` with the message if `ok` is false.
pub(crate) fn ensure(ok: bool, message: impl FnOnce() -> String) -> Result<(), IntegrityError> {
    if ok { Ok(()) } else { Err(IntegrityError(message())) }
}
