//! Stop strings over text that arrives in pieces.

use crate::error::TextError;

/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 16;
/// Longest stop string, bytes.
pub const MAX_STOP_STRING_BYTES: usize = 1024;

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopOutcome {
    /// Text that no stop string can begin in any more; may be empty.
    Emit(String),
    /// A stop string is complete.
    Stopped {
        /// Text before it that was not out yet.
        text_before: String,
        /// Index of the stop string.
        matched: usize,
    },
}

/// Finds the first stop string of a stream of text and holds back what may be the beginning of one.
///
/// First is the one that ends first, and of those the longest: so the outcome is a function of the
/// text, however it is cut.
#[derive(Debug, Clone)]
pub struct StopStrings {
    automata: Vec<Automaton>,
    held: String,
    stopped: bool,
}

impl StopStrings {
    /// Fails on more than [`MAX_STOP_STRINGS`], and on an empty one or one longer than
    /// [`MAX_STOP_STRING_BYTES`].
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        if stops.len() > MAX_STOP_STRINGS {
            return Err(TextError::Stop(format!("{} strings, but at most {MAX_STOP_STRINGS} are taken", stops.len())));
        }
        for (index, stop) in stops.iter().enumerate() {
            let bytes = stop.as_ref().len();
            if !(1..=MAX_STOP_STRING_BYTES).contains(&bytes) {
                let problem = format!("string {index} has {bytes} bytes, but 1 to {MAX_STOP_STRING_BYTES} are taken");
                return Err(TextError::Stop(problem));
            }
        }
        let automata = stops.iter().map(|stop| Automaton::new(stop.as_ref().as_bytes())).collect();
        Ok(Self { automata, held: String::new(), stopped: false })
    }

    /// Takes text in. After a stop string everything is swallowed.
    pub fn push(&mut self, text: &str) -> StopOutcome {
        if self.stopped {
            return StopOutcome::Emit(String::new());
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            if let Some((matched, length)) = self.step(byte) {
                self.held.truncate(before + index + 1 - length);
                self.stopped = true;
                return StopOutcome::Stopped { text_before: std::mem::take(&mut self.held), matched };
            }
        }
        let hold = self.automata.iter().map(Automaton::matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - hold);
        StopOutcome::Emit(std::mem::replace(&mut self.held, rest))
    }

    /// The text ended: what was held back was no stop string.
    pub fn finish(&mut self) -> String {
        self.automata.iter_mut().for_each(Automaton::reset);
        std::mem::take(&mut self.held)
    }

    /// Index and length of the longest stop string that ends at this byte.
    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut found: Option<(usize, usize)> = None;
        for (index, automaton) in self.automata.iter_mut().enumerate() {
            let length = automaton.stop.len();
            if automaton.step(byte) && found.is_none_or(|(_, longest)| length > longest) {
                found = Some((index, length));
            }
        }
        found
    }
}

/// Knuth, Morris and Pratt's: `matched` is the length of the longest end of the text that a stop
/// string begins with. Both are UTF-8, so that end begins at a character.
#[derive(Debug, Clone)]
pub(crate) struct Automaton {
    stop: Vec<u8>,
    /// Of each prefix: the longest proper prefix that it ends with.
    borders: Vec<usize>,
    matched: usize,
}

impl Automaton {
    pub(crate) fn new(stop: &[u8]) -> Self {
        let mut borders = vec![0; stop.len()];
        let mut border = 0;
        for end in 1..stop.len() {
            while border > 0 && stop[end] != stop[border] {
                border = borders[border - 1];
            }
            border += usize::from(stop[end] == stop[border]);
            borders[end] = border;
        }
        Self { stop: stop.to_vec(), borders, matched: 0 }
    }

    /// Length of the longest end of the text that the stop string begins with.
    pub(crate) fn matched(&self) -> usize {
        self.matched
    }

    /// Forgets the text.
    pub(crate) fn reset(&mut self) {
        self.matched = 0;
    }

    /// Whether the stop string ends at this byte.
    pub(crate) fn step(&mut self, byte: u8) -> bool {
        if self.matched == self.stop.len() {
            self.matched = self.borders[self.matched - 1];
        }
        while self.matched > 0 && self.stop[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.stop[self.matched] == byte);
        self.matched == self.stop.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All text out, and the stop string that ended it.
    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
        let mut matcher = StopStrings::new(stops).unwrap();
        let mut text = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                StopOutcome::Emit(piece) => text += &piece,
                StopOutcome::Stopped { text_before, matched } => return (text + &text_before, Some(matched)),
            }
        }
        (text + &matcher.finish(), None)
    }

    /// The definition, by trying every end.
    fn naive(stops: &[&str], text: &str) -> (String, Option<usize>) {
        for end in 0..=text.len() {
            let ending = stops.iter().enumerate().filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()));
            if let Some((index, stop)) = ending.min_by_key(|(index, stop)| (usize::MAX - stop.len(), *index)) {
                return (text[..end - stop.len()].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn only_a_possible_beginning_of_stop_string_is_withheld() {
        let mut matcher = StopStrings::new(&["</s>", "END"]).unwrap();
        assert_eq!(matcher.push("hello <"), StopOutcome::Emit("hello ".into()));
        assert_eq!(matcher.push("/"), StopOutcome::Emit("".into()));
        assert_eq!(matcher.push("b E"), StopOutcome::Emit("</b ".into()));
        assert_eq!(matcher.push("ND"), StopOutcome::Stopped { text_before: "".into(), matched: 1 });
        assert_eq!(matcher.push("more"), StopOutcome::Emit("".into()));
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn stop_string_after_repeated_beginning_is_found() {
        assert_eq!(run(&["aab"], ["a", "a", "a", "b"]), ("a".into(), Some(0)));
        assert_eq!(run(&["ééx"], ["é", "éé", "x"]), ("é".into(), Some(0)));
    }

    #[test]
    fn invalid_stop_strings_are_refused_by_index() {
        let message = |stops: &[String]| StopStrings::new(stops).unwrap_err().to_string();
        assert!(message(&vec!["x".to_owned(); 17]).starts_with("17 strings"));
        assert!(message(&[String::new()]).starts_with("string 0 has 0 bytes"));
        assert!(message(&["x".into(), "y".repeat(1025)]).starts_with("string 1 has 1025 bytes"));
        assert!(StopStrings::new(&vec!["y".repeat(1024); 16]).is_ok());
    }

    proptest! {
        #[test]
        fn first_stop_string_is_found_for_any_chunking(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abé]{0,5}", 0..10),
        ) {
            let stops: Vec<_> = stops.iter().map(String::as_str).collect();
            let expected = naive(&stops, &pieces.concat());
            prop_assert_eq!(run(&stops, pieces.iter().map(String::as_str)), expected);
        }
    }
}
