//! The engine as a whole: over TCP on the loopback, through a proxy that misbehaves, and on the
//! fake network.

mod checks;
mod faults;
mod fencing;
mod harness;
mod proxy;
mod raw;
#[cfg(feature = "rdma")]
mod rdma;
mod reads;
mod round_trip;
mod shm;
