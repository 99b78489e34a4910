//! `baton-prefill`: computes prompts and pushes their KV cache, layer by layer.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton_runtime::command::main_of("baton-prefill", baton_prefill_node::ABOUT, baton_prefill_node::run)
}
