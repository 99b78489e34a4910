//! CPU time of this process.

#![allow(unsafe_code)] // getrusage has no safe face in the standard library

use std::io;

/// CPU seconds of all threads since the start, in user and kernel mode.
pub fn cpu_seconds() -> io::Result<f64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the pointer is to memory of the right size; it is read only if the call says that it
    // was written.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) == -1 {
            return Err(io::Error::last_os_error());
        }
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    Ok(seconds(usage.ru_utime) + seconds(usage.ru_stime))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_seconds_grow_with_work() {
        let before = cpu_seconds().unwrap();
        let mut sum = 0_u64;
        while cpu_seconds().unwrap() < before + 0.01 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(sum > 0);
    }
}
