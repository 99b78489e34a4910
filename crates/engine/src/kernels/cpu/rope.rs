//! Rotates the pairs (x\[i], x\[i + half]) of each head by the angle position x frequency\[i] (Su
//! et al., 2021; halves as in GPT-NeoX). Files whose pairs are neighbours get their Q and K rows
//! reordered at load.

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::{Rows, Threads};

/// Cosines and sines of the rows of one step, computed in double precision: `[row][cos: half | sin:
/// half]`.
pub(crate) struct RopeTable {
    frequencies: Vec<f64>,
    positions: Vec<u32>,
    rows: Rows,
}

impl RopeTable {
    /// `frequencies[i]` is the angle per position of pair i.
    pub fn new(frequencies: Vec<f64>) -> Self {
        let rows = Rows::new(frequencies.len() * 2);
        Self { frequencies, positions: Vec::new(), rows }
    }

    /// Sets the positions of the step's rows. Those of the step before cost nothing.
    pub fn set_positions(&mut self, threads: &Threads, positions: &[u32]) {
        if self.positions == positions {
            return;
        }
        let frequencies = &self.frequencies;
        let half = self.frequencies.len();
        self.rows.resize(positions.len());
        self.positions.clear();
        self.positions.extend_from_slice(positions);
        self.rows.for_each(threads, |row, angles| {
            let (cosines, sines) = angles.split_at_mut(half);
            for ((frequency, cosine), sine) in frequencies.iter().zip(cosines).zip(sines) {
                let (s, c) = (f64::from(positions[row]) * frequency).sin_cos();
                *sine = s as f32;
                *cosine = c as f32;
            }
        });
    }

    /// `[cos: half | sin: half]` of a row of the step.
    pub fn row(&self, row: usize) -> &[f32] {
        self.rows.row(row)
    }
}

per_isa! {
    /// Rotates the heads of one row in place: `heads` is `[head][2 * half]`, `table` is `[cos: half
    /// | sin: half]`.
    pub(crate) fn rope(heads: &mut [f32], table: &[f32]) = rope_of<Floats>
}

#[inline(always)]
fn rope_of<V: F32x16>(heads: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    let (cosines, sines) = table.split_at(half);
    for head in heads.chunks_exact_mut(table.len()) {
        let (low, high) = head.split_at_mut(half);
        let angles = cosines.chunks(LANES).zip(sines.chunks(LANES));
        for ((low, high), (cosine, sine)) in low.chunks_mut(LANES).zip(high.chunks_mut(LANES)).zip(angles) {
            let a = V::read(low);
            let b = V::read(high);
            let cosine = V::read(cosine);
            let sine = V::read(sine);
            a.mul(cosine).sub(b.mul(sine)).write(low);
            b.mul(cosine).add(a.mul(sine)).write(high);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::guarded::{Guarded, on_both_sides};
    use crate::kernels::{Isa, reference};

    #[test]
    fn rope_is_near_the_reference_and_the_same_on_all_isas() {
        on_both_sides(compare);
    }

    fn compare() {
        for (half, heads) in [(1, 1), (4, 3), (16, 2), (20, 2), (32, 9)] {
            let frequencies: Vec<_> = (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)).collect();
            let mut table = RopeTable::new(frequencies.clone());
            let threads = Threads::new(2).unwrap();
            table.set_positions(&threads, &[0, 1]);
            table.set_positions(&threads, &[0, 1, 8_000]);
            let x = reference::random(half as u64, heads * 2 * half);
            for (row, position) in [0, 1, 8_000].into_iter().enumerate() {
                let rotate = |head: &[f32]| reference::rope(head, position, &frequencies);
                let expected: Vec<_> = x.chunks(2 * half).flat_map(rotate).collect();
                let mut scalar = x.clone();
                rope(Isa::SCALAR, &mut scalar, table.row(row));
                assert!(reference::distance(&scalar, &expected) < 1e-6, "{half} {position}");
                for isa in Isa::available() {
                    let mut y = Guarded::copy_of(&x);
                    let angles = Guarded::copy_of(table.row(row));
                    rope(isa, &mut y, &angles);
                    assert_eq!(*y, scalar, "{isa}");
                }
            }
        }
    }
}
