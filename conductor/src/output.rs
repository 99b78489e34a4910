//! One request's text: detokenizes the tokens as they come, and ends at a stop string.

use baton_scheduler::OutputToken;
use baton_text::{Detokenizer, StopOutcome, StopStrings};
use baton_types::FinishReason;

/// What the client gets next.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Piece {
    /// The tokens, up to the one that completes a stop string.
    pub tokens: Vec<OutputToken>,
    /// Text that is final now; it may lag behind the tokens.
    pub text: String,
    /// Whether a stop string ended the text.
    pub stopped: bool,
}

/// See the module's text.
pub struct OutputText {
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Stop strings are not looked for in the text of so many tokens.
    min_tokens: u32,
    tokens: u32,
    stopped: bool,
}

impl OutputText {
    /// Of no token yet.
    pub fn new(detokenizer: Detokenizer, stops: StopStrings, min_tokens: u32) -> Self {
        Self { detokenizer, stops, min_tokens, tokens: 0, stopped: false }
    }

    /// Whether a stop string ended it.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Takes in the next tokens.
    pub fn push(&mut self, tokens: Vec<OutputToken>) -> Piece {
        let mut piece = Piece::default();
        for token in tokens {
            if self.stopped {
                break;
            }
            self.tokens += 1;
            // The token that ends the output is not part of its text.
            if token.finish != Some(FinishReason::Stop) {
                let text = self.detokenizer.push(token.token);
                self.search(&text, &mut piece.text);
            }
            if token.finish.is_some() {
                let rest = self.detokenizer.finish();
                self.search(&rest, &mut piece.text);
                piece.text.push_str(&self.stops.finish());
            }
            piece.tokens.push(token);
        }
        piece.stopped = self.stopped;
        piece
    }

    fn search(&mut self, text: &str, out: &mut String) {
        if self.stopped || text.is_empty() {
            return;
        }
        if self.tokens < self.min_tokens {
            return out.push_str(text);
        }
        match self.stops.push(text) {
            StopOutcome::Emit(text) => out.push_str(&text),
            StopOutcome::Stopped { text_before, .. } => {
                out.push_str(&text_before);
                self.stopped = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_text::Tokenizer;

    use super::*;

    fn output(stops: &[&str]) -> OutputText {
        let stops = StopStrings::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>()).unwrap();
        OutputText::new(Tokenizer::bytes().detokenizer(), stops, 0)
    }

    fn token(byte: u8, finish: Option<FinishReason>) -> OutputToken {
        OutputToken { token: u32::from(byte), logprobs: None, finish }
    }

    #[test]
    fn a_stop_string_over_several_tokens_ends_the_output_before_it() {
        let mut out = output(&["cd"]);
        let pieces: Vec<_> = b"abc".iter().map(|&b| out.push(vec![token(b, None)])).collect();
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!((text.as_str(), out.is_stopped()), ("ab", false));
        let last = out.push(vec![token(b'd', None), token(b'e', None)]);
        assert_eq!((last.tokens.len(), last.text.as_str(), last.stopped), (1, "", true), "what follows is dropped");
        assert_eq!(out.push(vec![token(b'f', None)]).tokens, []);
    }

    #[test]
    fn a_stop_string_counts_once_there_are_enough_tokens() {
        let mut out = OutputText { min_tokens: 3, ..output(&["b"]) };
        let pieces: Vec<_> = b"abab".iter().map(|&b| out.push(vec![token(b, None)])).collect();
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!((text.as_str(), out.is_stopped()), ("aba", true));
    }

    #[test]
    fn what_was_held_back_comes_out_at_the_end() {
        let mut out = output(&["zz"]);
        out.push(vec![token(b'a', None)]);
        let held = out.push(vec![token(b'z', None)]);
        assert_eq!((held.text.as_str(), held.tokens.len()), ("", 1));
        let last = out.push(vec![token(b'!', Some(FinishReason::Length))]);
        assert_eq!((last.text.as_str(), last.stopped), ("z!", false));
    }

    #[test]
    fn the_stop_token_is_no_text() {
        let mut out = output(&[]);
        let last = out.push(vec![token(b'a', None), token(b'b', Some(FinishReason::Stop))]);
        assert_eq!((last.text.as_str(), last.tokens.len(), last.stopped), ("a", 2, false));
    }
}
