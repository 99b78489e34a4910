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

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]

mod ask;
mod cluster;
mod control_group;
mod etcd;
mod process;
mod proxy;

pub use ask::{Answer, Ask};
pub use cluster::{Builder, Cluster, HttpAnswer};
pub use control_group::ControlGroup;
pub use etcd::{Certificates, Etcd};
pub use process::{Process, bench, bench_output, bench_report, binary, metric, signal};
pub use proxy::{PROXIED_HOST, Proxy};

use std::path::PathBuf;

/// The model that `BATON_MODEL` names. Tests that ask for it are ignored by default; `make test`
/// fetches it and runs them.
pub fn model() -> PathBuf {
    std::env::var_os("BATON_MODEL").expect("BATON_MODEL names a model file (make test sets it)").into()
}
