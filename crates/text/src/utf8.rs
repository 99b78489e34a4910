//! UTF-8 that arrives in pieces.

/// Turns bytes into text as they come. Invalid bytes become U+FFFD, one for each maximal subpart
/// (Unicode 16, section 3.9, table 3-8), which is what [`String::from_utf8_lossy`] does with the
/// whole.
#[derive(Debug, Clone, Default)]
pub(crate) struct Utf8Stream {
    /// The beginning of a character, at most 3 bytes.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Appends to `out` what is final with these bytes.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        if self.held.is_empty() {
            let rest = decode(bytes, out);
            self.held.extend_from_slice(rest);
            return;
        }
        let mut joined = std::mem::take(&mut self.held);
        joined.extend_from_slice(bytes);
        let rest = decode(&joined, out);
        self.held.extend_from_slice(rest);
    }

    /// The end: a character that never became whole is one U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            self.held.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Decodes all but a character that may still become whole; returns its bytes.
fn decode<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        out.push_str(&String::from_utf8_lossy(valid));
        let Some(invalid) = error.error_len() else { return rest };
        out.push(char::REPLACEMENT_CHARACTER);
        bytes = &rest[invalid..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn streamed<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut stream = Utf8Stream::default();
        let mut out = String::new();
        for piece in pieces {
            stream.push(piece, &mut out);
        }
        stream.finish(&mut out);
        out
    }

    #[test]
    fn utf8_stream_emits_a_character_once_it_is_complete() {
        let mut stream = Utf8Stream::default();
        let mut out = String::new();
        for &byte in &"😀".as_bytes()[..3] {
            stream.push(&[byte], &mut out);
            assert_eq!(out, "");
        }
        stream.push(&"😀".as_bytes()[3..], &mut out);
        assert_eq!(out, "😀");
    }

    #[test]
    fn utf8_stream_replaces_a_surrogate_by_three_characters() {
        assert_eq!(streamed([&b"\xed\xa0"[..], &b"\x80"[..]]), "\u{fffd}\u{fffd}\u{fffd}");
    }

    proptest! {
        #[test]
        fn utf8_stream_equals_lossy_decoding_for_any_chunking(
            // Lead and continuation bytes more often than by chance.
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80u8..=0xbf, 0xc0u8..=0xff, 0x20u8..0x7f], 0..64),
            chunk in 1usize..9,
        ) {
            prop_assert_eq!(streamed(bytes.chunks(chunk)), String::from_utf8_lossy(&bytes));
        }
    }
}
