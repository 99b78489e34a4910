//! The tokenizer of a model, whatever kind it is.

use std::sync::Arc;

use baton_formats::ModelFile;
use baton_types::TokenId;

use crate::bytes::{self, ByteEncoder};
use crate::chat_template::RenderedPrompt;
use crate::detokenizer::{DecodeOptions, Detokenizer};
use crate::error::TextError;
use crate::gguf::GgufTokenizer;
use crate::guard::ControlToken;
use crate::hugging_face::HuggingFaceEncoder;
use crate::sentencepiece::SentencePieceEncoder;
use crate::vocabulary::Vocabulary;
use crate::{model_folder, tokenizer_json};

/// Longest text that is tokenized unless [`Tokenizer::with_max_bytes`] says otherwise: about a
/// million tokens of English.
pub const DEFAULT_MAX_BYTES: usize = 4 << 20;

/// How text becomes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add the tokens that the model expects around a text, such as the one that begins it. Not
    /// after a chat template, which writes them itself.
    pub add_special: bool,
    /// The text of a special token is that token. Only for text whose author may give orders to the
    /// model: otherwise a user could end the system's message.
    pub parse_special: bool,
}

/// A model's tokenizer. Clones share it; it is cheap to clone and may be used from many threads.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    parts: Arc<Parts>,
    max_bytes: usize,
}

/// What a tokenizer is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) encoder: Encoder,
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) bos: Option<TokenId>,
    /// The first is the one that the model's files call so.
    pub(crate) eos: Vec<TokenId>,
    /// Added around a text by `add_special`.
    pub(crate) prefix: Vec<TokenId>,
    pub(crate) suffix: Vec<TokenId>,
    /// The encoder puts a space before a text.
    pub(crate) space_prefix: bool,
    /// Tokens whose text is found in a text before it is tokenized.
    pub(crate) added: Vec<ControlToken>,
}

/// The part that differs between the kinds. None of them adds `prefix` and `suffix`.
#[derive(Debug)]
pub(crate) enum Encoder {
    Bytes(ByteEncoder),
    HuggingFace(Box<HuggingFaceEncoder>),
    SentencePiece(SentencePieceEncoder),
}

impl Tokenizer {
    /// A token is a byte: 256 of them, and a few specials (257 ends an output), in a vocabulary of
    /// 512. Goes with the mock engine and [`MOCK_CHAT_TEMPLATE`](crate::MOCK_CHAT_TEMPLATE).
    pub fn bytes() -> Self {
        let (encoder, vocabulary) = ByteEncoder::new().expect("the byte vocabulary is a constant");
        Self::from_parts(Parts {
            encoder: Encoder::Bytes(encoder),
            vocabulary: Arc::new(vocabulary),
            bos: Some(bytes::BOS),
            eos: vec![bytes::EOS],
            prefix: vec![bytes::BOS],
            suffix: Vec::new(),
            space_prefix: false,
            added: bytes::control_tokens(),
        })
    }

    /// The tokenizer of a model: from GGUF metadata, or from the files next to safetensors. These
    /// are `tokenizer.json`, and `generation_config.json`, `config.json` and
    /// `tokenizer_config.json`, which name the end tokens. Fails on a kind or pre-tokenizer that is
    /// not known, and names the field of data that contradict themselves.
    pub fn from_model(model: &ModelFile) -> Result<Self, TextError> {
        match model {
            ModelFile::Gguf(gguf) => GgufTokenizer::read(gguf.metadata())?.build(),
            ModelFile::Safetensors(safetensors) => model_folder::parts(model_folder::of(safetensors.path())),
        }
        .map(Self::from_parts)
    }

    /// From a `tokenizer.json` alone (BPE, byte-level or in SentencePiece's manner). Its end tokens
    /// are the special tokens known by name.
    pub fn from_tokenizer_json(bytes: &[u8]) -> Result<Self, TextError> {
        tokenizer_json::parts(bytes).map(Self::from_parts)
    }

    pub(crate) fn from_parts(parts: Parts) -> Self {
        Self { parts: Arc::new(parts), max_bytes: DEFAULT_MAX_BYTES }
    }

