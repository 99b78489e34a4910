//! Model files.

use std::cell::OnceCell;
use std::fs;
use std::path::Path;

use baton_formats::{Gguf, ModelFile, TensorView};
use tempfile::TempDir;

use super::fixture;
use crate::input::{END, join, parts};

pub(super) const GGUF_WORDS: &[&str] =
    &["GGUF", "general.alignment", "general.architecture", "split.count", "tokenizer.ggml.tokens", "token_embd.weight"];
pub(super) const SAFETENSORS_WORDS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    "\"dtype\":",
    "\"shape\":",
    "\"data_offsets\":",
    "\"__metadata__\":",
    "\"F32\"",
    "\"BF16\"",
    "\"F4\"",
    "\"weight_map\":",
    "model-00001-of-00002.safetensors",
    "../",
    "\"a\":",
];

/// Values of a tensor that are looked at: the rest is like them.
const MAX_ELEMENTS: usize = 1 << 12;

/// A GGUF file.
pub(super) fn gguf(input: &[u8]) {
    let Ok(file) = Gguf::parse(input.to_vec()) else { return };
    let metadata = file.metadata();
    for (key, _) in metadata.iter() {
        let _ = (metadata.u32(key), metadata.f32_array(key), metadata.str(key), metadata.bool(key));
        let _ = metadata.str_array(key);
    }
    file.tensors().for_each(|tensor| look_at(&tensor));
}

fn look_at(tensor: &TensorView<'_>) {
    if tensor.elements() <= MAX_ELEMENTS {
        tensor.dequantize(&mut vec![0.0; tensor.elements()]).expect("a checked tensor fits its shape");
    }
}

/// Parts: `config.json`, the index, and two shards; without an index the first shard is the model,
/// without a config too it is a file by itself.
pub(super) fn safetensors(input: &[u8]) {
    thread_local! {
        static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
    }
    let [config, index, first, second] = parts(input);
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(super::folder).path();
        let single = folder.join("model.safetensors");
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        put(&folder.join("config.json"), config);
        put(&folder.join("model.safetensors.index.json"), index);
        put(&single, if index.is_empty() { first } else { b"" });
        put(&folder.join(shards[0]), if index.is_empty() { b"" } else { first });
        put(&folder.join(shards[1]), second);
        let opened = ModelFile::open(if config.is_empty() { &single } else { folder });
        let Ok(model) = opened else { return };
        model.tensors().for_each(|tensor| look_at(&tensor));
        assert!(model.total_bytes() as usize <= input.len());
    });
}

/// An empty file is none.
fn put(path: &Path, bytes: &[u8]) {
    let done = if bytes.is_empty() { fs::remove_file(path) } else { fs::write(path, bytes) };
    match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{}: {error}", path.display()),
        _ => {}
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&string(key)[..], &kind.to_le_bytes(), value].concat()
}

fn array(kind: u32, len: u64, items: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &len.to_le_bytes(), items].concat()
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let dims_bytes: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
    [&string(name)[..], &(dims.len() as u32).to_le_bytes(), &dims_bytes, &kind.to_le_bytes(), &offset.to_le_bytes()]
        .concat()
}

/// Every type of metadata, and tensors of several types.
pub(super) fn gguf_seeds() -> Vec<Vec<u8>> {
    let texts = [string("a"), string(""), string("bc")].concat();
    let entries = [
        entry("general.architecture", 8, &string("llama")),
        entry("general.alignment", 4, &32u32.to_le_bytes()),
        entry("a", 0, &[1]),
        entry("b", 3, &[1, 0]),
        entry("c", 5, &[1, 0, 0, 0]),
        entry("d", 6, &1f32.to_le_bytes()),
        entry("e", 7, &[1]),
        entry("f", 12, &1f64.to_le_bytes()),
        entry("g", 10, &[9; 8]),
        entry("h", 9, &array(8, 3, &texts)),
        entry("i", 9, &array(6, 2, &[0; 8])),
        entry("j", 9, &array(5, 2, &[0; 8])),
        entry("k", 9, &array(7, 3, &[1, 0, 1])),
    ];
    let tensors = [
        tensor("token_embd.weight", &[32, 3], 3, 0),
        tensor("output_norm.weight", &[4], 0, 64),
        tensor("blk.0.ffn_down.weight", &[256, 1], 14, 96),
    ];
    let counts = [3u64.to_le_bytes(), (entries.len() as u64).to_le_bytes()].concat();
    let mut file = [b"GGUF", &3u32.to_le_bytes()[..], &counts, &entries.concat(), &tensors.concat()].concat();
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend([7; 96 + 210]);
    vec![file]
}

fn shard(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![1; data]].concat()
}

pub(super) fn safetensors_seeds() -> Vec<Vec<u8>> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"I64","shape":[],"data_offsets":[32,40]}}"#;
    let first = shard(header, 40);
    let second = shard(r#"{"d":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}}"#, 4);
    let index = r#"{"metadata":{"total_size":44},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00001-of-00002.safetensors","c":"model-00001-of-00002.safetensors","d":"model-00002-of-00002.safetensors"}}"#;
    let config = fixture("crates/engine/tests/fixtures/smollm/config.json");
    let seeds = vec![
        join(&[b"", b"", &first, b""]),
        join(&[&config, b"", &first, b""]),
        join(&[br#"{"a":1}"#, index.as_bytes(), &first, &second]),
    ];
    debug_assert!(seeds.iter().all(|seed| seed.iter().filter(|byte| **byte == END).count() == 3));
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_file_seeds_are_valid() {
        for seed in gguf_seeds() {
            Gguf::parse(seed).expect("a valid file");
        }
        for seed in safetensors_seeds() {
            let [config, index, first, second] = parts::<4>(&seed);
            let folder = tempfile::tempdir().expect("a folder");
            put(&folder.path().join("config.json"), config);
            put(&folder.path().join("model.safetensors.index.json"), index);
            let name = if index.is_empty() { "model.safetensors" } else { "model-00001-of-00002.safetensors" };
            put(&folder.path().join(name), first);
            put(&folder.path().join("model-00002-of-00002.safetensors"), second);
            let model = if config.is_empty() { folder.path().join(name) } else { folder.path().to_owned() };
            ModelFile::open(&model).expect("a valid model");
        }
    }
}
