//! How a byte-level BPE cuts text into words before it merges bytes, by the name that GGUF files
//! give it (`tokenizer.ggml.pre`).

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use crate::error::TextError;

pub(crate) const KEY: &str = "tokenizer.ggml.pre";

/// The pattern of Llama 3's `tokenizer.json`, up to how many digits are one word.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of Qwen2's `tokenizer.json`.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of Mistral NeMo's `tokenizer.json`.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Those above.
pub(crate) const PATTERNS: [&str; 3] = [LLAMA3, QWEN2, TEKKEN];

/// What the name of a pre-tokenizer implies.
pub(crate) struct Dialect {
    pub(crate) normalizer: Option<NormalizerWrapper>,
    pub(crate) pre_tokenizer: PreTokenizerWrapper,
    /// A word that is a token is that token, whether merges make it or not.
    pub(crate) ignore_merges: bool,
    /// Whether a text begins with the BOS token if the file does not say.
    pub(crate) add_bos: bool,
}

/// The dialect of a name. Files from before there were names are taken for GPT-2's.
pub(crate) fn dialect(name: Option<&str>) -> Result<Dialect, TextError> {
    let plain = |pre_tokenizer| Dialect { normalizer: None, pre_tokenizer, ignore_merges: false, add_bos: false };
    let merged = |pre_tokenizer| Dialect { ignore_merges: true, add_bos: true, ..plain(pre_tokenizer) };
    Ok(match name.unwrap_or("default") {
        "default" | "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" => plain(gpt2()),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
            plain(digits_and_gpt2())
        }
        "llama-bpe" | "llama3" | "llama-v3" => merged(pattern(LLAMA3)?),
        "dbrx" | "smaug-bpe" => plain(pattern(LLAMA3)?),
        // Qwen's own normalizes its input; others that took over its pattern do not.
        "qwen2" => Dialect { normalizer: Some(NFC.into()), ..plain(pattern(QWEN2)?) },
        "deepseek-r1-qwen" => plain(pattern(QWEN2)?),
        "tekken" => merged(pattern(TEKKEN)?),
        other => {
            let problem = format!(
                "'{}' is not known; known are gpt-2, smollm, llama-bpe, qwen2, tekken and some of their kin",
                other.escape_debug()
            );
            return Err(TextError::model(KEY, problem));
        }
    })
}

/// Whether a regular expression is that of one of the dialects.
pub(crate) fn is_known_pattern(regex: &str) -> bool {
    PATTERNS.contains(&regex)
}

fn gpt2() -> PreTokenizerWrapper {
    ByteLevel::new(false, true, true).into()
}

/// Digits one by one, then GPT-2's pattern: a space before a digit is a word of its own.
fn digits_and_gpt2() -> PreTokenizerWrapper {
    Sequence::new(vec![Digits::new(true).into(), gpt2()]).into()
}

fn pattern(regex: &str) -> Result<PreTokenizerWrapper, TextError> {
    let split = Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false);
    let split = split.map_err(|error| TextError::Internal(error.to_string()))?;
    Ok(Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into())
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut text = PreTokenizedString::from(text);
        dialect(Some(name)).unwrap().pre_tokenizer.pre_tokenize(&mut text).unwrap();
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| word.replace('Ġ', " ")).collect()
    }

    #[test]
    fn pre_tokenizer_groups_digits_by_dialect() {
        assert_eq!(words("gpt-2", "in 1234"), ["in", " 1234"]);
        assert_eq!(words("smollm", "in 1234"), ["in", " ", "1", "2", "3", "4"]);
        assert_eq!(words("llama-bpe", "in 1234"), ["in", " ", "123", "4"]);
        assert_eq!(words("qwen2", "in 1234"), ["in", " ", "1", "2", "3", "4"]);
    }

    #[test]
    fn unknown_pre_tokenizer_name_is_an_error() {
        let error = dialect(Some("poro-chat")).err().unwrap().to_string();
        assert!(error.starts_with("tokenizer: tokenizer.ggml.pre: 'poro-chat' is not known"), "{error}");
    }
}
