//! Takes in the messages of calls, within the budget and in time, if what they hold may be decoded.
//!
//! A call of one message is read before its service is called. The messages of a stream are passed
//! on one by one: each is whole, counted and reserved before the service's decoder sees it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_proto::{MAX_MESSAGE_BYTES, status};
use baton_types::ErrorKind;
use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame};
use tonic::{Code, Status};

use crate::body::{self, BodyError, BodyLimits};
use crate::budget::{Budget, Reservation};
use crate::wire::{Counts, Method, Schema, WireError};

/// When a body for which there is no room may find some.
pub const NO_ROOM_RETRY: Duration = Duration::from_secs(1);

/// Before each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// Memory of an entry of a list beside its bytes, at most.
const ENTRY_BYTES: usize = 1024;
/// Memory of a number of a list, at most: the list grows, and is copied once.
const NUMBER_BYTES: usize = 12;

/// How messages are taken in.
#[derive(Debug)]
pub struct Intake {
    schema: Schema,
    budget: Budget,
    /// Memory that is made of a message besides the entries of its lists.
    memory: fn(&[u8], usize) -> usize,
}

/// What a call's message has of the budget, an extension of the request. The layer gives it back
/// when the answer begins, unless the service takes it.
#[derive(Debug, Clone)]
pub struct MessageBudget(Arc<Mutex<Option<Reservation>>>);

impl MessageBudget {
    /// Takes it, to give it back earlier.
    pub fn take(&self) -> Option<Reservation> {
        // It is there or not.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Intake {
    /// For the services of `descriptors`, which may be those of several files in a row. `memory` is
    /// what is made of a message, which has texts of so many bytes, besides the entries of its
    /// lists.
    ///
    /// # Errors
    /// They are not file descriptors.
    pub fn new(
        descriptors: &[u8],
        budget: Budget,
        memory: fn(&[u8], usize) -> usize,
    ) -> Result<Self, prost::DecodeError> {
        Ok(Self { schema: Schema::new(descriptors)?, budget, memory })
    }

    pub(crate) fn method(&self, path: &str) -> Option<Method> {
        self.schema.method(path)
    }

    /// A call with its whole message, and what it has of the budget.
    async fn read(&self, method: Method, request: Request) -> Result<(Request, Reservation), Status> {
        let (parts, body) = request.into_parts();
        let limits = BodyLimits::new(PREFIX_BYTES + MAX_MESSAGE_BYTES);
        let (bytes, mut reservation) = body::read(body, limits, &self.budget).await.map_err(|error| refused(&error))?;
        self.check(method.input, &bytes, &mut reservation)?;
        Ok((Request::from_parts(parts, Body::from(bytes)), reservation))
    }

    /// Reserves what is made of a message, with its prefix.
    fn check(&self, kind: usize, bytes: &Bytes, reservation: &mut Reservation) -> Result<(), Status> {
        // What is compressed or not one whole message is refused where it is decoded.
        let memory = match bytes.split_at_checked(PREFIX_BYTES) {
            Some(([0, length @ ..], message)) if length == (message.len() as u32).to_be_bytes() => {
                let invalid = |error: WireError| status(ErrorKind::Invalid, error.to_string(), None);
                let Counts { entries, numbers, text_bytes } = self.schema.count(kind, message).map_err(invalid)?;
                (self.memory)(message, text_bytes) + entries * ENTRY_BYTES + numbers * NUMBER_BYTES
            }
            Some(([0, ..], _)) => return Err(status(ErrorKind::Invalid, "the call has not one whole message", None)),
            Some(_) | None => 0,
        };
        body::reserve(reservation, memory).map_err(|error| refused(&error))
    }
}

fn refused(error: &BodyError) -> Status {
    let message = error.to_string().replace(" body", " message");
    match error {
        BodyError::TooLarge(_) | BodyError::TooHeavy { .. } => Status::new(Code::OutOfRange, message),
        BodyError::NoRoom => status(ErrorKind::Overloaded, message, Some(NO_ROOM_RETRY)),
        BodyError::Late(_) => status(ErrorKind::DeadlineExceeded, message, None),
        BodyError::Broken => status(ErrorKind::Cancelled, message, None),
    }
}

/// Layer of the services whose messages are taken in.
pub async fn take_in(State(intake): State<Arc<Intake>>, request: Request, next: Next) -> Response {
    let Some(method) = intake.method(request.uri().path()) else { return next.run(request).await };
    if method.is_stream {
        let request = request.map(|body| Body::new(Messages::new(intake, method.input, body)));
        return next.run(request).await;
    }
    match intake.read(method, request).await {
        Ok((mut request, reservation)) => {
            let reserved = MessageBudget(Arc::new(Mutex::new(Some(reservation))));
            request.extensions_mut().insert(reserved.clone());
            let response = next.run(request).await;
            drop(reserved.take());
            response
        }
        Err(status) => status.into_http(),
    }
}

/// The messages of a stream, each as one frame. What one has of the budget is given back when the
/// next one is asked for.
pub(crate) struct Messages {
    intake: Arc<Intake>,
    /// Their type.
    kind: usize,
    body: Body,
    /// Of what has come and was not passed on.
    reservation: Reservation,
    /// Of the message that was passed on last.
    passed: Option<Reservation>,
    pieces: VecDeque<Bytes>,
    pending: usize,
}

impl Messages {
    pub(crate) fn new(intake: Arc<Intake>, kind: usize, body: Body) -> Self {
        let reservation = intake.budget.reserve();
        Self { intake, kind, body, reservation, passed: None, pieces: VecDeque::new(), pending: 0 }
    }

