//! Copies out of another process's memory.

#![allow(unsafe_code)] // copies between mappings; see the SAFETY notes

use std::ptr;

/// Copies this large go past the caches. What moves here is read again much later, if by this core
/// at all. A copy through the cache reads the destination first. Measured on a Zen 4: 1 MiB blocks
/// 1.7 times as fast as `memcpy`, 12 KiB 1.1 times.
#[cfg(target_arch = "x86_64")]
const STREAMED_BYTES: usize = 8 << 10;

/// Copies `len` bytes that another process may change meanwhile: what arrives is then any mixture,
/// which the caller finds out and throws away.
///
/// # Safety
/// Both ranges are mapped for the call, they do not overlap, and nothing else in this process uses
/// the destination.
pub(super) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STREAMED_BYTES && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the feature is there; the rest is the caller's promise.
        return unsafe { streamed(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
}

/// # Safety
/// As for [`copy_out`], and AVX2 is there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn streamed(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    /// Bytes of one round: two cache lines.
    const STRIDE: usize = 128;
    /// How far ahead the source is asked for, bytes.
    const AHEAD: usize = 512;
    let head = to.align_offset(32).min(len);
    let whole = (len - head) / STRIDE * STRIDE;
    // SAFETY: all offsets are below `len`; the streamed part starts at a multiple of 32. A prefetch
    // of any address is harmless.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        let mut at = head;
        while at < head + whole {
            _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(at + AHEAD).cast());
            _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(at + AHEAD + 64).cast());
            let source = from.add(at).cast::<__m256i>();
            let target = to.add(at).cast::<__m256i>();
            let lines = [0, 1, 2, 3].map(|i| _mm256_loadu_si256(source.add(i)));
            for (i, line) in lines.into_iter().enumerate() {
                _mm256_stream_si256(target.add(i), line);
            }
            at += STRIDE;
        }
        ptr::copy_nonoverlapping(from.add(at), to.add(at), len - at);
        // Streamed stores are ordered before whatever tells others of them.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shm_copy_writes_every_byte_and_no_other(from in 0usize..70, to in 0usize..70, len in prop::sample::select(vec![0usize, 1, 31, 127, 128, 129, 4096, 8191, 8192, 8193, 20_000, 70_001])) {
            let source: Vec<u8> = (0..80_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let mut target = vec![0xaa; 80_000];
            // SAFETY: both are inside their vectors.
            unsafe { copy_out(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
            prop_assert_eq!(&target[to..to + len], &source[from..from + len]);
            prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xaa));
        }
    }
}
