//! The parts of an answer, in the order in which they come: what the newer APIs call blocks or
//! items.

use baton_proto::v1::{self, TokenLogprobs};

use crate::logprobs::drop_end;

/// Some of an answer that is of one kind.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    /// Of a call its arguments.
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprobs>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Reasoning,
    Text,
    Call { index: u32, id: String, name: String },
}

/// What happens to a part; the number is its place.
#[derive(Debug)]
pub(crate) enum Step {
    Opened(usize),
    Grew(usize, String, Vec<TokenLogprobs>),
    Closed(usize),
}

/// The parts that have come; the last one may be open.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    list: Vec<Part>,
    is_open: bool,
    /// Of tokens whose text is to come.
    pending: Vec<TokenLogprobs>,
    /// How many tokens were reasoning.
    pub(crate) reasoning_tokens: u32,
}

impl Parts {
    pub(crate) fn list(&self) -> &[Part] {
        &self.list
    }

    /// Takes in some more of the answer.
    pub(crate) fn take(&mut self, delta: v1::Delta) -> Vec<Step> {
        let v1::Delta { token_ids, text, mut logprobs, reasoning, tool_calls, .. } = delta;
        drop_end(&mut logprobs);
        let mut steps = Vec::new();
        if !reasoning.is_empty() {
            if text.is_empty() {
                self.reasoning_tokens += token_ids.len() as u32;
            }
            self.grow(Kind::Reasoning, reasoning, Vec::new(), &mut steps);
        }
        // Those of reasoning and of calls are not told.
        match (text.is_empty(), steps.is_empty() && tool_calls.is_empty()) {
            (true, true) => self.pending.extend(logprobs),
            (true, false) => self.pending.clear(),
            (false, _) => {
                let mut all = std::mem::take(&mut self.pending);
                all.extend(logprobs);
                self.grow(Kind::Text, text, all, &mut steps);
            }
        }
        for v1::ToolCallDelta { index, id, name, arguments } in tool_calls {
            self.grow(Kind::Call { index, id, name }, arguments, Vec::new(), &mut steps);
        }
        steps
    }

    /// Ends the part that is open.
    pub(crate) fn close(&mut self) -> Option<Step> {
        std::mem::take(&mut self.is_open).then(|| Step::Closed(self.list.len() - 1))
    }

    fn grow(&mut self, kind: Kind, text: String, logprobs: Vec<TokenLogprobs>, steps: &mut Vec<Step>) {
        let goes_on = match (self.list.last().filter(|_| self.is_open), &kind) {
            (Some(Part { kind: Kind::Call { index, .. }, .. }), Kind::Call { index: more, .. }) => index == more,
            (Some(part), kind) => part.kind == *kind,
            (None, _) => false,
        };
        if !goes_on {
            steps.extend(self.close());
            steps.push(Step::Opened(self.list.len()));
            self.list.push(Part { kind, text: String::new(), logprobs: Vec::new() });
            self.is_open = true;
        }
        let place = self.list.len() - 1;
        if text.is_empty() {
            return;
        }
        self.list[place].text.push_str(&text);
        self.list[place].logprobs.extend_from_slice(&logprobs);
        steps.push(Step::Grew(place, text, logprobs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_of_incomplete_character_come_with_its_text() {
        let of = |text: &str| TokenLogprobs { text: text.into(), ..Default::default() };
        let delta = |text: &str, reasoning: &str, token: &str| v1::Delta {
            text: text.into(),
            reasoning: reasoning.into(),
            token_ids: vec![1],
            logprobs: vec![of(token)],
            ..Default::default()
        };
        let mut parts = Parts::default();
        assert!(parts.take(delta("", "", "?")).is_empty());
        parts.take(delta("", "hm", "hm"));
        parts.take(delta("", "", "\u{fffd}"));
        parts.take(delta("ä", "", "\u{fffd}"));
        assert_eq!((parts.list().len(), parts.list()[1].logprobs.len(), parts.reasoning_tokens), (2, 2, 1));
        parts.take(v1::Delta { logprobs: vec![of("b"), of("")], ..delta("b", "", "") });
        assert_eq!(parts.list()[1].logprobs.len(), 3, "the token that ended the answer is not part of it");
        assert!(matches!(parts.close(), Some(Step::Closed(1))));
        assert!(parts.close().is_none());
    }
}
