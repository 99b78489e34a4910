//! The loop of a node: one task that owns the role's core. It never waits for anything but its
//! inputs.

use std::sync::Arc;
use std::time::Instant;

use baton_proto::v1::{self, node_event::Event};
use baton_runtime::{Clock, MetricDoc, Phase, Shutdown};
use baton_scheduler::{KV_EVENTS_PER_MESSAGE, KvEventBatch, REPORT_INTERVAL};
use baton_types::{ConductorId, Load, NodeRole};
use tokio::sync::mpsc;

use crate::background::{Background, Work};
use crate::config::Settings;
use crate::engine_thread::EngineEvent;
use crate::engine_watch::{EngineWatch, Pulse};
use crate::input::{Input, IntegrityReport};
use crate::metrics::LoadMetrics;
use crate::node::NodeParts;
use crate::node_core::NodeCore;
use crate::readiness::{Readiness, Ready};
use crate::sessions::Sessions;
use crate::transfer::TransferView;

/// Of so many reports one says how bytes move, too.
const REPORTS_PER_TRANSFER_REPORT: u64 = 5;
/// Inputs taken in before effects are carried out: a burst costs one round.
const INPUTS_PER_ROUND: usize = 256;

/// What a node of one kind does with its inputs. Core and shell of the role in one.
pub trait Role: Sized + Send + 'static {
    /// Which kind.
    const ROLE: NodeRole;
    /// Its metrics, beside those of every node.
    const METRICS: &'static [MetricDoc];
    /// What decides.
    type Core: NodeCore;
    /// What only this role takes in.
    type Event: Send + 'static;

    /// A role from its parts.
    ///
    /// # Errors
    /// The core or the SSD refuses a setting.
    fn new(settings: &Settings, parts: NodeParts<Self::Event>) -> anyhow::Result<Self>;
    /// What decides.
    fn core(&mut self) -> &mut Self::Core;
    /// Takes an input in.
    fn on_input(&mut self, now: Instant, input: Input<Self::Event>);
    /// Carries out what the core decided. An error is the end of the node.
    fn carry_out(&mut self) -> anyhow::Result<()>;
    /// The load now.
    fn load(&self, now: Instant) -> Load;
}

/// What the loop needs beside its role.
pub struct NodeLoop<R: Role> {
    /// The role.
    pub role: R,
    /// What the engine says. It goes before everything else: however many call, steps follow each
    /// other.
    pub engine: mpsc::Receiver<EngineEvent>,
    /// Whether the engine gets on.
    pub(crate) watch: EngineWatch,
    /// Everything else that happens.
    pub inputs: mpsc::Receiver<Input<R::Event>>,
    /// What other nodes and operators ask for. A flood of it delays nothing else.
    pub calls: mpsc::Receiver<Input<R::Event>>,
    /// What takes long and can wait.
    pub(crate) background: Background,
    /// Where events go.
    pub sessions: Sessions,
    /// How bytes move.
    pub transfer: TransferView,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Draining ends the loop once the role is idle.
    pub shutdown: Shutdown,
    /// What the node's ports say.
    pub readiness: Readiness,
    /// Why it takes no requests.
    pub(crate) away: NotReady,
    /// What it does, for who scrapes it.
    pub(crate) metrics: LoadMetrics,
}

/// Why a node takes no requests; each by itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NotReady {
    /// The process goes down.
    going_down: bool,
    /// An operator asked.
    drained: bool,
    /// The engine makes no progress.
    stalled: bool,
}

impl NotReady {
    fn ready(self) -> Ready {
        match self {
            Self { stalled: true, .. } => Ready::Stalled,
            Self { going_down: false, drained: false, .. } => Ready::Serving,
            Self { .. } => Ready::Draining,
        }
    }
}

impl<R: Role> NodeLoop<R> {
    /// Runs until the node has drained, or has to close.
    ///
    /// # Errors
    /// The engine is dead, or its thread.
    pub async fn run(mut self) -> anyhow::Result<()> {
        // The first report is due at once; those that were missed are not made up for.
        let mut report_due = self.clock.sleep_until(self.clock.now());
        let mut reported = 0u64;
        loop {
            let wakeup = self.role.core().next_wakeup();
            tokio::select! {
                biased;
                // What is rarely due comes first: a stream of inputs must not starve deadlines and
                // reports.
                () = sleep_until(&*self.clock, wakeup) => self.role.core().on_wakeup(self.clock.now()),
                () = self.shutdown.wait_for(Phase::Draining), if !self.away.going_down => {
                    self.away.going_down = true;
                    self.role.on_input(self.clock.now(), Input::Drain);
                    self.tell_readiness();
                }
                () = self.shutdown.wait_for(Phase::Closing), if self.away.going_down => return Ok(()),
                () = &mut report_due => {
                    report_due = self.clock.sleep(REPORT_INTERVAL);
                    self.look_at_engine()?;
                    self.report();
                    if reported.is_multiple_of(REPORTS_PER_TRANSFER_REPORT) {
                        self.sessions.broadcast(&self.transfer.event());
                    }
                    reported += 1;
                }
                event = self.engine.recv() => match event {
                    Some(event) => self.take_in_engine(event),
                    // It ends by a panic, or after this loop.
                    None => anyhow::bail!("the engine's thread is gone"),
                },
                // It rests after itself, so nothing starves behind it.
                () = sleep_until(&*self.clock, self.background.due()) => self.work_in_background(),
                input = self.inputs.recv() => match input {
                    Some(input) => self.take_in(input),
                    None => return Ok(()),
                },
                Some(call) = self.calls.recv() => self.on_input(call),
            }
            self.role.carry_out()?;
            self.publish_kv_events();
            if self.away.going_down && self.role.core().is_idle() {
                self.report();
                return Ok(());
            }
        }
    }

