//! safetensors files: the reference implementation's read back, lies in the header refused.

use std::collections::BTreeMap;

use baton_formats::{Dtype, Safetensors};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use safetensors::tensor::{Dtype as Stored, TensorView, serialize};

use crate::allocations::peak_of;
use crate::{assert_refused, mutations};

/// What reading may cost per byte of the file, and beyond that (an error's text).
const BYTES_PER_FILE_BYTE: usize = 8;
const CONSTANT_BYTES: usize = 8 << 10;

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

fn read(bytes: Vec<u8>) -> bool {
    let len = bytes.len();
    let (file, peak) = peak_of(|| Safetensors::parse(bytes));
    assert!(peak <= BYTES_PER_FILE_BYTE * len + CONSTANT_BYTES, "{peak} bytes held for a file of {len}: {file:?}");
    let Ok(file) = file else { return false };
    for tensor in file.tensors() {
        tensor.dequantize(&mut vec![0.0; tensor.elements()]).expect("a checked tensor fits its shape");
    }
    true
}

proptest! {
    #[test]
    fn safetensors_written_by_the_reference_are_read_back(
        tensors in btree_map(".{1,12}", (0..4_usize, vec(0..4_usize, 0..4), any::<u8>()), 0..6),
        note in ".{0,20}",
    ) {
        let kinds = [(Stored::F32, 4, Some(Dtype::F32)), (Stored::F16, 2, Some(Dtype::F16)), (Stored::BF16, 2, Some(Dtype::BF16)), (Stored::I64, 8, None)];
        let data: BTreeMap<_, _> = tensors
            .into_iter()
            .filter(|(name, _)| name != "__metadata__")
            .map(|(name, (kind, shape, salt))| {
                let bytes: Vec<_> = (0..shape.iter().product::<usize>() * kinds[kind].1).map(|i| i as u8 ^ salt).collect();
                (name, (kinds[kind], shape, bytes))
            })
            .collect();
        let views = data.iter().map(|(name, (kind, shape, bytes))| (name, TensorView::new(kind.0, shape.clone(), bytes).unwrap()));
        let bytes = serialize(views, Some([("note".to_owned(), note)].into())).unwrap();
        let file = Safetensors::parse(bytes.clone()).unwrap();
        prop_assert_eq!(file.total_bytes(), bytes.len() as u64);
        prop_assert!(file.names().eq(data.keys()));
        for (name, (kind, shape, bytes)) in &data {
            match (kind.2, file.tensor(name)) {
                (Some(dtype), Ok(view)) => prop_assert_eq!((view.dtype, &view.shape, view.data), (dtype, shape, bytes.as_slice())),
                (None, Err(error)) => prop_assert!(error.to_string().contains("found I64, allowed: F32, F16, BF16")),
                (expected, found) => prop_assert!(false, "{:?} {:?}", expected, found),
            }
        }
    }
}

