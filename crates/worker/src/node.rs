//! From settings to a serving node, and down again: what both roles do alike.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use axum::middleware::from_fn_with_state;
use baton_engine::{CpuEngine, CpuOptions, Engine, EngineError, KvArena, KvCapacity, MockEngine};
use baton_formats::{ModelFile, model_name};
use baton_grammar::GrammarCompiler;
use baton_intake::{Budget, Intake, take_in};
use baton_memory::{keep_little_freed_memory, return_freed_memory};
use baton_profile::ModelProfile;
use baton_proto::{FILE_DESCRIPTORS, MAX_MESSAGE_BYTES, v1};
use baton_runtime::serve::Protocol;
use baton_runtime::settings::{BadSetting, seconds, within};
use baton_runtime::telemetry::init_logs;
use baton_runtime::{
    Clock, Drain, Phase, Shutdown, Signals, SystemClock, TaskSet, Telemetry, available_memory, default_cache_bytes,
    error_chain, model_bytes, new_generation, random_u64,
};
use baton_scheduler::{InvalidConfig, MAX_STORES, ModelConfig, REPORT_INTERVAL};
use baton_text::Tokenizer;
use baton_transfer_engine::{
    ArrivalReceiver, FakeNetwork, SegmentDescriptor, SegmentId, TransferConfig, TransferEngine, TransferError,
    TransportChoice, TransportKind,
};
use baton_types::{KvLayout, NodeId, NodeInfo, NodeProfile, NodeRole};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::service::Routes;

use crate::background::Background;
use crate::config::Settings;
use crate::engine_thread::{EngineEvent, EngineThread};
use crate::engine_watch::{EngineWatch, LayerCost};
use crate::input::Input;
use crate::metrics::LoadMetrics;
use crate::mock::{mock_options, node_profile, pacer, take_profile};
use crate::node_loop::{NodeLoop, NotReady, Role};
use crate::pacer::LinkPacer;
use crate::profile::profile;
use crate::readiness::{Readiness, Ready};
use crate::register::{Name, names, start_registration};
use crate::service::NodeService;
use crate::sessions::Sessions;
use crate::ssd::MAX_LOADS;
use crate::transfer::TransferView;

/// Inputs that may wait for the loop; senders wait in front of it.
const QUEUED_INPUTS: usize = 4096;
/// Calls of other nodes and operators that may wait for the loop; more are refused.
const QUEUED_CALLS: usize = 1024;
/// What the engine may say ahead of the loop: a few steps of a model with many layers.
const QUEUED_ENGINE_EVENTS: usize = 1024;
/// What `grace_s` may be, seconds.
const GRACES: RangeInclusive<f64> = 0.0..=24.0 * 3600.0;
/// What `step_timeout_s` may be, seconds. An engine is stalled for at least two seconds before it
/// is dead.
const STEP_TIMEOUTS: RangeInclusive<f64> = 3.0..=3600.0;
/// How long tasks may take to end once they are asked to.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Threads that may block: blocks are read from the SSD and written to it, names looked up, a model
/// loaded.
const BLOCKING_THREADS: usize = MAX_LOADS + MAX_STORES + 32;
/// How often it is looked whether much memory was freed, and how much that is.
const RETURN_INTERVAL: Duration = Duration::from_secs(2);
const RETURNED_BYTES: usize = 8 << 20;

/// What a role is built from.
pub struct NodeParts<E> {
    /// Who this is.
    pub info: Arc<NodeInfo>,
    /// Model and arena, as the core wants them.
    pub model: ModelConfig,
    /// The arena.
    pub arena: KvArena,
    /// The engine's thread.
    pub engine: EngineThread,
    /// Carries KV between nodes.
    pub transfer: TransferEngine,
    /// The arena, registered.
    pub segment: SegmentId,
    /// The arena, as peers need it.
    pub descriptor: SegmentDescriptor,
    /// What arrived.
    pub arrivals: ArrivalReceiver,
    /// What transfers wait for, if a mock stands for a model.
    pub pacer: Option<LinkPacer>,
    /// The conductors.
    pub sessions: Sessions,
    /// The way back into the loop.
    pub inputs: mpsc::Sender<Input<E>>,
    /// Where tasks live.
    pub tasks: TaskSet,
    /// Where time comes from. The engine and the transfer engine keep the machine's clock.
    pub clock: Arc<dyn Clock>,
}

