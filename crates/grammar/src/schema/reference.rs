//! References, and what they lead to.

use std::collections::HashMap;

use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::{Fields, MAX_DEPTH, Problem, Scope, Translator, Writing, describes};

/// Keywords whose values are schemas by name.
pub(super) const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
/// Keywords whose values are no schemas, whatever they look like.
pub(super) const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];
const NOTHING: &Value = &Value::Null;

/// What references of a schema may lead to.
pub(super) struct Targets<'a> {
    root: &'a Value,
    /// Whether the schema is of a version in which nothing beside `$ref` counts: up to draft 7.
    pub(super) is_old: bool,
    /// Pointers by identifiers, and by the pointer of a resource and an anchor in it. A name that
    /// several schemas have leads nowhere.
    names: HashMap<String, Option<String>>,
}

impl<'a> Targets<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        let version = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let is_old = ["draft-03/", "draft-04/", "draft-06/", "draft-07/"].iter().any(|old| version.contains(old));
        let mut targets = Self { root, is_old, names: HashMap::new() };
        targets.read_names();
        targets
    }

    fn read_names(&mut self) {
        let mut left = vec![(String::new(), self.root, String::new())];
        while let Some((pointer, value, mut resource)) = left.pop() {
            if let Some(id) = self.identifier(value) {
                self.name(id.to_owned(), &pointer);
                resource.clone_from(&pointer);
            }
            for keyword in ["$anchor", "$dynamicAnchor"] {
                if let Some(anchor) = value.get(keyword).and_then(Value::as_str) {
                    self.name(format!("{resource}#{anchor}"), &pointer);
                }
            }
            let inner = subschemas(value).into_iter();
            left.extend(inner.map(|(more, value)| (format!("{pointer}{more}"), value, resource.clone())));
        }
    }

    fn name(&mut self, name: String, pointer: &str) {
        self.names.entry(name).and_modify(|known| *known = None).or_insert_with(|| Some(pointer.to_owned()));
    }

    /// The identifier of a schema that is a resource of its own.
    fn identifier<'v>(&self, value: &'v Value) -> Option<&'v str> {
        let keywords = if self.is_old { ["$id", "id"].as_slice() } else { &["$id"] };
        let id = keywords.iter().find_map(|keyword| value.get(*keyword)?.as_str())?;
        let is_beside_reference = self.is_old && value.get("$ref").is_some();
        (!id.starts_with('#') && !is_beside_reference).then(|| id.trim_end_matches('#'))
    }

    /// The schema at a JSON pointer.
    pub(super) fn at(&self, pointer: &str) -> &'a Value {
        self.root.pointer(pointer).unwrap_or(NOTHING)
    }

    /// What a reference from a place leads to, as a JSON pointer.
    pub(super) fn resolved(&self, reference: &str, from: &str) -> Option<String> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let resource = if uri.is_empty() { self.resource_of(from) } else { self.names.get(uri)?.as_deref()? };
        let fragment = percent_decode_str(fragment).decode_utf8().ok()?;
        let pointer = if fragment.is_empty() || fragment.starts_with('/') {
            format!("{resource}{fragment}")
        } else {
            self.names.get(&format!("{resource}#{fragment}"))?.clone()?
        };
        let found = self.root.pointer(&pointer)?;
        (found.is_object() || found.is_boolean()).then_some(pointer)
    }

    /// The innermost resource around a place.
    fn resource_of<'p>(&self, place: &'p str) -> &'p str {
        let mut pointer = place;
        while !pointer.is_empty() && self.identifier(self.at(pointer)).is_none() {
            pointer = pointer.rsplit_once('/').map_or("", |(around, _)| around);
        }
        pointer
    }

    /// What a schema that is nothing but references leads to.
    pub(super) fn followed(&self, value: &'a Value, scope: Scope) -> (&'a Value, Scope) {
        let mut found = (value, scope);
        for _ in 0..MAX_DEPTH {
            let Some(reference) = found.0.as_object().and_then(only_reference) else { break };
            let Some(pointer) = self.resolved(reference, &found.1.pointer) else { break };
            found = (self.at(&pointer), Scope { pointer, ..found.1 });
        }
        found
    }
}

/// The reference of a schema that says nothing else.
fn only_reference(fields: &Fields) -> Option<&str> {
    let mut asserting = fields.keys().filter(|keyword| !describes(keyword));
    match (asserting.next().map(String::as_str), asserting.next()) {
        (Some("$ref"), None) => fields["$ref"].as_str(),
        _ => None,
    }
}

impl Translator<'_> {
    pub(super) fn reference(&mut self, value: &Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let Some(reference) = value.as_str() else {
            return self.unserved(scope.problem("$ref", "expected a text"));
        };
        let Some(pointer) = self.targets.resolved(reference, &scope.pointer) else {
            let shown: String = reference.chars().take(128).collect();
            return self.unserved(scope.problem("$ref", format!("there is no '{shown}' in the schema")));
        };
        writing.set("$ref", self.reference_to(&pointer, scope.is_open));
        Ok(())
    }

    /// A reference, for the library, to what is at a place.
    fn reference_to(&mut self, pointer: &str, is_open: bool) -> String {
        if pointer == self.start && !is_open {
            return "#".to_owned();
        }
        let key = (pointer.to_owned(), is_open);
        if let Some(name) = self.names.get(&key) {
            return format!("#/$defs/{name}");
        }
        let name = format!("d{}", self.names.len());
        self.names.insert(key, name.clone());
        self.pending.push((Scope::new(pointer, is_open), name.clone()));
        format!("#/$defs/{name}")
    }

    /// A written schema that is used several times, by a reference if it is long.
    pub(super) fn shared(&mut self, value: Value) -> Value {
        if value.to_string().len() < 64 {
            return value;
        }
        let name = format!("d{}", self.names.len());
        // Pointers begin with a slash: no place has this one.
        self.names.insert((name.clone(), false), name.clone());
        self.definitions.insert(name.clone(), value);
        json!({ "$ref": format!("#/$defs/{name}") })
    }
}

/// Schemas inside a schema, with the pointers to them.
pub(super) fn subschemas(value: &Value) -> Vec<(String, &Value)> {
    let Value::Object(fields) = value else { return Vec::new() };
    let mut found = Vec::new();
    for (keyword, value) in fields.iter().filter(|(keyword, _)| !DATA.contains(&keyword.as_str())) {
        let pointer = format!("/{}", token(keyword));
        match value {
            Value::Object(named) if NAMED.contains(&keyword.as_str()) => {
                let named = named.iter().filter(|(_, value)| value.is_object() || value.is_boolean());
                found.extend(named.map(|(name, value)| (format!("{pointer}/{}", token(name)), value)));
            }
            Value::Object(_) => found.push((pointer, value)),
            Value::Array(values) => {
                let values = values.iter().enumerate().filter(|(_, value)| value.is_object());
                found.extend(values.map(|(index, value)| (format!("{pointer}/{index}"), value)));
            }
            _ => {}
        }
    }
    found
}

/// A name as a part of a JSON pointer.
pub(super) fn token(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
