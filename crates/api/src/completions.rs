//! OpenAI's `/v1/completions`.

mod answer;
mod offset;

use std::fmt;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

use crate::Context;
use crate::answer::{Call, Head};
use crate::common::{MAX_ANSWERS, Objectives, generation_request, with_defaults};
use crate::error::{BadRequest, FieldNames, Wording};
use crate::field::{count, or_default};

use answer::{AnswerOptions, CompletionAnswer};

/// What this API calls fields of the wire.
const FIELDS: FieldNames = FieldNames::new(
    Wording::OpenAi { prompt: "prompt" },
    &[
        ("text", "prompt"),
        ("token_ids", "prompt"),
        ("prompt_logprobs", "logprobs"),
        ("structured_output", "response_format"),
        ("slo.ttft_ms", "baton.ttft_slo_ms"),
        ("slo.tbt_ms", "baton.tbt_slo_ms"),
        ("timeout_ms", "baton.timeout_ms"),
    ],
);

/// Most prompts of a body.
const MAX_PROMPTS: usize = 128;
/// Most answers to all prompts of a body.
const MAX_ALL_ANSWERS: usize = 1024;
/// The same, if each has its prompt.
const MAX_ECHOES: usize = 128;

generation_request! {
    /// The body of a completion.
    CompletionRequest {
        prompt: Prompts,
        /// 0 says something with `echo` alone.
        #[serde(default, deserialize_with = "crate::field::integer")]
        max_tokens: Option<i64>,
        #[serde(default, deserialize_with = "count::<_, 0, 20>")]
        logprobs: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        echo: bool,
        #[serde(default, deserialize_with = "count::<_, 1, MAX_ANSWERS>")]
        best_of: Option<u32>,
        suffix: Option<String>,
    }
}

/// One prompt or several, as text or as tokens.
#[derive(Debug)]
struct Prompts(Vec<Prompt>);

#[derive(Debug, Clone)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list of token ids, or a list of either")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut prompts = Vec::new();
                let mut tokens = Vec::new();
                while let Some(item) = items.next_element()? {
                    match item {
                        Item::Token(token) => tokens.push(token),
                        Item::Prompt(prompt) => prompts.push(prompt),
                    }
                    if prompts.len() > MAX_PROMPTS {
                        return Err(A::Error::custom(format_args!("at most {MAX_PROMPTS} prompts are taken")));
                    }
                    if !prompts.is_empty() && !tokens.is_empty() {
                        return Err(A::Error::custom("token ids beside whole prompts"));
                    }
                }
                let prompts = if prompts.is_empty() { vec![Prompt::Tokens(tokens)] } else { prompts };
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// What a list of prompts has: whole ones, or the tokens of the only one.
enum Item {
    Token(u32),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Item;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id, a text or a list of token ids")
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<Item, E> {
                let token = u32::try_from(token).map_err(|_| E::custom(format_args!("{token} is no token id")))?;
                Ok(Item::Token(token))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Item, A::Error> {
                let tokens = Vec::deserialize(serde::de::value::SeqAccessDeserializer::new(items))?;
                Ok(Item::Prompt(Prompt::Tokens(tokens)))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl CompletionRequest {
    /// What it asks for.
    ///
    /// # Errors
    /// A field has a value that is not served.
    pub fn call(self, context: Context) -> Result<Call, BadRequest> {
        self.check()?;
        let n = self.n.unwrap_or(1);
        let best_of = self.best_of(n)?;
        if self.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(BadRequest::new("suffix", "is not served here"));
        }
        let max_tokens = self.max_tokens()?;
        // The prompt's own log-probabilities are all that is wanted then, and a token has to be
        // drawn for them.
        let is_scoring = max_tokens == 0 && self.echo;
        let sampling = v1::SamplingParameters {
            max_tokens: Some(if is_scoring { 1 } else { max_tokens }),
            // The best are those with the best log-probabilities.
            logprobs: if best_of > n { self.logprobs.or(Some(0)) } else { self.logprobs },
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            ..self.sampling()?
        };
        let sampling = with_defaults(sampling, &context.defaults);
        let stream = self.stream()?;
        let wire = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => WirePrompt::Text(v1::TextPrompt { text: text.clone(), parse_special: true }),
            Prompt::Tokens(ids) => WirePrompt::TokenIds(v1::TokenIds { ids: ids.clone() }),
        };
        let request = |prompt| v1::GenerateRequest { n: best_of, ..self.request(wire(prompt), sampling.clone()) };
        let requests = self.prompt.0.iter().map(request).collect();
        let head = Head::new(context.created, stream);
        let prompts = self.prompt.0.into_iter().map(|prompt| self.echo.then_some(prompt)).collect();
        let fields = FIELDS.with("n", "best_of", self.best_of.is_some()).with(
            "structured_output",
            "structured_outputs",
            self.structured_outputs.is_some(),
        );
        let options = AnswerOptions { n, best_of, is_scoring, logprobs: self.logprobs.is_some() };
        let answer = CompletionAnswer::new(head, prompts, options, context.decode);
        Ok(Call::new(requests, stream.is_some(), fields, Box::new(answer)))
    }

    /// 16, if it does not say.
    fn max_tokens(&self) -> Result<u32, BadRequest> {
        let given = self.max_tokens.unwrap_or(16);
        let least = u32::from(!self.echo);
        let also = if self.echo { "" } else { ", or 0 with echo" };
        match u32::try_from(given) {
            Ok(tokens) if tokens >= least => Ok(tokens),
            Err(_) if given > 0 => {
                Err(BadRequest::new("max_tokens", format!("{given}, but at most {} is taken", u32::MAX)))
            }
            _ => Err(BadRequest::new("max_tokens", format!("{given}, but must be at least {least}{also}"))),
        }
    }

    /// How many answers are generated for each prompt, of which the best `n` are given.
    fn best_of(&self, n: u32) -> Result<u32, BadRequest> {
        let best_of = self.best_of.unwrap_or(n);
        if best_of < n {
            return Err(BadRequest::new("best_of", format!("{best_of}, but must be at least n, which is {n}")));
        }
        if best_of > n && self.stream {
            return Err(BadRequest::new("best_of", "says which answers are best once all have ended, not in a stream"));
        }
        let answers = self.prompt.0.len() * best_of as usize;
        // Each repeats its prompt.
        let most = if self.echo { MAX_ECHOES } else { MAX_ALL_ANSWERS };
        if answers > most {
            let param = if self.best_of.is_some() { "best_of" } else { "n" };
            return Err(BadRequest::new(param, format!("{answers} answers in all, but at most {most} are given")));
        }
        Ok(best_of)
    }
}

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![("CompletionRequest", taken::<CompletionRequest>())]
}
