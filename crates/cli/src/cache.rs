//! `baton cache`.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::args::{CacheArgs, CacheClearArgs, CacheCommand, CacheLookupArgs};
use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::{Paint, line};
use crate::table::{node_table, table};
use crate::watch::watch;

/// Prints what the caches hold, looks a prompt up in them, or clears them.
pub async fn run(args: &CacheArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    match &args.command {
        Some(CacheCommand::Lookup(args)) => lookup(args, conductor, json).await,
        Some(CacheCommand::Clear(args)) => clear(args, conductor, json).await,
        None => status(args, conductor, json).await,
    }
}

async fn status(args: &CacheArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    let look = async || {
        let request = v1::CacheStatusRequest { top: args.top };
        let status = conductor.cluster().cache_status(request).await?.into_inner();
        Ok(if json { status_json(&status).to_string() } else { render_status(&status, Paint::stdout()) })
    };
    watch(args.watch, json, look).await
}

async fn lookup(args: &CacheLookupArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let request = v1::GenerateRequest { prompt: Some(args.prompt.load()?), ..Default::default() };
    let conductor = Conductor::connect(conductor).await?;
    let request = v1::CacheLookupRequest { request: Some(request) };
    let found = conductor.cluster().cache_lookup(request).await?.into_inner();
    Ok(line(&if json { lookup_json(&found).to_string() } else { render_lookup(&found, Paint::stdout()) })?)
}

async fn clear(args: &CacheClearArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    let request = v1::ClearCacheRequest { node: args.node.clone().unwrap_or_default() };
    let told = conductor.cluster().clear_cache(request).await?.into_inner();
    let text =
        if json { json!({ "nodes": told.nodes, "held_blocks": told.held_blocks }).to_string() } else { cleared(&told) };
    Ok(line(&text)?)
}

fn cleared(told: &v1::ClearCacheResponse) -> String {
    if told.nodes.is_empty() {
        return "no node has a session with the conductor".to_owned();
    }
    let held = told.nodes.iter().zip(&told.held_blocks).filter(|(_, blocks)| **blocks > 0);
    let held: Vec<_> = held.map(|(node, blocks)| format!("{blocks} of {node}")).collect();
    let left = match held.as_slice() {
        [] => String::new(),
        held => format!("\nblocks that requests hold stay until they end: {}", held.join(", ")),
    };
    format!("told to clear: {}{left}", told.nodes.join(", "))
}

const NODES: [&str; 10] =
    ["NODE", "ROLE", "STATE", "USED", "CACHED", "BLOCKS", "SSD", "PREFIX HITS", "OF THE SSD", "FETCHED"];
const PREFIXES: [&str; 4] = ["PREFIX", "TOKENS", "REQUESTS", "HOLDERS"];
const MATCHES: [&str; 3] = ["NODE", "ROLE", "TOKENS"];
/// Column of the state.
const STATE: usize = 2;
/// Nodes of a prefix that people are told by name.
const NAMES: usize = 4;

fn render_status(status: &v1::CacheStatusResponse, paint: Paint) -> String {
    let nodes: Vec<_> = status.nodes.iter().map(node_row).collect();
    let node_table = node_table(&NODES, &nodes, STATE, paint);
    let prefixes: Vec<_> = status.prefixes.iter().map(prefix_row).collect();
    if prefixes.is_empty() {
        format!("{node_table}\n\nno prefix came more than once of late")
    } else {
        format!("{node_table}\n\n{}", table(&PREFIXES, &prefixes, paint, |_, _, cell| cell.to_owned()))
    }
}

fn node_row(node: &v1::NodeCache) -> Vec<String> {
    let load = node.load.unwrap_or_default();
    // Without a tier, and before the first block is there, nothing can come from it.
    let has_ssd = load.blocks_ssd > 0 || load.prefix_hits_ssd > 0;
    let percent = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.0} %", 100.0 * rate));
    vec![
        node.node.clone(),
        node.role.clone(),
        node.state.clone(),
        load.blocks_used.to_string(),
        load.blocks_cached.to_string(),
        load.blocks_total.to_string(),
        ssd(&load),
        percent(hit_rate(&load, load.prefix_hits)),
        percent(hit_rate(&load, load.prefix_hits_ssd).filter(|_| has_ssd)),
        percent(hit_rate(&load, load.prefix_hits_fetched)),
    ]
}

fn ssd(load: &v1::Load) -> String {
    match load.ssd_write_failures {
        0 => load.blocks_ssd.to_string(),
        failures => format!("{}, SSD off: {failures} writes in a row failed", load.blocks_ssd),
    }
}

/// Part of the prompts' tokens that so many are; none before the first prompt.
fn hit_rate(load: &v1::Load, hits: u64) -> Option<f64> {
    (load.prefix_queries > 0).then(|| hits as f64 / load.prefix_queries as f64)
}

fn prefix_row(prefix: &v1::HotPrefix) -> Vec<String> {
    let named = prefix.nodes.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
    let nodes = match prefix.nodes.len() {
        0 => "-".to_owned(),
        nodes if nodes > NAMES => format!("{named} and {} more", nodes - NAMES),
        _ => named,
    };
    let short: String = prefix.hash.chars().take(8).collect();
    vec![short, prefix.tokens.to_string(), format!("{:.1}", prefix.requests), nodes]
}

