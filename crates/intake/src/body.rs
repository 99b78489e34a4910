//! Reads the body of a request: within the budget, and in time.
//!
//! That time is the machine's, as is that of the connections: it only bounds how slowly bytes may
//! come, before there is a request.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::budget::{Budget, Reservation};

/// Room made for a body before it comes, bytes.
const FIRST_ROOM: usize = 64 << 10;

/// Bounds of a body.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// Its size.
    pub max_bytes: usize,
    /// Longest between two pieces of it.
    pub progress: Duration,
    /// Longest until its end.
    pub whole: Duration,
}

impl BodyLimits {
    /// Of a body that a client sends.
    pub const fn new(max_bytes: usize) -> Self {
        Self { max_bytes, progress: Duration::from_secs(10), whole: Duration::from_secs(60) }
    }
}

/// Why a body was not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// It is larger than what is ever taken.
    #[error("the body has more than {0} bytes")]
    TooLarge(usize),
    /// What is made of it takes more memory than one body ever gets.
    #[error("the body takes {bytes} bytes of memory, but at most {most} are taken")]
    TooHeavy {
        /// Memory that it takes.
        bytes: usize,
        /// Most that one takes.
        most: usize,
    },
    /// Those of other requests leave no room for it now.
    #[error("other requests leave no room for this body now")]
    NoRoom,
    /// It did not come in time.
    #[error("the body did not come within {0:?}")]
    Late(Duration),
    /// The connection failed.
    #[error("the body broke off")]
    Broken,
}

/// Reserves memory for what is made of a body.
pub fn reserve(reservation: &mut Reservation, bytes: usize) -> Result<(), BodyError> {
    let most = reservation.largest();
    let all = reservation.bytes().saturating_add(bytes);
    if all > most {
        return Err(BodyError::TooHeavy { bytes: all, most });
    }
    reservation.grow(bytes).map_err(|_| BodyError::NoRoom)
}

/// A body, and what it has of the budget.
pub async fn read(body: Body, limits: BodyLimits, budget: &Budget) -> Result<(Bytes, Reservation), BodyError> {
    let mut reservation = budget.reserve();
    if let Some(length) = body.size_hint().exact() {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > limits.max_bytes {
            return Err(BodyError::TooLarge(limits.max_bytes));
        }
        // Refused before it is sent. It is reserved as it comes, so that a length that is announced
        // and never sent keeps no other request out.
        let most = reservation.largest();
        if length > most {
            return Err(BodyError::TooHeavy { bytes: length, most });
        }
        if !reservation.fits(length) {
            return Err(BodyError::NoRoom);
        }
    }
    let reading = timeout(limits.whole, collect(body, limits, &mut reservation)).await;
    let bytes = reading.map_err(|_| BodyError::Late(limits.whole))??;
    Ok((bytes, reservation))
}

async fn collect(mut body: Body, limits: BodyLimits, reservation: &mut Reservation) -> Result<Bytes, BodyError> {
    let mut whole: Option<BytesMut> = None;
    let mut first = Bytes::new();
    let mut total = 0;
    loop {
        let frame = timeout(limits.progress, body.frame()).await.map_err(|_| BodyError::Late(limits.progress))?;
        let Some(frame) = frame else { break };
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        total += data.len();
        if total > limits.max_bytes {
            return Err(BodyError::TooLarge(limits.max_bytes));
        }
        reserve(reservation, data.len())?;
        // Most bodies are one piece.
        match &mut whole {
            Some(whole) => whole.extend_from_slice(&data),
            None if first.is_empty() => first = data,
            None => {
                let mut joined = BytesMut::with_capacity(FIRST_ROOM.max(total));
                joined.extend_from_slice(&first);
                joined.extend_from_slice(&data);
                first = Bytes::new();
                whole = Some(joined);
            }
        }
    }
    Ok(whole.map_or(first, BytesMut::freeze))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn pieces(pieces: &[&'static str]) -> Body {
        let pieces: Vec<_> =
            pieces.iter().map(|piece| Ok::<_, Infallible>(Bytes::from_static(piece.as_bytes()))).collect();
        Body::from_stream(tokio_stream::iter(pieces))
    }

    const fn limits(max_bytes: usize) -> BodyLimits {
        BodyLimits { max_bytes, progress: Duration::from_millis(50), whole: Duration::from_millis(200) }
    }

    #[tokio::test]
    async fn body_chunks_are_joined_and_reserved_in_budget() {
        let budget = Budget::new(100);
        for (given, whole) in [(pieces(&[]), ""), (pieces(&["ab"]), "ab"), (pieces(&["ab", "c", "de"]), "abcde")] {
            let (bytes, mut reservation) = read(given, limits(10), &budget).await.unwrap();
            assert_eq!(bytes, whole);
            assert!(reservation.grow(75 - whole.len()).is_ok() && reservation.grow(1).is_err());
        }
    }

    #[tokio::test]
    async fn body_over_its_limit_or_the_budget_is_refused() {
        let budget = Budget::new(8);
        let error = async |body, max| read(body, limits(max), &budget).await.map(drop).unwrap_err();
        assert_eq!(error(pieces(&["abc", "def"]), 5).await, BodyError::TooLarge(5));
        assert_eq!(error(Body::from("abcdef"), 5).await, BodyError::TooLarge(5));
        let never = BodyError::TooHeavy { bytes: 7, most: 6 };
        assert_eq!(error(Body::from("abcdefg"), 10).await, never, "also if there is no other");
        assert_eq!(error(pieces(&["abc", "defg"]), 10).await, never);
        let mut other = budget.reserve();
        other.grow(4).unwrap();
        assert_eq!(error(Body::from("abcd"), 10).await, BodyError::NoRoom);
        assert_eq!(error(pieces(&["ab", "cd"]), 10).await, BodyError::NoRoom);
        drop(other);
        assert!(read(Body::from("abc"), limits(10), &budget).await.is_ok(), "all was given back");
    }

    #[tokio::test]
    async fn stalled_or_slow_body_times_out() {
        let budget = Budget::new(100);
        let limits = limits(100);
        let silent = Body::from_stream(tokio_stream::pending::<Result<Bytes, Infallible>>());
        assert_eq!(read(silent, limits, &budget).await.map(drop), Err(BodyError::Late(limits.progress)));
        let slow = futures::stream::unfold((), |()| async {
            baton_runtime::sleep(Duration::from_millis(20)).await;
            Some((Ok::<_, Infallible>(Bytes::from_static(b"x")), ()))
        });
        let slow = Body::from_stream(slow);
        assert_eq!(read(slow, limits, &budget).await.map(drop), Err(BodyError::Late(limits.whole)));
    }
}
