//! Keywords that are served, that are not, and that say nothing.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::array::item_keywords;
use super::disjoint::{numeric, types};
use super::{Fields, Problem, Scope, TYPES, Translator, Writing, format, named_types};

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
/// Patterns that are found in every text.
const IN_EVERY_TEXT: [&str; 8] = ["", "^", "$", ".*", "^.*", ".*$", r"[\s\S]*", r"^[\s\S]*$"];

impl<'a> Translator<'a> {
    /// Whether a keyword that is not served is true of all that the rest of its schema takes.
    pub(super) fn says_nothing(&mut self, keyword: &str, value: &'a Value, fields: &'a Fields, scope: &Scope) -> bool {
        if is_idle(keyword, value, None) {
            return true;
        }
        match keyword {
            "contains" => self.contains_enough(value, fields),
            "dependencies" | "dependentRequired" | "dependentSchemas" => Known::new(fields).has_dependents(value),
            "not" => self.is_apart(keyword, value, scope),
            // Schemas of all items evaluate them.
            "unevaluatedItems" => fields.contains_key(item_keywords(fields).1) || first_alone(fields).is_some(),
            "uniqueItems" => {
                let (first, _) = item_keywords(fields);
                most_items(fields).is_some_and(|most| most <= 1)
                    || first_alone(fields).is_some_and(|items| self.are_apart(first, items, scope))
            }
            _ => false,
        }
    }

    /// Writes what a condition that always holds, or never, leads to.
    pub(super) fn condition(
        &mut self,
        value: &'a Value,
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let branches = ["then", "else"].map(|branch| fields.get_key_value(branch));
        let known = Known::new(fields);
        let [then, otherwise] = branches.map(|branch| branch.filter(|(_, value)| !known.implies(value)));
        let branch = if known.implies(value) {
            then
        } else if (then, otherwise) == (None, None) || self.is_apart("if", value, scope) {
            otherwise
        } else {
            return self.unserved(scope.problem("if", "this keyword is not served"));
        };
        if let Some((branch, value)) = branch {
            writing.beside.push(self.schema(value, &scope.at(&[branch]))?);
        }
        Ok(())
    }

    /// Whether no value is of the schema at a place and of the one that its keyword has.
    fn is_apart(&mut self, keyword: &str, value: &'a Value, scope: &Scope) -> bool {
        let own = self.targets.at(&scope.pointer);
        takes_none(value, None) || self.are_disjoint((own, scope.clone()), (value, scope.at(&[keyword])), 0)
    }

    /// Whether arrays have as many items of a schema as they must, whatever these are.
    fn contains_enough(&self, value: &Value, fields: &Fields) -> bool {
        let bound = |keyword: &str| fields.get(keyword).and_then(count);
        // The old versions know no bounds but one item.
        let least = if self.targets.is_old { 1 } else { bound("minContains").unwrap_or(1) };
        let has_least = least == 0 || is_true(value) && bound("minItems").is_some_and(|items| items >= least);
        let is_bounded = !self.targets.is_old && fields.contains_key("maxContains");
        let has_most = bound("maxContains").zip(most_items(fields)).is_some_and(|(most, items)| items <= most);
        has_least && (!is_bounded || has_most || takes_none(value, None))
    }
}

/// The most items that an array has.
fn most_items(fields: &Fields) -> Option<u64> {
    let (first, rest) = item_keywords(fields);
    let first = fields.get(first).and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let is_closed = fields.get(rest).is_some_and(|rest| takes_none(rest, None));
    let most = fields.get("maxItems").and_then(count);
    if is_closed { Some(most.map_or(first, |most| most.min(first))) } else { most }
}

/// The schemas of the first items, if there are no others.
fn first_alone(fields: &Fields) -> Option<&[Value]> {
    let items = fields.get(item_keywords(fields).0)?.as_array()?;
    (most_items(fields)? <= items.len() as u64).then_some(items)
}

/// What is known of all values that a schema takes.
struct Known<'f> {
    types: Vec<&'f str>,
    /// Names of properties that must be there.
    required: HashSet<&'f Value>,
}

impl<'f> Known<'f> {
    fn new(fields: &'f Fields) -> Self {
        let mut types = named_types(fields).unwrap_or_else(|| TYPES.to_vec());
        if fields.get("nullable") == Some(&Value::Bool(true)) {
            types.push("null");
        }
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten().collect();
        Self { types, required }
    }

    /// Whether another schema takes all of them.
    fn implies(&self, other: &Value) -> bool {
        let Value::Object(fields) = other else { return is_true(other) };
        fields.iter().all(|(keyword, value)| {
            let names = if keyword == "required" { value.as_array() } else { None };
            describes(keyword)
                || self.types.iter().all(|of| is_idle(keyword, value, Some(of)))
                || names.is_some_and(|names| names.iter().all(|name| self.required.contains(name)))
        })
    }

