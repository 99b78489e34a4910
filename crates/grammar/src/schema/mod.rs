//! JSON schemas, as the library takes them.
//!
//! The library knows a part of JSON Schema, and reads some of it otherwise. So a schema is written
//! anew: what is true of every value is left out, references are found, and what the library has no
//! word for is said in words that it has. What is not served is refused, with its place; if the
//! schema is not to be held to exactly, it is left out.

mod array;
mod branches;
mod closing;
mod disjoint;
mod format;
mod keywords;
mod lenient;
mod names;
mod number;
mod object;
mod pattern;
mod reference;
mod string;

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde_json::{Map, Value, json};

use crate::GrammarError;
use crate::budget::is_spent;
use keywords::{UNSERVED, count, describes, is_true, subject};
use reference::Targets;

/// Most schemas that are written for one.
const MAX_SCHEMAS: usize = 20_000;
/// Most schemas in schemas, and references that are followed at once.
const MAX_DEPTH: usize = 96;
/// Most problems that are told of what was left out.
const MAX_DROPPED: usize = 32;
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// How exactly a schema is to be held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Demand {
    /// Holds to it as far as can be: what is not served is left out.
    Lenient,
    /// Holds to it exactly, but unknown formats say nothing.
    Plain,
    /// Holds to it exactly, and objects have no properties but those that are named.
    Strict,
}

/// What is wrong with a place of a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) pointer: String,
    pub(crate) what: String,
}

impl Problem {
    /// The error of a schema that is called so.
    pub(crate) fn of(&self, schema: &str) -> GrammarError {
        GrammarError::Invalid(format!("{schema} {self}"))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at #{}: {}", self.pointer, self.what)
    }
}

/// A schema as the library takes it.
#[derive(Debug)]
pub(crate) struct Translated {
    pub(crate) schema: Value,
    /// Problems with what was left out, the first of them.
    pub(crate) dropped: Vec<Problem>,
}

/// Writes a schema, or a place in it by its pointer, for the library. Of schemas at `loosened` only
/// the types are left.
///
/// # Errors
/// The value is no schema, or has what is not served.
pub(crate) fn translated(
    schema: &Value,
    pointer: &str,
    demand: Demand,
    loosened: &HashSet<String>,
) -> Result<Translated, Problem> {
    let tidied = if demand == Demand::Lenient { Some(lenient::tidied(schema)) } else { None };
    let mut translator = Translator {
        targets: Targets::new(tidied.as_ref().unwrap_or(schema)),
        demand,
        loosened,
        definitions: Map::new(),
        names: HashMap::new(),
        pending: Vec::new(),
        dropped: Vec::new(),
        patterns: HashMap::new(),
        schemas: 0,
        comparisons: 0,
        work: pattern::Work::default(),
        common_multiple: 1,
        start: pointer.to_owned(),
    };
    let schema = translator.document(pointer)?;
    Ok(Translated { schema, dropped: translator.dropped })
}

/// Schemas inside a place of a schema, and what it refers to, by their pointers. Definitions are
/// found by what refers to them.
pub(crate) fn inner_places(schema: &Value, pointer: &str) -> Vec<String> {
    let Some(place) = schema.pointer(pointer) else { return Vec::new() };
    let inner = reference::subschemas(place).into_iter();
    let inner = inner.filter(|(more, _)| !more.starts_with("/$defs/") && !more.starts_with("/definitions/"));
    let mut places: Vec<_> = inner.map(|(more, _)| format!("{pointer}{more}")).collect();
    if let Some(reference) = place.get("$ref").and_then(Value::as_str) {
        places.extend(Targets::new(schema).resolved(reference, pointer));
    }
    places
}

struct Translator<'a> {
    targets: Targets<'a>,
    demand: Demand,
    loosened: &'a HashSet<String>,
    definitions: Fields,
    /// Names of definitions, by their pointers and whether they are open.
    names: HashMap<(String, bool), String>,
    pending: Vec<(Scope, String)>,
    dropped: Vec<Problem>,
    /// Patterns by their texts, as they are written.
    patterns: HashMap<String, Result<Vec<String>, String>>,
    schemas: usize,
    comparisons: usize,
    work: pattern::Work,
    common_multiple: u64,
    /// The place that is written.
    start: String,
}

