//! How long nothing is placed if the one that places, or etcd, goes away.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, Etcd, Process, signal};
use baton_proto::v1::inference_client::InferenceClient;
use futures::future::try_join_all;
use tonic::transport::Endpoint;

use crate::leaders::{LIMIT, check_terms};

/// The conductor that nodes know of, and that is not there at first: three are.
const SPARE: usize = 3;
/// How often each death and each stop is tried.
const TIMES: usize = 5;
/// What etcd's absence may last in this test.
const AWAY: Duration = Duration::from_secs(60);
/// How long one may take to be found in an etcd that has lost its data.
const REGISTERED: Duration = Duration::from_secs(15);

/// Conductors at ports that stay theirs.
struct Conductors {
    etcd: String,
    folder: PathBuf,
    addresses: Vec<String>,
    processes: Vec<Option<Process>>,
    /// Of all starts.
    logs: Vec<PathBuf>,
}

impl Conductors {
    async fn start(etcd: &Etcd, folder: &Path) -> anyhow::Result<Self> {
        let listeners = (0..=SPARE).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
        let addresses =
            listeners.iter().map(|it| Ok(it.local_addr()?.to_string())).collect::<anyhow::Result<Vec<_>>>()?;
        drop(listeners);
        let etcd = etcd.address().to_owned();
        let folder = folder.to_owned();
        let processes = Vec::new();
        let mut all = Self { etcd, folder, addresses, processes, logs: Vec::new() };
        all.processes.resize_with(SPARE + 1, || None);
        for n in 0..SPARE {
            all.restart(n).await?;
        }
        Ok(all)
    }

    async fn restart(&mut self, n: usize) -> anyhow::Result<()> {
        let log = self.folder.join(format!("conductor-{n}-{}.log", self.logs.len()));
        self.logs.push(log.clone());
        let own = ["--engine", "mock", "--grpc", &self.addresses[n], "--http", "127.0.0.1:0", "--etcd", &self.etcd];
        self.processes[n] = Some(Process::start("baton-conductor", &own.map(str::to_owned), log).await?);
        Ok(())
    }

    fn process(&self, n: usize) -> anyhow::Result<&Process> {
        self.processes[n].as_ref().context("it is not there")
    }

    async fn leader(&self) -> anyhow::Result<usize> {
        let found = async {
            loop {
                for (n, process) in self.processes.iter().enumerate() {
                    let Some(process) = process else { continue };
                    if process.metric("baton_conductor_leads").await? >= 1.0 {
                        return Ok(n);
                    }
                }
                baton_runtime::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LIMIT, found).await.context("none leads")?
    }
}

/// One token at this address.
async fn ask(address: &str, text: &str) -> anyhow::Result<()> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    let mut stream = InferenceClient::new(channel).generate(Ask::text(text).max_tokens(2).0).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

async fn until_served(address: &str) -> anyhow::Result<()> {
    let served = async {
        while ask(address, "ready?").await.is_err() {
            baton_runtime::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LIMIT, served).await.context("it does not serve")
}

/// The longest that a request took at these addresses while something happened there; each is asked
/// again and again.
async fn longest(
    addresses: &[String],
    meanwhile: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<Duration> {
    let stop = Arc::new(AtomicBool::new(false));
    let clients = addresses.iter().cloned().map(|address| {
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            let mut longest = Duration::ZERO;
            while !stop.load(Ordering::Relaxed) {
                let began = Instant::now();
                ask(&address, "and now?").await.with_context(|| address.clone())?;
                longest = longest.max(began.elapsed());
                baton_runtime::sleep(Duration::from_millis(10)).await;
            }
            anyhow::Ok(longest)
        })
    });
    let clients: Vec<_> = clients.collect();
    meanwhile.await?;
    stop.store(true, Ordering::Relaxed);
    let all = try_join_all(clients).await?.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    all.into_iter().max().context("no client asked")
}

fn told(what: &str, mut pauses: Vec<Duration>) {
    pauses.sort_unstable();
    let median = pauses[pauses.len() / 2];
    let max = pauses[pauses.len() - 1];
    println!(
        "{what}: longest pause p50 {:.2} s, max {:.2} s of {}",
        median.as_secs_f64(),
        max.as_secs_f64(),
        pauses.len()
    );
}

#[tokio::test]
#[ignore = "a figure; needs etcd, and takes three minutes: make test-long"]
async fn etcd_loss_of_leader_or_etcd_pauses_requests_and_fails_none() -> anyhow::Result<()> {
    let mut etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let mut conductors = Conductors::start(&etcd, folder.path()).await?;
    let all = conductors.addresses.join(",");
    let addresses = conductors.addresses[..SPARE].to_vec();
    let mut nodes = Vec::new();
    for (role, index) in [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)] {
        nodes.push(Cluster::mock().start_node(role, index, &all, folder.path()).await?);
    }
    for address in &addresses {
        until_served(address).await?;
    }
    let others = |leader: usize| {
        addresses.iter().enumerate().filter(|(n, _)| *n != leader).map(|(_, it)| it.clone()).collect::<Vec<_>>()
    };

    let mut pauses = Vec::new();
    for _ in 0..TIMES {
        let leader = conductors.leader().await?;
        let process = conductors.processes[leader].take().context("it is there")?;
        let dies = async {
            process.kill().await?;
            baton_runtime::sleep(Duration::from_secs(5)).await;
            Ok(())
        };
        pauses.push(longest(&others(leader), dies).await?);
        conductors.restart(leader).await?;
        until_served(&addresses[leader]).await?;
    }
    told("the leader was killed", pauses);

    let mut pauses = Vec::new();
    for _ in 0..TIMES {
        let leader = conductors.leader().await?;
        let pid = conductors.process(leader)?.pid();
        let hangs = async {
            signal(pid, "STOP");
            baton_runtime::sleep(Duration::from_secs(5)).await;
            signal(pid, "CONT");
            baton_runtime::sleep(Duration::from_secs(1)).await;
            Ok(())
        };
        pauses.push(longest(&others(leader), hangs).await?);
        until_served(&addresses[leader]).await?;
    }
    told("the leader was stopped", pauses);

    let away = async {
        etcd.kill().await?;
        baton_runtime::sleep(AWAY).await;
        etcd.restart(true)
    };
    told("etcd was away for a minute", vec![longest(&addresses, away).await?]);

    let loses = async {
        etcd.kill().await?;
        etcd.restart(false)?;
        // One that starts now knows only what it finds there.
        let began = Instant::now();
        conductors.restart(SPARE).await?;
        until_served(&conductors.addresses[SPARE]).await?;
        println!("etcd lost its data: a new conductor served {:.2} s later", began.elapsed().as_secs_f64());
        assert!(began.elapsed() < REGISTERED);
        Ok(())
    };
    told("etcd lost its data", vec![longest(&addresses, loses).await?]);
    // Who led, or the one that found nothing there.
    conductors.leader().await?;
    check_terms(&conductors.logs, &nodes.iter().map(|node| node.log.clone()).collect::<Vec<_>>())
}