    /// Whether all that some properties bring with them is there in any case.
    fn has_dependents(&self, dependents: &Value) -> bool {
        let is_there = |(name, dependent): (&String, &Value)| match dependent {
            Value::Array(names) => names.iter().all(|other| other == name || self.required.contains(other)),
            schema => self.implies(schema),
        };
        dependents.as_object().is_some_and(|all| all.iter().all(is_there))
    }
}

/// Whether a schema is true of every value, as far as it says so itself.
pub(super) fn is_true(value: &Value) -> bool {
    takes_all(value, None)
}

/// Whether a schema takes all values of a type; `None`: all values.
pub(super) fn takes_all(value: &Value, of: Option<&str>) -> bool {
    match value {
        Value::Bool(is) => *is,
        Value::Object(fields) => {
            fields.iter().all(|(keyword, value)| describes(keyword) || is_idle(keyword, value, of))
        }
        _ => false,
    }
}

/// Whether a schema takes no value of a type; `None`: none at all.
pub(super) fn takes_none(value: &Value, of: Option<&str>) -> bool {
    let fields = match value {
        Value::Bool(is) => return !is,
        // In old versions what is beside a reference says nothing.
        Value::Object(fields) if !fields.contains_key("$ref") && !fields.contains_key("nullable") => fields,
        _ => return false,
    };
    if types(fields).zip(of).is_some_and(|(types, of)| !types.contains(&numeric(of))) {
        return true;
    }
    fields.iter().any(|(keyword, value)| match (keyword.as_str(), value) {
        ("not", value) => takes_all(value, of),
        ("enum", Value::Array(values)) => values.is_empty(),
        ("allOf", Value::Array(values)) => values.iter().any(|value| takes_none(value, of)),
        ("anyOf" | "oneOf", Value::Array(values)) => {
            !values.is_empty() && values.iter().all(|value| takes_none(value, of))
        }
        _ => false,
    })
}

/// Whether a keyword is true of all values of a type; `None`: of all values.
pub(super) fn is_idle(keyword: &str, value: &Value, of: Option<&str>) -> bool {
    if subject(keyword).zip(of).is_some_and(|(subject, of)| subject != numeric(of)) {
        return true;
    }
    match (keyword, value) {
        // It only adds a value.
        ("nullable", _) => true,
        ("exclusiveMaximum" | "exclusiveMinimum" | "uniqueItems", value) => *value == false,
        ("minItems" | "minLength" | "minProperties", value) => count(value) == Some(0),
        ("pattern", Value::String(pattern)) => IN_EVERY_TEXT.contains(&pattern.as_str()),
        ("format", Value::String(name)) => format::says_nothing(name),
        ("type", Value::String(name)) => of == Some(name) || (of == Some("integer") && name == "number"),
        ("type", Value::Array(names)) => match of {
            Some(of) => names.iter().any(|name| is_idle("type", name, Some(of))),
            None => TYPES.iter().all(|of| names.iter().any(|name| is_idle("type", name, Some(of)))),
        },
        ("required", Value::Array(names)) => names.is_empty(),
        ("items" | "prefixItems", Value::Array(values)) => values.iter().all(is_true),
        (
            "additionalItems" | "additionalProperties" | "items" | "unevaluatedItems" | "unevaluatedProperties",
            value,
        ) => is_true(value),
        ("propertyNames", value) => takes_all(value, Some("string")),
        ("dependentRequired" | "dependencies", Value::Object(named)) => {
            named.values().all(|value| is_true(value) || *value == json!([]))
        }
        ("dependentSchemas" | "patternProperties" | "properties", Value::Object(named)) => named.values().all(is_true),
        ("allOf", Value::Array(values)) => values.iter().all(|value| takes_all(value, of)),
        ("anyOf", Value::Array(values)) => values.iter().any(|value| takes_all(value, of)),
        ("oneOf", Value::Array(values)) => {
            let others = values.iter().filter(|value| !takes_none(value, of));
            values.iter().any(|value| takes_all(value, of)) && others.count() == 1
        }
        ("not", value) => takes_none(value, of),
        _ => false,
    }
}

/// The type of the values that a keyword speaks of; `None`: all.
pub(super) fn subject(keyword: &str) -> Option<&'static str> {
    Some(match keyword {
        "exclusiveMaximum" | "exclusiveMinimum" | "maximum" | "minimum" | "multipleOf" => "number",
        "format" | "maxLength" | "minLength" | "pattern" => "string",
        "additionalItems" | "contains" | "items" | "maxItems" | "minItems" | "prefixItems" | "unevaluatedItems"
        | "uniqueItems" => "array",
        "additionalProperties"
        | "dependencies"
        | "dependentRequired"
        | "dependentSchemas"
        | "maxProperties"
        | "minProperties"
        | "patternProperties"
        | "properties"
        | "propertyNames"
        | "required"
        | "unevaluatedProperties" => "object",
        _ => return None,
    })
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
