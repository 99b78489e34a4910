//! What a model's authors advise for sampling: `generation_config.json` of Hugging Face folders,
//! and `general.sampling.*` of GGUF (`gguf-py/gguf/constants.py` of llama.cpp).

use baton_formats::{Metadata, ModelFile};
use baton_types::{SamplingDefaults, SamplingParams};
use serde_json::Value;

use crate::error::TextError;
use crate::model_folder;

const FILE: &str = "generation_config.json";

/// The sampling that a model's files advise.
///
/// # Errors
/// A value is of another type, or out of its range.
pub fn sampling_defaults(model: &ModelFile) -> Result<SamplingDefaults, TextError> {
    match model {
        ModelFile::Gguf(gguf) => of_metadata(gguf.metadata()),
        ModelFile::Safetensors(safetensors) => {
            of_json(&model_folder::json(model_folder::of(safetensors.path()), FILE)?)
        }
    }
}

fn of_metadata(metadata: &Metadata) -> Result<SamplingDefaults, TextError> {
    let float = |key: &str| metadata.f32(&format!("general.sampling.{key}"));
    checked(
        "general.sampling",
        SamplingDefaults {
            temperature: float("temp")?,
            top_k: metadata.i32("general.sampling.top_k")?.map(all_or),
            top_p: float("top_p")?,
            min_p: float("min_p")?,
            repetition_penalty: float("penalty_repeat")?,
            max_tokens: None,
        },
    )
}

fn of_json(config: &Value) -> Result<SamplingDefaults, TextError> {
    let wrong = |key: &str| TextError::model(format!("{FILE}: {key}"), format!("{} is no number", config[key]));
    let float = |key: &str| match &config[key] {
        Value::Null => Ok(None),
        value => value.as_f64().map(|value| Some(value as f32)).ok_or_else(|| wrong(key)),
    };
    let integer = |key: &str| match &config[key] {
        Value::Null => Ok(None),
        value => value.as_i64().map(|value| Some(all_or(value))).ok_or_else(|| wrong(key)),
    };
    checked(
        FILE,
        SamplingDefaults {
            temperature: float("temperature")?,
            top_k: integer("top_k")?,
            top_p: float("top_p")?,
            min_p: float("min_p")?,
            repetition_penalty: float("repetition_penalty")?,
            max_tokens: integer("max_new_tokens")?,
        },
    )
}

/// A count; below 0 it is none, as in `"top_k": -1`.
fn all_or(count: impl TryInto<u32>) -> u32 {
    count.try_into().unwrap_or(0)
}

fn checked(source: &str, defaults: SamplingDefaults) -> Result<SamplingDefaults, TextError> {
    let SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens } = defaults;
    let default = SamplingParams::default();
    let params = SamplingParams {
        temperature: temperature.unwrap_or(default.temperature),
        top_k: top_k.unwrap_or(default.top_k),
        top_p: top_p.unwrap_or(default.top_p),
        min_p: min_p.unwrap_or(default.min_p),
        repetition_penalty: repetition_penalty.unwrap_or(default.repetition_penalty),
        max_tokens: max_tokens.unwrap_or(default.max_tokens),
        ..default
    };
    match params.validate() {
        Ok(()) => Ok(defaults),
        Err(problem) => Err(TextError::model(source, format!("{problem}; generation_config = none ignores it"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn generation_config_gives_sampling_defaults() {
        let config = json!({
            "bos_token_id": 1, "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
            "repetition_penalty": 1.05, "max_new_tokens": 2048, "min_p": null,
        });
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: None,
            repetition_penalty: Some(1.05),
            max_tokens: Some(2048),
        };
        assert_eq!(of_json(&config).unwrap(), expected);
        assert_eq!(of_json(&Value::Null).unwrap(), SamplingDefaults::default());
        assert_eq!(of_json(&json!({"top_k": -1, "temperature": 1})).unwrap().top_k, Some(0));
    }

    #[test]
    fn wrong_generation_config_names_its_field() {
        for (config, told) in [
            (json!({"temperature": "hot"}), "generation_config.json: temperature: \"hot\" is no number"),
            (
                json!({"top_p": 1.5}),
                "top_p is 1.5, but must be above 0 and at most 1; generation_config = none ignores it",
            ),
            (json!({"max_new_tokens": 0}), "max_tokens is 0"),
        ] {
            let error = of_json(&config).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
