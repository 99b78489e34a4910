//! Keywords of texts, and what texts the names of properties may be.

use serde_json::{Value, json};

use super::pattern::{self, Node};
use super::{Demand, Draft, Fields, Problem, Scope, Translator, Writing, count, describes, format, named_types};

/// Keywords that say something of texts that is no expression here.
const SAYS_MORE: [&str; 9] =
    ["if", "oneOf", "$dynamicRef", "$recursiveRef", "nullable", "pattern", "enum", "allOf", "anyOf"];

impl<'a> Translator<'a> {
    pub(super) fn string(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let value = &fields[keyword];
        match keyword {
            "pattern" => {
                let Some(text) = value.as_str() else { return Err(scope.problem(keyword, "expected a text")) };
                match self.patterns_of(text) {
                    Ok(patterns) => {
                        let types = fields.get("type").map(|types| json!({ "type": types }));
                        for pattern in patterns {
                            if writing.fields.contains_key(keyword) {
                                let mut more = types.clone().unwrap_or_else(|| json!({}));
                                more[keyword] = Value::from(pattern);
                                writing.beside.push(more);
                            } else {
                                writing.set(keyword, pattern);
                            }
                        }
                    }
                    Err(what) => self.unserved(scope.problem(keyword, what))?,
                }
            }
            "format" => return self.format(fields, scope, writing),
            _ => {
                let count = count(value).ok_or_else(|| scope.problem(keyword, "expected a whole number from 0"))?;
                if keyword == "maxLength" || count > 0 {
                    writing.set(keyword, count);
                }
            }
        }
        Ok(())
    }

    /// Patterns of the library, of which all have to be found.
    fn patterns_of(&mut self, text: &str) -> Result<Vec<String>, String> {
        let node = pattern::parse(text)?;
        let mut patterns = Vec::new();
        for node in pattern::conjuncts(node) {
            let is_plain = pattern::is_plain(&node);
            patterns.push(if is_plain { pattern::written(&node) } else { self.automaton(|| pattern::written(&node)) }?);
        }
        Ok(patterns)
    }

    /// Formats that are known are held to. Others only describe, unless the demand is strict and no
    /// pattern says what they are.
    fn format(&mut self, fields: &'a Fields, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let Some(name) = fields["format"].as_str() else { return Err(scope.problem("format", "expected a text")) };
        if named_types(fields).is_some_and(|types| !types.contains(&"string")) {
            return Ok(());
        }
        let parts = fields.get("allOf").and_then(Value::as_array).into_iter().flatten();
        let has_pattern = fields.contains_key("pattern") || parts.into_iter().any(|part| part.get("pattern").is_some());
        if format::is_known(name) {
            // Zod's times have no zone: the pattern is what the library that wrote it means.
            if !has_pattern || !format::is_vague(name) {
                writing.set("format", name);
            }
            return Ok(());
        }
        if let Some(text) = format::pattern(name).filter(|_| !has_pattern) {
            writing.beside.push(json!({ "pattern": text }));
            return Ok(());
        }
        if self.demand == Demand::Strict && !has_pattern && !format::says_nothing(name) {
            let shown: String = name.chars().take(64).collect();
            return self.unserved(scope.problem("format", format!("unknown format '{shown}'")));
        }
        Ok(())
    }

