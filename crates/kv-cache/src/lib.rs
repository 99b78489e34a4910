//! Block pool, block tables, chained block hashes, prefix index and eviction.
