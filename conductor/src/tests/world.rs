//! A conductor in this process, fake nodes around it, its clients, and a clock that the test moves.
//!
//! Everything runs on one thread. So once the clock has moved, the tasks that it woke have run
//! after a few rounds. Nothing waits for the machine's time. What comes over a socket is waited
//! for, as a condition.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::node_command::Command;
use baton_proto::{PROTOCOL_VERSION, v1};
use baton_runtime::{Clock, ManualClock, Telemetry};
use baton_types::{Generation, KvDtype, KvLayout, NodeId, NodeInfo, NodeProfile, NodeRole};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use super::client::{self, Answer, connect};
use super::node::{FakeNode, Job};
use crate::config::Settings;
use crate::frontend::Frontend;
use crate::metrics::{METRICS, Metrics};
use crate::ports::Addresses;
use crate::server::Server;

/// What has not come by then does not come: of the machine's time, and far more than anything
/// takes.
const LIMIT: Duration = Duration::from_secs(30);
/// So far the clock moves at once. Everything that the conductor waits for is a multiple of it.
const STEP: Duration = Duration::from_millis(50);
/// Rounds until all tasks that were woken, and those that these woke, have had their turn.
const ROUNDS: usize = 16;

/// See the module's text.
pub struct World {
    pub clock: ManualClock,
    pub frontend: Arc<Frontend>,
    pub addresses: Addresses,
    pub nodes: BTreeMap<String, FakeNode>,
    channel: Channel,
    signals: mpsc::UnboundedSender<&'static str>,
    server: JoinHandle<anyhow::Result<()>>,
}

/// The settings of most stories: prompts are computed by prefill nodes alone.
pub fn settings() -> Settings {
    Settings {
        grpc: "127.0.0.1:0".into(),
        http: "127.0.0.1:0".into(),
        engine: "mock".into(),
        prompts_at_decode: "never".into(),
        partial_prefill: false,
        ..Settings::default()
    }
}

/// Waits until there is something.
pub async fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let looking = async {
        loop {
            match found() {
                Some(found) => return found,
                None => tokio::task::yield_now().await,
            }
        }
    };
    tokio::time::timeout(LIMIT, looking).await.unwrap_or_else(|_| panic!("never: {what}"))
}

/// The end of something that comes soon.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.expect("it comes soon")
}

async fn settle() {
    for _ in 0..ROUNDS {
        tokio::task::yield_now().await;
    }
}

impl World {
    /// With these nodes: the names of prefill nodes begin with p.
    pub async fn with(nodes: &[&str]) -> Self {
        Self::with_settings(settings(), nodes).await
    }

    pub async fn with_settings(settings: Settings, nodes: &[&str]) -> Self {
        Self::on(ManualClock::default(), settings, nodes).await
    }

