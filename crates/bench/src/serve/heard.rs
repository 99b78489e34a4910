//! What a client hears of one request, and how its tokens are counted.

use tokio::time::Instant;

/// Sizes of a request, as its server says them. Tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: u64,
    /// Of it, those that need not be computed.
    pub cached: u64,
    /// Of the answer.
    pub output: u64,
}

/// Why a request did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The server would not take it, with this HTTP status: 429 or 503. gRPC's `RESOURCE_EXHAUSTED` and `UNAVAILABLE` count as these.
    Rejected(u16),
    /// Anything else.
    Failed(String),
}

impl Problem {
    pub(super) fn failed(reason: impl Into<String>) -> Self {
        Self::Failed(reason.into())
    }
}

/// A message with a part of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Message {
    at: Instant,
    /// Tokens in it, where it says so; 1 where it does not.
    tokens: u64,
    /// Whether it has text.
    shows: bool,
}

/// What a client has heard of one request.
#[derive(Debug, Default)]
pub struct Heard {
    messages: Vec<Message>,
    usage: Option<Usage>,
}

/// When the tokens of an answer came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of each message that brought some.
    pub at: Vec<Instant>,
    /// Tokens that came in one message with another one: no time passed between the two, as far as a client can tell.
    pub merged: u64,
}

impl Heard {
    /// A message with so many tokens, now.
    pub fn tokens(&mut self, tokens: u64) {
        self.messages.push(Message { at: Instant::now(), tokens, shows: true });
    }

    /// A message that does not say how many tokens it stands for, now.
    pub fn chunk(&mut self, shows: bool) {
        self.messages.push(Message { at: Instant::now(), tokens: 1, shows });
    }

    /// The server's own figures.
    pub fn usage(&mut self, usage: Usage) {
        self.usage = Some(usage);
    }

    /// What the server said; what was counted, where it said nothing.
    pub fn sizes(&self) -> Usage {
        self.usage.unwrap_or_else(|| {
            let Tokens { at, merged } = self.count();
            Usage { output: at.len() as u64 + merged, ..Usage::default() }
        })
    }

    /// When the tokens came.
    ///
    /// OpenAI's chunks do not say how many tokens they hold. Most servers send one per token, but several tokens come in one chunk where a server has fallen behind or has held half a character
    /// back; and a chunk without text may stand for a token that shows none (vLLM and Baton send such chunks) or for nothing at all. What is known for sure is the sum, from `usage`, and so it
    /// decides: where there are at most as many chunks as tokens, each brought one token at least, and what is missing came in one chunk with another token. Which chunk it was is not known, and need not be: the
    /// gap is 0 either way. Where there are more chunks than tokens, those without text brought none. Without `usage` each chunk counts as one token.
    pub fn count(&self) -> Tokens {
        let output = self.usage.map_or(u64::MAX, |usage| usage.output);
        let shown_only = self.messages.len() as u64 > output;
        let counted = || self.messages.iter().filter(|message| message.shows || !shown_only);
        let at: Vec<_> = counted().map(|message| message.at).collect();
        let said: u64 = counted().map(|message| message.tokens).sum();
        let sum = self.usage.map_or(said, |usage| usage.output.max(said));
        let merged = if at.is_empty() { 0 } else { sum - at.len() as u64 };
        Tokens { at, merged }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(chunks: &[bool], output: Option<u64>) -> Heard {
        let mut heard = Heard::default();
        chunks.iter().for_each(|shows| heard.chunk(*shows));
        if let Some(output) = output {
            heard.usage(Usage { output, ..Usage::default() });
        }
        heard
    }

    fn counted(chunks: &[bool], output: Option<u64>) -> (usize, u64) {
        let tokens = heard(chunks, output).count();
        (tokens.at.len(), tokens.merged)
    }

    #[test]
    fn chunks_are_tokens_where_nothing_else_is_known() {
        assert_eq!(counted(&[true, false, true], None), (3, 0));
        assert_eq!(heard(&[true, false, true], None).sizes().output, 3);
    }

    #[test]
    fn usage_says_how_many_came_together() {
        assert_eq!(counted(&[true, true, true], Some(3)), (3, 0));
        assert_eq!(counted(&[true, false, true], Some(3)), (3, 0), "a token that shows nothing");
        assert_eq!(counted(&[true, true, true], Some(5)), (3, 2));
    }

    #[test]
    fn chunks_beyond_the_sum_are_those_without_text() {
        assert_eq!(counted(&[false, true, true], Some(2)), (2, 0));
        assert_eq!(counted(&[true, true, true], Some(2)), (3, 0), "a server that counts otherwise");
        assert_eq!(counted(&[false], Some(0)), (0, 0));
        assert_eq!(counted(&[], Some(4)), (0, 0));
    }

    #[test]
    fn messages_that_say_their_tokens_are_believed() {
        let mut heard = Heard::default();
        [1, 3, 2].into_iter().for_each(|tokens| heard.tokens(tokens));
        assert_eq!((heard.count().at.len(), heard.count().merged, heard.sizes().output), (3, 3, 6));
        heard.usage(Usage { output: 6, cached: 2, prompt: 9 });
        assert_eq!((heard.count().merged, heard.sizes().cached), (3, 2));
    }
}
