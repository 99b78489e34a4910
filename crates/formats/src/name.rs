//! What a model is called.

use std::path::Path;

/// The name that clients use if the operator gives none: the file's or folder's name, without
/// `.gguf` or `.safetensors`.
pub fn model_name(path: &Path) -> String {
    let known = path.extension().is_some_and(|extension| extension == "gguf" || extension == "safetensors");
    let name = if known { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_name_drops_only_the_format_extension() {
        assert_eq!(model_name(Path::new("/m/SmolLM2-135M.Q4_1.gguf")), "SmolLM2-135M.Q4_1");
        assert_eq!(model_name(Path::new("/m/Llama-3.2-1B/")), "Llama-3.2-1B");
        assert_eq!(model_name(Path::new("/")), "model");
    }
}