/// Serves a node of one role until a signal, then drains.
///
/// # Errors
/// A setting cannot be used, or the node failed.
pub fn run<R: Role>(settings: Settings) -> anyhow::Result<()> {
    keep_little_freed_memory();
    init_logs(settings.log_format, &settings.log)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().thread_name("node").max_blocking_threads(BLOCKING_THREADS);
    let runtime = runtime.build()?;
    let served = runtime.block_on(serve::<R>(settings));
    // What hangs in a driver, or on a disk, does not keep the process.
    runtime.shutdown_timeout(CLOSE_TIMEOUT);
    served
}

async fn serve<R: Role>(settings: Settings) -> anyhow::Result<()> {
    let telemetry =
        Telemetry::install(&[crate::METRICS, R::METRICS, baton_transfer_engine::METRICS]).context("metrics")?;
    let around =
        NodeContext { clock: Arc::new(SystemClock), telemetry: telemetry.clone(), engine: None, network: None };
    let node = start::<R>(settings, around).await?;
    start_upkeep(telemetry, &node.tasks);
    // Who reads that it serves may end it at once.
    let signals = Signals::new()?;
    announce(&node);

    wait_and_drain(node.grace, signals, &node.tasks, &node.shutdown).await
}

/// What a node takes from its process.
pub(crate) struct NodeContext {
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// What the HTTP port renders.
    pub telemetry: Telemetry,
    /// An engine in place of the one that the settings name.
    pub engine: Option<Box<dyn Engine>>,
    /// A network within this process in place of the real one.
    pub network: Option<FakeNetwork>,
}

/// A node that serves.
pub(crate) struct Serving {
    /// Who it is.
    pub info: Arc<NodeInfo>,
    /// Its HTTP port.
    pub http: SocketAddr,
    /// Its transfer engine.
    pub transfer: TransferEngine,
    /// The transports that it offers.
    pub transports: String,
    /// How long its drain may take.
    pub grace: Duration,
    /// Where its tasks live.
    pub tasks: TaskSet,
    /// Its way down.
    pub shutdown: Shutdown,
}

/// Settings that hold, and what they say.
struct Checked {
    node: NodeId,
    /// The model that a mock engine plays.
    played: Option<ModelProfile>,
    conductors: Vec<Name>,
    grace: Duration,
    step_timeout: Duration,
}

impl Checked {
    fn of(settings: &mut Settings, role: NodeRole) -> anyhow::Result<Self> {
        let played = take_profile(settings, role)?;
        let node = node_name(settings, role)?;
        let conductors = names(&settings.conductor)?;
        check_ranges(settings)?;
        let grace = seconds("grace_s", settings.grace_s, GRACES)?;
        let step_timeout = seconds("step_timeout_s", settings.step_timeout_s, STEP_TIMEOUTS)?;
        Ok(Self { node, played, conductors, grace, step_timeout })
    }
}

/// What a node listens on.
struct Ports {
    grpc: TcpListener,
    http: TcpListener,
}

