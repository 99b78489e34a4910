//! Models and options that the engine refuses, with an error that names what is wrong.

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;

use std::path::Path;

use baton_engine::{CpuEngine, CpuOptions, KvCapacity};
use baton_formats::ModelFile;
use baton_types::{ErrorKind, KvDtype};
use common::{fixture, options};
use serde_json::{Value, json};

fn refused(path: &Path, options: &CpuOptions) -> (String, ErrorKind) {
    let error = CpuEngine::load(&ModelFile::open(path).unwrap(), options, &mut |_| ()).err().expect("an error");
    (error.to_string(), error.kind())
}

/// The error of the `qwen2` folder with some keys of its configuration changed.
fn with_config(changes: Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("qwen2");
    std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config["layer_types"] = Value::Null; // its length would be the first complaint
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    refused(folder.path(), &options(1, KvDtype::F16, 64)).0
}

#[test]
fn unsupported_model_config_is_named() {
    let cases = [
        (json!({"architectures": ["GemmaForCausalLM"]}), "architectures is \"GemmaForCausalLM\""),
        (json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}), "rope_parameters.rope_type is yarn"),
        (json!({"num_attention_heads": 0}), "num_attention_heads is 0"),
        (json!({"num_key_value_heads": 3}), "a multiple of the 3 kv heads"),
        (json!({"num_hidden_layers": 4_000_000_000u32}), "num_hidden_layers is 4000000000"),
        (json!({"rms_norm_eps": -1.0}), "norm epsilon is -1"),
        (json!({"hidden_size": null}), "no hidden_size"),
    ];
    for (changes, expected) in cases {
        let found = with_config(changes);
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn mismatched_model_tensors_are_named() {
    let cases = [
        (json!({"num_hidden_layers": 3}), "model.layers.2.input_layernorm.weight"),
        (json!({"num_hidden_layers": 1}), "is no part of a qwen2 model"),
        (json!({"intermediate_size": 45}), "has shape [44, 32], but must have [45, 32]"),
        (json!({"vocab_size": 62}), "tensor model.embed_tokens.weight has shape [61, 32]"),
        (json!({"head_dim": 4}), "self_attn.q_proj.weight has shape"),
        (json!({"tie_word_embeddings": false}), "lm_head.weight"),
    ];
    for (changes, expected) in cases {
        let found = with_config(changes);
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn unknown_or_missing_gguf_key_is_named() {
    let bytes = std::fs::read(fixture("llama2").join("model.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // Same lengths, so that the file stays whole.
    for (from, to, expected) in [
        (&b"llama.rope.freq_base"[..], &b"llama.rope.fr_q_base"[..], "does not know the key"),
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_Xp.weight", "blk.1.ffn_up.weight"),
        (b"llama.block_count", b"llamo.block_count", "llama.block_count"),
    ] {
        let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
        let mut changed = bytes.clone();
        changed[at..at + to.len()].copy_from_slice(to);
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, changed).unwrap();
        let (found, _) = refused(&path, &options(1, KvDtype::F16, 64));
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn nan_weights_fail_the_step_before_any_logits() {
    let mut bytes = std::fs::read(fixture("smollm").join("model.gguf")).unwrap();
    let end = bytes.len();
    bytes[end - 4096..].iter_mut().for_each(|byte| *byte = 0xff);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let mut engine = common::load(&path, &options(1, KvDtype::F16, 64));
    let table = common::table(&engine, 0, 2);
    let step = baton_engine::SequenceStep {
        tokens: &[1, 2],
        start: 0,
        block_table: &table,
        logits: baton_engine::LogitsWanted::Last,
    };
    let mut recorder = common::Recorder::default();
    let error = baton_engine::Engine::step(&mut engine, &[step], &mut recorder).unwrap_err();
    assert!(error.to_string().contains("NaN") && recorder.rows.is_empty(), "{error}");
}

#[test]
fn engine_options_out_of_range_are_named() {
    let path = fixture("smollm");
    let good = options(1, KvDtype::F16, 64);
    let cases = [
        (CpuOptions { threads: 0, ..good.clone() }, "threads: 0"),
        (CpuOptions { block_tokens: 0, ..good.clone() }, "block_tokens: 0"),
        (CpuOptions { kv_capacity: KvCapacity::Blocks(0), ..good.clone() }, "kv_capacity: 0 blocks"),
        (CpuOptions { kv_capacity: KvCapacity::Bytes(100), ..good.clone() }, "kv_capacity: 0 blocks"),
        (CpuOptions { kv_capacity: KvCapacity::Bytes(u64::MAX), ..good }, "kv_capacity: "),
    ];
    for (options, expected) in cases {
        let (found, kind) = refused(&path, &options);
        assert!(found.contains(expected) && kind == ErrorKind::Invalid, "{found}");
    }
}

#[test]
fn single_safetensors_file_is_refused_for_its_folder() {
    let (found, _) = refused(&fixture("smollm").join("model.safetensors"), &options(1, KvDtype::F16, 64));
    assert!(found.contains("give its folder"), "{found}");
}
