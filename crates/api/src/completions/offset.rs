//! Where tokens begin in a text, counted in characters as OpenAI does. A token that is part of a
//! character begins with that character.

/// Most bytes that a token is looked for behind the place where the last one ended.
const WINDOW: usize = 64;

/// Begins of the characters that bytes become: what is no UTF-8 becomes U+FFFD.
fn begins(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let mut at = 0;
    bytes.utf8_chunks().flat_map(move |chunk| {
        let begin = at;
        let end = begin + chunk.valid().len();
        at = end + chunk.invalid().len();
        chunk.valid().char_indices().map(move |(index, _)| begin + index).chain((at > end).then_some(end))
    })
}

/// Length of a character at the end that may still become whole.
fn incomplete(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last().map(|chunk| chunk.invalid()).unwrap_or_default();
    let may_go_on = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    if may_go_on { last.len() } else { 0 }
}

/// Characters of a text whose tokens come one after the other.
#[derive(Debug, Default)]
pub(super) struct Offset {
    chars: usize,
    /// The beginning of the character after them, at most 3 bytes.
    held: Vec<u8>,
}

impl Offset {
    /// Behind this text.
    pub(super) fn after(text: &[u8]) -> Self {
        Self { chars: begins(text).count(), held: Vec::new() }
    }

    /// Takes in a token, by its bytes; returns where it begins.
    pub(super) fn push(&mut self, token: &[u8]) -> usize {
        if token.is_empty() {
            return self.chars;
        }
        let begin = self.held.len();
        self.held.extend_from_slice(token);
        // The first character of all begins at 0.
        let before = begins(&self.held).take_while(|&at| at <= begin).count() - 1;
        let offset = self.chars + before;
        let whole = self.held.len() - incomplete(&self.held);
        self.chars += begins(&self.held[..whole]).count();
        self.held.drain(..whole);
        offset
    }
}

/// Where these tokens, by their bytes, begin in a text that they were made of. What the text does
/// not have, as a token that a tokenizer puts before it, begins where the next one does.
pub(super) fn align<'a>(text: &[u8], tokens: impl Iterator<Item = &'a [u8]>) -> Vec<usize> {
    let mut begins = begins(text).peekable();
    let mut chars: usize = 0;
    let mut at = 0;
    let mut is_lost = false;
    let offset = |token: &[u8]| {
        let rest = &text[at..];
        // A tokenizer that normalizes has made other bytes of what lies between.
        let found = next(rest, token).or_else(|| if is_lost { near(rest, token) } else { None });
        is_lost = found.is_none();
        let begin = at + found.as_ref().map_or(0, |found| found.start);
        at += found.map_or(0, |found| found.end);
        while begins.next_if(|&first| first <= begin).is_some() {
            chars += 1;
        }
        if begin < text.len() { chars.saturating_sub(1) } else { chars }
    };
    tokens.map(offset).collect()
}

/// Where a text has a token that it begins with.
fn next(text: &[u8], token: &[u8]) -> Option<std::ops::Range<usize>> {
    if text.starts_with(token) {
        return Some(0..token.len());
    }
    // SentencePiece puts a space before a text.
    let bare = token.strip_prefix(b" ").filter(|bare| !bare.is_empty() && text.starts_with(bare))?;
    Some(0..bare.len())
}

/// Where a text has a token, not far from its beginning.
fn near(text: &[u8], token: &[u8]) -> Option<std::ops::Range<usize>> {
    let text = &text[..text.len().min(WINDOW + token.len())];
    let begin = text.windows(token.len()).position(|window| window == token)?;
    Some(begin..begin + token.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(tokens: &[&[u8]]) -> Vec<usize> {
        let mut offset = Offset::default();
        tokens.iter().map(|token| offset.push(token)).collect()
    }

    fn aligned(text: &str, tokens: &[&[u8]]) -> Vec<usize> {
        align(text.as_bytes(), tokens.iter().copied())
    }

    #[test]
    fn part_of_a_character_begins_with_the_character() {
        let tokens: [&[u8]; 6] = [b"a", b" \xf0\x9f", b"\x98", b"\x80b", b"", "e\u{301}".as_bytes()];
        assert_eq!(pushed(&tokens), [0, 1, 2, 2, 4, 4]);
        assert_eq!(aligned("a 😀be\u{301}", &tokens), [0, 1, 2, 2, 4, 4]);
        assert_eq!(Offset::after("a 😀be\u{301}".as_bytes()).push(b"x"), 6);
    }

    #[test]
    fn invalid_bytes_count_as_the_characters_they_become() {
        // Half a character that nothing completes, a byte that begins none, a surrogate.
        let tokens: [&[u8]; 6] = [b"\xf0\x9f", b"a", b"\xff", b"\xed\xa0", b"\x80", b"z"];
        let text = String::from_utf8_lossy(&tokens.concat()).into_owned();
        assert_eq!(text.chars().nth(pushed(&tokens)[5]), Some('z'));
        assert_eq!(pushed(&tokens), [0, 1, 2, 3, 5, 6]);
        assert_eq!(align(&tokens.concat(), tokens.into_iter()), [0, 1, 2, 3, 5, 6]);
    }

    #[test]
    fn token_that_the_text_lacks_moves_no_other() {
        assert_eq!(aligned("the cat", &[b"<s>", b" the", b" cat", b"</s>"]), [0, 0, 3, 7]);
        assert_eq!(aligned("", &[b"<s>"]), [0]);
    }

    #[test]
    fn tokens_behind_a_normalized_character_begin_where_the_text_has_them() {
        let decomposed = "e\u{301}t\u{e9}";
        assert_eq!(
            aligned(&format!("{decomposed} x"), &["\u{e9}".as_bytes(), b"t", "\u{e9}".as_bytes(), b" x"]),
            [0, 2, 3, 4]
        );
    }
}
