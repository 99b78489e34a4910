//! GGUF files, valid ones read back and each kind of damage refused by name.

use std::collections::BTreeMap;

use baton_formats::{Array, Dtype, Gguf, Value};
use baton_types::ErrorKind;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use crate::assert_refused;
use crate::gguf_writer::GgufWriter;

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        ".{0,12}".prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
    ]
}

fn array() -> impl Strategy<Value = Value> {
    let array = prop_oneof![
        vec(any::<u8>(), 0..5).prop_map(Array::U8),
        vec(any::<i8>(), 0..5).prop_map(Array::I8),
        vec(any::<u16>(), 0..5).prop_map(Array::U16),
        vec(any::<i16>(), 0..5).prop_map(Array::I16),
        vec(any::<u32>(), 0..5).prop_map(Array::U32),
        vec(any::<i32>(), 0..5).prop_map(Array::I32),
        vec(any::<f32>(), 0..5).prop_map(Array::F32),
        vec(any::<bool>(), 0..5).prop_map(Array::Bool),
        vec(".{0,12}", 0..5).prop_map(Array::String),
        vec(any::<u64>(), 0..5).prop_map(Array::U64),
        vec(any::<i64>(), 0..5).prop_map(Array::I64),
        vec(any::<f64>(), 0..5).prop_map(Array::F64),
    ];
    array.prop_map(Value::Array)
}

/// (type, blocks per row, outer dimensions in ggml's order, data)
fn tensor() -> impl Strategy<Value = (Dtype, u64, Vec<u64>, Vec<u8>)> {
    (0..Dtype::ALL.len(), 1..3_u64, vec(1..4_u64, 0..3), any::<u8>()).prop_map(|(dtype, blocks, outer, salt)| {
        let dtype = Dtype::ALL[dtype];
        let bytes = blocks * outer.iter().product::<u64>() * dtype.block_bytes() as u64;
        let data = (0..bytes).map(|i| (i as u8).wrapping_mul(31) ^ salt).collect();
        (dtype, blocks, outer, data)
    })
}

fn ggml_id(dtype: Dtype) -> u32 {
    (0..64).find(|&id| Dtype::from_ggml(id) == Some(dtype)).expect("a number below 64")
}

proptest! {
    #[test]
    fn gguf_file_round_trips(
        version in 2..=3_u32,
        alignment in prop_oneof![Just(None), (3..8_u32).prop_map(Some)],
        metadata in btree_map("[a-z][a-z._]{0,20}", prop_oneof![scalar(), array()], 0..8),
        tensors in btree_map("[a-z.]{1,20}", tensor(), 0..5),
    ) {
        let mut writer = GgufWriter { version, ..GgufWriter::new() };
        writer.metadata.extend(metadata.clone().into_iter().rev());
        if let Some(power) = alignment {
            writer.alignment = 1 << power;
            writer = writer.with("general.alignment", Value::U32(1 << power));
        }
        for (name, (dtype, blocks, outer, data)) in tensors.iter().rev() {
            let dims: Vec<_> = std::iter::once(blocks * dtype.block_elements() as u64).chain(outer.iter().copied()).collect();
            writer = writer.raw_tensor(name, &dims, ggml_id(*dtype), data.clone());
        }
        let bytes = writer.bytes();
        let file = Gguf::parse(bytes.clone()).unwrap();
        prop_assert_eq!(file.total_bytes(), bytes.len() as u64);

        let read: BTreeMap<_, _> = file.metadata().iter().filter(|(key, _)| *key != "general.alignment").collect();
        prop_assert_eq!(format!("{read:?}"), format!("{:?}", metadata.iter().collect::<BTreeMap<_, _>>()));
        prop_assert_eq!(file.tensors().len(), tensors.len());
        for (view, (name, (dtype, blocks, outer, data))) in file.tensors().zip(&tensors) {
            let row = *blocks as usize * dtype.block_elements();
            let shape: Vec<_> = outer.iter().rev().map(|&dim| dim as usize).chain([row]).collect();
            prop_assert_eq!((view.name, view.dtype, &view.shape, view.data), (name.as_str(), *dtype, &shape, data.as_slice()));
            prop_assert_eq!(&file.tensor(name).unwrap(), &view);
            view.dequantize(&mut vec![0.0; view.elements()]).unwrap();
        }
    }
}

