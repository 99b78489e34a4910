//! The simple driver: seeds, changed at random.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::bounds::{Cost, Watch, last_panic};
use crate::{Mutator, Random, Target, live_bytes};

/// How to fuzz.
#[derive(Debug, Clone)]
pub struct Options {
    /// Names the inputs.
    pub seed: u64,
    /// Changed inputs.
    pub inputs: u32,
    /// Where the current input is written to: it outlives the process.
    pub folder: PathBuf,
}

/// What a run has seen.
#[derive(Debug, Default)]
pub struct Report {
    /// Inputs read.
    pub inputs: u32,
    /// How long all took.
    pub time: Duration,
    /// Most bytes that an input had allocated.
    pub most_bytes: usize,
    /// The slowest input.
    pub slowest: Duration,
    /// Bytes that are allocated in the end and were not before the first changed seed.
    pub kept_bytes: usize,
}

/// Inputs of `findings/TARGET/`, by path.
///
/// # Panics
/// A file cannot be read.
pub fn findings(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("findings").join(target.name);
    let Ok(entries) = std::fs::read_dir(&folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry of the folder").path()).collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path, bytes)
    };
    paths.into_iter().map(read).collect()
}

/// The input that is being read, in a file: what ends the process leaves it there.
struct CurrentInput {
    file: File,
    path: PathBuf,
}

impl CurrentInput {
    fn new(folder: &Path, target: &str) -> Self {
        std::fs::create_dir_all(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let path = folder.join(format!("{target}.input"));
        let file = File::create(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { file, path }
    }

    fn set(&self, input: &[u8]) {
        let written = self.file.write_all_at(input, 0).and_then(|()| self.file.set_len(input.len() as u64));
        written.unwrap_or_else(|error| panic!("{}: {error}", self.path.display()));
    }
}

/// Runs a target on its findings, its seeds, and changed seeds.
///
/// # Panics
/// The target does. One that takes too much memory or time ends the process. The input is in a file
/// of `options.folder` then, as standard error says.
pub fn fuzz(target: &Target, options: &Options) -> Report {
    let current = CurrentInput::new(&options.folder, target.name);
    let path = current.path.display();
    let name = target.name;
    println!(
        "fuzz: {name}: if this ends early, {path} has the input: put it into crates/fuzz/findings/{name}/, and fix it"
    );
    let seeds = (target.seeds)();
    let mut mutator = Mutator::new(&seeds, target.words, target.max_bytes, Random::new(options.seed, target.name));
    let given: Vec<_> = findings(target).into_iter().map(|(_, input)| input).chain(seeds.iter().cloned()).collect();
    let mut report = Report::default();
    let mut before = 0;
    let began = baton_runtime::now();
    let watched = Watched::new(target);
    let given_inputs = given.len();
    for (index, input) in given.into_iter().chain((0..options.inputs).map(|_| mutator.input())).enumerate() {
        if index == given_inputs {
            // What is made once has been made.
            before = live_bytes();
        }
        current.set(&input);
        let Cost { bytes, time } = watched.cost(&input);
        report.inputs += 1;
        report.most_bytes = report.most_bytes.max(bytes);
        report.slowest = report.slowest.max(time);
    }
    report.time = began.elapsed();
    report.kept_bytes = live_bytes().saturating_sub(before);
    // Nothing was found.
    let _ = std::fs::remove_file(&current.path);
    report
}

/// A target whose inputs are watched, one after the other. There is one at a time in a process.
pub struct Watched {
    target: Target,
    watch: Watch,
}

impl Watched {
    /// Watches a target.
    pub fn new(target: &Target) -> Self {
        Self { target: *target, watch: Watch::new(target.limits) }
    }

    /// Runs the target on one input. What takes too much memory or time ends the process.
    ///
    /// # Panics
    /// The target does.
    pub fn read(&self, input: &[u8]) {
        self.cost(input);
    }

    fn cost(&self, input: &[u8]) -> Cost {
        // What a target keeps, such as a runtime, may be broken: the process ends anyway.
        let read = AssertUnwindSafe(|| self.watch.input(input, || (self.target.read)(input)));
        let name = self.target.name;
        let bytes = input.len();
        catch_unwind(read).unwrap_or_else(|_| panic!("{name}: an input of {bytes} bytes {}", last_panic()))
    }
}