    /// On a clock that others share.
    pub async fn on(clock: ManualClock, settings: Settings, nodes: &[&str]) -> Self {
        let (telemetry, metrics) = Telemetry::local(&[METRICS], Metrics::default).unwrap();
        let server = Server::start(&settings.into(), Arc::new(clock.clone()), telemetry, metrics).await.unwrap();
        let frontend = Arc::clone(&server.frontend);
        let addresses = server.addresses;
        let (signals, mut signalled) = mpsc::unbounded_channel();
        let server = tokio::spawn(server.run(async move || match signalled.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }));
        let channel = connect(addresses.grpc, |endpoint| endpoint);
        let mut world = Self { clock, frontend, addresses, nodes: BTreeMap::new(), channel, signals, server };
        for name in nodes {
            world.join(name, |_| {}).await;
        }
        world
    }

    /// A node comes.
    pub async fn join(&mut self, name: &str, change: impl FnOnce(&mut NodeInfo)) {
        let mut info = self.info(name);
        change(&mut info);
        self.nodes.insert(name.to_owned(), FakeNode::start(info).await);
        self.begin_session(name).await;
    }

    pub async fn register(&self, info: &NodeInfo) -> Result<v1::RegisterResponse, Code> {
        let mut membership = v1::node_registration_client::NodeRegistrationClient::new(self.channel.clone());
        let request = v1::RegisterRequest { protocol_version: PROTOCOL_VERSION, node: Some(info.into()) };
        soon(membership.register(request)).await.map(Response::into_inner).map_err(|status| status.code())
    }

    /// A node registers, and is there once its session is.
    pub async fn begin_session(&mut self, name: &str) {
        self.register(&self.nodes[name].info).await.unwrap();
        let frontend = Arc::clone(&self.frontend);
        let node = self.node(name);
        node.attach().await;
        let is_there = || {
            let cluster = frontend.cluster();
            let known = cluster.node(&node.info.node)?;
            (known.is_ready() && known.info().generation == node.info.generation).then_some(())
        };
        until("the node is ready", is_there).await;
    }

    /// How a node introduces itself. A prompt's token takes it 10 ms.
    pub fn info(&self, name: &str) -> NodeInfo {
        let layout = KvLayout {
            model: 7,
            num_layers: 4,
            num_kv_heads: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 1024,
        };
        let profile = NodeProfile {
            prefill_base: 0.01,
            prefill_per_token: 0.01,
            decode_base: 0.01,
            decode_per_sequence: 0.001,
            max_waiting: 8,
            max_running: 8,
            ..NodeProfile::default()
        };
        NodeInfo {
            node: NodeId::new(name).unwrap(),
            role: if name.starts_with('p') { NodeRole::Prefill } else { NodeRole::Decode },
            generation: Generation(1),
            address: String::new(),
            model: self.frontend.model.name().to_owned(),
            vocab_size: 512,
            context_length: 8192,
            kv_class: "test".into(),
            layout,
            profile,
            vocabulary: self.frontend.model.grammars.digest().to_owned(),
        }
    }

    pub fn node(&mut self, name: &str) -> &mut FakeNode {
        self.nodes.get_mut(name).unwrap()
    }

    /// The state of a node, as operators see it.
    pub fn state(&self, name: &str) -> &'static str {
        self.frontend.cluster().node(&NodeId::new(name).unwrap()).unwrap().state().as_str()
    }

    pub async fn until_state(&self, name: &str, state: &str) {
        until(&format!("{name} is {state}"), || (self.state(name) == state).then_some(())).await;
    }

    /// The next job, whichever node gets it.
    pub async fn job(&mut self) -> Job {
        until("a job", || self.nodes.values_mut().find_map(FakeNode::job)).await
    }

    /// Whether any node has got a job.
    pub async fn has_job(&mut self) -> bool {
        settle().await;
        // A command comes after those before it, and a second greeting is no command of the
        // conductor's.
        let mark = Command::Hello(v1::Hello::default());
        for node in self.nodes.values_mut().filter(|node| node.has_session()) {
            if self.frontend.nodes.send(&node.info.node, mark.clone()) {
                node.hears("a mark", |command| (*command == mark).then_some(())).await;
            }
        }
        self.nodes.values_mut().any(|node| node.job().is_some())
    }

    /// Every node that is not silent reports. That was heard, and so was what was said before.
    pub async fn report(&mut self) {
        let reporting = self.nodes.values_mut().filter(|node| node.has_session() && !node.is_silent);
        let reported: Vec<_> = reporting.map(|node| (node.info.node.clone(), node.report())).collect();
        let is_heard = |(node, load): &(NodeId, v1::Load)| {
            let cluster = self.frontend.cluster();
            let known = cluster.node(node);
            known.is_none_or(|node| node.load().prefix_queries == load.prefix_queries || node.state().is_gone())
        };
        until("all reports", || reported.iter().all(is_heard).then_some(())).await;
        settle().await;
    }

    /// Time passes, and the nodes report.
    pub async fn pass(&mut self, time: Duration) {
        self.report().await;
        let end = self.clock.now() + time;
        while self.clock.now() < end {
            self.clock.advance(STEP.min(end - self.clock.now()));
            settle().await;
            self.report().await;
        }
    }

    pub async fn pass_ms(&mut self, millis: u64) {
        self.pass(Duration::from_millis(millis)).await;
    }

    pub fn inference(&self) -> v1::inference_client::InferenceClient<Channel> {
        v1::inference_client::InferenceClient::new(self.channel.clone())
    }

    pub fn operator(&self) -> v1::cluster_client::ClusterClient<Channel> {
        v1::cluster_client::ClusterClient::new(self.channel.clone())
    }

    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Sends a request, whose answer may take its time.
    pub fn ask(&self, request: v1::GenerateRequest) -> JoinHandle<Result<Answer, Status>> {
        client::ask(self.inference(), request)
    }

    /// Sends a request that is taken in.
    pub async fn generate(&self, request: v1::GenerateRequest) -> Answer {
        soon(self.ask(request)).await.unwrap().unwrap()
    }

    /// Of a client whose connection takes nearly nothing before it reads.
    pub async fn generate_unread(&self, request: v1::GenerateRequest) -> Answer {
        let window = |endpoint: Endpoint| endpoint.initial_stream_window_size(1024);
        let client = v1::inference_client::InferenceClient::new(connect(self.addresses.grpc, window));
        soon(client::ask(client, request)).await.unwrap().unwrap()
    }

    /// Sends a request that is refused.
    pub async fn refusal(&self, request: v1::GenerateRequest) -> Status {
        soon(self.ask(request)).await.unwrap().err().expect("it is refused")
    }

    /// Status and whole answer of an HTTP request; with a body it is a POST.
    pub fn http(&self, path: &str, body: &str) -> JoinHandle<(u16, String)> {
        client::http(self.addresses.http, path, body)
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        soon(self.http(path, "")).await.unwrap()
    }

    /// What a signal does.
    pub fn signal(&self) {
        self.signals.send("the test").unwrap();
    }

    /// Waits until the server is down.
    pub async fn down(&mut self) -> anyhow::Result<()> {
        soon(&mut self.server).await.unwrap()
    }

    /// All requests are over, and no node is charged anything for them.
    pub async fn ends(&mut self) {
        until("all requests are over", || self.frontend.live.is_empty().then_some(())).await;
        let cluster = self.frontend.cluster();
        assert_eq!((cluster.placed(), cluster.requests_queued()), (0, 0), "charges are left");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.abort();
        self.frontend.tasks.cancel();
    }
}
