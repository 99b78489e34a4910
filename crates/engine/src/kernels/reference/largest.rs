//! The first of the largest numbers.

pub(crate) fn largest(x: &[f32]) -> usize {
    (0..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best })
}
