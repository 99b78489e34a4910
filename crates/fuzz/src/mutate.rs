//! Changes to inputs, the same ones for the same seed.

/// A small generator, so that a seed names the same inputs for ever.
#[derive(Debug, Clone)]
pub struct Random(baton_types::Random);

impl Random {
    /// From a seed, and the name of what it is for.
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a, so that targets do not draw the same numbers.
        let mixed = name
            .bytes()
            .fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Self(baton_types::Random::new(mixed))
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// From 0 to `end`, without it; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.draw().checked_rem(end as u64).unwrap_or(0) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        list.get(self.below(list.len()))
    }
}

/// Numbers at which lengths, counts and offsets go wrong.
const EDGES: [u64; 19] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x10000,
    1 << 20,
    1 << 28,
    i32::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    1 << 40,
    (1 << 61) + 1,
    i64::MAX as u64,
    u64::MAX - 7,
    u64::MAX,
];

/// Numbers as text, likewise.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1e999",
    "-0.0",
    "255",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e-400",
    "0.1",
];

/// Longest piece that is copied or removed at once.
const MAX_PIECE: usize = 256;
/// Copies of a piece, one after the other: they show depth and quadratic time.
const MAX_REPEATS: usize = 4096;

/// Makes inputs of seeds.
#[derive(Debug)]
pub struct Mutator<'a> {
    seeds: &'a [Vec<u8>],
    words: &'a [&'a str],
    max_bytes: usize,
    random: Random,
}

impl<'a> Mutator<'a> {
    /// From seeds, and words that such inputs are made of.
    pub fn new(seeds: &'a [Vec<u8>], words: &'a [&'a str], max_bytes: usize, random: Random) -> Self {
        Self { seeds, words, max_bytes, random }
    }

    /// The next input: a seed with one to a few changes.
    pub fn input(&mut self) -> Vec<u8> {
        let mut input = self.random.pick(self.seeds).cloned().unwrap_or_default();
        for _ in 0..1 << self.random.below(4) {
            self.change(&mut input);
        }
        input.truncate(self.max_bytes);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let random = &mut self.random;
        let at = random.below(input.len() + 1);
        let end = (at + random.below(MAX_PIECE)).min(input.len());
        match random.below(13) {
            0 => flip(input, at, 1 << random.below(8)),
            1 => overwrite(input, at, &[random.draw() as u8]),
            2 => self.put_edge(input, at),
            3 => drop(input.drain(at..end)),
            4 => input.truncate(at),
            5 => {
                let piece = input[at..end].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, piece);
            }
            6 => self.repeat(input, at..end.min(at + 16)),
            7 => self.splice(input, at),
            8 | 9 => self.put_word(input, at),
            10 => self.put_number(input, at),
            11 => self.swap(input, at..end),
            _ => self.put_character(input, at),
        }
    }

    /// A number of 1, 2, 4 or 8 bytes, in either order, or one of protobuf's.
    fn put_edge(&mut self, input: &mut Vec<u8>, at: usize) {
        let edge = EDGES[self.random.below(EDGES.len())];
        let width = 1 << self.random.below(4);
        match self.random.below(3) {
            0 => overwrite(input, at, &edge.to_le_bytes()[..width]),
            1 => overwrite(input, at, &edge.to_be_bytes()[8 - width..]),
            _ => put_varint(input, at, edge),
        }
    }

    fn repeat(&mut self, input: &mut Vec<u8>, piece: std::ops::Range<usize>) {
        let bytes = piece.len().max(1);
        let most = (self.max_bytes.saturating_sub(input.len()) / bytes).min(MAX_REPEATS);
        let copies = input[piece.clone()].repeat(self.random.below(most + 1));
        input.splice(piece.end..piece.end, copies);
    }

    /// The beginning of this, and the end of another seed.
    fn splice(&mut self, input: &mut Vec<u8>, at: usize) {
        let other = self.random.pick(self.seeds).map_or(&[][..], Vec::as_slice);
        let from = self.random.below(other.len() + 1);
        input.truncate(at);
        input.extend_from_slice(&other[from..]);
    }

    fn put_word(&mut self, input: &mut Vec<u8>, at: usize) {
        let word = self.random.pick(self.words).map_or(&[][..], |word| word.as_bytes());
        match self.random.below(2) {
            0 => overwrite(input, at, word),
            _ => drop(input.splice(at..at, word.iter().copied())),
        }
    }

    /// In place of a number, if one is near.
    fn put_number(&mut self, input: &mut Vec<u8>, at: usize) {
        let start = input[at..].iter().position(u8::is_ascii_digit).map_or(at, |offset| at + offset);
        let digits = input[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = NUMBERS[self.random.below(NUMBERS.len())];
        input.splice(start..start + digits, number.bytes());
    }

    fn swap(&mut self, input: &mut [u8], piece: std::ops::Range<usize>) {
        for index in piece.clone().rev().take(piece.len().saturating_sub(1)) {
            input.swap(index, piece.start + self.random.below(index - piece.start + 1));
        }
    }

    /// One of several bytes, or one that text does not have.
    fn put_character(&mut self, input: &mut Vec<u8>, at: usize) {
        let characters: [&[u8]; 10] = [
            b"\0",
            b"\xff",
            "é".as_bytes(),
            "😀".as_bytes(),
            "\u{301}".as_bytes(),
            "▁".as_bytes(),
            "\u{fdd0}".as_bytes(),
            b"\\",
            b"\"",
            b"\n",
        ];
        let character = characters[self.random.below(characters.len())];
        input.splice(at..at, character.iter().copied());
    }
}

fn flip(input: &mut [u8], at: usize, bits: u8) {
    if let Some(byte) = input.get_mut(at) {
        *byte ^= bits;
    }
}

/// In place of a number of as many bytes as it has there.
fn put_varint(input: &mut Vec<u8>, at: usize, mut number: u64) {
    let replaced = input[at..].iter().take(10).position(|byte| byte & 0x80 == 0).map_or(0, |last| last + 1);
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    input.splice(at..at + replaced, bytes);
}

/// Writes over what is there, beyond the end too.
fn overwrite(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = input.len().min(at + bytes.len());
    input.splice(at..end, bytes.iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutator_gives_same_inputs_for_a_seed_within_the_bound() {
        let seeds = [b"{\"a\": 12}".to_vec(), Vec::new(), vec![7; 400]];
        let inputs = |seed| {
            let mut mutator = Mutator::new(&seeds, &["word"], 500, Random::new(seed, "test"));
            (0..2000).map(|_| mutator.input()).collect::<Vec<_>>()
        };
        let first = inputs(1);
        assert_eq!(first, inputs(1));
        assert_ne!(first, inputs(2));
        assert!(first.iter().all(|input| input.len() <= 500));
        let different: std::collections::BTreeSet<_> = first.iter().collect();
        assert!(different.len() > 1500, "{} different inputs", different.len());
    }
}
