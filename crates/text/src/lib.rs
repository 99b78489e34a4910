//! From text to tokens and back: tokenizers, chat templates, incremental detokenization, stop
//! strings, and the reasoning and tool calls in an output.
//!
//! The tokenizer comes from a model file: GGUF metadata (byte-level BPE or SentencePiece) or the
//! `tokenizer.json` next to safetensors. [`Tokenizer::bytes`] needs no file and goes with the mock
//! engine.
//!
//! **Invariants**
//! - A tokenizer gives the ids that Hugging Face's gives for the same model, or refuses to load.
//! - Text that a [`Detokenizer`] has given out is final and never holds half a character; how its
//!   tokens were spread over calls changes nothing.
//! - Model files and templates are untrusted: they give an error, not a panic, and every text has a
//!   limit.
//!
//! No clock, no network; files are read only while a tokenizer is loaded.

mod byte_level;
mod bytes;
mod caught;
mod chat_template;
mod conversation;
mod date;
mod detokenizer;
mod end_tokens;
mod error;
mod gguf;
mod guard;
mod hugging_face;
mod jinja_functions;
mod model_folder;
mod model_limits;
mod output;
mod pipeline_bounds;
mod pre_tokenizer;
mod python_methods;
mod python_repr;
mod python_text;
mod render_failure;
mod sampling_defaults;
mod sentencepiece;
mod special;
mod stop;
mod template_probe;
mod template_source;
mod tojson;
mod tokenizer;
mod tokenizer_json;
mod utf8;
mod vocabulary;

pub use chat_template::{ChatTemplate, MOCK_CHAT_TEMPLATE, RenderedPrompt};
pub use conversation::{ChatMessage, Conversation, ToolCall};
pub use detokenizer::{DecodeOptions, Detokenizer};
pub use error::TextError;
pub use model_limits::{ModelLimits, model_limits};
pub use output::{MAX_HELD_BYTES, OutputEvent, OutputFormat, OutputParser, ReasoningMarks, ToolCallFormat};
pub use sampling_defaults::sampling_defaults;
pub use stop::{MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, StopOutcome, StopStrings};
pub use tokenizer::{DEFAULT_MAX_BYTES, EncodeOptions, Tokenizer};
