//! Keywords of objects.

use serde_json::{Value, json};

use super::pattern::{self, Node};
use super::string::listed;
use super::{Demand, Draft, Fields, Problem, Scope, Translator, Writing, count, describes, is_true, named_types};

/// Most optional properties of which each subset is written out, for counts of properties.
const MAX_SUBSETS_OF: usize = 5;
/// Most patterns of names of which each combination is tried.
const MAX_PATTERNS: usize = 4;
/// Most branches that are looked at for the names of their properties.
const MAX_BRANCHES: usize = 512;
/// Keywords that say that a schema is of an object.
const OF_OBJECTS: [&str; 6] =
    ["properties", "patternProperties", "required", "minProperties", "maxProperties", "propertyNames"];

/// Which properties an object has, all of its branches together.
#[derive(Default)]
pub(super) struct Shape {
    /// Branches do not say which others there are.
    pub(super) holds_others: bool,
    /// What properties without a name here are, and the names that branches give.
    pub(super) rest: Option<(Value, Vec<String>)>,
}

/// What branches of a schema say of its properties.
#[derive(Default)]
struct Evaluated {
    names: Vec<String>,
    /// One of them says what all the others are.
    has_rest: bool,
    /// Some are named by patterns.
    has_patterns: bool,
    /// Some are named by a branch that need not hold.
    has_conditions: bool,
    branches: usize,
}

/// What names an object's properties have.
enum Names<'a> {
    Any,
    Listed(Vec<&'a str>),
    Matching(Node),
}

