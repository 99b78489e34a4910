//! Several conductors with one etcd: one places for all, and any of them may go.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, Etcd, Process, signal};
use baton_proto::v1::generate_response::Event;
use baton_proto::{PROTOCOL_VERSION, v1};
use baton_types::ConductorId;
use futures::future::join_all;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

/// How long all conductors may take to know the leader.
pub const LIMIT: Duration = Duration::from_secs(20);

pub async fn conductor(etcd: &Etcd, engine: &[&str], folder: &Path, name: &str) -> anyhow::Result<Process> {
    conductor_at("127.0.0.1:0", etcd, engine, folder, name).await
}

async fn conductor_at(grpc: &str, etcd: &Etcd, engine: &[&str], folder: &Path, name: &str) -> anyhow::Result<Process> {
    let ports = ["--grpc", grpc, "--http", "127.0.0.1:0", "--etcd", etcd.address()];
    let arguments: Vec<_> = engine.iter().chain(&ports).map(ToString::to_string).collect();
    Process::start("baton-conductor", &arguments, folder.join(format!("{name}.log"))).await
}

pub async fn channel(conductor: &Process) -> anyhow::Result<Channel> {
    Ok(Endpoint::from_shared(format!("http://{}", conductor.ready.grpc))?.connect().await?)
}

/// What a conductor says to request `n`.
async fn tokens(channel: Channel, n: usize) -> anyhow::Result<Vec<u32>> {
    let Ask(request) = Ask::text(&format!("request {n}")).max_tokens(30);
    let mut client = v1::inference_client::InferenceClient::new(channel);
    let mut stream = client.generate(request).await?.into_inner();
    let mut tokens = Vec::new();
    while let Some(message) = stream.message().await? {
        match message.event {
            Some(Event::Delta(delta)) => tokens.extend(delta.token_ids),
            Some(Event::Finished(_)) => return Ok(tokens),
            _ => {}
        }
    }
    anyhow::bail!("the stream ended without a word")
}

/// What came of one client's requests.
#[derive(Debug, Default)]
struct Ends {
    right: usize,
    wrong: Vec<String>,
    longest: Duration,
}

/// A client that asks one conductor again and again until it is to stop.
fn client(channel: Channel, n: usize, expected: Vec<u32>, stop: Arc<AtomicBool>) -> JoinHandle<Ends> {
    tokio::spawn(async move {
        let mut ends = Ends::default();
        while !stop.load(Ordering::Relaxed) {
            let began = baton_runtime::now();
            match tokens(channel.clone(), n).await {
                Ok(tokens) if tokens == expected => ends.right += 1,
                other => ends.wrong.push(format!("{other:?}")),
            }
            ends.longest = ends.longest.max(began.elapsed());
        }
        ends
    })
}

/// Clients of some conductors, until `meanwhile` is over.
async fn asked<T>(
    conductors: &[&Process],
    expected: &[Vec<u32>],
    meanwhile: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(Ends, T)> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for conductor in conductors {
        let channel = channel(conductor).await?;
        clients.extend(
            expected
                .iter()
                .enumerate()
                .map(|(n, expected)| client(channel.clone(), n, expected.clone(), Arc::clone(&stop))),
        );
    }
    let done = meanwhile.await?;
    stop.store(true, Ordering::Relaxed);
    let mut all = Ends::default();
    for ends in join_all(clients).await {
        let ends = ends?;
        all.right += ends.right;
        all.wrong.extend(ends.wrong);
        all.longest = all.longest.max(ends.longest);
    }
    Ok((all, done))
}

/// The terms that log lines with these words name, by conductor: in a conductor's own log by none.
fn terms(log: &Path, words: &str) -> anyhow::Result<BTreeMap<String, Vec<u64>>> {
    let text = std::fs::read_to_string(log)?;
    let mut named: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for line in text.lines().filter(|line| line.contains(words)) {
        let value = |key| line.split_once(key)?.1.split_whitespace().next();
        if let Some(term) = value(" term=").and_then(|term| term.parse().ok()) {
            named.entry(value(" conductor=").unwrap_or_default().to_owned()).or_default().push(term);
        }
    }
    Ok(named)
}

/// Two conductors never lead in one term, and none names an earlier leader to a node than it has:
/// their logs say so.
pub fn check_terms(conductors: &[PathBuf], nodes: &[PathBuf]) -> anyhow::Result<()> {
    let mut led = BTreeSet::new();
    for log in conductors {
        for term in terms(log, "this conductor leads")?.into_values().flatten() {
            assert!(led.insert(term), "two conductors lead in term {term}");
        }
    }
    for log in nodes {
        let named = terms(log, "a conductor names the leader")?;
        for (conductor, terms) in &named {
            let known = |term: &u64| *term == 0 || led.contains(term);
            assert!(terms.is_sorted() && terms.iter().all(known), "{}, {conductor}: {terms:?}", log.display());
        }
        let all: BTreeSet<_> = named.values().flatten().collect();
        assert!(all.len() > 1, "{} has heard of more than one leader: {all:?}", log.display());
    }
    println!("{} terms, none led twice, and named in order to {} nodes", led.len(), nodes.len());
    Ok(())
}

