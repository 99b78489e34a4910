//! Deterministic damage to a valid file.

/// Draws changes; a seed names a file for ever.
struct Random(baton_types::Random);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Values that counts, lengths and offsets go wrong at.
const EXTREMES: [u64; 12] = [
    0,
    1,
    0xff,
    0xffff,
    1 << 20,
    u32::MAX as u64,
    1 << 32,
    1 << 40,
    (1 << 61) + 1,
    i64::MAX as u64,
    u64::MAX - 7,
    u64::MAX,
];

/// Every truncation, every byte changed in four ways, an extreme 4- and 8-byte number at every
/// position, and `seeds` files with several random changes.
pub fn each(valid: &[u8], seeds: u64, mut check: impl FnMut(Vec<u8>)) {
    (0..valid.len()).for_each(|len| check(valid[..len].to_vec()));
    for at in 0..valid.len() {
        for change in [0x01, 0x80, 0xff, valid[at]] {
            check(changed(valid, at, &[valid[at] ^ change]));
        }
        for extreme in EXTREMES {
            check(changed(valid, at, &extreme.to_le_bytes()));
            check(changed(valid, at, &(extreme as u32).to_le_bytes()));
        }
    }
    for seed in 0..seeds {
        check(randomly_changed(valid, &mut Random(baton_types::Random::new(seed))));
    }
}

fn changed(valid: &[u8], at: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    let end = bytes.len().min(at + new.len());
    bytes[at..end].copy_from_slice(&new[..end - at]);
    bytes
}

fn randomly_changed(valid: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..=random.below(4) {
        let a = random.below(bytes.len());
        let b = random.below(bytes.len());
        let span = a.min(b)..a.max(b).min(a.min(b) + 40);
        match random.below(5) {
            0 => bytes[a] = random.next() as u8,
            1 => bytes = changed(&bytes, a, &EXTREMES[random.below(EXTREMES.len())].to_le_bytes()),
            2 => drop(bytes.drain(span.start..span.end.min(bytes.len() - 1))),
            3 => bytes.splice(b..b, bytes[span].to_vec()).for_each(drop),
            _ => bytes.splice(b..b, [0, 0, 0, 0, 0, 0, 0, random.next() as u8]).for_each(drop),
        }
    }
    bytes
}
