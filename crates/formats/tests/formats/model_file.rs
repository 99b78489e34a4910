//! The choice between the kinds of model files.

use std::path::Path;

use baton_formats::{Dtype, ModelFile};
use baton_types::ErrorKind;

use crate::assert_refused;
use crate::gguf_writer::GgufWriter;

fn open(name: &str, content: &[u8]) -> Result<ModelFile, baton_formats::FormatError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join(name);
    std::fs::write(&file, content).expect("a file in it");
    let model = ModelFile::open(&file)?;
    assert_eq!((model.path(), model.total_bytes()), (file.as_path(), content.len() as u64));
    Ok(model)
}

#[test]
fn model_format_is_chosen_by_magic_and_extension() {
    let gguf = GgufWriter::new().tensor("a", &[2]).bytes();
    for name in ["model.gguf", "model", "blob.bin"] {
        let model = open(name, &gguf).unwrap();
        assert!(matches!(model, ModelFile::Gguf(_)));
        assert_eq!(model.tensor("a").unwrap().dtype, Dtype::F32);
        assert_eq!(model.tensors().count(), 1);
        assert!(model.contains("a") && !model.contains("b"));
    }
    let header = br#"{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes(), header.as_slice(), &[0, 0x3c]].concat();
    let model = open("model.safetensors", &safetensors).unwrap();
    assert!(matches!(model, ModelFile::Safetensors(_)));
    assert_eq!(model.tensor("a").unwrap().dtype, Dtype::F16);
    assert_eq!(model.tensors().count(), 1);
}

#[test]
fn folder_with_gguf_alone_is_its_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, content: &[u8]| std::fs::write(folder.path().join(name), content).expect("a file");
    write("config.json", b"{}");
    assert_refused(ModelFile::open(folder.path()), &["no file", "model.safetensors"]);
    let gguf = GgufWriter::new().tensor("a", &[2]).bytes();
    write("m.Q4.gguf", &gguf);
    write("mmproj-m.gguf", &gguf);
    assert_eq!(ModelFile::open(folder.path()).unwrap().path(), folder.path().join("m.Q4.gguf"));
    write("m.Q8.gguf", &gguf);
    assert_refused(ModelFile::open(folder.path()), &["2 models: \"m.Q4.gguf\", \"m.Q8.gguf\"", "give its file"]);
}

#[test]
fn git_lfs_pointer_is_called_one() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 94000000\n";
    for name in ["m.gguf", "m.safetensors", "pytorch.bin"] {
        assert_refused(open(name, pointer), &[name, "a Git LFS pointer", "git lfs pull"]);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("config.json"), "{}").expect("a file");
    std::fs::write(folder.path().join("model.safetensors.index.json"), pointer).expect("a file");
    assert_refused(ModelFile::open(folder.path()), &["index.json", "a Git LFS pointer"]);
}

#[test]
fn file_that_is_no_model_is_refused_by_name() {
    assert_refused(open("model.bin", b"PK\x03\x04"), &["model.bin", "a GGUF file", "safetensors"]);
    assert_refused(open("empty", b""), &["empty", "a GGUF file"]);
    assert_refused(open("empty.gguf", b""), &["empty.gguf: magic", "needs 4 bytes, but 0 are left"]);
    assert_refused(open("notes.gguf", b"hello, world"), &["magic", "68, 65, 6c, 6c"]);
    assert_refused(ModelFile::open(Path::new("/dev/null")), &["/dev/null"]);
    let missing = ModelFile::open(Path::new("/nowhere/model.gguf")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("/nowhere/model.gguf"));
}
