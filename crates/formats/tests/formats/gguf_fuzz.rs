//! Damaged and hostile GGUF files: an error or a usable file, never a panic, never memory beyond a
//! small multiple of the file.

use baton_formats::{Array, Gguf, Value};

use crate::allocations::peak_of;
use crate::gguf_writer::GgufWriter;
use crate::mutations;

/// What reading may cost per byte of the file, and beyond that (an error's text).
const BYTES_PER_FILE_BYTE: usize = 6;
const CONSTANT_BYTES: usize = 8 << 10;

fn small_file() -> Vec<u8> {
    GgufWriter::new()
        .with("general.architecture", Value::String("llama".into()))
        .with("general.alignment", Value::U32(32))
        .with("llama.rope.freq_base", Value::F32(1e4))
        .with("tokenizer.ggml.tokens", Value::Array(Array::String(vec!["a".into(), "bc".into(), String::new()])))
        .with("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0, -1.0, -2.0])))
        .with("flag", Value::Bool(false))
        .raw_tensor("token_embd.weight", &[32, 3], 3, (0..60).collect())
        .tensor("output_norm.weight", &[4])
        .raw_tensor("blk.0.ffn_down.weight", &[256, 1], 14, vec![7; 210])
        .bytes()
}

/// Reads `bytes` within the bound and uses what could be read. Whether it could.
fn read(bytes: Vec<u8>) -> bool {
    let len = bytes.len();
    let (file, peak) = peak_of(|| Gguf::parse(bytes));
    assert!(peak <= BYTES_PER_FILE_BYTE * len + CONSTANT_BYTES, "{peak} bytes held for a file of {len}: {file:?}");
    let Ok(file) = file else { return false };
    for (key, _) in file.metadata().iter() {
        let _ = (file.metadata().u32(key), file.metadata().f32_array(key), file.metadata().str_array(key));
    }
    for tensor in file.tensors() {
        tensor.dequantize(&mut vec![0.0; tensor.elements()]).expect("a checked tensor fits its shape");
    }
    true
}

#[test]
fn truncated_gguf_is_refused_at_every_length() {
    let valid = small_file();
    assert!(read(valid.clone()));
    for len in 0..valid.len() {
        assert!(!read(valid[..len].to_vec()), "cut at {len}");
    }
}

#[test]
fn damaged_gguf_is_refused_or_usable() {
    let mut usable = 0;
    let mut refused = 0;
    mutations::each(&small_file(), 20_000, |bytes| if read(bytes) { usable += 1 } else { refused += 1 });
    // Both outcomes are common (a changed weight is no damage); were one rare, the mutations would
    // have stopped testing anything.
    assert!(usable > 5_000 && refused > 5_000, "{usable} usable, {refused} refused");
}

#[test]
fn gguf_made_to_cost_memory_stays_within_the_bound() {
    let strings = Array::String(vec![String::new(); 100_000]);
    assert!(read(GgufWriter::new().with("k", Value::Array(strings)).bytes()));
    let short = Array::String(vec!["x".into(); 100_000]);
    assert!(read(GgufWriter::new().with("k", Value::Array(short)).bytes()));
    let mut entries = GgufWriter::new();
    entries.metadata = (0..60_000_u32).map(|i| (format!("{i:x}"), Value::U8(1))).collect();
    assert!(read(entries.bytes()));
    let mut tensors = GgufWriter::new();
    tensors.alignment = 8;
    tensors = tensors.with("general.alignment", Value::U32(8));
    let tensors = (0..5_000).fold(tensors, |file, i| file.raw_tensor(&format!("{i:x}"), &[1], 1, vec![0; 2]));
    assert!(read(tensors.bytes()));
}

/// Counts that the file's length just allows, with nothing behind them.
#[test]
fn gguf_with_largest_credible_counts_stays_within_the_bound() {
    let mut bytes = GgufWriter::new().with("k", Value::Array(Array::String(vec!["x".repeat(80_000)]))).bytes();
    let len = bytes.len();
    for (at, item) in [(8, 33), (16, 14), (24 + 8 + 1 + 4 + 4, 8)] {
        let before = bytes[at..at + 8].to_vec();
        bytes[at..at + 8].copy_from_slice(&((len - at - 16) as u64 / item).to_le_bytes());
        assert!(!read(bytes.clone()), "count at {at}");
        bytes[at..at + 8].copy_from_slice(&before);
    }
}
