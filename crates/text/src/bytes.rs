//! The tokenizer of the mock engine: a token is a byte.

use baton_types::TokenId;

use crate::error::TextError;
use crate::guard::ControlToken;
use crate::special::{Added, Segment, SpecialSplitter, without};
use crate::vocabulary::Vocabulary;

pub(crate) const BOS: TokenId = 256;
pub(crate) const EOS: TokenId = 257;
/// Specials follow the 256 bytes; the ids up to [`VOCAB_SIZE`] are reserved.
const SPECIALS: [&str; 4] = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"];
const VOCAB_SIZE: u32 = 512;

/// Those that are found in a text.
pub(crate) fn control_tokens() -> Vec<ControlToken> {
    SPECIALS.map(|text| ControlToken { text: text.to_owned(), is_special: true }).into()
}

#[derive(Debug)]
pub(crate) struct ByteEncoder {
    splitter: SpecialSplitter,
}

impl ByteEncoder {
    pub(crate) fn new() -> Result<(Self, Vocabulary), TextError> {
        let mut vocabulary = Vocabulary::default();
        for byte in 0..=u8::MAX {
            vocabulary.push(&[byte], false)?;
        }
        for (_, text) in (BOS..).zip(SPECIALS) {
            vocabulary.push(text.as_bytes(), true)?;
        }
        for id in vocabulary.len() as u32..VOCAB_SIZE {
            vocabulary.push(format!("<|reserved_{id}|>").as_bytes(), true)?;
        }
        let special = |(id, text): (TokenId, &str)| Added { text: text.to_owned(), id, is_special: true };
        let tokens: Vec<_> = (BOS..).zip(SPECIALS).map(special).collect();
        Ok((Self { splitter: SpecialSplitter::new(&tokens)? }, vocabulary))
    }

    pub(crate) fn encode(&self, text: &str, parse_special: bool, mark: Option<char>) -> Vec<TokenId> {
        let mut ids = Vec::with_capacity(text.len());
        for segment in self.splitter.split(text, parse_special) {
            match segment {
                Segment::Text(text) => ids.extend(without(text, mark).bytes().map(TokenId::from)),
                Segment::Token(id) => ids.push(id),
            }
        }
        ids
    }
}
