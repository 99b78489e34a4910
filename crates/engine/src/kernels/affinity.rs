//! Cores that a node has for itself.
//!
//! This process may have been given as many cores as it has threads, and fewer than the machine has
//! (taskset, a cpuset, Kubernetes' static CPU manager). Then helpers stay on one each, and the
//! caller finds the last one free. Nodes that share cores are left to the system: threads that
//! cannot move would wait for one another. They share all of a machine's cores, or those of a
//! process that started several (`taskset ... baton up`).

/// A core for each of `threads` threads, if they are this process's own.
pub(super) fn own_cores(threads: usize) -> Option<Vec<usize>> {
    let cores = allowed(SELF)?;
    // What the parent has too, it may have given to others. A container's first process sees no
    // parent.
    let inherited = parent().is_some_and(|parent| allowed(parent).as_ref() == Some(&cores));
    (cores.len() == threads && cores.len() < online() && !inherited).then_some(cores)
}

/// The calling thread, when a process is asked for.
const SELF: i32 = 0;

/// Keeps the calling thread on a core; if the system does not let it, it runs as before.
pub(super) fn stay_on(core: usize) {
    if let Err(error) = set(core) {
        tracing::debug!(core, %error, "a thread is not pinned");
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::mem::{size_of, zeroed};

    /// The cores that a process's first thread, or the calling thread, may run on, in order.
    pub fn allowed(process: i32) -> Option<Vec<usize>> {
        // SAFETY: a set of cores is plain bits.
        let mut set: libc::cpu_set_t = unsafe { zeroed() };
        // SAFETY: the system writes at most as many bytes as the set has.
        let found = unsafe { libc::sched_getaffinity(process, size_of::<libc::cpu_set_t>(), &raw mut set) };
        // SAFETY: below the number of cores that a set has room for.
        let is_set = |&core: &usize| unsafe { libc::CPU_ISSET(core, &set) };
        (found == 0).then(|| (0..libc::CPU_SETSIZE as usize).filter(is_set).collect())
    }

    /// The process that started this one.
    pub fn parent() -> Option<i32> {
        // SAFETY: asks for a number.
        Some(unsafe { libc::getppid() }).filter(|&process| process > 0)
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
use linux::{allowed, online, parent, set};

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use std::io;

    pub fn allowed(_: i32) -> Option<Vec<usize>> {
        None
    }

    pub fn parent() -> Option<i32> {
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
use elsewhere::{allowed, online, parent, set};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn allowed_cores_are_own_if_as_many_as_threads() {
        // Of this thread alone; its affinity ends with it.
        let of_thread = std::thread::spawn(|| {
            let all = allowed(SELF).unwrap();
            let last = *all.last().unwrap();
            stay_on(last);
            assert_eq!(allowed(SELF).unwrap(), [last]);
            assert_eq!(own_cores(1).is_some(), online() > 1);
            assert_eq!(own_cores(2), None, "more threads than cores");
            (all, last)
        });
        let (all, last) = of_thread.join().unwrap();
        assert!(all.contains(&last) && allowed(SELF).unwrap() == all, "other threads stay as they are");
        assert_eq!(own_cores(online()), None, "all cores of a machine are no process's own");
    }

    /// Says whether the cores are the process's own, and starts itself once more, one process
    /// deeper.
    #[test]
    #[ignore = "the other process of the test here, which starts it itself"]
    fn other_process() {
        let deeper = std::env::var(DEEPER).unwrap_or_default();
        println!("own: {}", own_cores(1).is_some());
        if deeper == "1" {
            print!("{}", told_by_a_child("0"));
        }
    }

    const DEEPER: &str = "BATON_TEST_AFFINITY_DEEPER";

    #[allow(clippy::unwrap_used)] // tests: a panic is the failure
    fn told_by_a_child(deeper: &str) -> String {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "kernels::affinity::tests::other_process";
        let output = command.args(["--exact", name, "--ignored", "--nocapture"]).env(DEEPER, deeper).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        said.lines().filter_map(|line| Some(format!("own: {}\n", line.split_once("own: ")?.1))).collect()
    }

    #[test]
    fn cores_shared_with_the_parent_process_are_not_own() {
        assert!(allowed(SELF).unwrap().len() >= 2, "this test needs two cores");
        // A child inherits the cores of the thread that starts it; the parent's are those of its
        // first thread, which has all.
        let of_thread = std::thread::spawn(|| {
            stay_on(*allowed(SELF).unwrap().last().unwrap());
            told_by_a_child("1")
        });
        assert_eq!(of_thread.join().unwrap(), "own: true\nown: false\n", "the child's, then what the child started");
    }

    #[test]
    fn pinning_to_a_missing_core_changes_nothing() {
        let before = allowed(SELF);
        stay_on(usize::MAX);
        stay_on(libc::CPU_SETSIZE as usize - 1);
        assert_eq!(allowed(SELF), before);
    }
}
