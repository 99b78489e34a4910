//! Cores that a node has for itself.
//!
//! Where somebody gave this process as many cores as it has threads, and fewer than the machine has (taskset, a cpuset, Kubernetes' static CPU manager), helpers stay on one each, and
//! the caller finds the last one free. Nodes that share all cores of a machine are left to the system: threads that cannot move would wait for one another.

/// A core for each of `threads` threads, if they are this process's own.
pub(super) fn own_cores(threads: usize) -> Option<Vec<usize>> {
    let cores = allowed()?;
    (cores.len() == threads && cores.len() < online()).then_some(cores)
}

/// Keeps the calling thread on a core; where the system does not let it, it runs as before.
pub(super) fn stay_on(core: usize) {
    if let Err(error) = set(core) {
        tracing::debug!(core, %error, "a thread is not pinned");
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::mem::{size_of, zeroed};

    /// The cores that the calling thread may run on, in order.
    pub fn allowed() -> Option<Vec<usize>> {
        // SAFETY: a set of cores is plain bits.
        let mut set: libc::cpu_set_t = unsafe { zeroed() };
        // SAFETY: the system writes at most as many bytes as the set has.
        let found = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
        // SAFETY: below the number of cores that a set has room for.
        let is_set = |&core: &usize| unsafe { libc::CPU_ISSET(core, &set) };
        (found == 0).then(|| (0..libc::CPU_SETSIZE as usize).filter(is_set).collect())
    }

    /// Cores of the machine.
    pub fn online() -> usize {
        // SAFETY: asks for a number.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(0)
    }

    pub fn set(core: usize) -> io::Result<()> {
        if core >= libc::CPU_SETSIZE as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: a set of cores is plain bits.
        let mut set: libc::cpu_set_t = unsafe { zeroed() };
        // SAFETY: the set has room for this core.
        unsafe { libc::CPU_SET(core, &mut set) };
        // SAFETY: the system reads as many bytes as the set has.
        match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(target_os = "linux")]
use linux::{allowed, online, set};

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use std::io;

    pub fn allowed() -> Option<Vec<usize>> {
        None
    }

    pub fn online() -> usize {
        0
    }

    pub fn set(_: usize) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(not(target_os = "linux"))]
use elsewhere::{allowed, online, set};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn cores_are_ones_own_where_somebody_gave_just_as_many() {
        // Of this thread alone; its affinity ends with it.
        let of_thread = std::thread::spawn(|| {
            let all = allowed().unwrap();
            let last = *all.last().unwrap();
            stay_on(last);
            assert_eq!(allowed().unwrap(), [last]);
            assert_eq!(own_cores(1).is_some(), online() > 1);
            assert_eq!(own_cores(2), None, "more threads than cores");
            (all, last)
        });
        let (all, last) = of_thread.join().unwrap();
        assert!(all.contains(&last) && allowed().unwrap() == all, "other threads stay as they are");
        assert_eq!(own_cores(online()), None, "all cores of a machine are nobody's own");
    }

    #[test]
    fn a_core_that_is_not_there_changes_nothing() {
        let before = allowed();
        stay_on(usize::MAX);
        stay_on(libc::CPU_SETSIZE as usize - 1);
        assert_eq!(allowed(), before);
    }
}