/// Where a schema is.
#[derive(Debug, Clone)]
struct Scope {
    pointer: String,
    /// Whether the schema around it says which properties there are.
    is_open: bool,
    depth: usize,
}

impl Scope {
    fn new(pointer: &str, is_open: bool) -> Self {
        Self { pointer: pointer.to_owned(), is_open, depth: 0 }
    }

    fn at(&self, names: &[&str]) -> Self {
        let mut inner = self.clone();
        for name in names {
            inner.pointer.push('/');
            inner.pointer.push_str(&reference::token(name));
        }
        inner.depth += 1;
        inner
    }

    /// A problem with the schema here.
    fn own_problem(&self, what: impl Into<String>) -> Problem {
        Problem { pointer: self.pointer.clone(), what: what.into() }
    }

    /// A problem with a keyword here.
    fn problem(&self, keyword: &str, what: impl Into<String>) -> Problem {
        self.at(&[keyword]).own_problem(what)
    }
}

type Fields = Map<String, Value>;

/// What is written of one schema.
#[derive(Default)]
struct Writing {
    fields: Fields,
    /// Schemas that hold beside.
    beside: Vec<Value>,
}

impl Writing {
    fn set(&mut self, keyword: &str, value: impl Into<Value>) {
        self.fields.insert(keyword.to_owned(), value.into());
    }

    fn value(mut self) -> Value {
        if !self.beside.is_empty() {
            let all = self.fields.entry("allOf").or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(all) = all {
                all.append(&mut self.beside);
            }
        }
        Value::Object(self.fields)
    }
}

impl<'a> Translator<'a> {
    fn document(&mut self, pointer: &str) -> Result<Value, Problem> {
        let scope = Scope::new(pointer, false);
        let mut schema = match self.schema(self.targets.at(pointer), &scope)? {
            Value::Object(fields) => fields,
            Value::Bool(true) => Fields::new(),
            _ => return Err(scope.own_problem("no value has this form")),
        };
        while let Some((scope, name)) = self.pending.pop() {
            let definition = self.schema(self.targets.at(&scope.pointer), &scope)?;
            self.definitions.insert(name, definition);
        }
        if !self.definitions.is_empty() {
            schema.insert("$defs".to_owned(), Value::Object(std::mem::take(&mut self.definitions)));
        }
        Ok(Value::Object(schema))
    }

    /// Refuses what is not served, or leaves it out.
    fn unserved(&mut self, problem: Problem) -> Result<(), Problem> {
        if self.demand != Demand::Lenient {
            return Err(problem);
        }
        if self.dropped.len() < MAX_DROPPED && !self.dropped.contains(&problem) {
            self.dropped.push(problem);
        }
        Ok(())
    }

    /// Counts schemas that are written.
    fn count(&mut self, schemas: usize, scope: &Scope) -> Result<(), Problem> {
        self.schemas += schemas;
        if self.schemas > MAX_SCHEMAS || scope.depth > MAX_DEPTH || is_spent() {
            return Err(scope.own_problem("the schema is too large"));
        }
        Ok(())
    }

    fn schema(&mut self, value: &'a Value, scope: &Scope) -> Result<Value, Problem> {
        self.count(1, scope)?;
        let fields = match value {
            Value::Bool(_) => return Ok(value.clone()),
            Value::Object(fields) => fields,
            _ => {
                self.unserved(scope.own_problem("a schema is an object, true or false"))?;
                return Ok(Value::Bool(true));
            }
        };
        let value = if self.loosened.contains(&scope.pointer) {
            self.types_alone(fields, scope)?
        } else {
            self.fields(fields, scope)?
        };
        // OpenAPI's.
        let is_nullable = fields.get("nullable") == Some(&Value::Bool(true));
        Ok(if is_nullable { json!({ "anyOf": [value, { "type": "null" }] }) } else { value })
    }

