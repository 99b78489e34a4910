//! Why a request was not served.

use std::time::Duration;

use baton_api::TooLong;
use baton_scheduler::RequestError;
use baton_types::{ErrorKind, Slo};

/// Why a request was not served, or not to its end.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// The request is wrong.
    #[error("{field}: {problem}")]
    Invalid {
        /// Field of the request.
        field: &'static str,
        /// What is wrong with it and what is taken.
        problem: String,
    },
    /// The prompt leaves no room for an answer.
    #[error("prompt: {0}")]
    TooLong(TooLong),
    /// Something that the request names does not exist.
    #[error("{field}: {problem}")]
    NotFound {
        /// Field of the request.
        field: &'static str,
        /// What does not exist.
        problem: String,
    },
    /// The conductor itself has no room for it.
    #[error("{message}")]
    Frontend {
        /// What to do about it.
        kind: ErrorKind,
        /// Why.
        message: String,
        /// When a retry may succeed.
        retry_after: Option<Duration>,
    },
    /// It was refused when it was to be placed, or did not get to its end.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl GenerateError {
    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::TooLong(_) => ErrorKind::Invalid,
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Frontend { kind, .. } => *kind,
            Self::Request(error) => error.kind(),
        }
    }

    /// Every [`GenerateError::stage`].
    pub const STAGES: [&'static str; 4] = ["validation", "conductor", "admission", "placement"];

    /// The stage that rejected it, if it was not admitted.
    pub fn stage(&self) -> &'static str {
        match self {
            Self::TooLong(too_long) if too_long.fits_context() => "placement",
            Self::Invalid { .. } | Self::TooLong(_) | Self::NotFound { .. } => "validation",
            Self::Frontend { .. } | Self::Request(RequestError::GoingDown) => "conductor",
            Self::Request(error) if error.kind() == ErrorKind::Overloaded => "admission",
            Self::Request(_) => "placement",
        }
    }

    /// When a retry may succeed.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Frontend { retry_after, .. } => *retry_after,
            Self::Request(RequestError::Refused(refusal)) => refusal.retry_after,
            Self::Request(RequestError::Node { refused, .. })
                if matches!(refused.kind, ErrorKind::Overloaded | ErrorKind::Unavailable) =>
            {
                Some(Duration::from_secs(1))
            }
            // At another conductor, or at this one once it is back.
            Self::Request(RequestError::GoingDown) => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// What its client is told: nothing of the nodes and what they said. That is in the log and in
    /// the request's record, by its id.
    pub fn told(&self) -> String {
        match self {
            // What is wrong with the request itself says nothing of the node.
            Self::Request(RequestError::Node { refused, .. }) if refused.kind == ErrorKind::Invalid => {
                refused.message.clone()
            }
            Self::Request(RequestError::Node { refused, .. }) => {
                format!("a node could not serve the request: {}", refused.kind.as_str())
            }
            Self::Request(RequestError::NodesDied(_)) => {
                "nodes died or hung while they had the request: it is not tried again".to_owned()
            }
            Self::Request(RequestError::Contradicted(_)) => {
                "the answer could not be continued as it was begun: the request was ended".to_owned()
            }
            told => told.to_string(),
        }
    }

    /// Whether its client gave it up.
    pub fn is_aborted(&self) -> bool {
        matches!(self, Self::Request(RequestError::Aborted))
    }

    /// The same, with who set the objective that would be missed: the request, with its `own`
    /// objectives, or the conductor for all requests.
    pub fn with_setter(mut self, own: Slo) -> Self {
        if let Self::Request(RequestError::Refused(refusal)) = &mut self
            && let Some(objective) = refusal.objective
        {
            let setting = objective.setting();
            let setter = if own.has(objective) { "the request's" } else { "the conductor's" };
            refusal.message.push_str(&format!(" ({setter} {setting})"));
        }
        self
    }

    /// Whether even idle nodes would miss an objective of the request: a retry finds the same.
    pub fn is_out_of_reach(&self) -> bool {
        matches!(self, Self::Request(RequestError::Refused(refusal)) if refusal.is_out_of_reach())
    }

    /// Says in the error how many tokens of output the request asks for, if it says that.
    pub fn with_completion(mut self, asked: Option<u32>) -> Self {
        if let Self::TooLong(too_long) = &mut self {
            too_long.completion_tokens = asked;
        }
        self
    }

    /// There is too much to do: a retry may find less.
    pub fn overloaded(message: impl Into<String>) -> Self {
        let retry_after = Some(Duration::from_secs(1));
        Self::Frontend { kind: ErrorKind::Overloaded, message: message.into(), retry_after }
    }

    /// A wrong field.
    pub fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }
}

impl From<&GenerateError> for tonic::Status {
    fn from(error: &GenerateError) -> Self {
        baton_proto::status(error.kind(), error.told(), error.retry_after())
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{NodeId, Objective, Refusal, Refused, Ttft};

    use super::*;

    #[test]
    fn refusal_for_an_objective_names_who_set_it() {
        let message = "the objective is 1ms".to_owned();
        let kind = ErrorKind::Overloaded;
        let objective = Some(Objective::Ttft);
        let refusal = Refusal { kind, message, retry_after: None, hold: None, objective };
        let error = GenerateError::from(RequestError::Refused(refusal));
        assert!(error.is_out_of_reach());
        let own = Slo { ttft: Some(Ttft(Duration::from_millis(1))), tbt: None };
        assert_eq!(error.clone().with_setter(own).told(), "the objective is 1ms (the request's ttft_slo_ms)");
        let theirs = Slo { ttft: None, ..own };
        assert_eq!(error.with_setter(theirs).told(), "the objective is 1ms (the conductor's ttft_slo_ms)");
    }

    #[test]
    fn error_message_to_client_names_no_node() {
        let refused = Refused { kind: ErrorKind::Unavailable, message: "prefill-7 lost 10.0.0.7:7100".into() };
        let node = NodeId::new("prefill-7").unwrap();
        let error = GenerateError::from(RequestError::Node { node, refused });
        assert_eq!(tonic::Status::from(&error).message(), "a node could not serve the request: unavailable");
        assert!(error.to_string().contains("prefill-7"), "the log is told");
        let error = GenerateError::from(RequestError::Contradicted("decode-1: token 3 twice".into()));
        assert!(!error.told().contains("decode-1"));
    }
}
