//! Settings: a TOML file, and variables of the environment.

use std::cell::OnceCell;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::input::{join, parts, text};

pub(super) const WORDS: &[&str] = &[
    "listen",
    "threads",
    "model",
    "grace_s",
    "policy",
    "names",
    " = ",
    "\"",
    "'''",
    "\"\"\"",
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    "inf",
    "nan",
    "0x",
    "1_000",
    "1979-05-27T07:32:00Z",
    "true",
    "\\u0000",
    "BATON_LISTEN=",
    "BATON_THREADS=",
    "BATON_NAMES=",
];

baton_runtime::settings! {
    /// A setting of each form that the binaries have.
    pub struct Settings {
        /// A text.
        listen: String = "127.0.0.1:0".into(), "ADDR";
        /// A number.
        threads: u32 = 1, "N";
        /// A path without a default.
        model: Option<PathBuf> = None, "FILE";
        /// A number without a default.
        limit: Option<u64> = None, "N";
        /// A time.
        grace_s: f64 = 1.0, "SECONDS";
        /// A word.
        policy: Policy = Policy::default(), "POLICY";
        /// A list.
        names: Vec<String> = Vec::new(), "NAMES";
        /// A truth.
        is_on: bool = false, "BOOL";
    }
}

/// A word.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The default.
    #[default]
    RoundRobin,
    /// Another one.
    LoadBalance,
}

/// Parts: the file, and lines of variables.
pub(super) fn load(input: &[u8]) {
    thread_local! {
        static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
    }
    let [toml, environment] = parts(input);
    let variables = text(environment).lines().filter_map(|line| line.split_once('='));
    let variables: Vec<_> = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    FOLDER.with(|folder| {
        let file = folder.get_or_init(super::folder).path().join("baton.toml");
        std::fs::write(&file, toml).expect("the file can be written");
        match baton_runtime::settings::load::<Settings>(Some(&file), variables.into_iter(), []) {
            Ok(loaded) => drop(loaded.print()),
            Err(error) => drop(error.to_string()),
        }
    });
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let toml = "listen = \"0.0.0.0:1\"\nthreads = 2\nmodel = '/m'\ngrace_s = 2.5\npolicy = \"load-balance\"\nnames = [\"a\", \"b\"]\nis_on = true\n";
    vec![
        join(&[toml.as_bytes(), b"BATON_LIMIT=7\nBATON_THREADS=3\nPATH=x"]),
        join(&[b"", b"BATON_NAMES=[\"a\"]\nBATON_POLICY=round-robin\nBATON_IS_ON=true"]),
    ]
}