fn render_lookup(found: &v1::CacheLookupResponse, paint: Paint) -> String {
    let head = format!("prompt  {} tokens", found.prompt_tokens);
    if found.matches.is_empty() {
        return format!("{head}\n\nno node holds the beginning of it");
    }
    let rows: Vec<_> =
        found.matches.iter().map(|row| vec![row.node.clone(), row.role.clone(), row.tokens.to_string()]).collect();
    format!("{head}\n\n{}", table(&MATCHES, &rows, paint, |_, _, cell| cell.to_owned()))
}

fn status_json(status: &v1::CacheStatusResponse) -> Value {
    let node = |node: &v1::NodeCache| {
        let load = node.load.unwrap_or_default();
        json!({
            "node": node.node, "role": node.role, "state": node.state, "block_tokens": node.block_tokens,
            "blocks_total": load.blocks_total, "blocks_used": load.blocks_used, "blocks_cached": load.blocks_cached,
            "blocks_ssd": load.blocks_ssd, "ssd_write_failures": load.ssd_write_failures,
            "prefix_queries": load.prefix_queries, "prefix_hits": load.prefix_hits, "hit_rate": hit_rate(&load, load.prefix_hits),
            "prefix_hits_ssd": load.prefix_hits_ssd, "hit_rate_ssd": hit_rate(&load, load.prefix_hits_ssd),
            "prefix_hits_fetched": load.prefix_hits_fetched,
            "hit_rate_fetched": hit_rate(&load, load.prefix_hits_fetched),
            "indexed_blocks": node.indexed_blocks,
        })
    };
    let prefix = |prefix: &v1::HotPrefix| {
        json!({
            "hash": prefix.hash, "tokens": prefix.tokens, "requests": prefix.requests, "nodes": prefix.nodes,
        })
    };
    json!({
        "nodes": status.nodes.iter().map(node).collect::<Vec<_>>(),
        "prefixes": status.prefixes.iter().map(prefix).collect::<Vec<_>>(),
    })
}

fn lookup_json(found: &v1::CacheLookupResponse) -> Value {
    let row = |row: &v1::CacheMatch| json!({ "node": row.node, "role": row.role, "tokens": row.tokens });
    json!({ "prompt_tokens": found.prompt_tokens, "matches": found.matches.iter().map(row).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> v1::CacheStatusResponse {
        let load = v1::Load {
            blocks_total: 100,
            blocks_used: 7,
            blocks_cached: 60,
            blocks_ssd: 500,
            prefix_queries: 8,
            prefix_hits: 6,
            prefix_hits_ssd: 2,
            prefix_hits_fetched: 1,
            ..Default::default()
        };
        let node = |name: &str, load| v1::NodeCache {
            node: name.into(),
            role: "prefill".into(),
            state: "ready".into(),
            load: Some(load),
            ..Default::default()
        };
        let nodes = (0..6).map(|n| format!("p{n}")).collect();
        let prefix = v1::HotPrefix { hash: "0123456789abcdef".into(), tokens: 640, requests: 12.25, nodes };
        v1::CacheStatusResponse {
            nodes: vec![node("p0", load), node("p1", v1::Load::default())],
            prefixes: vec![prefix],
        }
    }

    #[test]
    fn cache_table_shows_nodes_and_hot_prefixes() {
        let expected = "\
NODE  ROLE     STATE  USED  CACHED  BLOCKS  SSD  PREFIX HITS  OF THE SSD  FETCHED
p0    prefill  ready  7     60      100     500  75 %         25 %        12 %
p1    prefill  ready  0     0       0       0    -            -           -

PREFIX    TOKENS  REQUESTS  HOLDERS
01234567  640     12.2      p0, p1, p2, p3 and 2 more";
        assert_eq!(render_status(&status(), Paint::none()), expected);
        let cold = v1::CacheStatusResponse { prefixes: Vec::new(), ..status() };
        assert!(render_status(&cold, Paint::none()).ends_with("\n\nno prefix came more than once of late"));
        let json = status_json(&status());
        assert_eq!((&json["nodes"][0]["hit_rate"], &json["nodes"][1]["hit_rate"]), (&json!(0.75), &Value::Null));
        let off = v1::Load { blocks_ssd: 3, ssd_write_failures: 8, ..v1::Load::default() };
        assert_eq!(ssd(&off), "3, SSD off: 8 writes in a row failed");
        let unused = v1::Load { prefix_queries: 8, ..v1::Load::default() };
        let unused = node_row(&v1::NodeCache { load: Some(unused), ..v1::NodeCache::default() });
        assert_eq!(unused[7..], ["0 %", "-", "0 %"], "no block was ever on the SSD");
        assert_eq!(
            (&json["nodes"][0]["hit_rate_ssd"], &json["nodes"][0]["hit_rate_fetched"]),
            (&json!(0.25), &json!(0.125))
        );
        assert_eq!(json["prefixes"][0]["nodes"].as_array().unwrap().len(), 6);
    }

    #[test]
    fn cache_lookup_table_has_a_row_per_node() {
        let row = v1::CacheMatch { node: "d0".into(), role: "decode".into(), tokens: 64 };
        let found = v1::CacheLookupResponse { prompt_tokens: 100, matches: vec![row] };
        let text = render_lookup(&found, Paint::none());
        assert_eq!(text, "prompt  100 tokens\n\nNODE  ROLE    TOKENS\nd0    decode  64");
        let none = v1::CacheLookupResponse { prompt_tokens: 3, ..Default::default() };
        assert!(render_lookup(&none, Paint::none()).contains("no node holds"));
        assert_eq!(lookup_json(&found)["matches"][0]["tokens"], 64);
    }
}
