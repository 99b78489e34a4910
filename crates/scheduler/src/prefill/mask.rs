//! Masks of structured output: the chunk that draws a request's first token waits until the mask of
//! that is made, and no other request waits for it.

use std::ops::Range;
use std::time::Instant;

use baton_types::{RequestKey, TokenId, TokenLogprobs};

use super::PrefillCore;

impl PrefillCore {
    /// The mask of a request's first token is made. Others are ignored.
    pub fn on_mask_ready(&mut self, now: Instant, key: RequestKey) {
        if self.awaiting_mask.remove(&key) {
            self.plan_step(now);
        }
    }

    /// A step computed the end of a prompt, and drew no token: its mask was late. An earlier step,
    /// whose results meant nothing, may have used the one that was made ahead. The last row is
    /// computed again, since the token is drawn from it.
    pub(super) fn sit_out(&mut self, key: RequestKey, range: &Range<usize>, prompt_logprobs: Vec<TokenLogprobs>) {
        let Some(request) = self.active.get_mut(&key) else { return };
        request.num_computed_tokens = range.end - 1;
        request.prompt_logprobs.extend(prompt_logprobs.into_iter().take(range.len() - 1));
        self.awaiting_mask.insert(key);
    }

    /// The output that came with a request whose token is still to be drawn; `None` if there is
    /// none such.
    pub fn output(&self, key: RequestKey) -> Option<&[TokenId]> {
        let queued = self.queued.get(&key).map(|request| &request.job);
        let active = || self.active.get(&key).filter(|request| !request.ended && request.first_token.is_none());
        let job = queued.or_else(|| active().map(|request| &request.job))?;
        Some(&job.tokens[job.tokens.len() - job.output_tokens as usize..])
    }
}
