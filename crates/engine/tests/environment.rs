//! `BATON_ISA`, which processes are started with.

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;

use std::process::{Command, Output};

use baton_engine::{CpuEngine, CpuOptions, Isa};
use baton_formats::ModelFile;
use common::fixture;

#[test]
#[ignore = "the other process of the tests here, which start it themselves"]
fn other_process() {
    let file = ModelFile::open(&fixture("smollm")).unwrap();
    match CpuEngine::load(&file, &CpuOptions { threads: 1, ..Default::default() }, &mut |_| ()) {
        Ok(engine) => println!("runs with {}", engine.isa()),
        Err(error) => println!("refused: {error}"),
    }
}

fn with_isa(name: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "other_process", "--ignored", "--nocapture"]).env("BATON_ISA", name);
    let Output { status, stdout, .. } = command.output().unwrap();
    assert!(status.success(), "{name}: {status}");
    String::from_utf8(stdout).unwrap()
}

#[test]
fn baton_isa_variable_chooses_the_isa_of_the_engine() {
    for isa in Isa::available() {
        let said = with_isa(isa.as_str());
        assert!(said.contains(&format!("runs with {isa}\n")), "{isa}: {said}");
    }
    for name in ["scalar", "avx2", "avx512", "vnni", "bf16", "amx"] {
        if !Isa::available().iter().any(|isa| isa.as_str() == name) {
            assert!(with_isa(name).contains("refused: "), "{name}");
        }
    }
}

#[test]
fn empty_baton_isa_variable_counts_as_not_set() {
    let said = with_isa("");
    assert!(said.contains(&format!("runs with {}\n", Isa::detect())), "{said}");
}

#[test]
fn unknown_baton_isa_is_refused_with_the_available_ones() {
    let said = with_isa("sse9");
    assert!(said.contains("BATON_ISA") && said.contains("sse9") && said.contains("scalar"), "{said}");
}
