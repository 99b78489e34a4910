//! One request's output as it comes in from two nodes: puts the tokens into order, drops repeated ones, detokenizes, and ends at a stop string.
//!
//! The first token comes from the prefill node and the rest from the decode node, over different connections, so token 1 may be here before token 0.

use std::collections::BTreeMap;

use baton_text::{Detokenizer, StopOutcome, StopStrings};
use baton_types::{FinishReason, TokenId, TokenLogprobs};

/// A token as a node sent it.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub token: TokenId,
    /// Its log-probabilities, where asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Set on the last token.
    pub finish: Option<FinishReason>,
}

/// What the client gets next.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Piece {
    /// Index of the first of `tokens`.
    pub index: u32,
    /// Tokens that are in order now.
    pub tokens: Vec<OutputToken>,
    /// Text that is final now; it may lag behind the tokens.
    pub text: String,
    /// Set on the last piece.
    pub finish: Option<FinishReason>,
}

/// A node contradicted what the client already has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutputError {
    /// A token came again, and was another one.
    #[error("token {index} was {sent} when it was sent and is {now} now")]
    Changed {
        /// Index in the output.
        index: u32,
        /// What the client has.
        sent: TokenId,
        /// What came now.
        now: TokenId,
    },
    /// A token lies beyond what was asked for.
    #[error("token {index} came, but only {limit} were asked for")]
    Beyond {
        /// Index in the output.
        index: u32,
        /// Most tokens to generate.
        limit: u32,
    },
}

/// See the module's text.
pub struct Output {
    limit: u32,
    sent: Vec<TokenId>,
    early: BTreeMap<u32, OutputToken>,
    detokenizer: Detokenizer,
    stops: StopStrings,
    finished: bool,
}

impl Output {
    /// An output of at most `limit` tokens.
    pub fn new(limit: u32, detokenizer: Detokenizer, stops: StopStrings) -> Self {
        Self { limit, sent: Vec::new(), early: BTreeMap::new(), detokenizer, stops, finished: false }
    }

    /// Tokens that the client has.
    pub fn len(&self) -> u32 {
        self.sent.len() as u32
    }

    /// The same tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.sent
    }

    /// Whether the last piece is out.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Takes in a token; the piece is `None` where nothing is in order yet, or the token is a repeat.
    pub fn push(&mut self, index: u32, token: OutputToken) -> Result<Option<Piece>, OutputError> {
        if index >= self.limit {
            return Err(OutputError::Beyond { index, limit: self.limit });
        }
        if let Some(&sent) = self.sent.get(index as usize) {
            let now = token.token;
            return if sent == now { Ok(None) } else { Err(OutputError::Changed { index, sent, now }) };
        }
        if self.finished {
            return Ok(None);
        }
        let mut piece = Piece { index: self.len(), ..Piece::default() };
        if index == self.len() && self.early.is_empty() {
            // As nearly always: in order, and nobody waits for it.
            self.append(token, &mut piece);
            return Ok(Some(piece));
        }
        self.early.insert(index, token);
        while let Some(token) = self.early.remove(&self.len()) {
            self.append(token, &mut piece);
            if self.finished {
                self.early.clear();
                break;
            }
        }
        Ok((!piece.tokens.is_empty()).then_some(piece))
    }

    fn append(&mut self, token: OutputToken, piece: &mut Piece) {
        self.sent.push(token.token);
        // The token that ends the output is not part of its text.
        if token.finish != Some(FinishReason::Stop) {
            let text = self.detokenizer.push(token.token);
            self.search(&text, piece);
        }
        if !self.finished && token.finish.is_some() {
            let rest = self.detokenizer.finish();
            self.search(&rest, piece);
            piece.text.push_str(&self.stops.finish());
            piece.finish = piece.finish.or(token.finish);
            self.finished = true;
        }
        piece.tokens.push(token);
    }

    fn search(&mut self, text: &str, piece: &mut Piece) {
        if self.finished || text.is_empty() {
            return;
        }
        match self.stops.push(text) {
            StopOutcome::Emit(text) => piece.text.push_str(&text),
            StopOutcome::Stopped { text_before, .. } => {
                piece.text.push_str(&text_before);
                piece.finish = Some(FinishReason::Stop);
                self.finished = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_text::Tokenizer;

    use super::*;

    fn output(limit: u32, stops: &[&str]) -> Output {
        let stops = StopStrings::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>()).unwrap();
        Output::new(limit, Tokenizer::bytes().detokenizer(), stops)
    }

    fn token(byte: u8, finish: Option<FinishReason>) -> OutputToken {
        OutputToken { token: u32::from(byte), logprobs: None, finish }
    }

    fn text(pieces: &[Option<Piece>]) -> String {
        pieces.iter().flatten().map(|piece| piece.text.as_str()).collect()
    }

    #[test]
    fn tokens_are_put_into_order() {
        let mut out = output(10, &[]);
        assert_eq!(out.push(2, token(b'c', None)).unwrap(), None);
        assert_eq!(out.push(1, token(b'b', None)).unwrap(), None);
        let piece = out.push(0, token(b'a', None)).unwrap().unwrap();
        assert_eq!((piece.index, piece.tokens.len(), piece.text.as_str()), (0, 3, "abc"));
        assert_eq!(out.len(), 3);
    }

    #[test]
    fn a_repeat_is_dropped_and_a_change_is_refused() {
        let mut out = output(4, &[]);
        out.push(0, token(b'a', None)).unwrap();
        assert_eq!(out.push(0, token(b'a', None)), Ok(None));
        let changed = OutputError::Changed { index: 0, sent: u32::from(b'a'), now: u32::from(b'b') };
        assert_eq!(out.push(0, token(b'b', None)), Err(changed));
        assert_eq!(out.push(4, token(b'b', None)), Err(OutputError::Beyond { index: 4, limit: 4 }));
    }

    #[test]
    fn a_stop_string_over_several_tokens_ends_the_output_before_it() {
        let mut out = output(10, &["cd"]);
        let pieces: Vec<_> =
            b"abcdef".iter().enumerate().map(|(i, &b)| out.push(i as u32, token(b, None)).unwrap()).collect();
        assert_eq!(text(&pieces), "ab");
        assert!(out.is_finished());
        assert_eq!(pieces[3].as_ref().unwrap().finish, Some(FinishReason::Stop));
        assert!(pieces[4].is_none());
    }

    #[test]
    fn what_was_held_back_comes_out_at_the_end() {
        let mut out = output(3, &["zz"]);
        out.push(0, token(b'a', None)).unwrap();
        let held = out.push(1, token(b'z', None)).unwrap().unwrap();
        assert_eq!((held.text.as_str(), held.tokens.len()), ("", 1));
        let last = out.push(2, token(b'!', Some(FinishReason::Length))).unwrap().unwrap();
        assert_eq!((last.text.as_str(), last.finish), ("z!", Some(FinishReason::Length)));
    }

    #[test]
    fn the_stop_token_is_no_text() {
        let mut out = output(3, &[]);
        out.push(0, token(b'a', None)).unwrap();
        let last = out.push(1, token(b'b', Some(FinishReason::Stop))).unwrap().unwrap();
        assert_eq!((last.text.as_str(), last.tokens.len(), last.finish), ("", 1, Some(FinishReason::Stop)));
    }
}
