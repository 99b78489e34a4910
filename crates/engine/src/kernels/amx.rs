//! Matrix tiles (Intel AMX): registers of up to 16 rows of 64 bytes, and products of two of them
//! that are added to a third.
//!
//! ```text
//! even = fma(A[m][2 k], B[k][2 n], even),  odd = fma(A[m][2 k + 1], B[k][2 n + 1], odd)      over 16 pairs k of bfloat16, both from 0
//! C[m][n] += even + odd
//! ```
//!
//! (Intel, Architecture Instruction Set Extensions Programming Reference: TDPBF16PS; numbers below
//! the smallest normal one are 0.) B lies as [`super::pairs`] have their weights anyway. A row of C
//! depends on that row of A alone, so the number of rows does not show.
//!
//! What is in tiles never outlives the assembly that put it there. Their shape does: [`Shape`].

use std::arch::asm;
use std::sync::OnceLock;

/// Rows of a tile.
pub(crate) const TILE: usize = 16;
/// Inputs that a product of tiles of bfloat16 sums.
pub(crate) const DEPTH: usize = 32;

/// Whether this CPU has tiles of bfloat16, and the system lets this process have them.
pub(super) fn allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| has_tiles() && ask())
}

fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    const NEEDED: u32 = BF16 | TILES;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & NEEDED == NEEDED
}

/// Asks the system for the tiles of all threads of this process, whose contexts become larger by 8
/// KB.
#[cfg(target_os = "linux")]
fn ask() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: two numbers; a system that knows nothing of it returns an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn ask() -> bool {
    false
}

/// How the tiles of this thread are shaped while it lives. They are given up when it is dropped, so
/// that the system does not save them when the thread rests.
pub(crate) struct Shape(());

/// What `ldtilecfg` reads.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shape {
    /// For products of bfloat16 ([`pairs_product`]) of `rows` rows, from 1 to 32.
    ///
    /// # Safety
    /// The CPU has tiles, and the process may use them; no other shape lives on this thread.
    pub unsafe fn of_pairs(rows: usize) -> Self {
        let first = rows.min(TILE) as u8;
        let rest = rows.saturating_sub(TILE) as u8;
        // Sums of the first rows, of the rest; A of the first, of the rest; B. A tile of no rows
        // has no columns.
        let rest_bytes = if rest == 0 { 0 } else { 64 };
        let row_bytes = [64, 64, rest_bytes, rest_bytes, 64, rest_bytes, 64, 64];
        // SAFETY: the caller's promise.
        unsafe { Self::load([first, first, rest, rest, first, rest, 16, 16], row_bytes) }
    }

    /// # Safety
    /// As for [`Self::of_pairs`].
    unsafe fn load(rows: [u8; 8], row_bytes: [u16; 8]) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.rows[..8].copy_from_slice(&rows);
        config.row_bytes[..8].copy_from_slice(&row_bytes);
        // SAFETY: the caller's promise; 64 bytes. The compiler has nothing in tiles.
        unsafe {
            asm!("ldtilecfg [{config}]", config = in(reg) &raw const config, options(nostack, readonly, preserves_flags))
        };
        Self(())
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: a shape exists only if there are tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Operands of [`pairs_product`]. Strides are bytes from one row, or one row of pairs, to the next.
#[derive(Clone, Copy)]
pub(crate) struct PairsProduct {
    pub a: *const u8,
    pub a_stride: usize,
    pub b: *const u8,
    pub b_stride: usize,
    pub c: *mut u8,
    pub c_stride: usize,
    /// Products of tiles, 32 inputs each, from 1.
    pub steps: usize,
    /// Add to what C holds, instead of beginning at 0.
    pub accumulate: bool,
    /// What will be read soon: any address.
    pub ahead: *const u8,
    /// Cache lines of it to ask for in each step.
    pub ahead_lines: usize,
}

