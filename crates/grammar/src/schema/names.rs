//! What names the properties of an object have.

use serde_json::Value;

use super::keywords::{is_idle, takes_none};
use super::object::Properties;
use super::{Demand, Fields, Problem, Scope, Translator, count, describes, format, pattern};

/// What names are taken.
enum Names<'a> {
    Listed(Vec<&'a str>),
    /// Names in which a pattern is found.
    Matching(String),
}

impl<'a> Translator<'a> {
    /// Leaves the properties whose names the keyword `propertyNames` takes.
    pub(super) fn restrict_names(
        &mut self,
        fields: &'a Fields,
        scope: &Scope,
        properties: &mut Properties,
    ) -> Result<(), Problem> {
        let Some(value) = fields.get("propertyNames") else { return Ok(()) };
        let (value, inner) = self.targets.followed(value, scope.at(&["propertyNames"]));
        let names = match value {
            Value::Bool(true) => Ok(None),
            value if takes_none(value, Some("string")) => Ok(Some(Names::Listed(Vec::new()))),
            Value::Object(fields) => self.names(fields, &inner),
            _ => Err(inner.own_problem("a schema is an object, true or false")),
        };
        let is_closed =
            properties.patterns.is_empty() && fields.get("additionalProperties") == Some(&Value::Bool(false));
        let names = match names {
            Ok(Some(Names::Matching(pattern))) if is_closed => self.found(&pattern, fields, &inner),
            names => names,
        };
        let restricted = match names {
            Ok(None) => return Ok(()),
            Ok(Some(Names::Listed(names))) if properties.patterns.is_empty() => {
                self.count(names.len(), scope)?;
                self.list(&names, properties);
                return Ok(());
            }
            Ok(Some(Names::Matching(pattern))) if properties.patterns.is_empty() && properties.named.is_empty() => {
                let rest = properties.rest.replace(Value::Bool(false)).unwrap_or(Value::Bool(true));
                properties.patterns.insert(pattern, rest);
                return Ok(());
            }
            Ok(_) => scope.problem("propertyNames", "it is not served beside other properties"),
            Err(problem) => problem,
        };
        self.unserved(restricted)
    }

    /// Reads a schema of names; nothing if it is true of all.
    fn names(&mut self, fields: &'a Fields, scope: &Scope) -> Result<Option<Names<'a>>, Problem> {
        let mut names = None;
        let has_pattern = fields.get("pattern").is_some_and(|value| !is_idle("pattern", value, Some("string")));
        for (keyword, value) in fields.iter().filter(|(keyword, _)| !describes(keyword)) {
            let more = match (keyword.as_str(), value) {
                (keyword, value) if is_idle(keyword, value, Some("string")) => continue,
                ("minLength", _) if fields.contains_key("maxLength") => continue,
                // Zod writes both, and its pattern says more.
                ("format", _) if has_pattern => continue,
                ("format", Value::String(name)) if !format::is_named(name) && self.demand != Demand::Strict => continue,
                ("enum", Value::Array(values)) => Names::Listed(values.iter().filter_map(Value::as_str).collect()),
                ("const", Value::String(name)) => Names::Listed(vec![name]),
                ("pattern", Value::String(pattern)) => Names::Matching(self.one_pattern(pattern, scope)?),
                ("minLength" | "maxLength", _) => Names::Matching(of_length(fields, scope)?),
                ("format", Value::String(name)) if format::pattern(name).is_some() => {
                    Names::Matching(format::pattern(name).unwrap_or_default())
                }
                _ => return Err(scope.problem(keyword, "this keyword is not served for names")),
            };
            if names.replace(more).is_some() {
                return Err(scope.problem(keyword, "it is not served beside other keywords for names"));
            }
        }
        Ok(names)
    }

    /// Named properties in which a pattern is found.
    fn found(&mut self, pattern: &str, fields: &'a Fields, scope: &Scope) -> Result<Option<Names<'a>>, Problem> {
        let named = fields.get("properties").and_then(Value::as_object).into_iter().flatten();
        let found = pattern::found(pattern, named.map(|(name, _)| name.as_str()), &mut self.work);
        found.map(|names| Some(Names::Listed(names))).map_err(|what| scope.own_problem(what))
    }

    /// A pattern as one of the library.
    fn one_pattern(&mut self, pattern: &str, scope: &Scope) -> Result<String, Problem> {
        match self.library_patterns(pattern).as_deref() {
            Ok([pattern]) => Ok(pattern.clone()),
            Ok(_) => Err(scope.problem("pattern", "look-aheads are not served for names")),
            Err(what) => Err(scope.problem("pattern", what)),
        }
    }

    /// Leaves properties of these names alone.
    fn list(&mut self, names: &[&str], properties: &mut Properties) {
        for (name, value) in &mut properties.named {
            if !names.contains(&name.as_str()) {
                *value = Value::Bool(false);
            }
        }
        let rest = properties.rest.replace(Value::Bool(false)).unwrap_or(Value::Bool(true));
        let rest = if names.len() > 1 { self.shared(rest) } else { rest };
        for name in names {
            properties.named.entry(*name).or_insert_with(|| rest.clone());
        }
    }
}

/// The pattern of texts that are as long as a schema says.
fn of_length(fields: &Fields, scope: &Scope) -> Result<String, Problem> {
    let number = |keyword: &str| match fields.get(keyword).map(count) {
        None => Ok(String::new()),
        Some(Some(count)) => Ok(count.to_string()),
        Some(None) => Err(scope.problem(keyword, "expected a whole number from 0")),
    };
    let least = number("minLength")?;
    Ok(format!("^(?s:.){{{},{}}}$", if least.is_empty() { "0" } else { &least }, number("maxLength")?))
}
