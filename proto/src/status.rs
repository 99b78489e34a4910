//! One table: what a kind of error looks like to gRPC and HTTP clients.

use std::time::Duration;

use baton_types::ErrorKind;
use tonic::{Code, Status};

/// Trailer of a refusal: seconds after which a retry may succeed.
pub const RETRY_AFTER_METADATA: &str = "retry-after";

const TABLE: [(ErrorKind, Code, u16); 9] = [
    (ErrorKind::Invalid, Code::InvalidArgument, 400),
    (ErrorKind::Overloaded, Code::ResourceExhausted, 429),
    (ErrorKind::Unavailable, Code::Unavailable, 503),
    (ErrorKind::Cancelled, Code::Cancelled, 499),
    (ErrorKind::DeadlineExceeded, Code::DeadlineExceeded, 504),
    (ErrorKind::NotFound, Code::NotFound, 404),
    (ErrorKind::Conflict, Code::AlreadyExists, 409),
    (ErrorKind::DataLoss, Code::DataLoss, 500),
    (ErrorKind::Internal, Code::Internal, 500),
];

/// The gRPC status of an error; a retry hint goes into the metadata, rounded up to whole seconds as
/// in HTTP.
pub fn status(kind: ErrorKind, message: impl Into<String>, retry_after: Option<Duration>) -> Status {
    let code = TABLE.iter().find(|row| row.0 == kind).map_or(Code::Unknown, |row| row.1);
    let mut status = Status::new(code, message);
    if let Some(after) = retry_after {
        let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
        status.metadata_mut().insert(RETRY_AFTER_METADATA, seconds.into());
    }
    status
}

/// The HTTP status of an error.
pub fn http_status(kind: ErrorKind) -> u16 {
    TABLE.iter().find(|row| row.0 == kind).map_or(500, |row| row.2)
}

/// The kind that a peer's status stands for. What gRPC itself reports of a connection that broke,
/// or that takes no more requests, is `Unavailable`.
pub fn kind_of_status(status: &Status) -> ErrorKind {
    match status.code() {
        Code::Unknown | Code::Cancelled if std::error::Error::source(status).is_some() => ErrorKind::Unavailable,
        code => TABLE.iter().find(|row| row.1 == code).map_or(ErrorKind::Internal, |row| row.0),
    }
}

/// What a status says, and what caused it: gRPC's own messages (`tcp connect error`) keep the
/// reason in their sources.
pub fn reason_of_status(status: &Status) -> String {
    baton_types::with_sources(status.message().to_owned(), status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_of_status_has_its_causes_once() {
        let refused = std::io::Error::from_raw_os_error(111);
        let status = Status::from_error(Box::new(refused));
        assert!(reason_of_status(&status).contains("Connection refused"), "{}", reason_of_status(&status));
        assert_eq!(reason_of_status(&status).matches("Connection refused").count(), 1);
        assert_eq!(reason_of_status(&Status::internal("plain")), "plain");
    }

    #[test]
    fn status_code_maps_back_to_its_error_kind() {
        for (kind, code, http) in TABLE {
            assert_eq!(status(kind, "m", None).code(), code);
            assert_eq!(kind_of_status(&status(kind, "m", None)), kind);
            assert_eq!(http_status(kind), http);
        }
        let hint = status(ErrorKind::Overloaded, "full", Some(Duration::from_millis(1_200)));
        assert_eq!(hint.metadata().get(RETRY_AFTER_METADATA).unwrap(), "2");
    }
}
