//! `/tokenize` and `/detokenize`, as vLLM has them.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::chat::{Message, MessageList, ToolList, conversation, tools};
use crate::error::{BadRequest, FieldNames, Wording};
use crate::field::{Ignored, objects, only_true, or_default};
use crate::tools::ToolChoice;

objects! {
    /// The body of `/tokenize`: a text, or a conversation.
    pub struct TokenizeRequest {
        /// Empty takes the cluster's model.
        #[serde(default, deserialize_with = "or_default")]
        pub model: String,
        prompt: Option<String>,
        messages: Option<MessageList<Message>>,
        #[serde(default, deserialize_with = "or_default")]
        tools: ToolList,
        #[serde(default, rename = "add_special_tokens", deserialize_with = "only_true")]
        _add_special_tokens: Ignored,
        #[serde(default, rename = "add_generation_prompt", deserialize_with = "only_true")]
        _add_generation_prompt: Ignored,
        #[serde(default, deserialize_with = "or_default")]
        return_token_strs: bool,
    }

    /// The body of `/detokenize`.
    pub struct DetokenizeRequest {
        /// Empty takes the cluster's model.
        #[serde(default, deserialize_with = "or_default")]
        pub model: String,
        /// Ids of tokens.
        pub tokens: Vec<u32>,
    }
}

impl TokenizeRequest {
    /// What this API calls fields of the wire.
    pub const FIELDS: FieldNames = FieldNames::new(Wording::OpenAi { prompt: "prompt" }, &[("text", "prompt")]);

    /// The prompt.
    ///
    /// # Errors
    /// There is none, or two.
    pub fn prompt(self) -> Result<(v1::generate_request::Prompt, bool), BadRequest> {
        use v1::generate_request::Prompt;
        let prompt = match (self.prompt, self.messages) {
            (Some(text), None) => Prompt::Text(v1::TextPrompt { text, parse_special: true }),
            (None, Some(messages)) => {
                let mut prompt = conversation(messages)?;
                tools(&self.tools)?.put(&mut prompt, "tool_choice", ToolChoice::Auto, false)?;
                Prompt::Messages(prompt)
            }
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

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![("TokenizeRequest", taken::<TokenizeRequest>()), ("DetokenizeRequest", taken::<DetokenizeRequest>())]
}
