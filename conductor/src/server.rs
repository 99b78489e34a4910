//! From settings to a serving process, and down again.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_formats::{ModelFile, model_name};
use baton_grammar::GrammarCompiler;
use baton_intake::Budget;
use baton_membership::Etcd;
use baton_memory::{keep_little_freed_memory, return_freed_memory};
use baton_proto::MAX_MESSAGE_BYTES;
use baton_runtime::settings::{self, BadSetting, Loaded};
use baton_runtime::telemetry::init_logs;
use baton_runtime::{Clock, Drain, Phase, Signals, SystemClock, Telemetry, error_chain, random_u64, within};
use baton_scheduler::TICK_INTERVAL;
use baton_text::{ChatTemplate, ModelLimits, Tokenizer};
use baton_types::{ConductorId, SamplingDefaults};

use crate::checks::blocking_threads;
use crate::config::{GenerationConfig, LONGEST_WAIT, STALL_TIMEOUTS, Settings};
use crate::frontend::Frontend;
use crate::metrics::{METRICS, Metrics};
use crate::ports::{Addresses, Ports};
use crate::prompt::TextModel;
use crate::run_time_settings::{Rules, RunTimeSettings};
use crate::{etcd, leader};

/// How long tasks may take to end once they are asked to.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the drain looks whether requests are left.
const DRAIN_POLL: Duration = Duration::from_millis(20);
/// How long etcd may take to hear that a leader that drains resigns.
const RESIGN: Duration = Duration::from_millis(1500);

/// How often it is looked whether much memory was freed, and how much that is.
const RETURN_INTERVAL: Duration = Duration::from_secs(2);
const RETURNED_BYTES: usize = 8 << 20;

/// Serves until a signal, then drains.
pub fn run(loaded: Loaded<Settings>) -> anyhow::Result<()> {
    keep_little_freed_memory();
    init_logs(loaded.settings.log_format, &loaded.settings.log)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().thread_name("conductor").max_blocking_threads(blocking_threads());
    let runtime = runtime.build()?;
    let served = runtime.block_on(serve(loaded));
    // A text that takes long to prepare does not keep the process.
    runtime.shutdown_timeout(CLOSE_TIMEOUT);
    served
}

async fn serve(loaded: Loaded<Settings>) -> anyhow::Result<()> {
    let telemetry = Telemetry::install(&[METRICS]).context("metrics")?;
    let server = Server::start(&loaded, Arc::new(SystemClock), telemetry, Metrics::default()).await?;
    // Who reads that it serves may end it at once.
    let mut signals = Signals::new()?;
    announce(server.addresses);
    server.run(async || signals.recv().await).await
}

/// A conductor that serves. Nothing of it belongs to the whole process: signals, logs and the
/// recorder of metrics are its caller's.
pub struct Server {
    /// What its requests share.
    pub frontend: Arc<Frontend>,
    /// Where it listens.
    pub addresses: Addresses,
    drain: Drain,
}

