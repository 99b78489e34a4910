//! Traces for tests.

use std::fmt::Write;

use tempfile::NamedTempFile;

/// A trace of conversations of which each request repeats the prompt of the one six before, and
/// asks more.
pub(crate) fn trace_file(requests: u64, timestamp_ms: impl Fn(u64) -> u64) -> NamedTempFile {
    let mut text = String::new();
    for n in 0..requests {
        let blocks = 4 + n / 6;
        let hash_ids: Vec<_> = (0..blocks).map(|block| block * 6 + n % 6).collect();
        let timestamp = timestamp_ms(n);
        let input_length = blocks * 512;
        let output_length = 20 + n % 6;
        writeln!(
            text,
            r#"{{"timestamp": {timestamp}, "input_length": {input_length}, "output_length": {output_length}, "hash_ids": {hash_ids:?}}}"#
        )
        .unwrap();
    }
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}
