//! From tokens to text, as the tokens come.

use std::sync::Arc;

use baton_types::TokenId;

use crate::utf8::Utf8Stream;
use crate::vocabulary::Vocabulary;

/// How tokens become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Leave special tokens out.
    pub skip_special: bool,
    /// The tokens are the beginning of a text: leave out the space that a SentencePiece tokenizer
    /// put before it. False for tokens that continue a prompt, where that space belongs to the
    /// text.
    pub starts_text: bool,
}

impl Default for DecodeOptions {
    /// The output of a request: no special tokens, continuing the prompt.
    fn default() -> Self {
        Self { skip_special: true, starts_text: false }
    }
}

/// Turns the tokens of one request into text, each token once.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// Special tokens that are not left out; few.
    shown: Vec<TokenId>,
    drop_space: bool,
    utf8: Utf8Stream,
}

impl Detokenizer {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, skip_special: bool, drop_space: bool) -> Self {
        Self { vocabulary, skip_special, shown: Vec::new(), drop_space, utf8: Utf8Stream::default() }
    }

    /// Shows these special tokens, even if others are left out.
    pub(crate) fn showing(mut self, tokens: &[TokenId]) -> Self {
        self.shown = tokens.to_vec();
        self
    }

    /// Whether a token's text is part of the whole text.
    pub fn shows(&self, token: TokenId) -> bool {
        !self.skip_special || !self.vocabulary.is_special(token) || self.shown.contains(&token)
    }

    /// Takes a token in; returns the text that is final now. A token whose last character is not
    /// whole yet is held back; a token beyond the vocabulary has no text.
    pub fn push(&mut self, token: TokenId) -> String {
        let mut out = String::new();
        self.push_to(token, &mut out);
        out
    }

    /// The text still held back; then the detokenizer is as new, but for the leading space.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.utf8.finish(&mut out);
        out
    }

    fn push_to(&mut self, token: TokenId, out: &mut String) {
        if self.shows(token) {
            self.utf8.push(bytes_of(token, &self.vocabulary, &mut self.drop_space), out);
        }
    }

    /// Adds the bytes of a token.
    pub(crate) fn push_bytes(&mut self, token: TokenId, out: &mut Vec<u8>) {
        if self.shows(token) {
            out.extend_from_slice(bytes_of(token, &self.vocabulary, &mut self.drop_space));
        }
    }
}

fn bytes_of<'a>(token: TokenId, vocabulary: &'a Vocabulary, drop_space: &mut bool) -> &'a [u8] {
    let bytes = vocabulary.bytes(token).unwrap_or_default();
    if !*drop_space || bytes.is_empty() || vocabulary.is_special(token) {
        return bytes;
    }
    *drop_space = false;
    bytes.strip_prefix(b" ").unwrap_or(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vocabulary() -> Arc<Vocabulary> {
        let mut vocabulary = Vocabulary::default();
        for byte in 0..=255u8 {
            vocabulary.push(&[byte], false).unwrap();
        }
        for piece in [" the", "é", "😀", " \u{4e2d}", "", "\u{fffd}"] {
            vocabulary.push(piece.as_bytes(), false).unwrap();
        }
        // Half of a character and the beginning of another, as byte-level merges make them.
        vocabulary.push(b"\x98\x80\xf0\x9f", false).unwrap();
        vocabulary.push(b"<|end|>", true).unwrap();
        Arc::new(vocabulary)
    }

    fn whole(tokens: &[TokenId], skip_special: bool) -> String {
        let vocabulary = vocabulary();
        let kept = tokens.iter().filter(|&&id| !(skip_special && vocabulary.is_special(id)));
        let bytes: Vec<u8> = kept.flat_map(|&id| vocabulary.bytes(id).unwrap_or_default().to_vec()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    proptest! {
        #[test]
        fn streamed_detokenization_equals_decoding_of_the_whole(tokens in prop::collection::vec(0u32..266, 0..40), skip in any::<bool>()) {
            let mut detokenizer = Detokenizer::new(vocabulary(), skip, false);
            let mut text: String = tokens.iter().map(|&token| detokenizer.push(token)).collect();
            text += &detokenizer.finish();
            prop_assert_eq!(text, whole(&tokens, skip));
        }

        #[test]
        fn streamed_text_is_always_a_prefix_of_the_whole(tokens in prop::collection::vec(0u32..266, 1..40)) {
            let mut detokenizer = Detokenizer::new(vocabulary(), true, false);
            let mut text = String::new();
            for end in 1..=tokens.len() {
                text += &detokenizer.push(tokens[end - 1]);
                let all = whole(&tokens, true);
                prop_assert!(all.starts_with(&text), "{:?} is out, the whole is {:?}", text, all);
            }
        }
    }

    #[test]
    fn leading_space_is_dropped_only_at_the_beginning_of_a_text() {
        let mut begins = Detokenizer::new(vocabulary(), true, true);
        assert_eq!([begins.push(263), begins.push(256), begins.push(256)].concat(), "the the");
        let mut continues = Detokenizer::new(vocabulary(), true, false);
        assert_eq!([continues.push(263), continues.push(256)].concat(), " the");
    }

    #[test]
    fn special_tokens_are_shown_only_on_request() {
        assert_eq!(Detokenizer::new(vocabulary(), false, false).push(263), "<|end|>");
        assert_eq!(Detokenizer::new(vocabulary(), true, false).push(263), "");
        assert_eq!(Detokenizer::new(vocabulary(), true, false).push(9999), "");
        assert_eq!(Detokenizer::new(vocabulary(), true, false).showing(&[262, 263]).push(263), "<|end|>");
        assert_eq!(Detokenizer::new(vocabulary(), true, false).showing(&[262]).push(263), "");
    }
}
