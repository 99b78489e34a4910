//! How much memory a model takes while it is loaded, and after. In a process of its own, whose peak the system keeps.

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;

use std::process::Command;

use baton_types::KvDtype;
use common::{load, options, real_model};

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// What the other test starts as a process of its own.
#[test]
fn a_model_is_loaded() {
    let Some(path) = real_model("a_model_is_loaded") else { return };
    let before = status("VmRSS");
    let _engine = load(&path, &options(2, KvDtype::F16, 4096));
    // The KV arena, which is as large as the file, is not taken off: loading touches none of it.
    println!("took {} and {}", status("VmHWM") - before, status("VmRSS").saturating_sub(before));
}

#[test]
fn loading_takes_at_most_one_and_a_half_times_the_file() {
    let Some(path) = real_model("loading_takes_at_most_one_and_a_half_times_the_file") else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", "a_model_is_loaded", "--nocapture"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let taken = said.lines().find_map(|line| line.split_once("took ")).unwrap().1.to_owned();
    let taken: Vec<u64> = taken.split(" and ").map(|bytes| bytes.trim().parse().unwrap()).collect();
    let file = std::fs::metadata(&path).unwrap().len();
    let [peak, after] = [taken[0], taken[1]].map(|bytes| bytes as f64 / file as f64);
    println!("{peak:.2} times the file at most, {after:.2} times after loading");
    assert!(peak <= 1.5 && after <= peak, "{peak} times the file at most, {after} after loading");
}
