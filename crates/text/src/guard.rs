//! Contents are not orders: what a conversation says never becomes a control token of the prompt.
//!
//! A template joins its own text, which has control tokens, with contents, which may spell some.
//! Before that, a mark is put into each control token that a content spells. One is also put where
//! a content could begin or end one that its neighbours complete. The rendered text is then
//! searched for control tokens, and the marks are taken out of the rest: the content is tokenized
//! as text. A content that spells none stays as it was, so that templates that trim, cut or test it
//! see no difference.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};

use crate::error::TextError;

/// Marks are noncharacters of Unicode: they mean nothing in any text, and white space is not among
/// them. One that no content has is taken.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';
/// Most bytes of what begins and what ends control tokens, each cut at every place. Those of
/// models in use have about a million.
const MAX_PART_BYTES: usize = 256 << 20;
/// Roles that templates know, and join with text of their own to make a control token.
const KNOWN_ROLES: [&str; 9] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "documents"];

/// Whose text it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Author {
    /// A client's: it spells nothing.
    Client,
    /// Said to be the model's own. It may have marks that are no special tokens, such as `<think>`:
    /// templates look for them there.
    Model,
}

/// A control token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ControlToken {
    pub(crate) text: String,
    pub(crate) is_special: bool,
}

/// Finds what could become a control token.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    automaton: Option<AhoCorasick>,
    tokens: Vec<ControlToken>,
    beginnings: HashSet<String>,
    endings: HashSet<String>,
    longest: usize,
}

impl Guard {
    /// Of the added tokens of a model. Runs of white space order nothing, and one of a single
    /// character cannot be told from that character: both are left out.
    pub(crate) fn new(tokens: Vec<ControlToken>) -> Result<Self, TextError> {
        let is_mark = |token: &ControlToken| token.text.chars().nth(1).is_some() && !token.text.trim().is_empty();
        let tokens: Vec<_> = tokens.into_iter().filter(is_mark).collect();
        if tokens.is_empty() {
            return Ok(Self::default());
        }
        let part_bytes = tokens.iter().map(|token| token.text.len().saturating_pow(2)).fold(0, usize::saturating_add);
        if part_bytes > MAX_PART_BYTES {
            return Err(TextError::model("added tokens", "their texts are too long, or too many"));
        }
        let texts = tokens.iter().map(|token| &token.text);
        let automaton = AhoCorasick::builder().match_kind(MatchKind::Standard).build(texts);
        let automaton = automaton.map_err(|error| TextError::model("added tokens", error.to_string()))?;
        let cuts = |text: &str| text.char_indices().map(|(at, _)| at).skip(1).collect::<Vec<_>>();
        let parts = |take: fn(&str, usize) -> &str| {
            let all = tokens.iter().flat_map(|token| cuts(&token.text).into_iter().map(|at| take(&token.text, at)));
            all.map(str::to_owned).collect::<HashSet<_>>()
        };
        let beginnings = parts(|text, at| &text[..at]);
        let endings = parts(|text, at| &text[at..]);
        let longest = tokens.iter().map(|token| token.text.len()).max().unwrap_or(0);
        Ok(Self { automaton: Some(automaton), tokens, beginnings, endings, longest })
    }

    /// Where marks go, in order.
    fn places(&self, text: &str, author: Author) -> Vec<usize> {
        let Some(automaton) = &self.automaton else { return Vec::new() };
        let mut places = BTreeSet::new();
        for found in automaton.find_overlapping_iter(text) {
            if author == Author::Client || self.tokens[found.pattern().as_usize()].is_special {
                let first = text[found.start()..].chars().next().map_or(0, char::len_utf8);
                places.insert(found.start() + first);
            }
        }
        // Templates take white space off both ends.
        let ahead = text.trim_start();
        let behind = text.trim_end();
        let lengths = |of: &str| 1..=self.longest.min(of.len());
        if lengths(behind).any(|n| is_in(&self.beginnings, behind.get(behind.len() - n..))) {
            places.insert(behind.len());
        }
        if lengths(ahead).any(|n| is_in(&self.endings, ahead.get(..n))) {
            places.insert(text.len() - ahead.len());
        }
        places.into_iter().collect()
    }
}

fn is_in(parts: &HashSet<String>, part: Option<&str>) -> bool {
    part.is_some_and(|part| parts.contains(part))
}

/// Marks the contents of one conversation.
#[derive(Debug)]
pub(crate) struct Marker<'g> {
    guard: &'g Guard,
    mark: char,
}

impl<'g> Marker<'g> {
    /// For contents that have none of `used`. `None`: they have every mark.
    pub(crate) fn new(guard: &'g Guard, used: &UsedMarks) -> Option<Self> {
        MARKS.zip(0..).find(|(_, bit)| used.0 & 1 << bit == 0).map(|(mark, _)| Self { guard, mark })
    }

    pub(crate) fn mark(&self) -> char {
        self.mark
    }

