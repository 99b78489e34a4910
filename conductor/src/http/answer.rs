//! A call from its requests to its answer, whole or as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::{HeaderMap, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use baton_api::{Answer, BadRequest, Call, Chunk, FieldNames};
use baton_intake::{Exhausted, Reservation};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_types::RequestId;
use futures::future::try_join_all;
use futures::stream::{BoxStream, SelectAll, StreamExt, select_all};
use prost::Message;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

use super::Shared;
use super::error::{self, HttpError, REQUEST_ID};
use crate::frontend::{MAX_IDEMPOTENCY_KEY_BYTES, Outgoing, new_request_id};

/// What the requests of a call answer, each with its number.
type Fetched = SelectAll<BoxStream<'static, (usize, Outgoing)>>;

/// As the IETF's draft has it (draft-ietf-httpapi-idempotency-key-header).
const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// Longest one, bytes: what tells the requests of one call apart is added to it.
const MAX_KEY_BYTES: usize = MAX_IDEMPOTENCY_KEY_BYTES - 8;

/// Memory of an answer that is sent whole: at most so many times what it takes on the wire between
/// processes. A log-probability takes 18 bytes there, 90 here, and 80 more as JSON.
const KEPT_FACTOR: usize = 10;

/// Serves a call, and tells its id: that of its first request. `taken_in` is what its body has of
/// the budget.
pub(super) async fn serve(shared: &Shared, headers: &HeaderMap, call: Call, taken_in: Reservation) -> Response {
    let id = new_request_id();
    let client_id = error::client_id(headers).unwrap_or_default();
    let response = match idempotency_key(headers) {
        Ok(key) => answer(shared, id, client_id, key, call, taken_in).await,
        Err(error) => Err(error),
    };
    let response = response.unwrap_or_else(IntoResponse::into_response);
    ([(REQUEST_ID, id.to_string())], response).into_response()
}

/// Whatever refuses one of a call's requests does so before the answer begins.
async fn answer(
    shared: &Shared,
    id: RequestId,
    client_id: &str,
    key: &str,
    call: Call,
    taken_in: Reservation,
) -> Result<Response, HttpError> {
    let Call { requests, streams, fields, mut answer, .. } = call;
    let refused = |error| HttpError::of(&error, fields);
    let taken_in = Arc::new(taken_in);
    let mut next_id = id;
    let generated = requests.into_iter().enumerate().map(|(index, request)| {
        let id = next_id;
        next_id = id.plus(request.n.max(1));
        let client_request_id = client_id.to_owned();
        let idempotency_key = key_of(key, index);
        let request = v1::GenerateRequest { client_request_id, idempotency_key, ..request };
        shared.frontend.generate(id, request, Some(Arc::clone(&taken_in)))
    });
    let generated = try_join_all(generated);
    // Each request has its share until it is tokens.
    drop(taken_in);
    let responses = generated.await.map_err(refused)?;
    let numbered = responses
        .into_iter()
        .enumerate()
        .map(|(index, responses)| ReceiverStream::new(responses).map(move |it| (index, of_call(id, it))).boxed());
    let mut responses: Fetched = select_all(numbered);
    if streams {
        let events = events(responses, answer, fields).map(Ok::<_, Infallible>);
        return Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response());
    }
    let mut kept = shared.answers.reserve();
    while let Some((index, outgoing)) = responses.next().await {
        let response = outgoing.response.map_err(refused)?;
        kept.grow(kept_bytes(&response)).map_err(|_| HttpError::too_long_to_keep())?;
        answer.take(index, response);
    }
    if !answer.is_whole() {
        return Err(HttpError::cut_off());
    }
    counted_json(answer.body().into_bytes(), kept).map_err(|_| HttpError::too_long_to_keep())
}

/// The body of an answer, and what it has of the budget. The server drops it once its bytes are
/// written to the connection: a client may leave it unread.
struct CountedBody {
    bytes: Vec<u8>,
    _kept: Reservation,
}

