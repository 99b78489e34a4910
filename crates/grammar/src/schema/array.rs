//! Keywords of arrays.

use serde_json::Value;

use super::{Fields, Problem, Scope, Translator, Writing};

impl<'a> Translator<'a> {
    /// Items by place, and all others.
    pub(super) fn items(&mut self, fields: &'a Fields, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let (first, rest) = item_keywords(fields);
        if let Some(value) = fields.get(first) {
            if !value.is_array() {
                self.unserved(scope.problem(first, "expected a list of schemas"))?;
            }
            let mut items = Vec::new();
            for (index, value) in value.as_array().into_iter().flatten().enumerate() {
                items.push(self.schema(value, &scope.at(&[first, &index.to_string()]))?);
            }
            if !items.is_empty() {
                writing.set("prefixItems", items);
            }
        }
        if let Some(value) = fields.get(rest) {
            let rest = self.schema(value, &scope.at(&[rest]))?;
            writing.set("items", rest);
        }
        Ok(())
    }
}

/// The keywords of the first items, and of all others.
pub(super) fn item_keywords(fields: &Fields) -> (&'static str, &'static str) {
    // Before 2020, and still written: a list is of the first items.
    let is_list = fields.get("items").is_some_and(Value::is_array);
    if is_list { ("items", "additionalItems") } else { ("prefixItems", "items") }
}
