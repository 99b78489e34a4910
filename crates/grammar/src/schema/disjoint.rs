//! Whether no value is of two schemas.

use serde_json::Value;

use super::{Draft, Fields, Scope, Translator, named_types};

/// Most schemas in schemas that are looked at for one pair.
const MAX_DEPTH: usize = 12;
/// Most pairs that are looked at.
const MAX_COMPARISONS: usize = 100_000;

/// A schema and where it is.
type Placed<'a, 's> = (&'a Value, &'s Scope);

impl<'a> Translator<'a> {
    /// Whether no value is of both, as far as can be seen.
    pub(super) fn are_disjoint(&mut self, a: Placed<'a, '_>, b: Placed<'a, '_>, depth: usize) -> bool {
        self.comparisons += 1;
        if depth > MAX_DEPTH || self.comparisons > MAX_COMPARISONS {
            return false;
        }
        let (first, first_scope) = self.followed(a.0, a.1.clone());
        let (second, second_scope) = self.followed(b.0, b.1.clone());
        let a = (first, &first_scope);
        let b = (second, &second_scope);
        let (first, second) = match (first, second) {
            (Value::Bool(false), _) | (_, Value::Bool(false)) => return true,
            (Value::Object(first), Value::Object(second)) => (first, second),
            _ => return false,
        };
        let is_nullable = |fields: &Fields| fields.get("nullable") == Some(&Value::Bool(true));
        if is_nullable(first) || is_nullable(second) {
            return false;
        }
        if let (Some(first), Some(second)) = (values(first, &first_scope), values(second, &second_scope)) {
            return !first.iter().any(|value| second.iter().any(|other| same(value, other)));
        }
        if let (Some(first), Some(second)) = (types(first, &first_scope), types(second, &second_scope)) {
            if !first.iter().any(|kind| second.contains(kind)) {
                return true;
            }
            if first == ["object"] && second == ["object"] && self.objects_are_disjoint(a, b, depth) {
                return true;
            }
        }
        self.branches_are_disjoint(a, b, depth) || self.branches_are_disjoint(b, a, depth)
    }

    fn branches_are_disjoint(&mut self, a: Placed<'a, '_>, b: Placed<'a, '_>, depth: usize) -> bool {
        let Value::Object(fields) = a.0 else { return false };
        if a.1.draft <= Draft::Draft7 && fields.contains_key("$ref") {
            return false;
        }
        for (keyword, all) in [("anyOf", true), ("oneOf", true), ("allOf", false)] {
            let Some(Value::Array(branches)) = fields.get(keyword) else { continue };
            let mut disjoint = branches.iter().enumerate().map(|(index, branch)| {
                let scope = a.1.at(&[keyword, &index.to_string()]);
                self.are_disjoint((branch, &scope), b, depth + 1)
            });
            if if all { disjoint.all(|is| is) } else { disjoint.any(|is| is) } {
                return true;
            }
        }
        false
    }

    /// Objects differ by a property that one must have and the other has otherwise, or not at all.
    fn objects_are_disjoint(&mut self, a: Placed<'a, '_>, b: Placed<'a, '_>, depth: usize) -> bool {
        let (Value::Object(first), Value::Object(second)) = (a.0, b.0) else { return false };
        let required = [first, second].map(|fields| fields.get("required").and_then(super::object::texts));
        let names: Vec<_> = required.into_iter().flatten().flatten().collect();
        names.into_iter().any(|name| match (property(first, name), property(second, name)) {
            (Some(Value::Bool(false)), _) | (_, Some(Value::Bool(false))) => true,
            (Some(of_first), Some(of_second)) => {
                let at = [a.1, b.1].map(|scope| scope.at(&["properties", name]));
                self.are_disjoint((of_first, &at[0]), (of_second, &at[1]), depth + 1)
            }
            _ => false,
        })
    }
}

/// The schema of a property, if it is named or none may be.
fn property<'a>(fields: &'a Fields, name: &str) -> Option<&'a Value> {
    const NONE: &Value = &Value::Bool(false);
    if let Some(value) = fields.get("properties").and_then(|properties| properties.get(name)) {
        return Some(value);
    }
    let is_closed = fields.get("additionalProperties") == Some(NONE) && !fields.contains_key("patternProperties");
    is_closed.then_some(NONE)
}

fn values<'a>(fields: &'a Fields, scope: &Scope) -> Option<Vec<&'a Value>> {
    match (fields.get("const").filter(|_| scope.draft >= Draft::Draft6), fields.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// The types that a schema's values have, numbers as one.
fn types(fields: &Fields, scope: &Scope) -> Option<Vec<&'static str>> {
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if let Some(values) = values(fields, scope) {
        return Some(values.into_iter().map(kind).collect());
    }
    let known = |name: &str| match name {
        "integer" | "number" => Some("number"),
        name => super::TYPES.into_iter().find(|known| *known == name),
    };
    named_types(fields).map(|names| names.into_iter().filter_map(known).collect())
}

/// Whether two values are one: 1 and 1.0 are.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}
