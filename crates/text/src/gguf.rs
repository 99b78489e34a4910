//! Tokenizers from GGUF metadata (`tokenizer.ggml.*`).

use std::sync::Arc;

use baton_formats::Metadata;
use baton_types::TokenId;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, ModelWrapper};

use crate::byte_level;
use crate::end_tokens::end_tokens;
use crate::error::TextError;
use crate::guard::ControlToken;
use crate::hugging_face::HuggingFaceEncoder;
use crate::pre_tokenizer::{Dialect, KEY, dialect};
use crate::sentencepiece::{PieceKind, SPACE, SentencePieceEncoder, byte_piece};
use crate::special::{Added, SpecialSplitter};
use crate::tokenizer::{Encoder, Parts};
use crate::vocabulary::{MAX_VOCAB_SIZE, Vocabulary};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
/// Words that the library remembers in each thread.
const CACHED_WORDS: usize = 4096;

/// What the metadata holds, as plain data.
pub(crate) struct GgufTokenizer<'a> {
    model: &'a str,
    pre: Option<&'a str>,
    tokens: &'a [String],
    kinds: Vec<TokenKind>,
    scores: Vec<f32>,
    merges: &'a [String],
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    ends: Vec<TokenId>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    add_space_prefix: Option<bool>,
}

/// `tokenizer.ggml.token_type`, from SentencePiece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    fn new(index: usize, value: i32) -> Result<Self, TextError> {
        Ok(match value {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return Err(TextError::model(format!("{TYPES}[{index}]"), format!("{value}, but 1 to 6 are known"))),
        })
    }

    fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }

    /// Whether text is searched for it before it is tokenized.
    fn is_added(self) -> bool {
        self.is_special() || self == Self::UserDefined
    }
}

