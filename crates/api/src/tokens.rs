//! `/tokenize` and `/detokenize`, as vLLM has them.

use baton_proto::v1;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::BadRequest;
use crate::chat::{Message, MessageList, conversation};
use crate::field::or_default;

/// The body of `/tokenize`: a text, or a conversation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizeRequest {
    /// Empty takes the cluster's model.
    #[serde(default, deserialize_with = "or_default")]
    pub model: String,
    prompt: Option<String>,
    messages: Option<MessageList<Message>>,
    #[serde(default, deserialize_with = "or_default")]
    return_token_strs: bool,
}

impl TokenizeRequest {
    /// The prompt.
    ///
    /// # Errors
    /// There is none, or two.
    pub fn prompt(self) -> Result<(v1::generate_request::Prompt, bool), BadRequest> {
        use v1::generate_request::Prompt;
        let prompt = match (self.prompt, self.messages) {
            (Some(text), None) => Prompt::Text(v1::TextPrompt { text, parse_special: true }),
            (None, Some(messages)) => Prompt::Messages(conversation(messages, "")?),
            (None, None) => return Err(BadRequest::new("prompt", "is missing, and so is messages")),
            (Some(_), Some(_)) => return Err(BadRequest::new("messages", "beside prompt: one of both is taken")),
        };
        Ok((prompt, self.return_token_strs))
    }
}

/// The answer of `/tokenize`.
pub fn tokenized(tokens: &[u32], context_length: u32, texts: Option<Vec<String>>) -> Value {
    json!({ "count": tokens.len(), "max_model_len": context_length, "tokens": tokens, "token_strs": texts })
}

/// The body of `/detokenize`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetokenizeRequest {
    /// Empty takes the cluster's model.
    #[serde(default, deserialize_with = "or_default")]
    pub model: String,
    /// Ids of tokens.
    pub tokens: Vec<u32>,
}
