//! What several conductors cost: the hop to the one that places, and their processor time.

use std::path::Path;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, Etcd, Process};
use baton_proto::v1::cluster_client::ClusterClient;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_proto::v1::node_registration_client::NodeRegistrationClient;
use baton_proto::v1::node_server::{Node, NodeServer};
use baton_proto::{PROTOCOL_VERSION, v1};
use baton_types::{FinishReason, PrefillEvent};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use crate::leaders::{LIMIT, channel, conductor};

/// Fake nodes, half of them of each role.
const NODES: usize = 1000;
/// How often each reports its load, as real ones do at least.
const REPORT: Duration = Duration::from_millis(200);
/// How long all sessions may take to be there.
const SESSIONS: Duration = Duration::from_secs(120);
const ROUNDS: usize = 5;
const PER_ROUND: usize = 200;
/// Streams of each conductor. A conductor takes in at once the tokens of its streams that come at
/// once, so with unequal numbers that would be measured.
const STREAMS_EACH: usize = 8;

/// A node that answers each prompt with one token, and reports its load.
#[derive(Clone)]
struct FakeNode(v1::NodeInfo);

type Said = Result<v1::NodeEvent, Status>;

fn says(event: Event) -> Said {
    Ok(v1::NodeEvent { event: Some(event) })
}

fn answer(job: v1::PrefillJob) -> Option<[Said; 2]> {
    let key = baton_proto::key(job.key).ok()?;
    let started = PrefillEvent::Started { queue: Duration::ZERO, cached_tokens: 0 };
    let first = PrefillEvent::FirstToken {
        token: 'x'.into(),
        logprobs: None,
        prompt_logprobs: Vec::new(),
        finish: Some(FinishReason::Length),
        compute: Duration::ZERO,
    };
    Some([&started, &first].map(|event| says(Event::Prefill(v1::PrefillEvent::from_domain(key, event)))))
}

#[tonic::async_trait]
impl Node for FakeNode {
    type SessionStream = Pin<Box<dyn Stream<Item = Said> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::NodeCommand>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut commands = request.into_inner();
        let (events, said) = mpsc::channel(64);
        let node = self.0.clone();
        tokio::spawn(async move {
            let blocks_total = node.layout.as_ref().map_or(0, |layout| layout.num_blocks);
            let mut load = v1::Load { blocks_total, accepts_migrations: node.role == "decode", ..v1::Load::default() };
            let welcome = Event::Welcome(v1::Welcome { protocol_version: PROTOCOL_VERSION, node: Some(node) });
            let _ = events.send(says(welcome)).await;
            let mut reports = baton_runtime::interval(REPORT);
            loop {
                tokio::select! {
                    _ = reports.tick() => {
                        load.prefix_queries += 1;
                        if events.send(says(Event::Load(load))).await.is_err() {
                            return;
                        }
                    }
                    command = commands.message() => match command {
                        Ok(Some(v1::NodeCommand { command: Some(Command::Prefill(job)) })) => {
                            for event in answer(job).into_iter().flatten() {
                                let _ = events.send(event).await;
                            }
                        }
                        Ok(Some(_)) => {}
                        _ => return,
                    },
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(said))))
    }

    async fn check_integrity(
        &self,
        _: Request<v1::CheckIntegrityRequest>,
    ) -> Result<Response<v1::CheckIntegrityResponse>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }

    async fn grant(&self, _: Request<v1::GrantRequest>) -> Result<Response<v1::GrantReply>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }

    async fn release_grant(
        &self,
        _: Request<v1::ReleaseGrantRequest>,
    ) -> Result<Response<v1::ReleaseGrantReply>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }

    async fn handoff(&self, _: Request<v1::HandoffRequest>) -> Result<Response<v1::HandoffReply>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }

    async fn lease(&self, _: Request<v1::LeaseRequest>) -> Result<Response<v1::LeaseReply>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }

    async fn release_lease(
        &self,
        _: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseReply>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }
}

/// Serves one that is like a real one, and gives it an address.
async fn serve(template: &v1::NodeInfo, name: String) -> anyhow::Result<v1::NodeInfo> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let info = v1::NodeInfo { name, address, ..template.clone() };
    let router = tonic::transport::Server::builder().add_service(NodeServer::new(FakeNode(info.clone())));
    tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    Ok(info)
}

