//! Why a command failed.

use std::io;

use baton_bench::BenchError;
use baton_proto::{RETRY_AFTER_METADATA, kind_of_status, reason_of_status};
use baton_sim::SimulateError;
use baton_types::ErrorKind;
use tonic::{Code, Status};

use crate::args::GenerateArgs;

/// Why a command failed: one line for people, and an exit status for scripts.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// What was given is wrong.
    #[error("{field}: {problem}")]
    Invalid {
        /// The flag or field.
        field: String,
        /// What is wrong with it and what is taken.
        problem: String,
    },
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    /// No conductor answers there.
    #[error(
        "no conductor answers at {address}: {reason} (--conductor takes a conductor's gRPC address, or that of its \
         --operators; `baton up` starts a cluster)"
    )]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        reason: String,
    },
    /// What is asked does not have the call.
    #[error(
        "{}{said} (--conductor takes the gRPC address of a conductor for generate and chat, and that of its \
         --operators, if it has one, for other commands)",
        prefix(address)
    )]
    NotServed {
        /// Where, if that is known.
        address: String,
        /// What it said.
        said: String,
    },
    /// The conductor refused, or gave up.
    #[error("{message}{}", retry_hint(*.retry_after_s))]
    Refused {
        /// What to do about it.
        kind: ErrorKind,
        /// Why.
        message: String,
        /// Seconds after which a retry may succeed.
        retry_after_s: Option<u64>,
    },
    /// Ctrl-C.
    #[error("{0}")]
    Interrupted(String),
    /// A process of the cluster failed.
    #[error("{0}")]
    Cluster(String),
    /// A bench failed.
    #[error(transparent)]
    Bench(BenchError),
    /// A simulation could not be made.
    #[error(transparent)]
    Simulate(SimulateError),
    /// What was asked for cannot be written.
    #[error("output: {0}")]
    Output(#[from] io::Error),
}

fn retry_hint(after_s: Option<u64>) -> String {
    after_s.map_or_else(String::new, |s| format!(" (retry after {s} s)"))
}

fn prefix(address: &str) -> String {
    if address.is_empty() { String::new() } else { format!("{address}: ") }
}

impl CliError {
    /// The same, of a command that asked this address.
    pub fn at(self, asked: &str) -> Self {
        match self {
            Self::NotServed { address, said } if address.is_empty() => {
                Self::NotServed { address: asked.to_owned(), said }
            }
            other => other,
        }
    }

    /// A wrong flag or field.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), problem: problem.into() }
    }

    /// The same, of a request that was taken in: its id is what `baton explain` wants to know. An
    /// empty id is none.
    pub fn of_request(self, id: &str) -> Self {
        match self {
            Self::Refused { kind, message, retry_after_s } if !id.is_empty() => {
                Self::Refused { kind, message: format!("{message} (request {id})"), retry_after_s }
            }
            other => other,
        }
    }

    /// The same, with the name of the flag if a field of the request is wrong that one sets.
    pub fn with_flag(self) -> Self {
        match self {
            Self::Refused { kind: ErrorKind::Invalid, message, retry_after_s } => {
                let flag =
                    message.split_once(':').and_then(|(field, rest)| Some((GenerateArgs::flag_of(field)?, rest)));
                let message = flag.map(|(flag, rest)| format!("{flag}:{rest}")).unwrap_or(message);
                Self::Refused { kind: ErrorKind::Invalid, message, retry_after_s }
            }
            other => other,
        }
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::Usage(_) | Self::NotServed { .. } => ErrorKind::Invalid,
            Self::Unreachable { .. } => ErrorKind::Unavailable,
            Self::Refused { kind, .. } => *kind,
            Self::Interrupted(_) => ErrorKind::Cancelled,
            Self::Bench(error) => error.kind(),
            Self::Simulate(error) => error.kind(),
            Self::Cluster(_) | Self::Output(_) => ErrorKind::Internal,
        }
    }

    /// 2: the request is wrong. 3: overloaded. 4: unavailable. 130: Ctrl-C. 1: everything else. 0
    /// if the reader of stdout has seen enough.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Interrupted(_) => 130,
            Self::Output(_) if self.is_closed_pipe() => 0,
            _ => match self.kind() {
                ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Conflict => 2,
                ErrorKind::Overloaded => 3,
                ErrorKind::Unavailable => 4,
                _ => 1,
            },
        }
    }

    /// The line for stderr; none if there is nothing to say.
    pub fn line(&self, json: bool) -> Option<String> {
        if self.is_closed_pipe() || matches!(self, Self::Bench(BenchError::Reported)) {
            return None;
        }
        // What a server or a file says may hold line breaks.
        let message = self.to_string().replace(['\n', '\r'], " ");
        if json {
            let error = serde_json::json!({ "error": { "kind": self.kind().as_str(), "message": message } });
            return Some(error.to_string());
        }
        Some(format!("baton: {message}"))
    }

    fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl From<clap::Error> for CliError {
    /// What is wrong, without the usage that a person is shown behind it.
    fn from(error: clap::Error) -> Self {
        let text = error.to_string();
        let problem = text.split("\nUsage:").next().unwrap_or_default();
        let problem = problem.split("\nFor more information").next().unwrap_or_default();
        let words: Vec<_> = problem.split_whitespace().collect();
        Self::Usage(words.join(" ").trim_start_matches("error: ").to_owned())
    }
}