/// Starts a node: it is reachable, and registers, when this returns.
pub(crate) async fn start<R: Role>(mut settings: Settings, around: NodeContext) -> anyhow::Result<Serving> {
    let NodeContext { clock, telemetry, engine, network } = around;
    let checked = Checked::of(&mut settings, R::ROLE)?;
    let tasks = TaskSet::new();
    let generation = new_generation();
    let ports = Ports { grpc: listen("listen", &settings.listen).await?, http: listen("http", &settings.http).await? };
    let address = advertised(ports.grpc.local_addr()?, &settings)?;
    let (transfer, arrivals) = bind_transfer(&settings, &checked.node, generation, network, &tasks).await?;
    let loading = {
        let settings = settings.clone();
        let played = checked.played.clone();
        move || load_model(&settings, R::ROLE, played.as_ref(), engine)
    };
    let model = tokio::task::spawn_blocking(loading).await.context("loading the model")??;
    let info = Arc::new(node_info(&settings, checked.node.clone(), R::ROLE, generation, &address, &model)?);
    tracing::info!(
        kv_tokens = info.layout.capacity_tokens(),
        kv_bytes = info.layout.arena_bytes(),
        max_model_len = info.max_sequence_tokens(),
        context_length = model.engine.model().context_length,
        "KV cache"
    );
    let LoadedModel { engine, grammars, .. } = model;
    let arena = engine.arena().clone();
    let (segment, descriptor) = transfer.register(arena.region().clone()).context("registering the arena")?;
    let model = ModelConfig {
        layout: arena.layout().clone(),
        context_length: info.context_length,
        vocab_size: info.vocab_size,
    };
    let (inputs, input_events) = mpsc::channel(QUEUED_INPUTS);
    let (engine_says, engine_events) = mpsc::channel(QUEUED_ENGINE_EVENTS);
    let for_prompts = R::ROLE == NodeRole::Prefill;
    let engine = EngineThread::start(engine, grammars, for_prompts, engine_says).context("engine thread")?;
    let pacer = checked.played.as_ref().map(|played| pacer(&settings, played));
    let sessions = Sessions::default();
    let parts = NodeParts {
        info,
        model,
        arena,
        engine,
        transfer,
        segment,
        descriptor,
        arrivals,
        pacer,
        sessions,
        inputs,
        tasks,
        clock,
    };
    serve_role::<R>(&settings, checked, parts, engine_events, input_events, ports, telemetry).await
}

/// Makes the role of its parts, lets others reach it, and registers it.
async fn serve_role<R: Role>(
    settings: &Settings,
    checked: Checked,
    parts: NodeParts<R::Event>,
    engine: mpsc::Receiver<EngineEvent>,
    inputs: mpsc::Receiver<Input<R::Event>>,
    ports: Ports,
    telemetry: Telemetry,
) -> anyhow::Result<Serving> {
    let http = ports.http.local_addr()?;
    let info = Arc::clone(&parts.info);
    let transfer = parts.transfer.clone();
    let tasks = parts.tasks.clone();
    let sessions = parts.sessions.clone();
    let clock = Arc::clone(&parts.clock);
    let view = TransferView::new(transfer.clone(), &parts.descriptor);
    let transports = view.transports();
    let metrics = LoadMetrics::new(&parts.model.layout);
    let watch = EngineWatch::new(parts.engine.progress(), REPORT_INTERVAL, LayerCost::new(&info), checked.step_timeout);
    let (calls, called) = mpsc::channel(QUEUED_CALLS);
    let service = NodeService {
        info: Arc::clone(&info),
        inputs: parts.inputs.clone(),
        calls,
        sessions: sessions.clone(),
        tasks: tasks.clone(),
        clock: Arc::clone(&clock),
    };
    let shutdown = Shutdown::new();
    let readiness = Readiness::default();
    let node_loop = NodeLoop {
        role: R::new(settings, parts)?,
        engine,
        watch,
        inputs,
        calls: called,
        background: Background::new(clock.now()),
        sessions,
        transfer: view,
        clock: Arc::clone(&clock),
        shutdown: shutdown.clone(),
        readiness: readiness.clone(),
        away: NotReady::default(),
        metrics,
    };
    let messages = Budget::new(MESSAGE_BYTES);
    start_returning(messages.clone(), service.sessions.clone(), &tasks);
    start_grpc(service, ports.grpc, &tasks, readiness.clone(), messages).await?;
    crate::http::start(ports.http, telemetry, readiness, &tasks)?;
    start_loop(node_loop, &tasks);
    for conductor in checked.conductors {
        start_registration(conductor, Arc::clone(&info), &tasks, shutdown.clone(), Arc::clone(&clock));
    }
    Ok(Serving { info, http, transfer, transports, grace: checked.grace, tasks, shutdown })
}