    fn take_in_engine(&mut self, event: EngineEvent) {
        self.on_input(Input::Engine(event));
        while let Ok(event) = self.engine.try_recv() {
            self.on_input(Input::Engine(event));
        }
    }

    fn take_in(&mut self, input: Input<R::Event>) {
        self.on_input(input);
        for _ in 1..INPUTS_PER_ROUND {
            match self.inputs.try_recv() {
                Ok(input) if self.engine.is_empty() => self.on_input(input),
                Ok(input) => return self.on_input(input),
                Err(_) => break,
            }
        }
        // However much comes there, who calls has a turn.
        if let Ok(call) = self.calls.try_recv() {
            self.on_input(call);
        }
    }

    /// One look at every block, for all who wait for it, or for one of them.
    fn work_in_background(&mut self) {
        let began = self.clock.now();
        match self.background.next() {
            Some(Work::Check(answers)) => {
                let problem = self.role.core().check_integrity().err().map(|error| error.to_string());
                let report = IntegrityReport { problem, load: self.load() };
                for answer in answers {
                    // The caller may have given up.
                    let _ = answer.send(Ok(report.clone()));
                }
            }
            Some(Work::Snapshot(conductor)) => {
                self.publish_kv_events();
                self.send_snapshot(conductor);
            }
            None => {}
        }
        let now = self.clock.now();
        self.background.rest(now, now - began);
    }

    fn look_at_engine(&mut self) -> anyhow::Result<()> {
        let pulse = self.watch.look();
        let stalled = pulse != Pulse::Steady;
        if stalled != std::mem::replace(&mut self.away.stalled, stalled) {
            let requests = self.watch.requests().len();
            if stalled {
                crate::metrics::on_engine_stalled();
                tracing::warn!(requests, "the engine makes no progress in its step");
            } else {
                tracing::info!("the engine makes progress again");
            }
            self.tell_readiness();
        }
        if pulse == Pulse::Dead {
            let requests: Vec<_> = self.watch.requests().iter().map(|key| key.request.to_string()).collect();
            tracing::error!(requests = requests.join(" "), "the engine is taken to be dead: this node ends");
            anyhow::bail!("the engine made no progress in a step for longer than step_timeout_s");
        }
        Ok(())
    }

    fn set_drained(&mut self, drained: bool) {
        let now = self.clock.now();
        if drained == std::mem::replace(&mut self.away.drained, drained) || self.away.going_down {
            return;
        }
        tracing::info!(drained, "an operator asked");
        self.role.on_input(now, if drained { Input::Drain } else { Input::Undrain });
        self.tell_readiness();
    }

    /// To who asks, and to conductors at once.
    fn tell_readiness(&self) {
        self.readiness.set(self.away.ready());
        self.report();
    }

    fn on_input(&mut self, input: Input<R::Event>) {
        #[cfg(any(test, feature = "testing"))]
        crate::testing::note("loop", input.name());
        match input {
            Input::SessionOpened(conductor) => {
                // Whether it takes requests comes before what it holds, which may be much.
                self.sessions.send(conductor, Event::Load((&self.load()).into()));
                self.sessions.send(conductor, self.transfer.event());
                self.background.snapshot(conductor);
            }
            Input::Drain => self.set_drained(true),
            Input::Undrain => self.set_drained(false),
            Input::KvSnapshot(conductor) => self.background.snapshot(conductor),
            Input::CheckIntegrity(answer) => self.background.check(answer),
            input => self.role.on_input(self.clock.now(), input),
        }
    }

    fn load(&self) -> Load {
        Load { stalled: self.away.stalled, ..self.role.load(self.clock.now()) }
    }

    fn report(&self) {
        let load = self.load();
        self.metrics.on_load(&load);
        self.sessions.broadcast(&Event::Load((&load).into()));
    }

    fn publish_kv_events(&mut self) {
        while let Some(batch) = self.role.core().drain_kv_events(KV_EVENTS_PER_MESSAGE) {
            kv_messages(&batch).for_each(|message| self.sessions.broadcast(&message));
        }
    }

    fn send_snapshot(&mut self, conductor: ConductorId) {
        kv_messages(&self.role.core().kv_snapshot()).for_each(|message| self.sessions.send(conductor, message));
    }
}

/// A batch as messages. A snapshot of a large cache in one would be more than a session takes.
fn kv_messages(batch: &KvEventBatch) -> impl Iterator<Item = Event> {
    let &KvEventBatch { sequence, snapshot, ref events } = batch;
    // An empty snapshot says that there is nothing.
    let parts = events.len().div_ceil(KV_EVENTS_PER_MESSAGE).max(1);
    (0..parts).map(move |part| {
        let begin = part * KV_EVENTS_PER_MESSAGE;
        let events = &events[begin..events.len().min(begin + KV_EVENTS_PER_MESSAGE)];
        let events = events.iter().map(Into::into).collect();
        let goes_on = snapshot && part > 0;
        Event::Kv(v1::KvEvents { sequence, snapshot: snapshot && part == 0, goes_on, events })
    })
}

async fn sleep_until(clock: &dyn Clock, wakeup: Option<Instant>) {
    match wakeup {
        Some(wakeup) => clock.sleep_until(wakeup).await,
        None => std::future::pending().await,
    }
}
