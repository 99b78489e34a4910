//! Keywords that combine schemas.

use serde_json::{Value, json};

use super::{Problem, Scope, Translator, Writing, is_true};

impl<'a> Translator<'a> {
    pub(super) fn branches(
        &mut self,
        keyword: &str,
        value: &'a Value,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let Some(values) = value.as_array().filter(|values| !values.is_empty()) else {
            return self.unserved(scope.problem(keyword, "expected a list of schemas, at least one"));
        };
        let mut all = Vec::with_capacity(values.len());
        for (index, value) in values.iter().enumerate() {
            all.push(self.schema(value, &scope.at(&[keyword, &index.to_string()]))?);
        }
        if keyword == "anyOf" && all.iter().any(is_true) {
            return Ok(());
        }
        // The library tells apart only what is written in its place.
        if keyword == "oneOf" && self.are_apart(keyword, values, scope) {
            writing.beside.push(json!({ "anyOf": all }));
        } else {
            writing.set(keyword, all);
        }
        Ok(())
    }
}
