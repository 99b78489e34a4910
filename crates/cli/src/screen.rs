//! What people see: colours and spinners, only on a terminal.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::ProgressBar;

/// Colours, or none.
#[derive(Debug, Clone, Copy)]
pub struct Paint(bool);

impl Paint {
    /// For stdout.
    pub fn stdout() -> Self {
        Self(std::io::stdout().is_terminal() && colours_wanted())
    }

    /// For stderr.
    pub fn stderr() -> Self {
        Self(std::io::stderr().is_terminal() && colours_wanted())
    }

    /// Never.
    #[cfg(test)]
    pub fn none() -> Self {
        Self(false)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Of little weight.
    pub fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    /// Of much weight.
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    /// Good.
    pub fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    /// Takes a while.
    pub fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    /// Bad.
    pub fn red(self, text: &str) -> String {
        self.with("31", text)
    }
}

/// <https://no-color.org>
fn colours_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A spinner on stderr while a person waits; gone when dropped.
pub struct Waiting(Option<ProgressBar>);

impl Waiting {
    /// Starts to spin, if a person looks on.
    pub fn new(what: &'static str, json: bool) -> Self {
        if json || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let spinner = ProgressBar::new_spinner().with_message(what);
        spinner.enable_steady_tick(Duration::from_millis(100));
        Self(Some(spinner))
    }

    /// Ends it.
    pub fn clear(&mut self) {
        if let Some(spinner) = self.0.take() {
            spinner.finish_and_clear();
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Where the model's text goes: to stdout, as it comes.
pub struct Answer {
    terminal: bool,
    ends_line: bool,
}

impl Default for Answer {
    fn default() -> Self {
        Self { terminal: std::io::stdout().is_terminal(), ends_line: true }
    }
}

impl Answer {
    /// Some more of it.
    pub fn text(&mut self, text: &str) -> std::io::Result<()> {
        let Some(last) = text.chars().next_back() else { return Ok(()) };
        self.ends_line = last == '\n';
        let text = if self.terminal { printable(text) } else { Cow::Borrowed(text) };
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Ends the last line, if the text did not.
    pub fn end(&mut self) -> std::io::Result<()> {
        if std::mem::replace(&mut self.ends_line, true) { Ok(()) } else { line("") }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        // An answer that was stopped leaves its line open; that it cannot be ended is no news by
        // now.
        let _ = self.end();
    }
}

/// A model must not move the cursor or set the title: its control characters are shown as a
/// replacement character.
fn printable(text: &str) -> Cow<'_, str> {
    let unsafe_char = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(unsafe_char) {
        return Cow::Owned(text.replace(unsafe_char, "\u{fffd}"));
    }
    Cow::Borrowed(text)
}

/// One line on stdout. Unlike `println!` it does not panic if stdout is closed.
pub fn line(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_model_output_are_replaced() {
        assert_eq!(printable("a\tb\nc"), "a\tb\nc");
        assert_eq!(printable("\x1b]0;x\x07\u{9b}2J é"), "\u{fffd}]0;x\u{fffd}\u{fffd}2J é");
    }
}
