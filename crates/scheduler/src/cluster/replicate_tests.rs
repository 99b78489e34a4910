use std::collections::BTreeSet;

use baton_types::{ErrorKind, Generation, KvEvent, Load, NodeInfo, Refused};
use proptest::prelude::*;

use super::super::tests::{SECOND, id, info, key};
use super::super::{ClusterConfig, Policies};
use super::*;

/// A chain of its own for each number.
fn chain(n: u8, blocks: u8) -> Vec<BlockHash> {
    (0..blocks).map(|block| BlockHash([[n, block]; 8].as_flattened().try_into().unwrap())).collect()
}

fn hot(n: u8, blocks: u8, per_second: f64) -> PrefixDemand {
    PrefixDemand { hashes: chain(n, blocks).into(), per_second }
}

/// Prefill nodes `p0` on with 100 blocks each, all free.
fn cluster_of(now: Instant, nodes: usize, replicas: usize) -> Cluster {
    let mut cluster = Cluster::new(ClusterConfig { replicas, ..ClusterConfig::default() }, Policies::default());
    for n in 0..nodes {
        cluster.on_node_joined(now, info(&format!("p{n}"), NodeRole::Prefill, 1));
        report(&mut cluster, now, n, Load::default());
    }
    cluster
}

fn report(cluster: &mut Cluster, now: Instant, n: usize, load: Load) {
    cluster.on_load(now, &id(&format!("p{n}")), Load { blocks_total: 100, ..load });
}

fn store(cluster: &Cluster, node: &str, sequence: u64, chain: &[BlockHash]) {
    let events: Vec<_> = chain.iter().map(|hash| KvEvent::Stored { hash: *hash, parent: None }).collect();
    cluster.on_kv_events(&id(node), Generation(1), sequence, false, &events);
}

/// What is ordered, as target and holder; the first has the key `first`, and so on.
fn order(cluster: &mut Cluster, now: Instant, hot: &[PrefixDemand], first: u128) -> Vec<(String, String)> {
    let mut names = first..;
    let orders = cluster.order_replications(now, hot, &mut || key(names.next().unwrap()));
    orders.iter().map(|order| (order.to.to_string(), order.fetch.from.to_string())).collect()
}

fn pair(to: &str, from: &str) -> (String, String) {
    (to.to_owned(), from.to_owned())
}

fn failed(kind: ErrorKind) -> FetchReport {
    FetchReport { failure: Some(Refused { kind, message: "no".to_owned() }), ..FetchReport::default() }
}

#[test]
fn replication_wants_one_more_holder_per_share_of_saved_work() {
    let wanted = [0.0, 0.25, 0.26, 0.5, 0.51, 3.0, f64::INFINITY].map(|demand| wanted_holders(demand, 4));
    assert_eq!(wanted, [1, 1, 2, 2, 3, 4, 4]);
}

#[test]
fn hot_prefix_is_replicated_to_as_many_nodes_as_demand_is_worth() {
    let now = Instant::now();
    let mut cluster = cluster_of(now, 4, 3);
    // 160 tokens take 0.17 s: at 2 a second a third of a node, at 9 more than one.
    store(&cluster, "p1", 0, &chain(1, 10));
    assert_eq!(order(&mut cluster, now, &[hot(1, 10, 1.0)], 0), [], "one holder is enough");
    assert_eq!(order(&mut cluster, now, &[hot(1, 10, 2.0)], 0), [pair("p0", "p1")]);
    assert_eq!(order(&mut cluster, now, &[hot(1, 10, 2.0)], 1), [], "what is under way counts");
    let bytes = 10 * cluster.node(&id("p0")).unwrap().info().layout.block_bytes_all_layers() as u64;
    assert_eq!(cluster.transfers.in_flight(), bytes);
    assert!(cluster.on_replication_done(now, key(0), &FetchReport::default()));
    assert!(!cluster.on_replication_done(now, key(0), &FetchReport::default()));
    assert_eq!(cluster.transfers.in_flight(), 0);
    store(&cluster, "p0", 0, &chain(1, 10));
    assert_eq!(order(&mut cluster, now, &[hot(1, 10, 9.0)], 1), [pair("p2", "p0")], "three nodes at most");
    let mut off = cluster_of(now, 2, 1);
    store(&off, "p1", 0, &chain(1, 10));
    assert_eq!(order(&mut off, now, &[hot(1, 10, 9.0)], 0), []);
}

#[test]
fn replication_orders_most_valuable_prefix_first_and_one_per_node() {
    let now = Instant::now();
    let mut cluster = cluster_of(now, 3, 3);
    store(&cluster, "p0", 0, &chain(1, 10));
    store(&cluster, "p0", 10, &chain(2, 10));
    let prefixes = [hot(1, 10, 3.0), hot(2, 10, 8.0)];
    let mut names = 0..;
    let orders = cluster.order_replications(now, &prefixes, &mut || key(names.next().unwrap()));
    let told: Vec<_> = orders.iter().map(|order| (order.to.as_str(), order.fetch.tokens, &order.hashes)).collect();
    assert_eq!(told, [("p1", 160, &prefixes[1].hashes), ("p2", 160, &prefixes[1].hashes)]);
    assert_eq!(order(&mut cluster, now, &prefixes, 2), [], "p1 and p2 have one each");
    assert!(cluster.on_replication_done(now, key(0), &FetchReport::default()));
    let orders = cluster.order_replications(now, &prefixes, &mut || key(2));
    assert_eq!((orders.len(), orders[0].to.as_str(), &orders[0].hashes), (1, "p1", &prefixes[0].hashes));
}

