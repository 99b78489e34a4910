//! A schema as a document: its identifiers, its anchors, and what references lead to.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// Keywords whose values are schemas by name.
pub(super) const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
/// Keywords whose values are no schemas, whatever they look like.
const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];

/// A version of JSON Schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Draft {
    Draft4,
    Draft6,
    Draft7,
    Draft2019,
    Draft2020,
}

impl Draft {
    /// The version that a schema names, if it is known.
    pub(super) fn named(fields: &Map<String, Value>) -> Option<Self> {
        let name = fields.get("$schema")?.as_str()?;
        let drafts = [
            ("draft-03/", Self::Draft4),
            ("draft-04/", Self::Draft4),
            ("draft-06/", Self::Draft6),
            ("draft-07/", Self::Draft7),
            ("2019-09/", Self::Draft2019),
            ("2020-12/", Self::Draft2020),
        ];
        drafts.into_iter().find(|(part, _)| name.contains(part)).map(|(_, draft)| draft)
    }

    /// Whether a keyword says something in this version. `dependencies`, which went, is still read.
    pub(super) fn knows(self, keyword: &str) -> bool {
        let since = match keyword {
            "const" | "contains" | "propertyNames" => Self::Draft6,
            "if" | "then" | "else" => Self::Draft7,
            "dependentRequired"
            | "dependentSchemas"
            | "minContains"
            | "maxContains"
            | "unevaluatedItems"
            | "unevaluatedProperties" => Self::Draft2019,
            "$recursiveRef" => return self == Self::Draft2019,
            "prefixItems" | "$dynamicRef" => Self::Draft2020,
            _ => Self::Draft4,
        };
        self >= since
    }
}

/// A part of a document with an identifier.
struct Resource {
    pointer: String,
    uri: String,
    draft: Draft,
}

/// A schema as a document.
pub(super) struct Document<'a> {
    root: &'a Value,
    /// The document itself first.
    resources: Vec<Resource>,
    anchors: HashMap<(String, String), String>,
    /// Names of dynamic anchors, as often as they are there.
    dynamic: Vec<String>,
}

impl<'a> Document<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        let whole = Resource { pointer: String::new(), uri: String::new(), draft: Draft::Draft2020 };
        let mut document = Self { root, resources: vec![whole], anchors: HashMap::new(), dynamic: Vec::new() };
        document.read_names();
        document
    }

    fn read_names(&mut self) {
        let mut left = vec![(String::new(), self.root, 0)];
        while let Some((pointer, value, mut resource)) = left.pop() {
            if let Value::Object(fields) = value {
                resource = self.named(fields, &pointer, resource);
            }
            left.extend(subschemas(value).into_iter().map(|(more, value)| (pointer.clone() + &more, value, resource)));
        }
    }

    /// Reads the names that a schema gives itself; the resource that it is of.
    fn named(&mut self, fields: &Map<String, Value>, pointer: &str, resource: usize) -> usize {
        let Resource { uri, draft, .. } = &self.resources[resource];
        let draft = Draft::named(fields).unwrap_or(*draft);
        let base = uri.clone();
        let mut resource = resource;
        let has_old_reference = draft <= Draft::Draft7 && fields.contains_key("$ref");
        let id = fields.get(if draft == Draft::Draft4 { "id" } else { "$id" }).and_then(Value::as_str);
        if let Some(id) = id.filter(|_| !has_old_reference) {
            let (uri, fragment) = id.split_once('#').unwrap_or((id, ""));
            if !fragment.is_empty() {
                self.anchors.insert((base.clone(), fragment.to_owned()), pointer.to_owned());
            }
            if !uri.is_empty() {
                resource = self.resources.len();
                self.resources.push(Resource { pointer: pointer.to_owned(), uri: joined(&base, uri), draft });
            }
        }
        if pointer.is_empty() {
            self.resources[0].draft = draft;
        }
        let base = self.resources[resource].uri.clone();
        for keyword in ["$anchor", "$dynamicAnchor"] {
            if let Some(name) = fields.get(keyword).and_then(Value::as_str) {
                self.anchors.insert((base.clone(), name.to_owned()), pointer.to_owned());
                if keyword == "$dynamicAnchor" {
                    self.dynamic.push(name.to_owned());
                }
            }
        }
        if fields.get("$recursiveAnchor") == Some(&Value::Bool(true)) {
            self.dynamic.push(String::new());
        }
        resource
    }

    /// The value at a JSON pointer.
    pub(super) fn at(&self, pointer: &str) -> Option<&'a Value> {
        self.root.pointer(pointer)
    }

    /// What a reference from a place leads to, as a JSON pointer.
    pub(super) fn resolved(&self, reference: &str, from: &str) -> Option<String> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let own = self.resource_of(from);
        let resource = if uri.is_empty() {
            own
        } else {
            let uri = joined(&own.uri, uri);
            self.resources.iter().find(|resource| resource.uri == uri)?
        };
        let fragment = percent_decoded(fragment)?;
        if fragment.is_empty() {
            return Some(resource.pointer.clone());
        }
        if fragment.starts_with('/') {
            let pointer = format!("{}{fragment}", resource.pointer);
            let found = self.at(&pointer)?;
            return (found.is_object() || found.is_boolean()).then_some(pointer);
        }
        self.anchors.get(&(resource.uri.clone(), fragment)).cloned()
    }

    /// Whether a dynamic reference leads to one place, wherever it is come from.
    pub(super) fn is_static(&self, anchor: &str) -> bool {
        self.dynamic.iter().filter(|name| *name == anchor).count() <= 1
    }

    /// Whether the whole document is one resource.
    pub(super) fn is_one(&self) -> bool {
        self.resources.iter().all(|resource| resource.pointer.is_empty())
    }

    /// The version that holds at a place.
    pub(super) fn draft(&self, pointer: &str) -> Draft {
        self.resource_of(pointer).draft
    }

    fn resource_of(&self, pointer: &str) -> &Resource {
        let holds = |resource: &&Resource| {
            let inside = pointer.strip_prefix(resource.pointer.as_str());
            inside.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let found = self.resources.iter().filter(holds).max_by_key(|resource| resource.pointer.len());
        found.unwrap_or(&self.resources[0])
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

/// A reference to a resource, from another one. Paths with dots stay as they are.
fn joined(base: &str, reference: &str) -> String {
    let scheme = |uri: &str| {
        let (scheme, _) = uri.split_once(':')?;
        let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        is_scheme.then_some(scheme.len())
    };
    if scheme(reference).is_some() {
        return reference.to_owned();
    }
    let authority = base.find("://").map_or(0, |at| at + 3);
    let path = base[authority..].find('/').map_or(base.len(), |at| authority + at);
    if let (Some(scheme), true) = (scheme(base), reference.starts_with("//")) {
        return format!("{}:{reference}", &base[..scheme]);
    }
    if reference.starts_with('/') {
        return format!("{}{reference}", &base[..path]);
    }
    let folder = base[path..].rfind('/').map_or(path, |at| path + at);
    if authority == 0 && folder == path { reference.to_owned() } else { format!("{}/{reference}", &base[..folder]) }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok()
}