impl From<SimulateError> for CliError {
    fn from(error: SimulateError) -> Self {
        match error {
            SimulateError::Output(error) => Self::Output(error),
            other => Self::Simulate(other),
        }
    }
}

impl From<BenchError> for CliError {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Interrupted(signal) => Self::Interrupted(format!("interrupted by {signal}")),
            BenchError::Output(error) => Self::Output(error),
            other => Self::Bench(other),
        }
    }
}

impl From<Status> for CliError {
    fn from(status: Status) -> Self {
        let kind = kind_of_status(&status);
        let broken = std::error::Error::source(&status).is_some();
        if status.code() == Code::Unimplemented && !broken {
            let said = match status.message() {
                "" => "this port does not serve the call".to_owned(),
                said => said.to_owned(),
            };
            return Self::NotServed { address: String::new(), said };
        }
        let message = match (broken, status.message()) {
            (true, _) => format!("the connection to the conductor broke: {}", reason_of_status(&status)),
            (false, "") => format!("the conductor gave no reason ({kind})"),
            (false, message) => message.to_owned(),
        };
        // What a wrong request is told says it all.
        let id = status.metadata().get("x-request-id").and_then(|id| id.to_str().ok());
        let id = id.filter(|_| kind != ErrorKind::Invalid);
        let message = id.map(|id| format!("{message} (request {id})")).unwrap_or(message);
        let retry_after_s =
            status.metadata().get(RETRY_AFTER_METADATA).and_then(|value| value.to_str().ok()?.parse().ok());
        Self::Refused { kind, message, retry_after_s }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn exit_status_follows_the_error_kind() {
        let status_of = |kind| CliError::from(baton_proto::status(kind, "m", None)).exit_status();
        let statuses: Vec<u8> = ErrorKind::ALL.into_iter().map(status_of).collect();
        assert_eq!(statuses, [2, 3, 4, 1, 1, 2, 2, 1, 1]);
        assert_eq!(CliError::Interrupted("x".into()).exit_status(), 130);
        assert_eq!(CliError::Output(io::ErrorKind::StorageFull.into()).exit_status(), 1);
        let closed = CliError::Output(io::ErrorKind::BrokenPipe.into());
        assert_eq!((closed.exit_status(), closed.line(false)), (0, None));
    }

    #[test]
    fn call_to_a_wrong_port_names_the_address_and_the_flag() {
        let error = CliError::from(Status::unimplemented("this port does not serve /x")).at("h:1");
        assert_eq!(error.exit_status(), 2);
        let said = error.to_string();
        assert!(said.starts_with("h:1: this port does not serve /x (--conductor takes "), "{said}");
        assert!(
            CliError::from(Status::unimplemented("")).to_string().starts_with("this port does not serve the call (")
        );
    }

    #[test]
    fn refusal_is_one_line_with_its_retry_hint() {
        let status = baton_proto::status(ErrorKind::Overloaded, "full:\n9 of 9", Some(Duration::from_millis(1_500)));
        let error = CliError::from(status);
        assert_eq!(error.line(false).unwrap(), "baton: full: 9 of 9 (retry after 2 s)");
        let json: serde_json::Value = serde_json::from_str(&error.line(true).unwrap()).unwrap();
        assert_eq!(json["error"]["kind"], "overloaded");
        let mut status = baton_proto::status(ErrorKind::Unavailable, "no node is ready", None);
        status.metadata_mut().insert("x-request-id", "07".parse().unwrap());
        assert_eq!(CliError::from(status).to_string(), "no node is ready (request 07)");
    }
}
