//! Nodes within one process, for tests.
//!
//! They have mock engines that can be held, one manual clock, and loopback gRPC; their conductors
//! are test code. Nothing here waits for time to pass: it waits for an event or a condition.
//! [`LIMIT`] only ends a test that is stuck.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_engine::{Engine, EngineError, KvArena, LayerSlice, MockEngine, ModelInfo, SequenceStep, StepObserver};
use baton_proto::v1::node_client::NodeClient;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_proto::{MAX_MESSAGE_BYTES, PROTOCOL_VERSION, v1};
use baton_runtime::{Clock, ManualClock, Phase, Telemetry, Waited};
use baton_transfer_engine::{FakeNetwork, TransportChoice, TransportKind};
use baton_types::{
    Attempt, ConductorId, DecodeEvent, DecodeTarget, FetchSource, Load, NodeInfo, PrefillEvent, PrefillJob,
    QueueOrdering, RequestId, RequestKey, SamplingParams, TokenId,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use crate::config::Settings;
use crate::mock::mock_options;
use crate::node::{NodeContext, Serving, start};
use crate::node_loop::Role;

/// A test that waits for longer is stuck.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Fails the test if `future` is stuck.
///
/// # Panics
/// After [`LIMIT`].
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(output) => output,
        Err(_) => panic!("stuck: {what}"),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static SEEN: Mutex<BTreeSet<(&'static str, &'static str)>> = Mutex::new(BTreeSet::new());

/// `who` (a role, or the loop) carried out or took in what is called so.
pub fn note(who: &'static str, name: &'static str) {
    lock(&SEEN).insert((who, name));
}

/// Those of `all` that `who` has not noted in this process.
pub fn missing(who: &str, all: impl IntoIterator<Item = &'static str>) -> Vec<&'static str> {
    let seen = lock(&SEEN);
    all.into_iter().filter(|name| !seen.iter().any(|noted| noted.0 == who && noted.1 == *name)).collect()
}

/// A manual clock that knows until when others wait on it.
#[derive(Debug, Clone, Default)]
pub struct TestClock {
    clock: ManualClock,
    due: watch::Sender<BTreeMap<Instant, usize>>,
}

/// One that waits.
struct Waiter {
    at: Instant,
    due: watch::Sender<BTreeMap<Instant, usize>>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.due.send_modify(|due| {
            if let Some(waiters) = due.get_mut(&self.at) {
                *waiters -= 1;
            }
            due.retain(|_, waiters| *waiters > 0);
        });
    }
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn unix_ms(&self) -> u64 {
        self.clock.unix_ms()
    }

    fn sleep_until(&self, at: Instant) -> Waited {
        self.due.send_modify(|due| *due.entry(at).or_default() += 1);
        let waiter = Waiter { at, due: self.due.clone() };
        let waited = self.clock.sleep_until(at);
        Box::pin(async move {
            waited.await;
            drop(waiter);
        })
    }
}

impl TestClock {
    /// Moves the clock on by what a task waits for, to the nanosecond: waits until a task does.
    ///
    /// # Panics
    /// If none ever does.
    pub async fn pass(&self, by: Duration) {
        let at = self.now() + by;
        let mut due = self.due.subscribe();
        let awaited = due.wait_for(|due| due.contains_key(&at));
        let found = tokio::time::timeout(LIMIT, awaited).await.is_ok();
        assert!(found, "no task waits for {by:?}");
        self.clock.advance(by);
    }
}

#[derive(Default)]
struct Hold {
    /// Steps that may still begin; `None`: all.
    left: Option<usize>,
    /// Steps that began, or wait to.
    asked: usize,
    panics: bool,
    spoils: bool,
}

/// Holds an engine's steps. Cheap to clone.
#[derive(Clone, Default)]
pub struct EngineHold(Arc<(Mutex<Hold>, Condvar)>);

impl EngineHold {
    /// After so many more steps the engine stands still at the beginning of the next one.
    pub fn hold_after(&self, steps: usize) {
        lock(&self.0.0).left = Some(steps);
        self.0.1.notify_all();
    }

    /// It goes on.
    pub fn release(&self) {
        lock(&self.0.0).left = None;
        self.0.1.notify_all();
    }

    /// It panics in its next step, or the one that is held.
    pub fn panic(&self) {
        lock(&self.0.0).panics = true;
        self.release();
    }

    /// What it computes is no number, in all steps from now on or in none.
    pub fn spoil(&self, spoils: bool) {
        lock(&self.0.0).spoils = spoils;
    }

    /// Whether it stands still.
    pub async fn is_held(&self) {
        until("the engine is held", async || {
            let hold = lock(&self.0.0);
            (hold.left == Some(0) && hold.asked > 0).then_some(())
        })
        .await;
    }

    fn pass(&self) {
        let mut hold = lock(&self.0.0);
        hold.asked += 1;
        while hold.left == Some(0) {
            hold = self.0.1.wait(hold).unwrap_or_else(PoisonError::into_inner);
        }
        hold.asked -= 1;
        hold.left = hold.left.map(|left| left - 1);
        assert!(!hold.panics, "as the test wants it");
    }
}

/// Sees logits that are no numbers.
struct Spoiled<'a>(&'a mut dyn StepObserver);