async fn wait_and_drain(
    grace: Duration,
    mut signals: Signals,
    tasks: &TaskSet,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let signal = tokio::select! {
        signal = signals.recv() => signal,
        () = tasks.cancelled() => "a failed task",
    };
    tracing::info!(signal, ?grace, "draining");
    // Conductors hear of a drain at once. The loop says when it is done by moving on to Closing.
    let terms = Drain { not_ready: Duration::ZERO, grace };
    let drained = shutdown.clone();
    if !shutdown.drain(terms, &mut signals, async move { drained.wait_for(Phase::Closing).await }).await {
        tracing::warn!("ending what is left");
    }
    let joined = tasks.join(CLOSE_TIMEOUT).await;
    shutdown.advance(Phase::Flushed);
    tracing::info!("down");
    joined.map_err(Into::into)
}

async fn listen(key: &'static str, address: &str) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    Ok(listener.map_err(|error| {
        BadSetting::unavailable(key, format!("cannot listen on '{address}': {error} (expected host:port that is free)"))
    })?)
}

fn node_name(settings: &Settings, role: NodeRole) -> anyhow::Result<NodeId> {
    let name = settings.name.clone().unwrap_or_else(|| format!("{role}-{:08x}", random_u64() as u32));
    Ok(NodeId::new(&name).map_err(|error| BadSetting::invalid("name", error.to_string()))?)
}

/// Where others reach an address that was bound.
fn advertised(bound: SocketAddr, settings: &Settings) -> Result<String, BadSetting> {
    match &settings.advertise_host {
        Some(host) if host.contains(':') => Ok(format!("[{host}]:{}", bound.port())),
        Some(host) => Ok(format!("{host}:{}", bound.port())),
        None if bound.ip().is_unspecified() => {
            let problem = format!("not set, but others cannot reach {}, where this node listens", bound.ip());
            Err(BadSetting::invalid("advertise_host", problem))
        }
        None => Ok(bound.to_string()),
    }
}

async fn bind_transfer(
    settings: &Settings,
    node: &NodeId,
    generation: baton_types::Generation,
    network: Option<FakeNetwork>,
    tasks: &TaskSet,
) -> anyhow::Result<(TransferEngine, ArrivalReceiver)> {
    let listen: SocketAddr = settings.transfer_listen.parse().map_err(|_| {
        let problem = format!("'{}' is not an address of the form ip:port", settings.transfer_listen);
        BadSetting::invalid("transfer_listen", problem)
    })?;
    let is_reachable = settings.listen.parse().is_ok_and(|listen: SocketAddr| !listen.ip().is_loopback());
    if is_reachable && listen.ip().is_loopback() {
        tracing::warn!(
            listen = settings.listen,
            transfer_listen = settings.transfer_listen,
            "nodes on other hosts cannot exchange KV with this one: transfer_listen is on loopback"
        );
    }
    let mut config = TransferConfig::new(node.clone(), generation, listen);
    config.advertise_host = settings.advertise_host.clone();
    config.transport = settings.transport;
    config.shm_folder = settings.transfer_shm_folder.clone();
    config.rdma_devices = settings.transfer_rdma_devices.clone();
    config.rdma_gid_index = settings.transfer_rdma_gid_index;
    let bound = match network {
        Some(network) => TransferEngine::fake(&network, config, tasks),
        None => TransferEngine::bind(config, tasks).await,
    };
    bound.map_err(|error| not_bound(settings, listen, error))
}

/// Names the settings that a transfer engine was refused for.
fn not_bound(settings: &Settings, listen: SocketAddr, error: TransferError) -> anyhow::Error {
    if let TransferError::Config { field: key @ "advertise_host", problem } = error {
        return BadSetting::invalid(key, problem).into();
    }
    let TransferError::Listen { address, .. } = &error else { return error.into() };
    let said = error_chain(&error);
    let (key, problem) = match (*address == listen.to_string(), &settings.transfer_shm_folder) {
        (true, _) => ("transfer_listen", said),
        (false, None) => ("transport", format!("{}: {said}", settings.transport)),
        (false, Some(folder)) => {
            ("transport", format!("{} (socket folder {}): {said}", settings.transport, folder.display()))
        }
    };
    BadSetting::unavailable(key, problem).into()
}

