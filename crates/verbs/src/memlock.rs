//! The limit on locked memory. Registered memory is pinned, and a device reports the lack of room
//! for it as a bare "cannot allocate memory"; so it is checked before, with words that say what to
//! set.

#![allow(unsafe_code)] // getrlimit

use std::{fs, io};

use crate::VerbsError;

/// Bit of CAP_IPC_LOCK in a capability set (linux/capability.h).
const CAP_IPC_LOCK: u32 = 14;

/// What this thread may lock, as the kernel sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemlockStatus {
    /// `RLIMIT_MEMLOCK` in bytes; none where it is unlimited or does not apply to this thread.
    pub limit: Option<u64>,
    /// Bytes that are pinned already.
    pub pinned: u64,
}

impl MemlockStatus {
    /// Of this thread.
    pub fn current() -> io::Result<Self> {
        let status = fs::read_to_string("/proc/thread-self/status")?;
        let exempt = has_ipc_lock(&status) && in_first_user_namespace(&fs::read_to_string("/proc/self/uid_map")?);
        let limit = if exempt { None } else { soft_limit()? };
        Ok(Self { limit, pinned: pinned_bytes(&status) })
    }

    /// Whether `bytes` more can be locked.
    pub fn check(&self, bytes: u64) -> Result<(), VerbsError> {
        let needed = self.pinned.saturating_add(bytes);
        match self.limit {
            Some(limit) if needed > limit => {
                Err(VerbsError::MemlockTooLow { bytes, needed, pinned: self.pinned, limit })
            }
            _ => Ok(()),
        }
    }
}

/// Fails with what to set, where `bytes` more cannot be registered. Where the limit cannot be found
/// out, the device decides.
pub fn check_memlock(bytes: u64) -> Result<(), VerbsError> {
    MemlockStatus::current().map_or(Ok(()), |status| status.check(bytes))
}

fn soft_limit() -> io::Result<Option<u64>> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes one rlimit, which is ours.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } {
        0 => Ok((limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)),
        _ => Err(io::Error::last_os_error()),
    }
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn has_ipc_lock(status: &str) -> bool {
    let effective = field(status, "CapEff").and_then(|hex| u64::from_str_radix(hex, 16).ok());
    effective.is_some_and(|set| set & (1 << CAP_IPC_LOCK) != 0)
}

/// The kernel asks for the capability in the first user namespace: root of a rootless container
/// shows it but does not have it.
fn in_first_user_namespace(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn pinned_bytes(status: &str) -> u64 {
    let kib = field(status, "VmPin").and_then(|text| text.strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tbaton\nVmPeak:\t  10 kB\nVmPin:\t    64 kB\nCapEff:\t0000000000004000\n";

    #[test]
    fn memlock_error_names_both_sizes_and_what_to_set() {
        let status = MemlockStatus { limit: Some(8_388_608), pinned: 65_536 };
        let error = status.check(1 << 30).unwrap_err().to_string();
        for part in ["1073741824", "1073807360", "65536", "8388608", "ulimit -l", "LimitMEMLOCK=", "IPC_LOCK"] {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    }

    #[test]
    fn memlock_limit_counts_pinned_bytes_and_is_inclusive() {
        let status = MemlockStatus { limit: Some(100), pinned: 40 };
        assert!(status.check(60).is_ok());
        assert!(status.check(61).is_err());
        assert!(status.check(u64::MAX).is_err());
        assert!(MemlockStatus { limit: None, pinned: 40 }.check(u64::MAX).is_ok());
    }

    #[test]
    fn ipc_lock_lifts_memlock_limit_only_in_first_user_namespace() {
        assert!(has_ipc_lock(STATUS));
        assert!(!has_ipc_lock("CapEff:\t000000000000bfff\n"));
        assert!(!has_ipc_lock(""));
        assert!(in_first_user_namespace("         0          0 4294967295\n"));
        assert!(!in_first_user_namespace("         0     100000      65536\n"));
    }

    #[test]
    fn pinned_memory_is_read_in_bytes() {
        assert_eq!(pinned_bytes(STATUS), 65_536);
        assert_eq!(pinned_bytes("VmPin:\tnonsense\n"), 0);
        assert!(MemlockStatus::current().is_ok());
    }
}
