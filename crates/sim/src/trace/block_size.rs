//! Tokens per block of a trace, which the numbers of its ids tell.

use super::{BLOCK_TOKENS, MAX_BLOCK_TOKENS};

/// The sizes that all lines so far have in common.
pub(super) struct BlockSize {
    given: Option<u32>,
    least: u32,
    most: u32,
}

impl BlockSize {
    pub(super) fn new(given: Option<u32>) -> Self {
        Self { given, least: 1, most: MAX_BLOCK_TOKENS }
    }

    /// Takes in a prompt of so many tokens, the last of whose blocks may be partial.
    pub(super) fn take(&mut self, tokens: u32, ids: usize) -> Result<(), String> {
        if let Some(given) = self.given {
            let blocks = tokens.div_ceil(given);
            let is_right = ids == blocks as usize;
            let problem = || format!("{ids} ids, but {tokens} tokens are {blocks} blocks of {given}");
            return is_right.then_some(()).ok_or_else(problem);
        }
        // All blocks hold the prompt, and all but the last do not.
        let ids = ids as u32;
        let least = self.least.max(tokens.div_ceil(ids));
        let most = if ids > 1 { self.most.min((tokens - 1) / (ids - 1)) } else { self.most };
        if least > most {
            let Self { least, most, .. } = self;
            return Err(format!(
                "{ids} ids for {tokens} tokens: the lines before have {least} to {most} tokens a block"
            ));
        }
        self.least = least;
        self.most = most;
        Ok(())
    }

    /// Mooncake's size if that is possible, else a power of two, else the least.
    pub(super) fn tokens(&self) -> u32 {
        let possible = [BLOCK_TOKENS, self.least.next_power_of_two(), self.least];
        let chosen = possible.into_iter().find(|size| (self.least..=self.most).contains(size));
        self.given.or(chosen).unwrap_or(BLOCK_TOKENS)
    }
}