#[test]
fn gguf_metadata_getters_convert_what_fits_and_refuse_the_rest() {
    let bytes = GgufWriter::new()
        .with("small", Value::U8(200))
        .with("negative", Value::I64(-5))
        .with("wide", Value::U64(1 << 40))
        .with("float", Value::F64(0.5))
        .with("text", Value::String("hello\n".into()))
        .with("flag", Value::Bool(true))
        .with("bytes", Value::Array(Array::I16(vec![1, 2])))
        .with("mixed", Value::Array(Array::I64(vec![1, -1])))
        .with("names", Value::Array(Array::String(vec!["a".into(), "b".into()])))
        .with("floats", Value::Array(Array::F64(vec![0.25])))
        .bytes();
    let file = Gguf::parse(bytes).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.u32("small").unwrap(), Some(200));
    assert_eq!(metadata.i32("negative").unwrap(), Some(-5));
    assert_eq!(metadata.u64("wide").unwrap(), Some(1 << 40));
    assert_eq!(metadata.f32("float").unwrap(), Some(0.5));
    assert_eq!(metadata.str("text").unwrap(), Some("hello\n"));
    assert_eq!(metadata.bool("flag").unwrap(), Some(true));
    assert_eq!(metadata.u32_array("bytes").unwrap(), Some(vec![1, 2]));
    assert_eq!(metadata.i32_array("mixed").unwrap(), Some(vec![1, -1]));
    assert_eq!(metadata.str_array("names").unwrap().unwrap(), ["a", "b"]);
    assert_eq!(metadata.f32_array("floats").unwrap(), Some(vec![0.25]));
    assert_eq!(metadata.u32("absent").unwrap(), None);
    assert_eq!(metadata.require::<u32>("small").unwrap(), 200);

    assert_refused(metadata.u32("negative"), &["\"negative\"", "i64 -5", "integer from 0 to 4294967295"]);
    assert_refused(metadata.u32("wide"), &["\"wide\"", "u64 1099511627776"]);
    assert_refused(metadata.u32("float"), &["f64 0.5"]);
    assert_refused(metadata.f32("small"), &["u8 200", "a float"]);
    assert_refused(metadata.bool("text"), &["string \"hello\\n\"", "a bool"]);
    assert_refused(metadata.str("names"), &["array of 2 string", "a string"]);
    assert_refused(metadata.u32_array("mixed"), &["array of 2 i64"]);
    assert_refused(metadata.require::<u32>("absent"), &["no metadata key \"absent\""]);
}

#[test]
fn missing_gguf_tensor_is_named() {
    let file = Gguf::parse(GgufWriter::new().tensor("a", &[2]).bytes()).unwrap();
    assert!(file.contains("a") && !file.contains("b"));
    let error = file.tensor("b").unwrap_err();
    assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::NotFound, "<memory>: no tensor \"b\""));
}

#[test]
fn unsupported_gguf_version_or_byte_order_is_refused() {
    let version = |version| Gguf::parse(GgufWriter { version, ..GgufWriter::new() }.bytes());
    assert!(version(2).is_ok() && version(3).is_ok());
    assert_refused(version(1), &["version", "found 1", "2 or 3"]);
    assert_refused(version(4), &["found 4"]);
    assert_refused(version(3_u32.swap_bytes()), &["3 in big-endian order", "little endian"]);
    assert_refused(Gguf::parse(b"GGML\x03\0\0\0".to_vec()), &["magic", "GGUF"]);
    assert_refused(Gguf::parse(Vec::new()), &["magic", "needs 4 bytes, but 0 are left"]);
}

#[test]
fn duplicate_gguf_names_are_refused() {
    let keys = GgufWriter::new().with("k", Value::U8(1)).with("j", Value::U8(1)).with("k", Value::U8(1));
    assert_refused(Gguf::parse(keys.bytes()), &["metadata keys", "\"k\" twice"]);
    let tensors = GgufWriter::new().tensor("t", &[8]).tensor("s", &[8]).tensor("t", &[8]);
    assert_refused(Gguf::parse(tensors.bytes()), &["tensor names", "\"t\" twice"]);
    assert_refused(Gguf::parse(GgufWriter::new().with("", Value::U8(1)).bytes()), &["key of metadata entry 0"]);
    assert_refused(Gguf::parse(GgufWriter::new().tensor("", &[8]).bytes()), &["name of tensor 0"]);
}

