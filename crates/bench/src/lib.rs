//! `baton bench`: what this machine gives, measured.
//!
//! `baton bench transfer` moves blocks between two processes and says how fast. One process, the
//! **initiator**, starts the batches; the other, the **target**, owns the memory that they reach.
//! The initiator starts the target itself, or finds it on another host:
//!
//! ```text
//!   initiator                                  target (--listen)
//!      |  --- hello: plan, writer ------------->  |   allocates and touches its memory, binds its engine
//!      |  <-- ready: descriptor, or address ----  |
//!      |  ========== batches of blocks ========>  |   by the engine, or by the bare loop
//!      |  --- mark: bytes so far -------------->  |
//!      |  <-- marked: CPU seconds so far -------  |   once as many bytes have arrived
//!      |  --- verify: blocks ------------------>  |   compares every byte
//!      |  <-- done -----------------------------  |
//! ```
//!
//! Besides the engine there are two baselines that share everything but the way the bytes go:
//! `copy-loop`, blocking `write` and `read` on one connection, and `memcpy`, one thread within one
//! process.
//!
//! `baton bench serve` is an open loop of requests against any server, drawn or of a trace.
//! `baton bench engine` computes prompts and tokens of a model ([`EngineArgs`]); `baton score` says
//! how likely a model finds a text ([`score`]).
//!
//! A read goes the other way: the target leases its memory, and what has arrived is compared by the
//! initiator.
//!
//! **Invariant**: a figure counts only bytes that the receiving end says have arrived. Memory is
//! touched and connections are up before the clock starts.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod args;
mod control;
mod copy_loop;
mod engine;
mod error;
mod inference;
mod initiator;
mod layout;
mod memcpy;
mod memory;
mod plan;
mod process;
mod report;
pub mod score;
mod serve;
mod stats;
mod table;
mod target;
mod usage;

pub use args::{BenchCommand, TransferArgs};
pub use error::BenchError;
pub use inference::{ComputeArgs, EngineArgs};
pub use plan::{Method, Op, Plan};
pub use report::Report;
pub use serve::ServeArgs;
pub use table::seconds;

use baton_runtime::Signals;

/// Runs the command to its end. Needs no runtime: it has its own, as the processes of a cluster do,
/// if it needs one.
pub fn run(command: &BenchCommand, json: bool) -> Result<(), BenchError> {
    if let BenchCommand::Engine(args) = command {
        return inference::run(args, json);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let mut signals = Signals::new()?;
        tokio::select! {
            result = measure(command, json) => result,
            signal = signals.recv() => Err(BenchError::Interrupted(signal)),
        }
    });
    // A bare loop may sit in a blocking call; the end of the process ends it.
    runtime.shutdown_background();
    result
}

async fn measure(command: &BenchCommand, json: bool) -> Result<(), BenchError> {
    match command {
        BenchCommand::Transfer(args) => transfer(args, json).await,
        BenchCommand::Serve(args) => serve::run(args, json).await,
        BenchCommand::Engine(_) => Ok(()), // has run above
    }
}

async fn transfer(args: &TransferArgs, json: bool) -> Result<(), BenchError> {
    if let Some(listen) = args.listen {
        return target::serve(listen).await;
    }
    let report = initiator::run(&args.plan()?, args.connect.as_deref(), !json).await?;
    report.print(json).map_err(BenchError::Output)
}
