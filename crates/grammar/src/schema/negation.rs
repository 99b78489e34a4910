//! What a schema is not, in words that the library has.

use serde_json::{Value, json};

use super::pattern::{self, Node};
use super::string::exactly_one;
use super::{Draft, Fields, Scope, Translator, count, describes, named_types};

/// Types that share no value.
const APART: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

impl<'a> Translator<'a> {
    /// A schema of every value that this one is not true of; `None` if that cannot be said.
    pub(super) fn negated(&mut self, value: &'a Value, scope: &Scope) -> Option<Value> {
        self.exactly(|this| Ok(this.not_schema(value, scope))).unwrap_or_default()
    }

    fn not_schema(&mut self, value: &'a Value, scope: &Scope) -> Option<Value> {
        self.count(scope).ok()?;
        let fields = match value {
            Value::Bool(is) => return Some(Value::Bool(!is)),
            Value::Object(fields) => fields,
            _ => return None,
        };
        let has_old_reference = scope.draft <= Draft::Draft7 && fields.contains_key("$ref");
        let mut ways = Vec::new();
        for (keyword, value) in fields {
            if describes(keyword) || !scope.draft.knows(keyword) || has_old_reference && keyword != "$ref" {
                continue;
            }
            match self.not_keyword(keyword, value, fields, scope)? {
                Value::Bool(true) => return Some(Value::Bool(true)),
                Value::Bool(false) => {}
                way => ways.push(way),
            }
        }
        Some(any_of(ways))
    }

    fn not_keyword(&mut self, keyword: &str, value: &'a Value, fields: &'a Fields, scope: &Scope) -> Option<Value> {
        let more = |value: &Value| count(value)?.checked_add(1);
        let less = |value: &Value| count(value).map(|count| count.checked_sub(1));
        // From 0 on is always so.
        let at_most = |kind: &str, keyword: &str| {
            let less = less(value)?;
            Some(less.map_or(Value::Bool(false), |less| json!({ "type": kind, keyword: less })))
        };
        match keyword {
            "type" => not_types(&named_types(fields)?),
            "const" => self.not_values(std::slice::from_ref(value)),
            "enum" => self.not_values(value.as_array()?),
            "minimum" if value.is_number() && !fields.contains_key("exclusiveMinimum") => {
                Some(json!({ "type": "number", "exclusiveMaximum": value }))
            }
            "maximum" if value.is_number() && !fields.contains_key("exclusiveMaximum") => {
                Some(json!({ "type": "number", "exclusiveMinimum": value }))
            }
            "exclusiveMinimum" if value.is_number() && !fields.contains_key("minimum") => {
                Some(json!({ "type": "number", "maximum": value }))
            }
            "exclusiveMaximum" if value.is_number() && !fields.contains_key("maximum") => {
                Some(json!({ "type": "number", "minimum": value }))
            }
            "minLength" => at_most("string", "maxLength"),
            "minItems" => at_most("array", "maxItems"),
            "minProperties" => at_most("object", "maxProperties"),
            "maxLength" => Some(json!({ "type": "string", "minLength": more(value)? })),
            "maxItems" => Some(json!({ "type": "array", "minItems": more(value)? })),
            "maxProperties" => Some(json!({ "type": "object", "minProperties": more(value)? })),
            "pattern" => {
                let node = pattern::parse(value.as_str()?).ok()?;
                self.not_text(&node)
            }
            "required" => {
                let names = super::object::texts(value)?;
                let absent = |name: &str| json!({ "type": "object", "properties": { name: false } });
                Some(any_of(names.into_iter().map(absent).collect()))
            }
            "properties" => {
                let mut ways = Vec::new();
                for (name, value) in value.as_object()? {
                    match self.not_schema(value, &scope.at(&["properties", name]))? {
                        Value::Bool(false) => {}
                        not => ways.push(json!({ "type": "object", "required": [name], "properties": { name: not } })),
                    }
                }
                Some(any_of(ways))
            }
            "anyOf" => Some(json!({ "allOf": self.not_each(keyword, value, scope)? })),
            "allOf" => Some(any_of(self.not_each(keyword, value, scope)?)),
            "not" => self.schema(value, &scope.opened(true).at(&["not"])).ok(),
            "$ref" => {
                let target = self.target(keyword, value, scope).ok()?;
                let inner = Scope { depth: scope.depth + 1, ..self.scope_of(&target, true) };
                let value = self.document.at(&target)?;
                self.not_schema(value, &inner)
            }
            "additionalProperties" | "items" | "propertyNames" if super::is_true(value) => Some(Value::Bool(false)),
            "uniqueItems" if *value == Value::Bool(false) => Some(Value::Bool(false)),
            _ => None,
        }
    }