impl<'a> Translator<'a> {
    /// Which properties an object has beyond those it names, if it does not say so itself.
    pub(super) fn shape(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Shape, Problem> {
        let is_of_objects = match named_types(fields) {
            Some(types) => types.contains(&"object"),
            None => fields.contains_key("allOf") || OF_OBJECTS.iter().any(|keyword| fields.contains_key(*keyword)),
        };
        let rest = fields.get("unevaluatedProperties").filter(|_| scope.draft >= Draft::Draft2019);
        let closes = self.demand == Demand::Strict && is_of_objects;
        let mut shape = Shape { holds_others: closes, rest: None };
        if fields.contains_key("additionalProperties") || (rest.is_none() && (!closes || scope.is_open)) {
            return Ok(shape);
        }
        // Names that are listed or matched are named.
        let names_others = rest.is_none() && !self.names_are_free(fields, scope);
        if rest.is_some_and(is_true) || names_others {
            return Ok(shape);
        }
        let mut found = Evaluated::default();
        self.evaluate_branches(fields, scope, true, &mut found);
        match rest {
            _ if found.has_rest => {}
            None if found.has_patterns => {}
            None => shape.rest = Some((Value::Bool(false), found.names)),
            Some(_) if found.has_patterns || found.has_conditions => {
                let what = "beside branches that need not hold, or patterns in branches, it is not served";
                self.unserved(scope.problem("unevaluatedProperties", what))?;
            }
            Some(rest) => {
                let rest = self.schema(rest, &scope.at(&["unevaluatedProperties"]))?;
                shape.rest = Some((rest, found.names));
            }
        }
        Ok(shape)
    }

    fn evaluate(&mut self, value: &'a Value, scope: &Scope, holds: bool, found: &mut Evaluated) {
        found.branches += 1;
        let Value::Object(fields) = value else { return };
        if found.branches > MAX_BRANCHES || scope.depth > super::MAX_DEPTH {
            found.has_conditions = true;
            return;
        }
        if let Some(Value::Object(properties)) = fields.get("properties") {
            found.has_conditions |= !holds && !properties.is_empty();
            found
                .names
                .extend(properties.keys().filter(|name| !found.names.contains(name)).cloned().collect::<Vec<_>>());
        }
        found.has_patterns |= fields.contains_key("patternProperties");
        for keyword in ["additionalProperties", "unevaluatedProperties"] {
            let is_open = fields.get(keyword).is_some_and(|value| *value != Value::Bool(false));
            found.has_rest |= is_open && holds;
            found.has_conditions |= is_open && !holds;
        }
        self.evaluate_branches(fields, scope, holds, found);
    }

    fn evaluate_branches(&mut self, fields: &'a Fields, scope: &Scope, holds: bool, found: &mut Evaluated) {
        if let Some(target) = fields.get("$ref").and_then(|value| self.target("$ref", value, scope).ok()) {
            let mut inner = self.scope_of(&target, true);
            inner.depth = scope.depth + 1;
            if let Some(value) = self.document.at(&target) {
                self.evaluate(value, &inner, holds, found);
            }
        }
        for keyword in ["allOf", "anyOf", "oneOf"] {
            for (index, value) in fields.get(keyword).and_then(Value::as_array).into_iter().flatten().enumerate() {
                let inner = scope.at(&[keyword, &index.to_string()]);
                self.evaluate(value, &inner, holds && keyword == "allOf", found);
            }
        }
        for keyword in ["if", "then", "else"] {
            if let Some(value) = fields.get(keyword) {
                self.evaluate(value, &scope.at(&[keyword]), false, found);
            }
        }
        for keyword in ["dependentSchemas", "dependencies"] {
            for (name, value) in fields.get(keyword).and_then(Value::as_object).into_iter().flatten() {
                self.evaluate(value, &scope.at(&[keyword, name]), false, found);
            }
        }
    }

    /// Properties by name, by pattern, and all others.
    pub(super) fn properties(
        &mut self,
        fields: &'a Fields,
        scope: &Scope,
        shape: &Shape,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let mut properties = Fields::new();
        for (name, value) in named_schemas(fields, "properties", scope)? {
            properties.insert(name.clone(), self.schema(value, &scope.at(&["properties", name]))?);
        }
        let mut patterns = self.patterns(fields, scope)?;
        let mut rest = match fields.get("additionalProperties") {
            Some(value) => Some(self.schema(value, &scope.at(&["additionalProperties"]))?),
            None => None,
        };
        if let Some((value, names)) = &shape.rest {
            for name in names.iter().filter(|name| !properties.contains_key(*name)).collect::<Vec<_>>() {
                properties.insert(name.clone(), Value::Bool(true));
            }
            rest = Some(value.clone());
        }
        let before = (properties.clone(), patterns.clone(), rest.clone());
        let named = match self.names(fields, scope)? {
            Names::Any => Ok(()),
            Names::Listed(names) => self.list(&names, &mut properties, &mut patterns, &mut rest, scope),
            Names::Matching(node) => self.matching(&node, &mut properties, &mut patterns, &mut rest, scope),
        };
        if let Err(problem) = named {
            self.unserved(problem)?;
            (properties, patterns, rest) = before;
        }
        self.make_disjoint(&mut patterns, scope)?;
        if !properties.is_empty() {
            writing.set("properties", properties);
        }
        let mut written = Fields::new();
        for (node, value) in patterns {
            match pattern::written(&node) {
                Ok(text) => _ = written.insert(text, value),
                Err(what) => self.unserved(scope.problem("patternProperties", what))?,
            }
        }
        if !written.is_empty() {
            writing.set("patternProperties", written);
        }
        if let Some(rest) = rest.filter(|rest| *rest != Value::Bool(true)) {
            writing.set("additionalProperties", rest);
        }
        Ok(())
    }

    fn patterns(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Vec<(Node, Value)>, Problem> {
        let mut patterns = Vec::new();
        for (text, value) in named_schemas(fields, "patternProperties", scope)? {
            let inner = scope.at(&["patternProperties", text]);
            match pattern::parse(text) {
                Ok(node) => patterns.push((node, self.schema(value, &inner)?)),
                Err(what) => self.unserved(Problem { pointer: inner.pointer, what })?,
            }
        }
        Ok(patterns)
    }

    fn names(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Names<'a>, Problem> {
        let Some(value) = fields.get("propertyNames").filter(|_| scope.draft.knows("propertyNames")) else {
            return Ok(Names::Any);
        };
        if self.names_are_free(fields, scope) {
            return Ok(Names::Any);
        }
        let (value, inner) = self.followed(value, scope.at(&["propertyNames"]));
        let names = match value {
            Value::Bool(_) => Some(Vec::new()),
            Value::Object(fields) => listed(fields),
            _ => None,
        };
        if let Some(names) = names {
            return Ok(Names::Listed(names));
        }
        match self.exactly(|this| this.texts(value, &inner)) {
            Ok(Some(node)) => Ok(Names::Matching(node)),
            Ok(None) => {
                let what = "of names, enum, const, pattern, lengths and what combines them are served";
                self.unserved(scope.problem("propertyNames", what)).map(|()| Names::Any)
            }
            Err(problem) => self.unserved(problem).map(|()| Names::Any),
        }
    }

    /// Whether names may be any text.
    fn names_are_free(&self, fields: &'a Fields, scope: &Scope) -> bool {
        let Some(value) = fields.get("propertyNames") else { return true };
        let (value, _) = self.followed(value, scope.at(&["propertyNames"]));
        let Value::Object(fields) = value else { return is_true(value) };
        let is_text = named_types(fields).is_none_or(|types| types.contains(&"string"));
        is_text && fields.keys().all(|keyword| keyword == "type" || describes(keyword))
    }

    /// What a schema that is nothing but references leads to.
    pub(super) fn followed(&self, mut value: &'a Value, mut scope: Scope) -> (&'a Value, Scope) {
        for _ in 0..super::MAX_DEPTH {
            let Value::Object(fields) = value else { break };
            let mut asserting = fields.keys().filter(|keyword| !describes(keyword));
            let (Some("$ref"), None) = (asserting.next().map(String::as_str), asserting.next()) else { break };
            let Ok(target) = self.target("$ref", &fields["$ref"], &scope) else { break };
            let Some(found) = self.document.at(&target) else { break };
            scope = Scope { depth: scope.depth, ..self.scope_of(&target, scope.is_open) };
            value = found;
        }
        (value, scope)
    }

    /// Properties of these names alone.
    fn list(
        &mut self,
        names: &[&str],
        properties: &mut Fields,
        patterns: &mut Vec<(Node, Value)>,
        rest: &mut Option<Value>,
        scope: &Scope,
    ) -> Result<(), Problem> {
        for (name, value) in properties.iter_mut() {
            if !names.contains(&name.as_str()) {
                *value = Value::Bool(false);
            }
        }
        let other = rest.replace(Value::Bool(false)).unwrap_or(Value::Bool(true));
        let other = if names.len() > 1 { self.shared(other) } else { other };
        let patterns = std::mem::take(patterns);
        for name in names.iter().filter(|name| !properties.contains_key(**name)).collect::<Vec<_>>() {
            let mut all = Vec::new();
            for (node, value) in &patterns {
                let finds = self.automaton(|| pattern::finds(node, name));
                if finds.map_err(|what| scope.problem("patternProperties", what))? {
                    all.push(value.clone());
                }
            }
            let value = if all.is_empty() { other.clone() } else { json!({ "allOf": all }) };
            properties.insert((*name).to_owned(), value);
        }
        Ok(())
    }

    /// Properties whose names are found by an expression alone.
    fn matching(
        &mut self,
        node: &Node,
        properties: &mut Fields,
        patterns: &mut Vec<(Node, Value)>,
        rest: &mut Option<Value>,
        scope: &Scope,
    ) -> Result<(), Problem> {
        let wrong = |what| scope.problem("propertyNames", what);
        for (name, value) in properties.iter_mut() {
            if !self.automaton(|| pattern::finds(node, name)).map_err(wrong)? {
                *value = Value::Bool(false);
            }
        }
        let other = rest.replace(Value::Bool(false)).unwrap_or(Value::Bool(true));
        let before = std::mem::take(patterns);
        if before.is_empty() {
            patterns.push((node.clone(), other));
            return Ok(());
        }
        let others: Vec<_> = before.iter().map(|(other, _)| other).collect();
        let mut add =
            |found: &[&Node], others: &[&Node], value: Value| match self.automaton(|| pattern::both(found, others)) {
                Ok(Some(text)) => {
                    patterns.push((pattern::parse(&text).map_err(wrong)?, value));
                    Ok(())
                }
                Ok(None) => Ok(()),
                Err(what) => Err(wrong(what)),
            };
        add(&[node], &others, other)?;
        for (found, value) in &before {
            add(&[node, found], &[], value.clone())?;
        }
        Ok(())
    }

    /// Patterns that share no name: the library takes no others.
    fn make_disjoint(&mut self, patterns: &mut Vec<(Node, Value)>, scope: &Scope) -> Result<(), Problem> {
        let wrong = |what| scope.problem("patternProperties", what);
        let mut overlap = false;
        for (index, (first, _)) in patterns.iter().enumerate() {
            for (second, _) in patterns.iter().skip(index + 1) {
                match self.automaton(|| pattern::both(&[first, second], &[])) {
                    Ok(shared) => overlap |= shared.is_some(),
                    Err(what) => return self.unserved(wrong(what)),
                }
            }
        }
        if !overlap {
            return Ok(());
        }
        if patterns.len() > MAX_PATTERNS {
            patterns.clear();
            return self.unserved(wrong(format!("more than {MAX_PATTERNS} patterns, of which two find one name")));
        }
        let before = std::mem::take(patterns);
        for subset in 1..1_usize << before.len() {
            let (found, others): (Vec<_>, Vec<_>) =
                before.iter().enumerate().partition(|(index, _)| subset >> index & 1 == 1);
            let nodes: Vec<_> = found.iter().map(|(_, (node, _))| node).collect();
            let others: Vec<_> = others.iter().map(|(_, (node, _))| node).collect();
            match self.automaton(|| pattern::both(&nodes, &others)) {
                Ok(Some(text)) => {
                    let values: Vec<_> = found.iter().map(|(_, (_, value))| value.clone()).collect();
                    patterns.push((pattern::parse(&text).map_err(wrong)?, json!({ "allOf": values })));
                }
                Ok(None) => {}
                Err(what) => self.unserved(wrong(what))?,
            }
        }
        Ok(())
    }

    /// The other keywords of objects.
    pub(super) fn object(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        inner: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        match keyword {
            "required" => {
                let names = texts(&fields[keyword]).ok_or_else(|| scope.problem(keyword, "expected a list of names"));
                match names {
                    Ok(names) if names.is_empty() => Ok(()),
                    Ok(names) => {
                        writing.set(keyword, names);
                        Ok(())
                    }
                    Err(problem) => self.unserved(problem),
                }
            }
            "minProperties" | "maxProperties" => self.property_count(keyword, fields, scope, writing),
            _ => self.dependencies(keyword, fields, scope, inner, writing),
        }
    }

    fn property_count(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let number = count(&fields[keyword]).ok_or_else(|| scope.problem(keyword, "expected a whole number from 0"))?;
        let required = fields.get("required").and_then(texts).unwrap_or_default();
        let named = fields.get("properties").and_then(Value::as_object);
        let optional: Vec<_> = named.into_iter().flatten().map(|(name, _)| name).collect();
        let optional: Vec<_> = optional.into_iter().filter(|name| !required.contains(&name.as_str())).collect();
        if keyword == "minProperties" && number <= required.len() as u64 {
            return Ok(());
        }
        writing.set(keyword, number);
        // The library counts only if all that are named are required.
        let other = if keyword == "minProperties" { "maxProperties" } else { "minProperties" };
        let is_written = fields.contains_key(other) && keyword == "maxProperties";
        if optional.is_empty() || optional.len() > MAX_SUBSETS_OF || is_written {
            return Ok(());
        }
        let subsets = (0..1_usize << optional.len()).rev().map(|subset| {
            let (there, absent): (Vec<_>, Vec<_>) =
                optional.iter().enumerate().partition(|(index, _)| subset >> index & 1 == 1);
            let there: Vec<_> = there.into_iter().map(|(_, name)| *name).collect();
            let absent: Fields = absent.into_iter().map(|(_, name)| ((*name).clone(), Value::Bool(false))).collect();
            json!({ "type": "object", "required": there, "properties": absent })
        });
        let mut subsets: Vec<_> = subsets.collect();
        if named_types(fields).is_none_or(|types| types != ["object"]) {
            subsets.push(json!({ "type": ["null", "boolean", "number", "string", "array"] }));
        }
        writing.beside.push(json!({ "anyOf": subsets }));
        Ok(())
    }

    /// What has to hold if a property is there.
    fn dependencies(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        inner: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let Value::Object(dependencies) = &fields[keyword] else {
            return Err(scope.problem(keyword, "expected an object"));
        };
        for (name, value) in dependencies {
            let then = match (keyword, value) {
                ("dependentRequired", Value::Array(_)) | ("dependencies", Value::Array(_) | Value::String(_)) => {
                    let names = value.as_str().map_or_else(|| texts(value), |name| Some(vec![name]));
                    let names = names.ok_or_else(|| scope.problem(keyword, "expected lists of names"))?;
                    json!({ "required": names })
                }
                ("dependentRequired", _) => return Err(scope.problem(keyword, "expected lists of names")),
                (_, value) => self.schema(value, &inner.at(&[keyword, name]))?,
            };
            if is_true(&then) || then == json!({ "required": [] }) {
                continue;
            }
            let there = json!({ "type": "object", "required": [name], "allOf": [then] });
            let absent = json!({ "properties": { name: false } });
            writing.beside.push(json!({ "anyOf": [absent, there] }));
        }
        Ok(())
    }
}

/// The schemas of a keyword, by name.
fn named_schemas<'a>(
    fields: &'a Fields,
    keyword: &str,
    scope: &Scope,
) -> Result<impl Iterator<Item = (&'a String, &'a Value)>, Problem> {
    match fields.get(keyword) {
        None => Ok(None.into_iter().flatten()),
        Some(Value::Object(named)) => Ok(Some(named).into_iter().flatten()),
        Some(_) => Err(scope.problem(keyword, "expected an object")),
    }
}

/// A list of texts.
pub(super) fn texts(value: &Value) -> Option<Vec<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}
