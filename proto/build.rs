//! Compiles the .proto files with protox: no protoc is needed on the machine.

use std::path::PathBuf;

use prost::Message;

const FILES: [&str; 4] =
    ["baton/v1/inference.proto", "baton/v1/node.proto", "baton/v1/cluster.proto", "baton/v1/leader.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // The last message is ten times as large as those with tokens, which are moved once per token.
    let finished = ".baton.v1.GenerateResponse.event.finished";
    // In order: requests are compared by their bytes.
    let biases = ".baton.v1.SamplingParameters.logit_bias";
    tonic_prost_build::configure().boxed(finished).btree_map(biases).compile_fds(descriptors)?;
    Ok(())
}
