//! Baton's own gRPC.

use std::time::Duration;

use baton_proto::v1::generate_request::Prompt as Wire;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::structured_output::Form;
use baton_proto::v1::{
    GenerateRequest, ListModelsRequest, SamplingParameters, ServiceLevelObjectives, StructuredOutput, TextPrompt,
    TokenIds,
};
use baton_proto::{MAX_MESSAGE_BYTES, http_status, kind_of_status, url};
use baton_runtime::innermost;
use baton_types::ErrorKind;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::args::{JsonSchema, ServeArgs};
use super::arrivals::{Arrival, Prompt};
use super::outcome::Limits;
use super::received::{Problem, ReceivedAnswer, Usage};
use crate::BenchError;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Requests of one connection: as many as a server commonly allows at once.
const REQUESTS_PER_CONNECTION: u32 = 100;

/// A conductor, and what every request says.
pub struct Grpc {
    /// One for each connection.
    clients: Vec<InferenceClient<Channel>>,
    /// Name of the model.
    pub model: String,
    temperature: f32,
    ignore_eos: bool,
    schema: Option<JsonSchema>,
    objectives: Option<Limits>,
}

impl Grpc {
    /// Asks for the models if none is named.
    pub async fn connect(host: &str, args: &ServeArgs) -> Result<Self, BenchError> {
        let clients = connect(host, args.most_in_flight.div_ceil(REQUESTS_PER_CONNECTION)).await?;
        let model = match &args.model {
            Some(name) => name.clone(),
            None => first_model(clients[0].clone()).await?,
        };
        Ok(Self {
            clients,
            model,
            temperature: args.temperature,
            ignore_eos: args.ignores_eos(),
            schema: args.json_schema.clone(),
            objectives: args.objectives(),
        })
    }

    /// What is sent for an arrival.
    pub fn request(&self, arrival: &Arrival) -> GenerateRequest {
        let prompt = match arrival.prompt() {
            Prompt::Text(text) => Wire::Text(TextPrompt { text, parse_special: false }),
            Prompt::Tokens(ids) => Wire::TokenIds(TokenIds { ids }),
        };
        GenerateRequest {
            model: self.model.clone(),
            prompt: Some(prompt),
            sampling: Some(SamplingParameters {
                temperature: Some(self.temperature),
                max_tokens: Some(arrival.max_tokens),
                ignore_eos: self.ignore_eos,
                structured_output: self
                    .schema
                    .as_ref()
                    .map(|JsonSchema(schema)| StructuredOutput { form: Some(Form::JsonSchema(schema.to_string())) }),
                ..SamplingParameters::default()
            }),
            slo: self.objectives.map(|limits| ServiceLevelObjectives {
                ttft_ms: Some(limits.ttft_ms()),
                tbt_ms: Some(limits.tbt_ms()),
            }),
            ..GenerateRequest::default()
        }
    }

    /// Sends a request, and hears its answer to the end. `index` chooses the connection.
    pub async fn ask(
        &self,
        index: usize,
        request: GenerateRequest,
        received: &mut ReceivedAnswer,
    ) -> Result<(), Problem> {
        let mut client = self.clients[index % self.clients.len()].clone();
        let answer = client.generate(request).await;
        let mut stream = answer.map_err(|status| problem(&status, false))?.into_inner();
        let mut accepted = false;
        let mut finished = false;
        while let Some(response) = stream.message().await.map_err(|status| problem(&status, accepted))? {
            match response.event {
                Some(Event::Accepted(_)) => accepted = true,
                // A message with only text that was kept back has no tokens.
                Some(Event::Delta(delta)) if !delta.token_ids.is_empty() => {
                    received.tokens(delta.token_ids.len() as u64)?
                }
                Some(Event::Finished(end)) => {
                    finished = true;
                    if let Some(usage) = end.usage {
                        let [prompt, cached, output] =
                            [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens].map(u64::from);
                        received.usage(Usage { prompt, cached, output })?;
                    }
                }
                Some(Event::Delta(_) | Event::PromptLogprobs(_)) | None => {}
            }
        }
        let cut = || problem(&Status::aborted("the stream ended in mid-answer"), accepted);
        if finished { Ok(()) } else { Err(cut()) }
    }
}

/// So many connections, one at least.
async fn connect(host: &str, connections: u32) -> Result<Vec<InferenceClient<Channel>>, BenchError> {
    let endpoint = Endpoint::from_shared(url(host));
    let endpoint = endpoint.map_err(|error| BenchError::invalid("URL", format!("{host}: {error}")))?;
    let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true);
    let mut clients = Vec::new();
    for _ in 0..connections.max(1) {
        let channel = endpoint
            .connect()
            .await
            .map_err(|error| BenchError::control("conductor", format!("cannot reach {host}: {}", innermost(&error))))?;
        clients.push(InferenceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES));
    }
    Ok(clients)
}

async fn first_model(mut client: InferenceClient<Channel>) -> Result<String, BenchError> {
    let wrong =
        |problem: &str| BenchError::control("conductor", format!("models: {problem} (--model names one instead)"));
    let list = client.list_models(ListModelsRequest {}).await;
    let models = list.map_err(|status| wrong(status.message()))?.into_inner().models;
    models.into_iter().next().map(|model| model.name).ok_or_else(|| wrong("there is none"))
}

/// What the conductor refuses at admission is a rejection; a connection that breaks, and what ends
/// after it was taken in, is a failure.
fn problem(status: &Status, accepted: bool) -> Problem {
    let broken = std::error::Error::source(status).is_some();
    match kind_of_status(status) {
        kind @ (ErrorKind::Overloaded | ErrorKind::Unavailable) if !accepted && !broken => {
            Problem::Rejected(http_status(kind))
        }
        ErrorKind::Cancelled => Problem::Aborted(status.message().to_owned()),
        _ => Problem::failed(format!("{:?}: {}", status.code(), status.message())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_refusals_are_counted_as_http_statuses() {
        assert_eq!(problem(&Status::resource_exhausted("full"), false), Problem::Rejected(429));
        assert_eq!(problem(&Status::unavailable("no node"), false), Problem::Rejected(503));
        for (status, accepted) in [(Status::unavailable("gone"), true), (Status::invalid_argument("top_p"), false)] {
            let Problem::Failed(reason) = problem(&status, accepted) else { panic!("{status:?}") };
            assert!(reason.contains(status.message()), "{reason}");
        }
        assert_eq!(problem(&Status::cancelled("aborted"), true), Problem::Aborted("aborted".into()));
    }
}
