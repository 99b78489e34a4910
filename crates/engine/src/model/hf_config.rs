//! Hyperparameters from the `config.json` of a Hugging Face folder.

use baton_formats::Safetensors;
use serde_json::{Map, Value};

use super::config::{Limit, ModelConfig, head_dim, wrong};
use super::rope_scaling::{RopeScaling, frequencies};
use crate::error::EngineError;

/// A model class of `transformers`, and what it takes for granted.
struct Family {
    class: &'static str,
    architecture: &'static str,
}

const FAMILIES: [Family; 3] = [
    Family { class: "LlamaForCausalLM", architecture: "llama" },
    Family { class: "MistralForCausalLM", architecture: "mistral" },
    Family { class: "Qwen2ForCausalLM", architecture: "qwen2" },
];

/// A JSON object whose keys are read with their type checked.
struct Keys<'a> {
    object: &'a Map<String, Value>,
    /// Where it lies in the file, for errors: empty, or `rope_scaling.`.
    path: &'static str,
}

impl<'a> Keys<'a> {
    /// The value; `null` is as good as missing.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, EngineError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(&self.name(key), value, expected))
    }

    fn u32(&self, key: &str) -> Result<Option<u32>, EngineError> {
        self.typed(key, "an integer from 0 to 2^32 - 1", |v| v.as_u64().and_then(|n| u32::try_from(n).ok()))
    }

    fn f64(&self, key: &str) -> Result<Option<f64>, EngineError> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn bool(&self, key: &str) -> Result<Option<bool>, EngineError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, EngineError> {
        value.ok_or_else(|| EngineError::Model(format!("config.json has no {}", self.name(key))))
    }

    fn size(&self, key: &str, limit: Limit) -> Result<usize, EngineError> {
        limit.check(&self.name(key), self.require(key, self.u32(key)?)?)
    }

    fn positive(&self, key: &str) -> Result<f64, EngineError> {
        let value = self.require(key, self.f64(key)?)?;
        if value > 0.0 && value.is_finite() { Ok(value) } else { Err(wrong(&self.name(key), value, "above 0")) }
    }

    /// A value that, if it is given, must be this one.
    fn only(&self, key: &str, expected: &Value) -> Result<(), EngineError> {
        match self.get(key) {
            Some(found) if found != expected => Err(wrong(&self.name(key), found, expected)),
            _ => Ok(()),
        }
    }
}

pub(super) fn read(file: &Safetensors) -> Result<ModelConfig, EngineError> {
    let Some(object) = file.config().as_object() else {
        return Err(EngineError::Model("a safetensors file alone has no config.json: give its folder".into()));
    };
    let keys = Keys { object, path: "" };
    let family = family(&keys)?;
    refuse(&keys)?;
    let hidden = keys.size("hidden_size", Limit::WIDTH)?;
    let num_layers = keys.size("num_hidden_layers", Limit::LAYERS)?;
    let heads = keys.size("num_attention_heads", Limit::HEADS)?;
    let kv_heads = keys.u32("num_key_value_heads")?;
    let kv_heads = kv_heads.map_or(Ok(heads), |n| Limit::HEADS.check("num_key_value_heads", n))?;
    let head_dim = head_dim("head_dim", keys.u32("head_dim")?, hidden, heads)?;
    Ok(ModelConfig {
        name: name(file, &keys),
        architecture: family.architecture.to_owned(),
        hidden,
        num_layers,
        heads,
        kv_heads,
        head_dim,
        feed_forward: keys.size("intermediate_size", Limit::WIDTH)?,
        vocab_size: keys.size("vocab_size", Limit::VOCABULARY)?,
        context_length: keys.size("max_position_embeddings", Limit::CONTEXT)? as u32,
        norm_eps: keys.require("rms_norm_eps", keys.f64("rms_norm_eps")?)? as f32,
        rope_frequencies: rope(&keys, head_dim)?,
        interleaved_rope: false,
        windows: windows(&keys, family, num_layers)?,
        tied_head: keys.bool("tie_word_embeddings")?,
    })
}

