//! Tokenizers from a `tokenizer.json`.

use std::sync::Arc;

use serde_json::Value;

use crate::byte_level;
use crate::end_tokens::end_tokens;
use crate::error::TextError;
use crate::hugging_face::{HuggingFaceEncoder, without_panic};
use crate::pipeline_bounds;
use crate::pre_tokenizer::is_known_pattern;
use crate::sentencepiece::{SPACE, byte_piece};
use crate::tokenizer::{Encoder, Parts};
use crate::vocabulary::{MAX_VOCAB_SIZE, Vocabulary};

/// Deepest nesting of decoders.
const MAX_DEPTH: usize = 8;

/// How the text of a token stands for bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    ByteLevel,
    /// `▁` is a space and `<0x41>` a byte.
    SentencePiece,
}

/// Builds a tokenizer. Without the model's other files its end tokens are those known by name.
pub(crate) fn parts(bytes: &[u8]) -> Result<Parts, TextError> {
    let invalid = |problem: String| TextError::model("tokenizer.json", problem);
    let json: Value = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
    check_model(&json["model"])?;
    pipeline_bounds::check(&json)?;
    let decoders = decoders(&json["decoder"]);
    let alphabet = alphabet(&decoders)?;
    let mut tokenizer =
        without_panic(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(|error| invalid(error.to_string()))?;
    tokenizer.with_padding(None).with_truncation(None).map_err(|error| invalid(error.to_string()))?;
    let vocabulary = vocabulary(&tokenizer, alphabet)?;
    let added = tokenizer.get_added_tokens_decoder();
    let mut special: Vec<_> =
        added.iter().filter(|(_, token)| token.special).map(|(&id, token)| (token.content.as_str(), id)).collect();
    special.sort_by_key(|&(_, id)| id);
    let eos = end_tokens([], special.iter().copied());
    let encoder = HuggingFaceEncoder::new(tokenizer, cuts_before_words(&json));
    let (prefix, suffix) = encoder.prefix_and_suffix()?;
    if let Some(id) = prefix.iter().chain(&suffix).find(|&&id| id as usize >= vocabulary.len()) {
        return Err(TextError::model(
            "post_processor",
            format!("token {id}, but there are {} tokens", vocabulary.len()),
        ));
    }
    Ok(Parts {
        added: encoder.added(),
        encoder: Encoder::HuggingFace(Box::new(encoder)),
        bos: prefix.first().copied().filter(|&id| vocabulary.is_special(id)),
        vocabulary: Arc::new(vocabulary),
        eos,
        prefix,
        suffix,
        space_prefix: drops_first_space(&decoders),
    })
}

/// A BPE whose merges make tokens, and nothing that is for training only.
fn check_model(model: &Value) -> Result<(), TextError> {
    let kind = model["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        return Err(TextError::model("model.type", format!("'{}', but only BPE is known", kind.escape_debug())));
    }
    for field in ["dropout", "continuing_subword_prefix"] {
        let value = &model[field];
        if !(value.is_null() || value.as_f64() == Some(0.0) || value.as_str() == Some("")) {
            return Err(TextError::model(format!("model.{field}"), "set, but not known"));
        }
    }
    let vocab = model["vocab"].as_object().ok_or_else(|| TextError::model("model.vocab", "missing"))?;
    let is_token = |text: &str| vocab.contains_key(text);
    for (index, merge) in model["merges"].as_array().into_iter().flatten().enumerate() {
        let field = format!("model.merges[{index}]");
        match merge {
            Value::String(text) => drop(byte_level::merges(&field, [text.as_str()].into_iter(), is_token)?),
            Value::Array(sides) => {
                let sides: Option<Vec<&str>> = sides.iter().map(Value::as_str).collect();
                let checked = match sides.as_deref() {
                    Some([left, right]) => byte_level::check_merge(left, right, is_token),
                    _ => Err("is not two tokens"),
                };
                checked.map_err(|problem| TextError::model(field, problem))?;
            }
            _ => return Err(TextError::model(field, "is not two tokens")),
        }
    }
    Ok(())
}

/// The decoder, and those inside it.
fn decoders(decoder: &Value) -> Vec<&Value> {
    let mut all = vec![decoder];
    let mut level = vec![decoder];
    for _ in 0..MAX_DEPTH {
        level = level.iter().flat_map(|decoder| decoder["decoders"].as_array().into_iter().flatten()).collect();
        all.extend(&level);
    }
    all
}

fn alphabet(decoders: &[&Value]) -> Result<Alphabet, TextError> {
    let has = |kind: &str| decoders.iter().any(|decoder| decoder["type"] == kind);
    if has("ByteLevel") {
        return Ok(Alphabet::ByteLevel);
    }
    if has("Metaspace") || has("ByteFallback") || has("Replace") {
        return Ok(Alphabet::SentencePiece);
    }
    Err(TextError::model("decoder", "neither ByteLevel nor one of SentencePiece's"))
}

/// Whether the pipeline is one of the known dialects of byte-level BPE, which a long text can be
/// cut for.
fn cuts_before_words(json: &Value) -> bool {
    let normalizer = &json["normalizer"];
    let pre_tokenizer = &json["pre_tokenizer"];
    let steps = pre_tokenizer["pretokenizers"].as_array().map_or(std::slice::from_ref(pre_tokenizer), Vec::as_slice);
    let known = |step: &Value| match step["type"].as_str() {
        Some("ByteLevel") => step["add_prefix_space"] == false,
        Some("Digits") => true,
        Some("Split") => {
            step["behavior"] == "Isolated" && step["pattern"]["Regex"].as_str().is_some_and(is_known_pattern)
        }
        _ => false,
    };
    (normalizer.is_null() || normalizer["type"] == "NFC") && steps.iter().all(known)
}

fn drops_first_space(decoders: &[&Value]) -> bool {
    decoders.iter().any(|decoder| match decoder["type"].as_str() {
        Some("Strip") => decoder["content"] == " " && decoder["start"].as_u64() > Some(0),
        Some("Metaspace") => decoder["prepend_scheme"] != "never" && decoder["add_prefix_space"] != false,
        _ => false,
    })
}

fn vocabulary(tokenizer: &tokenizers::Tokenizer, alphabet: Alphabet) -> Result<Vocabulary, TextError> {
    let ids = tokenizer.get_vocab(true);
    let size = ids.values().max().map_or(0, |&id| id as usize + 1);
    if size > MAX_VOCAB_SIZE {
        return Err(TextError::model(
            "model.vocab",
            format!("token {}, but at most {MAX_VOCAB_SIZE} tokens are taken", size - 1),
        ));
    }
    let mut texts = vec![""; size];
    for (text, &id) in &ids {
        texts[id as usize] = text;
    }
    let added = tokenizer.get_added_tokens_decoder();
    let mut vocabulary = Vocabulary::default();
    for (id, text) in (0..).zip(texts) {
        match (added.get(&id), alphabet) {
            (Some(token), _) => vocabulary.push(token.content.as_bytes(), token.special)?,
            (None, Alphabet::ByteLevel) => vocabulary.push(&byte_level::bytes(text), false)?,
            (None, Alphabet::SentencePiece) => match byte_piece(text) {
                Some(byte) => vocabulary.push(&[byte], false)?,
                None => vocabulary.push(text.replace(SPACE, " ").as_bytes(), false)?,
            },
        }
    }
    Ok(vocabulary)
}
