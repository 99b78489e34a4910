//! Finds added tokens (`<|im_start|>`, `</s>`) in text.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};
use baton_types::TokenId;

use crate::error::TextError;

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Segment<'t> {
    /// Not empty; to be tokenized.
    Text(&'t str),
    /// An added token.
    Token(TokenId),
}

/// An added token.
pub(crate) struct Added {
    pub(crate) text: String,
    pub(crate) id: TokenId,
    pub(crate) is_special: bool,
}

/// Splits text at added tokens: the leftmost first, and of those the longest.
#[derive(Debug)]
pub(crate) struct SpecialSplitter {
    /// All added tokens, and those that are no special tokens.
    all: Matcher,
    user_defined: Matcher,
}

#[derive(Debug)]
struct Matcher {
    automaton: Option<AhoCorasick>,
    ids: Vec<TokenId>,
}

impl SpecialSplitter {
    /// Empty texts are left out.
    pub(crate) fn new(tokens: &[Added]) -> Result<Self, TextError> {
        Ok(Self {
            all: Matcher::new(tokens.iter())?,
            user_defined: Matcher::new(tokens.iter().filter(|token| !token.is_special))?,
        })
    }

    /// The segments of the text in order. Without `parse_special` a special token's text is text.
    pub(crate) fn split<'t>(&self, text: &'t str, parse_special: bool) -> Vec<Segment<'t>> {
        let matcher = if parse_special { &self.all } else { &self.user_defined };
        let mut segments = Vec::new();
        let mut start = 0;
        for (found, id) in matcher.matches(text) {
            if start < found.start {
                segments.push(Segment::Text(&text[start..found.start]));
            }
            segments.push(Segment::Token(id));
            start = found.end;
        }
        if start < text.len() {
            segments.push(Segment::Text(&text[start..]));
        }
        segments
    }
}

/// Text without its marks ([`guard`](crate::guard)).
pub(crate) fn without(text: &str, mark: Option<char>) -> Cow<'_, str> {
    match mark {
        Some(mark) if text.contains(mark) => Cow::Owned(text.replace(mark, "")),
        _ => Cow::Borrowed(text),
    }
}

impl Matcher {
    fn new<'a>(tokens: impl Iterator<Item = &'a Added>) -> Result<Self, TextError> {
        let (texts, ids): (Vec<&str>, Vec<_>) =
            tokens.filter(|token| !token.text.is_empty()).map(|token| (token.text.as_str(), token.id)).unzip();
        if texts.is_empty() {
            return Ok(Self { automaton: None, ids });
        }
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts);
        let automaton = automaton.map_err(|error| TextError::model("added tokens", error.to_string()))?;
        Ok(Self { automaton: Some(automaton), ids })
    }

    fn matches<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (std::ops::Range<usize>, TokenId)> + 'a {
        let found = self.automaton.iter().flat_map(move |automaton| automaton.find_iter(text));
        found.map(|found| (found.range(), self.ids[found.pattern().as_usize()]))
    }
}

#[cfg(test)]
mod tests {
    use super::Segment::{Text, Token};
    use super::*;

    #[test]
    fn longest_special_token_is_matched_and_parsing_is_optional() {
        let added = |text: &str, id, is_special| Added { text: text.to_owned(), id, is_special };
        let tokens = [added("<s>", 1, true), added("<s>>", 2, true), added("<user>", 3, false)];
        let splitter = SpecialSplitter::new(&tokens).unwrap();
        assert_eq!(splitter.split("a<s>>b<user><s>", true), [Text("a"), Token(2), Text("b"), Token(3), Token(1)]);
        assert_eq!(splitter.split("a<s>b<user>", false), [Text("a<s>b"), Token(3)]);
        assert_eq!(splitter.split("", true), []);
        assert_eq!(SpecialSplitter::new(&[]).unwrap().split("é", true), [Text("é")]);
    }
}
