//! `baton nodes`.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::args::NodesArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::paths;
use crate::screen::{Paint, Waiting, line};
use crate::table::node_table;
use crate::watch::watch;

const HEADER: [&str; 13] = [
    "NAME",
    "ROLE",
    "STATE",
    "RUNNING",
    "WAITING",
    "PLACED",
    "KV BLOCKS",
    "CACHED TOKENS",
    "PREFIX HITS",
    "REPORT",
    "GENERATION",
    "KV CLASS",
    "ADDRESS",
];
/// Column of the state.
const STATE: usize = 2;

/// Prints the nodes: once, again and again, or after they have proved that every block is accounted
/// for.
pub async fn run(args: &NodesArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    if args.check {
        return check(&conductor, json).await;
    }
    watch(args.watch, json, async || look(args, &conductor, json).await).await
}

async fn look(args: &NodesArgs, conductor: &Conductor, json: bool) -> Result<String, CliError> {
    let nodes = conductor.cluster().list_nodes(v1::ListNodesRequest {}).await?.into_inner().nodes;
    if json {
        let value = match args.transport {
            true => paths::json(&nodes),
            false => Value::Array(nodes.iter().map(node_json).collect()),
        };
        return Ok(value.to_string());
    }
    Ok(match args.transport {
        true => paths::render(&nodes, Paint::stdout()),
        false if nodes.is_empty() => "no node has registered".to_owned(),
        false => render(&nodes, Paint::stdout()),
    })
}

async fn check(conductor: &Conductor, json: bool) -> Result<(), CliError> {
    let mut waiting = Waiting::new("the nodes are checking their blocks", json);
    let nodes = conductor.cluster().check_integrity(v1::CheckClusterIntegrityRequest {}).await?.into_inner().nodes;
    waiting.clear();
    if json {
        let entry = |node: &v1::NodeIntegrity| {
            let problem = (!node.problem.is_empty()).then_some(&node.problem);
            json!({ "node": node.node, "ok": problem.is_none(), "problem": problem, "load": node.load.as_ref().map(load_json) })
        };
        line(&Value::Array(nodes.iter().map(entry).collect()).to_string())?;
    } else {
        let paint = Paint::stdout();
        for node in &nodes {
            let verdict = if node.problem.is_empty() { paint.green("ok") } else { paint.red(&node.problem) };
            line(&format!("{}: {verdict}", node.node))?;
        }
    }
    match nodes.iter().find(|node| !node.problem.is_empty()) {
        Some(node) => Err(CliError::Cluster(format!("{}: {}", node.node, node.problem))),
        None => Ok(()),
    }
}

fn render(nodes: &[v1::NodeStatus], paint: Paint) -> String {
    let rows: Vec<Vec<String>> = nodes.iter().map(row).collect();
    node_table(&HEADER, &rows, STATE, paint)
}

fn row(node: &v1::NodeStatus) -> Vec<String> {
    let info = node.info.clone().unwrap_or_default();
    let load = node.load.unwrap_or_default();
    let hits = match load.prefix_queries {
        0 => "-".to_owned(),
        queries => format!("{:.0} %", 100.0 * load.prefix_hits as f64 / queries as f64),
    };
    vec![
        info.name,
        info.role,
        node.state.clone(),
        load.running.to_string(),
        load.waiting.to_string(),
        node.placed.to_string(),
        format!("{}/{}", load.blocks_used, load.blocks_total),
        cached_tokens(node).to_string(),
        hits,
        format!("{:.1} s ago", node.report_age_s),
        info.generation,
        info.kv_class,
        info.address,
    ]
}

fn cached_tokens(node: &v1::NodeStatus) -> u64 {
    let block_tokens = node.info.as_ref().and_then(|info| Some(info.layout.as_ref()?.block_tokens)).unwrap_or(0);
    u64::from(node.load.unwrap_or_default().blocks_cached) * u64::from(block_tokens)
}

fn node_json(node: &v1::NodeStatus) -> Value {
    let info = node.info.clone().unwrap_or_default();
    let layout = info.layout.unwrap_or_default();
    json!({
        "name": info.name,
        "role": info.role,
        "state": node.state,
        "generation": info.generation,
        "address": info.address,
        "model": info.model,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "kv_class": info.kv_class,
        "kv_layout": {
            "model_fingerprint": layout.model_fingerprint,
            "num_layers": layout.num_layers,
            "num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "block_tokens": layout.block_tokens,
            "dtype": layout.dtype,
        },
        "transfer": paths::addresses(node),
        "load": node.load.as_ref().map(load_json),
        "cached_tokens": cached_tokens(node),
        "placed": node.placed,
        "report_age_s": node.report_age_s,
    })
}

fn load_json(load: &v1::Load) -> Value {
    json!({
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "kv_tokens": load.kv_tokens,
        "blocks_total": load.blocks_total,
        "blocks_used": load.blocks_used,
        "blocks_cached": load.blocks_cached,
        "blocks_reserved": load.blocks_reserved,
        "prefix_queries": load.prefix_queries,
        "prefix_hits": load.prefix_hits,
        "draining": load.draining,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> v1::NodeStatus {
        let layout = v1::KvLayout { block_tokens: 16, num_layers: 30, ..Default::default() };
        let info = v1::NodeInfo {
            name: "prefill-0".into(),
            role: "prefill".into(),
            generation: "1a".into(),
            address: "http://127.0.0.1:9".into(),
            kv_class: "cpu-int8-3".into(),
            layout: Some(layout),
            ..Default::default()
        };
        let load = v1::Load {
            running: 2,
            waiting: 3,
            blocks_total: 100,
            blocks_used: 40,
            blocks_cached: 5,
            prefix_queries: 8,
            prefix_hits: 6,
            ..Default::default()
        };
        v1::NodeStatus {
            info: Some(info),
            state: "ready".into(),
            load: Some(load),
            report_age_s: 0.25,
            placed: 4,
            transfer: None,
        }
    }

    #[test]
    fn nodes_table_has_a_row_per_node() {
        let text = render(&[node()], Paint::none());
        let cells: Vec<&str> =
            text.lines().nth(1).unwrap().split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        assert_eq!(
            cells,
            [
                "prefill-0",
                "prefill",
                "ready",
                "2",
                "3",
                "4",
                "40/100",
                "80",
                "75 %",
                "0.2 s ago",
                "1a",
                "cpu-int8-3",
                "http://127.0.0.1:9"
            ]
        );
    }

    #[test]
    fn nodes_json_has_an_object_per_node() {
        let json = node_json(&node());
        assert_eq!(
            (&json["name"], &json["load"]["waiting"], &json["cached_tokens"]),
            (&json!("prefill-0"), &json!(3), &json!(80))
        );
        assert_eq!((&json["kv_layout"]["num_layers"], &json["transfer"]), (&json!(30), &json!([])));
        assert_eq!(json["kv_class"], "cpu-int8-3");
        assert!(node_json(&v1::NodeStatus::default())["load"].is_null(), "a node that has not reported has no load");
    }
}