#[test]
fn replication_goes_to_idle_node_with_free_or_cold_blocks() {
    let now = Instant::now();
    let mut cluster = cluster_of(now, 2, 2);
    store(&cluster, "p0", 0, &chain(1, 10));
    let hot = [hot(1, 10, 4.0)];
    let full = Load { blocks_used: 20, blocks_cached: 71, ..Load::default() };
    for (load, reason) in [
        (full.clone(), "9 blocks are free"),
        (Load { blocks_cold: 10, waiting: 1, ..full.clone() }, "a request waits"),
        (Load { blocks_cold: 10, queued_tokens: 2000, ..full.clone() }, "it has two seconds of work"),
        (Load { draining: true, ..Load::default() }, "it is on its way out"),
    ] {
        report(&mut cluster, now + SECOND, 1, load);
        assert_eq!(order(&mut cluster, now + SECOND, &hot, 0), [], "{reason}");
    }
    // What has been unused for a minute makes room for what is asked for more often.
    let mut cluster = cluster_of(now, 2, 2);
    store(&cluster, "p0", 0, &chain(1, 10));
    report(&mut cluster, now, 1, Load { blocks_cold: 1, ..full });
    let rare = PrefixDemand { per_second: 0.02, ..hot[0].clone() };
    cluster.costs[0].1 = crate::cost::ClassCost::new(&baton_types::NodeProfile {
        prefill_per_token: 1.0,
        ..info("p0", NodeRole::Prefill, 1).profile
    });
    assert_eq!(order(&mut cluster, now, &[rare], 0), [], "each of two holders would be asked for every 100 s");
    assert_eq!(order(&mut cluster, now, &hot, 0), [pair("p1", "p0")]);
}

#[test]
fn replication_goes_only_to_capable_nodes_of_same_kv_class() {
    let now = Instant::now();
    let mut cluster = cluster_of(now, 1, 4);
    let others = [
        ("p1", NodeInfo { replicates_prefixes: false, ..info("p1", NodeRole::Prefill, 1) }),
        ("p2", NodeInfo { kv_class: "other".to_owned(), ..info("p2", NodeRole::Prefill, 1) }),
        ("d0", info("d0", NodeRole::Decode, 1)),
    ];
    for (name, info) in others {
        cluster.on_node_joined(now, info);
        cluster.on_load(now, &id(name), Load { blocks_total: 100, ..Load::default() });
    }
    store(&cluster, "p0", 0, &chain(1, 10));
    assert_eq!(order(&mut cluster, now, &[hot(1, 10, 9.0)], 0), []);
    // Decode nodes are no targets, and hold as well as others.
    store(&cluster, "d0", 0, &chain(2, 10));
    let orders = order(&mut cluster, now, &[hot(2, 10, 9.0)], 0);
    assert_eq!(orders, [pair("p0", "d0")]);
}

#[test]
fn failed_replication_pauses_and_its_holder_is_avoided() {
    let start = Instant::now();
    let mut cluster = cluster_of(start, 3, 2);
    let hot = [hot(1, 10, 4.0)];
    store(&cluster, "p0", 0, &chain(1, 10));
    store(&cluster, "p2", 0, &chain(1, 5));
    let mut ordered = Vec::new();
    for second in 0..300_u32 {
        let now = start + second * SECOND;
        (0..3).for_each(|n| report(&mut cluster, now, n, Load::default()));
        if let [(to, from)] = &order(&mut cluster, now, &hot, second.into())[..] {
            assert_eq!((to.as_str(), from.as_str()), (if ordered.len() % 2 == 0 { "p1" } else { "p2" }, "p0"));
            ordered.push(second);
            assert!(cluster.on_replication_done(now, key(second.into()), &failed(ErrorKind::Overloaded)));
        }
    }
    assert_eq!(ordered, [0, 1, 15, 16, 45, 46, 105, 106, 225, 226]);

    // A holder that has failed two readers is asked by no node, and the one that is left has no
    // other.
    let mut cluster = cluster_of(start, 4, 4);
    store(&cluster, "p0", 0, &chain(1, 10));
    assert_eq!(order(&mut cluster, start, &hot, 0).len(), 2);
    for n in 0..2 {
        assert!(cluster.on_replication_done(start, key(n), &failed(ErrorKind::Unavailable)));
    }
    assert_eq!(order(&mut cluster, start, &hot, 2), []);
}

