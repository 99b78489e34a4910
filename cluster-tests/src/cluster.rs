//! A cluster of real processes on this machine.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use baton_proto::{MAX_MESSAGE_BYTES, v1};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::control_group::ControlGroup;
use crate::process::Process;

/// How long the cluster may take until every node takes requests.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// What kind of cluster.
#[derive(Debug, Clone)]
pub struct Builder {
    model: Option<PathBuf>,
    prefill: usize,
    decode: usize,
    conductor_flags: Vec<String>,
    /// Command by which the conductor is started within bounds.
    bounds: Vec<String>,
    prefill_flags: Vec<String>,
    decode_flags: Vec<String>,
}

/// Longest that an HTTP answer takes.
const HTTP_TIMEOUT: Duration = Duration::from_secs(60);

/// What the HTTP port answers.
#[derive(Debug)]
pub struct HttpAnswer {
    /// 200 and the like.
    pub status: u16,
    /// By name, in small letters.
    pub headers: HashMap<String, String>,
    /// After the header.
    pub body: String,
}

/// A running cluster; everything is killed when it is dropped.
pub struct Cluster {
    /// The frontend.
    pub conductor: Process,
    /// Prefill nodes, `prefill-0` on.
    pub prefill: Vec<Process>,
    /// Decode nodes, `decode-0` on.
    pub decode: Vec<Process>,
    channel: Channel,
    operators: Channel,
    folder: TempDir,
}

impl Cluster {
    /// A cluster with the mock engine, 1 + 1.
    pub fn mock() -> Builder {
        Builder {
            model: None,
            prefill: 1,
            decode: 1,
            conductor_flags: Vec::new(),
            bounds: Vec::new(),
            prefill_flags: Vec::new(),
            decode_flags: Vec::new(),
        }
    }

    /// A cluster with a model, 1 + 1, one thread each.
    pub fn model(path: &Path) -> Builder {
        Builder { model: Some(path.to_owned()), ..Self::mock() }
    }
}

fn flags(list: &[&str]) -> impl Iterator<Item = String> {
    list.iter().map(ToString::to_string)
}

impl Builder {
    /// Number of prefill nodes.
    pub fn prefill(mut self, n: usize) -> Self {
        self.prefill = n;
        self
    }

    /// Number of decode nodes.
    pub fn decode(mut self, n: usize) -> Self {
        self.decode = n;
        self
    }

    /// How many descriptors the conductor may have.
    pub fn descriptors(mut self, descriptors: u32) -> Self {
        self.bounds = vec!["prlimit".into(), format!("--nofile={descriptors}")];
        self
    }

