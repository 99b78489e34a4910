//! `baton version`.

use baton_proto::{PROTOCOL_VERSION, v1};
use serde_json::json;

use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::line;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Prints the versions of this command and of the conductor; that none is reachable is no error.
pub async fn run(address: &str, json: bool) -> Result<(), CliError> {
    let conductor = ask(address).await;
    if json {
        let conductor = match &conductor {
            Ok(v) => {
                json!({ "version": v.version, "protocol": v.protocol_version, "id": v.conductor_id, "address": address })
            }
            Err(_) => serde_json::Value::Null,
        };
        line(&json!({ "version": VERSION, "protocol": PROTOCOL_VERSION, "conductor": conductor }).to_string())?;
        return Ok(());
    }
    line(&format!("baton      {VERSION} (protocol {PROTOCOL_VERSION})"))?;
    line(&match &conductor {
        Ok(v) => format!("conductor  {} (protocol {}), {} at {address}", v.version, v.protocol_version, v.conductor_id),
        Err(error) => format!("conductor  not reachable: {error}"),
    })?;
    Ok(())
}

async fn ask(address: &str) -> Result<v1::VersionResponse, CliError> {
    let conductor = Conductor::connect(address).await?;
    Ok(conductor.cluster().version(v1::VersionRequest {}).await?.into_inner())
}
