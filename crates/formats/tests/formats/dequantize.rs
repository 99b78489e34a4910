//! Dequantization against blocks and values that the PyPI package `gguf` made; see
//! `tests/fixtures/generate.py`.

use std::path::Path;

use baton_formats::{Dtype, dequantize};

#[test]
fn dequantize_equals_the_reference_bit_for_bit() {
    for dtype in Dtype::ALL {
        let fixture = |kind: &str| {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/dequantize/{dtype}.{kind}"));
            std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
        };
        let expected = fixture("f32");
        let expected: Vec<_> = expected.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        assert!(expected.len() >= 64, "{dtype}: a fixture has at least 64 values");
        let mut found = vec![f32::NAN; expected.len()];
        dequantize(dtype, &fixture("blocks"), &mut found).unwrap();
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let value = f32::from_bits(expected);
            assert_eq!(found.to_bits(), expected, "{dtype}: element {i}: found {found:e}, expected {value:e}");
        }
    }
}

#[test]
fn dequantize_of_a_block_is_independent_of_others() {
    for dtype in Dtype::ALL {
        let bytes: Vec<_> = (0..dtype.block_bytes() * 3).map(|i| (i * 37 + 11) as u8).collect();
        let mut together = vec![0.0; dtype.block_elements() * 3];
        dequantize(dtype, &bytes, &mut together).unwrap();
        let mut alone = vec![0.0; dtype.block_elements()];
        for (block, expected) in bytes.chunks(dtype.block_bytes()).zip(together.chunks(dtype.block_elements())) {
            dequantize(dtype, block, &mut alone).unwrap();
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&alone), bits(expected), "{dtype}");
        }
    }
}
