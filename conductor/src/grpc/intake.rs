//! Takes in the message of a call, within the budget and in time, if its lists can be decoded at
//! their length.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_proto::{MAX_MESSAGE_BYTES, status};
use baton_types::ErrorKind;
use bytes::Bytes;
use tonic::{Code, Status};

use super::wire::{Schema, WireError};
use crate::body::{self, BodyError, BodyLimits};
use crate::budget::{Budget, Reservation};
use crate::error::NO_ROOM_RETRY;

/// Before each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// Memory of an entry of a list beside its bytes, at most.
const ENTRY_BYTES: usize = 256;
/// A message is there three times at once: as it came, as the decoder's copy, and decoded.
const COPIES: usize = 3;

/// How messages are taken in.
#[derive(Debug)]
pub struct Intake {
    schema: Schema,
    budget: Budget,
}

/// What a call's message has of the budget, an extension of the request; to be kept until the
/// request was taken in.
#[derive(Debug, Clone)]
pub struct MessageBudget {
    _reservation: Arc<Reservation>,
}

impl Intake {
    /// For the services of `descriptors`.
    ///
    /// # Errors
    /// They are not file descriptors.
    pub fn new(descriptors: &[u8], budget: Budget) -> Result<Self, prost::DecodeError> {
        Ok(Self { schema: Schema::new(descriptors)?, budget })
    }

    async fn read(&self, input: usize, request: Request) -> Result<Request, Status> {
        let (mut parts, body) = request.into_parts();
        let limits = BodyLimits::new(PREFIX_BYTES + MAX_MESSAGE_BYTES);
        let (bytes, reservation) = body::read(body, limits, &self.budget).await.map_err(|error| refused(&error))?;
        let reservation = self.checked(input, &bytes, reservation)?;
        parts.extensions.insert(MessageBudget { _reservation: Arc::new(reservation) });
        Ok(Request::from_parts(parts, Body::from(bytes)))
    }

    fn checked(&self, input: usize, bytes: &Bytes, mut reservation: Reservation) -> Result<Reservation, Status> {
        // What is compressed or not one whole message is refused where it is decoded.
        let entries = match bytes.split_at_checked(PREFIX_BYTES) {
            Some(([0, length @ ..], message)) if length == (message.len() as u32).to_be_bytes() => {
                let invalid = |error: WireError| status(ErrorKind::Invalid, error.to_string(), None);
                self.schema.count(input, message).map_err(invalid)?
            }
            Some(([0, ..], _)) => return Err(status(ErrorKind::Invalid, "the call has not one whole message", None)),
            Some(_) | None => 0,
        };
        let decoded = bytes.len() * (COPIES - 1) + entries * ENTRY_BYTES;
        reservation.grow(decoded).map_err(|_| refused(&BodyError::NoRoom))?;
        Ok(reservation)
    }
}

fn refused(error: &BodyError) -> Status {
    let message = error.to_string().replace("body", "message");
    match error {
        BodyError::TooLarge(_) => Status::new(Code::OutOfRange, message),
        BodyError::NoRoom => status(ErrorKind::Overloaded, message, Some(NO_ROOM_RETRY)),
        BodyError::Late(_) => status(ErrorKind::DeadlineExceeded, message, None),
        BodyError::Broken => status(ErrorKind::Cancelled, message, None),
    }
}

/// Layer of the services whose calls have one message.
pub async fn take_in(State(intake): State<Arc<Intake>>, request: Request, next: Next) -> Response {
    let Some(input) = intake.schema.input(request.uri().path()) else { return next.run(request).await };
    match intake.read(input, request).await {
        Ok(request) => next.run(request).await,
        Err(status) => status.into_http(),
    }
}
