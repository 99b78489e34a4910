//! The store as its owner sees it: against a model, with damaged files, killed, on a full disk, and
//! from many threads.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(clippy::unwrap_used)] // helpers of tests

mod damage;
mod folders;
mod full_disk;
mod killed;
mod model;
mod other_process;
mod records;
mod threads;

#[test]
#[ignore = "the other process of the tests here, which start it themselves"]
fn other_process() {
    other_process::run();
}
