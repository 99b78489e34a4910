//! References.

use serde_json::{Value, json};

use super::{Problem, Scope, Translator, Writing};

impl<'a> Translator<'a> {
    pub(super) fn reference(
        &mut self,
        keyword: &str,
        value: &Value,
        scope: &Scope,
        writing: &mut Writing,
    ) -> Result<(), Problem> {
        match self.target(keyword, value, scope) {
            Err(problem) => self.unserved(problem),
            Ok(pointer) => {
                let reference = self.reference_to(&pointer, scope.is_open);
                if writing.fields.contains_key("$ref") {
                    writing.beside.push(json!({ "$ref": reference }));
                } else {
                    writing.set("$ref", reference);
                }
                Ok(())
            }
        }
    }

    /// The place that a reference leads to.
    pub(super) fn target(&self, keyword: &str, value: &Value, scope: &Scope) -> Result<String, Problem> {
        let Some(reference) = value.as_str() else { return Err(scope.problem(keyword, "expected a text")) };
        let shown: String = reference.chars().take(128).collect();
        let is_dynamic = match keyword {
            "$dynamicRef" => !self.document.is_static(reference.rsplit('#').next().unwrap_or_default()),
            "$recursiveRef" => !self.document.is_one(),
            _ => false,
        };
        if is_dynamic {
            return Err(scope.problem(keyword, format!("'{shown}' leads to several places")));
        }
        let found = self.document.resolved(reference, &scope.pointer);
        found.ok_or_else(|| scope.problem(keyword, format!("there is no '{shown}' in the schema")))
    }

    /// A reference, for the library, to what is at a place.
    pub(super) fn reference_to(&mut self, pointer: &str, is_open: bool) -> String {
        if pointer == self.start && !is_open {
            return "#".to_owned();
        }
        let key = (pointer.to_owned(), is_open);
        if let Some(name) = self.names.get(&key) {
            return format!("#/$defs/{name}");
        }
        let name = format!("d{}", self.names.len());
        self.names.insert(key, name.clone());
        self.pending.push((self.scope_of(pointer, is_open), name.clone()));
        format!("#/$defs/{name}")
    }

    /// A written schema that is used several times, by a reference if it is long.
    pub(super) fn shared(&mut self, value: Value) -> Value {
        if value.to_string().len() < 64 {
            return value;
        }
        let name = format!("d{}", self.names.len());
        // Pointers begin with a slash: no place has this one.
        self.names.insert((name.clone(), false), name.clone());
        self.definitions.insert(name.clone(), value);
        json!({ "$ref": format!("#/$defs/{name}") })
    }
}