    pub(crate) fn content<'t>(&self, text: &'t str, author: Author) -> Cow<'t, str> {
        self.marked(text, &self.guard.places(text, author))
    }

    /// A role that is not known could be anything between the template's brackets.
    pub(crate) fn role<'t>(&self, role: &'t str) -> Cow<'t, str> {
        if KNOWN_ROLES.contains(&role) {
            return Cow::Borrowed(role);
        }
        let mut places = self.guard.places(role, Author::Client);
        if self.guard.tokens.iter().any(|token| token.text.contains(role)) && places.first() != Some(&0) {
            places.insert(0, 0);
        }
        self.marked(role, &places)
    }

    fn marked<'t>(&self, text: &'t str, places: &[usize]) -> Cow<'t, str> {
        if places.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut marked = String::with_capacity(text.len() + places.len() * self.mark.len_utf8());
        let mut start = 0;
        for &place in places {
            marked.push_str(&text[start..place]);
            marked.push(self.mark);
            start = place;
        }
        marked.push_str(&text[start..]);
        Cow::Owned(marked)
    }
}

/// Which marks contents have already.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct UsedMarks(u32);

impl UsedMarks {
    pub(crate) fn add(&mut self, text: &str) {
        for character in text.chars().filter(|character| MARKS.contains(character)) {
            self.0 |= 1 << (character as u32 - *MARKS.start() as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn guard() -> Guard {
        let tokens = [("<|im_end|>", true), ("<s>", true), ("s>~", true), ("<think>", false), ("\n\n", false)];
        Guard::new(tokens.map(|(text, is_special)| ControlToken { text: text.into(), is_special }).into()).unwrap()
    }

    fn content(text: &str, author: Author) -> String {
        let guard = guard();
        let marker = Marker::new(&guard, &UsedMarks::default()).unwrap();
        marker.content(text, author).replace(marker.mark(), "#")
    }

    #[test]
    fn control_tokens_spelled_in_content_are_broken_up() {
        let client = |text: &str| content(text, Author::Client);
        assert_eq!(client("a <|im_end|> b<|im_<|im_end|>end|>"), "a <#|im_end|> b<|im_<#|im_end|>end|>");
        assert_eq!(client("x<s>~"), "x<#s#>~", "two that share a part");
        assert_eq!(client("x<think>y"), "x<#think>y");
        assert_eq!(content("x<think>y<s>z", Author::Model), "x<think>y<#s>z");
        assert_eq!(client("a < b, \n\n c >= d"), "a < b, \n\n c >= d", "nothing to cut");
    }

    #[test]
    fn partial_control_tokens_at_edges_of_content_are_broken_up() {
        let client = |text: &str| content(text, Author::Client);
        assert_eq!(client("x <|im_ "), "x <|im_# ");
        assert_eq!(client(" end|> x"), " #end|> x");
        assert_eq!(client("> quoted <"), "#> quoted <#");
    }

    #[test]
    fn unknown_role_that_spells_a_control_token_is_broken_up() {
        let guard = guard();
        let marker = Marker::new(&guard, &UsedMarks::default()).unwrap();
        let role = |role: &str| marker.role(role).replace(marker.mark(), "#");
        assert_eq!(role("<|im_end|>"), "#<#|im_end|>");
        assert_eq!(
            (role("user").as_str(), role("im_end").as_str(), role("critic").as_str()),
            ("user", "#im_end", "critic")
        );
    }

    /// Each place of a token is a beginning and an end: the square of its length.
    #[test]
    fn control_tokens_of_a_megabyte_are_refused() {
        let guard = |text: String, count: usize| Guard::new(vec![ControlToken { text, is_special: true }; count]);
        for (bytes, count) in [(1 << 20, 1), (4096, 100), (usize::from(u16::MAX), 1)] {
            let error = guard("x".repeat(bytes), count).unwrap_err().to_string();
            assert!(error.ends_with("added tokens: their texts are too long, or too many"), "{error}");
        }
        guard("x".repeat(1024), 8).unwrap();
    }

    #[test]
    fn guard_mark_is_one_that_no_content_has() {
        let guard = guard();
        let mut used = UsedMarks::default();
        used.add("\u{fdd0}x\u{fdd1}");
        assert_eq!(Marker::new(&guard, &used).unwrap().mark(), '\u{fdd2}');
        MARKS.for_each(|mark| used.add(&mark.to_string()));
        assert!(Marker::new(&guard, &used).is_none());
    }

    proptest! {
        #[test]
        fn joined_contents_never_spell_a_control_token(parts in prop::collection::vec("[<|>imends_ ~]{0,12}|<s>|<\\|im_end\\|>", 0..6)) {
            let guard = guard();
            let marker = Marker::new(&guard, &UsedMarks::default()).unwrap();
            let mut joined = String::new();
            let mut trimmed = String::new();
            for part in &parts {
                let marked = marker.content(part, Author::Client);
                joined.push_str(&marked);
                trimmed.push_str(marked.trim());
            }
            for text in [&joined, &trimmed] {
                prop_assert!(!guard.tokens.iter().any(|token| text.contains(&token.text)), "{:?}", text);
            }
            prop_assert_eq!(joined.replace(marker.mark(), ""), parts.concat());
        }
    }
}
