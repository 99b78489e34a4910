//! The alphabet of byte-level BPE: each byte is written as a printable character (GPT-2,
//! `bytes_to_unicode`).

use crate::error::TextError;

/// A visible character of Latin-1 is its byte; the other bytes follow in order from U+0100 on.
fn byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes of a token; text with a character beyond the alphabet stands for itself.
pub(crate) fn bytes(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(byte).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// Splits merges (`"a b"`) and checks that both sides and what they make are tokens, which the
/// library takes for granted.
pub(crate) fn merges<'a>(
    field: &str,
    merges: impl Iterator<Item = &'a str>,
    is_token: impl Fn(&str) -> bool,
) -> Result<Vec<(String, String)>, TextError> {
    let check = |(index, merge): (usize, &str)| {
        let problem = |problem: &str| {
            TextError::model(format!("{field}[{index}]"), format!("'{}' {problem}", merge.escape_debug()))
        };
        // A side is at least one character, which may be a space in vocabularies that are not
        // byte-level.
        let space = merge.char_indices().skip(1).find(|&(_, character)| character == ' ');
        let (offset, _) = space.ok_or_else(|| problem("is not two tokens with a space between"))?;
        let left = &merge[..offset];
        let right = &merge[offset + 1..];
        check_merge(left, right, &is_token).map_err(problem)?;
        Ok((left.to_owned(), right.to_owned()))
    };
    merges.enumerate().map(check).collect()
}

/// What is wrong with a merge.
pub(crate) fn check_merge(left: &str, right: &str, is_token: impl Fn(&str) -> bool) -> Result<(), &'static str> {
    if !is_token(left) || !is_token(right) {
        return Err("merges what is no token");
    }
    if !is_token(&[left, right].concat()) {
        return Err("makes what is no token");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    #[test]
    fn byte_level_alphabet_matches_hugging_face() {
        let text: String = (0..=0x7f).map(char::from).chain(['\u{80}', 'é', '€', '😀', '\u{ad}', '\u{7ff}']).collect();
        let mut written = PreTokenizedString::from(text.as_str());
        ByteLevel::new(false, false, false).pre_tokenize(&mut written).unwrap();
        assert_eq!(bytes(written.get_splits(OffsetReferential::Normalized, OffsetType::Byte)[0].0), text.as_bytes());
        let seen: HashSet<u8> = ByteLevel::alphabet().into_iter().filter_map(byte).collect();
        assert_eq!((seen.len(), byte('€'), byte(' ')), (256, None, None));
    }

    #[test]
    fn bpe_merges_that_make_no_token_are_refused() {
        let tokens = ["a", "b", "ab"];
        let split = |merge: &str| {
            merges("m", [merge].into_iter(), |text| tokens.contains(&text)).map_err(|error| error.to_string())
        };
        assert_eq!(split("a b").unwrap(), [("a".to_owned(), "b".to_owned())]);
        assert_eq!(split("b a").unwrap_err(), "tokenizer: m[0]: 'b a' makes what is no token");
        assert_eq!(split("a c").unwrap_err(), "tokenizer: m[0]: 'a c' merges what is no token");
        assert_eq!(split("ab").unwrap_err(), "tokenizer: m[0]: 'ab' is not two tokens with a space between");
    }
}
