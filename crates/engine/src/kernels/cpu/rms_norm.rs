//! y\[i] = x\[i] / sqrt(mean(x^2) + eps) * w\[i] (Zhang and Sennrich, 2019), `[d]`. Squares are
//! summed in 16 lanes, then as a tree.

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};

per_isa! {
    /// Normalises one row: `x`, `weight` and `y` are `[d]`.
    pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) = rms_norm_of<Floats>
}

#[inline(always)]
fn rms_norm_of<V: F32x16>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == y.len(), "lengths of a norm");
    let mut squares = V::splat(0.0);
    for x in x.chunks(LANES) {
        let x = V::read(x);
        squares = x.mul_add(x, squares);
    }
    let scale = V::splat(1.0 / (squares.sum() / x.len() as f32 + eps).sqrt());
    for ((x, w), y) in x.chunks(LANES).zip(weight.chunks(LANES)).zip(y.chunks_mut(LANES)) {
        V::read(x).mul(scale).mul(V::read(w)).write(y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::guarded::{Guarded, on_both_sides};
    use crate::kernels::{Isa, reference};

    #[test]
    fn rms_norm_is_near_the_reference_and_the_same_on_all_isas() {
        on_both_sides(compare);
    }

    fn compare() {
        for len in [1, 15, 16, 17, 33, 576] {
            let x = reference::random(len as u64, len);
            let w = reference::random(7, len);
            let expected = reference::rms_norm(&x, &w, 1e-5);
            let x = Guarded::copy_of(&x);
            let w = Guarded::copy_of(&w);
            let mut scalar = vec![0.0; len];
            rms_norm(Isa::SCALAR, &x, &w, 1e-5, &mut scalar);
            assert!(reference::distance(&scalar, &expected) < 1e-6, "{len}");
            for isa in Isa::available() {
                let mut y = Guarded::zeroed(len);
                rms_norm(isa, &x, &w, 1e-5, &mut y);
                assert_eq!(*y, scalar, "{isa} {len}");
            }
        }
    }
}
