//! A cluster on virtual time: production's cores, and between them what takes as long as a profile
//! says: messages, adapters, engines and SSDs.
//!
//! `frontend` is the conductor's shell, `node` that of both kinds of node, `wire` what travels
//! between them. `faults` is what goes wrong, `contents` what blocks hold meanwhile. Nothing here
//! decides anything.

mod config;
mod contents;
mod engine;
mod faults;
mod frontend;
mod node;
mod prompt;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use baton_profile::ModelProfile;
use baton_scheduler::{
    Cluster, LAYER_DEADLINE, Policies, PushId, REPORT_INTERVAL, RequestError, RequestJob, TICK_INTERVAL,
};
use baton_types::{Generation, GrantId, NodeRole, RequestId, RequestKey, SamplingParams, Slo, Tbt, Ttft};

use crate::Random;
use crate::faults::FaultKind;
use crate::options::{Feature, SimOptions, Window};
use crate::record::RequestRecord;
use crate::trace::Trace;
use config::{NodeConfig, cluster_config};
use contents::Contents;
use frontend::{CONDUCTOR_ID, Ended, Frontend};
use node::{Node, unavailable};
use wire::{Event, Input, Start, Wire};

/// Whatever waits is served this long after the last arrival; else the simulator has forgotten it.
const LONGEST_BACKLOG: Duration = Duration::from_secs(30 * 24 * 3600);
/// The trace begins when nodes are no newcomers any more.
const WARM_UP: Duration = Duration::from_secs(15);
/// Between two samples of the load.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// What is still on its way when the last request has ended is over this long after. Forgotten
/// grants and leases are included.
const SETTLING: Duration = Duration::from_secs(180);

/// A simulated run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// In the order of arrival.
    pub records: Vec<RequestRecord>,
    /// Seconds of work that wait at a prefill node: the mean of the nodes and of the time in which
    /// requests come.
    pub prefill_load_mean: f64,
    /// Share of a decode node's blocks that requests hold or were promised: the same mean.
    pub decode_load_mean: f64,
    /// What went wrong, and how often.
    pub faults: BTreeMap<FaultKind, u64>,
    /// The final clock.
    pub elapsed: Duration,
    /// Events that happened: two runs are the same if these, the clock and the records are.
    pub events: u64,
}

impl Outcome {
    /// Of requests that were played elsewhere.
    pub fn of(records: Vec<RequestRecord>) -> Self {
        Self { records, ..Self::default() }
    }

    /// The requests that arrived in this part of the time.
    pub(crate) fn counted(&self, window: Window) -> Vec<&RequestRecord> {
        let last = self.records.iter().map(|record| record.arrived).max().unwrap_or_default();
        self.records.iter().filter(|record| window.contains(record.arrived, last)).collect()
    }
}

struct World<'a> {
    options: &'a SimOptions,
    profile: &'a ModelProfile,
    configs: Vec<NodeConfig>,
    /// Of what goes wrong.
    chance: Random,
    trace: &'a Trace,
    wire: Wire,
    frontend: Frontend,
    nodes: Vec<Node>,
    records: Vec<RequestRecord>,
    /// When the last request comes.
    last: Duration,
    /// Samples of the load, and their sums.
    samples: u32,
    prefill_load: f64,
    decode_load: f64,
    open: usize,
}

/// Plays a trace.
pub fn simulate(trace: &Trace, profile: &ModelProfile, options: &SimOptions) -> Outcome {
    World::new(trace, profile, options).run()
}

