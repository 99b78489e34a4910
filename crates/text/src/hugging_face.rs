//! Encoding by the library `tokenizers`, for byte-level BPE and for whatever a `tokenizer.json`
//! says.

use baton_types::TokenId;
use tokenizers::{AddedToken, AddedVocabulary, Encoding, Model, OffsetType, PreTokenizer, Token};

use crate::caught::caught;
use crate::error::TextError;
use crate::guard::ControlToken;

/// Longest run of white space, characters. The patterns of pre-tokenizers look back into such a
/// run; in one of a million the library gives up and stops cutting, without a word.
const MAX_WHITE_SPACE_RUN: usize = 512 << 10;
/// The library needs about 200 bytes for each byte of text. So text is encoded in pieces of about
/// this length, if it can be cut.
const PIECE_BYTES: usize = 64 << 10;
/// Longest piece that cannot be cut: 200 MiB of memory, and more tokens than contexts hold.
const MAX_PIECE_BYTES: usize = 1 << 20;

/// A pipeline of the library. It holds a second list of added tokens, in which special tokens are
/// text.
pub(crate) struct HuggingFaceEncoder {
    tokenizer: tokenizers::Tokenizer,
    without_special: AddedVocabulary,
    cuts_before_words: bool,
}

impl std::fmt::Debug for HuggingFaceEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HuggingFaceEncoder").finish_non_exhaustive()
    }
}

impl HuggingFaceEncoder {
    /// `pattern_cuts`: normalizer and pre-tokenizer treat what stands before `" word"` and the rest
    /// apart, see [`cut`].
    pub(crate) fn new(tokenizer: tokenizers::Tokenizer, pattern_cuts: bool) -> Self {
        let added = tokenizer.get_added_vocabulary();
        let spans = |token: &AddedToken| token.lstrip || token.rstrip || token.content.contains(char::is_whitespace);
        let cuts_before_words = pattern_cuts && !added.get_added_tokens_decoder().values().any(spans);
        let mut without_special = added.clone();
        without_special.set_encode_special_tokens(true);
        Self { tokenizer, without_special, cuts_before_words }
    }

    /// The tokens of a text, none added around it. Marks are taken out once added tokens are found.
    pub(crate) fn encode(
        &self,
        text: &str,
        parse_special: bool,
        mark: Option<char>,
    ) -> Result<Vec<TokenId>, TextError> {
        check_white_space(text)?;
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let end = if self.cuts_before_words { cut(rest, PIECE_BYTES) } else { rest.len() };
            if end > MAX_PIECE_BYTES {
                let problem = format!("{end} bytes without a place to cut, but at most {MAX_PIECE_BYTES} are taken");
                return Err(TextError::Text(problem));
            }
            let (piece, after) = rest.split_at(end);
            without_panic(|| self.encode_piece(piece, parse_special, mark, &mut ids))
                .map_err(|error| TextError::Internal(error.to_string()))?;
            rest = after;
        }
        Ok(ids)
    }

    /// The library's `encode` in its parts, because that takes the list of added tokens, truncation
    /// and padding from the tokenizer.
    fn encode_piece(
        &self,
        text: &str,
        parse_special: bool,
        mark: Option<char>,
        ids: &mut Vec<TokenId>,
    ) -> tokenizers::Result<()> {
        let added = if parse_special { self.tokenizer.get_added_vocabulary() } else { &self.without_special };
        let mut words = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
        if let Some(mark) = mark {
            words.normalize(|text| {
                text.filter(|character| character != mark);
                Ok(())
            })?;
        }
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        words.tokenize(|word| self.tokenizer.get_model().tokenize(word.get()))?;
        ids.extend_from_slice(words.into_encoding(None, 0, OffsetType::None)?.get_ids());
        Ok(())
    }

    /// The added tokens.
    pub(crate) fn added(&self) -> Vec<ControlToken> {
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let token = |token: &AddedToken| ControlToken { text: token.content.clone(), is_special: token.special };
        let mut added: Vec<_> = added.values().map(token).collect();
        added.sort_unstable_by(|a, b| a.text.cmp(&b.text));
        added
    }

    /// What the post-processor puts before and after a text.
    pub(crate) fn prefix_and_suffix(&self) -> Result<(Vec<TokenId>, Vec<TokenId>), TextError> {
        let problem = |problem: String| TextError::model("post_processor", problem);
        let text = Encoding::from_tokens(vec![Token::new(u32::MAX, String::new(), (0, 0))], 0);
        let whole = without_panic(|| self.tokenizer.post_process(text, None, true))
            .map_err(|error| problem(error.to_string()))?;
        let mut parts = whole.get_ids().split(|&id| id == u32::MAX);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(prefix), Some(suffix), None) => Ok((prefix.to_vec(), suffix.to_vec())),
            _ => Err(problem("does not keep the text once".to_owned())),
        }
    }
}

