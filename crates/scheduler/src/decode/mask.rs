//! Masks of structured output: a sequence is in no step before the mask of its next token can be
//! there.
//!
//! ```text
//!   on_submit, on_handoff ─▶ awaits its mask ─ on_mask_ready ─▶ joins the batch ─▶ step ─ the mask was made in time ─▶ token
//!                                   └──────────────────────── its last row again ◀───── late: it sits out ┘
//! ```
//!
//! A grammar that takes long to compile, or a mask that does, delays its own sequence alone.

use std::ops::Range;
use std::time::Instant;

use baton_types::{RequestKey, TokenId, TokenLogprobs};

use super::DecodeCore;
use super::sequence::Origin;

impl DecodeCore {
    /// The mask of a sequence's next token is made: the sequence goes on. Others are ignored.
    pub fn on_mask_ready(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.awaits_mask = false;
        self.plan_step(now);
    }

    /// The output of a sequence so far; `None` if it is not here.
    pub fn output(&self, key: RequestKey) -> Option<&[TokenId]> {
        let sequence = self.sequences.get(&key)?;
        Some(&sequence.tokens[sequence.lengths.prompt_tokens..])
    }

    pub(super) fn awaits_mask(&self, key: RequestKey) -> bool {
        self.sequences.get(&key).is_some_and(|sequence| sequence.awaits_mask)
    }

    /// A step computed these positions of a sequence, and drew no token: its mask was late. The
    /// last of them is computed again, since the token is drawn from it.
    pub(super) fn sit_out(&mut self, key: RequestKey, range: Range<usize>, prompt_logprobs: &[TokenLogprobs]) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.awaits_mask = true;
        sequence.kv.num_computed_tokens = range.end - 1;
        if let Origin::Submitted(prompt) = &mut sequence.origin {
            prompt.prompt_logprobs.extend(prompt_logprobs.iter().take(range.len() - 1).cloned());
        }
        self.complete_blocks(key);
    }
}
