//! The shell snippets of the documents run as they stand, in order.
//!
//! The word behind `sh` says how:
//! - none runs the block to its end,
//! - `background` leaves it running until a later block takes its address, or the document ends,
//! - `helm` is run by `helm/tests/test_pages.py`,
//! - `syntax REASON` is not run. It must be the shell's language, and flags of Baton's binaries in
//!   it must exist.
//!
//! Each block says what it is. Drawings, outputs and files are `text` or `yaml`, without commands.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use baton_cluster_tests::{binary, model};

/// Of the shell blocks of all documents.
const LEAST_PERCENT_RUN: usize = 80;
/// Reasons for which a block is not run.
const REASONS: [&str; 4] = ["needs-docker", "needs-kubernetes", "runs-this-test", "takes-minutes"];
/// What a command of a document begins with.
const COMMANDS: [&str; 11] =
    ["$", "baton", "cargo", "curl", "helm", "import", "kubectl", "make", "pip", "python", "python3"];
/// What the blocks are run with.
///
/// `free ADDRESS` ends the job that serves there, and fails if another process does.
/// `serve ADDRESS JOB` waits until the job is ready there.
const PRELUDE: &str = r#"set -euo pipefail
trap 'for job in $(jobs -p); do stop "$job"; done' EXIT
set -m
stop() {
  kill -TERM -- "-$1" 2>/dev/null || return 0
  while kill -0 -- "-$1" 2>/dev/null; do sleep 0.1; done
}
curl() { command curl --fail-with-body "$@"; }
declare -A serving=()
free() {
  [[ -z ${serving[$1]-} ]] || stop "${serving[$1]}"
  ! command curl -s "http://$1/" >/dev/null
}
serve() {
  serving[$1]=$2
  for _ in $(seq 600); do
    kill -0 "$2"
    ! curl -s "http://$1/ready" >/dev/null || return 0
    sleep 0.2
  done
  return 1
}
"#;
/// Before bare-metal.md: its model and binaries are there, and what `$EDITOR` is for.
const BEFORE_BARE_METAL: &str = r"
ln -s /opt/baton/baton{,-conductor,-prefill,-decode} /usr/local/bin/
mkdir /srv/models
ln -s /opt/model.gguf /srv/models/llama-3-8b-instruct
ln -s /opt/baton/baton-decode .
EDITOR='sed -i s/34359738368/67108864/'
";
/// Before high-availability.md: an etcd, one that wants certificates, and those.
const BEFORE_SEVERAL_CONDUCTORS: &str = r"
etcd() { # NAME URLS FLAGS...
  command etcd --data-dir $1 --listen-client-urls $2 --advertise-client-urls $2 --log-level error ${@:3} &
}
etcd plain http://10.0.0.9:2379 --listen-peer-urls http://10.0.0.9:2380
certificate() { # NAME OPTIONS...
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=$1 -keyout $1.key -out $1.pem ${@:2} 2>&1
}
mkdir -p /etc/baton
cd /etc/baton
certificate etcd-ca
signed='-CA etcd-ca.pem -CAkey etcd-ca.key -addext basicConstraints=CA:FALSE'
certificate etcd-server $signed -addext subjectAltName=IP:10.0.0.10,IP:10.0.0.11,IP:10.0.0.12
certificate etcd-client $signed
echo a-password >etcd-password
echo another-one >root-password
etcd guarded https://10.0.0.10:2379,https://10.0.0.11:2379,https://10.0.0.12:2379 --listen-peer-urls http://10.0.0.10:2380 \
  --cert-file etcd-server.pem --key-file etcd-server.key --client-cert-auth --trusted-ca-file etcd-ca.pem
";

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Run,
    Background,
    Helm,
    Syntax,
}

