//! How much memory a model takes while it is loaded, and after. In a process of its own, whose peak
//! the system keeps.

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;
mod retyped;

use std::path::Path;
use std::process::Command;

use baton_formats::Dtype;
use baton_types::KvDtype;
use common::{load, options, real_model};
use retyped::{as_bf16, retyped};

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
#[ignore = "the other process of the test here, which starts it itself"]
fn other_process() {
    let path = real_model();
    let before = status("VmRSS");
    let _engine = load(&path, &options(2, KvDtype::F16, 4096));
    // The KV arena, which is as large as the file, is not taken off: loading touches none of it.
    println!("took {} and {}", status("VmHWM") - before, status("VmRSS").saturating_sub(before));
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn model_loading_takes_at_most_one_and_a_half_times_the_file() {
    let path = real_model();
    let of_bytes = retyped(&path, |tensor| if tensor.shape.len() == 2 { Dtype::Q8_0 } else { tensor.dtype });
    for path in [path.as_path(), of_bytes.path(), as_bf16(&path).path()] {
        let file = std::fs::metadata(path).unwrap().len();
        let [peak, after] = taken(path).map(|bytes| bytes as f64 / file as f64);
        println!("{peak:.2} times a file of {file} bytes at most, {after:.2} times after loading");
        assert!(peak <= 1.5 && after <= peak, "{peak} times a file of {file} bytes at most, {after} after loading");
    }
}

/// What loading takes at most, and what stays, bytes.
fn taken(path: &Path) -> [u64; 2] {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "other_process", "--ignored", "--nocapture"]).env("BATON_MODEL", path);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let taken = said.lines().find_map(|line| line.split_once("took ")).unwrap().1;
    let (peak, after) = taken.split_once(" and ").unwrap();
    [peak, after].map(|bytes| bytes.trim().parse().unwrap())
}
