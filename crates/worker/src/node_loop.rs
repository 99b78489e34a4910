//! The loop of a node: one task that owns the role's core. It never waits for anything but its inputs.

use std::sync::Arc;
use std::time::Instant;

use baton_proto::v1::{self, node_event::Event};
use baton_runtime::{Clock, Phase, Shutdown};
use baton_scheduler::{KV_EVENTS_PER_MESSAGE, KvEventBatch, REPORT_INTERVAL};
use baton_types::{ConductorId, Load};
use tokio::sync::mpsc;

use crate::input::{Input, IntegrityReport};
use crate::sessions::Sessions;
use crate::transfer::TransferView;

/// Of so many reports one says how bytes move, too.
const REPORTS_PER_TRANSFER_REPORT: u64 = 5;
/// Inputs taken in before effects are carried out: a burst costs one round.
const INPUTS_PER_ROUND: usize = 256;

/// What a node of one kind does with its inputs. Core and shell of the role in one.
pub trait Role: Send + 'static {
    /// What only this role takes in.
    type Event: Send + 'static;

    /// Takes an input in.
    fn on_input(&mut self, now: Instant, input: Input<Self::Event>);
    /// Takes note of the time.
    fn on_wakeup(&mut self, now: Instant);
    /// When `on_wakeup` is due.
    fn next_wakeup(&self) -> Option<Instant>;
    /// Carries out what the core decided. An error is the end of the node.
    fn carry_out(&mut self) -> anyhow::Result<()>;
    /// The load now.
    fn load(&self, now: Instant) -> Load;
    /// Up to `max` changes of the prefix cache since the last call; `None` where there are none.
    fn drain_kv_events(&mut self, max: usize) -> Option<KvEventBatch>;
    /// All full blocks that can be reused.
    fn kv_snapshot(&self) -> KvEventBatch;
    /// Whether each block is accounted for.
    fn check_integrity(&self) -> Result<(), String>;
    /// Whether no request is here.
    fn is_idle(&self) -> bool;
}

/// What the loop needs beside its role.
pub struct NodeLoop<R: Role> {
    /// The role.
    pub role: R,
    /// Everything that happens.
    pub inputs: mpsc::Receiver<Input<R::Event>>,
    /// Where events go.
    pub sessions: Sessions,
    /// How bytes move.
    pub transfer: TransferView,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Draining ends the loop once the role is idle.
    pub shutdown: Shutdown,
}

impl<R: Role> NodeLoop<R> {
    /// Runs until the node has drained, or has to close.
    pub async fn run(mut self) -> anyhow::Result<()> {
        let mut reports = baton_runtime::interval(REPORT_INTERVAL);
        reports.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut draining, mut reported) = (false, 0u64);
        loop {
            let wakeup = self.role.next_wakeup();
            tokio::select! {
                biased;
                // What is rarely due comes first: a stream of inputs must not starve deadlines and reports.
                () = sleep_until(wakeup) => self.role.on_wakeup(self.clock.now()),
                () = self.shutdown.wait_for(Phase::Draining), if !draining => {
                    draining = true;
                    self.role.on_input(self.clock.now(), Input::Drain);
                }
                () = self.shutdown.wait_for(Phase::Closing), if draining => return Ok(()),
                _ = reports.tick() => {
                    self.report();
                    if reported.is_multiple_of(REPORTS_PER_TRANSFER_REPORT) {
                        self.sessions.broadcast(&self.transfer.event());
                    }
                    reported += 1;
                }
                input = self.inputs.recv() => match input {
                    Some(input) => self.take_in(input),
                    None => return Ok(()),
                },
            }
            self.role.carry_out()?;
            self.publish_kv_events();
            if draining && self.role.is_idle() {
                self.report();
                return Ok(());
            }
        }
    }

    fn take_in(&mut self, input: Input<R::Event>) {
        self.on_input(input);
        for _ in 1..INPUTS_PER_ROUND {
            match self.inputs.try_recv() {
                Ok(input) => self.on_input(input),
                Err(_) => break,
            }
        }
    }

    fn on_input(&mut self, input: Input<R::Event>) {
        match input {
            Input::SessionOpened(conductor) => {
                self.publish_kv_events();
                self.send_snapshot(conductor);
                self.sessions.send(conductor, Event::Load((&self.role.load(self.clock.now())).into()));
                self.sessions.send(conductor, self.transfer.event());
            }
            Input::KvSnapshot(conductor) => {
                self.publish_kv_events();
                self.send_snapshot(conductor);
            }
            Input::CheckIntegrity(answer) => {
                let report = IntegrityReport {
                    problem: self.role.check_integrity().err(),
                    load: self.role.load(self.clock.now()),
                };
                // The caller may have given up.
                let _ = answer.send(report);
            }
            input => self.role.on_input(self.clock.now(), input),
        }
    }

    fn report(&self) {
        self.sessions.broadcast(&Event::Load((&self.role.load(self.clock.now())).into()));
    }

    fn publish_kv_events(&mut self) {
        while let Some(batch) = self.role.drain_kv_events(KV_EVENTS_PER_MESSAGE) {
            kv_messages(&batch).for_each(|message| self.sessions.broadcast(&message));
        }
    }

    fn send_snapshot(&self, conductor: ConductorId) {
        kv_messages(&self.role.kv_snapshot()).for_each(|message| self.sessions.send(conductor, message));
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
        let (snapshot, goes_on) = (snapshot && part == 0, snapshot && part > 0);
        Event::Kv(v1::KvEvents { sequence, snapshot, goes_on, events: events.iter().map(Into::into).collect() })
    })
}

async fn sleep_until(wakeup: Option<Instant>) {
    match wakeup {
        Some(wakeup) => baton_runtime::sleep_until(wakeup).await,
        None => std::future::pending().await,
    }
}
