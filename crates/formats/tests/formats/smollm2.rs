//! A real model: SmolLM2-135M-Instruct as GGUF, which `BATON_MODEL` names.

use std::path::Path;

use baton_formats::{Dtype, Gguf, ModelFile};

use crate::allocations::peak_of;

fn model() -> String {
    std::env::var("BATON_MODEL").expect("BATON_MODEL names a model file (make test sets it)")
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn smollm2_gguf_metadata_is_read() {
    let model = model();
    let file = Gguf::open(Path::new(&model)).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.str("general.architecture").unwrap(), Some("llama"));
    assert_eq!(metadata.u32("llama.block_count").unwrap(), Some(30));
    assert_eq!(metadata.u32("llama.context_length").unwrap(), Some(8192));
    assert_eq!(metadata.f32("llama.rope.freq_base").unwrap(), Some(100_000.0));
    assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token").unwrap(), Some(false));
    let tokens = metadata.require::<&[String]>("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens[2].as_str()), (49_152, "<|im_end|>"));
    assert_eq!(metadata.i32_array("tokenizer.ggml.token_type").unwrap().unwrap().len(), 49_152);
    assert_eq!(metadata.str_array("tokenizer.ggml.merges").unwrap().unwrap()[0], "Ġ t");
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn smollm2_gguf_tensors_are_read() {
    let model = model();
    let file = ModelFile::open(Path::new(&model)).unwrap();
    assert_eq!(file.tensors().count(), 272);
    let embedding = file.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.dtype, embedding.shape.as_slice()), (Dtype::Q8_0, [49_152, 576].as_slice()));
    let down = file.tensor("blk.0.ffn_down.weight").unwrap();
    assert_eq!((down.dtype, down.shape.as_slice()), (Dtype::Q4_1, [576, 1536].as_slice()));
    let mut elements = 0;
    for tensor in file.tensors() {
        let mut values = vec![0.0; tensor.elements()];
        tensor.dequantize(&mut values).unwrap();
        assert!(values.iter().all(|x| x.abs() < 100.0), "{}", tensor.name);
        elements += values.len();
    }
    assert_eq!(elements, 134_515_008);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn smollm2_gguf_header_takes_a_fraction_of_the_file_in_memory() {
    let model = model();
    let (file, peak) = peak_of(|| Gguf::open(Path::new(&model)).unwrap());
    assert!((peak as u64) < file.total_bytes() / 8, "{peak} bytes");
}
