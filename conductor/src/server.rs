//! From settings to a serving process, and down again.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_formats::{ModelFile, model_name};
use baton_grammar::GrammarCompiler;
use baton_proto::MAX_MESSAGE_BYTES;
use baton_runtime::settings::{self, BadSetting};
use baton_runtime::telemetry::init_logs;
use baton_runtime::{
    Clock, Drain, Phase, Shutdown, Signals, SystemClock, TaskSet, Telemetry, error_chain, random_u64, within,
};
use baton_scheduler::{
    AdmissionKind, Cluster, ClusterConfig, PlacementKind, Policies, PromptsAtDecode, RequestLimits, TICK_INTERVAL,
};
use baton_text::{ChatTemplate, Tokenizer};
use baton_types::{ConductorId, Slo, Tbt, Ttft};

use crate::config::{Settings, positive_millis};
use crate::front_door::{FrontDoor, FrontDoorLimits, KvFormat};
use crate::leader;
use crate::metrics::{METRICS, Metrics};
use crate::nodes::NodeSessions;
use crate::ports::{Addresses, Ports};
use crate::prompt::TextModel;

/// How long tasks may take to end once they are asked to.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// To look for prefixes to copy takes a look at every counted one.
const SHORTEST_REPLICATION: Duration = Duration::from_millis(100);
/// What `stall_timeout_s` may be, seconds. Nodes that compute a long prompt say so every ten seconds.
const STALL_TIMEOUTS: RangeInclusive<f64> = 1.0..=24.0 * 3600.0;
/// Longest that a setting lets a request wait.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
/// One of so many of the requests served at once may wait at the door.
const HELD_SHARE: usize = 32;
/// How often the drain looks whether requests are left.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// Serves until a signal, then drains.
pub fn run(settings: Settings) -> anyhow::Result<()> {
    init_logs(settings.log_format, &settings.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("conductor").build()?;
    runtime.block_on(serve(settings))
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    let telemetry = Telemetry::install(&[METRICS]).context("metrics")?;
    let server = Server::start(&settings, Arc::new(SystemClock), telemetry, Metrics::default()).await?;
    // Who reads that it serves may end it at once.
    let mut signals = Signals::new()?;
    announce(server.addresses);
    server.run(async || signals.recv().await).await
}

/// A conductor that serves. Nothing of it belongs to the whole process: signals, logs and the recorder of metrics are
/// its caller's.
pub struct Server {
    /// What its requests share.
    pub door: Arc<FrontDoor>,
    /// Where it listens.
    pub addresses: Addresses,
    drain: Drain,
}

impl Server {
    /// Binds the ports and serves them. `metrics` are handles that `telemetry` renders.
    pub async fn start(
        settings: &Settings,
        clock: Arc<dyn Clock>,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> anyhow::Result<Self> {
        check_ranges(settings)?;
        let stall_timeout = settings::seconds("stall_timeout_s", settings.stall_timeout_s, STALL_TIMEOUTS)?;
        let grace = settings::seconds("grace_s", settings.grace_s, 0.0..=LONGEST_WAIT.as_secs_f64())?;
        let not_ready = settings::seconds("not_ready_s", settings.not_ready_s, 0.0..=600.0)?;
        let drain = Drain { not_ready, grace };
        let ports = Ports::bind(settings, stall_timeout).await?;
        let addresses = ports.addresses()?;
        let door = Arc::new(front_door(settings, clock, metrics)?);
        ports.serve(&door, &telemetry, &door.tasks)?;
        leader::start(&door, settings, addresses.nodes.unwrap_or(addresses.grpc))?;
        start_upkeep(Arc::clone(&door), telemetry);
        start_replication(settings, Arc::clone(&door))?;
        Ok(Self { door, addresses, drain })
    }

    /// Serves until `signal` gives one, then drains; the next one ends what is left.
    pub async fn run(self, mut signal: impl AsyncFnMut() -> &'static str) -> anyhow::Result<()> {
        let Self { door, drain, .. } = self;
        let (tasks, shutdown, clock) = (&door.tasks, &door.shutdown, &*door.clock);
        let first = tokio::select! {
            signal = signal() => signal,
            () = tasks.cancelled() => "a failed task",
        };
        // Without one of its tasks nobody is served any better by waiting.
        let drain = if tasks.is_cancelled() { Drain { not_ready: Duration::ZERO, ..drain } } else { drain };
        tracing::info!(signal = first, requests = door.live.len(), ?drain, "draining");
        let drained = async || {
            while !door.live.is_empty() || door.keyed.readers() > 0 {
                clock.sleep(DRAIN_POLL).await;
            }
        };
        if !shutdown.drain_by(clock, drain, signal(), drained()).await {
            tracing::warn!(requests = door.live.len(), "ending what is left");
            // Each gets its terminal status before the server goes.
            let _ = within(clock, CLOSE_TIMEOUT, drained()).await;
        }
        // What ends now ends with its connections, and those keep the machine's time.
        let joined = tasks.join(CLOSE_TIMEOUT).await;
        shutdown.advance(Phase::Flushed);
        tracing::info!("down");
        joined.map_err(Into::into)
    }
}

fn front_door(settings: &Settings, clock: Arc<dyn Clock>, metrics: Metrics) -> anyhow::Result<FrontDoor> {
    let model = text_model(settings)?;
    let default_slo = default_slo(settings)?;
    let stall_timeout = settings::seconds("stall_timeout_s", settings.stall_timeout_s, STALL_TIMEOUTS)?;
    let request = RequestLimits { stall_timeout, max_attempts: settings.max_attempts };
    let max_time = positive_seconds("max_request_s", settings.max_request_s)?;
    let kv = KvFormat { block_tokens: settings.block_tokens, dtype: settings.kv_dtype };
    let (max_requests, unread_bytes) = (settings.max_requests, settings.max_body_bytes_total);
    let limits = FrontDoorLimits { max_requests, default_slo, max_time, request, kv, unread_bytes };
    let placement: PlacementKind = parsed("placement", &settings.placement)?;
    let admission: AdmissionKind = parsed("admission", &settings.admission)?;
    let (fetches, replicas) = (settings.fetch_prefixes, settings.replicate_prefixes);
    let prompts_at_decode: PromptsAtDecode = parsed("prompts_at_decode", &settings.prompts_at_decode)?;
    let queue_timeout = positive_seconds("queue_timeout_s", settings.queue_timeout_s)?;
    let max_overtaken = positive_seconds("max_overtaken_s", settings.max_overtaken_s)?;
    if max_overtaken > queue_timeout / 2 {
        // Whoever waited for others must still be served before the queue's own deadline.
        let problem = format!("{max_overtaken:?}, but must be at most half of queue_timeout_s, {queue_timeout:?}");
        bail!(BadSetting::invalid("max_overtaken_s", problem));
    }
    let config = ClusterConfig {
        fetches,
        replicas,
        max_wait: settings.max_wait_ms.time().map_err(|problem| BadSetting::invalid("max_wait_ms", problem))?,
        max_overtaken,
        queue_timeout,
        max_held: (settings.max_requests / HELD_SHARE).max(1),
        prompts_at_decode,
        splits_prompts: settings.split_prompts,
        ..ClusterConfig::default()
    };
    let cluster = Cluster::new(config, Policies::new(placement, admission));
    let (id, tasks, shutdown) = (ConductorId(random_u64()), TaskSet::new(), Shutdown::new());
    tracing::info!(%id, model = model.name, "conductor starting");
    Ok(FrontDoor::new(id, model, limits, NodeSessions::default(), metrics, clock, tasks, shutdown, cluster))
}

/// Numbers that are used as they are.
fn check_ranges(settings: &Settings) -> Result<(), BadSetting> {
    settings::within("max_requests", settings.max_requests, 1..=1_000_000)?;
    settings::within("max_connections", settings.max_connections, 1..=1_000_000)?;
    settings::within("max_attempts", settings.max_attempts, 1..=100)?;
    settings::within("block_tokens", settings.block_tokens, 1..=1024)?;
    settings::within("max_prompt_bytes", settings.max_prompt_bytes, 1..=MAX_MESSAGE_BYTES)?;
    settings::within("max_body_bytes_total", settings.max_body_bytes_total, 1 << 16..=1 << 40)?;
    if let Some(name) = &settings.model_name {
        settings::name("model_name", name)?;
    }
    Ok(())
}

fn parsed<T: FromStr<Err: Display>>(key: &'static str, value: &str) -> Result<T, BadSetting> {
    value.parse().map_err(|error: T::Err| BadSetting::invalid(key, error.to_string()))
}

fn positive_seconds(key: &'static str, seconds: f64) -> Result<Duration, BadSetting> {
    settings::seconds(key, seconds, 0.001..=LONGEST_WAIT.as_secs_f64())
}

fn default_slo(settings: &Settings) -> Result<Slo, BadSetting> {
    let limit = |key, millis: Option<f64>| {
        millis.map(positive_millis).transpose().map_err(|problem| BadSetting::invalid(key, problem))
    };
    let (ttft, tbt) = (limit("ttft_slo_ms", settings.ttft_slo_ms)?, limit("tbt_slo_ms", settings.tbt_slo_ms)?);
    Ok(Slo { ttft: ttft.map(Ttft), tbt: tbt.map(Tbt) })
}

/// The chat template that goes before the model's own.
fn given_template(settings: &Settings, tokenizer: &Tokenizer) -> anyhow::Result<Option<ChatTemplate>> {
    let Some(path) = &settings.chat_template else { return Ok(None) };
    let bad = |problem: String| BadSetting::invalid("chat_template", format!("{}: {problem}", path.display()));
    let source = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    Ok(Some(ChatTemplate::from_source(&source, tokenizer).map_err(|error| bad(error_chain(&error)))?))
}

fn text_model(settings: &Settings) -> anyhow::Result<TextModel> {
    let max_prompt_bytes = settings.max_prompt_bytes;
    let named = |name: String| settings.model_name.clone().unwrap_or(name);
    if settings.engine == "mock" {
        let tokenizer = Tokenizer::bytes().with_max_bytes(max_prompt_bytes);
        let own = || Ok(Some(ChatTemplate::from_source(baton_text::MOCK_CHAT_TEMPLATE, &tokenizer)?));
        let template = given_template(settings, &tokenizer)?.map_or_else(own, |given| anyhow::Ok(Some(given)))?;
        let grammars = GrammarCompiler::new(&tokenizer)?;
        let longest_token = tokenizer.longest_token();
        return Ok(TextModel {
            name: named("mock".into()),
            tokenizer,
            template,
            grammars,
            max_prompt_bytes,
            longest_token,
        });
    }
    if settings.engine != "cpu" {
        bail!(BadSetting::invalid("engine", format!("'{}', but must be cpu or mock", settings.engine)));
    }
    let not_set = || BadSetting::invalid("model", "not set; give --model FILE (or --engine mock)");
    let path = settings.model.as_deref().ok_or_else(not_set)?;
    let bad = |problem: String| BadSetting::invalid("model", problem);
    let file = ModelFile::open(path).map_err(|error| bad(error_chain(&error)))?;
    let tokenizer =
        Tokenizer::from_model(&file).map_err(|error| bad(format!("{}: {}", path.display(), error_chain(&error))))?;
    let tokenizer = tokenizer.with_max_bytes(max_prompt_bytes);
    let own = || {
        let template = ChatTemplate::from_model(&file, &tokenizer);
        template.map_err(|error| bad(format!("{}: {}", path.display(), error_chain(&error))))
    };
    let template = given_template(settings, &tokenizer)?.map_or_else(own, |given| Ok(Some(given)))?;
    let grammars = GrammarCompiler::new(&tokenizer).map_err(|error| bad(format!("{}: {error}", path.display())))?;
    let (name, longest_token) = (named(model_name(path)), tokenizer.longest_token());
    Ok(TextModel { name, tokenizer, template, grammars, max_prompt_bytes, longest_token })
}

/// Folds histograms and lets the cluster notice what did not happen.
fn start_upkeep(door: Arc<FrontDoor>, telemetry: Telemetry) {
    let mut last_upkeep = door.clock.now();
    every(TICK_INTERVAL, "upkeep", door, move |door| {
        let now = door.clock.now();
        door.cluster().on_tick(now);
        door.on_desk_tick();
        if now - last_upkeep > Telemetry::UPKEEP_INTERVAL {
            telemetry.upkeep();
            last_upkeep = now;
        }
    });
}

/// Looks for hot prefixes that more nodes should hold.
fn start_replication(settings: &Settings, door: Arc<FrontDoor>) -> anyhow::Result<()> {
    let seconds = settings.replicate_interval_s;
    let range = SHORTEST_REPLICATION.as_secs_f64()..=LONGEST_WAIT.as_secs_f64();
    let interval = settings::seconds("replicate_interval_s", seconds, range)?;
    if settings.fetch_prefixes && settings.replicate_prefixes >= 2 {
        every(interval, "replication", door, |door| door.replicate());
    }
    Ok(())
}

/// Does something again and again, with so much time between, until the process ends.
fn every(
    interval: Duration,
    task: &'static str,
    door: Arc<FrontDoor>,
    mut act: impl FnMut(&FrontDoor) + Send + 'static,
) {
    let tasks = door.tasks.clone();
    tasks.spawn(task, async move {
        loop {
            tokio::select! {
                () = door.clock.sleep(interval) => act(&door),
                () = door.tasks.cancelled() => return Ok::<(), anyhow::Error>(()),
            }
        }
    });
}

/// One line on stdout: who started this process reads where it listens.
fn announce(addresses: Addresses) {
    let Addresses { grpc, http, operators, nodes } = addresses;
    if let Some(whom) = addresses.exposed() {
        tracing::warn!(
            %grpc,
            %http,
            "whoever reaches the clients' ports reaches what is for {whom}; --operators and --nodes move that to ports of their own"
        );
    }
    let ready = serde_json::json!({
        "role": "conductor", "node": null, "grpc": grpc.to_string(), "http": http.to_string(), "transfer": null,
        "operators": operators.map(|address| address.to_string()), "nodes": nodes.map(|address| address.to_string()),
    });
    println!("READY {ready}");
    tracing::info!(%grpc, %http, ?operators, ?nodes, "serving");
}