/// Calls the library, which panics on some files that contradict themselves: a template of tokens
/// that it does not have, for one. What is left half done is dropped with the error, or is a cache.
pub(crate) fn without_panic<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    caught(call).unwrap_or_else(|| Err("the library 'tokenizers' cannot deal with it".into()))
}

/// Where to cut a text of which about `bytes` are wanted: before a single space. A visible ASCII
/// character is before the space, and an ASCII letter after it. In each dialect of
/// [`dialect`](crate::pre_tokenizer::dialect) a word begins there, and no word looks beyond. Only
/// runs of white space look ahead, and this one ends nothing.
fn cut(text: &str, bytes: usize) -> usize {
    let tail = text.as_bytes().get(bytes..).unwrap_or_default();
    let found = tail
        .windows(3)
        .position(|three| three[0].is_ascii_graphic() && three[1] == b' ' && three[2].is_ascii_alphabetic());
    found.map_or(text.len(), |offset| bytes + offset + 1)
}

fn check_white_space(text: &str) -> Result<(), TextError> {
    let mut run = 0;
    for character in text.chars() {
        run = if character.is_whitespace() { run + 1 } else { 0 };
        if run > MAX_WHITE_SPACE_RUN {
            let problem = format!("a run of more than {MAX_WHITE_SPACE_RUN} characters of white space");
            return Err(TextError::Text(problem));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use tokenizers::{OffsetReferential, PreTokenizedString};

    use super::*;
    use crate::pre_tokenizer::{Dialect, dialect};

    fn words(dialect: &Dialect, text: &str) -> Vec<String> {
        let mut text = AddedVocabulary::new().extract_and_normalize(dialect.normalizer.as_ref(), text);
        dialect.pre_tokenizer.pre_tokenize(&mut text).unwrap();
        let words = |text: &PreTokenizedString| {
            text.get_splits(OffsetReferential::Original, OffsetType::Byte)
                .into_iter()
                .map(|(word, ..)| word.to_owned())
                .collect()
        };
        words(&text)
    }

    #[test]
    fn long_text_is_cut_before_a_word_and_not_inside_a_character() {
        assert_eq!(cut("a b c", 0), 1);
        assert_eq!(cut("aé  b 1 c", 1), 8);
        assert_eq!(cut("ééé x", 3), 8, "no visible ASCII before it");
        assert_eq!(cut("a b c", 3), 5);
        assert_eq!(cut("abc", 100), 3);
    }

    #[test]
    fn pre_tokenized_words_do_not_change_by_a_cut() {
        let dialects =
            ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"].map(|name| (name, dialect(Some(name)).unwrap()));
        let text = "([a-cé\u{301}'st.!/1-3\n\t ]| [ab]|'[sS]|\r\n){0,60}";
        let run = TestRunner::default().run(&(text, 0usize..40), |(text, bytes)| {
            prop_assume!(text.is_char_boundary(bytes.min(text.len())));
            let (left, right) = text.split_at(cut(&text, bytes));
            for (name, dialect) in &dialects {
                let parts = [words(dialect, left), words(dialect, right)].concat();
                prop_assert_eq!(parts, words(dialect, &text), "{}: {:?} {:?}", name, left, right);
            }
            Ok(())
        });
        run.unwrap();
    }
}
