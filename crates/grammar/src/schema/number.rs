//! Keywords of numbers.

use serde_json::{Number, Value};

use super::{Fields, Problem, Scope, Translator, Writing, named_types};

/// Largest common multiple of the values of `multipleOf`: the library has a state for each
/// remainder, and for several at once, for each remainder by their least common multiple. A million
/// takes half a minute.
const MOST_REMAINDERS: u64 = 10_000;

/// Largest limit of a number that the library takes.
const MAX_LIMIT: f64 = 9.2e18;

impl Translator<'_> {
    /// A limit, or the number of which values are multiples.
    pub(super) fn number(
        &mut self,
        keyword: &str,
        fields: &Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let value = match (&fields[keyword], keyword) {
            // Draft 4 has them as booleans beside the limits.
            (Value::Bool(false), "exclusiveMinimum" | "exclusiveMaximum") => return Ok(()),
            (Value::Bool(true), "exclusiveMinimum") => fields.get("minimum"),
            (Value::Bool(true), "exclusiveMaximum") => fields.get("maximum"),
            (value, _) => Some(value),
        };
        let Some(value) = value else { return Ok(()) };
        let Value::Number(number) = value else {
            return self.unserved(scope.problem(keyword, "expected a number"));
        };
        let size = value.as_f64().unwrap_or_default();
        let is_integer = named_types(fields).is_some_and(|types| !types.contains(&"number"));
        if keyword == "multipleOf" {
            return self.multiple(number, is_integer, scope, writing);
        }
        if size.abs() >= f64::MAX {
            return Ok(());
        }
        if size.abs() > MAX_LIMIT && !is_integer {
            return self.unserved(scope.problem(keyword, "limits beyond 2^63 are not served"));
        }
        writing.set(keyword, value.clone());
        Ok(())
    }

    fn multiple(
        &mut self,
        number: &Number,
        is_integer: bool,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        if number.as_f64().is_none_or(|number| number <= 0.0) {
            return self.unserved(scope.problem("multipleOf", "expected a number above 0"));
        }
        if is_integer && number.as_f64() == Some(1.0) {
            return Ok(());
        }
        let common = least_common_multiple(self.common_multiple, coefficient(&number.to_string()));
        if common > MOST_REMAINDERS {
            let what = "the values of multipleOf have a common multiple, without their decimal point, of more than";
            return self.unserved(scope.problem("multipleOf", format!("{what} {MOST_REMAINDERS}")));
        }
        self.common_multiple = common;
        writing.set("multipleOf", number.clone());
        Ok(())
    }
}

/// Whether a value has an integer that a float cannot hold.
pub(super) fn is_inexact(value: &Value) -> bool {
    const MOST: u64 = 1 << 53;
    match value {
        Value::Number(number) => number.as_i64().map_or_else(|| number.is_u64(), |n| n.unsigned_abs() > MOST),
        Value::Array(values) => values.iter().any(is_inexact),
        Value::Object(fields) => fields.values().any(is_inexact),
        _ => false,
    }
}

/// The digits of a number as a whole number: 125 of 1.25.
fn coefficient(number: &str) -> u64 {
    let number = number.strip_suffix(".0").unwrap_or(number);
    let digits: String = number.chars().filter(char::is_ascii_digit).collect();
    // What is written with an exponent may have many more.
    if number.contains(['e', 'E']) { u64::MAX } else { digits.parse().unwrap_or(u64::MAX) }
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let mut divisor = a;
    let mut rest = b;
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1)).saturating_mul(b)
}
