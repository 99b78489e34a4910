//! JSON schemas, as the library takes them.
//!
//! The library knows a part of JSON Schema, and reads some of it otherwise. So a schema is written
//! anew: what is true of every value is left out, references are found, and what the library has no
//! word for is said in words that it has. What cannot be said is refused, with its place; if the
//! schema is not to be held to exactly, it is left out.

mod array;
mod condition;
mod disjoint;
mod document;
mod format;
mod negation;
mod number;
mod object;
mod pattern;
mod reference;
mod string;

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde_json::{Map, Value, json};

use crate::GrammarError;
use document::{Document, Draft, token};

/// Most schemas that are written for one.
const MAX_SCHEMAS: usize = 20_000;
/// Most schemas in schemas, and references that are followed at once.
const MAX_DEPTH: usize = 96;
/// Most automata that are made for a schema: each takes a few milliseconds at most.
const MAX_AUTOMATA: usize = 64;
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// How exactly a schema is to be held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Demand {
    /// As far as can be: what is not served is left out.
    Lenient,
    /// Exactly, but that unknown formats say nothing.
    Plain,
    /// Exactly, and objects have no properties but those that are named.
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
    /// What was left out.
    pub(crate) dropped: Vec<Problem>,
}

/// Writes a schema, or a place in it by its pointer, for the library. Of schemas at `loosened` only
/// the types are left.
///
/// # Errors
/// It is none, or has what is not served.
pub(crate) fn translated(
    schema: &Value,
    pointer: &str,
    demand: Demand,
    loosened: &HashSet<String>,
) -> Result<Translated, Problem> {
    let mut translator = Translator {
        document: Document::new(schema),
        demand,
        loosened,
        is_exact: false,
        definitions: Map::new(),
        names: HashMap::new(),
        pending: Vec::new(),
        dropped: Vec::new(),
        schemas: 0,
        comparisons: 0,
        automata: 0,
        common_multiple: 1,
        start: pointer.to_owned(),
    };
    translator.document(pointer)
}

/// Schemas inside a place of a schema, and those that it refers to, by their pointers.
pub(crate) fn inner_places(schema: &Value, pointer: &str) -> Vec<String> {
    let Some(place) = schema.pointer(pointer) else { return Vec::new() };
    let inner = document::subschemas(place).into_iter().map(|(more, _)| format!("{pointer}{more}"));
    let is_definition = |pointer: &String| pointer.contains("/$defs/") || pointer.contains("/definitions/");
    let mut places: Vec<_> =
        inner.filter(|inner| !is_definition(inner) || is_definition(&pointer.to_owned())).collect();
    if let Some(reference) = place.get("$ref").and_then(Value::as_str) {
        places.extend(Document::new(schema).resolved(reference, pointer));
    }
    places
}

struct Translator<'a> {
    document: Document<'a>,
    demand: Demand,
    loosened: &'a HashSet<String>,
    /// Nothing may be left out here: what is less strict inside is more strict outside.
    is_exact: bool,
    definitions: Map<String, Value>,
    names: HashMap<(String, bool), String>,
    pending: Vec<(Scope, String)>,
    dropped: Vec<Problem>,
    schemas: usize,
    comparisons: usize,
    automata: usize,
    common_multiple: u64,
    /// The place that is written.
    start: String,
}

/// Where a schema is.
#[derive(Debug, Clone)]
struct Scope {
    pointer: String,
    draft: Draft,
    /// Whether the schema around it says which properties there are.
    is_open: bool,
    depth: usize,
}

impl Scope {
    fn at(&self, tokens: &[&str]) -> Self {
        let mut inner = self.clone();
        for name in tokens {
            inner.pointer.push('/');
            inner.pointer.push_str(&token(name));
        }
        inner.depth += 1;
        inner
    }

    fn opened(&self, is_open: bool) -> Self {
        Self { is_open: self.is_open || is_open, ..self.clone() }
    }

