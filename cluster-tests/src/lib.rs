//! A vocabulary for tests over the real binaries: start a cluster, ask it, look at it, break it.
//!
//! ```no_run
//! # async fn story() -> anyhow::Result<()> {
//! use baton_cluster_tests::{Cluster, Ask};
//! let cluster = Cluster::mock().prefill(2).decode(2).start().await?;
//! let answer = cluster.ask(Ask::text("hello").max_tokens(20)).await?;
//! assert_eq!(answer.token_ids.len(), 20);
//! cluster.stop().await?;
//! # Ok(()) }
//! ```

mod ask;
mod cluster;
mod process;

pub use ask::{Answer, Ask};
pub use cluster::{Builder, Cluster};
pub use process::{Process, bench, bench_output, bench_report, binary, metric, signal};

use std::path::PathBuf;

/// The demo model, where the test run has it; prints a line and gives `None` where not.
pub fn model(test: &str) -> Option<PathBuf> {
    let model = std::env::var_os("BATON_MODEL").map(PathBuf::from);
    if model.is_none() {
        println!("SKIPPED {test}: BATON_MODEL is not set (make test fetches the model)");
    }
    model
}
