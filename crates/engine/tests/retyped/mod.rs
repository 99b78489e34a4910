//! A GGUF file with tensors of other types, made of one at hand: real models of types of which
//! there is no file.

#![allow(dead_code)] // each test binary uses its part

use std::io::Write;
use std::path::Path;

use baton_formats::{Dtype, Gguf, TensorView};
use half::{bf16, f16};
use tempfile::NamedTempFile;

const ALIGNMENT: usize = 32;
/// Elements of a block of Q8_0.
const BLOCK: usize = 32;

/// The file with its matrices rounded to bfloat16.
pub fn as_bf16(path: &Path) -> NamedTempFile {
    retyped(path, |tensor| if tensor.shape.len() == 2 { Dtype::BF16 } else { tensor.dtype })
}

/// The file with each tensor in the type that `dtype` says: its own, BF16 or Q8_0.
pub fn retyped(path: &Path, dtype: impl Fn(&TensorView<'_>) -> Dtype) -> NamedTempFile {
    let source = Gguf::open(path).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let mut file = NamedTempFile::with_suffix(".gguf").unwrap();
    // Magic, version, number of tensors, metadata: as they are.
    let header = &bytes[..metadata_end(&bytes)];
    let mut infos = Vec::new();
    let mut data = Vec::new();
    for tensor in source.tensors() {
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        let dtype = dtype(&tensor);
        string(&mut infos, tensor.name);
        infos.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|&dim| infos.extend((dim as u64).to_le_bytes()));
        infos.extend(number_of(dtype).to_le_bytes());
        infos.extend((data.len() as u64).to_le_bytes());
        if dtype == tensor.dtype {
            data.extend(tensor.data);
            continue;
        }
        let mut values = vec![0.0f32; tensor.elements()];
        tensor.dequantize(&mut values).unwrap();
        match dtype {
            Dtype::BF16 => values.iter().for_each(|&x| data.extend(bf16::from_f32(x).to_le_bytes())),
            Dtype::Q8_0 => values.chunks_exact(BLOCK).for_each(|block| {
                let scale = block.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
                data.extend(f16::from_f32(scale).to_le_bytes());
                data.extend(block.iter().map(|x| if scale > 0.0 { (x / scale).round() as i8 as u8 } else { 0 }));
            }),
            _ => unreachable!("{dtype} is not written"),
        }
    }
    let start = header.len() + infos.len();
    infos.resize(infos.len() + start.next_multiple_of(ALIGNMENT) - start, 0);
    [header, &infos, &data].into_iter().for_each(|part| file.write_all(part).unwrap());
    file
}

/// GGUF's number of a type.
fn number_of(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Q4_1 => 3,
        Dtype::Q8_0 => 8,
        Dtype::BF16 => 30,
        _ => unreachable!("{dtype} is in no model of the tests"),
    }
}

fn string(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

/// Where the metadata of a file that has been checked ends.
fn metadata_end(bytes: &[u8]) -> usize {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let kind = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut at = 24;
    for _ in 0..number(16) {
        at += 8 + number(at);
        at = value_end(at + 4, kind(at), &number, &kind);
    }
    at
}

fn value_end(at: usize, value: u32, number: &impl Fn(usize) -> usize, kind: &impl Fn(usize) -> u32) -> usize {
    match value {
        0 | 1 | 7 => at + 1,
        2 | 3 => at + 2,
        4..=6 => at + 4,
        10..=12 => at + 8,
        8 => at + 8 + number(at),
        _ => (0..number(at + 4)).fold(at + 12, |end, _| value_end(end, kind(at), number, kind)),
    }
}
