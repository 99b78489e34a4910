//! Quantiles of what was measured.

/// What the share `q` (0 to 1) of the values does not exceed: the one of the nearest rank. They are
/// ascending, and there is one at least.
pub fn quantile<T: Copy>(sorted: &[T], q: f64) -> T {
    sorted[((sorted.len() - 1) as f64 * q).round() as usize]
}
