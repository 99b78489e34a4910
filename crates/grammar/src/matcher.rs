//! One output's way through its grammar.

use baton_types::TokenId;
use llguidance::{CancellationHandle, Matcher as Inner};
use toktrie::SimpleVob;

use crate::GrammarError;
use crate::budget::cancel_when_spent;
use crate::problem::{TOO_COMPLEX, problem};

/// Which tokens may come next.
#[derive(Debug, Clone)]
pub struct Mask(pub(crate) SimpleVob);

impl Mask {
    /// A bit per token, from the lowest bit of the first word on. Tokens beyond its end may not
    /// come.
    pub fn words(&self) -> &[u32] {
        self.0.as_slice()
    }

    /// Whether this token may come.
    pub fn allows(&self, token: TokenId) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }
}

/// One output's way through its grammar.
#[derive(Clone)]
pub struct Matcher {
    inner: Inner,
    /// Which compilation it comes from: clones share what they find out of the grammar, and its
    /// bound.
    compilation: u64,
    taken: usize,
}

impl Matcher {
    pub(crate) fn new(inner: Inner, compilation: u64) -> Self {
        Self { inner, compilation, taken: 0 }
    }

    pub(crate) fn compilation(&self) -> u64 {
        self.compilation
    }

    /// Ends what another thread does with it. What ended so is of no use any more.
    pub fn cancellation(&self) -> Option<CancellationHandle> {
        self.inner.cancellation_handle()
    }

    /// How many tokens it has taken.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Takes the next tokens of the output.
    ///
    /// # Errors
    /// One of them is none that [`Self::mask`] allows.
    pub fn take(&mut self, tokens: &[TokenId]) -> Result<(), GrammarError> {
        self.inner.consume_tokens(tokens).map_err(|error| stuck(&error))?;
        self.taken += tokens.len();
        Ok(())
    }

    /// Which tokens may come next: the end tokens alone if the grammar is at its end.
    ///
    /// # Errors
    /// To find out costs more than it may, or nothing may.
    pub fn mask(&mut self) -> Result<Mask, GrammarError> {
        let mask = self.inner.compute_mask_or_eos().map_err(|error| stuck(&error))?;
        if mask.is_zero() {
            return Err(GrammarError::Stuck("no token may come next".to_owned()));
        }
        Ok(Mask(mask))
    }

    /// Whether there is a mask at the beginning, and one after a token that may come first.
    pub(crate) fn try_one(&self, eos: &[TokenId]) -> Result<(), GrammarError> {
        // What is tried may be cancelled, and this one stays good.
        let mut tried = self.clone();
        cancel_when_spent(tried.cancellation());
        let mask = tried.mask()?;
        let Some(first) = mask.0.iter().find(|token| !eos.contains(token)) else { return Ok(()) };
        tried.take(&[first])?;
        tried.mask().map(drop)
    }
}

fn stuck(error: &impl std::fmt::Display) -> GrammarError {
    let error = error.to_string();
    // Of a grammar that compiled, its lexer has run out of states.
    let is_worn = error.contains("lexer error");
    GrammarError::Stuck(if is_worn { TOO_COMPLEX.to_owned() } else { problem("", &error) })
}