#[test]
fn safetensors_tensor_values_are_read() {
    let file = Safetensors::parse(file(r#"{"t":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}"#, 8)).unwrap();
    let mut row = [0.0; 2];
    file.tensor("t").unwrap().dequantize_rows(1..2, &mut row).unwrap();
    assert_eq!(row.map(f32::to_bits), [0x0504_0000, 0x0706_0000]);
    assert!(file.config().is_null());
    assert_refused(file.tensor("u"), &["no tensor \"u\""]);
}

#[test]
fn safetensors_with_wrong_lengths_are_refused() {
    let parse = |length: u64, rest: &[u8]| Safetensors::parse([&length.to_le_bytes(), rest].concat());
    assert_refused(Safetensors::parse(vec![0; 7]), &["header length", "needs 8 bytes, but 7 are left"]);
    assert_refused(parse(3, b"{}"), &["header: needs 3 bytes, but 2 are left"]);
    assert_refused(parse(u64::MAX, b"{}"), &["header length", "18446744073709551615", "at most 100000000"]);
    assert_refused(parse(2, b"{}x"), &["bytes of data: found 1, allowed: 0"]);
    assert_refused(parse(2, b"\xff}"), &["header", "UTF-8"]);
    assert_refused(parse(4, b"{}{}"), &["header", "trailing characters"]);
}

#[test]
fn safetensors_with_wrong_tensor_entries_are_refused() {
    let refused =
        |header: &str, data: usize, parts: &[&str]| assert_refused(Safetensors::parse(file(header, data)), parts);
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    refused(&one("F32", "[2]", "[0,4]"), 4, &["data_offsets of tensor \"t\"", "0..4 for F32 [2]"]);
    refused(&one("F32", "[2]", "[0,8]"), 7, &["data of tensor \"t\"", "needs 8 bytes, but 7 are left"]);
    refused(&one("F32", "[2]", "[4,12]"), 12, &["data_offsets of tensor \"t\"", "begin 0"]);
    refused(&one("F32", "[2]", "[8,0]"), 8, &["data_offsets of tensor \"t\""]);
    refused(&one("F32", "[0]", "[0,0]"), 4, &["bytes of data: found 4, allowed: 0"]);
    refused(&one("F32", "[4611686018427387904,4]", "[0,16]"), 16, &["data_offsets of tensor"]);
    refused(&one("F32", "[-1]", "[0,4]"), 4, &["tensor \"t\"", "-1"]);
    refused(&one("Q4_0", "[2]", "[0,8]"), 8, &["tensor \"t\": unknown dtype \"Q4_0\""]);
    refused(&one("F4", "[1]", "[0,1]"), 1, &["data_offsets of tensor"]);
    refused(&one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, &["tensor \"t\"", "at most 8 dimensions"]);
    refused(r#"{"t":{"shape":[1],"data_offsets":[0,4]}}"#, 4, &["tensor \"t\"", "missing field `dtype`"]);
    refused("[]", 0, &["header", "a JSON object"]);
}

#[test]
fn safetensors_with_overlapping_or_duplicate_tensors_are_refused() {
    let two = |a: &str, second: &str, b: &str| {
        let entry = |offsets| format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
        Safetensors::parse(file(&format!(r#"{{"a":{},"{second}":{}}}"#, entry(a), entry(b)), 16))
    };
    assert!(two("[0,8]", "b", "[8,16]").is_ok());
    assert!(two("[8,16]", "b", "[0,8]").is_ok());
    assert_refused(two("[0,8]", "b", "[4,12]"), &["data_offsets of tensor \"b\"", "begin 8"]);
    assert_refused(two("[0,8]", "b", "[0,8]"), &["data_offsets of tensor"]);
    assert_refused(two("[0,8]", "a", "[8,16]"), &["tensor names", "\"a\" twice"]);
}

#[test]
fn damaged_safetensors_are_refused_or_usable() {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
    let valid = file(header, 32);
    assert!(read(valid.clone()));
    for len in 0..valid.len() {
        assert!(!read(valid[..len].to_vec()), "cut at {len}");
    }
    let mut usable = 0;
    let mut refused = 0;
    mutations::each(&valid, 20_000, |bytes| if read(bytes) { usable += 1 } else { refused += 1 });
    assert!(usable > 1_000 && refused > 5_000, "{usable} usable, {refused} refused");
}

#[test]
fn safetensors_header_made_to_cost_memory_stays_within_the_bound() {
    let nested = format!(r#"{{"__metadata__":{}{}}}"#, "[".repeat(50_000), "]".repeat(50_000));
    read(file(&nested, 0));
    let zeros = format!(r#"{{"t":{{"dtype":"F32","shape":[{}0],"data_offsets":[0,0]}}}}"#, "0,".repeat(50_000));
    assert!(!read(file(&zeros, 0)));
    let entry = r#"{"dtype":"F4","shape":[0],"data_offsets":[0,0]}"#;
    let many: Vec<_> = (0..5_000).map(|i| format!(r#""{i:x}":{entry}"#)).collect();
    assert!(read(file(&format!("{{{}}}", many.join(",")), 0)));
}
