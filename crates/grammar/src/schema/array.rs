//! Keywords of arrays.

use serde_json::Value;

use super::{Draft, Fields, Problem, Scope, Translator, Writing, count, is_true};

impl<'a> Translator<'a> {
    /// Items by place, and all others.
    pub(super) fn items(&mut self, fields: &'a Fields, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        let (first, rest) = match fields.get("items") {
            // Before 2020, and still written: a list is of the first items.
            Some(Value::Array(_)) => ("items", "additionalItems"),
            _ if scope.draft >= Draft::Draft2020 => ("prefixItems", "items"),
            _ => ("", "items"),
        };
        match fields.get(first) {
            None => {}
            Some(Value::Array(values)) => {
                let mut items = Vec::with_capacity(values.len());
                for (index, value) in values.iter().enumerate() {
                    items.push(self.schema(value, &scope.at(&[first, &index.to_string()]))?);
                }
                if !items.is_empty() {
                    writing.set("prefixItems", items);
                }
            }
            Some(_) => return Err(scope.problem(first, "expected a list of schemas")),
        }
        if let Some(value) = fields.get(rest) {
            let rest = self.schema(value, &scope.at(&[rest]))?;
            writing.set("items", rest);
            return Ok(());
        }
        let Some(value) = fields.get("unevaluatedItems").filter(|_| scope.draft >= Draft::Draft2019) else {
            return Ok(());
        };
        if is_true(value) {
            return Ok(());
        }
        const BRANCHES: [&str; 10] = [
            "allOf",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "contains",
            "$ref",
            "$dynamicRef",
            "$recursiveRef",
            "dependentSchemas",
        ];
        if BRANCHES.iter().any(|keyword| fields.contains_key(*keyword)) {
            let what = "beside branches and contains it is not served";
            return self.unserved(scope.problem("unevaluatedItems", what));
        }
        let rest = self.schema(value, &scope.at(&["unevaluatedItems"]))?;
        writing.set("items", rest);
        Ok(())
    }

    /// The other keywords of arrays.
    pub(super) fn array(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let number = |keyword: &str| match fields.get(keyword) {
            None => Ok(None),
            Some(value) => {
                let number = count(value);
                number.map(Some).ok_or_else(|| scope.problem(keyword, "expected a whole number from 0"))
            }
        };
        match (keyword, &fields[keyword]) {
            ("minItems", _) => {
                if let Some(number @ 1..) = number("minItems")? {
                    let least = writing.fields.get("minItems").and_then(Value::as_u64).unwrap_or(0);
                    writing.set("minItems", number.max(least));
                }
                Ok(())
            }
            ("maxItems", _) => {
                let most = writing.fields.get("maxItems").and_then(Value::as_u64).unwrap_or(u64::MAX);
                writing.set("maxItems", number("maxItems")?.unwrap_or(most).min(most));
                Ok(())
            }
            ("uniqueItems", Value::Bool(false)) => Ok(()),
            ("uniqueItems", Value::Bool(true)) if number("maxItems")?.is_some_and(|most| most <= 1) => Ok(()),
            ("uniqueItems", Value::Bool(true)) => {
                self.unserved(scope.problem("uniqueItems", "that items differ is not served"))
            }
            ("uniqueItems", _) => Err(scope.problem("uniqueItems", "expected true or false")),
            (_, value) => {
                let knows = scope.draft >= Draft::Draft2019;
                let least = if knows { number("minContains")?.unwrap_or(1) } else { 1 };
                let most = if knows { number("maxContains")? } else { None };
                self.contains(value, (least, most), fields, scope, writing)
            }
        }
    }

    fn contains(
        &mut self,
        value: &'a Value,
        (least, most): (u64, Option<u64>),
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        if least == 0 && most.is_none() {
            return Ok(());
        }
        // Every item is one, or all are that there may be.
        let holds_all = is_true(value) || fields.get("items") == Some(value);
        if holds_all && !fields.contains_key("prefixItems") {
            let before = writing.fields.get("minItems").and_then(Value::as_u64).unwrap_or(0);
            writing.set("minItems", least.max(before));
            if let Some(most) = most {
                let before = writing.fields.get("maxItems").and_then(Value::as_u64).unwrap_or(u64::MAX);
                writing.set("maxItems", most.min(before));
            }
            return Ok(());
        }
        self.unserved(scope.problem("contains", "that some items have a form is not served"))
    }
}