impl StepObserver for Spoiled<'_> {
    fn kv_ready(&mut self, layer: u32) {
        self.0.kv_ready(layer);
    }

    fn await_prefix(&mut self, layer: u32) {
        self.0.await_prefix(layer);
    }

    fn layers_done(&mut self) {
        self.0.layers_done();
    }

    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        self.0.logits(sequence, position, &vec![f32::NAN; logits.len()]);
    }
}

struct HeldEngine {
    engine: MockEngine,
    hold: EngineHold,
}

impl Engine for HeldEngine {
    fn model(&self) -> &ModelInfo {
        self.engine.model()
    }

    fn arena(&self) -> &KvArena {
        self.engine.arena()
    }

    fn step(&mut self, batch: &[SequenceStep<'_>], observer: &mut dyn StepObserver) -> Result<(), EngineError> {
        self.hold.pass();
        if lock(&self.hold.0.0).spoils {
            return self.engine.step(batch, &mut Spoiled(observer));
        }
        self.engine.step(batch, observer)
    }

    fn step_layers(&mut self, slice: LayerSlice<'_>, observer: &mut dyn StepObserver) -> Result<(), EngineError> {
        self.hold.pass();
        self.engine.step_layers(slice, observer)
    }
}

/// Asks again and again, and lets the others run in between.
///
/// # Panics
/// If `what` does not come true within [`LIMIT`].
pub async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            if let Some(found) = ask().await {
                return found;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
}

/// What the nodes of a test share.
#[derive(Clone, Default)]
pub struct World {
    /// Their clock.
    pub clock: TestClock,
    /// What carries their KV; `None`: TCP.
    pub network: Option<FakeNetwork>,
}

/// Settings of a node with a mock engine that takes no time.
pub fn settings(name: &str) -> Settings {
    Settings {
        name: Some(name.to_owned()),
        // No conductor is there. Registration is another test's.
        conductor: "http://127.0.0.1:1".into(),
        transport: TransportChoice::Only(TransportKind::Tcp),
        engine: "mock".into(),
        cache_blocks: 64,
        mock_base_us: 0,
        mock_token_us: 0,
        ..Settings::default()
    }
}

/// The metrics of this process.
pub fn telemetry() -> Telemetry {
    static TELEMETRY: OnceLock<Telemetry> = OnceLock::new();
    TELEMETRY.get_or_init(|| Telemetry::install(&[crate::METRICS]).expect("the first of this process")).clone()
}

/// A counter's value now.
pub fn counted(counter: &str) -> u64 {
    let text = telemetry().render();
    let value = text.lines().find_map(|line| line.strip_prefix(counter)?.trim().parse().ok());
    value.unwrap_or(0)
}

impl World {
    /// One whose KV moves within the process, with faults as wanted.
    pub fn faulty() -> Self {
        Self { network: Some(FakeNetwork::new()), ..Self::default() }
    }

    /// From now on no batch of KV arrives, and none ends by itself.
    pub fn lose_batches(&self) {
        self.network.iter().for_each(|network| network.set_faults(|faults| faults.drop_batches = u32::MAX));
    }

    /// Waits until as many batches were lost.
    pub async fn lost(&self, batches: u32) {
        until("a batch", async || {
            let mut left = u32::MAX;
            self.network.iter().for_each(|network| network.set_faults(|faults| left = faults.drop_batches));
            (u32::MAX - left >= batches).then_some(())
        })
        .await;
    }

