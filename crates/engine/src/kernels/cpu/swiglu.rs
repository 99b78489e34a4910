//! y = silu(gate) x up, silu(x) = x / (1 + e^-x) (Shazeer, 2020).

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, exp};

per_isa! {
    /// One row: `gate`, `up` and `y` are `[d]`.
    pub(crate) fn swiglu(gate: &[f32], up: &[f32], y: &mut [f32]) = swiglu_of<Floats>
}

#[inline(always)]
fn swiglu_of<V: F32x16>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == y.len(), "lengths of a gate");
    for ((gate, up), y) in gate.chunks(LANES).zip(up.chunks(LANES)).zip(y.chunks_mut(LANES)) {
        gate_of(V::read(gate), V::read(up)).write(y);
    }
}

/// silu(gate) x up.
#[inline(always)]
pub(super) fn gate_of<V: F32x16>(gate: V, up: V) -> V {
    let silu = gate.div(V::splat(1.0).add(exp(V::splat(0.0).sub(gate))));
    silu.mul(up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::guarded::{Guarded, on_both_sides};
    use crate::kernels::{Isa, reference};

    #[test]
    fn swiglu_is_near_the_reference_and_the_same_on_all_isas() {
        on_both_sides(compare);
    }

    fn compare() {
        for len in [1, 15, 16, 17, 31, 100] {
            let mut gate: Vec<_> = reference::random(len as u64, len).iter().map(|x| x * 8.0).collect();
            gate[0] = -200.0;
            let gate = Guarded::copy_of(&gate);
            let up = Guarded::copy_of(&reference::random(3, len));
            let mut scalar = vec![0.0; len];
            swiglu(Isa::SCALAR, &gate, &up, &mut scalar);
            assert!(reference::distance(&scalar, &reference::swiglu(&gate, &up)) < 2e-6, "{len}");
            for isa in Isa::available() {
                let mut y = Guarded::zeroed(len);
                swiglu(isa, &gate, &up, &mut y);
                assert_eq!(*y, scalar, "{isa} {len}");
            }
        }
    }
}