/// If shared memory was asked for and the arena is not in it, no transfer could ever succeed.
fn check_shared(transport: TransportChoice, engine: &dyn Engine) -> anyhow::Result<()> {
    if transport == TransportChoice::Only(TransportKind::Shm) && engine.arena().region().shared_file().is_none() {
        let problem = format!("{transport}, but this system has no memory that processes can share (memfd)");
        bail!(BadSetting::unavailable("transport", problem));
    }
    Ok(())
}

/// An engine, and what goes with it.
struct LoadedModel {
    engine: Box<dyn Engine>,
    grammars: GrammarCompiler,
    /// How fast the engine is.
    profile: NodeProfile,
}

/// Loads the model, or takes the engine that is given, and measures it.
fn load_model(
    settings: &Settings,
    role: NodeRole,
    played: Option<&ModelProfile>,
    given: Option<Box<dyn Engine>>,
) -> anyhow::Result<LoadedModel> {
    let mut engine = given.map_or_else(|| load_engine(settings, role, played), Ok)?;
    let grammars = load_grammars(settings)?;
    check_shared(settings.transport, &*engine)?;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    if let Err(problem) = check_memory(settings, engine.arena().layout(), &meminfo) {
        tracing::warn!(%problem, "the KV cache is larger than this machine's memory");
    }
    // Of compute, so by the machine's clock.
    let began = baton_runtime::now();
    let profile = match played {
        Some(played) => node_profile(settings, played),
        None => profile(&mut *engine, settings).context("start-up profile")?,
    };
    let chunk_tokens = if role == NodeRole::Prefill { settings.chunk_tokens } else { settings.decode_chunk_tokens };
    let profile = NodeProfile { chunk_tokens, ..profile };
    tracing::debug!(elapsed = ?began.elapsed(), ?profile, "profiled");
    Ok(LoadedModel { engine, grammars, profile })
}

/// If a KV arena is larger than the machine's memory, the process is killed once the cache fills.
/// `meminfo` is what the kernel says of the memory, as in `/proc/meminfo`.
fn check_memory(settings: &Settings, layout: &KvLayout, meminfo: &str) -> Result<(), BadSetting> {
    let arena_bytes = layout.arena_bytes() as u64;
    let Some(memory_bytes) = total_memory(meminfo).filter(|memory| arena_bytes > *memory) else { return Ok(()) };
    let key = setting_of(settings, "kv_capacity");
    let value = if key == "cache_blocks" { settings.cache_blocks.into() } else { cache_bytes(settings) };
    let problem = format!("{value}, an arena of {arena_bytes} bytes, but this machine has {memory_bytes} bytes");
    Err(BadSetting::invalid(key, problem))
}

/// Bytes of the KV arena, if no number of blocks is set.
fn cache_bytes(settings: &Settings) -> u64 {
    settings.cache_bytes.unwrap_or_else(|| {
        let weights = settings.model.as_deref().map_or(0, model_bytes);
        default_cache_bytes(available_memory().unwrap_or(0), weights, 1)
    })
}

/// Tokens of prompt and output together that the node takes, of a model with this context.
fn max_model_len(settings: &Settings, context_length: u32) -> Result<u32, BadSetting> {
    let Some(wanted) = settings.max_model_len else { return Ok(context_length) };
    if (2..=context_length).contains(&wanted) {
        return Ok(wanted);
    }
    let problem = format!("{wanted}, but must be 2 to {context_length}, the context length of the model");
    Err(BadSetting::invalid("max_model_len", problem))
}

