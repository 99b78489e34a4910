//! Keywords that combine schemas.

use serde_json::{Value, json};

use super::{Fields, Problem, Scope, Translator, Writing, is_true};

/// Most schemas of `oneOf` that are told apart by what the others are not.
const MAX_NEGATED: usize = 6;

impl<'a> Translator<'a> {
    pub(super) fn condition(
        &mut self,
        keyword: &str,
        fields: &'a Fields,
        scope: &Scope,
        inner: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        match keyword {
            "not" => self.not(&fields[keyword], scope, writing),
            "if" => self.conditional(fields, scope, inner, writing),
            _ => {
                let Value::Array(values) = &fields[keyword] else {
                    return Err(scope.problem(keyword, "expected a list of schemas"));
                };
                if values.is_empty() {
                    return Err(scope.problem(keyword, "expected at least one schema"));
                }
                let mut all = Vec::with_capacity(values.len());
                for (index, value) in values.iter().enumerate() {
                    all.push(self.schema(value, &inner.at(&[keyword, &index.to_string()]))?);
                }
                if keyword == "oneOf" {
                    return self.one_of(values, all, inner, writing);
                }
                if keyword == "anyOf" && all.iter().any(is_true) {
                    return Ok(());
                }
                writing.set(keyword, all);
                Ok(())
            }
        }
    }

    /// One of these and no other: one of any, if no value is of two.
    fn one_of(
        &mut self,
        values: &'a [Value],
        mut all: Vec<Value>,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let at = |index: usize| scope.at(&["oneOf", &index.to_string()]);
        let mut others = vec![Vec::new(); values.len()];
        for (first, other) in others.iter_mut().enumerate() {
            for second in 0..values.len() {
                let pair = (first.min(second), first.max(second));
                if first != second
                    && !self.are_disjoint((&values[pair.0], &at(pair.0)), (&values[pair.1], &at(pair.1)), 0)
                {
                    other.push(second);
                }
            }
        }
        let has_overlap = others.iter().any(|others| !others.is_empty());
        if has_overlap && values.len() > MAX_NEGATED {
            self.unserved(scope.problem("oneOf", OVERLAP))?;
        } else if has_overlap {
            // What is of one that overlaps is not of the others.
            for (index, others) in others.into_iter().enumerate() {
                for other in others {
                    match self.negated(&values[other], &at(other)) {
                        Some(not) => all[index] = json!({ "allOf": [all[index], not] }),
                        None => self.unserved(scope.problem("oneOf", OVERLAP))?,
                    }
                }
            }
        }
        if writing.fields.contains_key("anyOf") {
            writing.beside.push(json!({ "anyOf": all }));
        } else {
            writing.set("anyOf", all);
        }
        Ok(())
    }

    fn not(&mut self, value: &'a Value, scope: &Scope, writing: &mut Writing) -> Result<(), Problem> {
        match self.negated(value, &scope.at(&["not"])) {
            Some(not) if is_true(&not) => Ok(()),
            Some(not) => {
                writing.beside.push(not);
                Ok(())
            }
            None => self.unserved(scope.problem("not", "that a value has not this form is not served")),
        }
    }

    fn conditional(
        &mut self,
        fields: &'a Fields,
        scope: &Scope,
        inner: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let branch = |keyword: &str| fields.get(keyword).filter(|value| !is_true(value));
        let then = branch("then");
        let other = branch("else");
        if then.is_none() && other.is_none() {
            return Ok(());
        }
        let value = &fields["if"];
        let at = scope.opened(true).at(&["if"]);
        let (holds, not) = match self.exactly(|this| this.schema(value, &at)) {
            Ok(holds) => (holds, self.negated(value, &at)),
            Err(problem) => return self.unserved(problem),
        };
        let Some(not) = not else {
            return self.unserved(scope.problem("if", "that a value has not this form is not served"));
        };
        let mut branches = Vec::new();
        for (keyword, value, when) in [("then", then, holds), ("else", other, not)] {
            let value = match value {
                Some(value) => self.schema(value, &inner.at(&[keyword]))?,
                None => Value::Bool(true),
            };
            branches.push(json!({ "allOf": [when, value] }));
        }
        writing.beside.push(json!({ "anyOf": branches }));
        Ok(())
    }
}

const OVERLAP: &str = "oneOf is taken if no value can be of two of its schemas; otherwise use anyOf";