#[test]
fn replication_to_earlier_generation_ends_when_node_restarts() {
    let now = Instant::now();
    let mut cluster = cluster_of(now, 2, 2);
    store(&cluster, "p0", 0, &chain(1, 4));
    let hot = [hot(1, 4, 10.0)];
    assert_eq!(order(&mut cluster, now, &hot, 0), [pair("p1", "p0")]);
    assert!(cluster.transfers.in_flight() > 0);
    cluster.on_node_joined(now, info("p1", NodeRole::Prefill, 2));
    assert_eq!(cluster.transfers.in_flight(), 0, "no node will answer for it");
    report(&mut cluster, now, 1, Load::default());
    assert_eq!(order(&mut cluster, now, &hot, 1), [pair("p1", "p0")]);
}

#[test]
fn replication_without_an_answer_times_out() {
    let start = Instant::now();
    let mut cluster = cluster_of(start, 3, 3);
    store(&cluster, "p0", 0, &chain(1, 10));
    assert_eq!(order(&mut cluster, start, &[hot(1, 10, 9.0)], 0).len(), 2);
    cluster.on_node_left(start, &id("p1"), Generation(1));
    assert!(!cluster.on_replication_done(start, key(0), &FetchReport::default()), "its target is gone");
    assert_eq!(cluster.overdue_replications(start + REPLICATION_TIMEOUT / 2), []);
    assert_eq!(cluster.overdue_replications(start + REPLICATION_TIMEOUT), [(key(1), id("p2"))]);
    assert_eq!((cluster.transfers.in_flight(), cluster.replications.under_way.len()), (0, 0));
}

proptest! {
    /// Whatever the cluster is like, each order is of a prefix that is worth it. It goes to a node
    /// that lacks it, can take it and has nothing else to do, from one that has it.
    #[test]
    fn replication_orders_respect_room_kv_class_and_bounds(
        replicas in 0usize..5,
        held in prop::collection::vec((0usize..6, 0u8..4, 1u8..12), 0..16),
        loads in prop::collection::vec((0u32..110, 0u32..40, 0u32..3, any::<bool>()), 6),
        rates in prop::collection::vec(0.0f64..8.0, 4),
        outcomes in prop::collection::vec(0u8..3, 1..12),
    ) {
        let start = Instant::now();
        let mut cluster = cluster_of(start, 6, replicas);
        let hot: Vec<_> = (0..4).map(|n| hot(n, 6 + n, rates[usize::from(n)])).collect();
        let mut sequences = [0; 6];
        for (node, n, blocks) in held {
            store(&cluster, &format!("p{node}"), sequences[node], &chain(n, blocks));
            sequences[node] += u64::from(blocks);
        }
        for (n, (taken, cold, waiting, alike)) in loads.iter().enumerate() {
            if !alike {
                let other = NodeInfo { kv_class: "other".to_owned(), ..info(&format!("p{n}"), NodeRole::Prefill, 2) };
                cluster.on_node_joined(start, other);
            }
            let cached = (*taken).min(100);
            report(&mut cluster, start, n, Load { blocks_cached: cached, blocks_cold: (*cold).min(cached), waiting: *waiting, ..Load::default() });
        }
        let mut names = 0..;
        let mut now = start;
        let mut under_way: Vec<ReplicationOrder> = Vec::new();
        for outcome in outcomes {
            let orders = cluster.order_replications(now, &hot, &mut || key(names.next().unwrap()));
            for order in orders {
                let to = cluster.node(&order.to).unwrap();
                let from = cluster.node(&order.fetch.from).unwrap();
                let chain = hot.iter().find(|hot| hot.hashes == order.hashes).unwrap();
                let blocks = |node: &ClusterNode| cluster.matches_of(&order.hashes).of(node) as usize;
                prop_assert!(blocks(to) < order.hashes.len() && blocks(from) == order.hashes.len());
                prop_assert!(room(to) >= order.hashes.len() - blocks(to) && to.load().waiting == 0);
                prop_assert_eq!(&to.info().kv_class, &from.info().kv_class);
                under_way.push(order.clone());
                let holders = cluster.nodes().filter(|node| blocks(node) == order.hashes.len()).count();
                let coming = under_way.iter().filter(|other| other.hashes == order.hashes).count();
                prop_assert!(holders + coming <= replicas);
                prop_assert!(chain.per_second * 60.0 >= (holders + coming) as f64);
            }
            let targets: BTreeSet<_> = under_way.iter().map(|order| &order.to).collect();
            prop_assert_eq!(targets.len(), under_way.len(), "one replication at a time to a node");
            prop_assert!(under_way.len() <= MAX_REPLICATIONS);
            if let (Some(order), true) = (under_way.pop(), outcome > 0) {
                let report = if outcome == 1 { FetchReport::default() } else { failed(ErrorKind::Unavailable) };
                prop_assert!(cluster.on_replication_done(now, order.key, &report));
            }
            now += SECOND;
            under_way.retain(|order| cluster.replications.under_way.contains_key(&order.key));
        }
        for order in under_way {
            cluster.on_replication_done(now, order.key, &FetchReport::default());
        }
        cluster.overdue_replications(now + REPLICATION_TIMEOUT);
        prop_assert_eq!(cluster.transfers.in_flight(), 0);
    }
}
