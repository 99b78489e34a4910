//! One target under libFuzzer: `BATON_FUZZ_TARGET` names it. `scripts/fuzz.sh` runs them all.
//!
//! With `BATON_FUZZ_SEEDS=FOLDER` it writes the target's seeds to `FOLDER/seeds/` and its words to
//! `FOLDER/words`, as libFuzzer reads them, and ends.

#![no_main]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use baton_fuzz::{CountingAllocator, TARGETS, Target, Watched};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

thread_local! {
    /// libFuzzer has one thread.
    static WATCHED: Watched = Watched::new(named());
}

fn named() -> &'static Target {
    let name = std::env::var("BATON_FUZZ_TARGET").unwrap_or_default();
    let target = TARGETS.iter().find(|target| target.name == name);
    target.unwrap_or_else(|| {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        panic!("BATON_FUZZ_TARGET: '{name}', but must be one of: {}", names.join(", "))
    })
}

/// Words of a dictionary have quotes around them, and bytes that are not plain as `\xAB`.
fn dictionary(words: &[&str]) -> String {
    let mut text = String::new();
    for word in words {
        text.push('"');
        for byte in word.bytes() {
            let plain = (0x20..0x7f).contains(&byte) && !b"\"\\".contains(&byte);
            // Writing to a string does not fail.
            let _ = if plain { write!(text, "{}", byte as char) } else { write!(text, "\\x{byte:02X}") };
        }
        text.push_str("\"\n");
    }
    text
}

fn write_seeds(target: &Target, folder: &Path) {
    let written = fs::create_dir_all(folder.join("seeds")).and_then(|()| {
        for (index, seed) in (target.seeds)().iter().enumerate() {
            fs::write(folder.join("seeds").join(index.to_string()), seed)?;
        }
        fs::write(folder.join("words"), dictionary(target.words))
    });
    written.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
}

#[expect(clippy::disallowed_methods, reason = "libFuzzer's main would go on")]
fn initialize() {
    // The hook of `libfuzzer_sys` ends the process at any panic, but the grammar compiler makes
    // errors of those of its library. Others reach libFuzzer all the same.
    drop(std::panic::take_hook());
    if let Some(folder) = std::env::var_os("BATON_FUZZ_SEEDS") {
        write_seeds(named(), Path::new(&folder));
        std::process::exit(0);
    }
}

fuzz_target!(init: initialize(), |input: &[u8]| {
    let read = || WATCHED.with(|watched| watched.read(input));
    if std::panic::catch_unwind(read).is_err() {
        std::process::abort();
    }
});
