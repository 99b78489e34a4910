//! A cluster on virtual time: production's cores, and between them messages, adapters, engines and SSDs that take as long as a profile says.
//!
//! `frontend` is the conductor's shell, `node` that of both kinds of node, `wire` what travels between them. Nothing here decides anything.

mod config;
mod engine;
mod frontend;
mod link;
mod node;
mod prompt;
mod wire;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_profile::ModelProfile;
use baton_scheduler::{Cluster, Policies, RequestError, RequestJob};
use baton_types::{Generation, NodeRole, RequestId, SamplingParams, Slo, Tbt, Ttft};

use crate::options::{SimOptions, Window};
use crate::random::Random;
use crate::record::{RequestRecord, Sample};
use crate::trace::{Trace, TraceRequest};
use config::{NodeConfig, cluster_config};
use frontend::{CONDUCTOR, Ended, Frontend};
use node::{Node, unavailable};
use wire::{Event, Input, Start, Wire};

/// Whatever waits is served this long after the last arrival; else the simulator has forgotten it.
const LONGEST_BACKLOG: Duration = Duration::from_secs(30 * 24 * 3600);
/// Production's intervals: of a node's reports, of the conductor's looks at them and at hot prefixes.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);
const TICK_INTERVAL: Duration = Duration::from_millis(500);
const REPLICATE_INTERVAL: Duration = Duration::from_secs(5);
/// The trace begins when nodes are no newcomers any more.
const WARM_UP: Duration = Duration::from_secs(15);
/// Until the conductor notices that a process is gone, and until the process is back, as `baton up` starts a mock node again.
const NOTICE: Duration = Duration::from_millis(1);
const RESTART: Duration = Duration::from_secs(1);
/// Between two samples of the load.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// A simulated run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// In the order of arrival.
    pub records: Vec<RequestRecord>,
    /// The load over time.
    pub samples: Vec<Sample>,
    /// The final clock.
    pub elapsed: Duration,
    /// Events that happened: two runs are the same if these, the clock and the records are.
    pub events: u64,
}

impl Outcome {
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
    faults: Random,
    requests: &'a [TraceRequest],
    wire: Wire,
    frontend: Frontend,
    nodes: Vec<Node>,
    records: Vec<RequestRecord>,
    samples: Vec<Sample>,
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
        let wire = Wire::new(names);
        let mut seeds = Random::new(options.seed);
        let requests = &trace.requests;
        let policies = Policies { placement: options.placement.policy(), admission: options.admission.policy() };
        let cluster = Cluster::new(cluster_config(options, profile.network_bytes_per_s), policies);
        let names = configs.iter().map(|config| config.name.clone()).collect();
        let frontend = Frontend::new(wire.now(), cluster, names, requests.len(), seeds.next_u64());
        let node = |(node, config)| {
            let start = Start { node, generation: Generation(1) };
            Node::new(start, config, profile, seeds.next_u64())
        };
        let nodes = configs.iter().enumerate().map(node).collect();
        let mut world = Self {
            options,
            profile,
            faults: Random::new(seeds.next_u64()),
            requests,
            nodes,
            configs,
            wire,
            frontend,
            records: requests.iter().map(|request| RequestRecord::arriving(request, options.speed)).collect(),
            samples: Vec::new(),
            open: requests.len(),
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        let now = self.wire.now();
        for (index, node) in self.nodes.iter().enumerate() {
            self.frontend.on_joined(now, index, node.info.clone());
            // Nodes do not report in step.
            let offset = REPORT_INTERVAL.mul_f64(index as f64 / self.nodes.len() as f64);
            self.wire.at(now + offset, node.start, Input::Report);
        }
        for (request, record) in self.records.iter().enumerate() {
            self.wire.queue.at(now + WARM_UP + record.arrived, Event::Arrival(request));
        }
        for event in [Event::Tick, Event::Replicate] {
            self.wire.queue.at(now, event);
        }
        self.wire.queue.at(now + WARM_UP, Event::Sample);
        if let Some(every) = self.options.kill_every {
            self.wire.queue.at(now + WARM_UP + every, Event::Kill);
        }
    }

    /// Since the trace began.
    fn elapsed(&self) -> Duration {
        self.wire.queue.elapsed().saturating_sub(WARM_UP)
    }

    fn run(mut self) -> Outcome {
        let last = self.records.iter().map(|record| record.arrived).max().unwrap_or_default();
        while self.open > 0 {
            let Some(event) = self.wire.queue.pop() else { break };
            assert!(self.elapsed() < last + LONGEST_BACKLOG, "{} requests never end: a bug", self.open);
            self.on_event(event);
            for ended in std::mem::take(&mut self.frontend.ended) {
                self.on_ended(ended);
            }
        }
        let elapsed = self.elapsed();
        self.settle();
        Outcome { records: self.records, samples: self.samples, elapsed, events: self.wire.queue.turns() }
    }

    /// When every request has ended, nothing is charged, no node has work, and no block is lost: what is still on its way has a minute.
    fn settle(&mut self) {
        let until = self.wire.now() + Duration::from_secs(60);
        while self.wire.now() < until
            && let Some(event) = self.wire.queue.pop()
        {
            // Nothing new begins.
            if !matches!(event, Event::Kill | Event::Replicate | Event::Sample) {
                self.on_event(event);
            }
        }
        assert_eq!(self.frontend.cluster.placed(), 0, "requests that ended are charged");
        for node in &self.nodes {
            assert_eq!(node.check(), Ok(()));
        }
    }

