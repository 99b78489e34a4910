//! Finds a mark such as `</think>` in a stream of text.

use super::MAX_HELD_BYTES;
use crate::stop::Automaton;

/// Finds the first occurrence of a mark. It holds back the beginning of a mark and white space
/// before it. Marks have neither white space nor characters beyond ASCII.
#[derive(Debug, Clone)]
pub(crate) struct MarkFinder {
    automaton: Automaton,
    /// White space, then as much of the mark as the automaton has matched.
    held: String,
}

impl MarkFinder {
    pub(crate) fn new(mark: &str) -> Self {
        Self { automaton: Automaton::new(mark.as_bytes()), held: String::new() }
    }

    /// Takes a character in, and gives `emit` the text that is no mark. Whether the mark is
    /// complete: then [`take`](Self::take) has it.
    pub(crate) fn push(&mut self, character: char, emit: impl FnOnce(&str)) -> bool {
        let matched_before = self.automaton.matched();
        self.held.push(character);
        if !character.is_ascii() {
            self.automaton.reset();
        } else if self.automaton.step(character as u8) {
            return true;
        }
        let matched = self.automaton.matched();
        if matched == matched_before + 1 {
            return false;
        }
        let keep = match character.is_ascii_whitespace() {
            true if matched_before > 0 || self.held.len() > MAX_HELD_BYTES => character.len_utf8(),
            true => self.held.len(),
            false => matched,
        };
        let text = self.held.len() - keep;
        emit(&self.held[..text]);
        self.held.drain(..text);
        false
    }

    /// What is held back, white space first; then the search starts again.
    pub(crate) fn take(&mut self) -> String {
        self.automaton.reset();
        std::mem::take(&mut self.held)
    }
}