    fn take_piece(&mut self, piece: Bytes) -> Result<(), Status> {
        // Also of empty pieces: each has its place.
        let bytes = piece.len() + size_of::<Bytes>();
        body::reserve(&mut self.reservation, bytes).map_err(|error| refused(&error))?;
        self.pending += piece.len();
        self.pieces.push_back(piece);
        Ok(())
    }

    /// The next message, with its prefix, if all of it has come.
    fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let mut prefix = self.pieces.iter().flat_map(|piece| piece.iter().copied());
        let prefix: [u8; PREFIX_BYTES] = std::array::from_fn(|_| prefix.next().unwrap_or_default());
        let [_, length @ ..] = prefix;
        let length = u32::from_be_bytes(length) as usize;
        if self.pending >= PREFIX_BYTES && length > MAX_MESSAGE_BYTES {
            return Err(refused(&BodyError::TooLarge(MAX_MESSAGE_BYTES)));
        }
        let whole = PREFIX_BYTES + length;
        if self.pending < whole {
            return Ok(None);
        }
        let message = self.split(whole);
        let mut reservation = self.intake.budget.reserve();
        body::reserve(&mut reservation, whole).map_err(|error| refused(&error))?;
        self.reservation.resize(self.pending + self.pieces.len() * size_of::<Bytes>()).map_err(|_| no_room())?;
        self.intake.check(self.kind, &message, &mut reservation)?;
        self.passed = Some(reservation);
        Ok(Some(message))
    }

    /// Takes so many bytes from the beginning.
    fn split(&mut self, bytes: usize) -> Bytes {
        self.pending -= bytes;
        match self.pieces.front_mut() {
            Some(first) if first.len() > bytes => return first.split_to(bytes),
            Some(first) if first.len() == bytes => return self.pieces.pop_front().unwrap_or_default(),
            _ => {}
        }
        let mut joined = BytesMut::with_capacity(bytes);
        while let Some(mut piece) = self.pieces.pop_front() {
            let rest = piece.split_off(piece.len().min(bytes - joined.len()));
            joined.extend_from_slice(&piece);
            if !rest.is_empty() || joined.len() == bytes {
                self.pieces.push_front(rest);
                break;
            }
        }
        joined.freeze()
    }
}

fn no_room() -> Status {
    refused(&BodyError::NoRoom)
}