async fn ready_nodes(conductor: &Process) -> anyhow::Result<f64> {
    Ok(conductor.metric("baton_conductor_nodes_ready{role=\"prefill\"}").await?
        + conductor.metric("baton_conductor_nodes_ready{role=\"decode\"}").await?)
}

async fn until_ready(conductors: &[Process], nodes: usize, limit: Duration) -> anyhow::Result<()> {
    let all = async {
        for conductor in conductors {
            while ready_nodes(conductor).await? < nodes as f64 {
                baton_runtime::sleep(Duration::from_millis(50)).await;
            }
            let mut client = InferenceClient::new(channel(conductor).await?);
            while client.generate(Ask::text("x").max_tokens(1).0).await.is_err() {
                baton_runtime::sleep(Duration::from_millis(50)).await;
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(limit, all).await.context("not all nodes are ready")?
}

/// The leader first.
async fn by_leader(conductors: &mut [Process]) -> anyhow::Result<()> {
    for n in 0..conductors.len() {
        if conductors[n].metric("baton_conductor_leads").await? >= 1.0 {
            conductors.swap(0, n);
        }
    }
    Ok(())
}

/// How long each of so many requests took to be placed, as its client sees it.
async fn placed(channel: Channel, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut client = InferenceClient::new(channel);
    let mut times = Vec::with_capacity(count);
    for n in 0..count {
        let request = Ask::text(&format!("request {n}")).max_tokens(1).0;
        let began = Instant::now();
        let mut stream = client.generate(request).await?.into_inner();
        times.push(began.elapsed().as_secs_f64() * 1e3);
        while stream.message().await?.is_some() {}
    }
    Ok(times)
}

fn quantile(times: &mut [f64], at: f64) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    baton_types::quantile(times, at)
}

#[tokio::test]
#[ignore = "a figure; needs etcd, and takes a minute: make test-long"]
async fn etcd_placement_latency_with_a_thousand_nodes_is_measured() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let mut conductors = Vec::new();
    for name in ["first", "second"] {
        conductors.push(conductor(&etcd, &["--engine", "mock", "--log", "warn"], folder.path(), name).await?);
    }
    let both = conductors.iter().map(|conductor| conductor.ready.grpc.clone()).collect::<Vec<_>>().join(",");
    // What a node says of itself real ones know: the others are like them.
    let real = [
        Cluster::mock().start_node("prefill", 0, &both, folder.path()).await?,
        Cluster::mock().start_node("decode", 0, &both, folder.path()).await?,
    ];
    until_ready(&conductors, 2, LIMIT).await?;
    let listed = ClusterClient::new(channel(&conductors[0]).await?).list_nodes(v1::ListNodesRequest {}).await?;
    let templates: Vec<_> = listed.into_inner().nodes.into_iter().filter_map(|node| node.info).collect();
    for n in 0..NODES {
        let info = serve(&templates[n % 2], format!("fake-{n}")).await?;
        for conductor in &conductors {
            let request = v1::RegisterRequest { protocol_version: PROTOCOL_VERSION, node: Some(info.clone()) };
            NodeRegistrationClient::new(channel(conductor).await?).register(request).await?;
        }
    }
    drop(real);
    until_ready(&conductors, NODES, SESSIONS).await?;
    by_leader(&mut conductors).await?;
    let channels = [channel(&conductors[0]).await?, channel(&conductors[1]).await?];
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (at, channel) in channels.iter().enumerate() {
            let mut times = placed(channel.clone(), PER_ROUND).await?;
            rounds[at].push((quantile(&mut times, 0.5), quantile(&mut times, 0.99)));
        }
    }
    let median = |at: usize, of: fn(&(f64, f64)) -> f64| {
        let mut all: Vec<_> = rounds[at].iter().map(of).collect();
        quantile(&mut all, 0.5)
    };
    for (name, of) in [("p50", (|round| round.0) as fn(&(f64, f64)) -> f64), ("p99", |round| round.1)] {
        let own = median(0, of);
        let asked = median(1, of);
        println!(
            "{NODES} nodes, placement {name}: {own:.2} ms at the leader, {asked:.2} ms through it: {:.2} ms more",
            asked - own
        );
    }
    assert!(ready_nodes(&conductors[1]).await? >= NODES as f64, "all of them kept reporting");
    Ok(())
}

