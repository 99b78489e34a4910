//! Figures for people.

/// A line for each name and its value; the values begin in one column.
pub fn named_values(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len() + 1).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:<width$}{value}")).collect::<Vec<_>>().join("\n")
}

/// A time with the unit that fits: `1.50 s`, `12.3 ms` or `45 us`.
pub fn seconds(value: f64) -> String {
    match value {
        s if s >= 0.9995 => format!("{s:.2} s"),
        s if s >= 0.9995e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.0} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_in_one_column() {
        assert_eq!(named_values(&[("a", "1".into()), ("long", "2".into())]), "a    1\nlong 2");
    }

    #[test]
    fn times_are_rounded_to_fitting_units() {
        let shown = [0.0, 0.000_045, 0.0123, 0.1, 0.9996, 1.5].map(seconds);
        assert_eq!(shown, ["0 us", "45 us", "12.3 ms", "100.0 ms", "1.00 s", "1.50 s"]);
    }
}
