//! A request's tokens as they come in from two nodes: puts them into order and drops repeated ones.
//!
//! The first token comes from the prefill node and the rest from the decode node, over different
//! connections. So token 1 may be here before token 0. A later attempt gives the same tokens once
//! more, from the first one on.

use std::collections::BTreeMap;

use baton_types::{FinishReason, TokenId, TokenLogprobs};

/// A token as a node sent it.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub token: TokenId,
    /// Its log-probabilities, if asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Set on the last token.
    pub finish: Option<FinishReason>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct OutputOrder {
    limit: u32,
    sent: Vec<TokenId>,
    /// Not sent yet; no more than `limit`.
    early: BTreeMap<u32, OutputToken>,
}

impl OutputOrder {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit, sent: Vec::new(), early: BTreeMap::new() }
    }

    /// Tokens that the client has.
    pub(super) fn sent(&self) -> &[TokenId] {
        &self.sent
    }

    pub(super) fn len(&self) -> u32 {
        self.sent.len() as u32
    }

    /// Takes in a token; what contradicts the client's is an error.
    pub(super) fn push(&mut self, index: u32, token: OutputToken) -> Result<(), String> {
        if index >= self.limit {
            return Err(format!("token {index} came, but only {} were asked for", self.limit));
        }
        match self.sent.get(index as usize) {
            None => {
                self.early.insert(index, token);
                Ok(())
            }
            Some(&sent) if sent == token.token => Ok(()),
            Some(sent) => Err(format!("token {index} was {sent} when it was sent and is {} now", token.token)),
        }
    }

    /// The tokens that are in order now, up to the last one; the client has them afterwards.
    pub(super) fn take(&mut self) -> Vec<OutputToken> {
        let mut taken = Vec::new();
        while let Some(token) = self.early.remove(&self.len()) {
            let is_last = token.finish.is_some();
            self.sent.push(token.token);
            taken.push(token);
            if is_last {
                self.early.clear();
            }
        }
        taken
    }

    /// The client has these only: its text ended within what it was given last.
    pub(super) fn stop_after(&mut self, tokens: u32) {
        self.sent.truncate(tokens as usize);
        self.early.clear();
    }

    /// An attempt failed: what it gave beyond what the client has comes again.
    pub(super) fn forget_early(&mut self) {
        self.early.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(token: TokenId, finish: Option<FinishReason>) -> OutputToken {
        OutputToken { token, logprobs: None, finish }
    }

    fn taken(order: &mut OutputOrder) -> Vec<TokenId> {
        order.take().into_iter().map(|token| token.token).collect()
    }

    #[test]
    fn out_of_order_tokens_are_put_into_order() {
        let mut order = OutputOrder::new(10);
        order.push(2, token(12, None)).unwrap();
        order.push(1, token(11, None)).unwrap();
        assert_eq!(taken(&mut order), []);
        order.push(0, token(10, None)).unwrap();
        assert_eq!((taken(&mut order), order.len()), (vec![10, 11, 12], 3));
    }

    #[test]
    fn repeated_token_is_dropped_and_changed_token_is_refused() {
        let mut order = OutputOrder::new(4);
        order.push(0, token(10, None)).unwrap();
        assert_eq!(taken(&mut order), [10]);
        order.push(0, token(10, None)).unwrap();
        assert_eq!(taken(&mut order), []);
        assert_eq!(order.push(0, token(9, None)).unwrap_err(), "token 0 was 10 when it was sent and is 9 now");
        assert_eq!(order.push(4, token(9, None)).unwrap_err(), "token 4 came, but only 4 were asked for");
    }

    #[test]
    fn no_token_is_delivered_after_the_last_one() {
        let mut order = OutputOrder::new(10);
        order.push(2, token(12, None)).unwrap();
        order.push(1, token(11, Some(FinishReason::Stop))).unwrap();
        order.push(0, token(10, None)).unwrap();
        assert_eq!((taken(&mut order), taken(&mut order)), (vec![10, 11], vec![]));
    }
}
