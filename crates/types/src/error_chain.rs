//! Why something failed, in the words of the code that knows.

use std::error::Error;

/// What the error at the bottom of `error`'s sources says; what `error` says itself, if it has
/// none. Clients say "transport error" (tonic) or "client error (Connect)" (hyper): who refused,
/// and how, is below that.
pub fn innermost(error: &dyn Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// What an error and its sources say, from the top down. Some say their source's words themselves:
/// they are not said again.
pub fn error_chain(error: &dyn Error) -> String {
    with_sources(error.to_string(), error)
}

/// As [`error_chain`], of an error whose own words are `text`.
pub fn with_sources(mut text: String, error: &dyn Error) -> String {
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    enum Failure {
        #[error("transport error")]
        Transport(#[source] Box<Failure>),
        #[error("connect error")]
        Connect(#[source] io::Error),
        #[error("no route")]
        Route,
    }

    #[test]
    fn innermost_error_is_the_deepest_source() {
        let refused = || Failure::Connect(io::Error::other("refused"));
        assert_eq!(innermost(&Failure::Route), "no route", "an error without a source speaks for itself");
        assert_eq!(innermost(&refused()), "refused");
        assert_eq!(innermost(&Failure::Transport(Box::new(refused()))), "refused");
        assert_eq!(innermost(&Failure::Transport(Box::new(Failure::Route))), "no route");
    }
    #[test]
    fn error_chain_repeats_no_message() {
        #[derive(Debug, Error)]
        #[error("/m: {0}")]
        struct Io(#[source] io::Error);

        assert_eq!(error_chain(&Io(io::Error::other("gone"))), "/m: gone");
        let refused = Failure::Transport(Box::new(Failure::Connect(io::Error::other("refused"))));
        assert_eq!(error_chain(&refused), "transport error: connect error: refused");
    }
}
