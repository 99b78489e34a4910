//! A conductor that says what tests need: it answers with the prompt it was given.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use baton_types::ErrorKind;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status};

/// What clients did.
#[derive(Debug, Default, Clone, Copy)]
pub struct Seen {
    pub requests: usize,
    pub dropped: usize,
}

/// Serves until it is dropped.
pub struct Fake {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    _runtime: tokio::runtime::Runtime,
}

impl Fake {
    pub fn start() -> Self {
        Self::knowing('a')
    }

    /// One that served the requests whose ids begin so.
    pub fn knowing(served: char) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(v1::inference_server::InferenceServer::new(Service { seen: Arc::clone(&seen), served }))
            .add_service(v1::cluster_server::ClusterServer::new(Service { seen: Arc::clone(&seen), served }))
            .serve_with_incoming(TcpListenerStream::new(listener));
        runtime.spawn(server);
        Self { address, seen, _runtime: runtime }
    }

    pub fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    #[allow(dead_code)] // each test binary uses what it needs
    pub fn wait(&self, what: &str, done: impl Fn(Seen) -> bool) {
        let start = Instant::now();
        while !done(*self.seen.lock().unwrap()) {
            assert!(start.elapsed() < Duration::from_secs(10), "{what} did not come: {:?}", self.seen.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Service {
    seen: Arc<Mutex<Seen>>,
    served: char,
}

type Responses = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

fn said(prompt: Option<Prompt>) -> String {
    match prompt {
        Some(Prompt::Messages(m)) => m.messages.iter().map(|m| format!("{}: {}|", m.role, m.content)).collect(),
        Some(Prompt::Text(t)) => format!("raw: {}|", t.text),
        other => format!("{other:?}"),
    }
}

fn event(event: Event) -> Result<v1::GenerateResponse, Status> {
    Ok(v1::GenerateResponse { event: Some(event), completion: 0 })
}

fn delta(index: u32, text: &str) -> Result<v1::GenerateResponse, Status> {
    event(Event::Delta(v1::Delta { index, token_ids: vec![index], text: text.into(), ..v1::Delta::default() }))
}

fn finished() -> Result<v1::GenerateResponse, Status> {
    let migrated = v1::KvTransfer { bytes: 1 << 20, transport: "tcp".into(), ..Default::default() };
    event(Event::Finished(Box::new(v1::Finished {
        finish_reason: "stop".into(),
        usage: Some(v1::Usage { prompt_tokens: 3, completion_tokens: 1, cached_tokens: 0 }),
        timeline: Some(v1::Timeline { kv_transfer: Some(migrated), ..Default::default() }),
        prefill_node: "prefill-0".into(),
        decode_node: "decode-0".into(),
        ..v1::Finished::default()
    })))
}

#[tonic::async_trait]
impl v1::inference_server::Inference for Service {
    type GenerateStream = Responses;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Responses>, Status> {
        let request = request.into_inner();
        self.seen.lock().unwrap().requests += 1;
        let seed = request.sampling.as_ref().and_then(|s| s.seed).unwrap_or(1);
        let wants_logprobs = request.sampling.as_ref().is_some_and(|s| s.logprobs.is_some());
        let said = said(request.prompt);
        let refuse = |kind, message: &str, after| Err(baton_proto::status(kind, message, after));
        if said.contains("fail:invalid") {
            return refuse(ErrorKind::Invalid, "temperature: -1, but must be at least 0", None);
        } else if said.contains("fail:overloaded") {
            return refuse(ErrorKind::Overloaded, "full", Some(Duration::from_secs(3)));
        } else if said.contains("fail:unavailable") {
            return refuse(ErrorKind::Unavailable, "no node", None);
        }
        let accepted =
            v1::Accepted { request_id: "r1".into(), model: "m".into(), prompt_token_ids: vec![1, 2, 3], seed };
        let (sender, receiver) = mpsc::channel(4);
        let seen = Arc::clone(&self.seen);
        #[allow(clippy::disallowed_methods)] // ends with the client
        tokio::spawn(async move {
            let _ = sender.send(event(Event::Accepted(accepted))).await;
            if said.contains("endless") || said.contains("slow") {
                let mut index = 0;
                while (said.contains("endless") || index < 100) && sender.send(delta(index, "more ")).await.is_ok() {
                    index += 1;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            } else {
                let top = vec![v1::TopLogprob { token_id: 0, logprob: -0.25, text: " a".into(), ..Default::default() }];
                let logprobs = v1::TokenLogprobs { logprob: Some(-0.25), top, text: " a".into(), ..Default::default() };
                let logprobs = if wants_logprobs { vec![logprobs] } else { Vec::new() };
                let delta =
                    v1::Delta { index: 0, token_ids: vec![0], text: said.clone(), logprobs, ..v1::Delta::default() };
                for completion in 1..request.n {
                    for event in [Event::Delta(delta.clone()), Event::Finished(Box::default())] {
                        let _ = sender.send(Ok(v1::GenerateResponse { event: Some(event), completion })).await;
                    }
                }
                let _ = sender.send(event(Event::Delta(delta))).await;
            }
            let last = if said.contains("fail:midway") { Err(Status::data_loss("lost it")) } else { finished() };
            if sender.send(last).await.is_err() {
                seen.lock().unwrap().dropped += 1;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn abort(&self, _: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        Err(Status::unimplemented("abort"))
    }

    async fn list_models(&self, _: Request<v1::ListModelsRequest>) -> Result<Response<v1::ListModelsResponse>, Status> {
        Err(Status::unimplemented("list_models"))
    }
}

fn settings(version: u64) -> v1::RunTimeSettings {
    let log = v1::RunTimeSetting { key: "log".into(), value: Some("debug".into()), origin: "set at run time".into() };
    v1::RunTimeSettings { version, by: "me".into(), set_at_ms: 7, settings: vec![log] }
}

fn node(name: &str, role: &str) -> v1::NodeStatus {
    let info = v1::NodeInfo { name: name.into(), role: role.into(), ..Default::default() };
    v1::NodeStatus { info: Some(info), state: "ready".into(), ..Default::default() }
}

#[tonic::async_trait]
impl v1::cluster_server::Cluster for Service {
    type WatchSettingsStream = ReceiverStream<Result<v1::RunTimeSettings, Status>>;

    async fn get_settings(&self, _: Request<v1::GetSettingsRequest>) -> Result<Response<v1::RunTimeSettings>, Status> {
        Ok(Response::new(settings(1)))
    }

    async fn set_settings(
        &self,
        request: Request<v1::SetSettingsRequest>,
    ) -> Result<Response<v1::RunTimeSettings>, Status> {
        let asked = request.into_inner();
        if asked.values.get("log").is_some_and(|value| value == "loud") {
            return Err(baton_proto::status(ErrorKind::Invalid, "log: 'loud', but must be a level", None));
        }
        // One that is never in force.
        let version = if asked.by == "late" { 2 } else { 1 };
        Ok(Response::new(settings(version)))
    }

    async fn watch_settings(
        &self,
        _: Request<v1::WatchSettingsRequest>,
    ) -> Result<Response<Self::WatchSettingsStream>, Status> {
        Err(Status::unimplemented("watch_settings"))
    }

    async fn list_nodes(&self, _: Request<v1::ListNodesRequest>) -> Result<Response<v1::ListNodesResponse>, Status> {
        let path = v1::TransferPath { node: "decode-0".into(), transport: "shm".into(), ..Default::default() };
        let transfer = Some(v1::TransferReport { addresses: Vec::new(), paths: vec![path] });
        let prefill = v1::NodeStatus { transfer, ..node("prefill-0", "prefill") };
        let nodes = vec![prefill, node("decode-0", "decode")];
        Ok(Response::new(v1::ListNodesResponse { nodes, ..v1::ListNodesResponse::default() }))
    }

    async fn check_integrity(
        &self,
        _: Request<v1::CheckClusterIntegrityRequest>,
    ) -> Result<Response<v1::CheckClusterIntegrityResponse>, Status> {
        let entry =
            |node: &str, problem: &str| v1::NodeIntegrity { node: node.into(), problem: problem.into(), load: None };
        let nodes = vec![entry("prefill-0", ""), entry("decode-0", "block 3 is lost")];
        Ok(Response::new(v1::CheckClusterIntegrityResponse { nodes }))
    }

    async fn explain(&self, _: Request<v1::ExplainRequest>) -> Result<Response<v1::ExplainResponse>, Status> {
        Err(Status::unimplemented("explain"))
    }

    async fn cluster_load(
        &self,
        _: Request<v1::ClusterLoadRequest>,
    ) -> Result<Response<v1::ClusterLoadResponse>, Status> {
        let prefill =
            v1::PrefillNodeLoad { node: "prefill-0".into(), state: "ready".into(), pending: 3, ..Default::default() };
        Ok(Response::new(v1::ClusterLoadResponse { prefill: vec![prefill], ..Default::default() }))
    }

    async fn explain_by_id(
        &self,
        request: Request<v1::ExplainByIdRequest>,
    ) -> Result<Response<v1::ExplainByIdResponse>, Status> {
        let request_id = request.into_inner().request_id;
        if !request_id.starts_with(self.served) {
            return Err(baton_proto::status(ErrorKind::NotFound, "request_id: not among the last 7", None));
        }
        Ok(Response::new(v1::ExplainByIdResponse { request_id, max_tokens: 5, ..Default::default() }))
    }

    async fn cache_status(
        &self,
        request: Request<v1::CacheStatusRequest>,
    ) -> Result<Response<v1::CacheStatusResponse>, Status> {
        let node = v1::NodeCache { node: "prefill-0".into(), ..Default::default() };
        let prefix = v1::HotPrefix { hash: "ab".into(), tokens: request.into_inner().top, ..Default::default() };
        Ok(Response::new(v1::CacheStatusResponse { nodes: vec![node], prefixes: vec![prefix] }))
    }

    async fn cache_lookup(
        &self,
        request: Request<v1::CacheLookupRequest>,
    ) -> Result<Response<v1::CacheLookupResponse>, Status> {
        let prompt = said(request.into_inner().request.unwrap_or_default().prompt);
        let row = v1::CacheMatch { node: "decode-0".into(), role: "decode".into(), tokens: 32 };
        Ok(Response::new(v1::CacheLookupResponse { prompt_tokens: prompt.len() as u32, matches: vec![row] }))
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        Ok(Response::new(v1::DrainResponse {}))
    }

    async fn undrain(&self, _: Request<v1::UndrainRequest>) -> Result<Response<v1::UndrainResponse>, Status> {
        Ok(Response::new(v1::UndrainResponse {}))
    }

    async fn clear_cache(
        &self,
        request: Request<v1::ClearCacheRequest>,
    ) -> Result<Response<v1::ClearCacheResponse>, Status> {
        match request.into_inner().node.as_str() {
            "" => Ok(Response::new(v1::ClearCacheResponse {
                nodes: vec!["prefill-0".into(), "decode-0".into()],
                held_blocks: vec![0, 7],
            })),
            node => Err(baton_proto::status(ErrorKind::NotFound, format!("node: no node '{node}'"), None)),
        }
    }

    async fn version(&self, _: Request<v1::VersionRequest>) -> Result<Response<v1::VersionResponse>, Status> {
        Ok(Response::new(v1::VersionResponse {
            version: "9.9.9".into(),
            protocol_version: 1,
            conductor_id: "c1".into(),
            leads: true,
            ready: false,
        }))
    }
}
