//! Settings: a TOML file, and variables of the environment.

use std::cell::OnceCell;
use std::collections::BTreeMap;
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

/// A setting of each form that the binaries have.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Settings {
    listen: String,
    threads: u32,
    model: Option<PathBuf>,
    limit: Option<u64>,
    grace_s: f64,
    policy: Policy,
    names: Vec<String>,
    is_on: bool,
}

#[derive(Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Policy {
    #[default]
    RoundRobin,
    LoadBalance,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".into(),
            threads: 1,
            model: None,
            limit: None,
            grace_s: 1.0,
            policy: Policy::default(),
            names: Vec::new(),
            is_on: false,
        }
    }
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
        let no_flags = BTreeMap::<String, u8>::new();
        match baton_runtime::settings::load::<Settings>(Some(&file), variables.into_iter(), &no_flags) {
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
