//! The form of an answer: `response_format` and vLLM's `structured_outputs`.

use baton_proto::v1::structured_output::Form;
use baton_proto::v1::{Choices, StructuredOutput};

use crate::common::check_bytes;
use crate::error::BadRequest;
use crate::field::{AtMost, Ignored, Json, JsonObject, MAX_SCHEMA_BYTES, Refused, Stray, objects, or_default};
use crate::tools::check_name;

/// A JSON schema.
pub(crate) type Schema = JsonObject<MAX_SCHEMA_BYTES>;

objects! {
    /// OpenAI's.
    pub(crate) struct ResponseFormat {
        r#type: String,
        json_schema: Option<JsonSchema>,
        /// A schema where other servers take it, beside either type.
        schema: Option<Schema>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct JsonSchema {
        name: Option<String>,
        #[serde(default, rename = "description")]
        _description: Ignored,
        schema: Option<Schema>,
        strict: Option<bool>,
    }

    /// vLLM's: one of these.
    pub(crate) struct StructuredOutputs {
        json: Option<Json<MAX_SCHEMA_BYTES>>,
        regex: Option<String>,
        choice: Option<AtMost<String, 1024>>,
        grammar: Option<String>,
        #[serde(default, deserialize_with = "or_default")]
        json_object: bool,
        #[serde(default, rename = "structural_tag")]
        _structural_tag: Refused,
    }
}

/// The form that both ask for together.
pub(crate) fn structured_output(
    format: Option<&ResponseFormat>,
    outputs: Option<&StructuredOutputs>,
) -> Result<Option<StructuredOutput>, BadRequest> {
    let format = format.map(ResponseFormat::form).transpose()?.flatten();
    let outputs = outputs.map(StructuredOutputs::form).transpose()?;
    let form = match (format, outputs) {
        (Some(_), Some(_)) => {
            return Err(BadRequest::new("structured_outputs", "beside response_format: one of both is taken"));
        }
        (format, outputs) => format.or(outputs),
    };
    Ok(form.map(|form| StructuredOutput { form: Some(form) }))
}

impl ResponseFormat {
    fn form(&self) -> Result<Option<Form>, BadRequest> {
        let nothing =
            |field: &str| Err(BadRequest::new(format!("response_format.{field}"), "says nothing to this type"));
        let form = match (self.r#type.as_str(), &self.json_schema, &self.schema) {
            ("text", None, None) => None,
            ("json_object", None, None) => Some(Form::JsonObject(true)),
            ("json_schema", Some(JsonSchema { name, schema, strict, .. }), None) => {
                if let Some(name) = name {
                    check_name("response_format.json_schema.name", name, 64)?;
                }
                let missing = || BadRequest::missing("response_format.json_schema.schema");
                let JsonObject(schema) = schema.as_ref().ok_or_else(missing)?;
                Some(json_schema(schema.get(), *strict))
            }
            ("json_object" | "json_schema", None, Some(JsonObject(schema))) => Some(json_schema(schema.get(), None)),
            ("json_schema", None, None) => return Err(BadRequest::missing("response_format.json_schema")),
            ("json_schema", Some(_), Some(_)) | ("text", None, Some(_)) => return nothing("schema"),
            ("text" | "json_object", Some(_), _) => return nothing("json_schema"),
            (other, ..) => {
                let served = "text, json_object or json_schema";
                return Err(BadRequest::kind("response_format.type", other, served));
            }
        };
        BadRequest::stray(&self.stray).map_err(|bad| bad.inside("response_format"))?;
        Ok(form)
    }
}

/// A schema as the wire has it.
pub(crate) fn json_schema(schema: &str, strict: Option<bool>) -> Form {
    let form = if strict == Some(true) { Form::StrictJsonSchema } else { Form::JsonSchema };
    form(schema.to_owned())
}

impl StructuredOutputs {
    fn form(&self) -> Result<Form, BadRequest> {
        let Self { json, regex, choice, grammar, json_object, .. } = self;
        let json = json.as_ref().map(|json| schema_text(json).map(Form::JsonSchema)).transpose()?;
        let forms = [
            json,
            regex.clone().map(Form::Regex),
            choice.clone().map(|AtMost(texts)| Form::Choices(Choices { texts })),
            grammar.clone().map(Form::Grammar),
            json_object.then_some(Form::JsonObject(true)),
        ];
        let mut given = forms.into_iter().flatten();
        let (Some(form), None) = (given.next(), given.next()) else {
            let problem = "must have one of json, regex, choice, grammar and json_object";
            return Err(BadRequest::new("structured_outputs", problem));
        };
        if let Form::Choices(Choices { texts }) = &form {
            check_bytes("structured_outputs.choice", texts)?;
        }
        check_bytes("structured_outputs.regex", regex)?;
        check_bytes("structured_outputs.grammar", grammar)?;
        Ok(form)
    }
}

/// A schema, which `true` is, too, or a text of one.
fn schema_text(Json(schema): &Json<MAX_SCHEMA_BYTES>) -> Result<String, BadRequest> {
    const PARAM: &str = "structured_outputs.json";
    match schema.get().as_bytes() {
        [b'{', ..] | b"true" => Ok(schema.get().to_owned()),
        [b'"', ..] => serde_json::from_str(schema.get()).map_err(|error| BadRequest::new(PARAM, error.to_string())),
        _ => Err(BadRequest::new(PARAM, "is no schema: neither an object nor true, nor a text of one")),
    }
}

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![
        ("ResponseFormat", taken::<ResponseFormat>()),
        ("NamedSchema", taken::<JsonSchema>()),
        ("StructuredOutputs", taken::<StructuredOutputs>()),
    ]
}
