//! What both kinds of node report about their blocks.

use baton_kv_cache::{BlockPool, IntegrityError};
use baton_types::Load;

/// The part of a load report that comes from the pool.
pub(crate) fn pool_load(pool: &BlockPool) -> Load {
    let counts = pool.counts();
    Load {
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
