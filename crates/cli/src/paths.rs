//! `baton nodes --transport`: how the nodes transfer bytes to each other.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::screen::Paint;
use crate::table::table;
use crate::timeline::bytes;

const HEADER: [&str; 10] =
    ["FROM", "TO", "TRANSPORT", "BANDWIDTH", "MOVED", "BATCHES", "RETRIES", "FALLBACKS", "IN FLIGHT", "LANES"];
/// Columns of what went wrong, which are coloured if something did.
const TROUBLE: std::ops::RangeInclusive<usize> = 6..=7;

/// The pairs of nodes that have transferred bytes, by name: the sender, and the way to the
/// receiver.
fn pairs(nodes: &[v1::NodeStatus]) -> Vec<(&str, &v1::TransferPath)> {
    let of = |node| paths_of(node).map(|path| (name(node), path));
    let mut pairs: Vec<_> = nodes.iter().flat_map(of).collect();
    pairs.sort_by_key(|(from, path)| (*from, path.node.as_str()));
    pairs
}

fn name(node: &v1::NodeStatus) -> &str {
    node.info.as_ref().map_or("", |info| info.name.as_str())
}

fn paths_of(node: &v1::NodeStatus) -> impl Iterator<Item = &v1::TransferPath> {
    node.transfer.iter().flat_map(|report| &report.paths)
}

/// A table for people, or why there is none.
pub fn render(nodes: &[v1::NodeStatus], paint: Paint) -> String {
    if nodes.is_empty() {
        return "no node has registered".to_owned();
    }
    let rows: Vec<Vec<String>> = pairs(nodes).into_iter().map(|(from, path)| row(from, path)).collect();
    if rows.is_empty() {
        return "no node has reported that it sent KV to another one (nodes report once a second)".to_owned();
    }
    table(&HEADER, &rows, paint, |row, column, cell| {
        if TROUBLE.contains(&column) && rows[row][column] != "0" { paint.yellow(cell) } else { cell.to_owned() }
    })
}

fn row(from: &str, path: &v1::TransferPath) -> Vec<String> {
    let bandwidth = path.bytes_per_second.map_or_else(|| "-".to_owned(), |rate| format!("{}/s", bytes(rate as u64)));
    vec![
        from.to_owned(),
        path.node.clone(),
        path.transport.clone(),
        bandwidth,
        bytes(path.bytes),
        path.batches.to_string(),
        path.retries.to_string(),
        path.fallbacks.to_string(),
        bytes(path.in_flight_bytes),
        path.lanes.to_string(),
    ]
}

/// A list for programs.
pub fn json(nodes: &[v1::NodeStatus]) -> Value {
    let entry = |(from, path): (&str, &v1::TransferPath)| {
        json!({
            "from": from,
            "to": path.node,
            "to_generation": path.generation,
            "transport": path.transport,
            "bytes_per_second": path.bytes_per_second,
            "bytes": path.bytes,
            "batches": path.batches,
            "retries": path.retries,
            "fallbacks": path.fallbacks,
            "in_flight_bytes": path.in_flight_bytes,
            "lanes": path.lanes,
        })
    };
    Value::Array(pairs(nodes).into_iter().map(entry).collect())
}

/// Where a node's memory is reached, best way first; empty before its first report.
pub fn addresses(node: &v1::NodeStatus) -> Value {
    let addresses = node.transfer.iter().flat_map(|report| &report.addresses);
    addresses.map(|way| json!({ "transport": way.transport, "address": way.address })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, paths: Vec<v1::TransferPath>) -> v1::NodeStatus {
        let info = v1::NodeInfo { name: name.into(), ..Default::default() };
        let address = v1::TransferAddress { transport: "tcp".into(), address: "h:1".into() };
        let transfer = v1::TransferReport { addresses: vec![address], paths };
        v1::NodeStatus { info: Some(info), transfer: Some(transfer), ..Default::default() }
    }

    fn path(to: &str, retries: u64) -> v1::TransferPath {
        v1::TransferPath {
            node: to.into(),
            transport: "shm".into(),
            lanes: 2,
            bytes: 3 << 20,
            batches: 7,
            retries,
            fallbacks: 0,
            in_flight_bytes: 512,
            bytes_per_second: (retries == 0).then_some(1.5 * (1u64 << 30) as f64),
            ..Default::default()
        }
    }

    fn cells(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn transfer_paths_table_has_a_row_per_pair_in_order_of_names() {
        let nodes = [node("p1", vec![path("d1", 2)]), node("p0", vec![path("d1", 0), path("d0", 0)])];
        let text = render(&nodes, Paint::none());
        let rows: Vec<_> = text.lines().skip(1).map(cells).collect();
        let first = ["p0", "d0", "shm", "1.5 GiB/s", "3.0 MiB", "7", "0", "0", "512 B", "2"];
        let last = ["p1", "d1", "shm", "-", "3.0 MiB", "7", "2", "0", "512 B", "2"];
        assert_eq!((rows.len(), &rows[0][..], &rows[2][..]), (3, &first[..], &last[..]));
    }

    #[test]
    fn transfer_paths_without_a_pair_are_a_sentence_or_empty_json() {
        let quiet = [node("p0", Vec::new()), v1::NodeStatus::default()];
        assert_eq!(
            render(&quiet, Paint::none()),
            "no node has reported that it sent KV to another one (nodes report once a second)"
        );
        assert_eq!(render(&[], Paint::none()), "no node has registered");
        assert_eq!(json(&quiet), json!([]));
    }

    #[test]
    fn transfer_paths_json_has_an_object_per_pair() {
        let json = json(&[node("p0", vec![path("d0", 2)])]);
        assert_eq!((&json[0]["from"], &json[0]["to"], &json[0]["retries"]), (&json!("p0"), &json!("d0"), &json!(2)));
        assert!(json[0]["bytes_per_second"].is_null());
    }

    #[test]
    fn transfer_addresses_are_listed_if_the_node_reports_them() {
        assert_eq!(addresses(&node("p0", Vec::new())), json!([{ "transport": "tcp", "address": "h:1" }]));
        assert_eq!(addresses(&v1::NodeStatus::default()), json!([]));
    }
}
