//! Receives KV caches and streams tokens.
