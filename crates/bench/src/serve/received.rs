//! What a client hears of one request, and how its tokens are counted.

use std::time::Instant;

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
    /// The server would not take it, with this HTTP status: 429 or 503. gRPC's `RESOURCE_EXHAUSTED`
    /// and `UNAVAILABLE` count as these.
    Rejected(u16),
    /// This client gave it up, or the server says that its client did.
    Aborted(String),
    /// Anything else.
    Failed(String),
}

impl Problem {
    pub(super) fn failed(reason: impl Into<String>) -> Self {
        Self::Failed(reason.into())
    }
}

/// Messages and tokens that are taken beyond those of an answer: beginnings, ends, and chunks
/// without text.
const SPARE: u64 = 64;
/// Messages and tokens that are taken for each token that was asked for: a server may send a
/// message per character.
const PER_TOKEN: u64 = 4;

/// A message with a part of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Message {
    at: Instant,
    /// Tokens in it, if it says so; 1 if it does not.
    tokens: u64,
    /// Whether it has text.
    shows: bool,
}

/// What a client has heard of one request. A server that says more than any answer is long has
/// failed the request, so that it takes no more memory than was asked for.
#[derive(Debug)]
pub struct ReceivedAnswer {
    max_tokens: u32,
    messages: Vec<Message>,
    /// In the messages.
    tokens: u64,
    usage: Option<Usage>,
}

/// When the tokens of an answer came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of each message that had some.
    pub at: Vec<Instant>,
    /// Tokens that came in one message with another one: no time passed between the two, as far as
    /// a client can tell.
    pub merged: u64,
}

impl ReceivedAnswer {
    /// Nothing yet, of an answer of at most so many tokens.
    pub fn of_at_most(max_tokens: u32) -> Self {
        Self { max_tokens, messages: Vec::new(), tokens: 0, usage: None }
    }

    /// A message with so many tokens, at least 1, now.
    ///
    /// # Errors
    /// There have been too many.
    pub fn tokens(&mut self, tokens: u64) -> Result<(), Problem> {
        self.add(Message { at: baton_runtime::now(), tokens, shows: true })
    }

    /// A message that does not say how many tokens it stands for, now.
    ///
    /// # Errors
    /// There have been too many.
    pub fn chunk(&mut self, shows: bool) -> Result<(), Problem> {
        self.add(Message { at: baton_runtime::now(), tokens: 1, shows })
    }

    /// The server's own figures.
    ///
    /// # Errors
    /// No answer has so many tokens.
    pub fn usage(&mut self, usage: Usage) -> Result<(), Problem> {
        self.check(usage.output)?;
        self.usage = Some(usage);
        Ok(())
    }

    /// Every message has a token at least, so that the bound of tokens is one of messages, too.
    fn add(&mut self, message: Message) -> Result<(), Problem> {
        self.tokens = self.tokens.saturating_add(message.tokens);
        self.check(self.tokens)?;
        self.messages.push(message);
        Ok(())
    }

    fn check(&self, tokens: u64) -> Result<(), Problem> {
        let most = PER_TOKEN * u64::from(self.max_tokens) + SPARE;
        if tokens <= most {
            return Ok(());
        }
        let asked = self.max_tokens;
        Err(Problem::failed(format!("more than {most} messages or tokens, where {asked} tokens were asked for")))
    }

    /// What the server said; what was counted, if it said nothing.
    pub fn sizes(&self) -> Usage {
        self.usage.unwrap_or_else(|| {
            let Tokens { at, merged } = self.count();
            Usage { output: at.len() as u64 + merged, ..Usage::default() }
        })
    }

    /// When the tokens came.
    ///
    /// OpenAI's chunks do not say how many tokens they hold. Most servers send one per token.
    /// Several tokens come in one chunk if a server has fallen behind or has kept half a character
    /// back. A chunk without text may stand for a token that shows none (vLLM and Baton send such
    /// chunks) or for nothing at all. What is known for sure is the sum, from `usage`, and so it
    /// decides. If there are at most as many chunks as tokens, each had one token at least, and
    /// what is missing came in one chunk with another token. Which chunk it was is not known, and
    /// need not be: the gap is 0 either way. If there are more chunks than tokens, those without
    /// text had none. Without `usage` each chunk counts as one token.
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

    fn received(chunks: &[bool], output: Option<u64>) -> ReceivedAnswer {
        let mut received = ReceivedAnswer::of_at_most(8);
        chunks.iter().for_each(|shows| received.chunk(*shows).unwrap());
        if let Some(output) = output {
            received.usage(Usage { output, ..Usage::default() }).unwrap();
        }
        received
    }

    fn counted(chunks: &[bool], output: Option<u64>) -> (usize, u64) {
        let tokens = received(chunks, output).count();
        (tokens.at.len(), tokens.merged)
    }

    #[test]
    fn chunks_without_usage_count_as_one_token_each() {
        assert_eq!(counted(&[true, false, true], None), (3, 0));
        assert_eq!(received(&[true, false, true], None).sizes().output, 3);
    }

    #[test]
    fn usage_gives_the_number_of_merged_tokens() {
        assert_eq!(counted(&[true, true, true], Some(3)), (3, 0));
        assert_eq!(counted(&[true, false, true], Some(3)), (3, 0), "a token that shows nothing");
        assert_eq!(counted(&[true, true, true], Some(5)), (3, 2));
    }

    #[test]
    fn chunks_beyond_usage_are_those_without_text() {
        assert_eq!(counted(&[false, true, true], Some(2)), (2, 0));
        assert_eq!(counted(&[true, true, true], Some(2)), (3, 0), "a server that counts otherwise");
        assert_eq!(counted(&[false], Some(0)), (0, 0));
        assert_eq!(counted(&[], Some(4)), (0, 0));
    }

    #[test]
    fn token_counts_of_messages_go_before_usage() {
        let mut received = ReceivedAnswer::of_at_most(6);
        [1, 3, 2].into_iter().for_each(|tokens| received.tokens(tokens).unwrap());
        assert_eq!((received.count().at.len(), received.count().merged, received.sizes().output), (3, 3, 6));
        received.usage(Usage { output: 6, cached: 2, prompt: 9 }).unwrap();
        assert_eq!((received.count().merged, received.sizes().cached), (3, 2));
    }

    #[test]
    fn server_that_sends_too_many_messages_has_failed() {
        let too_much = Err(Problem::failed("more than 104 messages or tokens, where 10 tokens were asked for"));
        let mut chunks = ReceivedAnswer::of_at_most(10);
        let mut tokens = ReceivedAnswer::of_at_most(10);
        for _ in 0..104 {
            assert_eq!(chunks.chunk(false), Ok(()));
        }
        assert_eq!((chunks.chunk(true), chunks.count().at.len()), (too_much.clone(), 104), "and is not kept");
        assert_eq!((tokens.tokens(104), tokens.tokens(u64::MAX)), (Ok(()), too_much.clone()));
        let counts = |output| ReceivedAnswer::of_at_most(10).usage(Usage { output, ..Usage::default() });
        assert_eq!((counts(104), counts(u64::MAX)), (Ok(()), too_much));
        assert_eq!(ReceivedAnswer::of_at_most(u32::MAX).tokens(1 << 33), Ok(()));
    }
}