/// Bytes.
fn total_memory(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Loads what the settings name. Prints how far it is: who started this process shows it.
fn load_engine(settings: &Settings, role: NodeRole, played: Option<&ModelProfile>) -> anyhow::Result<Box<dyn Engine>> {
    match settings.engine.as_str() {
        "mock" => {
            let engine = MockEngine::new(mock_options(settings, role, played)?);
            Ok(Box::new(engine.map_err(|error| not_loaded(settings, error))?))
        }
        "cpu" => {
            let not_set =
                || BadSetting::invalid("model", "not set; give --model FILE, set BATON_MODEL, or use --engine mock");
            let path = settings.model.as_deref().ok_or_else(not_set)?;
            Ok(Box::new(load_cpu(path, settings).map_err(|error| not_loaded(settings, error))?))
        }
        other => bail!(BadSetting::invalid("engine", format!("'{other}', but must be cpu or mock"))),
    }
}

/// Compiles grammars against the model's vocabulary, as the conductor does.
fn load_grammars(settings: &Settings) -> anyhow::Result<GrammarCompiler> {
    let bad = |problem: String| BadSetting::invalid("model", problem);
    let tokenizer = match settings.model.as_deref().filter(|_| settings.engine != "mock") {
        None => Tokenizer::bytes(),
        Some(path) => {
            let file = ModelFile::open(path).map_err(|error| bad(error_chain(&error)))?;
            Tokenizer::from_model(&file).map_err(|error| bad(error_chain(&error)))?
        }
    };
    Ok(GrammarCompiler::new(&tokenizer).map_err(|error| bad(error.to_string()))?)
}

/// Names the setting that an engine was refused for.
fn not_loaded(settings: &Settings, error: EngineError) -> anyhow::Error {
    match error {
        EngineError::Options { field, problem } => BadSetting::invalid(setting_of(settings, field), problem).into(),
        EngineError::Format(_) | EngineError::Model(_) => BadSetting::invalid("model", error_chain(&error)).into(),
        other => anyhow::Error::new(other).context("loading the model"),
    }
}

/// Names the setting that a core was refused for.
pub fn core_refused(error: &InvalidConfig) -> BadSetting {
    let key = match error.field {
        "token_budget" => "chunk_tokens",
        "prompt_budget" => "decode_chunk_tokens",
        "max_sequences_per_chunk" => "max_running",
        field => field,
    };
    BadSetting::invalid(key, format!("{}, but must be {}", error.value, error.expected))
}

/// The setting that decides an engine's option; both are called alike if they are one and the same.
fn setting_of(settings: &Settings, option: &'static str) -> &'static str {
    match option {
        "kv_capacity" if settings.cache_blocks == 0 => "cache_bytes",
        "kv_capacity" | "num_blocks" => "cache_blocks",
        "kv_bytes_per_token" => "mock_kv_bytes",
        option => option,
    }
}

fn load_cpu(path: &Path, settings: &Settings) -> Result<CpuEngine, EngineError> {
    let file = ModelFile::open(path)?;
    let threads = match settings.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let options = CpuOptions {
        threads,
        kv_dtype: settings.kv_dtype,
        compute_dtype: settings.compute_dtype,
        block_tokens: settings.block_tokens,
        kv_capacity: match settings.cache_blocks {
            0 => KvCapacity::Bytes(cache_bytes(settings)),
            blocks => KvCapacity::Blocks(blocks),
        },
        ..CpuOptions::default()
    };
    let mut shown = -1;
    let mut progress = |done: f32| {
        let percent = (done * 100.0) as i32;
        if percent != shown {
            shown = percent;
            println!("PROGRESS {done:.2} loading weights");
        }
    };
    CpuEngine::load(&file, &options, &mut progress)
}

fn node_info(
    settings: &Settings,
    node: NodeId,
    role: NodeRole,
    generation: baton_types::Generation,
    grpc: &str,
    LoadedModel { engine, grammars, profile }: &LoadedModel,
) -> Result<NodeInfo, BadSetting> {
    let model = engine.model();
    Ok(NodeInfo {
        node,
        role,
        generation,
        address: format!("http://{grpc}"),
        model: settings.served_model_name.first().cloned().unwrap_or_else(|| served_name(settings, &model.name)),
        vocab_size: model.vocab_size,
        context_length: max_model_len(settings, model.context_length)?,
        kv_class: model.kv_class.clone(),
        layout: engine.arena().layout().clone(),
        profile: *profile,
        vocabulary: grammars.digest().to_owned(),
    })
}

/// As the conductor makes it from the same settings.
fn served_name(settings: &Settings, engine: &str) -> String {
    let path = settings.model.as_deref().filter(|_| settings.engine != "mock");
    path.map_or_else(|| engine.to_owned(), model_name)
}

/// Memory of what conductors and other nodes send, until it is decoded.
const MESSAGE_BYTES: usize = 256 << 20;

/// Memory of a message as its decoder copies it, and decoded, besides the entries of its lists.
fn decoded_bytes(message: &[u8], _text_bytes: usize) -> usize {
    message.len() * 2
}

async fn start_grpc<E: Send + 'static>(
    service: NodeService<E>,
    listener: TcpListener,
    tasks: &TaskSet,
    readiness: Readiness,
    messages: Budget,
) -> anyhow::Result<()> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<v1::node_server::NodeServer<NodeService<E>>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let service = v1::node_server::NodeServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let descriptors =
        [FILE_DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET, tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET];
    let intake = Arc::new(Intake::new(&descriptors.concat(), messages, decoded_bytes)?);
    let services = Routes::new(service).add_service(health_service).add_service(reflection).into_axum_router();
    let routes = Routes::from(services.layer(from_fn_with_state(intake, take_in))).prepare();
    crate::http::port("grpc", listener, Protocol::Http2).serve(routes, tasks);
    let end = tasks.clone();
    tasks.spawn_request("health", async move {
        let mut ready = Ready::Serving;
        loop {
            tokio::select! {
                now = readiness.changed_from(ready) => ready = now,
                () = end.cancelled() => return,
            }
            match ready {
                Ready::Serving => health.set_serving::<v1::node_server::NodeServer<NodeService<E>>>().await,
                _ => health.set_not_serving::<v1::node_server::NodeServer<NodeService<E>>>().await,
            }
        }
    });
    Ok(())
}