    /// Starts a node.
    pub async fn start<R: Role>(&self, settings: Settings) -> TestNode {
        let hold = EngineHold::default();
        let engine = MockEngine::new(mock_options(&settings, R::ROLE, None).expect("no file")).expect("an engine");
        let around = NodeContext {
            clock: Arc::new(self.clock.clone()),
            telemetry: telemetry(),
            engine: Some(Box::new(HeldEngine { engine, hold: hold.clone() })),
            network: self.network.clone(),
        };
        let serving = start::<R>(settings, around).await.expect("a node");
        TestNode { serving, hold }
    }
}

/// A node of a test.
pub struct TestNode {
    serving: Serving,
    /// Holds its engine.
    pub hold: EngineHold,
}

impl TestNode {
    /// Who it is.
    pub fn info(&self) -> &NodeInfo {
        &self.serving.info
    }

    /// It as a job names it.
    pub fn target(&self) -> DecodeTarget {
        let NodeInfo { node, generation, address, .. } = self.info().clone();
        DecodeTarget { node, generation, address, tbt: None }
    }

    /// It as one that holds so many tokens of a prompt.
    pub fn source(&self, tokens: u32) -> FetchSource {
        let NodeInfo { node, generation, address, .. } = self.info().clone();
        FetchSource { node, generation, address, tokens }
    }

    /// A client of its gRPC port.
    pub async fn client(&self) -> NodeClient<Channel> {
        let client = NodeClient::connect(self.info().address.clone()).await.expect("a node that listens");
        client.max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Opens a conductor's session, and reads what it begins with.
    pub async fn session(&self, conductor: u64) -> Conductor {
        let mut session = self.new_session(conductor).await;
        session.find(|event| matches!(event, Event::Kv(kv) if kv.snapshot).then_some(())).await;
        session
    }

    /// Opens a conductor's session, and reads the welcome.
    pub async fn new_session(&self, conductor: u64) -> Conductor {
        let (commands, queued) = mpsc::channel(64);
        let conductor = ConductorId(conductor);
        let hello = v1::Hello { protocol_version: PROTOCOL_VERSION, conductor_id: conductor.to_string() };
        Conductor::command(&commands, Command::Hello(hello)).await;
        let response = self.client().await.session(ReceiverStream::new(queued)).await.expect("a session");
        let mut session = Conductor { id: conductor, commands, events: response.into_inner() };
        assert!(matches!(session.next().await, Event::Welcome(_)), "the first event");
        session
    }

    /// Its load, and the proof that each block is accounted for.
    pub async fn load(&self) -> Load {
        let checked = self.client().await.check_integrity(v1::CheckIntegrityRequest {}).await;
        let checked = checked.expect("a node that answers").into_inner();
        assert_eq!(checked.problem, "", "blocks of {}", self.info().node);
        checked.load.expect("a load").try_into().expect("a load that can be read")
    }

    /// Waits until the load is so.
    pub async fn load_is(&self, what: &str, is: impl Fn(&Load) -> bool) -> Load {
        until(what, async || Some(self.load().await).filter(&is)).await
    }

    /// What its HTTP port says at `path`, with the status line.
    pub async fn http(&self, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(self.http_addr()).await.expect("a port");
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        answer
    }

    fn http_addr(&self) -> SocketAddr {
        self.serving.http
    }

    /// A signal came: it finishes what it has.
    pub fn drain(&self) {
        self.serving.shutdown.advance(Phase::Draining);
    }

    /// Drains it, and proves with it that nothing is held: no request, grant, lease or write.
    ///
    /// # Panics
    /// If something is, or a task failed.
    pub async fn ends(self) {
        self.load().await;
        self.drain();
        self.ended().await;
    }

    /// Waits for the end of a drain that has begun.
    ///
    /// # Panics
    /// As [`Self::ends`].
    pub async fn ended(self) {
        soon("the drain", self.serving.shutdown.wait_for(Phase::Closing)).await;
        let ended = self.serving.tasks.join(LIMIT).await;
        assert_eq!(ended, Ok(()), "{}", self.info().node);
    }

    /// Waits until it fails by itself: why.
    pub async fn fails(self) -> String {
        soon("the failure", self.serving.tasks.cancelled()).await;
        self.serving.tasks.join(LIMIT).await.expect_err("a failure").to_string()
    }

    /// It is gone without a word.
    pub async fn dies(self) {
        self.serving.tasks.cancel();
        self.serving.transfer.shutdown();
        self.hold.release();
        self.serving.shutdown.advance(Phase::Closing);
        // However it ended.
        let _ = self.serving.tasks.join(LIMIT).await;
    }
}

/// A conductor's session. Dropped, it breaks.
pub struct Conductor {
    /// Whose it is.
    pub id: ConductorId,
    commands: mpsc::Sender<v1::NodeCommand>,
    events: Streaming<v1::NodeEvent>,
}

impl Conductor {
    async fn command(commands: &mpsc::Sender<v1::NodeCommand>, command: Command) {
        commands.send(v1::NodeCommand { command: Some(command) }).await.expect("a session");
    }

