//! A call from its requests to its answer, whole or as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use axum::http::{HeaderValue, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use baton_api::{Answer, Call, Chunk, FieldNames};
use baton_proto::v1;
use futures::future::try_join_all;
use futures::stream::{BoxStream, SelectAll, StreamExt, select_all};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

use super::error::{HttpError, REQUEST_ID};
use crate::budget::Reservation;
use crate::front_door::{FrontDoor, Outgoing};

/// What the requests of a call bring, each with its number.
type Brought = SelectAll<BoxStream<'static, (usize, Outgoing)>>;

/// Serves a call. Whatever refuses one of its requests does so before the answer begins. `taken_in` is what its body has of the budget.
pub(super) async fn serve(door: &Arc<FrontDoor>, call: Call, taken_in: Reservation) -> Result<Response, HttpError> {
    let Call { requests, streams, fields, mut answer } = call;
    let refused = |error| HttpError::of(&error, fields);
    let responses = try_join_all(requests.into_iter().map(|request| door.generate(request))).await.map_err(refused)?;
    drop(taken_in);
    let numbered = responses
        .into_iter()
        .enumerate()
        .map(|(index, responses)| ReceiverStream::new(responses).map(move |outgoing| (index, outgoing)).boxed());
    let mut brought: Brought = select_all(numbered);
    // The first that each says is who it is.
    let first = brought.next().await;
    let id = first.as_ref().and_then(request_id);
    let mut brought = futures::stream::iter(first).chain(brought);
    let response = if streams {
        let events = events(brought, answer, fields).map(Ok::<_, Infallible>);
        Sse::new(events).keep_alive(KeepAlive::default()).into_response()
    } else {
        while let Some((index, outgoing)) = brought.next().await {
            answer.take(index, outgoing.response.map_err(refused)?);
        }
        if !answer.is_whole() {
            return Err(HttpError::cut_off());
        }
        ([(header::CONTENT_TYPE, "application/json")], answer.body()).into_response()
    };
    Ok((id.map(|id| [(REQUEST_ID, id)]), response).into_response())
}

/// Our id of a request.
fn request_id((_, first): &(usize, Outgoing)) -> Option<HeaderValue> {
    let Some(v1::generate_response::Event::Accepted(accepted)) = &first.response.as_ref().ok()?.event else {
        return None;
    };
    HeaderValue::from_str(&accepted.request_id).ok()
}

/// The events of a stream. One that an error ends has the error as its last event: what ends without the API's own end is not whole.
fn events(
    brought: impl Stream<Item = (usize, Outgoing)> + Send + 'static,
    answer: Box<dyn Answer>,
    fields: FieldNames,
) -> impl Stream<Item = SseEvent> {
    struct Stage<S> {
        brought: Pin<Box<S>>,
        answer: Box<dyn Answer>,
        ended: bool,
    }
    let stage = Stage { brought: Box::pin(brought), answer, ended: false };
    let chunks = futures::stream::unfold(stage, move |mut stage| async move {
        if stage.ended {
            return None;
        }
        let failure = match stage.brought.next().await {
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
    let data = SseEvent::default().data(data);
    match event {
        Some(name) => data.event(name),
        None => data,
    }
}
