//! What a model is called.

use std::path::Path;

/// The name that clients use if the operator gives none: the file's or folder's name, without
/// `.gguf` or `.safetensors`, and without the number of a model's first file of several.
pub fn model_name(path: &Path) -> String {
    let known = path.extension().is_some_and(|extension| extension == "gguf" || extension == "safetensors");
    let name = if known { path.file_stem() } else { path.file_name() };
    let Some(name) = name.map(|name| name.to_string_lossy()) else { return "model".to_owned() };
    let is_count = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    match name.rsplit_once("-00001-of-") {
        Some((name, count)) if is_count(count) => name.to_owned(),
        _ => name.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_name_drops_only_the_format_extension() {
        assert_eq!(model_name(Path::new("/m/SmolLM2-135M.Q4_1.gguf")), "SmolLM2-135M.Q4_1");
        assert_eq!(model_name(Path::new("/m/Llama-3.2-1B/")), "Llama-3.2-1B");
        assert_eq!(model_name(Path::new("/m/Qwen-72B-00001-of-00003.gguf")), "Qwen-72B");
        assert_eq!(model_name(Path::new("/m/a-00001-of-b.gguf")), "a-00001-of-b");
        assert_eq!(model_name(Path::new("/")), "model");
    }
}
