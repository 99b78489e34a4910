//! The shell snippets of the documents run as they stand, in order, from the repository's root.
//!
//! The word behind `sh` says how: none runs the block to its end, `background` leaves it running
//! until the document's end. One that is `syntax` is not run: it needs several machines, systemd or
//! Kubernetes. It must be the shell's language, and flags of Baton's binaries in it must exist.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use baton_cluster_tests::{binary, model};

/// Documents whose snippets run.
const DOCUMENTS: [&str; 9] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/api.md",
    "docs/grpc.md",
    "docs/operations/chaos.md",
    "docs/operations/draining.md",
    "docs/operations/troubleshooting.md",
    "docs/quickstart.md",
];
/// Documents of clusters that one machine cannot be.
const OF_CLUSTERS: [&str; 4] = [
    "docs/deploy/bare-metal.md",
    "docs/deploy/kubernetes.md",
    "docs/operations/high-availability.md",
    "docs/operations/settings.md",
];
/// Of the shell blocks of [`DOCUMENTS`].
const LEAST_SHARE_RUN: f64 = 0.8;
/// In the script: waits for what a `background` block started.
const AWAIT_READY: &str =
    "for _ in $(seq 600); do curl -s http://127.0.0.1:8080/ready >/dev/null && break; sleep 0.2; done\n";

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Run,
    Background,
    Syntax,
}