fn start_loop<R: Role>(node_loop: NodeLoop<R>, tasks: &TaskSet) {
    let sessions = node_loop.sessions.clone();
    let shutdown = node_loop.shutdown.clone();
    let end = tasks.clone();
    tasks.spawn("loop", async move {
        let ended = node_loop.run().await;
        // Conductors learn of the end by their sessions' end, after everything that was sent.
        match &ended {
            Ok(()) => sessions.close_all(),
            Err(_) => sessions.break_all(),
        }
        shutdown.advance(Phase::Closing);
        ended?;
        end.cancelled().await;
        Ok::<(), anyhow::Error>(())
    });
}

/// Numbers that are used as they are.
fn check_ranges(settings: &Settings) -> Result<(), BadSetting> {
    within("chunk_tokens", settings.chunk_tokens, 1..=65_536)?;
    within("decode_chunk_tokens", settings.decode_chunk_tokens, 1..=65_536)?;
    within("max_running", settings.max_running, 1..=65_536)?;
    within("max_waiting", settings.max_waiting, 1..=65_536)?;
    within("mock_base_us", settings.mock_base_us, 0..=60_000_000)?;
    within("mock_token_us", settings.mock_token_us, 0..=1_000_000)?;
    baton_runtime::settings::names("served_model_name", &settings.served_model_name)?;
    match &settings.advertise_host {
        Some(host) if host.parse::<std::net::IpAddr>().is_err() && !is_host_name(host) => {
            let problem = format!("'{host}', but must be an IP address or the name of a host, without a port");
            Err(BadSetting::invalid("advertise_host", problem))
        }
        Some(_) | None => Ok(()),
    }
}

fn is_host_name(text: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '.' | '_');
    (1..=253).contains(&text.len()) && text.chars().all(is_letter)
}

/// Folds histograms: without it they grow until they are asked for.
fn start_upkeep(telemetry: Telemetry, tasks: &TaskSet) {
    let end = tasks.clone();
    tasks.spawn("upkeep", async move {
        loop {
            tokio::select! {
                () = baton_runtime::sleep(Telemetry::UPKEEP_INTERVAL) => telemetry.upkeep(),
                () = end.cancelled() => return Ok::<(), anyhow::Error>(()),
            }
        }
    });
}