    /// The texts of a schema, as an expression that is found in them; `None` if it cannot be said.
    pub(super) fn texts(&mut self, value: &'a Value, scope: &Scope) -> Result<Option<Node>, Problem> {
        self.count(scope)?;
        let none = || Node::Class(pattern::no_char());
        let fields = match value {
            Value::Bool(is) => return Ok(Some(if *is { Node::Concat(Vec::new()) } else { none() })),
            Value::Object(fields) => fields,
            _ => return Ok(None),
        };
        let mut parts = Vec::new();
        let keywords = fields.iter().filter(|(keyword, _)| scope.draft.knows(keyword) && !describes(keyword));
        for (keyword, value) in keywords {
            if scope.draft <= Draft::Draft7 && fields.contains_key("$ref") && keyword != "$ref" {
                continue;
            }
            let part = match (keyword.as_str(), value) {
                ("type", _) if named_types(fields).is_some_and(|types| types.contains(&"string")) => continue,
                ("type", _) => none(),
                ("const", value) => exactly_one(std::slice::from_ref(value)),
                ("enum", Value::Array(values)) => exactly_one(values),
                ("pattern", Value::String(text)) => match pattern::parse(text) {
                    Ok(node) => node,
                    Err(what) => return Err(scope.problem("pattern", what)),
                },
                ("maxLength", _) if fields.contains_key("minLength") => continue,
                ("minLength" | "maxLength", _) => {
                    let number = |keyword: &str| {
                        fields.get(keyword).map(|value| count(value).and_then(|count| u32::try_from(count).ok()))
                    };
                    let Some(min) = number("minLength").unwrap_or(Some(0)) else { return Ok(None) };
                    let max = number("maxLength");
                    if max == Some(None) {
                        return Ok(None);
                    }
                    Node::Concat(vec![Node::Start, Node::any().times(min, max.flatten()), Node::End])
                }
                // The pattern says it better.
                ("format", _) if fields.contains_key("pattern") => continue,
                ("format", Value::String(name)) => match format::pattern(name).map(pattern::parse) {
                    Some(Ok(node)) => node,
                    _ if format::is_known(name) => return Ok(None),
                    _ => continue,
                },
                ("allOf" | "anyOf", Value::Array(values)) => {
                    let mut nodes = Vec::new();
                    for (index, value) in values.iter().enumerate() {
                        let inner = scope.at(&[keyword, &index.to_string()]);
                        let Some(node) = self.texts(value, &inner)? else { return Ok(None) };
                        nodes.push(node);
                    }
                    if keyword == "anyOf" {
                        Node::Either(nodes)
                    } else {
                        Node::Concat(nodes.into_iter().map(|node| ahead(true, node)).collect())
                    }
                }
                ("not", value) => {
                    let Some(node) = self.texts(value, &scope.at(&["not"]))? else { return Ok(None) };
                    ahead(false, node)
                }
                ("$ref", value) => {
                    let target = self.target("$ref", value, scope)?;
                    let mut inner = self.scope_of(&target, false);
                    inner.depth = scope.depth + 1;
                    let Some(value) = self.document.at(&target) else { return Ok(None) };
                    let Some(node) = self.texts(value, &inner)? else { return Ok(None) };
                    node
                }
                // What speaks of other types says nothing of texts.
                (keyword, _) if !SAYS_MORE.contains(&keyword) => continue,
                _ => return Ok(None),
            };
            parts.push(part);
        }
        if parts.len() == 1 {
            return Ok(parts.pop());
        }
        let aheads = parts.into_iter().map(|part| ahead(true, part));
        Ok(Some(Node::Concat([Node::Start].into_iter().chain(aheads).collect())))
    }
}

/// At the start of a text: whether an expression is found in it.
fn ahead(is: bool, node: Node) -> Node {
    let search = Node::Concat(vec![Node::any().times(0, None), node]);
    Node::Concat(vec![Node::Start, Node::Ahead { is, node: Box::new(search) }])
}

/// The texts among these values, to the letter.
pub(super) fn exactly_one(values: &[Value]) -> Node {
    let texts = values.iter().filter_map(Value::as_str);
    Node::Concat(vec![Node::Start, Node::Either(texts.map(Node::text).collect()), Node::End])
}

/// The texts that a schema lists, if it does nothing else.
pub(super) fn listed(fields: &Fields) -> Option<Vec<&str>> {
    let says = |keyword: &String| !describes(keyword) && keyword != "type";
    match fields.keys().filter(|keyword| says(keyword)).collect::<Vec<_>>().as_slice() {
        [keyword] if *keyword == "enum" => {
            fields["enum"].as_array().map(|v| v.iter().filter_map(Value::as_str).collect())
        }
        [keyword] if *keyword == "const" => Some(fields["const"].as_str().into_iter().collect()),
        _ => None,
    }
}
