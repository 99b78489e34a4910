//! How long a placement takes: 500 prefill and 500 decode nodes, prompts of 128 blocks, half of
//! them with a prefix on some nodes. The whole of `Cluster::place` is timed, without and with the
//! record of its grounds, and the prefix lookup alone beside it.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use baton_scheduler::{AdmissionKind, Cluster, ClusterConfig, PlacementKind, PlacementRequest, Policies};
use baton_types::{
    Attempt, BlockHash, Generation, KvDtype, KvEvent, KvLayout, NodeId, NodeInfo, NodeProfile, NodeRole, Random,
    RequestId, RequestKey, Slo, Tbt, Ttft, quantile,
};

const NODES: u32 = 1000;
const BLOCKS: usize = 128;
const ROUNDS: u64 = 20_000;

fn info(n: u32) -> NodeInfo {
    let role = if n.is_multiple_of(2) { NodeRole::Prefill } else { NodeRole::Decode };
    let layout = KvLayout {
        model: 1,
        num_layers: 80,
        num_kv_heads: 8,
        head_dim: 128,
        block_tokens: 512,
        dtype: KvDtype::F16,
        num_blocks: 5000,
    };
    let profile = NodeProfile {
        prefill_base: 5e-3,
        prefill_per_token: 1e-4,
        prefill_per_token_pair: 4e-9,
        decode_base: 27e-3,
        decode_per_sequence: 1.4e-4,
        decode_per_kv_token: 3e-8,
        ..NodeProfile::default()
    };
    NodeInfo {
        node: NodeId::new(&format!("node-{n:04}")).expect("a name"),
        role,
        generation: Generation(1),
        address: String::new(),
        model: "bench".to_owned(),
        vocab_size: 1,
        context_length: 1 << 20,
        kv_class: "bench".to_owned(),
        layout,
        profile,
        vocabulary: String::new(),
    }
}

fn chain(seed: u64) -> Vec<BlockHash> {
    (0..BLOCKS as u64).map(|block| BlockHash((u128::from(seed) << 64 | u128::from(block)).to_le_bytes())).collect()
}

/// Half of the chains are held by 16 nodes each.
fn cluster(now: Instant, kind: PlacementKind) -> Cluster {
    let config = ClusterConfig { bandwidth: 87e9, ..ClusterConfig::default() };
    let mut cluster = Cluster::new(config, Policies::new(kind, AdmissionKind::default()));
    (0..NODES).for_each(|n| cluster.on_node_joined(now, info(n)));
    for n in 0..NODES {
        let held = (0..32).filter(|seed| (u64::from(n) + seed) % 64 == 0);
        let events: Vec<_> = held.flat_map(chain).map(|hash| KvEvent::Stored { hash, parent: None }).collect();
        cluster.on_kv_events(&info(n).node, Generation(1), 0, false, &events);
    }
    cluster
}

/// What a placement may take at the 99th percentile once the prefix lookup is done.
const LIMIT: Duration = Duration::from_micros(200);

fn measure(kind: PlacementKind, explained: bool) -> bool {
    let mut now = Instant::now();
    let mut cluster = cluster(now, kind);
    let index = cluster.index();
    let chains: Vec<_> = (0..64).map(chain).collect();
    let mut times = Vec::new();
    let mut lookups = Vec::new();
    let mut random = Random::new(1);
    let mut rng = || random.next_u64();
    for n in 0..ROUNDS {
        now += Duration::from_millis(2);
        let key = |n: u64| RequestKey { request: RequestId(n.into()), attempt: Attempt(0) };
        let request = PlacementRequest {
            key: key(n),
            prompt_tokens: 512 * BLOCKS as u32 + 100,
            block_hashes: &chains[(n % 64) as usize],
            max_tokens: 1024,
            wants_decode: true,
            slo: Slo { ttft: Some(Ttft(Duration::from_secs(30))), tbt: Some(Tbt(Duration::from_millis(100))) },
            ..PlacementRequest::default()
        };
        let begin = Instant::now();
        index.matches(request.block_hashes);
        lookups.push(begin.elapsed());
        let begin = Instant::now();
        let placed = if explained {
            cluster.place_explained(now, &request, &mut rng).decision.is_ok()
        } else {
            cluster.place(now, &request, &mut rng).is_ok()
        };
        times.push(begin.elapsed());
        std::hint::black_box(placed);
        // About 4,000 prompts wait, and as many sequences run.
        if n >= 4000 {
            cluster.on_first_token(now, key(n - 4000));
        }
        if n >= 8000 {
            cluster.on_ended(now, key(n - 8000));
        }
    }
    times.drain(..8000);
    lookups.drain(..8000);
    times.sort();
    lookups.sort();
    let [p50, p99] = [0.5, 0.99].map(|q| quantile(&times, q));
    let [lookup_p50, lookup_p99] = [0.5, 0.99].map(|q| quantile(&lookups, q));
    println!(
        "{:12}  {:9}  place p50 {p50:>9.1?}  p99 {p99:>9.1?}   prefix lookup alone p50 {lookup_p50:>9.1?}  p99 {lookup_p99:>9.1?}",
        kind.as_str(),
        if explained { "explained" } else { "" }
    );
    p99.saturating_sub(lookup_p50) < LIMIT
}

fn main() -> ExitCode {
    println!("{NODES} nodes, prompts of {BLOCKS} blocks, 8 prompts waiting per prefill node");
    let runs = PlacementKind::ALL.into_iter().flat_map(|kind| [(kind, false), (kind, true)]);
    let within = runs.filter(|(kind, explained)| !measure(*kind, *explained)).count() == 0;
    if !within {
        println!("more than {LIMIT:?} at the 99th percentile beyond the prefix lookup");
    }
    if within { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