/// Gives memory back to the system once much of it was freed: of messages of peers, and of what
/// conductors left unread.
fn start_returning(messages: Budget, sessions: Sessions, tasks: &TaskSet) {
    let end = tasks.clone();
    tasks.spawn("freed memory", async move {
        loop {
            tokio::select! {
                () = baton_runtime::sleep(RETURN_INTERVAL) => {}
                () = end.cancelled() => return Ok::<(), anyhow::Error>(()),
            }
            if messages.freed() + sessions.freed() >= RETURNED_BYTES {
                // It takes milliseconds, and tells nothing.
                drop(tokio::task::spawn_blocking(return_freed_memory));
            }
        }
    });
}

/// One line on stdout: who started this process reads where it listens.
fn announce(Serving { info, http, transfer, transports, .. }: &Serving) {
    let grpc = info.address.trim_start_matches("http://");
    let transfer = transfer.local_addr();
    let ready = serde_json::json!({
        "role": info.role.as_str(), "node": info.node.as_str(), "grpc": grpc, "http": http.to_string(), "transfer": transfer.to_string(),
        "kv_tokens": info.layout.capacity_tokens(), "max_model_len": info.max_sequence_tokens(),
    });
    println!("READY {ready}");
    tracing::info!(node = %info.node, grpc, %http, %transfer, transports, "serving");
}

#[cfg(test)]
mod tests {
    use baton_types::KvDtype;

    use super::*;

    fn said(settings: &Settings, error: EngineError) -> String {
        let error = not_loaded(settings, error);
        error.downcast_ref::<BadSetting>().map_or_else(|| format!("not a setting: {error:#}"), ToString::to_string)
    }

    #[test]
    fn kv_cache_larger_than_memory_is_named_by_its_setting() {
        // 32 blocks of 4 KiB.
        let layout = KvLayout {
            model: 7,
            num_layers: 2,
            num_kv_heads: 1,
            head_dim: 32,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 32,
        };
        let settings = Settings { cache_bytes: Some(140_000), ..Settings::default() };
        let checked = |settings: &Settings, kib: u32| {
            let meminfo = format!(
                "MemTotal:      {kib} kB
MemFree:       3 kB
"
            );
            check_memory(settings, &layout, &meminfo).map_err(|problem| problem.to_string())
        };
        assert_eq!(checked(&settings, 128), Ok(()));
        let problem = "cache_bytes: 140000, an arena of 131072 bytes, but this machine has 130048 bytes";
        assert_eq!(checked(&settings, 127), Err(problem.to_owned()));
        let settings = Settings { cache_blocks: 32, ..settings };
        assert!(checked(&settings, 127).unwrap_err().starts_with("cache_blocks: 32, an arena"));
        assert!(check_memory(&settings, &layout, "MemTotal: much").is_ok(), "what is not known is not judged");
    }

    #[test]
    fn refusal_of_engine_or_core_is_named_by_its_setting() {
        let options = |field| EngineError::Options { field, problem: "0, but must be 1".into() };
        let bytes = Settings::default();
        let blocks = Settings { cache_blocks: 7, ..Settings::default() };
        assert_eq!(said(&bytes, options("threads")), "threads: 0, but must be 1");
        assert_eq!(said(&bytes, options("kv_capacity")), "cache_bytes: 0, but must be 1");
        assert_eq!(said(&blocks, options("kv_capacity")), "cache_blocks: 0, but must be 1");
        assert_eq!(said(&bytes, options("kv_bytes_per_token")), "mock_kv_bytes: 0, but must be 1");
        assert_eq!(said(&bytes, options("BATON_ISA")), "BATON_ISA: 0, but must be 1");
        assert_eq!(said(&bytes, EngineError::Model("no head".into())), "model: no head", "once");
        let core = InvalidConfig { field: "token_budget", value: "5".into(), expected: "a multiple of 16" };
        assert_eq!(core_refused(&core).to_string(), "chunk_tokens: 5, but must be a multiple of 16");
    }
}
