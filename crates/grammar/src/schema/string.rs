//! Keywords of texts.

use serde_json::{Value, json};

use super::{Demand, Fields, Problem, Scope, Translator, Writing, format, pattern};

impl<'a> Translator<'a> {
    pub(super) fn pattern(
        &mut self,
        value: &'a Value,
        fields: &Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let Some(text) = value.as_str() else {
            return self.unserved(scope.problem("pattern", "expected a text"));
        };
        let patterns = match self.library_patterns(text) {
            Ok(patterns) => patterns,
            Err(what) => return self.unserved(scope.problem("pattern", what)),
        };
        let mut patterns = patterns.into_iter();
        if let Some(first) = patterns.next() {
            writing.set("pattern", first);
        }
        for pattern in patterns {
            let mut more = json!({ "pattern": pattern });
            if let Some(types) = fields.get("type") {
                more["type"] = types.clone();
            }
            writing.beside.push(more);
        }
        Ok(())
    }

    /// Patterns of the library, of which all have to be found.
    pub(super) fn library_patterns(&mut self, text: &str) -> Result<Vec<String>, String> {
        if let Some(written) = self.patterns.get(text) {
            return written.clone();
        }
        let written = pattern::written(text, &mut self.work);
        self.patterns.insert(text.to_owned(), written.clone());
        written
    }

    /// Formats that are known are held to. Others only describe, unless the demand is strict and no
    /// pattern says what they are.
    pub(super) fn format(
        &mut self,
        value: &'a Value,
        fields: &'a Fields,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        let Some(name) = value.as_str() else {
            return self.unserved(scope.problem("format", "expected a text"));
        };
        let parts = fields.get("allOf").and_then(Value::as_array).into_iter().flatten();
        let has_pattern = fields.contains_key("pattern") || parts.into_iter().any(|part| part.get("pattern").is_some());
        if format::is_known(name) {
            // Zod's times have no zone: the pattern is what the library that wrote it means.
            if !has_pattern || !format::is_vague(name) {
                writing.set("format", name);
            }
            return Ok(());
        }
        if has_pattern || format::says_nothing(name) {
            return Ok(());
        }
        if let Some(pattern) = format::pattern(name) {
            writing.beside.push(json!({ "pattern": pattern }));
            return Ok(());
        }
        if self.demand == Demand::Strict {
            let shown: String = name.chars().take(64).collect();
            return Err(scope.problem("format", format!("unknown format '{shown}'")));
        }
        Ok(())
    }
}
