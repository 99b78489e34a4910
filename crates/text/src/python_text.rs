//! Python's `str`: what its methods do to a text.

use std::iter;

/// An end of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
    Both,
}

/// White space by Python's `str.isspace`, which has four separators more than Unicode.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Digits of the decimal systems that begin at these: ASCII, Arabic, Devanagari, full width.
pub(crate) fn is_decimal(character: char) -> bool {
    const ZEROS: [u32; 5] = [0x30, 0x660, 0x6f0, 0x966, 0xff10];
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&(character as u32)))
}

/// Decimal digits, and those above and below the line.
pub(crate) fn is_digit(character: char) -> bool {
    is_decimal(character) || matches!(character, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉')
}

pub(crate) fn is_identifier(text: &str) -> bool {
    let is_first = |character: char| character.is_alphabetic() || character == '_';
    text.starts_with(is_first) && text.chars().all(|character| character.is_alphanumeric() || character == '_')
}

pub(crate) fn strip<'t>(text: &'t str, characters: Option<&str>, side: Side) -> &'t str {
    let is_stripped = |character: char| characters.map_or_else(|| is_space(character), |list| list.contains(character));
    match side {
        Side::Left => text.trim_start_matches(is_stripped),
        Side::Right => text.trim_end_matches(is_stripped),
        Side::Both => text.trim_matches(is_stripped),
    }
}

/// At most this many cuts; without a separator, at white space.
pub(crate) fn split<'t>(text: &'t str, separator: Option<&str>, most: usize, from_right: bool) -> Vec<&'t str> {
    let most = most.saturating_add(1);
    match (separator, from_right) {
        (Some(separator), false) => text.splitn(most, separator).collect(),
        (Some(separator), true) => {
            let mut parts: Vec<_> = text.rsplitn(most, separator).collect();
            parts.reverse();
            parts
        }
        (None, false) => words(text, most),
        (None, true) => words_from_right(text, most),
    }
}

fn words(text: &str, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = if parts.len() + 1 == most { None } else { rest.find(is_space) };
        let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(part);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

fn words_from_right(text: &str, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let cut = if parts.len() + 1 == most { None } else { rest.rfind(is_space) };
        let start = cut.map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

/// Cuts after each end of a line.
pub(crate) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |character: char| {
        matches!(character, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let line = rest.find(is_end).unwrap_or(rest.len());
        let after = &rest[line..];
        let end = if after.starts_with("\r\n") { 2 } else { after.chars().next().map_or(0, char::len_utf8) };
        lines.push(if keep_ends { &rest[..line + end] } else { &rest[..line] });
        rest = &after[end..];
    }
    lines
}

/// What is before the separator, the separator, and what is after it.
pub(crate) fn partition<'t>(text: &'t str, separator: &str, from_right: bool) -> [&'t str; 3] {
    let found = if from_right { text.rfind(separator) } else { text.find(separator) };
    match found {
        Some(at) => [&text[..at], &text[at..at + separator.len()], &text[at + separator.len()..]],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    }
}

/// A part of a text by the places of characters, and the first place; `None` if it ends before it
/// begins.
pub(crate) fn between(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    if start.is_none() && end.is_none() {
        return Some((0, text));
    }
    let length = text.chars().count();
    let place = |at: i64| {
        let from_end = if at < 0 { at.saturating_add(length as i64) } else { at };
        usize::try_from(from_end).unwrap_or(0)
    };
    let start = start.map_or(0, place);
    let end = end.map_or(length, place).min(length);
    if start > end {
        return None;
    }
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    Some((start, &text[byte(start)..byte(end)]))
}

/// The place of a part, in characters.
pub(crate) fn find(text: &str, part: &str, start: Option<i64>, end: Option<i64>, from_right: bool) -> Option<usize> {
    let (first, within) = between(text, start, end)?;
    let found = if from_right { within.rfind(part) } else { within.find(part) };
    found.map(|at| first + within[..at].chars().count())
}

fn filling(fill: char, count: usize) -> impl Iterator<Item = char> {
    iter::repeat_n(fill, count)
}

/// Fills a text up at one side.
pub(crate) fn pad(text: &str, width: usize, fill: char, side: Side) -> String {
    let missing = width.saturating_sub(text.chars().count());
    match side {
        Side::Left => filling(fill, missing).chain(text.chars()).collect(),
        _ => text.chars().chain(filling(fill, missing)).collect(),
    }
}

/// Centers a text. If an odd number of characters is to be filled in, the last goes to the left if
/// the width is odd, as in CPython.
pub(crate) fn center(text: &str, width: usize, fill: char) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = missing / 2 + (missing & width & 1);
    filling(fill, left).chain(text.chars()).chain(filling(fill, missing - left)).collect()
}