/// A fenced shell block.
#[derive(Debug)]
struct Block {
    /// Line of its fence, from 1.
    line: usize,
    how: How,
    text: String,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open = None;
    for (line, text) in (1..).zip(markdown.lines()) {
        let Some(info) = text.trim_start().strip_prefix("```") else {
            if let Some(Block { text: block, .. }) = &mut open {
                writeln!(block, "{text}").unwrap();
            }
            continue;
        };
        blocks.extend(open.take());
        let how = match info.trim() {
            "sh" => How::Run,
            "sh background" => How::Background,
            "sh syntax" => How::Syntax,
            other => {
                // A drawing, or a fence that ends a block.
                assert!(matches!(other, "" | "text" | "yaml"), "line {line}: nothing runs a block of {other}");
                continue;
            }
        };
        open = Some(Block { line, how, text: String::new() });
    }
    assert!(open.is_none(), "a block without an end");
    blocks
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn of(document: &str) -> Vec<Block> {
    blocks(&std::fs::read_to_string(root().join(document)).unwrap())
}

/// One shell runs all blocks of a document, so that one block's variables are there for the next.
fn script(document: &str) -> String {
    let mut script = String::from(
        "set -euo pipefail\ntrap 'jobs -p | while read -r job; do kill -TERM -- \"-$job\"; done; wait' EXIT\nset -m\n\
         curl() { command curl --fail-with-body \"$@\"; }\n",
    );
    for Block { line, how, text } in of(document) {
        match how {
            How::Run => writeln!(script, "echo '== {document}:{line}' >&2\n{text}").unwrap(),
            How::Background => writeln!(script, "( {text} ) &\n{AWAIT_READY}").unwrap(),
            How::Syntax => println!("{document}:{line} is not run:\n{text}"),
        }
    }
    script
}

fn run(document: &str) {
    let binaries = binary("baton").unwrap().parent().unwrap().to_owned();
    let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-c", &script(document)]).current_dir(root()).env("PATH", path).stdin(Stdio::null());
    // A developer's own cluster is not meant.
    command.env_remove("BATON_CONDUCTOR").env("BATON_MODEL", model());
    // What cargo tells a test of its package. The build script of `ring` reads these. With them,
    // cargo would build it and all that depends on it anew, under the binaries that other tests
    // run.
    for (name, _) in
        std::env::vars().filter(|(name, _)| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
    {
        command.env_remove(name);
    }
    let status = command.status().unwrap();
    assert!(status.success(), "{document}: {status}; the line with == says which block");
}

#[test]
#[ignore = "needs a model: BATON_MODEL, and ports 7070 and 8080"]
fn readme_snippets_run() {
    run("README.md");
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn architecture_snippets_run() {
    run("ARCHITECTURE.md");
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn contributing_snippets_run() {
    run("CONTRIBUTING.md");
}

#[test]
#[ignore = "needs the official clients: scripts/python-clients.sh, a model: BATON_MODEL, and ports 7070 and 8080"]
fn grpc_page_snippets_run() {
    run("docs/grpc.md");
}

#[test]
#[ignore = "needs a model: BATON_MODEL, and ports 7070 and 8080"]
fn http_api_page_snippets_run() {
    run("docs/api.md");
}

#[test]
#[ignore = "needs ports 7070 and 8080"]
fn chaos_page_snippets_run() {
    run("docs/operations/chaos.md");
}

#[test]
#[ignore = "needs a model: BATON_MODEL, and ports 7070 and 8080"]
fn draining_page_snippets_run() {
    run("docs/operations/draining.md");
}

#[test]
#[ignore = "needs a model: BATON_MODEL, and ports 7070 and 8080"]
fn troubleshooting_page_snippets_run() {
    run("docs/operations/troubleshooting.md");
}

#[test]
#[ignore = "needs a model: BATON_MODEL, and ports 7070 and 8080"]
fn quickstart_snippets_run() {
    run("docs/quickstart.md");
}

/// A binary's `--help`, for these words behind it.
fn help(program: &str, words: &[&str]) -> Option<String> {
    let output = Command::new(binary(program).unwrap()).args(words).arg("--help").output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

/// Flags in a line of shell that its Baton binary does not have.
fn unknown_flags(line: &str) -> Vec<String> {
    const PROGRAMS: [&str; 4] = ["baton", "baton-conductor", "baton-prefill", "baton-decode"];
    let mut unknown = Vec::new();
    for command in line.split(['|', ';', '&']) {
        let words: Vec<_> = command.split_whitespace().collect();
        let is_run = |&at: &usize| at == 0 || words[at - 1] == "--";
        let Some(at) = (0..words.len()).filter(is_run).find(|&at| PROGRAMS.contains(&words[at])) else { continue };
        let behind = &words[at + 1..];
        let is_flag = |word: &&str| word.starts_with("--");
        let plain: Vec<_> = behind.iter().copied().filter(|word| !is_flag(word)).collect();
        // Of a subcommand's help, the one with the most words that are one.
        let helps = (0..=plain.len().min(2)).rev().find_map(|count| help(words[at], &plain[..count]));
        let helps = helps.unwrap_or_default();
        unknown.extend(behind.iter().filter(|word| is_flag(word)).filter_map(|flag| {
            let name = flag.split('=').next().unwrap_or(flag);
            (!helps.split_whitespace().any(|word| word == name)).then(|| format!("{} {name}", words[at]))
        }));
    }
    unknown
}

#[test]
fn at_least_four_in_five_doc_snippets_are_run() {
    let all: Vec<_> = DOCUMENTS.into_iter().flat_map(of).collect();
    let run = all.iter().filter(|block| block.how != How::Syntax).count();
    println!("{run} of {} shell blocks are run", all.len());
    assert!(run as f64 >= LEAST_SHARE_RUN * all.len() as f64, "{run} of {}", all.len());
}

#[test]
fn doc_snippets_that_do_not_run_are_shell_with_flags_that_exist() {
    assert_eq!(unknown_flags("kubectl exec pod -- baton nodes --transport --nope=1 | wc --lines"), ["baton --nope"]);
    for document in DOCUMENTS.into_iter().chain(OF_CLUSTERS) {
        for Block { line, text, .. } in of(document).into_iter().filter(|block| block.how == How::Syntax) {
            let status = Command::new("bash").args(["-n", "-c", &text]).status().unwrap();
            assert!(status.success(), "{document}:{line}: no shell");
            let unknown: Vec<_> = text.replace("\\\n", " ").lines().flat_map(unknown_flags).collect();
            assert!(unknown.is_empty(), "{document}:{line}: no such flag: {unknown:?}");
        }
    }
}