#[test]
fn invalid_gguf_alignment_is_refused() {
    for bad in [0, 1, 4, 33, 48, 1 << 22, u32::MAX] {
        let file = GgufWriter::new().with("general.alignment", Value::U32(bad));
        assert_refused(Gguf::parse(file.bytes()), &["general.alignment", &format!("found {bad}"), "a power of two"]);
    }
    let file = GgufWriter::new().with("general.alignment", Value::String("32".into()));
    assert_refused(Gguf::parse(file.bytes()), &["general.alignment", "string \"32\""]);
}

#[test]
fn split_gguf_in_memory_is_refused() {
    let part = |count: u16| Gguf::parse(GgufWriter::new().with("split.count", Value::U16(count)).bytes());
    assert!(part(0).is_ok() && part(1).is_ok());
    assert_refused(part(3), &["file name", "-00001-of-00003.gguf", "the first of 3 files"]);
    assert_refused(part(2000), &["\"split.count\"", "found 2000", "at most 1024"]);
}

/// File `index` of a model of three, with the tensors of these names.
fn part(index: u16, tensors: &[&str]) -> GgufWriter {
    let split = [("split.no", index), ("split.count", 3), ("split.tensors.count", 4)];
    let part = split.iter().fold(GgufWriter::new(), |part, (key, value)| part.with(key, Value::U16(*value)));
    tensors.iter().fold(part, |part, name| part.tensor(name, &[2]))
}

fn write_parts(parts: &[GgufWriter]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (number, part) in (1..).zip(parts) {
        std::fs::write(folder.path().join(format!("m-{number:05}-of-00003.gguf")), part.bytes()).expect("a file");
    }
    folder
}

