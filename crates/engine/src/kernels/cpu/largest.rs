//! The largest of some logits, and whether all are finite, in one pass.
//!
//! ```text
//! index = the first i with x[i] = max x
//! ```

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};

/// Elements of which the largest is found before it is asked where: a search for each vector would
/// take longer than the vector.
const CHUNK: usize = 1024;

/// What a pass over some numbers found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Largest {
    /// Of the first of the largest; any index if a number is NaN.
    pub index: usize,
    /// Whether no number is infinite or NaN.
    pub all_finite: bool,
}

per_isa! {
    /// The largest of at least one number.
    pub(crate) fn largest(x: &[f32]) -> Largest = largest_of<Floats>
}

#[inline(always)]
pub(super) fn largest_of<V: F32x16>(x: &[f32]) -> Largest {
    let mut best = 0;
    // Each adds 0 times itself: nothing if it is finite, else NaN.
    let mut none = V::splat(0.0);
    for (first, chunk) in (0..).step_by(CHUNK).zip(x.chunks(CHUNK)) {
        let mut max = V::splat(f32::NEG_INFINITY);
        let (vectors, rest) = chunk.as_chunks::<LANES>();
        for x in vectors {
            let x = V::read(x);
            none = x.mul_add(V::splat(0.0), none);
            max = x.max(max);
        }
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        none = V::read(rest).mul_add(V::splat(0.0), none);
        let max = max.max(V::read(&last)).largest();
        if max > x[best] {
            best = first + chunk.iter().position(|x| *x == max).unwrap_or(0);
        }
    }
    Largest { index: best, all_finite: none.all_finite() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::guarded::{Guarded, on_both_sides};
    use crate::kernels::{Isa, reference};

    #[test]
    fn largest_logit_equals_the_reference() {
        on_both_sides(compare);
    }

    fn compare() {
        for len in [1, 15, 16, 17, 1023, 1024, 1025, 5000] {
            let mut x = Guarded::copy_of(&reference::random(len as u64, len));
            for (i, same) in [(len - 1, 0.9), (len / 2, 1.5), (len / 3, 1.5), (0, -2.0), (0, 3.0)] {
                x[i] = same;
                for isa in Isa::available() {
                    let expected = Largest { index: reference::largest(&x), all_finite: true };
                    assert_eq!(largest(isa, &x), expected, "{isa} {len} {i}");
                }
            }
            x.fill(-7.0);
            Isa::available().into_iter().for_each(|isa| assert_eq!(largest(isa, &x).index, 0, "{isa} {len}"));
        }
    }

    #[test]
    fn largest_logit_detects_non_finite_values_at_any_position() {
        for len in [1, 16, 40, 2050] {
            for at in 0..len {
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = reference::random(3, len);
                    x[at] = wrong;
                    for isa in Isa::available() {
                        let found = largest(isa, &x);
                        assert!(!found.all_finite && found.index < len, "{isa} {len} {at} {wrong}");
                        if !wrong.is_nan() {
                            assert_eq!(found.index, reference::largest(&x), "{isa} {len} {at} {wrong}");
                        }
                    }
                }
            }
        }
    }
}