impl<'a> GgufTokenizer<'a> {
    pub(crate) fn read(metadata: &'a Metadata) -> Result<Self, TextError> {
        let missing = |key: &str| TextError::model(key, "missing: the file has no tokenizer");
        let tokens = metadata.str_array(TOKENS)?.ok_or_else(|| missing(TOKENS))?;
        if tokens.len() > MAX_VOCAB_SIZE {
            return Err(TextError::model(
                TOKENS,
                format!("{} tokens, but at most {MAX_VOCAB_SIZE} are taken", tokens.len()),
            ));
        }
        let types = metadata.i32_array(TYPES)?.unwrap_or_else(|| vec![1; tokens.len()]);
        check_length(TYPES, types.len(), tokens.len())?;
        let kinds = types.into_iter().enumerate().map(|(index, value)| TokenKind::new(index, value));
        let id = |key| token_id(metadata, key, tokens.len());
        let flag = |key| metadata.bool(key).map_err(TextError::from);
        let bos = id("tokenizer.ggml.bos_token_id")?;
        let eos = id("tokenizer.ggml.eos_token_id")?;
        let eot = id("tokenizer.ggml.eot_token_id")?;
        let eom = id("tokenizer.ggml.eom_token_id")?;
        let mut tokenizer = Self {
            model: metadata.str("tokenizer.ggml.model")?.ok_or_else(|| missing("tokenizer.ggml.model"))?,
            pre: metadata.str(KEY)?,
            tokens,
            kinds: kinds.collect::<Result<_, _>>()?,
            scores: metadata.f32_array(SCORES)?.unwrap_or_default(),
            merges: metadata.str_array(MERGES)?.unwrap_or_default(),
            bos,
            eos,
            ends: [eos, eot, eom].into_iter().flatten().collect(),
            add_bos: flag("tokenizer.ggml.add_bos_token")?,
            add_eos: flag("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: flag("tokenizer.ggml.add_space_prefix")?,
        };
        // Files without token types still say what begins and ends a text.
        for &id in tokenizer.bos.iter().chain(&tokenizer.ends) {
            tokenizer.kinds[id as usize] = TokenKind::Control;
        }
        Ok(tokenizer)
    }

    /// Builds the tokenizer of the model that the metadata names.
    pub(crate) fn build(&self) -> Result<Parts, TextError> {
        match self.model {
            "gpt2" => self.byte_level(),
            "llama" => self.sentencepiece(),
            other => {
                let problem = format!(
                    "'{}' is not known; known are gpt2 (byte-level BPE) and llama (SentencePiece)",
                    other.escape_debug()
                );
                Err(TextError::model("tokenizer.ggml.model", problem))
            }
        }
    }

    fn byte_level(&self) -> Result<Parts, TextError> {
        if self.pre.is_none() {
            tracing::warn!(
                "{KEY} is missing, so texts are split as GPT-2 splits them: if the model was trained otherwise, its answers are worse; convert it again"
            );
        }
        let Dialect { normalizer, pre_tokenizer, ignore_merges, add_bos } = dialect(self.pre)?;
        let vocab = self.ids_by_text()?;
        let merges =
            byte_level::merges(MERGES, self.merges.iter().map(String::as_str), |text| vocab.contains_key(text))?;
        let model =
            BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(ignore_merges).cache_capacity(CACHED_WORDS);
        let model = model.build().map_err(|error| TextError::model(MERGES, error.to_string()))?;
        let mut tokenizer = tokenizers::Tokenizer::new(ModelWrapper::from(model));
        let failed = |error: tokenizers::Error| TextError::model(TOKENS, error.to_string());
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer)).with_normalizer(normalizer).map_err(failed)?;
        let added = self.added().map(|token| AddedToken::from(token.text, token.is_special).normalized(false));
        tokenizer.add_tokens(added).map_err(failed)?;
        let mut vocabulary = Vocabulary::default();
        for (text, kind) in self.tokens.iter().zip(&self.kinds) {
            let bytes = if kind.is_added() { text.as_bytes().to_vec() } else { byte_level::bytes(text) };
            vocabulary.push(&bytes, kind.is_special())?;
        }
        Ok(self.parts(Encoder::HuggingFace(Box::new(HuggingFaceEncoder::new(tokenizer, true))), vocabulary, add_bos))
    }

    /// Fails if two tokens have the same text.
    fn ids_by_text(&self) -> Result<Vocab, TextError> {
        let mut vocab = Vocab::default();
        for (id, text) in (0..).zip(self.tokens).filter(|(_, text)| !text.is_empty()) {
            if let Some(first) = vocab.insert(text.clone(), id) {
                let problem = format!("'{}' is token {first}, too", text.escape_debug());
                return Err(TextError::model(format!("{TOKENS}[{id}]"), problem));
            }
        }
        Ok(vocab)
    }

    fn sentencepiece(&self) -> Result<Parts, TextError> {
        check_length(SCORES, self.scores.len(), self.tokens.len())?;
        let space_prefix = self.add_space_prefix.unwrap_or(true);
        let mut vocabulary = Vocabulary::default();
        let mut pieces = Vec::with_capacity(self.tokens.len());
        for (id, ((text, &kind), &score)) in self.tokens.iter().zip(&self.kinds).zip(&self.scores).enumerate() {
            let piece = match kind {
                TokenKind::Normal => PieceKind::Normal,
                TokenKind::Byte => PieceKind::Byte(byte_token(id, text)?),
                TokenKind::Unknown => PieceKind::Unknown,
                TokenKind::Control | TokenKind::UserDefined | TokenKind::Unused => PieceKind::Other,
            };
            match piece {
                PieceKind::Byte(byte) => vocabulary.push(&[byte], false)?,
                PieceKind::Normal => vocabulary.push(text.replace(SPACE, " ").as_bytes(), false)?,
                _ => vocabulary.push(text.as_bytes(), kind.is_special())?,
            }
            pieces.push((text.as_str(), score, piece));
        }
        let splitter = SpecialSplitter::new(&self.added().collect::<Vec<_>>())?;
        let encoder = SentencePieceEncoder::new(&pieces, splitter, space_prefix)?;
        Ok(Parts { space_prefix, ..self.parts(Encoder::SentencePiece(encoder), vocabulary, true) })
    }

    fn added(&self) -> impl Iterator<Item = Added> + '_ {
        let tokens = (0..).zip(self.tokens.iter().zip(&self.kinds)).filter(|(_, (_, kind))| kind.is_added());
        tokens.map(|(id, (text, kind))| Added { text: text.clone(), id, is_special: kind.is_special() })
    }

    fn parts(&self, encoder: Encoder, vocabulary: Vocabulary, add_bos_default: bool) -> Parts {
        let special = (0..).zip(self.tokens.iter().zip(&self.kinds)).filter(|(_, (_, kind))| kind.is_special());
        let eos = end_tokens(self.ends.iter().copied(), special.map(|(id, (text, _))| (text.as_str(), id)));
        Parts {
            encoder,
            vocabulary: Arc::new(vocabulary),
            bos: self.bos,
            eos,
            prefix: self.bos.filter(|_| self.add_bos.unwrap_or(add_bos_default)).into_iter().collect(),
            suffix: self.eos.filter(|_| self.add_eos.unwrap_or(false)).into_iter().collect(),
            space_prefix: false,
            added: self.added().map(|Added { text, is_special, .. }| ControlToken { text, is_special }).collect(),
        }
    }
}

fn check_length(key: &str, found: usize, tokens: usize) -> Result<(), TextError> {
    if found == tokens {
        return Ok(());
    }
    Err(TextError::model(key, format!("{found} values for {tokens} tokens")))
}

fn token_id(metadata: &Metadata, key: &str, tokens: usize) -> Result<Option<TokenId>, TextError> {
    match metadata.u32(key)? {
        Some(id) if id as usize >= tokens => Err(TextError::model(key, format!("{id}, but there are {tokens} tokens"))),
        id => Ok(id),
    }
}

fn byte_token(id: usize, text: &str) -> Result<u8, TextError> {
    let problem =
        || TextError::model(format!("{TOKENS}[{id}]"), format!("'{}' is no byte, as in <0x41>", text.escape_debug()));
    byte_piece(text).ok_or_else(problem)
}
