//! What is fuzzed.

mod chat_template;
mod connection;
mod grammar;
mod http;
mod kv_files;
mod leader;
mod leader_desk;
mod model_file;
mod model_output;
mod node_commands;
mod node_events;
mod nodes;
mod proto;
mod settings;
mod tokenizer;
mod transfer;

use std::path::Path;
use std::time::Duration;

use crate::{Limits, Target};

const MIB: usize = 1 << 20;

const fn limits(bytes: usize, bytes_per_byte: usize) -> Limits {
    Limits { bytes, bytes_per_byte, time: Duration::from_secs(20) }
}

/// All of it.
pub const TARGETS: &[Target] = &[
    Target {
        name: "transfer-frames",
        read: transfer::frames,
        seeds: transfer::frame_seeds,
        words: &["BATONKV\n", "victim", "fuzzer"],
        max_bytes: 16 << 10,
        limits: limits(512 << 10, 16),
        short_run: 40_000,
    },
    Target {
        name: "transfer-replies",
        read: transfer::replies,
        seeds: transfer::reply_seeds,
        words: &["victim", "127.0.0.1:1", "/@"],
        max_bytes: 16 << 10,
        limits: limits(64 << 10, 16),
        short_run: 200_000,
    },
    Target {
        name: "http-connection",
        read: connection::serve,
        seeds: connection::seeds,
        words: connection::WORDS,
        max_bytes: 64 << 10,
        limits: limits(4 * MIB, 16),
        short_run: 8_000,
    },
    Target {
        name: "http-body",
        read: http::body,
        seeds: http::seeds,
        words: http::WORDS,
        max_bytes: 64 << 10,
        limits: limits(MIB, 64),
        short_run: 80_000,
    },
    Target {
        name: "proto",
        read: proto::message,
        seeds: proto::seeds,
        words: &["decode-0", "prefill", "stop", "f16", "http://127.0.0.1:1"],
        max_bytes: 16 << 10,
        limits: limits(256 << 10, 200),
        short_run: 200_000,
    },
    Target {
        name: "leader",
        read: leader::message,
        seeds: leader::seeds,
        words: &["decode-0", "prefill-0", "overloaded"],
        max_bytes: 16 << 10,
        limits: limits(256 << 10, 200),
        short_run: 100_000,
    },
    Target {
        name: "leader-desk",
        read: leader_desk::play,
        seeds: leader_desk::seeds,
        words: &["d0", "d1", "p0", "p1"],
        max_bytes: 16 << 10,
        limits: limits(MIB, 200),
        short_run: 1_500,
    },
    Target {
        name: "node-events",
        read: node_events::play,
        seeds: node_events::seeds,
        words: &["p0", "d0", "x0", "y0", "stop", "length", "unavailable"],
        max_bytes: 16 << 10,
        limits: limits(MIB, 200),
        short_run: 3_000,
    },
    Target {
        name: "node-commands",
        read: node_commands::play,
        seeds: node_commands::seeds,
        words: &["p0", "p1", "d0", "debug"],
        max_bytes: 16 << 10,
        limits: limits(2 * MIB, 200),
        short_run: 1_000,
    },
    Target {
        name: "gguf",
        read: model_file::gguf,
        seeds: model_file::gguf_seeds,
        words: model_file::GGUF_WORDS,
        max_bytes: 64 << 10,
        limits: limits(64 << 10, 12),
        short_run: 100_000,
    },
    Target {
        name: "safetensors",
        read: model_file::safetensors,
        seeds: model_file::safetensors_seeds,
        words: model_file::SAFETENSORS_WORDS,
        max_bytes: 64 << 10,
        limits: limits(MIB, 32),
        short_run: 30_000,
    },
    // A token may have any id below 4 Mi.
    Target {
        name: "tokenizer-json",
        read: tokenizer::json,
        seeds: tokenizer::json_seeds,
        words: tokenizer::JSON_WORDS,
        max_bytes: 64 << 10,
        limits: limits(256 * MIB, 512),
        short_run: 15_000,
    },
    Target {
        name: "tokenizer-gguf",
        read: tokenizer::gguf,
        seeds: tokenizer::gguf_seeds,
        words: tokenizer::GGUF_WORDS,
        max_bytes: 64 << 10,
        limits: limits(64 * MIB, 512),
        short_run: 15_000,
    },
    // A template may make data of 320 MB.
    Target {
        name: "chat-template",
        read: chat_template::render,
        seeds: chat_template::seeds,
        words: chat_template::WORDS,
        max_bytes: 16 << 10,
        limits: limits(400 * MIB, 0),
        short_run: 40_000,
    },
    Target {
        name: "grammar",
        read: grammar::compile,
        seeds: grammar::seeds,
        words: grammar::WORDS,
        max_bytes: 8 << 10,
        limits: limits(64 * MIB, 0),
        short_run: 2_000,
    },
    Target {
        name: "model-output",
        read: model_output::parse,
        seeds: model_output::seeds,
        words: model_output::WORDS,
        max_bytes: 16 << 10,
        limits: limits(256 << 10, 64),
        short_run: 15_000,
    },
    Target {
        name: "kv-files",
        read: kv_files::open,
        seeds: kv_files::seeds,
        words: &[],
        max_bytes: 32 << 10,
        limits: limits(2 * MIB, 16),
        short_run: 3_000,
    },
    Target {
        name: "settings",
        read: settings::load,
        seeds: settings::seeds,
        words: settings::WORDS,
        max_bytes: 16 << 10,
        limits: limits(MIB, 256),
        short_run: 40_000,
    },
    Target {
        name: "run-time-settings",
        read: settings::run_time,
        seeds: settings::run_time_seeds,
        words: settings::RUN_TIME_WORDS,
        max_bytes: 16 << 10,
        limits: limits(MIB, 256),
        short_run: 10_000,
    },
];

/// A fixture of another crate, by its path from the root of the tree.
fn fixture(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A folder in memory, if there is such: files are written for each input.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a folder for files")
}