impl Server {
    /// Binds the ports and serves them. `metrics` are handles that `telemetry` renders.
    pub async fn start(
        loaded: &Loaded<Settings>,
        clock: Arc<dyn Clock>,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> anyhow::Result<Self> {
        let settings = &loaded.settings;
        check_ranges(settings)?;
        let stall_timeout = settings::seconds("stall_timeout_s", settings.stall_timeout_s, STALL_TIMEOUTS)?;
        let grace = settings::seconds("grace_s", settings.grace_s, 0.0..=LONGEST_WAIT.as_secs_f64())?;
        let not_ready = settings::seconds("not_ready_s", settings.not_ready_s, 0.0..=600.0)?;
        let drain = Drain { not_ready, grace };
        let ports = Ports::bind(settings, stall_timeout).await?;
        let addresses = ports.addresses()?;
        let etcd = etcd::of(settings)?;
        let frontend = Arc::new(frontend(loaded, etcd.clone(), clock, metrics)?);
        let [bodies, answers] = ports.budgets();
        let budgets = vec![bodies, answers, frontend.unread.clone()];
        ports.serve(&frontend, &telemetry, &frontend.tasks)?;
        leader::start(&frontend, settings, etcd, addresses.nodes.unwrap_or(addresses.grpc))?;
        start_upkeep(Arc::clone(&frontend), telemetry);
        start_returning(Arc::clone(&frontend), budgets);
        start_settings(Arc::clone(&frontend));
        Ok(Self { frontend, addresses, drain })
    }

    /// Serves until `signal` gives one, then drains; the next one ends what is left.
    pub async fn run(self, mut signal: impl AsyncFnMut() -> &'static str) -> anyhow::Result<()> {
        let Self { frontend, drain, .. } = self;
        let tasks = &frontend.tasks;
        let shutdown = &frontend.shutdown;
        let clock = &*frontend.clock;
        let first = tokio::select! {
            signal = signal() => signal,
            () = tasks.cancelled() => "a failed task",
        };
        // Without one of its tasks no request is served better by waiting.
        let drain = if tasks.is_cancelled() { Drain { not_ready: Duration::ZERO, ..drain } } else { drain };
        tracing::info!(signal = first, requests = frontend.live.len(), ?drain, "draining");
        let drained = async || {
            while !frontend.live.is_empty() || frontend.keyed.readers() > 0 {
                clock.sleep(DRAIN_POLL).await;
            }
        };
        if !shutdown.drain_by(clock, drain, signal(), drained()).await {
            tracing::warn!(requests = frontend.live.len(), "ending what is left");
            // Each gets its terminal status before the server goes.
            let _ = within(clock, CLOSE_TIMEOUT, drained()).await;
        }
        // Another one leads at once if this one says so before it ends, and else only once its
        // lease has ended.
        let resigned = async {
            while frontend.desk.is_elected() {
                clock.sleep(DRAIN_POLL).await;
            }
        };
        let _ = within(clock, RESIGN, resigned).await;
        // What ends now ends with its connections, and those keep the machine's time.
        let joined = tasks.join(CLOSE_TIMEOUT).await;
        shutdown.advance(Phase::Flushed);
        tracing::info!("down");
        joined.map_err(Into::into)
    }
}

fn frontend(
    loaded: &Loaded<Settings>,
    etcd: Option<Etcd>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
) -> anyhow::Result<Frontend> {
    let settings = &loaded.settings;
    let model = text_model(settings, Arc::clone(&clock))?;
    let warnings = model.template.iter().flat_map(ChatTemplate::warnings);
    warnings.for_each(|warning| tracing::warn!(warning, "the chat template fails for some conversations"));
    let rules = Rules::new(settings)?;
    let settings = RunTimeSettings::new(loaded.clone(), etcd, Arc::clone(&clock));
    let id = ConductorId(random_u64());
    tracing::info!(%id, model = model.name(), "conductor starting");
    Ok(Frontend::new(id, model, settings, &rules, metrics, clock))
}

/// Numbers that are used as they are.
fn check_ranges(settings: &Settings) -> Result<(), BadSetting> {
    settings::within("max_connections", settings.max_connections, 1..=1_000_000)?;
    settings::within("block_tokens", settings.block_tokens, 1..=1024)?;
    settings::within("max_prompt_bytes", settings.max_prompt_bytes, 1..=MAX_MESSAGE_BYTES)?;
    if let Some(bytes) = settings.max_body_bytes_total {
        settings::within("max_body_bytes_total", bytes, 1 << 16..=1 << 40)?;
    }
    settings::names("served_model_name", &settings.served_model_name)
}

/// The chat template that goes before the model's own.
fn given_template(settings: &Settings, tokenizer: &Tokenizer) -> anyhow::Result<Option<ChatTemplate>> {
    let Some(path) = &settings.chat_template else { return Ok(None) };
    let bad = |problem: String| BadSetting::invalid("chat_template", format!("{}: {problem}", path.display()));
    let source = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    Ok(Some(ChatTemplate::from_source(&source, tokenizer).map_err(|error| bad(error_chain(&error)))?))
}

fn text_model(settings: &Settings, clock: Arc<dyn Clock>) -> anyhow::Result<TextModel> {
    let max_prompt_bytes = settings.max_prompt_bytes;
    let named = |name: String| match settings.served_model_name.as_slice() {
        [] => vec![name],
        names => names.to_vec(),
    };
    if settings.engine == "mock" {
        let tokenizer = Tokenizer::bytes().with_max_bytes(max_prompt_bytes);
        let own = || Ok(Some(ChatTemplate::from_source(baton_text::MOCK_CHAT_TEMPLATE, &tokenizer)?));
        let template = given_template(settings, &tokenizer)?.map_or_else(own, |given| anyhow::Ok(Some(given)))?;
        let grammars = GrammarCompiler::new(&tokenizer)?;
        let longest_token = tokenizer.longest_token();
        return Ok(TextModel {
            names: named("mock".into()),
            tokenizer,
            template,
            grammars,
            max_prompt_bytes,
            longest_token,
            sampling_defaults: SamplingDefaults::default(),
            limits: ModelLimits::default(),
            clock,
        });
    }
    if settings.engine != "cpu" {
        bail!(BadSetting::invalid("engine", format!("'{}', but must be cpu or mock", settings.engine)));
    }
    let not_set = || BadSetting::invalid("model", "not set; give --model FILE, set BATON_MODEL, or use --engine mock");
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
    let sampling_defaults = match settings.generation_config {
        GenerationConfig::Auto => baton_text::sampling_defaults(&file)
            .map_err(|error| bad(format!("{}: {}", path.display(), error_chain(&error))))?,
        GenerationConfig::None => SamplingDefaults::default(),
    };
    if sampling_defaults != SamplingDefaults::default() {
        tracing::info!(
            ?sampling_defaults,
            "the model's authors advise this sampling; generation_config = none ignores it"
        );
    }
    let limits =
        baton_text::model_limits(&file).map_err(|error| bad(format!("{}: {}", path.display(), error_chain(&error))))?;
    let names = named(model_name(path));
    let longest_token = tokenizer.longest_token();
    Ok(TextModel {
        names,
        tokenizer,
        template,
        grammars,
        max_prompt_bytes,
        longest_token,
        sampling_defaults,
        limits,
        clock,
    })
}

/// Folds histograms and lets the cluster notice what did not happen.
fn start_upkeep(frontend: Arc<Frontend>, telemetry: Telemetry) {
    let mut last_upkeep = frontend.clock.now();
    every(TICK_INTERVAL, "upkeep", frontend, move |frontend| {
        let now = frontend.clock.now();
        frontend.cluster().on_tick(now);
        frontend.on_desk_tick();
        if now - last_upkeep > Telemetry::UPKEEP_INTERVAL {
            telemetry.upkeep();
            last_upkeep = now;
        }
    });
}

/// Gives memory back to the system once much of it was freed.
fn start_returning(frontend: Arc<Frontend>, budgets: Vec<Budget>) {
    every(RETURN_INTERVAL, "freed memory", frontend, move |_| {
        let freed: usize = budgets.iter().map(Budget::freed).sum();
        if freed >= RETURNED_BYTES {
            // It takes milliseconds, and tells nothing.
            drop(tokio::task::spawn_blocking(return_freed_memory));
        }
    });
}

/// Follows what is set at run time.
fn start_settings(frontend: Arc<Frontend>) {
    let tasks = frontend.tasks.clone();
    tasks.spawn("settings", async move {
        tokio::select! {
            () = frontend.follow_settings() => {}
            () = frontend.tasks.cancelled() => {}
        }
        Ok::<(), anyhow::Error>(())
    });
}

/// Does something again and again, with so much time between, until the process ends.
fn every(
    interval: Duration,
    task: &'static str,
    frontend: Arc<Frontend>,
    mut act: impl FnMut(&Frontend) + Send + 'static,
) {
    let tasks = frontend.tasks.clone();
    tasks.spawn(task, async move {
        loop {
            tokio::select! {
                () = frontend.clock.sleep(interval) => act(&frontend),
                () = frontend.tasks.cancelled() => return Ok::<(), anyhow::Error>(()),
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
            "clients' ports also serve what is for {whom}; set --operators and --nodes to give that ports of its own"
        );
    }
    let ready = serde_json::json!({
        "role": "conductor", "node": null, "grpc": grpc.to_string(), "http": http.to_string(), "transfer": null,
        "operators": operators.map(|address| address.to_string()), "nodes": nodes.map(|address| address.to_string()),
    });
    println!("READY {ready}");
    tracing::info!(%grpc, %http, ?operators, ?nodes, "serving");
}
