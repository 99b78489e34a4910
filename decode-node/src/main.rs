//! `baton-decode`: receives KV caches and streams tokens.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton_runtime::command::main_of("baton-decode", baton_decode_node::ABOUT, baton_decode_node::run)
}
