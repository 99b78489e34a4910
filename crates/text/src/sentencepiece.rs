//! SentencePiece's BPE: merges the adjacent pair whose piece has the best score, until no pair is a
//! piece.
//!
//! As in the library `sentencepiece` (`bpe_model.cc`), which Hugging Face's slow tokenizers wrap.
//! Of equal scores the leftmost pair goes first. A character that is no piece falls back to its
//! bytes. The list of merges that the fast tokenizers use ranks the ways to make one piece, and can
//! differ on runs of one character.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use baton_types::TokenId;

use crate::error::TextError;
use crate::special::{Segment, SpecialSplitter, without};

/// Stands for a space, U+2581.
pub(crate) const SPACE: char = '▁';
const NONE: u32 = u32::MAX;

/// What a token of a SentencePiece vocabulary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    Normal,
    /// Never part of a text; the splitter finds control and user-defined pieces.
    Other,
    Unknown,
    Byte(u8),
}

#[derive(Debug)]
pub(crate) struct SentencePieceEncoder {
    pieces: HashMap<Box<str>, Piece>,
    byte_ids: Box<[Option<TokenId>; 256]>,
    unknown: Option<TokenId>,
    splitter: SpecialSplitter,
    space_prefix: bool,
    /// No piece has a space after another character, so that words can be encoded one by one.
    words_are_apart: bool,
    longest_piece: usize,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    id: TokenId,
    score: f32,
}

impl SentencePieceEncoder {
    /// `pieces`: text, score and kind in the order of their ids. `space_prefix`: a space is put
    /// before a text and after each added token.
    pub(crate) fn new(
        pieces: &[(&str, f32, PieceKind)],
        splitter: SpecialSplitter,
        space_prefix: bool,
    ) -> Result<Self, TextError> {
        let mut encoder = Self {
            pieces: HashMap::with_capacity(pieces.len()),
            byte_ids: Box::new([None; 256]),
            unknown: None,
            splitter,
            space_prefix,
            words_are_apart: true,
            longest_piece: 0,
        };
        for (id, &(text, score, kind)) in (0..).zip(pieces) {
            match kind {
                PieceKind::Normal if score.is_nan() => {
                    return Err(TextError::model(format!("tokenizer.ggml.scores[{id}]"), "not a number"));
                }
                PieceKind::Normal => encoder.add_piece(text, Piece { id, score }),
                PieceKind::Byte(byte) => encoder.byte_ids[usize::from(byte)] = Some(id),
                PieceKind::Unknown => encoder.unknown = Some(id),
                PieceKind::Other => {}
            }
        }
        Ok(encoder)
    }

    fn add_piece(&mut self, text: &str, piece: Piece) {
        self.pieces.entry(text.into()).or_insert(piece);
        self.longest_piece = self.longest_piece.max(text.len());
        self.words_are_apart &= word_ends(text).next().is_none();
    }

    /// The tokens of a text, none added around it. A character that is neither a piece nor bytes is
    /// the unknown token, and is left out if there is none.
    pub(crate) fn encode(&self, text: &str, parse_special: bool, mark: Option<char>) -> Vec<TokenId> {
        let mut ids = Vec::new();
        for segment in self.splitter.split(text, parse_special) {
            match segment {
                Segment::Token(id) => ids.push(id),
                Segment::Text(text) => self.encode_text(&without(text, mark), &mut ids),
            }
        }
        ids
    }

    fn encode_text(&self, text: &str, ids: &mut Vec<TokenId>) {
        let mut normalized = String::with_capacity(text.len() + text.len() / 2);
        if self.space_prefix {
            normalized.push(SPACE);
        }
        normalized.extend(text.chars().map(|character| if character == ' ' { SPACE } else { character }));
        let mut start = 0;
        let ends: &mut dyn Iterator<Item = usize> =
            if self.words_are_apart { &mut word_ends(&normalized) } else { &mut std::iter::empty() };
        for end in ends.chain([normalized.len()]) {
            self.encode_word(&normalized[start..end], ids);
            start = end;
        }
    }

    fn encode_word(&self, word: &str, ids: &mut Vec<TokenId>) {
        let mut merging = Merging::new(self, word);
        merging.run();
        let mut after_unknown = false;
        for text in merging.symbols() {
            let unknown = !self.push_symbol(text, ids);
            if let Some(id) = self.unknown.filter(|_| unknown && !after_unknown) {
                ids.push(id);
            }
            after_unknown = unknown;
        }
    }

    /// False if the symbol is unknown.
    fn push_symbol(&self, text: &str, ids: &mut Vec<TokenId>) -> bool {
        if let Some(piece) = self.pieces.get(text) {
            ids.push(piece.id);
            return true;
        }
        let bytes: Option<Vec<_>> = text.bytes().map(|byte| self.byte_ids[usize::from(byte)]).collect();
        ids.extend(bytes.iter().flatten());
        bytes.is_some()
    }
}

/// The byte of a piece such as `<0x41>`.
pub(crate) fn byte_piece(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hex.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Offsets at which a space follows another character.
fn word_ends(text: &str) -> impl Iterator<Item = usize> + '_ {
    let pairs = text.char_indices().zip(text.char_indices().skip(1));
    pairs.filter_map(|((_, before), (offset, after))| (before != SPACE && after == SPACE).then_some(offset))
}

