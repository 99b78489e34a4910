//! Clients that leave, at each point of a request's way: no node keeps anything for them a second
//! later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster_tests::{Ask, Cluster, Process};
use baton_proto::v1;
use baton_types::Random;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const REQUESTS: u64 = 10_000;
const AT_ONCE: usize = 32;

/// A request of its own, and after how long its client leaves.
fn request(n: u64) -> (Ask, Duration) {
    let z = Random::new(n).next_u64();
    let tokens: Vec<u32> = (0..64 + z % 600).map(|i| 32 + ((i * 7 + n * 13) % 90) as u32).collect();
    let ask = Ask::tokens(tokens).max_tokens(400).ignore_eos().seeded(n, 0.7);
    // Up to 33 ms, while the prompt is on its way, or 131 ms.
    let longest = if n.is_multiple_of(4) { 0x1_ffff } else { 0x7fff };
    (ask, Duration::from_micros(z >> 20 & longest))
}

/// Asks, and leaves. Whether it was served all the same.
async fn abandon(cluster: &Cluster, n: u64) -> bool {
    let (ask, after) = request(n);
    let mut client = cluster.inference();
    let served = async {
        let mut stream = client.generate(ask.0).await?.into_inner();
        while stream.message().await?.is_some() {}
        Ok::<_, tonic::Status>(())
    };
    tokio::time::timeout(after, served).await.is_ok_and(|served| served.is_ok())
}

async fn aborts(
    nodes: &[Process],
    metric: &str,
    stages: &[&'static str],
) -> anyhow::Result<BTreeMap<&'static str, f64>> {
    let mut sums = BTreeMap::new();
    for stage in stages.iter().copied() {
        for node in nodes {
            *sums.entry(stage).or_insert(0.0) += node.metric(&format!("{metric}{{stage=\"{stage}\"}}")).await?;
        }
    }
    Ok(sums)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_requests_release_blocks_and_placements() -> anyhow::Result<()> {
    // Few places, so that some wait; slow links would make pushes longer than they are.
    let flags = ["--mock-base-us", "2000", "--mock-token-us", "60", "--max-running", "24"];
    let cluster = Arc::new(Cluster::mock().prefill(2).decode(2).node_flags(&flags).start().await?);
    let places = Arc::new(Semaphore::new(AT_ONCE));
    // Sequences migrate while decode nodes take turns to drain.
    let draining = {
        let cluster = Arc::clone(&cluster);
        async move {
            for turn in 0.. {
                let node = format!("decode-{}", turn % 2);
                cluster.operator().drain(v1::DrainRequest { node: node.clone() }).await?;
                tokio::time::sleep(Duration::from_millis(60)).await;
                cluster.operator().undrain(v1::UndrainRequest { node }).await?;
                tokio::time::sleep(Duration::from_millis(60)).await;
            }
            Ok::<(), tonic::Status>(())
        }
    };
    let began = Instant::now();
    let abandoned = {
        let cluster = Arc::clone(&cluster);
        async move {
            let mut tasks = JoinSet::new();
            for n in 0..REQUESTS {
                let cluster = Arc::clone(&cluster);
                let places = Arc::clone(&places);
                let place = places.acquire_owned().await.unwrap();
                tasks.spawn(async move {
                    let served = abandon(&cluster, n).await;
                    drop(place);
                    served
                });
            }
            tasks.join_all().await.into_iter().filter(|served| !served).count()
        }
    };
    let abandoned = tokio::select! {
        abandoned = abandoned => abandoned,
        ended = draining => panic!("{ended:?}"),
    };
    let took = began.elapsed();
    for node in ["decode-0", "decode-1"] {
        cluster.operator().undrain(v1::UndrainRequest { node: node.into() }).await?;
    }
    let left = Instant::now();
    cluster
        .wait_for("a cluster that holds nothing", Duration::from_secs(1), || async {
            let placed: u32 = cluster.nodes().await?.iter().map(|node| node.placed).sum();
            let loads = cluster.check_integrity().await?;
            Ok(placed == 0
                && loads
                    .iter()
                    .all(|(_, load)| load.running + load.waiting + load.blocks_used + load.blocks_reserved == 0))
        })
        .await?;
    let of_prefill = ["queued", "computing", "granted", "pushing", "handing_off"];
    let of_decode = ["granted", "waiting", "migrating", "running"];
    let prefill = aborts(&cluster.prefill, "baton_prefill_aborts_total", &of_prefill).await?;
    let decode = aborts(&cluster.decode, "baton_decode_aborts_total", &of_decode).await?;
    println!("{abandoned} of {REQUESTS} abandoned in {took:?}; nothing was kept {:?} after the last", left.elapsed());
    println!("at prefill nodes: {prefill:?}; at decode nodes: {decode:?}");
    assert_eq!(abandoned, REQUESTS as usize);
    for (stage, count) in prefill.iter().chain(&decode) {
        // A migration takes a few milliseconds, and happens to few.
        let least = if *stage == "migrating" { 1.0 } else { 20.0 };
        assert!(*count >= least, "{stage}: {count}: too few to say anything");
    }
    Ok(())
}
