//! Settings that change while several conductors serve.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, Etcd, Process};
use baton_proto::v1;
use baton_proto::v1::cluster_client::ClusterClient;
use tonic::Code;
use tonic::transport::Channel;

use crate::leaders::{LIMIT, channel, conductor};
use crate::up::baton;

/// How long a change may take to be in force everywhere.
const IN_FORCE: Duration = Duration::from_secs(1);
/// Changes of one run; every fifth is wrong.
const CHANGES: usize = 50;

async fn set(operator: &mut ClusterClient<Channel>, values: &[(&str, &str)]) -> Result<u64, tonic::Status> {
    let values = values.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    let request = v1::SetSettingsRequest { values, by: "the test".into() };
    Ok(operator.set_settings(request).await?.into_inner().version)
}

async fn get(operator: &mut ClusterClient<Channel>) -> anyhow::Result<v1::RunTimeSettings> {
    Ok(operator.get_settings(v1::GetSettingsRequest {}).await?.into_inner())
}

fn value<'a>(settings: &'a v1::RunTimeSettings, key: &str) -> Option<&'a str> {
    settings.settings.iter().find(|setting| setting.key == key)?.value.as_deref()
}

/// Numbers may be written in another way.
fn is_same(value: Option<&str>, wanted: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    value.is_some_and(|value| value == wanted || number(wanted).is_some() && number(value) == number(wanted))
}

/// The `n`th change: a value that is taken, or what is said of one that is not.
fn nth(n: usize) -> (&'static str, String, Option<&'static str>) {
    let wrong = [
        ("placement", "best", "placement: 'best'"),
        ("ttft_slo_ms", "soon", "ttft_slo_ms: 'soon', but must be milliseconds, or off"),
        ("max_requests", "0", "max_requests: 0, but must be 1 to 1000000"),
        ("log", "loud", "log: 'loud', but must be a level"),
        ("block_tokens", "32", "block_tokens: takes a restart"),
    ];
    if n % 5 == 4 {
        let (key, value, told) = wrong[n / 5 % wrong.len()];
        return (key, value.to_owned(), Some(told));
    }
    let pick = |all: &[&str]| all[n / 5 % all.len()].to_owned();
    let (key, value) = match n % 5 {
        0 => ("placement", pick(&["load-balance", "cache-aware", "round-robin", "min-total-delay"])),
        1 => ("ttft_slo_ms", format!("{}", 60_000 + n)),
        2 if n % 10 < 5 => ("max_wait_ms", "off".to_owned()),
        2 => ("max_wait_ms", format!("{}", 30_000 + n)),
        _ => ("max_requests", format!("{}", 1_000 + n)),
    };
    (key, value, None)
}