fn family(keys: &Keys<'_>) -> Result<&'static Family, EngineError> {
    let classes = keys.typed("architectures", "a list of names", Value::as_array)?;
    let class = keys.require("architectures", classes)?.first().and_then(Value::as_str).unwrap_or_default();
    FAMILIES.iter().find(|family| family.class == class).ok_or_else(|| {
        wrong("architectures", format!("{class:.80?}"), "LlamaForCausalLM, MistralForCausalLM or Qwen2ForCausalLM")
    })
}

/// What would change the model, and is not done here.
fn refuse(keys: &Keys<'_>) -> Result<(), EngineError> {
    keys.only("hidden_act", &"silu".into())?;
    keys.only("mlp_bias", &false.into())?;
    if keys.f64("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(wrong("partial_rotary_factor", &keys.object["partial_rotary_factor"], 1));
    }
    match keys.get("quantization_config") {
        Some(found) => Err(wrong("quantization_config", found, "missing: weights in F32, F16 or BF16")),
        None => Ok(()),
    }
}

fn name(file: &Safetensors, keys: &Keys<'_>) -> String {
    let given = keys.get("_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
    let folder = || file.path().file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    given.map_or_else(folder, str::to_owned)
}

/// Frequencies from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`
/// (before).
fn rope(keys: &Keys<'_>, head_dim: usize) -> Result<Vec<f64>, EngineError> {
    let object = |key| keys.typed(key, "an object", Value::as_object);
    let scaling = match (object("rope_parameters")?, object("rope_scaling")?) {
        (Some(object), _) => Some(Keys { object, path: "rope_parameters." }),
        (None, Some(object)) => Some(Keys { object, path: "rope_scaling." }),
        (None, None) => None,
    };
    let theta = |keys: &Keys<'_>| keys.get("rope_theta").map(|_| keys.positive("rope_theta")).transpose();
    let nested = scaling.as_ref().map(theta).transpose()?.flatten();
    let base = nested.or(theta(keys)?).unwrap_or(10_000.0);
    let scaling = scaling.map_or(Ok(RopeScaling::None), |scaling| rope_scaling(keys, &scaling))?;
    Ok(frequencies(base, head_dim, &scaling))
}

fn rope_scaling(model: &Keys<'_>, keys: &Keys<'_>) -> Result<RopeScaling, EngineError> {
    let key = if keys.get("rope_type").is_some() { "rope_type" } else { "type" };
    match keys.typed(key, "a name", Value::as_str)? {
        Some("default") | None => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear(keys.positive("factor")?)),
        Some("llama3") => llama3(model, keys),
        Some(found) => Err(wrong(&keys.name(key), found, "default, linear or llama3")),
    }
}

fn llama3(model: &Keys<'_>, keys: &Keys<'_>) -> Result<RopeScaling, EngineError> {
    let original = "original_max_position_embeddings";
    let original_context = match keys.get(original) {
        Some(_) => keys.positive(original)?,
        None => model.positive("max_position_embeddings")?,
    };
    let low = keys.positive("low_freq_factor")?;
    let high = keys.positive("high_freq_factor")?;
    if low >= high {
        return Err(wrong(&keys.name("low_freq_factor"), low, format!("below high_freq_factor, which is {high}")));
    }
    Ok(RopeScaling::Llama3 {
        factor: keys.positive("factor")?,
        low_freq_factor: low,
        high_freq_factor: high,
        original_context,
    })
}

/// Which layers see a window only. `layer_types` says it outright; before it was there, the
/// family's own rule holds.
fn windows(keys: &Keys<'_>, family: &Family, num_layers: usize) -> Result<Vec<Option<u32>>, EngineError> {
    let window = keys.u32("sliding_window")?;
    if window == Some(0) {
        return Err(wrong("sliding_window", 0, "null or at least 1"));
    }
    if let Some(types) = keys.typed("layer_types", "a list of names", Value::as_array)? {
        return by_type(types, window, num_layers);
    }
    match family.architecture {
        "mistral" => Ok(vec![window; num_layers]),
        "qwen2" if keys.bool("use_sliding_window")? == Some(true) => {
            let full = keys.require("max_window_layers", keys.u32("max_window_layers")?)? as usize;
            Ok((0..num_layers).map(|layer| window.filter(|_| layer >= full)).collect())
        }
        "llama" if window.is_some() => Err(wrong("sliding_window", &keys.object["sliding_window"], "null")),
        _ => Ok(vec![None; num_layers]),
    }
}

fn by_type(types: &[Value], window: Option<u32>, num_layers: usize) -> Result<Vec<Option<u32>>, EngineError> {
    if types.len() != num_layers {
        return Err(wrong("the length of layer_types", types.len(), num_layers));
    }
    let of = |value: &Value| match (value.as_str(), window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (Some("sliding_attention"), None) => Err(wrong("sliding_window", "missing", "the layers' window")),
        _ => Err(wrong("layer_types", value, "full_attention or sliding_attention")),
    };
    types.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with<T>(config: &Value, read: impl FnOnce(&Keys<'_>) -> T) -> T {
        read(&Keys { object: config.as_object().unwrap(), path: "" })
    }

    fn problem<T>(result: Result<T, EngineError>) -> String {
        result.err().unwrap().to_string()
    }

    #[test]
    fn unsupported_hf_config_is_refused_by_key() {
        let refused = [
            (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\", but must be \"silu\""),
            (json!({"mlp_bias": true}), "mlp_bias is true, but must be false"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5, but must be 1"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config is {\"bits\":4}"),
        ];
        for (config, expected) in refused {
            let found = with(&config, |keys| problem(refuse(keys)));
            assert!(found.contains(expected), "{found}");
        }
        assert!(problem(with(&json!({"architectures": ["GPT2"]}), |k| family(k).map(|_| ()))).contains("GPT2"));
        assert!(problem(with(&json!({}), |k| family(k).map(|_| ()))).contains("no architectures"));
        let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}});
        assert!(problem(with(&yarn, |k| rope(k, 8))).contains("rope_scaling.rope_type is yarn"));
        let negative = json!({"rope_parameters": {"rope_type": "linear", "factor": -1}});
        assert!(problem(with(&negative, |k| rope(k, 8))).contains("rope_parameters.factor is -1, but must be above 0"));
        assert!(problem(with(&json!({"x": -3}), |k| k.size("x", Limit::HEADS))).contains("x is -3"));
        assert!(problem(with(&json!({"x": "3"}), |k| k.size("x", Limit::HEADS))).contains("x is \"3\""));
    }

    #[test]
    fn old_and_new_rope_keys_of_hf_config_are_read() {
        let old = json!({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}});
        let new = json!({"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}});
        let expected = frequencies(5000.0, 8, &RopeScaling::Linear(2.0));
        assert_eq!(with(&old, |k| rope(k, 8)).unwrap(), expected);
        assert_eq!(with(&new, |k| rope(k, 8)).unwrap(), expected);
        assert_eq!(with(&json!({}), |k| rope(k, 8)).unwrap(), frequencies(1e4, 8, &RopeScaling::None));
    }

    #[test]
    fn sliding_windows_follow_layer_types_or_model_family() {
        let of = |config: Value, family: usize| with(&config, |k| windows(k, &FAMILIES[family], 3));
        assert_eq!(of(json!({"sliding_window": 9}), 1).unwrap(), [Some(9); 3]);
        assert_eq!(of(json!({"sliding_window": null}), 1).unwrap(), [None; 3]);
        assert_eq!(of(json!({"sliding_window": 9, "use_sliding_window": false}), 2).unwrap(), [None; 3]);
        let qwen = json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 2});
        assert_eq!(of(qwen, 2).unwrap(), [None, None, Some(9)]);
        let types =
            json!({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "full_attention"]});
        assert_eq!(of(types, 0).unwrap(), [None, Some(9), None]);
        assert!(problem(of(json!({"sliding_window": 9}), 0)).contains("sliding_window is 9"));
        assert!(problem(of(json!({"layer_types": ["full_attention"]}), 0)).contains("layer_types is 1, but must be 3"));
        assert!(problem(of(json!({"sliding_window": 0}), 1)).contains("sliding_window is 0"));
    }
}
