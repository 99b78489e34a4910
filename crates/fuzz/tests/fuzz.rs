//! Each target on its findings, its seeds, and a fixed number of changed seeds. `BATON_TEST_SEED=N`
//! draws other changes; `BATON_FUZZ_INPUTS=N` sets how many.
//!
//! What ends a test early is in the file that the test names. In `crates/fuzz/findings/TARGET/` it
//! is run first from then on.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use baton_fuzz::{CountingAllocator, Limits, Options, TARGETS, Target, fuzz};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// What targets may keep between inputs. The library `tokenizers` keeps about 600 bytes of each
/// tokenizer in each thread; a process loads one.
const MOST_KEPT: usize = 16 << 20;
const MOST_KEPT_PER_INPUT: usize = 1 << 10;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz")
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{variable}: '{text}': {error}")))
}

fn short_run(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of this name");
    let inputs = number("BATON_FUZZ_INPUTS").map_or(target.short_run, |inputs| inputs as u32);
    let options = Options { seed: number("BATON_TEST_SEED").unwrap_or(1), inputs, folder: folder() };
    let report = fuzz(target, &options);
    let inputs = report.inputs;
    let seconds = report.time.as_secs_f64();
    println!(
        "fuzz: {name}: {inputs} inputs in {seconds:.1} s ({:.0} per second); at most {} KiB and {:.0} ms for one; {} KiB kept",
        f64::from(inputs) / seconds,
        report.most_bytes >> 10,
        report.slowest.as_secs_f64() * 1e3,
        report.kept_bytes >> 10,
    );
    let most = MOST_KEPT + MOST_KEPT_PER_INPUT * inputs as usize;
    assert!(report.kept_bytes <= most, "{} bytes are kept after {inputs} inputs", report.kept_bytes);
}

/// A test for each target, so that they run side by side and are named.
macro_rules! short_runs {
    ($($test:ident: $name:literal,)*) => {
        $(#[test] fn $test() { short_run($name); })*

        #[test]
        fn every_fuzz_target_has_a_test() {
            let tested = [$($name),*];
            let targets: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(targets, tested);
        }
    };
}

short_runs! {
    transfer_frames: "transfer-frames",
    transfer_replies: "transfer-replies",
    http_connection: "http-connection",
    http_body: "http-body",
    proto: "proto",
    leader: "leader",
    leader_desk: "leader-desk",
    node_events: "node-events",
    node_commands: "node-commands",
    gguf: "gguf",
    safetensors: "safetensors",
    tokenizer_json: "tokenizer-json",
    tokenizer_gguf: "tokenizer-gguf",
    chat_template: "chat-template",
    grammar: "grammar",
    model_output: "model-output",
    kv_files: "kv-files",
    settings: "settings",
    run_time_settings: "run-time-settings",
}

#[test]
fn every_findings_folder_belongs_to_a_fuzz_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("findings");
    for entry in std::fs::read_dir(folder).expect("a folder of findings") {
        let entry = entry.expect("an entry of the folder");
        let is_a_targets = TARGETS.iter().any(|target| *target.name == entry.file_name());
        assert!(is_a_targets || entry.path().is_file(), "{}", entry.path().display());
    }
}

/// Targets with a bug each, which inputs that begin with `!` reach.
const BROKEN: [Target; 3] = [
    broken("panics", |input| assert!(!is_bad(input), "as it must")),
    broken("allocates", |input| {
        // A length field that is believed.
        drop(Vec::<u8>::with_capacity(if is_bad(input) { 1 << 40 } else { 10 }));
    }),
    broken("hangs", |input| {
        while is_bad(input) {
            std::hint::spin_loop();
        }
    }),
];

const fn broken(name: &'static str, read: fn(&[u8])) -> Target {
    Target {
        name,
        read,
        seeds: || vec![b"a valid input".to_vec()],
        words: &["!"],
        max_bytes: 100,
        limits: Limits { bytes: 1 << 20, bytes_per_byte: 0, time: Duration::from_secs(1) },
        short_run: 10_000,
    }
}

fn is_bad(input: &[u8]) -> bool {
    input.starts_with(b"!")
}

#[test]
fn fuzz_run_ends_at_panic_allocation_or_hang_and_keeps_the_input() {
    for (target, said) in BROKEN.iter().zip(["as it must", "over the limit", "takes more than 1s"]) {
        let mut child = Command::new(std::env::current_exe().expect("this test's binary"));
        child.args(["--exact", "other_process", "--ignored", "--nocapture"]).env("BATON_FUZZ_BROKEN", target.name);
        let ended = child.output().expect("the child runs");
        let stdout = String::from_utf8_lossy(&ended.stdout);
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert!(
            !ended.status.success() && stderr.contains(said),
            "{}: {}\n{stdout}\n{stderr}",
            target.name,
            ended.status
        );
        let file = folder().join(format!("{}.input", target.name));
        assert!(stdout.contains(&file.display().to_string()), "{stdout}");
        let input = std::fs::read(&file).expect("the input is left behind");
        assert!(is_bad(&input), "{}: {input:?}", target.name);
    }
}

#[test]
#[ignore = "needs the test that starts it"]
fn other_process() {
    let name = std::env::var("BATON_FUZZ_BROKEN").expect("the name of a broken target");
    let target = BROKEN.iter().find(|target| target.name == name).expect("a broken target");
    fuzz(target, &Options { seed: 1, inputs: target.short_run, folder: folder() });
}
