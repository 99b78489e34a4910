//! `baton`: the operator's command.

use std::process::ExitCode;

use baton_cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::of_process();
    let json = cli.json;
    match baton_cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(line) = error.line(json) {
                eprintln!("{line}");
            }
            ExitCode::from(error.exit_status())
        }
    }
}