    fn fields(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Value, Problem> {
        let mut writing = Writing::default();
        if self.targets.is_old
            && let Some(reference) = fields.get("$ref")
        {
            // What is beside it says nothing in these versions.
            self.reference(reference, scope, &mut writing)?;
            return Ok(writing.value());
        }
        let closing = self.closing(fields, scope)?;
        let inner = Scope { is_open: scope.is_open || self.closes(fields), ..scope.clone() };
        let mut has_objects = false;
        let mut has_arrays = false;
        let types = disjoint::types(fields);
        let is_of_others =
            |keyword| types.as_ref().zip(subject(keyword)).is_some_and(|(types, of)| !types.contains(&of));
        for (keyword, value) in fields.iter().filter(|(keyword, _)| !is_of_others(keyword)) {
            match keyword.as_str() {
                "type" => self.types(value, scope, &mut writing)?,
                "enum" | "const" => self.literals(keyword, value, scope, &mut writing)?,
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                    self.number(keyword, fields, scope, &mut writing)?;
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                    self.counted(keyword, value, scope, &mut writing)?;
                }
                "pattern" => self.pattern(value, fields, scope, &mut writing)?,
                "format" => self.format(value, fields, scope, &mut writing)?,
                "properties" | "patternProperties" | "additionalProperties" | "propertyNames"
                    if !std::mem::replace(&mut has_objects, true) =>
                {
                    self.properties(fields, scope, closing.as_ref(), &mut writing)?;
                }
                "required" => self.required(value, scope, &mut writing)?,
                "items" | "prefixItems" | "additionalItems" if !std::mem::replace(&mut has_arrays, true) => {
                    self.items(fields, scope, &mut writing)?;
                }
                "allOf" | "anyOf" | "oneOf" => self.branches(keyword, value, &inner, &mut writing)?,
                "$ref" => self.reference(value, &inner, &mut writing)?,
                "not" if is_true(value) => writing.beside.push(Value::Bool(false)),
                "if" => self.condition(value, fields, &inner, &mut writing)?,
                keyword if UNSERVED.contains(&keyword) && !self.says_nothing(keyword, value, fields, scope) => {
                    self.unserved(scope.problem(keyword, "this keyword is not served"))?;
                }
                // What describes, and what is not of JSON Schema.
                _ => {}
            }
        }
        if !has_objects && closing.is_some() {
            self.properties(fields, scope, closing.as_ref(), &mut writing)?;
        }
        Ok(writing.value())
    }

    fn literals(&mut self, keyword: &str, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let values = match (keyword, value) {
            ("const", value) => std::slice::from_ref(value),
            (_, Value::Array(values)) if !values.is_empty() => values,
            _ => return self.unserved(scope.problem(keyword, "expected a list of values")),
        };
        if values.iter().any(number::is_inexact) {
            return self.unserved(scope.problem(keyword, "integers beyond 2^53 are not exact"));
        }
        writing.set(keyword, value.clone());
        Ok(())
    }

    fn required(&mut self, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        if !value.as_array().is_some_and(|names| names.iter().all(Value::is_string)) {
            return self.unserved(scope.problem("required", "expected a list of names"));
        }
        writing.set("required", value.clone());
        Ok(())
    }

    fn types_alone(&mut self, fields: &Fields, scope: &Scope) -> Result<Value, Problem> {
        let mut writing = Writing::default();
        if let Some(value) = fields.get("type") {
            self.types(value, scope, &mut writing)?;
        }
        Ok(writing.value())
    }

    fn types(&mut self, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let types = match value {
            Value::String(_) => std::slice::from_ref(value),
            Value::Array(types) if !types.is_empty() => types,
            _ => return self.unserved(scope.problem("type", "expected a type, or a list of types")),
        };
        let unknown = types.iter().find(|one| !one.as_str().is_some_and(|name| TYPES.contains(&name)));
        if let Some(unknown) = unknown {
            let text: String = unknown.to_string().chars().take(64).collect();
            return self.unserved(scope.problem("type", format!("{text} is no type: {}", TYPES.join(", "))));
        }
        writing.set("type", value.clone());
        Ok(())
    }

    /// Writes a number of characters, items or properties.
    fn counted(&mut self, keyword: &str, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let Some(count) = count(value) else {
            return self.unserved(scope.problem(keyword, "expected a whole number from 0"));
        };
        if count > 0 || keyword.starts_with("max") {
            writing.set(keyword, count);
        }
        Ok(())
    }
}

/// The types that a schema's own keyword `type` lets be; `None`: all.
fn named_types(fields: &Fields) -> Option<Vec<&str>> {
    let names = match fields.get("type")? {
        Value::String(name) => vec![name.as_str()],
        Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>()?,
        _ => return None,
    };
    let are_known = !names.is_empty() && names.iter().all(|name| TYPES.contains(name));
    are_known.then_some(names)
}