/// Which of two conductors leads: it says so in its metrics.
async fn leader(conductors: [&Process; 2]) -> anyhow::Result<usize> {
    let found = async {
        loop {
            let mut leads = [0.0; 2];
            for (n, conductor) in conductors.iter().enumerate() {
                leads[n] = conductor.metric("baton_conductor_leads").await?;
            }
            match leads {
                [1.0, 0.0] => return Ok(0),
                [0.0, 1.0] => return Ok(1),
                _ => baton_runtime::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, found).await.context("none leads, or both do")?
}

pub async fn leads(conductor: &Process) -> anyhow::Result<()> {
    let leads = async {
        while conductor.metric("baton_conductor_leads").await? < 1.0 {
            baton_runtime::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LIMIT, leads).await.context("it does not lead")?
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_requests_survive_conductors_that_die_hang_or_lose_etcd() -> anyhow::Result<()> {
    let mut etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let mut first = conductor(&etcd, &["--engine", "mock"], folder.path(), "first").await?;
    let mut second = conductor(&etcd, &["--engine", "mock"], folder.path(), "second").await?;
    let both = format!("{},{}", first.ready.grpc, second.ready.grpc);
    let builder = Cluster::mock();
    let mut nodes = Vec::new();
    for (role, index) in [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)] {
        nodes.push(builder.start_node(role, index, &both, folder.path()).await?);
    }
    if leader([&first, &second]).await? == 1 {
        std::mem::swap(&mut first, &mut second);
    }
    // In peace: both serve, and say the same.
    let mut expected = Vec::new();
    for n in 0..4 {
        let mut said = Vec::new();
        for conductor in [&first, &second] {
            let channel = channel(conductor).await?;
            let answered = async {
                loop {
                    match tokens(channel.clone(), n).await {
                        Ok(tokens) => return tokens,
                        // Not all nodes are there.
                        Err(_) => baton_runtime::sleep(Duration::from_millis(50)).await,
                    }
                }
            };
            said.push(tokio::time::timeout(LIMIT, answered).await?);
        }
        assert_eq!(said[0], said[1]);
        expected.push(said.remove(0));
    }
    let told = |what: &str, ends: Ends| {
        println!("{what}: {} requests, the longest took {:.2} s", ends.right, ends.longest.as_secs_f64());
        assert!(ends.wrong.is_empty() && ends.right > 20, "{what}: {ends:?}");
    };

    // The leader hangs, and wakes up as one that another has followed.
    let (ends, ()) = asked(&[&second], &expected, async {
        signal(first.pid(), "STOP");
        leads(&second).await?;
        signal(first.pid(), "CONT");
        baton_runtime::sleep(Duration::from_secs(1)).await;
        Ok(())
    })
    .await?;
    told("the leader hung", ends);
    assert_eq!(leader([&first, &second]).await?, 1);
    let (ends, ()) = asked(&[&first, &second], &expected, async {
        baton_runtime::sleep(Duration::from_secs(1)).await;
        Ok(())
    })
    .await?;
    told("the one that had hung serves", ends);

    // etcd goes, and comes back.
    let (ends, ()) = asked(&[&first, &second], &expected, async {
        etcd.kill().await?;
        baton_runtime::sleep(Duration::from_secs(4)).await;
        etcd.restart(true)?;
        baton_runtime::sleep(Duration::from_secs(3)).await;
        Ok(())
    })
    .await?;
    told("etcd was away for four seconds", ends);
    if leader([&first, &second]).await? == 0 {
        std::mem::swap(&mut first, &mut second);
    }

    // The leader dies.
    let address = second.ready.grpc.clone();
    let (ends, ()) = asked(&[&first], &expected, async {
        second.kill().await?;
        baton_runtime::sleep(Duration::from_secs(5)).await;
        Ok(())
    })
    .await?;
    told("the leader died", ends);
    assert_eq!(first.metric("baton_conductor_leads").await?, 1.0);

    // Etcd is unreachable and the leader dies: new requests are refused, and served again once it
    // is back. The nodes know the address of the one that died.
    let third = conductor_at(&address, &etcd, &["--engine", "mock"], folder.path(), "third").await?;
    let channel = channel(&third).await?;
    let served = async {
        while tokens(channel.clone(), 0).await.is_err() {
            baton_runtime::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LIMIT, served).await.context("the third does not serve")?;
    etcd.kill().await?;
    first.kill().await?;
    let refused = tokens(channel.clone(), 0).await.expect_err("none leads").to_string();
    assert!(refused.contains("no conductor has led for 10 s"), "{refused}");
    etcd.restart(true)?;
    leads(&third).await?;
    assert_eq!(tokens(channel, 0).await?, expected[0]);

    // One that drains resigns. One without nodes leads if no other does.
    let fourth = conductor(&etcd, &["--engine", "mock"], folder.path(), "fourth").await?;
    third.stop().await?;
    leads(&fourth).await?;
    let logs = ["first", "second", "third", "fourth"].map(|name| folder.path().join(format!("{name}.log")));
    check_terms(&logs, &nodes.iter().map(|node| node.log.clone()).collect::<Vec<_>>())
}

/// A stranger's session with a node: it names these terms, one after the other, and sends a job of
/// each and one of the next.
async fn lie(node: String, who: u64, terms: Vec<u64>) -> anyhow::Result<()> {
    use v1::node_command::Command;
    let (commands, queued) = tokio::sync::mpsc::channel(16);
    let send = async |command| {
        let sent = commands.send(v1::NodeCommand { command: Some(command) }).await;
        sent.context("the session is over")
    };
    let conductor_id = ConductorId(who).to_string();
    send(Command::Hello(v1::Hello { protocol_version: PROTOCOL_VERSION, conductor_id })).await?;
    let mut client = v1::node_client::NodeClient::connect(format!("http://{node}")).await?;
    let mut said = client.session(tokio_stream::wrappers::ReceiverStream::new(queued)).await?.into_inner();
    let reader = tokio::spawn(async move { while let Ok(Some(_)) = said.message().await {} });
    for term in terms {
        send(Command::Leader(v1::KnownLeader { term, denied: 0 })).await?;
        for term in [term, term.wrapping_add(1)] {
            send(Command::Prefill(v1::PrefillJob { term, ..v1::PrefillJob::default() })).await?;
        }
        baton_runtime::sleep(Duration::from_millis(100)).await;
    }
    reader.abort();
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_false_terms_stop_placement_for_less_than_five_seconds() -> anyhow::Result<()> {
    const SOON: Duration = Duration::from_secs(5);
    let etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let first = conductor(&etcd, &["--engine", "mock"], folder.path(), "first").await?;
    let second = conductor(&etcd, &["--engine", "mock"], folder.path(), "second").await?;
    let both = format!("{},{}", first.ready.grpc, second.ready.grpc);
    let mut nodes = Vec::new();
    for role in ["prefill", "decode"] {
        nodes.push(Cluster::mock().start_node(role, 0, &both, folder.path()).await?);
    }
    leader([&first, &second]).await?;
    let mut expected = Vec::new();
    for n in 0..2 {
        let mut channels = Vec::new();
        for conductor in [&first, &second] {
            channels.push(channel(conductor).await?);
        }
        let answered = async {
            loop {
                let said = join_all(channels.iter().map(|channel| tokens(channel.clone(), n))).await;
                match &said[..] {
                    [Ok(tokens), Ok(_)] => return tokens.clone(),
                    // Not all nodes are there.
                    _ => baton_runtime::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        expected.push(tokio::time::timeout(LIMIT, answered).await?);
    }
    let told = |what: &str, ends: Ends| {
        println!("{what}: {} requests, the longest took {:.2} s", ends.right, ends.longest.as_secs_f64());
        assert!(ends.wrong.is_empty() && ends.right > 20 && ends.longest < SOON, "{what}: {ends:?}");
    };

    let extreme = [u64::MAX, u64::MAX - 1, 1 << 63, 1 << 41];
    let (ends, ()) = asked(&[&first, &second], &expected, async {
        for node in &nodes {
            lie(node.ready.grpc.clone(), 7, extreme.to_vec()).await?;
        }
        Ok(())
    })
    .await?;
    told("a liar at each node", ends);

    // Ten at once, each of which stays.
    let (ends, ()) = asked(&[&first, &second], &expected, async {
        let liars = (0..10).map(|n| {
            let terms = [u64::MAX - n].repeat(20);
            lie(nodes[0].ready.grpc.clone(), 100 + n, terms)
        });
        join_all(liars).await.into_iter().collect()
    })
    .await?;
    told("ten liars at the prefill node", ends);

    let mut client = etcd_client::Client::connect([etcd.address()], None).await?;
    let stranger = format!(r#"{{"conductor": "{}", "address": "127.0.0.1:1"}}"#, ConductorId(u64::MAX));
    for (what, value) in [("a leader that is none", &*stranger), ("nonsense", "{]")] {
        let (ends, ()) = asked(&[&first, &second], &expected, async {
            client.put("/baton/leader", value, None).await?;
            baton_runtime::sleep(Duration::from_secs(1)).await;
            client.delete("/baton/leader", None).await?;
            baton_runtime::sleep(Duration::from_secs(2)).await;
            Ok(())
        })
        .await?;
        told(what, ends);
    }
    let log = std::fs::read_to_string(&first.log)?;
    assert!(log.contains("/baton/leader: "), "what is wrong names the key: {log}");
    Ok(())
}
