//! Whether no value is of two schemas.

use serde_json::Value;

use crate::budget::is_spent;

use super::{Fields, Scope, Translator, named_types};

/// Most schemas in schemas that are looked at for one pair.
const MAX_DEPTH: usize = 8;
/// Most pairs that are looked at.
const MAX_COMPARISONS: usize = 50_000;
/// Pairs of listed values that cost as much as one of schemas.
const VALUES_PER_PAIR: usize = 100;
const NONE: &Value = &Value::Bool(false);

/// A schema and where it is.
type Placed<'a> = (&'a Value, Scope);

impl<'a> Translator<'a> {
    /// Whether no value is of two of a keyword's schemas, as far as can be seen.
    pub(super) fn are_apart(&mut self, keyword: &str, values: &'a [Value], scope: &Scope) -> bool {
        let placed = |index: usize| (&values[index], scope.at(&[keyword, &index.to_string()]));
        (0..values.len())
            .all(|first| (first + 1..values.len()).all(|second| self.are_disjoint(placed(first), placed(second), 0)))
    }

    /// Whether no value is of two schemas, as far as can be seen.
    pub(super) fn are_disjoint(&mut self, a: Placed<'a>, b: Placed<'a>, depth: usize) -> bool {
        self.comparisons += 1;
        let is_over = self.comparisons > MAX_COMPARISONS || self.comparisons.is_multiple_of(64) && is_spent();
        if depth > MAX_DEPTH || is_over {
            return false;
        }
        let a = self.targets.followed(a.0, a.1);
        let b = self.targets.followed(b.0, b.1);
        let (first, second) = match (a.0, b.0) {
            (Value::Bool(false), _) | (_, Value::Bool(false)) => return true,
            (Value::Object(first), Value::Object(second)) => (first, second),
            _ => return false,
        };
        let is_nullable = |fields: &Fields| fields.get("nullable") == Some(&Value::Bool(true));
        // In old versions what is beside a reference says nothing.
        let is_reference = |fields: &Fields| self.targets.is_old && fields.contains_key("$ref");
        if [first, second].into_iter().any(|fields| is_nullable(fields) || is_reference(fields)) {
            return false;
        }
        if let (Some(first), Some(second)) = (literals(first), literals(second)) {
            self.comparisons += first.len() * second.len() / VALUES_PER_PAIR;
            let is_bounded = self.comparisons <= MAX_COMPARISONS;
            return is_bounded && !first.iter().any(|value| second.iter().any(|other| may_be_one(value, other)));
        }
        if let (Some(first), Some(second)) = (types(first), types(second)) {
            if !first.iter().any(|kind| second.contains(kind)) {
                return true;
            }
            if first == ["object"] && second == ["object"] && self.objects_are_disjoint(&a, &b, depth) {
                return true;
            }
        }
        self.branches_are_disjoint(&a, &b, depth) || self.branches_are_disjoint(&b, &a, depth)
    }

    /// Whether each way of one schema shares no value with the other one.
    fn branches_are_disjoint(&mut self, a: &Placed<'a>, b: &Placed<'a>, depth: usize) -> bool {
        ["anyOf", "oneOf"].into_iter().any(|keyword| {
            let Some(Value::Array(branches)) = a.0.get(keyword) else { return false };
            branches.iter().enumerate().all(|(index, branch)| {
                let scope = a.1.at(&[keyword, &index.to_string()]);
                self.are_disjoint((branch, scope), b.clone(), depth + 1)
            })
        })
    }

    /// Whether objects differ by a property that one must have, and the other has otherwise or not
    /// at all.
    fn objects_are_disjoint(&mut self, a: &Placed<'a>, b: &Placed<'a>, depth: usize) -> bool {
        let required = [a.0, b.0].map(|value| value.get("required").and_then(Value::as_array));
        let names = required.into_iter().flatten().flatten().filter_map(Value::as_str);
        names.collect::<Vec<_>>().into_iter().any(|name| {
            self.comparisons += 1;
            let properties = [a, b].map(|(value, scope)| (property(value, name), scope.at(&["properties", name])));
            match properties {
                [(Some(first), at_first), (Some(second), at_second)] => {
                    self.are_disjoint((first, at_first), (second, at_second), depth + 1)
                }
                _ => false,
            }
        })
    }
}

/// The schema of a property, if it is named or none may be.
fn property<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    if let Some(value) = schema.get("properties").and_then(|properties| properties.get(name)) {
        return Some(value);
    }
    let is_closed = schema.get("additionalProperties") == Some(NONE) && schema.get("patternProperties").is_none();
    is_closed.then_some(NONE)
}

fn literals(fields: &Fields) -> Option<&[Value]> {
    match (fields.get("const"), fields.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) if !values.is_empty() => Some(values),
        _ => None,
    }
}

/// The types that a schema's values have, numbers as one; `None`: all.
pub(super) fn types(fields: &Fields) -> Option<Vec<&str>> {
    if let Some(values) = literals(fields) {
        return Some(values.iter().map(kind).collect());
    }
    named_types(fields).map(|names| names.into_iter().map(numeric).collect())
}

/// The name of a type, numbers as one.
pub(super) fn numeric(name: &str) -> &str {
    if name == "integer" { "number" } else { name }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Whether two values are one as far as can be seen: 1 and 1.0 are.
fn may_be_one(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => true,
        _ => a == b,
    }
}