    fn on_event(&mut self, event: Event) {
        let wire = &mut self.wire;
        match event {
            Event::Arrival(request) => self.on_arrival(request),
            Event::RequestTimer(request) => self.frontend.on_timer(wire, request),
            Event::Conductor(from, report) => self.frontend.on_report(wire, from, report),
            Event::Node(to, input) => {
                if self.nodes[to.node].start != to {
                    return undelivered(wire, input);
                }
                if matches!(input, Input::Report) {
                    wire.at(wire.now() + REPORT_INTERVAL, to, Input::Report);
                }
                self.nodes[to.node].on_input(wire, input);
            }
            Event::FetchedLayer { reader, key, serial } => {
                let node = &self.nodes[reader.node];
                if node.start == reader {
                    let lease = node.lease_of(key, serial);
                    let is_good = lease.is_none_or(|(holder, lease)| self.is_open(holder, lease));
                    self.nodes[reader.node].on_fetched_layer(&mut self.wire, key, serial, is_good);
                }
            }
            Event::Pushed { from, key, push } => self.on_pushed(from, key, push),
            Event::Kill => self.kill(),
            Event::Left(node) => self.frontend.on_left(wire, node),
            Event::Returned(start) if self.nodes[start.node].start == start => {
                self.frontend.on_joined(wire.now(), start.node, self.nodes[start.node].info.clone());
                wire.at(wire.now(), start, Input::Report);
            }
            // It was killed again meanwhile.
            Event::Returned(_) => {}
            Event::Tick => {
                self.frontend.cluster.on_tick(wire.now());
                wire.queue.after(TICK_INTERVAL, Event::Tick);
            }
            Event::Replicate => {
                if self.options.replicas > 1 {
                    self.frontend.replicate(wire);
                }
                wire.queue.after(REPLICATE_INTERVAL, Event::Replicate);
            }
            Event::Sample => {
                self.sample();
                self.wire.queue.after(SAMPLE_INTERVAL, Event::Sample);
            }
        }
    }

    /// A node loses everything, and starts again.
    fn kill(&mut self) {
        let now = self.wire.now();
        let node = self.faults.below(self.nodes.len() as u64) as usize;
        let before = self.nodes[node].start;
        let start = Start { generation: Generation(before.generation.0 + 1), ..before };
        self.nodes[node].on_killed(&mut self.wire);
        self.nodes[node] = Node::new(start, &self.configs[node], self.profile, self.faults.next_u64());
        self.wire.queue.at(now + NOTICE, Event::Left(node));
        self.wire.queue.at(now + RESTART, Event::Returned(start));
        if let Some(every) = self.options.kill_every {
            self.wire.queue.after(every, Event::Kill);
        }
    }

    fn is_open(&self, node: Start, grant: baton_types::GrantId) -> bool {
        let holder = &self.nodes[node.node];
        holder.start == node && holder.open.contains(&grant)
    }

    fn on_pushed(&mut self, from: Start, key: baton_types::RequestKey, id: baton_scheduler::PushId) {
        let node = &mut self.nodes[from.node];
        if node.start != from {
            return;
        }
        // It was cancelled.
        let Some(push) = node.pushes.remove(&(key, id)) else { return };
        let arrived = if self.is_open(push.to, push.grant) {
            self.wire.at(self.wire.now(), push.to, Input::Arrived(push.grant, id, push.bytes));
            Ok(push)
        } else {
            Err(unavailable("the decode node does not take it any more"))
        };
        self.nodes[from.node].on_pushed(&mut self.wire, key, id, arrived);
    }

    fn on_arrival(&mut self, request: usize) {
        let traced = &self.requests[request];
        let tokens = prompt::prompt(traced);
        let slo = Slo { ttft: self.options.ttft_slo.map(Ttft), tbt: self.options.tbt_slo.map(Tbt) };
        let hashes = self.frontend.cluster.block_hashes(&tokens, &[]).unwrap_or_default();
        let sampling = SamplingParams { max_tokens: self.records[request].output_tokens, ..SamplingParams::default() };
        let job = RequestJob {
            request: RequestId(request as u128),
            conductor: CONDUCTOR,
            tokens: tokens.into(),
            sampling: Arc::new(sampling),
            block_hashes: hashes.into(),
            slo,
            priority: 0,
        };
        self.frontend.on_request(&mut self.wire, request, job);
    }

    fn on_ended(&mut self, ended: Ended) {
        let Ended { request, outcome, core, predicted } = ended;
        self.open -= 1;
        let now = self.elapsed();
        let (record, timeline, usage) = (&mut self.records[request], core.timeline(), core.usage());
        (record.predicted_ttft, record.predicted_tbt) = (predicted.map(|p| p.0), predicted.and_then(|p| p.1));
        if let Some(placement) = core.placement() {
            record.prefill = Some(self.wire.index(&placement.prefill));
            record.decode = placement.decode.as_ref().map(|node| self.wire.index(node));
        }
        record.ttft = (usage.completion_tokens > 0).then_some(timeline.ttft);
        record.tbt = core.tbt().map(|tbt| tbt.0);
        record.migrations = timeline.moves;
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
            Err(RequestError::Refused(_)) if !core.is_accepted() => record.rejected = true,
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
        self.samples.push(Sample {
            at_s: self.elapsed().as_secs_f64(),
            prefill_load: mean(queued as f64 * self.profile.prefill_per_token, self.options.prefill),
            decode_load: mean(used, self.options.decode),
        });
    }
}

/// The start that a message was for is gone: who asked it something hears so.
fn undelivered(wire: &mut Wire, input: Input) {
    let gone = || unavailable("the node is gone");
    match input {
        Input::GrantRequest(from, request) => wire.tell(from, Input::GrantReply(request.key, Err(gone()))),
        Input::Handover(from, handover) => wire.tell(from, Input::HandoverReply(handover.key, Err(gone()))),
        Input::LeaseRequest(from, request) => wire.tell(from, Input::LeaseReply(request.key, Err(gone()))),
        _ => {}
    }
}