/// Processor time of the conductors and of the nodes, milliseconds, while so many clients ask for
/// so long; and how many tokens came.
async fn costs(conductors: &[Process], nodes: &[Process], streams: usize) -> anyhow::Result<[f64; 4]> {
    const IDLE: Duration = Duration::from_secs(4);
    const BUSY: Duration = Duration::from_secs(8);
    let cpu = |of: &[Process]| of.iter().map(Process::cpu_time).sum::<anyhow::Result<Duration>>();
    let before = (cpu(conductors)?, cpu(nodes)?);
    baton_runtime::sleep(IDLE).await;
    let idle = (cpu(conductors)? - before.0, cpu(nodes)? - before.1);
    let before = (cpu(conductors)?, cpu(nodes)?);
    let began = Instant::now();
    let mut clients = Vec::new();
    for n in 0..streams {
        let mut client = InferenceClient::new(channel(&conductors[n % conductors.len()]).await?);
        clients.push(tokio::spawn(async move {
            let mut requests = 0;
            let mut tokens = 0;
            while began.elapsed() < BUSY {
                let mut stream =
                    client.generate(Ask::text(&format!("{n} {requests}")).max_tokens(50).0).await?.into_inner();
                while let Some(message) = stream.message().await? {
                    if let Some(v1::generate_response::Event::Delta(delta)) = message.event {
                        tokens += delta.token_ids.len();
                    }
                }
                requests += 1;
            }
            anyhow::Ok((requests, tokens))
        }));
    }
    let mut requests = 0;
    let mut tokens = 0;
    for client in clients {
        let (some, more) = client.await??;
        requests += some;
        tokens += more;
    }
    let share = began.elapsed().div_duration_f64(IDLE);
    let own = (cpu(conductors)? - before.0).saturating_sub(idle.0.mul_f64(share));
    let nodes = (cpu(nodes)? - before.1).saturating_sub(idle.1.mul_f64(share));
    Ok([own.as_secs_f64() * 1e6, nodes.as_secs_f64() * 1e6, requests as f64, tokens as f64])
}

async fn cluster_of(conductors: usize, etcd: &Etcd, folder: &Path) -> anyhow::Result<(Vec<Process>, Vec<Process>)> {
    let mut all = Vec::new();
    for n in 0..conductors {
        let prefix = format!("/of-{conductors}");
        let own = ["--engine", "mock", "--log", "warn", "--etcd-prefix", &prefix];
        all.push(conductor(etcd, &own, folder, &format!("{conductors}-{n}")).await?);
    }
    let addresses = all.iter().map(|conductor| conductor.ready.grpc.clone()).collect::<Vec<_>>().join(",");
    let mut nodes = Vec::new();
    for (role, index) in [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)] {
        nodes.push(Cluster::mock().start_node(role, index, &addresses, folder).await?);
    }
    until_ready(&all, 4, LIMIT).await?;
    Ok((all, nodes))
}

#[tokio::test]
#[ignore = "a figure; needs etcd, and takes three minutes: make test-long"]
async fn etcd_cpu_cost_per_token_with_more_frontends_is_measured() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let counts = [1, 2, 4];
    let mut rows = counts.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (row, count) in rows.iter_mut().zip(counts) {
            let (conductors, nodes) = cluster_of(count, &etcd, folder.path()).await?;
            let [own, of_nodes, requests, tokens] = costs(&conductors, &nodes, STREAMS_EACH * count).await?;
            assert!(tokens >= requests * 50.0 && requests > 8.0, "{requests} requests, {tokens} tokens");
            row.push([own / tokens, own / requests, of_nodes / tokens]);
        }
    }
    let mut first = None;
    for (row, count) in rows.iter().zip(counts) {
        let median = |at: usize| quantile(&mut row.iter().map(|figures| figures[at]).collect::<Vec<_>>(), 0.5);
        let [token, request, nodes] = [0, 1, 2].map(median);
        let [base, _, base_nodes] = *first.get_or_insert([token, request, nodes]);
        println!(
            "{count} conductors: {token:.1} us of theirs for each token ({:.2}), {request:.0} us for each request of 50 tokens; {nodes:.1} us of the nodes' ({:.2})",
            token / base,
            nodes / base_nodes
        );
    }
    Ok(())
}
