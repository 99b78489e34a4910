//! One request, from sending it to its last token.

use std::pin::pin;

use baton_proto::v1;
use baton_runtime::{Clock, SystemClock};
use baton_types::ErrorKind;
use tonic::Streaming;

use crate::client::Conductor;
use crate::error::CliError;
use crate::report::Record;
use crate::screen::{Answer, Waiting};

/// How a request ended that did not fail.
#[derive(Debug)]
pub enum Ended {
    /// As it should.
    Finished(Record),
    /// By Ctrl-C: what had come until then.
    Interrupted(Record),
}

/// Sends a request and shows the text as it comes. Ctrl-C drops the stream, which aborts the request.
pub async fn answer(conductor: &Conductor, request: v1::GenerateRequest, json: bool) -> Result<Ended, CliError> {
    let mut record = Record::default();
    let ended = {
        let following = pin!(follow(conductor, request, json, &mut record));
        tokio::select! {
            result = following => Some(result),
            signal = tokio::signal::ctrl_c() => { signal?; None }
        }
    };
    match ended {
        Some(Ok(())) => Ok(Ended::Finished(record)),
        Some(Err(error)) => Err(error.of_request(record.request_id())),
        None => Ok(Ended::Interrupted(record)),
    }
}

async fn follow(
    conductor: &Conductor,
    request: v1::GenerateRequest,
    json: bool,
    record: &mut Record,
) -> Result<(), CliError> {
    let sent = SystemClock.now();
    let mut waiting = Waiting::new("waiting for the first token", json);
    let mut responses: Streaming<v1::GenerateResponse> = conductor.inference().generate(request).await?.into_inner();
    let mut screen = Answer::default();
    let ended = loop {
        let response = match responses.message().await {
            Ok(Some(response)) => response,
            Ok(None) => break Ok(()),
            Err(status) => break Err(CliError::from(status)),
        };
        let text = record.take(response, SystemClock.now() - sent)?;
        if !json && !text.is_empty() {
            waiting.clear();
            screen.text(&text)?;
        }
    };
    waiting.clear();
    screen.end()?;
    ended?;
    if record.is_finished() {
        return Ok(());
    }
    let message = "the stream ended before the request did".to_owned();
    Err(CliError::Refused { kind: ErrorKind::Internal, message, retry_after_s: None })
}
