//! Keywords of numbers.

use serde_json::Value;

use super::{Fields, Problem, Scope, Translator, Writing, named_types};

/// Largest common multiple of the values of `multipleOf`: the library has a state for each
/// remainder, and for several at once, for each remainder by their least common multiple. A million
/// takes half a minute.
const MOST_REMAINDERS: u64 = 10_000;

/// Largest limit of a number that the library takes.
const MAX_LIMIT: f64 = 9.2e18;

impl<'a> Translator<'a> {
    pub(super) fn number(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let value = &fields[keyword];
        // Draft 4 has them as booleans beside the limits.
        let limit = match keyword {
            "exclusiveMinimum" => Some("minimum"),
            "exclusiveMaximum" => Some("maximum"),
            _ => None,
        };
        let value = match (value, limit) {
            (Value::Bool(false), Some(_)) => return Ok(()),
            (Value::Bool(true), Some(limit)) => match fields.get(limit) {
                Some(value) => value,
                None => return Ok(()),
            },
            _ => value,
        };
        let Some(number) = value.as_number().filter(|_| value.as_f64().is_some_and(f64::is_finite)) else {
            return Err(scope.problem(keyword, "expected a number"));
        };
        let is_integer = named_types(fields).is_some_and(|types| !types.contains(&"number"));
        let size = value.as_f64().unwrap_or_default().abs();
        if keyword != "multipleOf" {
            if size >= f64::MAX {
                return Ok(());
            }
            if size > MAX_LIMIT && !is_integer {
                return self.unserved(scope.problem(keyword, "limits beyond 2^63 are not served"));
            }
            writing.set(keyword, value.clone());
            return Ok(());
        }
        if value.as_f64().is_none_or(|number| number <= 0.0) {
            return Err(scope.problem(keyword, "expected a number above 0"));
        }
        if is_integer && value.as_f64() == Some(1.0) {
            return Ok(());
        }
        let common = least_common_multiple(self.common_multiple, coefficient(&number.to_string()));
        if common > MOST_REMAINDERS {
            let what = "the values of multipleOf have a common multiple, without their decimal point, of more than";
            let what = format!("{what} {MOST_REMAINDERS}");
            return self.unserved(scope.problem(keyword, what));
        }
        self.common_multiple = common;
        writing.set(keyword, value.clone());
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