/// Fills up with zeros, after the sign.
pub(crate) fn zero_fill(text: &str, width: usize) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let (sign, digits) = if text.starts_with(['+', '-']) { text.split_at(1) } else { ("", text) };
    sign.chars().chain(filling('0', missing)).chain(digits.chars()).collect()
}

pub(crate) fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for character in text.chars() {
        match character {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(filling(' ', spaces));
                column += spaces;
            }
            '\n' | '\r' => {
                out.push(character);
                column = 0;
            }
            _ => {
                out.push(character);
                column += 1;
            }
        }
    }
    out
}

/// Every letter that follows no letter is large, every other small.
pub(crate) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut follows_letter = false;
    for character in text.chars() {
        if follows_letter {
            out.extend(character.to_lowercase());
        } else {
            out.extend(to_title(character));
        }
        follows_letter = character.is_lowercase() || character.is_uppercase();
    }
    out
}

/// Only the first letter of a ligature is large: `Fi`.
fn to_title(character: char) -> impl Iterator<Item = char> {
    let mut follows_letter = false;
    character.to_uppercase().map(move |part| {
        let is_small = std::mem::replace(&mut follows_letter, part.is_uppercase());
        if is_small { part.to_lowercase().next().unwrap_or(part) } else { part }
    })
}

/// Small letters, with those that are the same when they are large as one.
pub(crate) fn case_fold(text: &str) -> String {
    text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect()
}

pub(crate) fn is_title(text: &str) -> bool {
    let mut follows_letter = false;
    let mut has_letters = false;
    for character in text.chars() {
        if (character.is_uppercase() && follows_letter) || (character.is_lowercase() && !follows_letter) {
            return false;
        }
        follows_letter = character.is_lowercase() || character.is_uppercase();
        has_letters |= follows_letter;
    }
    has_letters
}

pub(crate) fn swap_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_uppercase() {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
    }
    out
}

/// The sum of the numbers that a text spells: no width or precision in it is larger.
pub(crate) fn numbers(text: &str) -> usize {
    let digits = text.split(|character: char| !character.is_ascii_digit()).filter(|digits| !digits.is_empty());
    digits.fold(0, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(usize::MAX)))
}

/// Python's `int(text, base)`; base 0 goes by the prefix.
pub(crate) fn integer(text: &str, base: usize) -> Option<i128> {
    let text = strip(text, None, Side::Both);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixes = [(16, "0x"), (8, "0o"), (2, "0b")];
    let lower = digits.to_ascii_lowercase();
    let prefix = prefixes.iter().find(|(of, prefix)| (base == 0 || base == *of) && lower.starts_with(prefix));
    let digits = prefix.map_or(lower.as_str(), |(_, prefix)| &lower[prefix.len()..]).replace('_', "");
    let base = prefix.map_or(if base == 0 { 10 } else { base }, |(of, _)| *of);
    if !(2..=36).contains(&base) || digits.starts_with(['+', '-']) {
        return None;
    }
    i128::from_str_radix(&digits, base as u32).ok().map(|value| sign * value)
}

pub(crate) fn float(text: &str) -> Option<f64> {
    strip(text, None, Side::Both).replace('_', "").parse().ok()
}