    /// The control group that the conductor is started in.
    pub fn conductor_group(mut self, group: &ControlGroup) -> Self {
        let processes = group.processes().display().to_string();
        self.bounds = vec!["sh".into(), "-c".into(), r#"echo $$ >"$0" && exec "$@""#.into(), processes];
        self
    }

    /// More flags for the conductor.
    pub fn conductor_flags(mut self, list: &[&str]) -> Self {
        self.conductor_flags.extend(flags(list));
        self
    }

    /// More flags for prefill nodes.
    pub fn prefill_flags(mut self, list: &[&str]) -> Self {
        self.prefill_flags.extend(flags(list));
        self
    }

    /// More flags for decode nodes.
    pub fn decode_flags(mut self, list: &[&str]) -> Self {
        self.decode_flags.extend(flags(list));
        self
    }

    /// More flags for all nodes.
    pub fn node_flags(self, list: &[&str]) -> Self {
        self.prefill_flags(list).decode_flags(list)
    }

    fn engine(&self) -> Vec<String> {
        match &self.model {
            Some(path) => vec!["--model".into(), path.display().to_string()],
            None => flags(&["--engine", "mock"]).collect(),
        }
    }

    /// Starts one node and waits until it is up (not until the conductor has it).
    pub async fn start_node(
        &self,
        role: &str,
        index: usize,
        conductor: &str,
        folder: &Path,
    ) -> anyhow::Result<Process> {
        let name = format!("{role}-{index}");
        let mut arguments = self.engine();
        arguments.extend(flags(&["--name", &name, "--conductor", conductor]));
        arguments.extend(if role == "prefill" { self.prefill_flags.clone() } else { self.decode_flags.clone() });
        if !arguments.iter().any(|flag| flag == "--threads") {
            arguments.extend(flags(&["--threads", "1"]));
        }
        Process::start(&format!("baton-{role}"), &arguments, folder.join(format!("{name}.log"))).await
    }

    /// Starts everything and waits until every node takes requests.
    pub async fn start(self) -> anyhow::Result<Cluster> {
        let folder = tempfile::tempdir()?;
        let mut arguments = self.engine();
        arguments.extend(flags(&["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]));
        arguments.extend(self.conductor_flags.clone());
        // The prompts of most tests are short, and are to go the whole way.
        if !arguments.iter().any(|flag| flag == "--prompts-at-decode") {
            arguments.extend(flags(&["--prompts-at-decode", "fallback"]));
        }
        let log = folder.path().join("conductor.log");
        let conductor = match self.bounds.as_slice() {
            [] => Process::start("baton-conductor", &arguments, log).await?,
            bounds => Process::start_within(bounds, "baton-conductor", &arguments, log).await?,
        };
        let ready = &conductor.ready;
        let address = format!("http://{}", ready.nodes.as_ref().unwrap_or(&ready.grpc));
        let mut prefill = Vec::new();
        let mut decode = Vec::new();
        for index in 0..self.prefill {
            prefill.push(self.start_node("prefill", index, &address, folder.path()).await?);
        }
        for index in 0..self.decode {
            decode.push(self.start_node("decode", index, &address, folder.path()).await?);
        }
        let connect = async |address: &String| {
            Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true).connect().await
        };
        let channel = connect(&ready.grpc).await?;
        // Of its own: one that clients leave by the thousand is ended by HTTP/2's guard against
        // resets.
        let operators = connect(ready.operators.as_ref().unwrap_or(&ready.grpc)).await?;
        let cluster = Cluster { conductor, prefill, decode, channel, operators, folder };
        cluster.wait_ready(self.prefill + self.decode).await?;
        Ok(cluster)
    }
}

impl Cluster {
    /// A client of the frontend.
    pub fn inference(&self) -> v1::inference_client::InferenceClient<Channel> {
        let client = v1::inference_client::InferenceClient::new(self.channel.clone());
        client.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// An operator's client.
    pub fn operator(&self) -> v1::cluster_client::ClusterClient<Channel> {
        v1::cluster_client::ClusterClient::new(self.operators.clone())
    }

    /// Calls the conductor's HTTP port: POST if there is a body. Gives status and body.
    pub async fn http(&self, path: &str, body: Option<&str>) -> anyhow::Result<(u16, String)> {
        let HttpAnswer { status, body, .. } = self.http_with(path, &[], body).await?;
        Ok((status, body))
    }

    /// The same with headers, both ways.
    pub async fn http_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> anyhow::Result<HttpAnswer> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let address = self.conductor.ready.http.as_deref().context("no HTTP port")?;
        let method = if body.is_some() { "POST" } else { "GET" };
        let body = body.unwrap_or_default();
        let own: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        // HTTP/1.0: the answer ends with the connection and comes in one piece.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nhost: {address}\r\ncontent-type: application/json\r\n{own}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = tokio::net::TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        tokio::time::timeout(HTTP_TIMEOUT, stream.read_to_string(&mut answer)).await??;
        let (head, body) = answer.split_once("\r\n\r\n").context("no header")?;
        let status = head.split_whitespace().nth(1).context("no status")?.parse()?;
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        Ok(HttpAnswer { status, headers: head.lines().filter_map(header).collect(), body: body.to_owned() })
    }

    /// Where logs are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The nodes as the conductor sees them.
    pub async fn nodes(&self) -> anyhow::Result<Vec<v1::NodeStatus>> {
        Ok(self.operator().list_nodes(v1::ListNodesRequest {}).await?.into_inner().nodes)
    }

    /// Waits until exactly this many nodes take requests.
    pub async fn wait_ready(&self, count: usize) -> anyhow::Result<()> {
        let what = format!("{count} nodes that are ready");
        self.wait_for(&what, READY_TIMEOUT, || async {
            let nodes = self.nodes().await?;
            Ok(nodes.iter().filter(|node| node.state == "ready").count() == count)
        })
        .await
    }

    /// Waits for something that must come true in time.
    pub async fn wait_for<F>(&self, what: &str, limit: Duration, check: impl Fn() -> F) -> anyhow::Result<()>
    where
        F: Future<Output = anyhow::Result<bool>>,
    {
        let began = Instant::now();
        while began.elapsed() < limit {
            if check().await.with_context(|| format!("waiting for {what}"))? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("no {what} within {limit:?}; nodes: {:#?}", self.nodes().await?)
    }

    /// Every node proves that each block is accounted for; gives back their loads.
    pub async fn check_integrity(&self) -> anyhow::Result<Vec<(String, v1::Load)>> {
        self.check_integrity_without(&[]).await
    }

    async fn check_integrity_without(&self, gone: &[&str]) -> anyhow::Result<Vec<(String, v1::Load)>> {
        let checked = self.operator().check_integrity(v1::CheckClusterIntegrityRequest {}).await?.into_inner();
        let mut loads = Vec::new();
        for node in checked.nodes.into_iter().filter(|node| !gone.contains(&node.node.as_str())) {
            anyhow::ensure!(node.problem.is_empty(), "{}: {}", node.node, node.problem);
            loads.push((node.node, node.load.unwrap_or_default()));
        }
        Ok(loads)
    }

    /// Waits until no node holds a block for a request, then checks that each block is accounted
    /// for.
    pub async fn wait_idle(&self, limit: Duration) -> anyhow::Result<()> {
        self.wait_idle_without(&[], limit).await
    }

    /// The same of the nodes that are left, if some are gone.
    pub async fn wait_idle_without(&self, gone: &[&str], limit: Duration) -> anyhow::Result<()> {
        self.wait_for("idle cluster", limit, || async {
            Ok(self.check_integrity_without(gone).await?.iter().all(|(_, load)| {
                load.running == 0 && load.waiting == 0 && load.blocks_used == 0 && load.blocks_reserved == 0
            }))
        })
        .await
    }

    /// Ends the first node of a role as a crash would, and starts it again, without its cache;
    /// returns once the conductor has noticed both.
    pub async fn restart(&mut self, builder: &Builder, role: &str) -> anyhow::Result<()> {
        let nodes = self.prefill.len() + self.decode.len();
        let conductor = format!("http://{}", self.conductor.ready.grpc);
        self.of_role(role).remove(0).kill().await?;
        self.wait_ready(nodes - 1).await?;
        let node = builder.start_node(role, 0, &conductor, self.folder()).await?;
        self.of_role(role).push(node);
        self.wait_ready(nodes).await
    }

    fn of_role(&mut self, role: &str) -> &mut Vec<Process> {
        if role == "prefill" { &mut self.prefill } else { &mut self.decode }
    }

    /// Drains everything, the conductor first, and checks that each process ended well.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.conductor.stop().await.context("conductor")?;
        for process in self.prefill.into_iter().chain(self.decode) {
            process.stop().await?;
        }
        Ok(())
    }
}
