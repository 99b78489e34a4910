//! Keywords of arrays.

use serde_json::Value;

use super::{Fields, Problem, Scope, Translator, Writing};

impl<'a> Translator<'a> {
    /// Items by place, and all others.
    pub(super) fn items(&mut self, fields: &'a Fields, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        // Before 2020, and still written: a list is of the first items.
        let is_list = fields.get("items").is_some_and(Value::is_array);
        let (first, rest) = if is_list { ("items", "additionalItems") } else { ("prefixItems", "items") };
        if let Some(value) = fields.get(first) {
            let Value::Array(values) = value else { return Err(scope.problem(first, "expected a list of schemas")) };
            let mut items = Vec::with_capacity(values.len());
            for (index, value) in values.iter().enumerate() {
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
