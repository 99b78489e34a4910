//! Philox 4x32-10: random numbers as a function of (key, counter), without state. (Salmon, Moraes,
//! Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Four random words.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let product = |i: usize, x: u32| u64::from(MULTIPLIERS[i]) * u64::from(x);
        let p0 = product(0, counter[0]);
        let p1 = product(1, counter[2]);
        counter =
            [(p1 >> 32) as u32 ^ counter[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ counter[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Uniform in [0, 1), 53 bits: draw `index` of the stream that `seed` names.
pub(crate) fn uniform(seed: u64, index: u64) -> f64 {
    let words = philox([index as u32, (index >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kat_vectors` of the authors' Random123 library.
    #[test]
    fn philox_matches_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn philox_draws_are_uniform_and_differ_by_seed_and_index() {
        let draws: Vec<_> = (0..10_000).map(|i| uniform(42, i)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        assert!((draws.iter().sum::<f64>() / 10_000.0 - 0.5).abs() < 0.01);
        assert_ne!(uniform(42, 0), uniform(43, 0));
        assert_ne!(uniform(42, 0), uniform(42, 1 << 32));
    }
}