    /// Tells the node to do something.
    pub async fn send(&self, command: Command) {
        Self::command(&self.commands, command).await;
    }

    /// Gives the node a job.
    pub async fn submit(&self, job: &PrefillJob) {
        self.send(Command::Prefill(job.into())).await;
    }

    /// Gives a request up.
    pub async fn abort(&self, key: RequestKey) {
        self.send(Command::Abort(key.into())).await;
    }

    /// The next event; an error if the session ends badly, `None` if it ends well.
    pub async fn event(&mut self) -> Result<Option<Event>, Status> {
        let event = soon("an event", self.events.message()).await?;
        Ok(event.map(|event| event.event.expect("an event that this version knows")))
    }

    /// The next event.
    pub async fn next(&mut self) -> Event {
        self.event().await.expect("a session").expect("an event")
    }

    /// The first event from here on of which `find` makes something.
    pub async fn find<T>(&mut self, mut find: impl FnMut(Event) -> Option<T>) -> T {
        loop {
            if let Some(found) = find(self.next().await) {
                return found;
            }
        }
    }

    /// What the node says next of a prompt.
    pub async fn prefill(&mut self, key: RequestKey) -> PrefillEvent {
        self.find(|event| prefill_event(event).filter(|(of, _)| *of == key)).await.1
    }

    /// Everything that it says of a prompt, up to its end.
    pub async fn prefill_to_end(&mut self, key: RequestKey) -> Vec<PrefillEvent> {
        let mut events = Vec::new();
        loop {
            let event = self.prefill(key).await;
            let is_last = match &event {
                PrefillEvent::HandedOff(_) | PrefillEvent::Failed(_) | PrefillEvent::DecodeFailed(_) => true,
                PrefillEvent::FirstToken { finish, .. } => finish.is_some(),
                _ => false,
            };
            events.push(event);
            if is_last {
                return events;
            }
        }
    }

    /// The tokens that follow, up to the last one.
    pub async fn tokens(&mut self, key: RequestKey) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        loop {
            for (of, event) in self.find(decode_events).await {
                match event {
                    DecodeEvent::Token { token, finish, .. } if of == key => {
                        tokens.push(token);
                        if finish.is_some() {
                            return tokens;
                        }
                    }
                    DecodeEvent::Token { .. } => {}
                    DecodeEvent::Failed(refused) => panic!("{of:?}: {refused}"),
                }
            }
        }
    }

    /// Everything that was told up to now: what the node says before it answers for its cache.
    pub async fn told(&mut self) -> Vec<Event> {
        self.send(Command::KvSnapshot(v1::KvSnapshotRequest {})).await;
        let mut told = Vec::new();
        loop {
            match self.next().await {
                Event::Kv(kv) if kv.snapshot => return told,
                event => told.push(event),
            }
        }
    }
}

/// What an event says of a prompt.
pub fn prefill_event(event: Event) -> Option<(RequestKey, PrefillEvent)> {
    let Event::Prefill(event) = event else { return None };
    Some(event.into_domain().expect("an event that can be read"))
}

/// What an event says of sequences.
pub fn decode_events(event: Event) -> Option<Vec<(RequestKey, DecodeEvent)>> {
    let Event::Decode(events) = event else { return None };
    let read = |event: v1::DecodeEvent| event.into_domain().expect("an event that can be read");
    Some(events.events.into_iter().map(read).collect())
}

/// The first attempt of a request.
pub fn key(request: u128) -> RequestKey {
    RequestKey { request: RequestId(request), attempt: Attempt(0) }
}

/// A prompt of so many tokens that has no prefix in common with that of another number.
pub fn prompt(number: u32, tokens: u32) -> Vec<TokenId> {
    (0..tokens).map(|token| (number * 31 + token) % 256).collect()
}

/// A job with this prompt.
pub fn job(request: u128, tokens: &[TokenId], max_tokens: u32) -> PrefillJob {
    PrefillJob {
        key: key(request),
        conductor: ConductorId(0),
        tokens: tokens.into(),
        output_tokens: 0,
        is_migration: false,
        sampling: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
        decode: None,
        partial_prefill_tokens: 0,
        fetch: None,
        salt: Arc::from([]),
        terms: QueueOrdering::default(),
    }
}