/// `C (+)= A B`: one tile of rows or (`TALL`) two, times 16 outputs or (`WIDE`) 32.
///
/// B is for the first-level cache, where the next rows find it; A passes by (`tileloaddt1`).
/// Prefetches go to the second-level cache, so that they do not displace B either.
///
/// # Safety
/// A shape of pairs lives on this thread. A, B and C can be read, and C written, at as many rows as
/// its tiles have, with their strides.
#[inline(always)]
pub(crate) unsafe fn pairs_product<const TALL: bool, const WIDE: bool>(product: PairsProduct) {
    let PairsProduct { a, a_stride, b, b_stride, c, c_stride, steps, accumulate, ahead, ahead_lines } = product;
    macro_rules! product {
        (zero: $($zero:literal)*; load: $($load:literal)*; rest: $($load_rest:literal)*; step: $($step:literal)*; store: $($store:literal)*; rest: $($store_rest:literal)*;) => {
            // SAFETY: the caller's promise; addresses that are only asked for may be any. The
            // compiler has nothing in tiles.
            unsafe {
                asm!(
                    "test {count}, {count}",
                    "jnz 2f",
                    $($zero,)*
                    "jmp 3f",
                    "2:",
                    $($load,)*
                    "lea {count}, [{c} + {c_stride} * 8]",
                    "lea {count}, [{count} + {c_stride} * 8]",
                    $($load_rest,)*
                    "3:",
                    "mov {count}, {lines}",
                    "test {count}, {count}",
                    "jz 5f",
                    "4:",
                    "prefetcht1 [{ahead}]",
                    "add {ahead}, 64",
                    "dec {count}",
                    "jnz 4b",
                    "5:",
                    $($step,)*
                    "add {a}, 64",
                    "add {a_rest}, 64",
                    "lea {b}, [{b} + {b_stride} * 8]",
                    "lea {b}, [{b} + {b_stride} * 8]",
                    "dec {steps}",
                    "jnz 3b",
                    $($store,)*
                    "lea {count}, [{c} + {c_stride} * 8]",
                    "lea {count}, [{count} + {c_stride} * 8]",
                    $($store_rest,)*
                    a = inout(reg) a => _,
                    a_rest = inout(reg) a.wrapping_add(TILE * a_stride) => _,
                    a_stride = in(reg) a_stride,
                    b = inout(reg) b => _,
                    b_stride = in(reg) b_stride,
                    c = in(reg) c,
                    c_stride = in(reg) c_stride,
                    steps = inout(reg) steps => _,
                    count = inout(reg) usize::from(accumulate) => _,
                    ahead = inout(reg) ahead => _,
                    lines = in(reg) ahead_lines,
                    options(nostack),
                )
            }
        };
    }
    match (TALL, WIDE) {
        (true, true) => product! {
            zero: "tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3";
            load: "tileloadd tmm0, [{c} + {c_stride}]" "tileloadd tmm1, [{c} + {c_stride} + 64]";
            rest: "tileloadd tmm2, [{count} + {c_stride}]" "tileloadd tmm3, [{count} + {c_stride} + 64]";
            step: "tileloaddt1 tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloadd tmm7, [{b} + {b_stride} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"
                "tileloaddt1 tmm5, [{a_rest} + {a_stride}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7";
            store: "tilestored [{c} + {c_stride}], tmm0" "tilestored [{c} + {c_stride} + 64], tmm1";
            rest: "tilestored [{count} + {c_stride}], tmm2" "tilestored [{count} + {c_stride} + 64], tmm3";
        },
        (false, true) => product! {
            zero: "tilezero tmm0" "tilezero tmm1";
            load: "tileloadd tmm0, [{c} + {c_stride}]" "tileloadd tmm1, [{c} + {c_stride} + 64]";
            rest: ;
            step: "tileloaddt1 tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloadd tmm7, [{b} + {b_stride} + 64]" "tdpbf16ps tmm1, tmm4, tmm7";
            store: "tilestored [{c} + {c_stride}], tmm0" "tilestored [{c} + {c_stride} + 64], tmm1";
            rest: ;
        },
        (true, false) => product! {
            zero: "tilezero tmm0" "tilezero tmm2";
            load: "tileloadd tmm0, [{c} + {c_stride}]";
            rest: "tileloadd tmm2, [{count} + {c_stride}]";
            step: "tileloaddt1 tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloaddt1 tmm5, [{a_rest} + {a_stride}]" "tdpbf16ps tmm2, tmm5, tmm6";
            store: "tilestored [{c} + {c_stride}], tmm0";
            rest: "tilestored [{count} + {c_stride}], tmm2";
        },
        (false, false) => product! {
            zero: "tilezero tmm0";
            load: "tileloadd tmm0, [{c} + {c_stride}]";
            rest: ;
            step: "tileloaddt1 tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6";
            store: "tilestored [{c} + {c_stride}], tmm0";
            rest: ;
        },
    }
}
