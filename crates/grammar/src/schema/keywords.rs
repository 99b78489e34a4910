//! Keywords that are served, that are not, and that say nothing.

use serde_json::{Value, json};

use super::Fields;

/// Keywords that are not served, unless they are true of every value.
pub(super) const UNSERVED: [&str; 10] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "not",
    "unevaluatedItems",
    "uniqueItems",
];
/// Keywords that are served.
const SERVED: [&str; 30] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "nullable",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "type",
    "unevaluatedProperties",
];

/// Whether a keyword that is not served is true of every value.
pub(super) fn says_nothing(keyword: &str, value: &Value, fields: &Fields) -> bool {
    match keyword {
        "uniqueItems" => *value == false || fields.get("maxItems").and_then(count).is_some_and(|most| most <= 1),
        "contains" => fields.get("minContains").and_then(count) == Some(0) && !fields.contains_key("maxContains"),
        "not" => *value == false || value.get("not").is_some_and(is_true),
        "if" => ["then", "else"].iter().all(|branch| fields.get(*branch).is_none_or(is_true)),
        "dependencies" | "dependentRequired" | "dependentSchemas" => {
            value.as_object().is_some_and(|all| all.values().all(|value| is_true(value) || *value == json!([])))
        }
        // A schema of all items evaluates them.
        "unevaluatedItems" => is_true(value) || fields.get("items").is_some_and(|items| !items.is_array()),
        _ => false,
    }
}

/// Whether a schema is true of every value, as far as it says so itself.
pub(super) fn is_true(value: &Value) -> bool {
    match value {
        Value::Bool(is) => *is,
        Value::Object(fields) => fields.keys().all(|keyword| describes(keyword)),
        _ => false,
    }
}

/// Whether a keyword only describes.
pub(super) fn describes(keyword: &str) -> bool {
    !SERVED.contains(&keyword) && !UNSERVED.contains(&keyword)
}

/// A count, which may be written as a float.
pub(super) fn count(value: &Value) -> Option<u64> {
    let whole = |number: f64| (number >= 0.0 && number.fract() == 0.0 && number < 9e15).then_some(number as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}