/// A fenced shell block.
#[derive(Debug)]
struct Block {
    /// Line of its fence, from 1.
    line: usize,
    how: How,
    /// Why it is not run, if it is not.
    reason: String,
    text: String,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut is_inside, mut open) = (false, None);
    for (line, text) in (1..).zip(markdown.lines()) {
        let Some(info) = text.trim_start().strip_prefix("```") else {
            if let Some(Block { text: block, .. }) = &mut open {
                writeln!(block, "{text}").unwrap();
            } else if is_inside {
                let word = text.split_whitespace().next().unwrap_or_default();
                assert!(!COMMANDS.contains(&word), "line {line}: a command that nothing runs: {text}");
            }
            continue;
        };
        let info = info.trim();
        is_inside = !is_inside;
        if !is_inside {
            assert!(info.is_empty(), "line {line}: `{info}` at the end of a block");
            blocks.extend(open.take());
            continue;
        }
        let reason = info.strip_prefix("sh syntax ").unwrap_or_default();
        let how = match info {
            "sh" => How::Run,
            "sh background" => How::Background,
            "sh helm" => How::Helm,
            _ if REASONS.contains(&reason) => How::Syntax,
            other => {
                assert!(
                    matches!(other, "text" | "yaml"),
                    "line {line}: nothing runs a block of `{other}`; reasons: {REASONS:?}"
                );
                continue;
            }
        };
        open = Some(Block { line, how, reason: reason.to_owned(), text: String::new() });
    }
    assert!(!is_inside, "a block without an end");
    blocks
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn of(document: &str) -> Vec<Block> {
    blocks(&std::fs::read_to_string(root().join(document)).unwrap())
}

/// Every document with its shell blocks.
fn all() -> BTreeMap<String, Vec<Block>> {
    let output = Command::new("git").args(["ls-files", "*.md"]).current_dir(root()).output().unwrap();
    let documents = String::from_utf8(output.stdout).unwrap();
    let all: BTreeMap<_, _> = documents.lines().map(|document| (document.to_owned(), of(document))).collect();
    assert!(all.len() > 20, "{all:?}");
    all
}

/// Where a background block serves HTTP.
fn address(text: &str) -> String {
    let given = text.split_whitespace().skip_while(|&word| word != "--http").nth(1);
    given.unwrap_or("127.0.0.1:8080").replace("0.0.0.0", "127.0.0.1")
}

/// One shell runs all blocks of a document, so that one block's variables are there for the next.
fn script(document: &str) -> String {
    let mut script = String::new();
    for Block { line, how, text, .. } in of(document) {
        let named = format!("echo '== {document}:{line}' >&2");
        match how {
            How::Run => writeln!(script, "{named}\n{text}").unwrap(),
            How::Background => {
                let address = address(&text);
                writeln!(script, "{named}\nfree {address}\n(\n{text}\nwait\n) &\nserve {address} $!").unwrap();
            }
            How::Helm | How::Syntax => {}
        }
    }
    script
}

