//! `baton-conductor`: the frontend of a Baton cluster.

use std::process::ExitCode;

use baton_conductor::config::{Cli, Settings};
use baton_runtime::settings::{self, EXIT_BAD_SETTINGS};
use clap::Parser;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let loaded = match settings::load::<Settings>(cli.config.as_deref(), settings::environment(), &cli.flags) {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("baton-conductor: {error}");
            return ExitCode::from(EXIT_BAD_SETTINGS);
        }
    };
    if cli.print_config {
        print!("{}", loaded.print());
        return ExitCode::SUCCESS;
    }
    match baton_conductor::run(loaded.clone()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (said, status) = loaded.origins.last_words(error.as_ref());
            eprintln!("baton-conductor: {said}");
            ExitCode::from(status)
        }
    }
}
