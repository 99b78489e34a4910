//! One request, from sending it to its last token.

use std::pin::pin;
use std::time::Duration;

use baton_proto::v1;
use baton_runtime::{Clock, SystemClock, random_u64};
use baton_types::ErrorKind;
use tonic::Streaming;

use crate::client::Conductor;
use crate::error::CliError;
use crate::report::Record;
use crate::screen::{Answer, Waiting};

/// How long a conductor may take to hear of Ctrl-C.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// How a request ended that did not fail.
#[derive(Debug)]
pub enum Ended {
    /// As it should.
    Finished(Record),
    /// By Ctrl-C: what had come until then.
    Interrupted(Record),
}

/// Sends a request and shows the text as it comes. Ctrl-C aborts it. If there are several
/// conductors and one is lost, another one is asked for the same answer. What comes after the text
/// that was shown is shown.
pub async fn answer(
    conductor: &mut Conductor,
    mut request: v1::GenerateRequest,
    json: bool,
) -> Result<Ended, CliError> {
    if request.idempotency_key.is_empty() && conductor.conductors() > 1 {
        request.idempotency_key = format!("{:016x}{:016x}", random_u64(), random_u64());
    }
    let has_key = !request.idempotency_key.is_empty();
    let mut record = Record::of(request.n);
    let ended = {
        let following = pin!(follow_anywhere(conductor, request, json, &mut record));
        tokio::select! {
            result = following => Some(result),
            signal = tokio::signal::ctrl_c() => { signal?; None }
        }
    };
    match ended {
        Some(Ok(())) => Ok(Ended::Finished(record)),
        Some(Err(error)) => Err(error.of_request(record.request_id())),
        None => {
            if has_key {
                // Without its stream it would go on for a while. The conductor may be what is lost.
                let abort = v1::AbortRequest { request_id: record.request_id().to_owned() };
                let _ = tokio::time::timeout(ABORT_TIMEOUT, conductor.inference().abort(abort)).await;
            }
            Ok(Ended::Interrupted(record))
        }
    }
}

async fn follow_anywhere(
    conductor: &mut Conductor,
    request: v1::GenerateRequest,
    json: bool,
    record: &mut Record,
) -> Result<(), CliError> {
    let mut screen = Answer::default();
    let mut shown = 0;
    let mut tries = conductor.conductors();
    let ended = loop {
        let result = follow(conductor, request.clone(), json, record, &mut screen, &mut shown).await;
        tries -= 1;
        match result {
            Err(error) if error.kind() == ErrorKind::Unavailable && tries > 0 => match conductor.another().await {
                Ok(another) => *conductor = another,
                Err(_) => break Err(error),
            },
            result => break result,
        }
        *record = Record::of(request.n);
    };
    screen.end()?;
    ended
}

async fn follow(
    conductor: &Conductor,
    request: v1::GenerateRequest,
    json: bool,
    record: &mut Record,
    screen: &mut Answer,
    shown: &mut usize,
) -> Result<(), CliError> {
    let sent = SystemClock.now();
    let mut waiting = Waiting::new("waiting for the first token", json);
    let mut responses: Streaming<v1::GenerateResponse> = conductor.inference().generate(request).await?.into_inner();
    let mut told = 0;
    let ended = loop {
        let response = match responses.message().await {
            Ok(Some(response)) => response,
            Ok(None) => break Ok(()),
            Err(status) => break Err(CliError::from(status)),
        };
        let text = record.take(response, SystemClock.now() - sent)?;
        let new = new_text(&text, &mut told, shown);
        if !json && !new.is_empty() {
            waiting.clear();
            screen.text(new)?;
        }
    };
    waiting.clear();
    ended?;
    if record.is_finished() {
        return Ok(());
    }
    let message = "the stream ended before the request did".to_owned();
    Err(CliError::Refused { kind: ErrorKind::Internal, message, retry_after_s: None })
}

/// The part of `text` that was not shown before. So many bytes of the answer were `told` before it,
/// and so many were `shown`, by an earlier try of the same request.
fn new_text<'a>(text: &'a str, told: &mut usize, shown: &mut usize) -> &'a str {
    let from = shown.saturating_sub(*told).min(text.len());
    *told += text.len();
    *shown = (*shown).max(*told);
    // The same request has the same text.
    text.get(from..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_try_prints_only_text_not_shown_yet() {
        let mut shown = 0;
        let mut say = |pieces: &[&str]| {
            let mut told = 0;
            pieces.iter().map(|text| new_text(text, &mut told, &mut shown).to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(say(&["one ", "two "]), ["one ", "two "]);
        assert_eq!(say(&["one", " two th", "ree"]), ["", "th", "ree"]);
        assert_eq!(say(&["one two three four"]), [" four"]);
    }
}
