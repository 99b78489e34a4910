//! OpenAI's `/v1/completions`.

use std::fmt;

use baton_proto::v1::generate_request::Prompt as WirePrompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::{self, TokenLogprobs};
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::common::{Objectives, StreamOptions, TotalUsage, generation_request};
use crate::field::{Refused, or_default};
use crate::{Answer, BadRequest, Call, Context};

/// Most prompts of a body.
const MAX_PROMPTS: usize = 128;

generation_request! {
    /// The body of a completion.
    CompletionRequest {
        prompt: Prompts,
        max_tokens: Option<u32>,
        logprobs: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        echo: bool,
        best_of: Option<u32>,
        suffix: Option<String>,
        #[serde(default)]
        use_beam_search: Refused,
        #[serde(default)]
        response_format: Refused,
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
                let (mut prompts, mut tokens) = (Vec::new(), Vec::new());
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
        if let Some(best_of) = self.best_of.filter(|&best_of| best_of != self.n.unwrap_or(1)) {
            return Err(BadRequest::new("best_of", format!("{best_of}, but must be n")));
        }
        if self.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(BadRequest::new("suffix", "is not served here"));
        }
        let max_tokens = self.max_tokens.unwrap_or(16);
        // The prompt's own log-probabilities are all that is wanted then, and a token has to be drawn for them.
        let is_scoring = max_tokens == 0 && self.echo;
        let sampling = v1::SamplingParameters {
            max_tokens: Some(if is_scoring { 1 } else { max_tokens }),
            logprobs: self.logprobs,
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            ..self.sampling()?
        };
        let stream = self.stream()?;
        let wire = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => WirePrompt::Text(v1::TextPrompt { text: text.clone(), parse_special: true }),
            Prompt::Tokens(ids) => WirePrompt::TokenIds(v1::TokenIds { ids: ids.clone() }),
        };
        let requests = self.prompt.0.iter().map(|prompt| self.request(wire(prompt), sampling.clone())).collect();
        let choices = self.prompt.0.into_iter().map(|prompt| Choice::new(self.echo.then_some(prompt), is_scoring));
        let answer = CompletionAnswer {
            choices: choices.collect(),
            wants_logprobs: self.logprobs.is_some(),
            streams: stream.is_some(),
            options: stream.unwrap_or_default(),
            id: String::new(),
            model: String::new(),
            usage: TotalUsage::default(),
            context,
        };
        Ok(Call { requests, stream, answer: Box::new(answer) })
    }
}

/// One prompt's answer.
struct Choice {
    /// The prompt, until it was told.
    echo: Option<Prompt>,
    /// Nothing of the answer is told.
    is_scoring: bool,
    prompt_tokens: Vec<u32>,
    text: String,
    logprobs: Logprobs,
    /// Characters before what comes next.
    offset: usize,
    finish_reason: Option<String>,
}

/// Lists side by side, as this API has them.
#[derive(Default)]
struct Logprobs {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
}

impl Logprobs {
    fn push(&mut self, text: &str, logprob: Option<f32>, top: &[v1::TopLogprob], offset: &mut usize) {
        self.tokens.push(json!(text));
        self.token_logprobs.push(json!(logprob));
        let mut alternatives: Map<String, Value> = top.iter().map(|t| (t.text.clone(), json!(t.logprob))).collect();
        if let Some(logprob) = logprob {
            alternatives.entry(text).or_insert_with(|| json!(logprob));
        }
        self.top_logprobs.push(if logprob.is_some() { Value::Object(alternatives) } else { Value::Null });
        self.text_offset.push(json!(*offset));
        *offset += text.chars().count();
    }

    fn extend(&mut self, other: Self) {
        self.tokens.extend(other.tokens);
        self.token_logprobs.extend(other.token_logprobs);
        self.top_logprobs.extend(other.top_logprobs);
        self.text_offset.extend(other.text_offset);
    }

