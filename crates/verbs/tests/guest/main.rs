//! Tests that need RDMA devices: two Soft-RoCE rails, as `scripts/rdma-guest.sh` makes them. `make
//! test` runs them there, one after the other.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(clippy::unwrap_used)] // helpers of tests

mod devices;
mod failures;
mod fence;
mod pair;
mod transfers;
