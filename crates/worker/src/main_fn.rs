//! The `main` of both binaries.

use std::process::ExitCode;

use baton_runtime::settings::{self, EXIT_BAD_SETTINGS};
use clap::{CommandFactory, FromArgMatches};

use crate::config::{Cli, Settings};

/// Parses, loads the settings, runs, and turns the outcome into an exit status.
pub fn main_of(binary: &'static str, run: impl FnOnce(Settings) -> anyhow::Result<()>) -> ExitCode {
    let cli = Cli::from_arg_matches(&Cli::command().name(binary).get_matches());
    let cli = cli.unwrap_or_else(|error| error.exit());
    let loaded = match settings::load::<Settings>(cli.config.as_deref(), settings::environment(), &cli.flags) {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("{binary}: {error}");
            return ExitCode::from(EXIT_BAD_SETTINGS);
        }
    };
    if cli.print_config {
        print!("{}", loaded.print());
        return ExitCode::SUCCESS;
    }
    match run(loaded.settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (said, status) = loaded.origins.last_words(error.as_ref());
            eprintln!("{binary}: {said}");
            ExitCode::from(status)
        }
    }
}
