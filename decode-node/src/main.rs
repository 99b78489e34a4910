//! `baton-decode`: receives KV caches and streams tokens.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton_worker::main_of("baton-decode", baton_decode_node::run)
}
