//! Warnings: what a body has that was left out of its request. While a body is read, they and the
//! place of the reading are kept by the thread: serde has no other way to hand them out.

use std::cell::RefCell;
use std::fmt::Write;

use crate::field::cut;

/// Most warnings that are kept as text; more are counted.
const MAX_WARNINGS: usize = 8;
/// Longest warning, characters.
const MAX_CHARS: usize = 192;

/// What was left out of a request, and where its body has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warnings {
    texts: Vec<String>,
    /// How many there are besides.
    more: usize,
}

impl Warnings {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Warnings on one line of printable ASCII, as a header takes it. At most 2 KiB.
    pub fn line(&self) -> String {
        let mut line = self.texts.join("; ");
        if self.more > 0 {
            let _ = write!(line, "; and {} more", self.more);
        }
        line
    }

    pub(crate) fn add(&mut self, path: &str, problem: &str) {
        if self.texts.len() == MAX_WARNINGS {
            self.more += 1;
            return;
        }
        let text = format!("{path}: {problem}");
        let printable = |c: char| if c == ' ' || c.is_ascii_graphic() { c } else { '?' };
        self.texts.push(text.chars().take(MAX_CHARS).map(printable).collect());
    }

    /// Adds those of another step.
    pub fn append(&mut self, other: Self) {
        let room = MAX_WARNINGS.saturating_sub(self.texts.len());
        self.more += other.more + other.texts.len().saturating_sub(room);
        self.texts.extend(other.texts.into_iter().take(room));
    }

    /// Forgets those of fields inside of what is at `path`.
    fn forget_inside(&mut self, path: &str) {
        let is_inside = |text: &String| text.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
        self.texts.retain(|text| !is_inside(text));
    }
}

/// A step of a path into a body.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Field(&'static str),
    Index(usize),
}

/// Where the reading of a body is, and what it has warned of.
#[derive(Debug, Default)]
struct Reading {
    path: Vec<Step>,
    warnings: Warnings,
}

impl Reading {
    fn path(&self) -> String {
        let mut path = String::new();
        for step in &self.path {
            let _ = match step {
                Step::Field(name) if path.is_empty() => write!(path, "{name}"),
                Step::Field(name) => write!(path, ".{name}"),
                Step::Index(index) => write!(path, "[{index}]"),
            };
        }
        path
    }
}

thread_local! {
    static READING: RefCell<Reading> = RefCell::default();
}

/// Reads a body with `read`; returns what was warned of meanwhile.
pub(crate) fn collect<T>(read: impl FnOnce() -> T) -> (T, Warnings) {
    READING.set(Reading::default());
    let value = read();
    (value, READING.take().warnings)
}

/// Reads what is one step deeper.
pub(crate) fn inside<T>(step: Step, read: impl FnOnce() -> T) -> T {
    READING.with_borrow_mut(|reading| reading.path.push(step));
    let value = read();
    READING.with_borrow_mut(|reading| reading.path.pop());
    value
}

/// Warns of a field of the object that is being read.
pub(crate) fn warn_field(name: &str, problem: &str) {
    READING.with_borrow_mut(|reading| {
        let path = reading.path();
        let dot = if path.is_empty() { "" } else { "." };
        reading.warnings.add(&format!("{path}{dot}{}", cut(name)), problem);
    });
}

/// Warns of the whole object that is being read: what its fields are says nothing any more.
pub(crate) fn warn_object(problem: &str) {
    READING.with_borrow_mut(|reading| {
        let path = reading.path();
        reading.warnings.forget_inside(&path);
        reading.warnings.add(&path, problem);
    });
}

/// Warns of what is no text, where it is not refused.
pub(crate) fn warn_not_shown(kind: &str) {
    warn_object(&format!("'{}' is left out: the model reads text alone", cut(kind)));
}

/// What the model reads in its place.
pub(crate) fn not_shown(kind: &str) -> String {
    format!("[{}: not shown, this model reads text alone]", cut(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_one_bounded_line_of_ascii() {
        let mut warnings = Warnings::default();
        assert!(warnings.is_empty());
        warnings.add("a[0].\u{e4}\r\nx", "is left out");
        assert_eq!(warnings.line(), "a[0].???x: is left out");
        (0..99).for_each(|_| warnings.add(&"x".repeat(999), "y"));
        let mut all = warnings.clone();
        all.append(warnings);
        assert!(all.line().len() < 2048 && all.line().ends_with("; and 192 more"), "{}", all.line());
    }

    #[test]
    fn warning_of_an_object_replaces_those_of_its_fields() {
        let ((), warnings) = collect(|| {
            inside(Step::Field("tools"), || {
                inside(Step::Index(1), || warn_field("size", "is not known"));
                inside(Step::Index(11), || warn_field("size", "is not known"));
                inside(Step::Index(1), || warn_object("is left out"));
            });
        });
        assert_eq!(warnings.line(), "tools[11].size: is not known; tools[1]: is left out");
    }
}