    /// Sets the longest text taken, bytes.
    pub fn with_max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// The tokens of a text. Time grows with the length of the text, times the logarithm of its
    /// longest word. Fails on text longer than the limit.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>, TextError> {
        let ids = self.tokens(text, options.parse_special, None)?;
        if !options.add_special {
            return Ok(ids);
        }
        Ok([self.parts.prefix.as_slice(), &ids, &self.parts.suffix].concat())
    }

    /// The tokens of a rendered conversation: the control tokens are the template's own. Fails as
    /// [`encode`](Self::encode).
    pub fn encode_prompt(&self, prompt: &RenderedPrompt) -> Result<Vec<TokenId>, TextError> {
        self.tokens(&prompt.marked, true, prompt.mark)
    }

    fn tokens(&self, text: &str, parse_special: bool, mark: Option<char>) -> Result<Vec<TokenId>, TextError> {
        if text.len() > self.max_bytes {
            return Err(TextError::TooLong { bytes: text.len(), limit: self.max_bytes });
        }
        Ok(match &self.parts.encoder {
            Encoder::Bytes(encoder) => encoder.encode(text, parse_special, mark),
            Encoder::HuggingFace(encoder) => encoder.encode(text, parse_special, mark)?,
            Encoder::SentencePiece(encoder) => encoder.encode(text, parse_special, mark),
        })
    }

    /// Tokens whose text is found in a text before it is tokenized.
    pub(crate) fn added(&self) -> &[ControlToken] {
        &self.parts.added
    }

    /// The text of a whole sequence of tokens; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[TokenId], options: DecodeOptions) -> String {
        String::from_utf8_lossy(&self.decode_bytes(tokens, options)).into_owned()
    }

    /// The bytes of that text.
    pub fn decode_bytes(&self, tokens: &[TokenId], options: DecodeOptions) -> Vec<u8> {
        let mut detokenizer = self.detokenizer_with(options);
        let mut bytes = Vec::new();
        for &token in tokens {
            detokenizer.push_bytes(token, &mut bytes);
        }
        bytes
    }

    /// For the output of one request: special tokens are left out, and the text continues a prompt.
    pub fn detokenizer(&self) -> Detokenizer {
        self.detokenizer_with(DecodeOptions::default())
    }

    /// As [`detokenizer`](Self::detokenizer), but these special tokens are shown by their names:
    /// the marks of an [`OutputFormat`](crate::OutputFormat).
    pub fn detokenizer_showing(&self, shown: &[TokenId]) -> Detokenizer {
        self.detokenizer().showing(shown)
    }

    /// A detokenizer that starts here.
    pub fn detokenizer_with(&self, options: DecodeOptions) -> Detokenizer {
        let drop_space = options.starts_text && self.parts.space_prefix;
        Detokenizer::new(Arc::clone(&self.parts.vocabulary), options.skip_special, drop_space)
    }

    /// The name of a special token, as chat templates write it; empty if there is none.
    pub(crate) fn token_text(&self, id: Option<TokenId>) -> String {
        let bytes = id.and_then(|id| self.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// The special token of this name.
    pub fn special_token(&self, name: &str) -> Option<TokenId> {
        let encoded = self.encode(name, EncodeOptions { add_special: false, parse_special: true }).ok()?;
        let [token] = encoded[..] else { return None };
        (self.is_special(token) && self.token_bytes(token) == Some(name.as_bytes())).then_some(token)
    }

    /// Special tokens that have one of these names. Looks at the whole vocabulary.
    pub(crate) fn special_tokens_named(&self, names: &[&str]) -> Vec<TokenId> {
        let is_named = |id: &TokenId| {
            self.is_special(*id)
                && self.token_bytes(*id).is_some_and(|bytes| names.iter().any(|name| name.as_bytes() == bytes))
        };
        (0..self.vocab_size()).filter(is_named).collect()
    }

    /// Number of tokens. The model's embedding may have a few rows more.
    pub fn vocab_size(&self) -> u32 {
        self.parts.vocabulary.len() as u32
    }

    /// Bytes of the longest token.
    pub fn longest_token(&self) -> usize {
        (0..self.vocab_size()).filter_map(|id| self.token_bytes(id)).map(<[u8]>::len).max().unwrap_or(0)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<TokenId> {
        self.parts.bos
    }

    /// Whether [`EncodeOptions::add_special`] begins a text with [`bos`](Self::bos).
    pub fn add_bos(&self) -> bool {
        self.parts.bos.is_some() && self.parts.prefix.first() == self.parts.bos.as_ref()
    }

    /// Tokens that end an output: end of text, of turn, of message.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.parts.eos
    }

    /// The bytes that a token stands for, of a special token its name; `None` beyond the
    /// vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.parts.vocabulary.bytes(id)
    }

    /// Whether a token is a mark and no text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.parts.vocabulary.is_special(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

    #[test]
    fn byte_tokenizer_maps_bytes_to_tokens() {
        let tokenizer = Tokenizer::bytes();
        let all = EncodeOptions { add_special: true, parse_special: true };
        assert_eq!(tokenizer.encode("é<|im_end|>", all).unwrap(), [256, 0xc3, 0xa9, 259]);
        assert_eq!(tokenizer.encode("<|", TEXT).unwrap(), [60, 124]);
        assert_eq!(tokenizer.encode("<|eos|>", TEXT).unwrap().len(), 7);
        assert_eq!((tokenizer.vocab_size(), tokenizer.bos(), tokenizer.eos_ids()), (512, Some(256), &[257][..]));
        assert!(tokenizer.add_bos() && tokenizer.is_special(257) && !tokenizer.is_special(255));
        assert_eq!((tokenizer.token_bytes(511).unwrap(), tokenizer.token_bytes(512)), (&b"<|reserved_511|>"[..], None));
    }

    #[test]
    fn text_over_byte_limit_is_refused_before_tokenizing() {
        let tokenizer = Tokenizer::bytes();
        let error = tokenizer.encode(&"x".repeat(20 << 20), TEXT).unwrap_err();
        assert_eq!(error.to_string(), "20971520 bytes, but at most 4194304 are taken");
        assert!(tokenizer.with_max_bytes(3).encode("four", TEXT).is_err());
    }

    #[test]
    fn byte_tokenizer_round_trips_text() {
        let tokenizer = Tokenizer::bytes();
        let text = "Grüße 😀\u{0}\n";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, TEXT).unwrap(), DecodeOptions::default()), text);
    }
}
