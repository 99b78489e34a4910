//! What can go wrong with a device.

use std::io;

/// A verbs operation that failed, or a setting that fits no device.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// The device or the kernel refused.
    #[error("{operation} on {object}: {source}")]
    Refused {
        /// The operation, in the words of the verbs interface.
        operation: &'static str,
        /// What it was done to.
        object: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// More memory would be locked than the process may lock.
    #[error(
        "registering {bytes} bytes for RDMA needs {needed} bytes of locked memory ({pinned} are locked already), and the limit is {limit}: raise it with \
         `ulimit -l`, `LimitMEMLOCK=` of a systemd unit, or give the container the capability IPC_LOCK (Kubernetes: securityContext.capabilities.add)"
    )]
    MemlockTooLow {
        /// Bytes to register.
        bytes: u64,
        /// `bytes` and those that are locked already.
        needed: u64,
        /// Bytes locked already.
        pinned: u64,
        /// `RLIMIT_MEMLOCK`, bytes.
        limit: u64,
    },
    /// The GID table has no entry that can be used.
    #[error("no usable GID among the {entries} entries of the table")]
    NoGid {
        /// Entries looked at.
        entries: usize,
    },
    /// The GID index that was asked for is not in the table.
    #[error("GID index {index} is not in the table, which has {present:?}")]
    NoSuchGid {
        /// The index asked for.
        index: u32,
        /// Indices in the table.
        present: Vec<u32>,
    },
    /// A device filter that cannot be read.
    #[error("device filter '{filter}': '{part}' is not a name, nor a name's beginning followed by '*'")]
    BadFilter {
        /// The whole filter.
        filter: String,
        /// The part that is wrong.
        part: String,
    },
    /// A local span outside its registration.
    #[error("span of {len} bytes at {offset} outside a registration of {registered} bytes")]
    OutsideRegistration {
        /// Offset of the span in the registration, bytes.
        offset: u64,
        /// Length of the span, bytes.
        len: u64,
        /// Length of the registration, bytes.
        registered: u64,
    },
    /// More work requests, or spans in one, than there is room for.
    #[error("{what} are limited to {limit}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many are allowed.
        limit: usize,
    },
}

#[cfg(feature = "ibverbs")]
impl VerbsError {
    /// The error that `errno` holds now.
    pub(crate) fn last(operation: &'static str, object: impl Into<String>) -> Self {
        Self::Refused { operation, object: object.into(), source: io::Error::last_os_error() }
    }

    /// The result of a call that returns 0 or an errno (some drivers negate it, some return -1 and
    /// set `errno`).
    pub(crate) fn check(rc: i32, operation: &'static str, object: impl FnOnce() -> String) -> Result<(), Self> {
        let source = match rc {
            0 => return Ok(()),
            -1 => io::Error::last_os_error(),
            code => io::Error::from_raw_os_error(code.abs()),
        };
        Err(Self::Refused { operation, object: object(), source })
    }
}