impl HttpBody for Messages {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.passed = None;
        loop {
            match self.next() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(Frame::data(message)))),
                Err(status) => return Poll::Ready(Some(Err(status))),
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None if self.pending == 0 => return Poll::Ready(None),
                // The decoder says that it is not whole.
                None => {
                    let pending = self.pending;
                    return Poll::Ready(Some(Ok(Frame::data(self.split(pending)))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(Status::from_error(Box::new(error))))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => {
                        if let Err(status) = self.take_piece(piece) {
                            return Poll::Ready(Some(Err(status)));
                        }
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use baton_proto::{FILE_DESCRIPTORS, v1};
    use http_body_util::BodyExt;
    use prost::Message;

    use super::*;

    const SESSION: &str = "/baton.v1.Node/Session";

    fn intake(budget: usize) -> Arc<Intake> {
        Arc::new(Intake::new(FILE_DESCRIPTORS, Budget::new(budget), |message, _| message.len() * 2).unwrap())
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
    }

    /// What a service is given of a stream that comes in pieces of so many bytes.
    async fn passed(intake: &Arc<Intake>, stream: &[u8], piece: usize) -> Result<Vec<Bytes>, Status> {
        let pieces: Vec<_> =
            stream.chunks(piece).map(|piece| Ok::<_, Infallible>(Bytes::copy_from_slice(piece))).collect();
        let kind = intake.schema.method(SESSION).unwrap().input;
        let mut messages = Messages::new(Arc::clone(intake), kind, Body::from_stream(tokio_stream::iter(pieces)));
        let mut passed = Vec::new();
        while let Some(frame) = messages.frame().await {
            passed.extend(frame?.into_data());
        }
        Ok(passed)
    }

    fn job(tokens: usize) -> Vec<u8> {
        use v1::node_command::Command;
        let job = v1::PrefillJob { tokens: vec![7; tokens], ..Default::default() };
        v1::NodeCommand { command: Some(Command::Prefill(job)) }.encode_to_vec()
    }

    #[tokio::test]
    async fn messages_of_a_stream_are_passed_on_whole() {
        let messages = [framed(&job(1000)), framed(&[]), framed(&job(3))];
        for piece in [1, 7, 1000, 100_000] {
            let intake = intake(1 << 20);
            let given = passed(&intake, &messages.concat(), piece).await.unwrap();
            assert_eq!(given, messages, "{piece}");
            assert_eq!(intake.budget.reserve().grow(700_000), Ok(()), "all was given back");
        }
        let broken = passed(&intake(1 << 20), &messages[0][..500], 100).await.unwrap();
        assert_eq!(broken.concat(), messages[0][..500], "its decoder refuses it");
    }

    #[tokio::test]
    async fn message_of_a_stream_is_counted_before_it_is_decoded() {
        let bad = |words: usize| {
            let sampling = v1::NodeSampling { bad_words: vec![v1::TokenIds::default(); words], ..Default::default() };
            let job = v1::PrefillJob { sampling: Some(sampling), ..Default::default() };
            let command = Some(v1::node_command::Command::Prefill(job));
            framed(&v1::NodeCommand { command }.encode_to_vec())
        };
        let refused = passed(&intake(1 << 30), &bad(70_000), 4096).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "bad_words: more than 65536 entries"));
        let refused = passed(&intake(1 << 20), &bad(1000), 4096).await.unwrap_err();
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let refused = passed(&intake(1 << 20), &framed(&job(100_000)), 4096).await.unwrap_err();
        assert!(refused.code() == Code::OutOfRange && refused.message().contains("bytes of memory"), "{refused}");
        let endless = passed(&intake(1 << 20), &[0, 0xff, 0xff, 0xff, 0xff], 5).await.unwrap_err();
        assert_eq!(endless.code(), Code::OutOfRange);
    }

    #[tokio::test]
    async fn unfinished_messages_of_streams_share_the_budget() {
        let intake = intake(1 << 20);
        let kind = intake.schema.method(SESSION).unwrap().input;
        let mut streams: Vec<_> = (0..16).map(|_| Messages::new(Arc::clone(&intake), kind, Body::empty())).collect();
        let piece = || Bytes::from(vec![0; 64 << 10]);
        let taken: usize =
            streams.iter_mut().map(|stream| (0..16).take_while(|_| stream.take_piece(piece()).is_ok()).count()).sum();
        assert!((8..16).contains(&taken), "{taken} of 64 KiB");
        drop(streams);
        assert_eq!(intake.budget.reserve().grow(700_000), Ok(()));
    }
}
