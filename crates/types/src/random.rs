//! Random numbers from a seed.

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The same seed gives the same numbers.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Any number.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// From [0, 1), in steps of 2^-53.
    pub const fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From 0 to `n` - 1. The bias of the multiplication is below `n` / 2^64.
    ///
    /// # Panics
    /// If `n` is 0.
    pub const fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "nothing to draw from");
        ((self.next_u64() as u128 * n as u128) >> 64) as u64
    }

    /// Exponentially distributed: the time until the next of events that come apart by `mean` on
    /// average.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        // 1 - unit is never 0.
        -mean * (1.0 - self.unit()).ln()
    }
}

/// A bijection of 64 bits without visible order: what [`Random`] makes its numbers with.
pub const fn mix(n: u64) -> u64 {
    let z = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_are_those_of_splitmix64() {
        let mut random = Random::new(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(first.map(|_| random.next_u64()), first);
    }

    #[test]
    fn random_draws_are_in_range_and_of_the_right_mean() {
        let mut random = Random::new(7);
        let mut mean = |draw: fn(&mut Random) -> f64| (0..10_000).map(|_| draw(&mut random)).sum::<f64>() / 1e4;
        assert!((mean(Random::unit) - 0.5).abs() < 0.02);
        assert!((mean(|random| random.below(9) as f64) - 4.0).abs() < 0.1);
        assert!((mean(|random| random.exponential(3.0)) - 3.0).abs() < 0.1);
        assert!((0..10_000).all(|_| random.below(3) < 3 && random.unit() < 1.0 && random.exponential(1.0) >= 0.0));
    }
}