impl AsRef<[u8]> for CountedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// An answer of JSON that counts until the client has read it.
pub(super) fn counted_json(body: Vec<u8>, mut kept: Reservation) -> Result<Response, Exhausted> {
    kept.resize(body.len())?;
    let body = Bytes::from_owner(CountedBody { bytes: body, _kept: kept });
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Empty is none.
fn idempotency_key(headers: &HeaderMap) -> Result<&str, HttpError> {
    let Some(given) = headers.get(IDEMPOTENCY_KEY) else { return Ok("") };
    let wrong = || {
        let problem = format!("expected 1 to {MAX_KEY_BYTES} characters of ASCII");
        BadRequest { param: IDEMPOTENCY_KEY.to_owned(), problem }.into()
    };
    given.to_str().ok().filter(|key| (1..=MAX_KEY_BYTES).contains(&key.len())).ok_or_else(wrong)
}

/// Of one of a call's requests. No header has this separator in it.
fn key_of(key: &str, index: usize) -> String {
    match index {
        _ if key.is_empty() => String::new(),
        0 => key.to_owned(),
        _ => format!("{key}\0{index}"),
    }
}

/// With the id of the call: whichever of its requests is heard first, its answer has one.
fn of_call(id: RequestId, mut outgoing: Outgoing) -> Outgoing {
    if let Ok(v1::GenerateResponse { event: Some(Event::Accepted(accepted)), .. }) = &mut outgoing.response {
        accepted.request_id = id.to_string();
    }
    outgoing
}

/// What a part of an answer takes at most. The prompt's tokens fit a context: they are not counted.
fn kept_bytes(response: &v1::GenerateResponse) -> usize {
    match response.event {
        Some(Event::Accepted(_)) => 0,
        _ => response.encoded_len() * KEPT_FACTOR,
    }
}

/// The events of a stream. One that an error ends has the error as its last event: what ends
/// without the API's own end is not whole.
fn events(
    responses: impl Stream<Item = (usize, Outgoing)> + Send + 'static,
    answer: Box<dyn Answer>,
    fields: FieldNames,
) -> impl Stream<Item = SseEvent> {
    struct Stage<S> {
        responses: Pin<Box<S>>,
        answer: Box<dyn Answer>,
        ended: bool,
    }
    let stage = Stage { responses: Box::pin(responses), answer, ended: false };
    let chunks = futures::stream::unfold(stage, move |mut stage| async move {
        if stage.ended {
            return None;
        }
        let failure = match stage.responses.next().await {
            Some((index, Outgoing { response: Ok(response), .. })) => {
                return Some((futures::stream::iter(stage.answer.take(index, response)), stage));
            }
            Some((_, Outgoing { response: Err(error), .. })) => Some(HttpError::of(&error, fields).failure),
            None if !stage.answer.is_whole() => Some(HttpError::cut_off().failure),
            None => None,
        };
        stage.ended = true;
        let last = match failure {
            Some(failure) => vec![stage.answer.failed(&failure)],
            None => stage.answer.last(),
        };
        Some((futures::stream::iter(last), stage))
    });
    chunks.flatten().map(sse_event)
}

fn sse_event(Chunk { event, data }: Chunk) -> SseEvent {
    // The name first: readers of lines go by it.
    let named = event.map_or_else(SseEvent::default, |name| SseEvent::default().event(name));
    named.data(data)
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use baton_intake::Budget;

    use super::*;

    #[tokio::test]
    async fn whole_answer_counts_until_its_bytes_are_dropped() {
        let budget = Budget::new(100);
        let mut kept = budget.reserve();
        kept.grow(70).unwrap();
        let answer = counted_json(vec![b'1'; 40], kept).unwrap();
        let has_room = |bytes| budget.reserve().fits(bytes);
        assert!(has_room(45) && !has_room(46), "what it took while it was made is given back");
        // The server has the whole of the body, and has not written it.
        let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        assert!(body.len() == 40 && !has_room(46));
        drop(body);
        assert!(has_room(75));
    }

    #[test]
    fn answer_without_room_for_its_body_is_refused() {
        let budget = Budget::new(100);
        assert!(counted_json(vec![0; 76], budget.reserve()).is_err());
    }
}
