//! The description of all paths for programs.

/// An OpenAPI 3.1 document, as JSON.
pub const OPENAPI: &str = include_str!("../openapi.json");

/// The same for a port that may not have `/metrics`.
pub fn openapi(has_metrics: bool) -> String {
    let mut document: serde_json::Value = serde_json::from_str(OPENAPI).expect("a test reads it");
    if !has_metrics && let Some(paths) = document["paths"].as_object_mut() {
        paths.shift_remove("/metrics");
    }
    document.to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    fn document() -> Value {
        serde_json::from_str(OPENAPI).expect("JSON")
    }

    #[test]
    fn openapi_request_schemas_have_exactly_the_accepted_fields() {
        let document = document();
        let schemas = &document["components"]["schemas"];
        let modules = [
            crate::common::taken(),
            crate::format::taken(),
            crate::completions::taken(),
            crate::chat::taken(),
            crate::responses::taken(),
            crate::messages::taken(),
            crate::tokens::taken(),
        ];
        let mut described = BTreeSet::new();
        for (schema, fields) in modules.concat() {
            let properties = schemas[schema]["properties"].as_object().unwrap_or_else(|| panic!("no {schema}"));
            let properties: BTreeSet<_> = properties.keys().map(String::as_str).collect();
            assert_eq!(properties, fields.into_iter().collect(), "{schema}");
            described.insert(schema);
        }
        let is_closed = |schema: &Value| schema["additionalProperties"] == false;
        let closed = schemas.as_object().expect("schemas").iter().filter(|(_, schema)| is_closed(schema));
        let closed: BTreeSet<_> = closed.map(|(name, _)| name.as_str()).collect();
        assert!(closed.is_subset(&described), "{closed:?}");
    }

    #[test]
    fn openapi_document_has_the_paths_of_its_port() {
        let of_port = |has_metrics| -> Value { serde_json::from_str(&openapi(has_metrics)).expect("JSON") };
        assert_eq!(of_port(true), document());
        let without = of_port(false);
        assert!(without["paths"].get("/metrics").is_none() && without["paths"].get("/health").is_some());
    }

    #[test]
    fn openapi_references_resolve() {
        fn check(value: &Value, document: &Value) {
            if let Some(reference) = value["$ref"].as_str() {
                let pointer = reference.strip_prefix('#').expect(reference);
                assert!(document.pointer(pointer).is_some(), "{reference}");
            }
            match value {
                Value::Array(items) => items.iter().for_each(|item| check(item, document)),
                Value::Object(fields) => fields.values().for_each(|field| check(field, document)),
                _ => {}
            }
        }
        check(&document(), &document());
    }
}
