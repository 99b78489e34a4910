//! `baton-conductor`: the frontend of a Baton cluster.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton_runtime::command::main_of("baton-conductor", baton_conductor::ABOUT, baton_conductor::run)
}
