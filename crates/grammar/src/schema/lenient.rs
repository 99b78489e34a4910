//! Ways to write a schema that only tools that are not strict may have.

use serde_json::Value;

use super::TYPES;
use super::reference::{DATA, NAMED};

/// A schema without keywords that are null, and with the types of Gemini's API (`OBJECT`) in lower
/// case. Places stay where they are.
pub(super) fn tidied(schema: &Value) -> Value {
    let mut tidied = schema.clone();
    let mut left = vec![&mut tidied];
    while let Some(value) = left.pop() {
        let Value::Object(fields) = value else { continue };
        fields.retain(|keyword, value| !value.is_null() || keyword == "const");
        fields.get_mut("type").into_iter().for_each(lower_types);
        for (keyword, value) in fields.iter_mut().filter(|(keyword, _)| !DATA.contains(&keyword.as_str())) {
            if NAMED.contains(&keyword.as_str()) {
                left.extend(value.as_object_mut().into_iter().flat_map(|named| named.values_mut()));
            } else if value.is_array() {
                left.extend(value.as_array_mut().into_iter().flatten());
            } else {
                left.push(value);
            }
        }
    }
    tidied
}

/// Writes names of types in lower case.
fn lower_types(types: &mut Value) {
    match types {
        Value::String(name) if TYPES.iter().any(|known| known.eq_ignore_ascii_case(name)) => {
            name.make_ascii_lowercase()
        }
        Value::Array(names) => names.iter_mut().for_each(lower_types),
        _ => {}
    }
}
