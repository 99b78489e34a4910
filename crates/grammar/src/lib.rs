//! Structured output: grammars, compiled against a vocabulary, that say which tokens may come next.
//!
//! The conductor writes a grammar ([`Form`]) and compiles it to refuse what cannot be; nodes
//! compile it to mask ([`Matcher`]). A matcher is a function of the grammar and the output so far:
//! a sequence that moves to another node needs nothing else.
//!
//! **Invariant**: no grammar takes more memory, stack or time than
//! [`compile`](GrammarCompiler::compile)'s bounds; a panic of the library is an error here.
//!
//! Grammars are those of [llguidance](https://github.com/guidance-ai/llguidance), in its dialect of
//! Lark.

// Tests read the clock.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod answer;
mod budget;
mod compiler;
mod form;
mod matcher;
mod place;
mod problem;
mod schema;
mod verdicts;

pub use answer::{Answer, Calls, Thoughts, Tool};
pub use budget::{lowest_priority, thread_time};
pub use compiler::GrammarCompiler;
pub use form::Form;
pub use matcher::{Mask, Matcher};
pub use place::CheckedGrammar;

pub use llguidance::CancellationHandle;

use std::time::Duration;

use baton_types::MAX_GRAMMAR_BYTES;

/// How much a check of an answer's grammar may cost. Many that cost much do not delay one that
/// costs little if each is tried with less first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Nothing: what came of the last checks is remembered.
    Known,
    /// A few milliseconds: schemas of some KiB.
    Small,
    /// What is served at most.
    Full,
}

impl Effort {
    /// Processor time of everything that is done for an answer's grammar: to write it, to compile
    /// it, and to find the place that is refused. Schemas of 60 KiB take up to 40 ms.
    pub(crate) const fn budget(self) -> Duration {
        match self {
            Self::Known => Duration::ZERO,
            Self::Small => Duration::from_millis(20),
            Self::Full => Duration::from_millis(150),
        }
    }
}

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It is larger than what is taken.
    #[error("{bytes} bytes, but at most {MAX_GRAMMAR_BYTES} are taken")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// It is no grammar, or one that costs too much.
    #[error("{0}")]
    Invalid(String),
    /// With more [`Effort`] it may turn out to be one.
    #[error("it takes longer to compile than was tried")]
    Costly,
    /// There is no thread to compile it on.
    #[error("no thread to compile it: {0}")]
    NoThread(String),
    /// What was drawn does not follow it, or it costs too much to go on.
    #[error("the output cannot go on as its form asks: {0}")]
    Stuck(String),
}