    /// A problem with a keyword here.
    fn problem(&self, keyword: &str, what: impl Into<String>) -> Problem {
        Problem { pointer: self.at(&[keyword]).pointer, what: what.into() }
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

impl<'a> Translator<'a> {
    fn document(&mut self, pointer: &str) -> Result<Translated, Problem> {
        let scope = self.scope_of(pointer, false);
        let root = self.document.at(pointer).unwrap_or(&Value::Null);
        let mut schema = match self.schema(root, &scope)? {
            Value::Object(fields) => fields,
            Value::Bool(true) => Fields::new(),
            _ => return Err(Problem { pointer: pointer.to_owned(), what: "no value has this form".to_owned() }),
        };
        while let Some((scope, name)) = self.pending.pop() {
            let value = self.document.at(&scope.pointer).unwrap_or(&Value::Null);
            let definition = self.schema(value, &scope)?;
            self.definitions.insert(name, definition);
        }
        if !self.definitions.is_empty() {
            schema.insert("$defs".to_owned(), Value::Object(std::mem::take(&mut self.definitions)));
        }
        Ok(Translated { schema: Value::Object(schema), dropped: std::mem::take(&mut self.dropped) })
    }

    fn scope_of(&self, pointer: &str, is_open: bool) -> Scope {
        Scope { pointer: pointer.to_owned(), draft: self.document.draft(pointer), is_open, depth: 0 }
    }

    /// Refuses what is not served, or leaves it out.
    fn unserved(&mut self, problem: Problem) -> Result<(), Problem> {
        if self.demand != Demand::Lenient || self.is_exact {
            return Err(problem);
        }
        if !self.dropped.contains(&problem) {
            self.dropped.push(problem);
        }
        Ok(())
    }

    /// Does something of which nothing may be left out.
    fn exactly<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, Problem>) -> Result<T, Problem> {
        let before = std::mem::replace(&mut self.is_exact, true);
        let outcome = work(self);
        self.is_exact = before;
        outcome
    }

    /// Counts an automaton, and makes it.
    fn automaton<T>(&mut self, make: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        self.automata += 1;
        if self.automata > MAX_AUTOMATA {
            return Err(format!("more than {MAX_AUTOMATA} patterns that have to be combined"));
        }
        make()
    }

    fn schema(&mut self, value: &'a Value, scope: &Scope) -> Result<Value, Problem> {
        self.count(scope)?;
        let fields = match value {
            Value::Bool(_) => return Ok(value.clone()),
            Value::Object(fields) => fields,
            _ => {
                let what = "a schema is an object, true or false".to_owned();
                return Err(Problem { pointer: scope.pointer.clone(), what });
            }
        };
        let mut scope = scope.clone();
        scope.draft = Draft::named(fields).unwrap_or(scope.draft);
        if self.loosened.contains(&scope.pointer) {
            return self.types_alone(fields, &scope);
        }
        let value = self.fields(fields, &scope)?;
        let is_nullable = fields.get("nullable") == Some(&Value::Bool(true));
        // OpenAPI's.
        Ok(if is_nullable { json!({ "anyOf": [value, { "type": "null" }] }) } else { value })
    }

    fn count(&mut self, scope: &Scope) -> Result<(), Problem> {
        self.schemas += 1;
        if self.schemas > MAX_SCHEMAS || scope.depth > MAX_DEPTH {
            return Err(Problem { pointer: scope.pointer.clone(), what: "the schema is too large".to_owned() });
        }
        Ok(())
    }

    fn types_alone(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Value, Problem> {
        let mut writing = Writing::default();
        if let Some(types) = fields.get("type") {
            self.types(types, scope, &mut writing)?;
        }
        Ok(Value::Object(writing.fields))
    }

    fn fields(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Value, Problem> {
        let mut writing = Writing::default();
        if let Some(reference) = fields.get("$ref").filter(|_| scope.draft <= Draft::Draft7) {
            // What is beside it says nothing in these versions.
            self.reference("$ref", reference, scope, &mut writing)?;
            return Ok(Value::Object(writing.fields));
        }
        let shape = self.shape(fields, scope)?;
        let inner = scope.opened(shape.holds_others);
        let mut has_objects = false;
        let mut has_arrays = false;
        for (keyword, value) in fields.iter().filter(|(keyword, _)| scope.draft.knows(keyword)) {
            match keyword.as_str() {
                "type" => self.types(value, scope, &mut writing)?,
                "enum" | "const" => self.literals(keyword, value, scope, &mut writing)?,
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                    self.number(keyword, fields, scope, &mut writing)?;
                }
                "minLength" | "maxLength" | "pattern" | "format" => {
                    self.string(keyword, fields, scope, &mut writing)?;
                }
                "properties" | "patternProperties" | "additionalProperties" | "propertyNames" => {
                    if !std::mem::replace(&mut has_objects, true) {
                        self.properties(fields, scope, &shape, &mut writing)?;
                    }
                }
                "required" | "minProperties" | "maxProperties" | "dependencies" | "dependentRequired"
                | "dependentSchemas" => self.object(keyword, fields, scope, &inner, &mut writing)?,
                "items" | "prefixItems" | "additionalItems" | "unevaluatedItems" => {
                    if !std::mem::replace(&mut has_arrays, true) {
                        self.items(fields, scope, &mut writing)?;
                    }
                }
                "minItems" | "maxItems" | "uniqueItems" | "contains" => {
                    self.array(keyword, fields, scope, &mut writing)?;
                }
                "allOf" | "anyOf" | "oneOf" | "not" | "if" => {
                    self.condition(keyword, fields, scope, &inner, &mut writing)?;
                }
                "$ref" | "$dynamicRef" | "$recursiveRef" => {
                    self.reference(keyword, value, &inner, &mut writing)?;
                }
                // What describes, and what is not of JSON Schema.
                _ => {}
            }
        }
        if !has_objects && shape.rest.is_some() {
            self.properties(fields, scope, &shape, &mut writing)?;
        }
        Ok(writing.value())
    }

    fn types(&mut self, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let types: Vec<_> = match value {
            Value::String(_) => vec![value],
            Value::Array(types) if !types.is_empty() => types.iter().collect(),
            _ => return Err(scope.problem("type", "expected a type, or a list of types")),
        };
        for one in &types {
            if !one.as_str().is_some_and(|name| TYPES.contains(&name)) {
                let text: String = one.to_string().chars().take(64).collect();
                return Err(scope.problem("type", format!("{text} is no type: {}", TYPES.join(", "))));
            }
        }
        writing.fields.insert("type".to_owned(), value.clone());
        Ok(())
    }

    fn literals(&mut self, keyword: &str, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let values = match (keyword, value) {
            ("const", value) => std::slice::from_ref(value),
            (_, Value::Array(values)) if !values.is_empty() => values,
            _ => return Err(scope.problem(keyword, "expected a list of values")),
        };
        if values.iter().any(number::is_inexact) {
            return self.unserved(scope.problem(keyword, "integers beyond 2^53 are not exact"));
        }
        writing.fields.insert(keyword.to_owned(), value.clone());
        Ok(())
    }
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

/// The types that a schema's own keyword `type` lets be; `None`: all.
fn named_types(fields: &Fields) -> Option<Vec<&str>> {
    match fields.get("type")? {
        Value::String(name) => Some(vec![name]),
        Value::Array(names) => Some(names.iter().filter_map(Value::as_str).collect()),
        _ => None,
    }
}

/// A count, which may be written as a float.
fn count(value: &Value) -> Option<u64> {
    let whole = |number: f64| (number >= 0.0 && number.fract() == 0.0 && number < 9e15).then_some(number as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

/// Whether a schema is true of every value, as far as it says so itself.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Bool(is) => *is,
        Value::Object(fields) => fields.keys().all(|keyword| describes(keyword)),
        _ => false,
    }
}

/// Whether a keyword only describes.
fn describes(keyword: &str) -> bool {
    const ASSERTS: &[&str] = &[
        "$dynamicRef",
        "$recursiveRef",
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
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
        "not",
        "nullable",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ];
    !ASSERTS.contains(&keyword)
}