    fn not_each(&mut self, keyword: &str, value: &'a Value, scope: &Scope) -> Option<Vec<Value>> {
        let values = value.as_array()?.iter().enumerate();
        values.map(|(index, value)| self.not_schema(value, &scope.at(&[keyword, &index.to_string()]))).collect()
    }

    fn not_text(&mut self, node: &Node) -> Option<Value> {
        match self.automaton(|| pattern::both(&[], &[node])).ok()? {
            Some(pattern) => Some(json!({ "type": "string", "pattern": pattern })),
            None => Some(Value::Bool(false)),
        }
    }

    fn not_values(&mut self, values: &[Value]) -> Option<Value> {
        let has = |is: fn(&Value) -> bool| values.iter().any(is);
        let mut ways = Vec::new();
        if has(Value::is_array) || has(Value::is_object) || values.iter().any(super::number::is_inexact) {
            return None;
        }
        let mut types: Vec<_> = vec!["array", "object"];
        if !has(Value::is_null) {
            types.push("null");
        }
        match [true, false].map(|is| values.contains(&Value::Bool(is))) {
            [true, true] => {}
            [false, false] => types.push("boolean"),
            [is_true, _] => ways.push(json!({ "const": !is_true })),
        }
        if has(Value::is_string) {
            ways.push(self.not_text(&exactly_one(values))?);
        } else {
            types.push("string");
        }
        let mut numbers: Vec<_> = values.iter().filter(|value| value.is_number()).collect();
        numbers.sort_by(|a, b| a.as_f64().partial_cmp(&b.as_f64()).unwrap_or(std::cmp::Ordering::Equal));
        numbers.dedup_by(|a, b| a.as_f64() == b.as_f64());
        if let (Some(first), Some(last)) = (numbers.first(), numbers.last()) {
            ways.push(json!({ "type": "number", "exclusiveMaximum": first }));
            ways.push(json!({ "type": "number", "exclusiveMinimum": last }));
        } else {
            types.push("number");
        }
        let between = numbers.windows(2);
        ways.extend(
            between.map(|pair| json!({ "type": "number", "exclusiveMinimum": pair[0], "exclusiveMaximum": pair[1] })),
        );
        ways.push(json!({ "type": types }));
        Some(any_of(ways))
    }
}

fn not_types(types: &[&str]) -> Option<Value> {
    // A number that is no integer cannot be said.
    if types.contains(&"integer") && !types.contains(&"number") {
        return None;
    }
    let others: Vec<_> = APART.into_iter().filter(|other| !types.contains(other)).collect();
    Some(if others.is_empty() { Value::Bool(false) } else { json!({ "type": others }) })
}

/// Any of these; `false` if there are none.
fn any_of(mut ways: Vec<Value>) -> Value {
    ways.retain(|way| *way != Value::Bool(false));
    if ways.contains(&Value::Bool(true)) {
        return Value::Bool(true);
    }
    match ways.len() {
        0 => Value::Bool(false),
        1 => ways.swap_remove(0),
        _ => json!({ "anyOf": ways }),
    }
}
