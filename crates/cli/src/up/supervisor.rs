//! Keeps one process running.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use baton_runtime::{Clock, SystemClock, TaskSet};
use tokio::io::AsyncRead;
use tokio::process::Child;
use tokio::sync::{mpsc, watch};

use super::console::RoleLog;
use super::lines::{Line, Lines, Ready};
use super::plan::Spec;
use super::process;

/// How long the pipes of a child that has ended are still read: a grandchild may hold them open.
const LAST_LINES_TIMEOUT: Duration = Duration::from_millis(200);

/// What a supervised process is to do. Only ever moves on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Run, and be started again after an end.
    Run,
    /// Drain and end.
    Stop,
    /// End faster.
    Hurry,
    /// Be killed.
    Kill,
}

/// What happened to a supervised process.
#[derive(Debug)]
pub enum ProcessEvent {
    /// It was started.
    Started(u32),
    /// How far it is, and with what.
    Progress(f64, String),
    /// It serves.
    Ready(Ready),
    /// It ended, and was not meant to.
    Died {
        /// Why.
        reason: String,
        /// The last that it said.
        last_lines: Vec<String>,
        /// When it is started again; never, if it has not served and says that a setting is wrong.
        restart_in: Option<Duration>,
    },
    /// It ended and was meant to; what was wrong with that, if anything.
    Ended(Option<String>),
}

/// What happened to whom.
#[derive(Debug)]
pub struct Event {
    /// The process.
    pub name: String,
    /// What happened.
    pub what: ProcessEvent,
}

/// How long to wait before a process is started again.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    /// After the first end; doubled each time.
    pub first: Duration,
    /// At most.
    pub cap: Duration,
    /// A process that ran for so long starts anew at `first`.
    pub healthy_after: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(500), cap: Duration::from_secs(30), healthy_after: Duration::from_secs(60) }
    }
}

impl Backoff {
    fn delay(&self, failures: u32) -> Duration {
        self.first.saturating_mul(1_u32.checked_shl(failures).unwrap_or(u32::MAX)).min(self.cap)
    }
}

/// One process and what keeps it running.
pub struct Supervisor {
    spec: Spec,
    backoff: Backoff,
    log: Arc<RoleLog>,
    events: mpsc::Sender<Event>,
    orders: watch::Receiver<Order>,
    has_served: bool,
}

impl Supervisor {
    /// Starts a process and keeps it running until the order to stop.
    pub fn start(
        spec: Spec,
        backoff: Backoff,
        log: RoleLog,
        events: mpsc::Sender<Event>,
        tasks: &TaskSet,
    ) -> watch::Sender<Order> {
        let (sender, orders) = watch::channel(Order::Run);
        let mut supervisor = Self { spec, backoff, log: Arc::new(log), events, orders, has_served: false };
        tasks.spawn_request("supervisor", async move { supervisor.run().await });
        sender
    }

    async fn run(&mut self) {
        let mut failures = 0;
        loop {
            let started = SystemClock.now();
            let outcome = self.run_once().await;
            if self.order() > Order::Run {
                return self.send(ProcessEvent::Ended(outcome.problem())).await;
            }
            if SystemClock.now() - started >= self.backoff.healthy_after {
                failures = 0;
            }
            let would_end_again = outcome.is_refusal() && !self.has_served;
            let restart_in = (!would_end_again).then(|| self.backoff.delay(failures));
            failures += 1;
            let reason = outcome.reason();
            self.send(ProcessEvent::Died { reason, last_lines: self.log.take_tail(), restart_in }).await;
            let stopped = async { self.orders.wait_for(|order| *order > Order::Run).await.is_ok() };
            let is_stopped = match restart_in {
                Some(after) => tokio::time::timeout(after, stopped).await.is_ok(),
                None => stopped.await,
            };
            if is_stopped {
                return self.send(ProcessEvent::Ended(None)).await;
            }
        }
    }

    /// Runs the process once, to its end.
    async fn run_once(&mut self) -> Outcome {
        let mut child = match process::spawn(&self.spec.program, &self.spec.arguments()) {
            Ok(child) => child,
            Err(error) => return Outcome::NotStarted(format!("{}: {error}", self.spec.program.display())),
        };
        let pid = child.id().unwrap_or_default();
        self.send(ProcessEvent::Started(pid)).await;
        let (found, mut ready) = mpsc::channel(1);
        let reading = self.read(&mut child, found);
        let mut reading = std::pin::pin!(reading);
        let mut read = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status,
                () = &mut reading, if !read => read = true,
                Some(ready) = ready.recv() => self.on_ready(&ready),
                Ok(()) = self.orders.changed() => Self::obey(pid, *self.orders.borrow()),
            }
        };
        if !read {
            // What is left in the pipes often says why it died. Time is up only if another process
            // keeps them open.
            let _ = tokio::time::timeout(LAST_LINES_TIMEOUT, reading).await;
        }
        if let Ok(ready) = ready.try_recv() {
            self.on_ready(&ready);
        }
        status.map_or_else(|error| Outcome::NotStarted(error.to_string()), Outcome::Ended)
    }

    fn on_ready(&mut self, ready: &Ready) {
        self.has_served = true;
        self.spec.keep_address(ready);
    }

    fn obey(pid: u32, order: Order) {
        match order {
            Order::Run => {}
            Order::Stop | Order::Hurry => process::send(pid, libc::SIGTERM),
            Order::Kill => process::send(pid, libc::SIGKILL),
        }
    }

    /// Reads both pipes to their ends. Owns what it needs, so that the supervisor can obey
    /// meanwhile.
    fn read(&self, child: &mut Child, found: mpsc::Sender<Ready>) -> impl Future<Output = ()> + use<> {
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let name = self.spec.name.clone();
        let events = self.events.clone();
        let log = Arc::clone(&self.log);
        async move {
            let out = async {
                let Some(mut lines) = stdout.map(Lines::new) else { return };
                while let Some(text) = lines.next().await {
                    let what = match Line::parse(&text) {
                        Line::Ready(ready) => {
                            // Full if it says READY twice; the first one counts.
                            let _ = found.try_send(ready.clone());
                            ProcessEvent::Ready(ready)
                        }
                        Line::Progress(done, what) => ProcessEvent::Progress(done, what),
                        Line::Other => {
                            log.line(text);
                            continue;
                        }
                    };
                    let _ = events.send(Event { name: name.clone(), what }).await;
                }
            };
            tokio::join!(out, log_lines(stderr, &log));
        }
    }

    fn order(&self) -> Order {
        *self.orders.borrow()
    }

    async fn send(&self, what: ProcessEvent) {
        // The receiver is gone only when this process is on its way out.
        let _ = self.events.send(Event { name: self.spec.name.clone(), what }).await;
    }
}

async fn log_lines(pipe: Option<impl AsyncRead + Unpin>, log: &RoleLog) {
    let Some(mut lines) = pipe.map(Lines::new) else { return };
    while let Some(text) = lines.next().await {
        log.line(text);
    }
}

enum Outcome {
    NotStarted(String),
    Ended(ExitStatus),
}

impl Outcome {
    fn reason(&self) -> String {
        match self {
            Self::NotStarted(reason) => format!("could not be started: {reason}"),
            Self::Ended(status) => format!("ended with {}", process::describe(*status)),
        }
    }

    fn is_refusal(&self) -> bool {
        matches!(self, Self::Ended(status) if status.code() == Some(2))
    }

    /// What is wrong with this as the end of a process that was asked to end.
    fn problem(&self) -> Option<String> {
        match self {
            Self::Ended(status) if process::ended_as_asked(*status) => None,
            other => Some(other.reason()),
        }
    }
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
