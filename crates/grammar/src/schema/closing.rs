//! Which properties an object has beyond those it names.

use std::collections::HashSet;

use serde_json::Value;

use super::disjoint::types;
use super::{Demand, Fields, Problem, Scope, Translator, is_true, named_types};

/// Keywords that say that a schema is of an object.
const OF_OBJECTS: [&str; 7] =
    ["allOf", "properties", "patternProperties", "required", "minProperties", "maxProperties", "propertyNames"];

/// What all properties are that a schema and its branches do not name.
pub(super) struct Closing {
    pub(super) rest: Value,
    /// Names that branches give, and in strict schemas those that are required.
    pub(super) names: Vec<String>,
}

/// Names of properties that branches give.
#[derive(Default)]
struct Found {
    names: Vec<String>,
    required: Vec<String>,
    seen: HashSet<String>,
    /// Whether some branches need not hold.
    has_ways: bool,
    /// Whether some branches say what all other properties are.
    has_others: bool,
    /// Whether some branches name properties by patterns.
    has_patterns: bool,
}

impl Found {
    fn read_required(&mut self, fields: &Fields) {
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
        self.required.extend(required.filter_map(Value::as_str).map(str::to_owned));
    }
}

impl<'a> Translator<'a> {
    /// Whether a schema says which properties there are, for its branches, too.
    pub(super) fn closes(&self, fields: &Fields) -> bool {
        let is_of_objects = match named_types(fields) {
            Some(types) => types.contains(&"object"),
            None => OF_OBJECTS.iter().any(|keyword| fields.contains_key(*keyword)),
        };
        self.demand == Demand::Strict && is_of_objects
    }

    /// What properties without a name are, if the schema leaves that open.
    pub(super) fn closing(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Option<Closing>, Problem> {
        let rest = fields.get("unevaluatedProperties");
        if types(fields).is_some_and(|types| !types.contains(&"object")) {
            return Ok(None);
        }
        let closes = self.closes(fields) && !scope.is_open && !fields.contains_key("propertyNames");
        if fields.contains_key("additionalProperties") || rest.is_some_and(is_true) || (rest.is_none() && !closes) {
            return Ok(None);
        }
        let mut found = Found::default();
        self.read_branches(fields, scope, &mut found);
        self.count(found.seen.len() + found.names.len() + found.required.len(), scope)?;
        let mut names = found.names;
        let Some(rest) = rest else {
            let is_open = found.has_others || found.has_patterns;
            names.append(&mut found.required);
            let closing = Closing { rest: Value::Bool(false), names };
            return Ok((!is_open).then_some(closing));
        };
        if found.has_ways || found.has_patterns {
            let what = "it is not served beside branches that need not hold, or that have patterns";
            return self.unserved(scope.problem("unevaluatedProperties", what)).map(|()| None);
        }
        if found.has_others {
            return Ok(None);
        }
        let rest = self.schema(rest, &scope.at(&["unevaluatedProperties"]))?;
        Ok(Some(Closing { rest, names }))
    }

    /// Reads the names of properties that a schema's branches give.
    fn read_branches(&self, fields: &'a Fields, scope: &Scope, found: &mut Found) {
        found.read_required(fields);
        let reference = fields.get("$ref").and_then(Value::as_str);
        if let Some(pointer) = reference.and_then(|reference| self.targets.resolved(reference, &scope.pointer)) {
            self.read_branch(self.targets.at(&pointer), &Scope::new(&pointer, true), found);
        }
        for keyword in ["allOf", "anyOf", "oneOf"] {
            for (index, value) in fields.get(keyword).and_then(Value::as_array).into_iter().flatten().enumerate() {
                self.read_branch(value, &scope.at(&[keyword, &index.to_string()]), found);
            }
        }
        if fields.contains_key("if") {
            for (keyword, value) in ["then", "else"].into_iter().filter_map(|branch| fields.get_key_value(branch)) {
                self.read_branch(value, &scope.at(&[keyword]), found);
            }
        }
        found.has_ways |= ["anyOf", "oneOf", "if", "dependentSchemas"].iter().any(|name| fields.contains_key(*name));
    }

    fn read_branch(&self, value: &'a Value, scope: &Scope, found: &mut Found) {
        let Value::Object(fields) = value else { return };
        if !found.seen.insert(scope.pointer.clone()) {
            return;
        }
        let properties = fields.get("properties").and_then(Value::as_object);
        found.names.extend(properties.into_iter().flat_map(|properties| properties.keys().cloned()));
        let is_open = |keyword| fields.get(keyword).is_some_and(|value| *value != Value::Bool(false));
        found.has_others |= is_open("additionalProperties") || is_open("unevaluatedProperties");
        found.has_patterns |= fields.contains_key("patternProperties");
        self.read_branches(fields, scope, found);
    }
}
