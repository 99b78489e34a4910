//! A request and its answer.

use std::time::{Duration, Instant};

use anyhow::Context;
use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;

use crate::cluster::Cluster;

/// A request.
#[derive(Debug, Clone)]
pub struct Ask(pub v1::GenerateRequest);

/// What came back.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// The request's id.
    pub request_id: String,
    /// The prompt's tokens.
    pub prompt_token_ids: Vec<u32>,
    /// The output's tokens.
    pub token_ids: Vec<u32>,
    /// Its text.
    pub text: String,
    /// What was thought before it.
    pub reasoning: String,
    /// The tools that it asks for.
    pub tool_calls: Vec<v1::ToolCall>,
    /// One per token, if asked for.
    pub logprobs: Vec<v1::TokenLogprobs>,
    /// One per position of the prompt, if asked for.
    pub prompt_logprobs: Vec<v1::TokenLogprobs>,
    /// The last message.
    pub finished: v1::Finished,
    /// Time to the first token, as the client sees it.
    pub ttft: Duration,
    /// Gaps between the messages with tokens, as the client sees them.
    pub gaps: Vec<Duration>,
}

impl Answer {
    /// The handoff.
    pub fn kv_transfer(&self) -> v1::KvTransfer {
        self.finished.timeline.as_ref().and_then(|timeline| timeline.kv_transfer.clone()).unwrap_or_default()
    }

    /// Prompt tokens that were not computed.
    pub fn cached_tokens(&self) -> u32 {
        self.finished.usage.map(|usage| usage.cached_tokens).unwrap_or_default()
    }
}

impl Ask {
    fn new(prompt: Prompt) -> Self {
        Self(v1::GenerateRequest {
            prompt: Some(prompt),
            sampling: Some(v1::SamplingParameters::default()),
            ..Default::default()
        })
    }

    /// Plain text; special tokens in it are parsed.
    pub fn text(text: &str) -> Self {
        Self::new(Prompt::Text(v1::TextPrompt { text: text.into(), parse_special: true }))
    }

    /// One message of a user.
    pub fn user(content: &str) -> Self {
        Self::messages(&[("user", content)])
    }

    /// A conversation.
    pub fn messages(messages: &[(&str, &str)]) -> Self {
        let message = |(role, content): &(&str, &str)| v1::ChatMessage {
            role: (*role).into(),
            content: (*content).into(),
            ..Default::default()
        };
        Self::new(Prompt::Messages(v1::MessagesPrompt {
            messages: messages.iter().map(message).collect(),
            ..Default::default()
        }))
    }

    /// Tokens.
    pub fn tokens(ids: impl Into<Vec<u32>>) -> Self {
        Self::new(Prompt::TokenIds(v1::TokenIds { ids: ids.into() }))
    }

    /// Changes the sampling parameters.
    pub fn sampling(mut self, change: impl FnOnce(&mut v1::SamplingParameters)) -> Self {
        change(self.0.sampling.get_or_insert_default());
        self
    }

    /// Most tokens to generate.
    pub fn max_tokens(self, n: u32) -> Self {
        self.sampling(|sampling| sampling.max_tokens = Some(n))
    }

    /// The model's end tokens do not end the output.
    pub fn ignore_eos(self) -> Self {
        self.sampling(|sampling| sampling.ignore_eos = true)
    }

    /// How many answers.
    pub fn n(mut self, n: u32) -> Self {
        self.0.n = n;
        self
    }

    /// The form of the answer.
    pub fn form(self, form: v1::structured_output::Form) -> Self {
        self.sampling(|sampling| sampling.structured_output = Some(v1::StructuredOutput { form: Some(form) }))
    }

    /// JSON of this schema.
    pub fn schema(self, schema: &serde_json::Value) -> Self {
        self.form(v1::structured_output::Form::JsonSchema(schema.to_string()))
    }

    /// Draws with this seed at this temperature.
    pub fn seeded(self, seed: u64, temperature: f32) -> Self {
        self.sampling(|sampling| {
            sampling.seed = Some(seed);
            sampling.temperature = Some(temperature);
        })
    }
}

/// An answer on its way.
#[derive(Default)]
struct Open {
    answer: Answer,
    /// When its last tokens came.
    last: Option<Instant>,
    ended: bool,
}

impl Open {
    fn take(&mut self, event: Event, began: Instant) -> anyhow::Result<()> {
        anyhow::ensure!(!self.ended, "something came after Finished");
        let answer = &mut self.answer;
        match event {
            Event::Accepted(accepted) => {
                answer.request_id = accepted.request_id;
                answer.prompt_token_ids = accepted.prompt_token_ids;
            }
            Event::Delta(delta) => {
                let now = Instant::now();
                match self.last.replace(now) {
                    None => answer.ttft = now - began,
                    Some(before) => answer.gaps.push(now - before),
                }
                let known = answer.token_ids.len();
                anyhow::ensure!(delta.index as usize == known, "token {} after {known}", delta.index);
                answer.token_ids.extend(delta.token_ids);
                answer.text.push_str(&delta.text);
                answer.reasoning.push_str(&delta.reasoning);
                answer.logprobs.extend(delta.logprobs);
                for v1::ToolCallDelta { index, id, name, arguments } in delta.tool_calls {
                    if index as usize == answer.tool_calls.len() {
                        answer.tool_calls.push(v1::ToolCall { id, name, ..Default::default() });
                    }
                    answer.tool_calls.last_mut().context("a call")?.arguments.push_str(&arguments);
                }
            }
            Event::PromptLogprobs(logprobs) => answer.prompt_logprobs = logprobs.positions,
            Event::Finished(finished) => {
                answer.finished = *finished;
                self.ended = true;
            }
        }
        Ok(())
    }
}

impl Cluster {
    /// Asks and waits for the whole answer.
    pub async fn ask(&self, ask: Ask) -> anyhow::Result<Answer> {
        let mut answers = self.answers(ask).await?;
        anyhow::ensure!(answers.len() == 1, "{} answers", answers.len());
        Ok(answers.remove(0))
    }

    /// Asks and waits for all answers.
    pub async fn answers(&self, ask: Ask) -> anyhow::Result<Vec<Answer>> {
        let began = Instant::now();
        let n = ask.0.n.max(1);
        let mut stream = self.inference().generate(ask.0).await?.into_inner();
        let mut open: Vec<_> = (0..n).map(|_| Open::default()).collect();
        while let Some(response) = stream.message().await? {
            let of = open.get_mut(response.completion as usize).context("an answer that was not asked for")?;
            of.take(response.event.context("a response without an event")?, began)?;
        }
        anyhow::ensure!(open.iter().all(|open| open.ended), "the stream ended without Finished");
        Ok(open.into_iter().map(|open| open.answer).collect())
    }

    /// Asks, and gives the refusal's code and message.
    pub async fn refused(&self, ask: Ask) -> (tonic::Code, String) {
        match self.ask(ask).await {
            Ok(answer) => panic!("served: {answer:?}"),
            Err(error) => match error.downcast::<tonic::Status>() {
                Ok(status) => (status.code(), status.message().to_owned()),
                Err(error) => panic!("no status: {error:#}"),
            },
        }
    }
}