/// The merging of one word: a linked list of symbols, and a queue of pairs that are pieces. A pair
/// whose symbols have changed is dropped when its turn comes.
struct Merging<'a> {
    encoder: &'a SentencePieceEncoder,
    word: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
}

#[derive(Clone, Copy)]
struct Symbol {
    start: u32,
    /// 0 once merged into the symbol before.
    bytes: u32,
    before: u32,
    after: u32,
}

struct Pair {
    score: f32,
    left: u32,
    bytes: u32,
}

impl Ord for Pair {
    /// The greatest is merged first: the best score, then the leftmost.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left)).then(self.bytes.cmp(&other.bytes))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

impl<'a> Merging<'a> {
    /// Text is at most 4 GiB: the tokenizer's limit.
    fn new(encoder: &'a SentencePieceEncoder, word: &'a str) -> Self {
        let characters = word.char_indices().enumerate();
        let mut symbols: Vec<_> = characters
            .map(|(index, (start, character))| Symbol {
                start: start as u32,
                bytes: character.len_utf8() as u32,
                before: (index as u32).wrapping_sub(1),
                after: index as u32 + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.after = NONE;
        }
        let mut merging = Self { encoder, word, symbols, queue: BinaryHeap::new() };
        for left in 1..merging.symbols.len() {
            merging.queue_pair(left as u32 - 1);
        }
        merging
    }

    fn run(&mut self) {
        while let Some(pair) = self.queue.pop() {
            let Some((left, right)) = self.pair(pair.left) else { continue };
            if left.bytes + right.bytes != pair.bytes {
                continue;
            }
            let removed = left.after;
            self.symbols[removed as usize].bytes = 0;
            let merged = &mut self.symbols[pair.left as usize];
            merged.bytes = pair.bytes;
            merged.after = right.after;
            if right.after != NONE {
                self.symbols[right.after as usize].before = pair.left;
                self.queue_pair(pair.left);
            }
            if left.before != NONE {
                self.queue_pair(left.before);
            }
        }
    }

    /// A symbol that is still there, and the one after it.
    fn pair(&self, left: u32) -> Option<(Symbol, Symbol)> {
        let left = self.symbols[left as usize];
        (left.bytes > 0 && left.after != NONE).then(|| (left, self.symbols[left.after as usize]))
    }

    fn queue_pair(&mut self, left: u32) {
        let Some((first, second)) = self.pair(left) else { return };
        let bytes = first.bytes + second.bytes;
        if bytes as usize > self.encoder.longest_piece {
            return;
        }
        if let Some(piece) = self.encoder.pieces.get(&self.word[first.start as usize..(first.start + bytes) as usize]) {
            self.queue.push(Pair { score: piece.score, left, bytes });
        }
    }

    fn symbols(&self) -> impl Iterator<Item = &'a str> + '_ {
        let word = self.word;
        let left = self.symbols.iter().filter(|symbol| symbol.bytes > 0);
        left.map(move |symbol| &word[symbol.start as usize..(symbol.start + symbol.bytes) as usize])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PIECES: [(&str, f32); 12] = [
        ("a", -9.0),
        ("b", -9.5),
        ("▁", -8.0),
        ("aa", -1.0),
        ("ab", -2.0),
        ("ba", -2.0),
        ("aab", -0.5),
        ("aaa", -4.0),
        ("▁a", -3.0),
        ("▁▁", -3.5),
        ("▁ab", -2.5),
        ("aaaa", -1.5),
    ];

    fn encoder(more: &[(&'static str, f32)]) -> SentencePieceEncoder {
        let pieces: Vec<_> = PIECES.iter().chain(more).map(|&(text, score)| (text, score, PieceKind::Normal)).collect();
        SentencePieceEncoder::new(&pieces, SpecialSplitter::new(&[]).unwrap(), false).unwrap()
    }

    /// The definition: look at all pairs, merge the best, until there is none.
    fn naive(encoder: &SentencePieceEncoder, text: &str) -> Vec<TokenId> {
        let mut symbols: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for left in 1..symbols.len() {
                let Some(piece) = encoder.pieces.get((symbols[left - 1].clone() + &symbols[left]).as_str()) else {
                    continue;
                };
                if best.is_none_or(|(score, _)| piece.score > score) {
                    best = Some((piece.score, left));
                }
            }
            let Some((_, left)) = best else { break };
            let right = symbols.remove(left);
            symbols[left - 1] += &right;
        }
        symbols.iter().map(|symbol| encoder.pieces[symbol.as_str()].id).collect()
    }

    proptest! {
        #[test]
        fn sentencepiece_queue_merges_as_the_naive_search(text in "[ab ]{0,40}", across in any::<bool>()) {
            let encoder = encoder(if across { &[("a▁", -1.2)] } else { &[] });
            prop_assert_eq!(encoder.words_are_apart, !across);
            prop_assert_eq!(encoder.encode(&text, false, None), naive(&encoder, &text));
        }
    }

    #[test]
    fn sentencepiece_text_without_piece_is_bytes_or_one_unknown_token() {
        let mut encoder = encoder(&[]);
        assert_eq!(encoder.encode("aéb", false, None), [0, 1], "nothing stands for it");
        encoder.unknown = Some(99);
        assert_eq!(encoder.encode("aééb", false, None), [0, 99, 1]);
        *encoder.byte_ids = std::array::from_fn(|byte| Some(100 + byte as u32));
        assert_eq!(encoder.encode("aéb", false, None), [0, 100 + 0xc3, 100 + 0xa9, 1]);
    }
}
