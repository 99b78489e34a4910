//! Streams an answer over gRPC, from a conductor that runs: `cargo run --example generate -- "Name
//! the capital of France."`.
//!
//! `BATON_CONDUCTOR` is its address; 127.0.0.1:7070 if unset.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{MAX_MESSAGE_BYTES, RETRY_AFTER_METADATA, v1};
use tonic::Status;

/// Of the whole answer: tonic's own timeout ends when the stream begins.
const DEADLINE: Duration = Duration::from_secs(60);

fn request(question: String) -> v1::GenerateRequest {
    let message = v1::ChatMessage { role: "user".to_owned(), content: question, ..Default::default() };
    let messages = v1::MessagesPrompt { messages: vec![message], ..Default::default() };
    let sampling = v1::SamplingParameters { max_tokens: Some(64), ..Default::default() };
    v1::GenerateRequest { prompt: Some(Prompt::Messages(messages)), sampling: Some(sampling), ..Default::default() }
}

/// Dropping the stream, as the deadline does, ends the request at the conductor.
async fn generate(question: String) -> Result<(), Status> {
    let address = std::env::var("BATON_CONDUCTOR").unwrap_or_else(|_| "127.0.0.1:7070".to_owned());
    let client = InferenceClient::connect(baton_proto::url(&address)).await;
    let client = client.map_err(|error| Status::unavailable(format!("{address}: {error}")))?;
    let mut client = client.max_decoding_message_size(MAX_MESSAGE_BYTES);
    let mut stream = client.generate(request(question)).await?.into_inner();
    while let Some(response) = stream.message().await? {
        match response.event {
            Some(Event::Accepted(accepted)) => eprintln!("request {}", accepted.request_id),
            Some(Event::Delta(delta)) => {
                print!("{}", delta.text);
                // What cannot be shown is not the request's failure.
                let _ = std::io::stdout().flush();
            }
            Some(Event::Finished(finished)) => println!("\n{}", finished.finish_reason),
            Some(Event::PromptLogprobs(_)) | None => {}
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    let Some(question) = std::env::args().nth(1) else {
        eprintln!("generate: expected a question");
        return ExitCode::from(2);
    };
    let timeout = |_| Err(Status::deadline_exceeded("the answer took too long"));
    let Err(status) = tokio::time::timeout(DEADLINE, generate(question)).await.unwrap_or_else(timeout) else {
        return ExitCode::SUCCESS;
    };
    eprintln!("{:?}: {}", status.code(), status.message());
    if let Some(seconds) = status.metadata().get(RETRY_AFTER_METADATA).and_then(|value| value.to_str().ok()) {
        eprintln!("come again after {seconds} s");
    }
    ExitCode::FAILURE
}
