//! `baton`: the operator's command.

use std::process::ExitCode;

use baton_cli::{Cli, CliError, wants_json};

fn main() -> ExitCode {
    let line: Vec<_> = std::env::args_os().collect();
    let json = wants_json(&line);
    let cli = match Cli::parse_line(line) {
        Ok(cli) => cli,
        Err(error) if json && error.use_stderr() => return failed(&CliError::from(error), json),
        Err(error) => error.exit(),
    };
    match baton_cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error, json),
    }
}

fn failed(error: &CliError, json: bool) -> ExitCode {
    if let Some(line) = error.line(json) {
        eprintln!("{line}");
    }
    ExitCode::from(error.exit_status())
}
