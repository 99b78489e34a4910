//! `baton version`.

use baton_proto::{PROTOCOL_VERSION, reason_of_status, v1};
use futures::future::join_all;
use serde_json::json;
use tonic::Code;

use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::{Paint, line};
use crate::table::table;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What a conductor says of itself, or why it does not.
type Said = Result<v1::VersionResponse, String>;

/// Prints the versions of this command and of each conductor, and which of them leads. That one is
/// not reachable is no error. That none is, is one if they were `given`: then they are asked for.
pub async fn run(addresses: &str, given: bool, json: bool) -> Result<(), CliError> {
    let conductors = Conductor::each(addresses)?;
    let said = join_all(conductors.iter().map(ask)).await;
    let all: Vec<_> = conductors.iter().map(Conductor::address).zip(said).collect();
    print(&all, json)?;
    match all.first() {
        Some((_, Err(reason))) if given && all.iter().all(|(_, said)| said.is_err()) => {
            Err(CliError::Unreachable { address: addresses.to_owned(), reason: reason.clone() })
        }
        _ => Ok(()),
    }
}

fn print(all: &[(&str, Said)], json: bool) -> Result<(), CliError> {
    if json {
        let conductors: Vec<_> = all.iter().map(|(address, said)| to_json(address, said)).collect();
        let told = json!({ "version": VERSION, "protocol": PROTOCOL_VERSION, "conductors": conductors });
        return Ok(line(&told.to_string())?);
    }
    let header = ["CONDUCTOR", "ID", "VERSION", "PROTOCOL", "LEADS", "READY"];
    let rows: Vec<_> = all.iter().map(|(address, said)| row(address, said)).collect();
    line(&format!("baton {VERSION} (protocol {PROTOCOL_VERSION})\n"))?;
    Ok(line(&table(&header, &rows, Paint::stdout(), |_, _, cell| cell.to_owned()))?)
}

async fn ask(conductor: &Conductor) -> Said {
    let answer = conductor.version().await.map_err(|silent| silent.to_string())?;
    answer.map_err(|status| match status.code() {
        Code::Unimplemented => "it does not serve operators there".to_owned(),
        _ => reason_of_status(&status),
    })
}

fn row(address: &str, said: &Said) -> Vec<String> {
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    match said {
        Ok(v) => {
            let id = v.conductor_id.clone();
            let version = v.version.clone();
            let protocol = v.protocol_version.to_string();
            vec![address.to_owned(), id, version, protocol, yes(v.leads), yes(v.ready)]
        }
        Err(error) => vec![address.to_owned(), format!("not reachable: {error}")],
    }
}

fn to_json(address: &str, said: &Said) -> serde_json::Value {
    match said {
        Ok(v) => json!({
            "address": address, "id": v.conductor_id, "version": v.version, "protocol": v.protocol_version,
            "leads": v.leads, "ready": v.ready,
        }),
        Err(error) => json!({ "address": address, "error": error }),
    }
}
