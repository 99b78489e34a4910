//! Everything that decides: cost models, placement, admission, the prefill and decode loops. Pure and sync.
