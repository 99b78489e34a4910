//! How much a model takes, by its own files.

use baton_formats::ModelFile;
use serde_json::Value;

use crate::{TextError, model_folder};

/// What a model's files say of its limits; `None` where they do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ModelLimits {
    /// Most tokens of prompt and output together.
    pub context_length: Option<u32>,
    /// Token ids are below it.
    pub vocab_size: Option<u32>,
}

/// Reads them.
///
/// # Errors
/// `config.json` is missing, or no JSON.
pub fn model_limits(model: &ModelFile) -> Result<ModelLimits, TextError> {
    match model {
        ModelFile::Gguf(gguf) => {
            let metadata = gguf.metadata();
            let context = |name: &str| metadata.u32(&format!("{name}.context_length"));
            let context_length = metadata.str("general.architecture")?.map(context).transpose()?.flatten();
            let rows = model.tensor("token_embd.weight").ok().map(|tensor| tensor.rows());
            Ok(ModelLimits { context_length, vocab_size: rows.and_then(|rows| u32::try_from(rows).ok()) })
        }
        ModelFile::Safetensors(safetensors) => {
            let config = model_folder::json(model_folder::of(safetensors.path()), "config.json")?;
            let number = |key: &str| config.get(key).and_then(Value::as_u64).and_then(|number| number.try_into().ok());
            Ok(ModelLimits { context_length: number("max_position_embeddings"), vocab_size: number("vocab_size") })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn model_limits_are_the_same_in_both_formats() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/smollm");
        for path in [folder.clone(), folder.join("model.gguf")] {
            let limits = model_limits(&ModelFile::open(&path).unwrap()).unwrap();
            assert_eq!((limits.context_length, limits.vocab_size), (Some(256), Some(61)), "{}", path.display());
        }
    }
}
