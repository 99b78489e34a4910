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
mod compiler;
mod form;
mod matcher;
mod place;
mod problem;
mod schema;

pub use answer::{Answer, Calls, Thoughts, Tool};
pub use compiler::GrammarCompiler;
pub use form::Form;
pub use matcher::{Mask, Matcher};
pub use place::CheckedGrammar;

use baton_types::MAX_GRAMMAR_BYTES;

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
    /// What was drawn does not follow it, or it costs too much to go on.
    #[error("the output cannot go on as its form asks: {0}")]
    Stuck(String),
}