impl<'a> World<'a> {
    fn new(trace: &'a Trace, profile: &'a ModelProfile, options: &'a SimOptions) -> Self {
        let prefill = (0..options.prefill).map(|number| (NodeRole::Prefill, number));
        let decode = (0..options.decode).map(|number| (NodeRole::Decode, number));
        let configs: Vec<_> =
            prefill.chain(decode).map(|(role, number)| NodeConfig::new(role, number, profile, options)).collect();
        let names: HashMap<_, _> = configs.iter().map(|config| config.name.clone()).zip(0..).collect();
        let contents = options.fault_every.map(|_| Contents::new(configs.len(), options.block_tokens));
        let mut seeds = Random::new(options.seed);
        let wire = Wire::new(names, options.is_cramped.then(|| Random::new(!options.seed)), contents);
        let now = wire.now();
        let policies = Policies { placement: options.placement.policy(), admission: options.admission.policy() };
        let cluster = Cluster::new(cluster_config(options, profile.network_bytes_per_s), policies);
        let names = configs.iter().map(|config| config.name.clone()).collect();
        let frontend = Frontend::new(cluster, names, seeds.next_u64(), options.has(Feature::Smoothing));
        let node = |(node, config)| {
            let start = Start { node, generation: Generation(1) };
            Node::new(now, start, config, profile, seeds.next_u64())
        };
        let nodes = configs.iter().enumerate().map(node).collect();
        let arriving = |request| RequestRecord::arriving(request, options.speed);
        let records: Vec<_> = trace.requests.iter().map(arriving).collect();
        let mut world = Self {
            options,
            profile,
            chance: Random::new(seeds.next_u64()),
            trace,
            nodes,
            configs,
            wire,
            frontend,
            last: records.last().map_or(Duration::ZERO, |record| record.arrived),
            open: records.len(),
            records,
            samples: 0,
            prefill_load: 0.0,
            decode_load: 0.0,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        let now = self.wire.now();
        for (index, node) in self.nodes.iter().enumerate() {
            self.frontend.on_joined(&mut self.wire, index, node.info.clone());
            // Nodes do not report in step.
            let offset = REPORT_INTERVAL.mul_f64(index as f64 / self.nodes.len() as f64);
            self.wire.at(now + offset, node.start, Input::Report);
        }
        self.await_arrival(0);
        self.wire.queue.at(now, Event::Tick);
        self.wire.queue.at(now + WARM_UP, Event::Sample);
        self.await_fault(WARM_UP);
    }

    /// Requests come one at a time into the queue.
    fn await_arrival(&mut self, request: usize) {
        if let Some(record) = self.records.get(request) {
            let at = self.wire.queue.start() + WARM_UP + record.arrived;
            self.wire.queue.at(at, Event::Arrival(request));
        }
    }

    /// Since the trace began.
    fn elapsed(&self) -> Duration {
        self.wire.queue.elapsed().saturating_sub(WARM_UP)
    }

    fn run(mut self) -> Outcome {
        while self.open > 0 {
            let Some(event) = self.wire.queue.pop() else { break };
            assert!(self.elapsed() < self.last + LONGEST_BACKLOG, "{} requests never end: a bug", self.open);
            self.on_event(event);
            for ended in std::mem::take(&mut self.frontend.ended) {
                self.on_ended(ended);
            }
        }
        let elapsed = self.elapsed();
        let samples = f64::from(self.samples.max(1));
        self.settle();
        Outcome {
            records: self.records,
            prefill_load_mean: self.prefill_load / samples,
            decode_load_mean: self.decode_load / samples,
            faults: self.wire.faults,
            elapsed,
            events: self.wire.queue.turns(),
        }
    }

    /// When every request has ended, nothing is charged, no node has work, and no block is lost.
    fn settle(&mut self) {
        let until = self.wire.now() + SETTLING;
        while self.wire.now() < until
            && let Some(event) = self.wire.queue.pop()
        {
            // Nothing new begins.
            if !matches!(event, Event::Fault | Event::Sample) {
                self.on_event(event);
            }
        }
        assert_eq!(self.frontend.cluster.placed(), 0, "requests that ended are charged");
        for node in &self.nodes {
            assert!(node.is_idle() && !node.transfers_anything(), "{} is not idle", node.info.node);
            assert_eq!(node.check(), Ok(()));
        }
    }

    fn on_event(&mut self, event: Event) {
        if let Some(until) = self.hung_until(&event) {
            return self.wire.queue.at(until, event);
        }
        let wire = &mut self.wire;
        match event {
            Event::Arrival(request) => self.on_arrival(request),
            Event::RequestTimer(request) => self.frontend.on_timer(wire, request),
            Event::Conductor(from, session, report) => {
                if wire.sessions[from.node] == session {
                    self.frontend.on_report(wire, from, report);
                }
            }
            Event::Node(to, input) => self.on_input(to, input),
            Event::Command(to, session, input) => {
                if wire.sessions[to.node] == session {
                    self.on_input(to, input);
                }
            }
            Event::FetchedLayer { reader, key, serial, is_late } => {
                self.on_fetched_layer(reader, key, serial, is_late);
            }
            Event::Pushed { from, key, push } => self.on_pushed(from, key, push),
            Event::Fault => self.on_fault(),
            Event::Left(start) => self.frontend.on_left(wire, start),
            Event::GraceOver(start) if self.nodes[start.node].start == start => self.end_process(start.node),
            Event::Returned(start) if self.nodes[start.node].start == start => self.on_returned(start),
            // It was killed meanwhile.
            Event::GraceOver(_) | Event::Returned(_) => {}
            Event::Tick => {
                self.frontend.cluster.on_tick(wire.now());
                wire.queue.after(TICK_INTERVAL, Event::Tick);
            }
            Event::Sample => self.sample(),
        }
    }

    fn on_input(&mut self, to: Start, input: Input) {
        let wire = &mut self.wire;
        if self.nodes[to.node].start != to {
            return undelivered(wire, to.node, input);
        }
        if matches!(input, Input::Report) {
            wire.at(wire.now() + REPORT_INTERVAL, to, Input::Report);
        }
        self.nodes[to.node].on_input(wire, input);
        if self.nodes[to.node].is_draining && self.nodes[to.node].is_idle() {
            self.end_process(to.node);
        }
    }

    fn on_fetched_layer(&mut self, reader: Start, key: RequestKey, serial: u64, is_late: bool) {
        let node = &self.nodes[reader.node];
        if node.start != reader {
            return;
        }
        let lease = node.lease_of(key, serial);
        let cut = lease.and_then(|(holder, _)| self.wire.cut_until(holder.node, reader.node));
        if let Some(until) = cut.filter(|_| !is_late) {
            let late = self.wire.now() + LAYER_DEADLINE;
            let event = Event::FetchedLayer { reader, key, serial, is_late: late < until };
            return self.wire.queue.at(until.min(late), event);
        }
        let is_good = !is_late && lease.is_none_or(|(holder, lease)| self.is_open(holder, lease));
        self.nodes[reader.node].on_fetched_layer(&mut self.wire, key, serial, is_good);
    }

    fn is_open(&self, node: Start, grant: GrantId) -> bool {
        let holder = &self.nodes[node.node];
        holder.start == node && holder.open.contains(&grant)
    }

    fn on_pushed(&mut self, from: Start, key: RequestKey, id: PushId) {
        if self.nodes[from.node].start != from {
            return;
        }
        let to = self.nodes[from.node].pushes.get(&(key, id)).map(|push| push.to.node);
        if let Some(until) = to.and_then(|to| self.wire.cut_until(from.node, to)) {
            return self.wire.queue.at(until, Event::Pushed { from, key, push: id });
        }
        // It was cancelled.
        let Some(push) = self.nodes[from.node].pushes.remove(&(key, id)) else { return };
        let is_open = self.is_open(push.to, push.grant);
        let fails = is_open && self.nodes[from.node].push_fails(&mut self.wire);
        if let Some(contents) = &mut self.wire.contents {
            let landed = if fails { self.chance.below(push.spans.len() as u64 + 1) as usize } else { push.spans.len() };
            for (span, held) in &push.spans {
                let found = contents.read(from.node, span.layer, span.source);
                assert_eq!(found, *held, "{:?} was reused while {key:?} pushed it", span.source);
            }
            for (span, held) in push.spans.iter().take(if is_open { landed } else { 0 }) {
                contents.write(push.to.node, span.layer, span.destination, *held);
            }
        }
        let arrived = if is_open && !fails {
            self.wire.at(self.wire.now(), push.to, Input::Arrived(push.grant, id, push.bytes));
            Ok(push)
        } else {
            Err(unavailable("the decode node does not take it any more"))
        };
        self.nodes[from.node].on_pushed(&mut self.wire, key, id, arrived);
    }

    fn on_arrival(&mut self, request: usize) {
        self.await_arrival(request + 1);
        let traced = &self.trace.requests[request];
        let tokens = prompt::prompt(traced, self.trace.block_tokens);
        let slo = Slo { ttft: self.options.ttft_slo.map(Ttft), tbt: self.options.tbt_slo.map(Tbt) };
        let hashes = self.frontend.cluster.block_hasher(&[]);
        let hashes = hashes.map_or_else(Vec::new, |(hasher, block_tokens)| hasher.chain(&tokens, block_tokens));
        let sampling = SamplingParams { max_tokens: self.records[request].output_tokens, ..SamplingParams::default() };
        let job = RequestJob {
            request: RequestId(request as u128),
            conductor: CONDUCTOR_ID,
            tokens: tokens.into(),
            sampling: Arc::new(sampling),
            block_hashes: hashes.into(),
            slo,
            timeout: Duration::MAX,
            priority: 0,
            first_completion_nodes: Vec::new(),
        };
        self.frontend.on_request(&mut self.wire, request, job);
    }

    fn on_ended(&mut self, ended: Ended) {
        let Ended { request, outcome, core, predicted } = ended;
        self.open -= 1;
        let now = self.elapsed();
        let record = &mut self.records[request];
        let timeline = core.timeline();
        let usage = core.usage();
        record.predicted_ttft = predicted.map(|p| p.0);
        record.predicted_tbt = predicted.and_then(|p| p.1);
        if let Some(placement) = core.placement() {
            record.prefill = Some(self.wire.index(&placement.prefill));
            record.decode = placement.decode.as_ref().map(|node| self.wire.index(node));
        }
        record.ttft = (usage.completion_tokens > 0).then_some(timeline.ttft);
        record.tbt = core.tbt().map(|tbt| tbt.0);
        record.migrations = timeline.migrations;
        let block = u64::from(self.options.block_tokens);
        let block_bytes = self.nodes.first().map_or(1, |node| node.info.layout.block_bytes_all_layers() as u64);
        let fetched = timeline.prefix_fetch.as_ref().map_or(0, |fetch| fetch.bytes / block_bytes * block) as u32;
        let is_ssd =
            timeline.prefix_fetch.as_ref().is_some_and(|fetch| fetch.transport == baton_types::FetchReport::SSD);
        (record.fetched_tokens, record.ssd_tokens) = if is_ssd { (0, fetched) } else { (fetched, 0) };
        record.local_tokens = usage.cached_tokens.saturating_sub(fetched);
        record.computed_tokens = record.prompt_tokens - usage.cached_tokens.min(record.prompt_tokens);
        match outcome {
            Ok(_) => record.finished = Some(now),
            Err(RequestError::Refused(_)) if !core.is_admitted() => record.rejected = true,
            Err(RequestError::Aborted) => record.aborted = true,
            Err(error) => record.failed = Some(error.to_string()),
        }
    }

    fn sample(&mut self) {
        let now = self.wire.now();
        let mean = |sum: f64, n: usize| sum / n.max(1) as f64;
        let loads: Vec<_> = self.nodes.iter().map(|node| (node.info.role, node.load(now))).collect();
        let of = |role| loads.iter().filter(move |(other, _)| *other == role).map(|(_, load)| load);
        let queued: u64 = of(NodeRole::Prefill).map(|load| load.queued_tokens).sum();
        let used: f64 = of(NodeRole::Decode)
            .map(|load| f64::from(load.blocks_used + load.blocks_reserved) / f64::from(load.blocks_total.max(1)))
            .sum();
        self.samples += 1;
        self.prefill_load += mean(queued as f64 * self.profile.prefill_per_token, self.options.prefill);
        self.decode_load += mean(used, self.options.decode);
        if self.elapsed() < self.last {
            self.wire.queue.after(SAMPLE_INTERVAL, Event::Sample);
        }
    }
}

/// The start that a message was for is gone: who asked it something hears so.
fn undelivered(wire: &mut Wire, node: usize, input: Input) {
    let gone = || unavailable("the node is gone");
    match input {
        Input::GrantRequest(from, request) => wire.tell(node, from, Input::GrantReply(request.key, Err(gone()))),
        Input::Handoff(from, handoff) => wire.tell(node, from, Input::HandoffReply(handoff.key, Err(gone()))),
        Input::LeaseRequest(from, request) => wire.tell(node, from, Input::LeaseReply(request.key, Err(gone()))),
        _ => {}
    }
}
