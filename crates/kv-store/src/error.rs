//! What can go wrong with the store, and what to do about it.

use std::io;
use std::path::Path;

use baton_types::{BlockHash, ErrorKind};

/// A call to the store failed. None of these leaves it unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// An option or an argument is wrong.
    #[error("kv store: {what}: {problem}")]
    Invalid {
        /// Which.
        what: &'static str,
        /// What is wrong, with the value.
        problem: String,
    },
    /// Another store, of this process or another, has the folder.
    #[error("the kv store in {folder} is in use: each node needs a folder of its own")]
    Locked {
        /// The folder.
        folder: String,
    },
    /// A folder or file that is not the store's own. Nothing was changed.
    #[error("kv store: {path}: {problem}")]
    Foreign {
        /// Which.
        path: String,
        /// Why it is not taken, and what to do.
        problem: String,
    },
    /// The operating system refused.
    #[error("kv store: cannot {action} {path}: {reason}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or folder.
        path: String,
        /// The operating system's reason.
        reason: String,
    },
    /// The disk, the quota or the file size allowed is used up. The store goes on with the room
    /// that it has.
    #[error("kv store: no room for {path}: {reason}")]
    NoSpace {
        /// The file.
        path: String,
        /// The operating system's reason.
        reason: String,
    },
    /// No slot can be taken now.
    #[error("kv store: no slot to write to: of {usable}, {writing} are being written, and the others are being read")]
    NoSlot {
        /// Slots that the disk has room for, and that work.
        usable: u32,
        /// Of these, those that are being written.
        writing: u32,
    },
    /// Puts are refused since writes failed again and again.
    #[error("kv store: off for puts, since {failures} writes in a row failed")]
    Degraded {
        /// So many.
        failures: u32,
    },
    /// A part is not what was put.
    #[error("kv store: part {part} of block {hash} is damaged: {reason}")]
    Corrupt {
        /// The record.
        hash: BlockHash,
        /// Which part.
        part: u32,
        /// What is wrong.
        reason: &'static str,
    },
    /// The books do not add up: a bug.
    #[error("kv store: {problem}")]
    Inconsistent {
        /// What does not.
        problem: String,
    },
}

impl StoreError {
    /// What to do about it.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::Foreign { .. } => ErrorKind::Invalid,
            Self::NoSpace { .. } | Self::NoSlot { .. } => ErrorKind::Overloaded,
            Self::Locked { .. } | Self::Io { .. } | Self::Degraded { .. } => ErrorKind::Unavailable,
            Self::Corrupt { .. } => ErrorKind::DataLoss,
            Self::Inconsistent { .. } => ErrorKind::Internal,
        }
    }

    pub(crate) fn invalid(what: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { what, problem: problem.into() }
    }

    pub(crate) fn foreign(path: &Path, problem: impl Into<String>) -> Self {
        Self::Foreign { path: path.display().to_string(), problem: problem.into() }
    }

    /// The operating system's refusal to do `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path, error: &io::Error) -> Self {
        let path = path.display().to_string();
        let reason = error.to_string();
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::NoSpace { path, reason }
            }
            _ => Self::Io { action, path, reason },
        }
    }
}
