//! A text's tokens, cut into windows.

use baton_types::TokenId;

/// A text's tokens and how they are cut. A window is a token that is given and up to `context - 1`
/// that are scored. Given is the token that begins a text, or, if the tokenizer has none, the one
/// before. So every token is scored once, but for the text's first if nothing stands before it.
///
/// ```text
/// with BOS      [B a b c] [B d e f] [B g]      scored: a b c d e f g
/// without       [a b c d] [d e f g]            scored: b c d e f g
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    tokens: Vec<TokenId>,
    bos: Option<TokenId>,
    context: usize,
}

impl Windows {
    /// Windows of `context` tokens, the given one among them.
    ///
    /// # Panics
    /// If `context` is below 2: nothing would be scored.
    pub fn new(tokens: Vec<TokenId>, bos: Option<TokenId>, context: usize) -> Self {
        assert!(context >= 2, "a window scores one token at least");
        Self { tokens, bos, context }
    }

    /// Tokens that are scored, in all windows.
    pub fn scored(&self) -> usize {
        self.tokens.len().saturating_sub(self.first())
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        self.scored().div_ceil(self.context - 1)
    }

    /// The windows, in the order of the text.
    pub fn iter(&self) -> impl Iterator<Item = Vec<TokenId>> {
        let step = self.context - 1;
        (self.first()..self.tokens.len()).step_by(step).map(move |start| {
            let given = self.bos.unwrap_or_else(|| self.tokens[start - 1]);
            let scored = &self.tokens[start..self.tokens.len().min(start + step)];
            [&[given], scored].concat()
        })
    }

    /// Index of the first token that is scored.
    fn first(&self) -> usize {
        usize::from(self.bos.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(tokens: u32, bos: Option<TokenId>, context: usize) -> Vec<Vec<TokenId>> {
        let windows = Windows::new((1..=tokens).collect(), bos, context);
        let cut: Vec<_> = windows.iter().collect();
        assert_eq!(windows.count(), cut.len());
        assert_eq!(windows.scored(), cut.iter().map(|window| window.len() - 1).sum::<usize>());
        cut
    }

    #[test]
    fn score_window_with_bos_begins_with_it() {
        assert_eq!(cut(7, Some(0), 4), [&[0, 1, 2, 3][..], &[0, 4, 5, 6], &[0, 7]]);
        assert_eq!(cut(3, Some(0), 4), [[0, 1, 2, 3]]);
    }

    #[test]
    fn score_window_without_bos_begins_with_last_token_before() {
        assert_eq!(cut(7, None, 4), [[1, 2, 3, 4], [4, 5, 6, 7]]);
        assert_eq!(cut(8, None, 4).last().unwrap(), &[7, 8]);
    }

    #[test]
    fn every_token_is_scored_once_for_any_context_length() {
        for context in 2..12 {
            for (bos, first) in [(Some(0), 1), (None, 2)] {
                let scored: Vec<_> = cut(10, bos, context).iter().flat_map(|window| window[1..].to_vec()).collect();
                assert_eq!(scored, (first..=10).collect::<Vec<_>>(), "{bos:?}, {context}");
            }
        }
    }
}
