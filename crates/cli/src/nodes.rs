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

const HEADER: [&str; 14] = [
    "NAME",
    "ROLE",
    "STATE",
    "RUNNING",
    "WAITING",
    "PLACED",
    "KV BLOCKS",
    "REPORT",
    "KV TOKENS",
    "CONTEXT",
    "GENERATION",
    "KV DTYPE",
    "KV CLASS",
    "ADDRESS",
];
/// Columns that say how a node is: they fit a terminal of 80 columns. The others say what it is.
const NARROW: usize = 8;
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
    let listed = conductor.cluster().list_nodes(v1::ListNodesRequest {}).await?.into_inner();
    let nodes = &listed.nodes;
    if json {
        let value = if args.transport {
            paths::json(nodes)
        } else {
            nodes.iter().map(node_json).chain(listed.unjoined.iter().map(unjoined_json)).collect()
        };
        return Ok(value.to_string());
    }
    Ok(match args.transport {
        true => paths::render(nodes, Paint::stdout()),
        false if nodes.is_empty() && listed.unjoined.is_empty() => "no node has registered".to_owned(),
        false => render(&listed, args.wide, Paint::stdout()),
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

fn render(listed: &v1::ListNodesResponse, is_wide: bool, paint: Paint) -> String {
    let columns = if is_wide { HEADER.len() } else { NARROW };
    let mut rows: Vec<_> = listed.nodes.iter().map(row).chain(listed.unjoined.iter().map(unjoined_row)).collect();
    rows.iter_mut().for_each(|row| row.truncate(columns));
    let table = node_table(&HEADER[..columns], &rows, STATE, paint);
    let why = |node: &v1::UnjoinedNode| format!("{} is {}: {}", node.name, node.state, node.reason);
    let why: Vec<_> = listed.unjoined.iter().map(why).collect();
    let mut text = table;
    if let Some(sizes) = sizes(&listed.nodes) {
        text.push_str(&format!("\n\n{sizes}"));
    }
    if !why.is_empty() {
        text.push_str(&format!("\n\n{}", why.join("\n")));
    }
    text
}

/// What the nodes that report hold; `None` if none does.
fn sizes(nodes: &[v1::NodeStatus]) -> Option<String> {
    let here = || nodes.iter().filter(|node| kv_tokens(node) > 0);
    let context = here().filter_map(|node| Some(node.info.as_ref()?.context_length)).max()?;
    let of_role = |role: &str| -> u64 {
        let of_role = here().filter(|node| node.info.as_ref().is_some_and(|info| info.role == role));
        of_role.map(kv_tokens).sum()
    };
    let prefill = of_role("prefill");
    let decode = of_role("decode");
    Some(format!("KV cache, tokens: {prefill} prefill, {decode} decode. Context: {context} tokens."))
}

fn row(node: &v1::NodeStatus) -> Vec<String> {
    let info = node.info.clone().unwrap_or_default();
    // A node that has left has none.
    let of_load = |figure: &dyn Fn(&v1::Load) -> String| node.load.as_ref().map_or_else(none, figure);
    vec![
        info.name,
        info.role,
        node.state.clone(),
        of_load(&|load| load.running.to_string()),
        of_load(&|load| load.waiting.to_string()),
        node.placed.to_string(),
        of_load(&|load| format!("{}/{}", load.blocks_used, load.blocks_total)),
        format!("{:.1} s ago", node.report_age_s),
        of_load(&|_| kv_tokens(node).to_string()),
        info.context_length.to_string(),
        info.generation,
        info.layout.map_or_else(none, |layout| layout.dtype),
        info.kv_class,
        info.address,
    ]
}

/// A node that asked to join and has no session.
fn unjoined_row(node: &v1::UnjoinedNode) -> Vec<String> {
    let mut row = vec![none(); HEADER.len()];
    row[0].clone_from(&node.name);
    row[1].clone_from(&node.role);
    row[STATE].clone_from(&node.state);
    row[HEADER.len() - 7] = format!("{:.1} s ago", node.asked_age_s);
    row[HEADER.len() - 4].clone_from(&node.generation);
    row[HEADER.len() - 1].clone_from(&node.address);
    row
}

fn none() -> String {
    "-".to_owned()
}

fn unjoined_json(node: &v1::UnjoinedNode) -> Value {
    json!({
        "name": node.name, "role": node.role, "state": node.state, "generation": node.generation,
        "address": node.address, "reason": node.reason, "report_age_s": node.asked_age_s, "load": null,
    })
}

fn block_tokens(node: &v1::NodeStatus) -> u64 {
    let layout = node.info.as_ref().and_then(|info| info.layout.as_ref());
    layout.map_or(0, |layout| u64::from(layout.block_tokens))
}

fn cached_tokens(node: &v1::NodeStatus) -> u64 {
    u64::from(node.load.unwrap_or_default().blocks_cached) * block_tokens(node)
}

/// Tokens that the node's KV cache holds.
fn kv_tokens(node: &v1::NodeStatus) -> u64 {
    u64::from(node.load.unwrap_or_default().blocks_total) * block_tokens(node)
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
        "kv_tokens": kv_tokens(node),
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
        let layout = v1::KvLayout { block_tokens: 16, num_layers: 30, dtype: "int8".into(), ..Default::default() };
        let info = v1::NodeInfo {
            name: "prefill-0".into(),
            role: "prefill".into(),
            generation: "1a".into(),
            address: "http://127.0.0.1:9".into(),
            kv_class: "cpu-int8-3".into(),
            layout: Some(layout),
            context_length: 2048,
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
            ..Default::default()
        }
    }

    #[test]
    fn lost_node_has_no_figures_and_unjoined_node_its_reason() {
        let lost = v1::NodeStatus { state: "lost".into(), load: None, report_age_s: 12.0, ..node() };
        let unjoined = v1::UnjoinedNode {
            name: "decode-1".into(),
            role: "decode".into(),
            generation: "2b".into(),
            address: "http://10.9.9.9:7100".into(),
            state: "unreachable".into(),
            reason: "cannot reach http://10.9.9.9:7100: Network is unreachable".into(),
            asked_age_s: 1.5,
        };
        assert_eq!(unjoined_json(&unjoined)["state"], "unreachable");
        let expected = "\
NAME       ROLE     STATE        RUNNING  WAITING  PLACED  KV BLOCKS  REPORT      KV TOKENS  CONTEXT  GENERATION  KV DTYPE  KV CLASS    ADDRESS
prefill-0  prefill  lost         -        -        4       -          12.0 s ago  -          2048     1a          int8      cpu-int8-3  http://127.0.0.1:9
decode-1   decode   unreachable  -        -        -       -          1.5 s ago   -          -        2b          -         -           http://10.9.9.9:7100

decode-1 is unreachable: cannot reach http://10.9.9.9:7100: Network is unreachable";
        let listed = v1::ListNodesResponse { nodes: vec![lost], unjoined: vec![unjoined] };
        assert_eq!(render(&listed, true, Paint::none()), expected);
    }

    #[test]
    fn nodes_table_has_a_row_per_node() {
        let text = render(&v1::ListNodesResponse { nodes: vec![node()], unjoined: Vec::new() }, true, Paint::none());
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
                "0.2 s ago",
                "1600",
                "2048",
                "1a",
                "int8",
                "cpu-int8-3",
                "http://127.0.0.1:9"
            ]
        );
        let text = render(&v1::ListNodesResponse { nodes: vec![node()], unjoined: Vec::new() }, false, Paint::none());
        let sizes = "0.2 s ago\n\nKV cache, tokens: 1600 prefill, 0 decode. Context: 2048 tokens.";
        assert!(text.lines().all(|line| line.len() <= 80) && text.ends_with(sizes), "{text}");
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
        assert_eq!((&json["load"]["prefix_queries"], &json["load"]["prefix_hits"]), (&json!(8), &json!(6)));
        assert!(node_json(&v1::NodeStatus::default())["load"].is_null(), "a node that has not reported has no load");
    }
}
