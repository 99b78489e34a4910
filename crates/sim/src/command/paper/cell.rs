//! What stands in a table: text for people, the figure itself for programs.

use serde_json::{Value, json};

/// How a figure is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Seconds,
    /// Seconds of which the thousandths count.
    Milliseconds,
    /// 0 to 1, as percent.
    Share,
    /// A share more or less, as percent with its sign.
    Change,
    /// A whole number.
    Count,
    /// So many times something.
    Times,
    /// A load: 1 is full.
    Load,
}

/// One cell.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell {
    Text(String),
    Figure(f64, Form),
    /// There is no such figure.
    None,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    pub(super) const fn seconds(value: f64) -> Self {
        Self::Figure(value, Form::Seconds)
    }

    pub(super) const fn share(value: f64) -> Self {
        Self::Figure(value, Form::Share)
    }

    pub(super) const fn count(value: u64) -> Self {
        Self::Figure(value as f64, Form::Count)
    }

    pub(super) const fn times(value: f64) -> Self {
        Self::Figure(value, Form::Times)
    }

    pub(super) const fn load(value: f64) -> Self {
        Self::Figure(value, Form::Load)
    }

    /// By how much `value` is more than `than`, over `than`.
    pub(super) fn change(value: f64, than: f64) -> Self {
        Self::Figure(value / than.max(f64::MIN_POSITIVE) - 1.0, Form::Change)
    }

    /// A figure that not every row has.
    pub(super) fn of(figure: Option<f64>, form: Form) -> Self {
        figure.map_or(Self::None, |value| Self::Figure(value, form))
    }

    /// As it is printed.
    pub(super) fn print(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::None => "-".to_owned(),
            Self::Figure(value, Form::Seconds) => format!("{value:.2}"),
            Self::Figure(value, Form::Milliseconds | Form::Load) => format!("{value:.3}"),
            Self::Figure(value, Form::Share) => format!("{:.1} %", value * 100.0),
            Self::Figure(value, Form::Change) => format!("{:+.1} %", value * 100.0),
            Self::Figure(value, Form::Count) => format!("{value:.0}"),
            Self::Figure(value, Form::Times) => format!("{value:.2}x"),
        }
    }

    /// Figures are numbers, and what is missing is null.
    pub(super) fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::None => Value::Null,
            Self::Figure(value, Form::Count) => json!(*value as u64),
            Self::Figure(value, _) => json!(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_units_and_programs_numbers() {
        let cells = [Cell::share(0.9), Cell::change(1.1, 1.0), Cell::count(4183), Cell::times(2.22), Cell::None];
        assert_eq!(cells.clone().map(|cell| cell.print()), ["90.0 %", "+10.0 %", "4183", "2.22x", "-"]);
        let [share, _, count, times, none] = cells.map(|cell| cell.json());
        assert_eq!((share, count, times, none), (json!(0.9), json!(4183), json!(2.22), Value::Null));
    }
}
