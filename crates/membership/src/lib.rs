//! Which conductor leads, and what is set for all of them, as etcd says.
//!
//! A conductor that wants to lead puts a key under a lease of two seconds, if the key is free.
//! While it keeps the lease alive, it leads. If it dies or is stopped, the lease ends, the key
//! goes, and another one puts its own. Without etcd everything goes on as it was last known. Nodes
//! refuse, by its term, the orders of a leader that has been replaced.

mod connect;
mod election;
mod shared;

use std::path::PathBuf;
use std::time::Duration;

pub use baton_scheduler::{Candidate, Eligibility, Leadership};
pub use connect::{CertifiedKey, Etcd, EtcdFile, Tls, User};
pub use election::{Election, NamedLeader};
pub use shared::{ChangeError, SettingsStore, SharedSettings};

/// How long a leader that is dead or stopped is still taken for one.
pub const LEASE: Duration = Duration::from_secs(2);

/// Why etcd could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// As the client says.
    #[error("{}", connect::reason(.0))]
    Client(#[from] etcd_client::Error),
    /// What etcd is to be asked with.
    #[error("{} {problem}", path.display())]
    File {
        /// What it is for.
        file: EtcdFile,
        /// Where it is.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// It does not answer.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// The lease ended: it was not renewed in time.
    #[error("the lease ended")]
    LeaseEnded,
    /// The watch ended, as after a compaction.
    #[error("the watch ended: {0}")]
    WatchEnded(String),
    /// A key is not what a conductor writes.
    #[error("{key}: {problem}")]
    Key {
        /// The key.
        key: String,
        /// What is wrong.
        problem: String,
    },
}

/// Most characters of what is wrong with a key: it may repeat the key's value.
const MAX_PROBLEM_CHARS: usize = 200;

impl EtcdError {
    fn key(key: String, problem: &str) -> Self {
        Self::Key { key, problem: problem.chars().take(MAX_PROBLEM_CHARS).collect() }
    }
}