    fn json(&self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

impl Choice {
    fn new(echo: Option<Prompt>, is_scoring: bool) -> Self {
        let (prompt_tokens, text, logprobs) = (Vec::new(), String::new(), Logprobs::default());
        Self { echo, is_scoring, prompt_tokens, text, logprobs, offset: 0, finish_reason: None }
    }

    /// The text of an event, and the log-probabilities of its tokens; `None` where it has neither.
    fn take(&mut self, event: Event, wants_logprobs: bool, context: &Context) -> Option<(String, Logprobs)> {
        let mut logprobs = Logprobs::default();
        match event {
            Event::Accepted(accepted) => {
                self.prompt_tokens = accepted.prompt_token_ids;
                match (wants_logprobs, self.echo.take()) {
                    (_, None) => None,
                    // They come with their log-probabilities.
                    (true, Some(prompt)) => {
                        self.echo = Some(prompt);
                        None
                    }
                    (false, Some(Prompt::Text(text))) => Some((text, logprobs)),
                    (false, Some(Prompt::Tokens(tokens))) => Some(((context.decode)(&tokens), logprobs)),
                }
            }
            Event::PromptLogprobs(v1::PromptLogprobs { positions }) => {
                let echo = self.echo.take()?;
                let first = self.prompt_tokens.first().map(|&token| (context.decode)(&[token])).unwrap_or_default();
                logprobs.push(&first, None, &[], &mut self.offset);
                // What follows the last position is the first token of the answer.
                for TokenLogprobs { logprob, top, text } in
                    positions.iter().take(self.prompt_tokens.len().saturating_sub(1))
                {
                    logprobs.push(text, *logprob, top, &mut self.offset);
                }
                let text = match echo {
                    Prompt::Text(text) => text,
                    Prompt::Tokens(tokens) => (context.decode)(&tokens),
                };
                Some((text, logprobs))
            }
            Event::Delta(_) if self.is_scoring => None,
            Event::Delta(delta) => {
                for TokenLogprobs { logprob, top, text } in &delta.logprobs {
                    logprobs.push(text, *logprob, top, &mut self.offset);
                }
                // A token that shows no text, or none yet, is a chunk, too: clients see that the answer goes on.
                (!delta.text.is_empty() || !delta.token_ids.is_empty()).then_some((delta.text, logprobs))
            }
            Event::Finished(finished) => {
                self.finish_reason = Some(if self.is_scoring { "length".to_owned() } else { finished.finish_reason });
                Some((String::new(), logprobs))
            }
        }
    }
}

/// Puts a completion together.
struct CompletionAnswer {
    choices: Vec<Choice>,
    wants_logprobs: bool,
    /// Chunks are sent, and nothing is kept.
    streams: bool,
    options: StreamOptions,
    id: String,
    model: String,
    usage: TotalUsage,
    context: Context,
}

impl CompletionAnswer {
    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.context.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

fn choice(index: usize, text: &str, logprobs: Option<&Logprobs>, finish_reason: Option<&str>) -> Value {
    json!({ "index": index, "text": text, "logprobs": logprobs.map(Logprobs::json), "finish_reason": finish_reason })
}

impl Answer for CompletionAnswer {
    fn take(&mut self, index: usize, response: v1::GenerateResponse) -> Vec<Value> {
        let Some(event) = response.event else { return Vec::new() };
        match &event {
            Event::Accepted(accepted) if self.id.is_empty() => {
                self.id = format!("cmpl-{}", accepted.request_id);
                self.model = accepted.model.clone();
            }
            Event::Finished(finished) => {
                let usage = finished.usage.unwrap_or_default();
                let completion_tokens = if self.choices[index].is_scoring { 0 } else { usage.completion_tokens };
                self.usage.add(v1::Usage { completion_tokens, ..usage });
            }
            _ => {}
        }
        let of = &mut self.choices[index];
        let Some((text, logprobs)) = of.take(event, self.wants_logprobs, &self.context) else { return Vec::new() };
        let shown = self.wants_logprobs.then_some(&logprobs);
        let chunk = choice(index, &text, shown, of.finish_reason.as_deref());
        if !self.streams {
            of.text.push_str(&text);
            of.logprobs.extend(logprobs);
            return Vec::new();
        }
        let is_last = self.is_whole();
        let mut chunk = self.object(json!([chunk]));
        match (self.options.include_usage, is_last) {
            (true, _) => chunk["usage"] = Value::Null,
            // Clients that do not ask for it find it in the last chunk.
            (false, true) => chunk["usage"] = self.usage.json(),
            (false, false) => {}
        }
        vec![chunk]
    }

    fn last(&mut self) -> Option<Value> {
        if !self.options.include_usage {
            return None;
        }
        let mut chunk = self.object(json!([]));
        chunk["usage"] = self.usage.json();
        Some(chunk)
    }

    fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish_reason.is_some())
    }

    fn body(&mut self) -> Value {
        let whole = |(index, of): (usize, &Choice)| {
            let logprobs = self.wants_logprobs.then_some(&of.logprobs);
            choice(index, &of.text, logprobs, of.finish_reason.as_deref())
        };
        let choices = self.choices.iter().enumerate().map(whole).collect();
        let mut body = self.object(choices);
        body["usage"] = self.usage.json();
        body
    }
}
