//! Which core a thread runs on.

#![allow(unsafe_code)] // affinities have no safe face in the standard library

use std::io;

use crate::BenchError;

/// A core, by the system's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Core(usize);

/// Cores that this thread may use, as long as it is not bound to one: the first so many. If there
/// are fewer, the flag asks for too much.
pub fn usable<const N: usize>(flag: &'static str) -> Result<[Core; N], BenchError> {
    let mut set = empty();
    // SAFETY: the set is memory of the size that is given.
    let told = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if told == -1 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the numbers are below the set's size.
    let cores = (0..libc::CPU_SETSIZE as usize).filter(|core| unsafe { libc::CPU_ISSET(*core, &set) });
    let cores: Vec<_> = cores.map(Core).collect();
    let first = cores.first_chunk().copied();
    first.ok_or_else(|| BenchError::invalid(flag, format!("takes {N} cores, and {} can be used", cores.len())))
}

/// Binds this thread, and those that it starts, to a core.
pub fn bind(core: Core) -> Result<(), BenchError> {
    let mut set = empty();
    // SAFETY: the number came from a set of this size.
    unsafe { libc::CPU_SET(core.0, &mut set) };
    // SAFETY: the set is memory of the size that is given.
    let bound = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    match bound {
        -1 => Err(io::Error::last_os_error().into()),
        _ => Ok(()),
    }
}

fn empty() -> libc::cpu_set_t {
    // SAFETY: a set is an array of integers, all of which may be 0.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_bound_to_a_core_can_use_it_alone() {
        std::thread::spawn(|| {
            let [core] = usable("--trace").unwrap();
            bind(core).unwrap();
            assert_eq!(usable("--trace").unwrap(), [core]);
            let error = usable::<2>("--large").unwrap_err().to_string();
            assert_eq!(error, "--large: takes 2 cores, and 1 can be used");
        })
        .join()
        .unwrap();
    }
}
