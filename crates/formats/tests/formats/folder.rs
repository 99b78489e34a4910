//! Model folders: config, one file or shards with an index.

use std::path::Path;

use baton_formats::Safetensors;
use baton_types::ErrorKind;
use tempfile::TempDir;

use crate::assert_refused;

/// A folder with these files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).expect("a file in it");
    }
    folder
}

/// A file with one F32 tensor of one element.
fn one_tensor(name: &str, value: f32) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &value.to_le_bytes()].concat()
}

fn open(files: &[(&str, &[u8])]) -> Result<Safetensors, baton_formats::FormatError> {
    Safetensors::open(folder(files).path())
}

const CONFIG: (&str, &[u8]) = ("config.json", br#"{"model_type": "llama"}"#);

#[test]
fn safetensors_folder_of_single_file_or_shards_is_read() {
    let single = open(&[CONFIG, ("model.safetensors", &one_tensor("a", 1.0))]).unwrap();
    assert_eq!(single.config()["model_type"], "llama");
    assert!(single.contains("a"));

    let index = br#"{"metadata": {"total_size": 8}, "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}"#;
    let a = one_tensor("a", 1.5);
    let b = one_tensor("b", 2.5);
    let index_file: (&str, &[u8]) = ("model.safetensors.index.json", index);
    let sharded = open(&[CONFIG, index_file, ("x-1.safetensors", &a), ("x-2.safetensors", &b)]).unwrap();
    assert_eq!(sharded.total_bytes(), (a.len() + b.len()) as u64);
    for (name, expected) in [("a", 1.5), ("b", 2.5)] {
        let mut value = [0.0];
        sharded.tensor(name).unwrap().dequantize(&mut value).unwrap();
        assert_eq!(value, [expected]);
    }
}

#[test]
fn incomplete_model_folder_names_the_missing_file() {
    let error = open(&[("model.safetensors", &one_tensor("a", 1.0))]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("config.json"), "{error}");
    assert_refused(open(&[CONFIG]), &["no file model.safetensors or model.safetensors.index.json"]);
    assert_refused(open(&[("config.json", b"{"), ("model.safetensors", b"")]), &["config.json", "a JSON object"]);
    assert_refused(open(&[("config.json", b"[]")]), &["config.json", "a JSON object"]);
    assert_refused(open(&[("config.json", &vec![b' '; (1 << 20) + 1])]), &["config.json: size", "at most 1048576"]);
    assert_refused(open(&[CONFIG, ("model.safetensors", b"")]), &["model.safetensors: header length"]);
}

#[test]
fn safetensors_index_that_contradicts_its_shards_is_refused() {
    let with = |index: &str| {
        let index: (&str, &[u8]) = ("model.safetensors.index.json", index.as_bytes());
        open(&[CONFIG, index, ("x-1.safetensors", &one_tensor("a", 1.0)), ("x-2.safetensors", &one_tensor("a", 1.0))])
    };
    assert!(with(r#"{"weight_map": {"a": "x-1.safetensors"}}"#).is_ok());
    assert_refused(with(r#"{"weight_map": {"b": "x-1.safetensors"}}"#), &["entry \"b\"", "no such tensor in \"x-1"]);
    assert_refused(with(r#"{"weight_map": {"a": "x-3.safetensors"}}"#), &["x-3.safetensors"]);
    assert_refused(with(r#"{"weight_map": {"a": "../x-1.safetensors"}}"#), &["shard in weight_map", "\"../x-1"]);
    assert_refused(with(r#"{"weight_map": {"a": "/etc/passwd"}}"#), &["shard in weight_map", "same folder"]);
    assert_refused(with(r#"{"weight_map": 3}"#), &["index.json", "weight_map"]);
    assert_refused(with(r#"{}"#), &["index.json", "weight_map"]);
    let many = format!(r#"{{"weight_map": {{{}"a": ""}}}}"#, r#""":"","#.repeat(1 << 18));
    assert_refused(with(&many), &["index.json", "more than 262144 tensors"]);
    let both = r#"{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}"#;
    assert_refused(with(both), &["x-2.safetensors: tensor names", "\"a\" also in", "x-1.safetensors"]);
}

#[test]
fn special_file_as_model_is_refused() {
    assert_refused(Safetensors::open(Path::new("/dev/null")), &["/dev/null", "a special file", "a regular file"]);
}