/// Asks one conductor again and again; how many answers came, and what went wrong.
async fn load(channel: Channel, stop: Arc<AtomicBool>, served: Arc<AtomicUsize>) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut client = v1::inference_client::InferenceClient::new(channel);
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let Ask(request) = Ask::text(&format!("request {n}")).max_tokens(20);
        let answered = async {
            let mut stream = client.generate(request).await?.into_inner();
            while stream.message().await?.is_some() {}
            Ok::<_, tonic::Status>(())
        };
        match answered.await {
            Ok(()) => drop(served.fetch_add(1, Ordering::Relaxed)),
            Err(status) => wrong.push(status.message().to_owned()),
        }
    }
    wrong
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_settings_changes_are_in_force_everywhere_within_a_second() -> anyhow::Result<()> {
    let mut etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let mut conductors: Vec<Process> = Vec::new();
    for name in ["first", "second", "third"] {
        conductors.push(conductor(&etcd, &["--engine", "mock"], folder.path(), name).await?);
    }
    let addresses = conductors.iter().map(|conductor| conductor.ready.grpc.clone()).collect::<Vec<_>>().join(",");
    let mut nodes = Vec::new();
    for (role, index) in [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)] {
        nodes.push(Cluster::mock().start_node(role, index, &addresses, folder.path()).await?);
    }
    let mut operators = Vec::new();
    for conductor in &conductors {
        operators.push(ClusterClient::new(channel(conductor).await?));
    }
    let ready = async {
        for conductor in &conductors {
            // Served once nodes are there and one leads.
            let mut client = v1::inference_client::InferenceClient::new(channel(conductor).await?);
            while client.generate(Ask::text("x").max_tokens(2).0).await.is_err() {
                baton_runtime::sleep(Duration::from_millis(50)).await;
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LIMIT, ready).await.context("not ready")??;

    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    for conductor in conductors.iter().chain(&conductors) {
        clients.push(tokio::spawn(load(channel(conductor).await?, Arc::clone(&stop), Arc::clone(&served))));
    }
    let mut times = Vec::new();
    let mut refused = 0;
    for n in 0..CHANGES {
        let (key, wanted, wrong) = nth(n);
        let began = Instant::now();
        let at = n % operators.len();
        match (set(&mut operators[at], &[(key, &wanted)]).await, wrong) {
            (Err(status), Some(told)) => {
                assert_eq!(status.code(), Code::InvalidArgument);
                assert!(status.message().starts_with(told), "{}", status.message());
                refused += 1;
                continue;
            }
            (Ok(version), None) => {
                for operator in &mut operators {
                    loop {
                        let settings = get(operator).await?;
                        if settings.version >= version {
                            assert_eq!(settings.version, version);
                            assert!(is_same(value(&settings, key), &wanted), "{key}: {wanted}");
                            break;
                        }
                        assert!(began.elapsed() < IN_FORCE, "change {n} is not in force everywhere");
                    }
                }
            }
            (other, _) => anyhow::bail!("{key}={wanted}: {other:?}"),
        }
        times.push(began.elapsed());
        baton_runtime::sleep(Duration::from_millis(20)).await;
    }
    times.sort_unstable();
    let median = times[times.len() / 2];
    let longest = times[times.len() - 1];
    let all = served.load(Ordering::Relaxed);
    println!(
        "{} changes in force at 3 conductors: median {median:.1?}, longest {longest:.1?}; {refused} refused; {all} requests meanwhile",
        times.len()
    );
    assert!(longest < IN_FORCE && refused == CHANGES / 5);

    // Nodes follow, too.
    let version = set(&mut operators[1], &[("log", "debug")]).await?;
    let follow = async {
        for node in &nodes {
            while !std::fs::read_to_string(&node.log)?.contains(&format!("settings changed version={version}")) {
                baton_runtime::sleep(Duration::from_millis(20)).await;
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(IN_FORCE, follow).await.context("a node does not follow")??;

    // What is in force is obeyed, everywhere: no node takes a second request.
    set(&mut operators[0], &[("max_requests", "1")]).await?;
    baton_runtime::sleep(IN_FORCE).await;
    stop.store(true, Ordering::Relaxed);
    let wrong: Vec<_> = futures::future::try_join_all(clients).await?.into_iter().flatten().collect();
    let limit = "max_requests: this conductor serves as many as it may, 1";
    assert!(!wrong.is_empty() && wrong.iter().all(|message| message == limit), "{wrong:?}");

    // etcd loses its data: what was set is there again, and one that starts now goes by it.
    etcd.kill().await?;
    etcd.restart(false)?;
    let version = get(&mut operators[0]).await?.version;
    let fourth = conductor(&etcd, &["--engine", "mock", "--max-requests", "7"], folder.path(), "fourth").await?;
    let mut operator = ClusterClient::new(channel(&fourth).await?);
    let follows = async {
        while get(&mut operator).await?.version < version {
            baton_runtime::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LIMIT, follows).await.context("the settings are lost")??;
    assert_eq!(value(&get(&mut operator).await?, "max_requests"), Some("1"));

    // The command: it waits for all, and gives a value back.
    let all = format!("{addresses},{}", fourth.ready.grpc);
    let output = baton(&["settings", "set", "max_requests=", "--conductor", &all])?.output().await?;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let told = format!("version {} is in force at 4 of 4 conductors\n", version + 1);
    assert_eq!(out, told, "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(value(&get(&mut operator).await?, "max_requests"), Some("7"), "as it was started");
    let log = std::fs::read_to_string(&conductors[1].log)?;
    assert!(log.contains("settings changed") && log.contains("the test"), "who, and what, is in each log");
    Ok(())
}
