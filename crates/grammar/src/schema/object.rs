//! Keywords of objects.

use serde_json::Value;

use super::closing::Closing;
use super::{Fields, Problem, Scope, Translator, Writing};

/// What the properties of an object are.
pub(super) struct Properties {
    pub(super) named: Fields,
    /// Properties with names in which a pattern is found.
    pub(super) patterns: Fields,
    /// The schema of all others; nothing: any value.
    pub(super) rest: Option<Value>,
}

impl<'a> Translator<'a> {
    /// Properties by name, by pattern, and all others.
    pub(super) fn properties(
        &mut self,
        fields: &'a Fields,
        scope: &Scope,
        closing: Option<&Closing>,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let mut named = Fields::new();
        for (name, value) in self.named_schemas(fields, "properties", scope)? {
            named.insert(name.clone(), self.schema(value, &scope.at(&["properties", name]))?);
        }
        let rest = match fields.get("additionalProperties") {
            Some(value) => Some(self.schema(value, &scope.at(&["additionalProperties"]))?),
            None => closing.map(|closing| closing.rest.clone()),
        };
        for name in closing.into_iter().flat_map(|closing| &closing.names) {
            named.entry(name).or_insert(Value::Bool(true));
        }
        let mut properties = Properties { named, patterns: Fields::new(), rest };
        self.matched_properties(fields, scope, &mut properties)?;
        self.restrict_names(fields, scope, &mut properties)?;
        if !properties.named.is_empty() {
            writing.set("properties", properties.named);
        }
        if !properties.patterns.is_empty() {
            writing.set("patternProperties", properties.patterns);
        }
        if let Some(rest) = properties.rest.filter(|rest| *rest != Value::Bool(true)) {
            writing.set("additionalProperties", rest);
        }
        Ok(())
    }

    fn matched_properties(
        &mut self,
        fields: &'a Fields,
        scope: &Scope,
        properties: &mut Properties,
    ) -> Result<(), Problem> {
        for (text, value) in self.named_schemas(fields, "patternProperties", scope)? {
            let inner = scope.at(&["patternProperties", text]);
            let what = match self.library_patterns(text).as_deref() {
                Ok([pattern]) => {
                    let value = self.schema(value, &inner)?;
                    properties.patterns.insert(pattern.clone(), value);
                    continue;
                }
                Ok(_) => "look-aheads are not served for names".to_owned(),
                Err(what) => what.clone(),
            };
            self.unserved(inner.own_problem(what))?;
            // Nothing else says what such properties are.
            properties.rest = None;
        }
        Ok(())
    }

    /// The schemas of a keyword, by name.
    fn named_schemas(
        &mut self,
        fields: &'a Fields,
        keyword: &str,
        scope: &Scope,
    ) -> Result<impl Iterator<Item = (&'a String, &'a Value)> + use<'a>, Problem> {
        let value = fields.get(keyword);
        if value.is_some_and(|value| !value.is_object()) {
            self.unserved(scope.problem(keyword, "expected an object"))?;
        }
        Ok(value.and_then(Value::as_object).into_iter().flatten())
    }
}