#[test]
fn gguf_in_several_files_is_one_model() {
    let parts =
        [part(0, &["d"]).with("general.name", Value::String("m".into())), part(1, &["a", "c"]), part(2, &["b"])];
    let folder = write_parts(&parts);
    let first = folder.path().join("m-00001-of-00003.gguf");
    let model = Gguf::open(&first).expect("a model");
    assert_eq!(model.tensors().map(|tensor| tensor.name.to_owned()).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    assert_eq!(model.metadata().str("general.name").expect("a string"), Some("m"));
    assert_eq!(model.total_bytes(), parts.iter().map(|part| part.bytes().len() as u64).sum::<u64>());
    // Tensors of any of its files have their own bytes.
    assert_eq!(model.tensor("c").expect("a tensor").data, (0..8).collect::<Vec<u8>>());
    let tensor = model.tensor("b").expect("a tensor");
    let model = baton_formats::ModelFile::open(folder.path()).expect("its folder");
    model.release(&tensor);
    assert_eq!(model.path(), first);
}

#[test]
fn split_gguf_that_is_not_whole_is_refused() {
    let refused = |parts: &[GgufWriter], first: u32, told: &[&str]| {
        let folder = write_parts(parts);
        assert_refused(Gguf::open(&folder.path().join(format!("m-{first:05}-of-00003.gguf"))), told);
    };
    let whole = [part(0, &["d"]), part(1, &["a", "c"]), part(2, &["b"])];
    refused(&whole[..2], 1, &["m-00003-of-00003.gguf", "No such file"]);
    refused(&whole, 2, &["\"split.no\"", "found 1", "give the first file, ...-00001-of-00003.gguf"]);
    let [first, second, _] = whole.clone();
    refused(&[first.clone(), second.clone(), second], 1, &["m-00003-of-00003.gguf", "\"split.no\"", "found 1"]);
    refused(
        &[first.clone(), part(1, &["a"]), part(2, &["b"])],
        1,
        &["\"split.tensors.count\"", "found 4", "3, as many"],
    );
    refused(&[first, part(1, &["a", "d"]), part(2, &["b"])], 1, &["tensor names", "\"d\" twice"]);
}

#[test]
fn invalid_gguf_tensor_shape_is_refused() {
    let refused = |dims: &[u64], dtype: u32, parts: &[&str]| {
        let file = GgufWriter::new().raw_tensor("w", dims, dtype, vec![0; 256]);
        assert_refused(Gguf::parse(file.bytes()), parts);
    };
    refused(&[], 0, &["number of dimensions of tensor \"w\"", "found 0", "1 to 4"]);
    refused(&[1; 5], 0, &["found 5", "1 to 4"]);
    refused(&[2, 0], 0, &["dimension of tensor \"w\"", "found 0"]);
    refused(&[33], 2, &["shape of Q4_0 tensor \"w\"", "[33]", "whole blocks of 32"]);
    // 2 x 16 elements are one block, but no row is.
    refused(&[16, 2], 2, &["shape of Q4_0 tensor \"w\"", "[2, 16]"]);
    refused(&[u64::MAX, 2], 0, &["[2, 18446744073709551615]", "below 2^64"]);
    refused(&[1 << 32, 1 << 32], 0, &["shape of F32 tensor"]);
    refused(&[1 << 62], 0, &["shape of F32 tensor"]);
    refused(&[65], 0, &["data of tensor \"w\"", "needs 260 bytes, but 256 are left"]);
    refused(&[256], 10, &["type of tensor \"w\"", "10 (Q2_K)", "Q4_K"]);
    refused(&[256], 4, &["4 (unknown)"]);
}

#[test]
fn invalid_gguf_tensor_offset_is_refused() {
    let at = |offset: u64| {
        let mut file = GgufWriter::new().tensor("a", &[16]).tensor("b", &[16]);
        file.tensors[1].offset = Some(offset);
        Gguf::parse(file.bytes())
    };
    assert!(at(64).is_ok());
    assert_refused(at(65), &["offset of tensor \"b\"", "found 65", "a multiple of 32"]);
    assert_refused(at(32), &["offset of tensor \"b\"", "tensor \"a\""]);
    assert_refused(at(0), &["offset of tensor", "none of"]);
    assert_refused(at(96), &["data of tensor \"b\"", "needs 160 bytes, but 128 are left"]);
    assert_refused(at(u64::MAX - 31), &["offset of tensor \"b\""]);
    assert_refused(at(1 << 62), &["data of tensor \"b\""]);
}

#[test]
fn gguf_text_that_is_not_utf8_is_refused() {
    let mut bytes = GgufWriter::new().with("key", Value::String("abcd".into())).bytes();
    let at = bytes.windows(4).position(|window| window == b"abcd").unwrap();
    bytes[at] = 0xff;
    assert_refused(Gguf::parse(bytes), &["metadata \"key\"", "UTF-8"]);
}

#[test]
fn invalid_gguf_boolean_or_type_is_refused() {
    let valid = GgufWriter::new().with("flag", Value::Bool(true)).bytes();
    let value = 24 + 8 + 4 + 4;
    let with = |at: usize, byte: u8| {
        let mut bytes = valid.clone();
        bytes[at] = byte;
        Gguf::parse(bytes)
    };
    assert_refused(with(value, 2), &["metadata \"flag\"", "bool 2", "0 or 1"]);
    assert_refused(with(value - 4, 13), &["type of metadata \"flag\"", "13"]);
    let mut nested = GgufWriter::new().with("list", Value::Array(Array::U8(vec![0; 64]))).bytes();
    nested[value] = 9;
    assert_refused(Gguf::parse(nested), &["type of items of metadata \"list\"", "found 9"]);
}

#[test]
fn gguf_counts_are_bounded_before_memory_is_allocated() {
    let with = |at: usize, count: u64| {
        let mut bytes = GgufWriter::new().with("list", Value::Array(Array::String(vec!["x".into(); 9]))).bytes();
        bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
        Gguf::parse(bytes)
    };
    assert_refused(with(8, 1 << 40), &["number of tensors", "at most"]);
    assert_refused(with(8, 1000), &["number of tensors (1000)", "needs 33000 bytes"]);
    assert_refused(with(16, u64::MAX), &["number of metadata entries", "at most"]);
    assert_refused(with(16, 1000), &["number of metadata entries (1000)"]);
    assert_refused(with(24, 1 << 16), &["length of key of metadata entry 0", "at most 65535"]);
    assert_refused(with(24 + 8 + 4 + 4 + 4, u64::MAX), &["items of metadata \"list\"", "at most"]);
    assert_refused(with(24 + 8 + 4 + 4 + 4, 1 << 20), &["items of metadata \"list\"", "needs 8388608 bytes"]);
    assert_refused(with(24 + 8 + 4 + 4 + 4 + 8, u64::MAX), &["length of metadata \"list\"[0]", "at most"]);
}
