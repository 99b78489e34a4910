//! Bytes that tell where they belong, and numbers that can be drawn again.

use std::ops::Range;

use baton_types::mix;

/// The eight bytes of pattern `tag` that begin at offset `8 * index`.
fn word(tag: u64, index: u64) -> [u8; 8] {
    mix(mix(tag) ^ index).to_le_bytes()
}

/// Writes pattern `tag` as it stands at `offset` of the destination, so that bytes of another batch
/// or from another place show.
pub fn fill(bytes: &mut [u8], tag: u64, offset: u64) {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let skip = (at % 8) as usize;
        let (piece, after) = rest.split_at_mut(rest.len().min(8 - skip));
        piece.copy_from_slice(&word(tag, at / 8)[skip..skip + piece.len()]);
        at += piece.len() as u64;
        rest = after;
    }
}

/// A copy of pattern `tag` at `range`.
pub fn pattern(tag: u64, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    fill(&mut bytes, tag, range.start);
    bytes
}

/// Numbers that depend on the seed only.
#[derive(Debug, Clone)]
pub struct Random(baton_types::Random);

impl Random {
    /// The seed of `BATON_TEST_SEED`, or a new one; it is printed, so that a failure can be
    /// repeated.
    pub fn from_environment(test: &str) -> Self {
        let seed = std::env::var("BATON_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(baton_runtime::random_u64);
        println!("{test}: BATON_TEST_SEED={seed}");
        Self::new(seed)
    }

    /// Those of a seed.
    pub fn new(seed: u64) -> Self {
        Self(baton_types::Random::new(seed))
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// One of `range`.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.draw() % (range.end - range.start)
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.draw().is_multiple_of(n)
    }

    /// Between one and `2^max_bits`, each magnitude as likely as the others.
    pub fn of_any_size(&mut self, max_bits: u64) -> u64 {
        let bits = self.within(0..max_bits);
        self.within(1 << bits..(2 << bits) + 1)
    }

    /// In another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.within(0..i as u64 + 1) as usize);
        }
    }

    /// A generator of its own.
    pub fn fork(&mut self) -> Self {
        Self::new(self.draw())
    }
}