/// Where a document's blocks run.
enum Place {
    /// In a checkout.
    Here,
    /// On a machine with systemd, after this.
    Machine(&'static str),
}

fn run(document: &str, place: &Place) {
    let binaries = binary("baton").unwrap().parent().unwrap().to_owned();
    let blocks = script(document);
    let mut command = Command::new("bash");
    // Until the end, for what a machine reads of it.
    let folder = tempfile::tempdir().unwrap();
    match place {
        Place::Here => {
            let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
            command.args(["-c", &format!("{PRELUDE}{blocks}")]).current_dir(root()).env("PATH", path);
            command.env("BATON_MODEL", model());
            // What is the reader's own.
            let mine = folder.path().join("mine.gguf");
            std::os::unix::fs::symlink(model(), &mine).unwrap();
            command.env("MODEL", mine).env("SETTINGS", "docs/deploy/systemd/decode.toml");
            command.envs(["HOST", "PREFILL_HOST", "DECODE_HOST"].map(|name| (name, "127.0.0.1")));
        }
        Place::Machine(before) => {
            let script = format!("{PRELUDE}export PATH=\"/opt/baton:$PATH\" MODEL=/opt/model.gguf\n{before}{blocks}");
            std::fs::write(folder.path().join("script"), script).unwrap();
            let docs = Command::new("cp").arg("-r").arg(root().join("docs")).arg(folder.path()).status().unwrap();
            assert!(docs.success());
            command.arg(root().join("cluster-tests/tests/cluster/docs/machine.sh"));
            command.arg(folder.path()).arg(binaries).arg(model());
        }
    }
    // A developer's own cluster is not meant.
    command.stdin(Stdio::null()).env_remove("BATON_CONDUCTOR");
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
    run("README.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn architecture_snippets_run() {
    run("ARCHITECTURE.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn contributing_snippets_run() {
    run("CONTRIBUTING.md", &Place::Here);
}

#[test]
#[ignore = "needs the official clients: scripts/python-clients.sh, a model: BATON_MODEL, and ports 7070 and 8080"]
fn http_api_page_snippets_run() {
    run("docs/api.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL, root, systemd, etcd and nft"]
fn bare_metal_page_snippets_run() {
    run("docs/deploy/bare-metal.md", &Place::Machine(BEFORE_BARE_METAL));
}

#[test]
#[ignore = "needs the official clients: scripts/python-clients.sh, a model: BATON_MODEL, and ports 7070 and 8080"]
fn grpc_page_snippets_run() {
    run("docs/grpc.md", &Place::Here);
}

#[test]
#[ignore = "needs root, to make network namespaces, and ports 7070 and 8080"]
fn chaos_page_snippets_run() {
    run("docs/operations/chaos.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL, and ports 7070 and 8080"]
fn draining_page_snippets_run() {
    run("docs/operations/draining.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL, root, systemd, etcd, etcdctl and openssl"]
fn high_availability_page_snippets_run() {
    run("docs/operations/high-availability.md", &Place::Machine(BEFORE_SEVERAL_CONDUCTORS));
}

#[test]
#[ignore = "needs ports 7070 and 8080"]
fn settings_page_snippets_run() {
    run("docs/operations/settings.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL, root, ping and vmstat, and ports 7070 and 8080"]
fn troubleshooting_page_snippets_run() {
    run("docs/operations/troubleshooting.md", &Place::Here);
}

#[test]
#[ignore = "needs the official clients: scripts/python-clients.sh, a model: BATON_MODEL, and the ports that it names"]
fn quickstart_snippets_run() {
    run("docs/quickstart.md", &Place::Here);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn simulator_page_snippets_run() {
    run("docs/internals/simulator.md", &Place::Here);
}

#[test]
fn fence_without_language_and_command_in_text_block_are_refused() {
    for wrong in ["```\nx\n```\n", "```text\nbaton nodes\n```\n", "```python\nx\n```\n", "```sh\nx\n"] {
        assert!(std::panic::catch_unwind(|| blocks(wrong)).is_err(), "{wrong}");
    }
    let right = blocks("```text\nbaton-0 ready\n```\n\n```sh\nbaton nodes\n```\n");
    assert_eq!(right.len(), 1, "{right:?}");
    assert_eq!(right[0].text, "baton nodes\n");
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
    let mut count = 0;
    let mut not_run = BTreeMap::<String, Vec<String>>::new();
    for (document, blocks) in all() {
        for Block { line, how, reason, .. } in blocks {
            count += 1;
            // A test above runs it.
            let call = format!("    run(\"{document}\", &Place::");
            let is_tested = include_str!("docs.rs").contains(&call) || matches!(how, How::Helm | How::Syntax);
            assert!(is_tested, "{document}:{line}: no test runs this document");
            if how == How::Syntax {
                not_run.entry(reason).or_default().push(format!("{document}:{line}"));
            }
        }
    }
    let run = count - not_run.values().map(Vec::len).sum::<usize>();
    println!("{run} of {count} shell blocks are run; not run: {not_run:#?}");
    assert!(100 * run >= LEAST_PERCENT_RUN * count, "{run} of {count}");
}

#[test]
fn doc_snippets_that_do_not_run_are_shell_with_flags_that_exist() {
    assert_eq!(unknown_flags("kubectl exec pod -- baton nodes --transport --nope=1 | wc --lines"), ["baton --nope"]);
    for (document, blocks) in all() {
        for Block { line, text, .. } in blocks.into_iter().filter(|block| block.how == How::Syntax) {
            let status = Command::new("bash").args(["-n", "-c", &text]).status().unwrap();
            assert!(status.success(), "{document}:{line}: no shell");
            let unknown: Vec<_> = text.replace("\\\n", " ").lines().flat_map(unknown_flags).collect();
            assert!(unknown.is_empty(), "{document}:{line}: no such flag: {unknown:?}");
        }
    }
}
