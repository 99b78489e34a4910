//! The cluster: requests arrive, are placed by production's code, and go their way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::{BlockPool, TierCache};
use baton_profile::{ModelProfile, attended, step_noise};
use baton_scheduler::{Cluster, ClusterConfig, DecodeRoom, Placement, PlacementRequest, Refusal};
use baton_types::{
    Attempt, BlockHash, BlockId, Generation, KvDtype, KvEvent, KvLayout, Load, NodeId, NodeInfo, NodeRole, RequestId,
    RequestKey, Slo, Tbt, Ttft,
};

use crate::decode_node::{Arrived, DecodeNode};
use crate::event::EventQueue;
use crate::network::Network;
use crate::options::{SimOptions, Window};
use crate::prefill_node::{Computed, Job, PrefillNode, Share};
use crate::random::Random;
use crate::record::{MAX_ANSWER_TOKENS, RejectStage, RequestRecord, Sample};
use crate::trace::{BLOCK_TOKENS, Trace, TraceRequest, block_hash};

/// Whatever waits is served this long after the last arrival; else the simulator has forgotten somebody.
const LONGEST_BACKLOG: Duration = Duration::from_secs(30 * 24 * 3600);
/// Nodes report this often.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Ticks between two samples of the load.
const SAMPLE_EVERY: u64 = 5;
/// Events of a pool that are kept until the next chunk or step.
const MAX_KV_EVENTS: usize = 1 << 16;

/// What happens.
#[derive(Debug)]
enum Event {
    Arrival(usize),
    /// Of blocks of another node, which it holds until then.
    FetchDone {
        request: usize,
        from: usize,
        to: usize,
        blocks: Vec<BlockId>,
    },
    /// From the node's own SSD.
    LoadDone {
        request: usize,
        node: usize,
    },
    ChunkDone {
        node: usize,
        rows: u32,
        attended: u64,
        seconds: f64,
    },
    Pushed {
        request: usize,
        blocks: Vec<BlockId>,
        from: usize,
        first_token_at: Instant,
    },
    /// A computed prompt is offered to its decode node once more.
    Offer {
        request: usize,
        node: usize,
        blocks: Vec<BlockId>,
    },
    StepDone(usize),
    Tick,
}

/// A simulated run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// In the order of arrival.
    pub records: Vec<RequestRecord>,
    /// The load over time.
    pub samples: Vec<Sample>,
    /// The final clock.
    pub elapsed: Duration,
    /// The next number of the generator: two runs are the same if this and the clock are.
    pub next_random: u64,
    /// Events that happened.
    pub events: u64,
}

struct World<'a> {
    profile: &'a ModelProfile,
    options: &'a SimOptions,
    requests: &'a [TraceRequest],
    queue: EventQueue<Event>,
    cluster: Cluster,
    names: Vec<NodeId>,
    index: HashMap<NodeId, usize>,
    prefill: Vec<PrefillNode>,
    decode: Vec<DecodeNode>,
    network: Network,
    /// Of the placement's ties.
    ties: Random,
    /// Of the steps' times.
    noise: Random,
    records: Vec<RequestRecord>,
    placements: Vec<Option<Placement>>,
    hashes: Vec<Arc<[BlockHash]>>,
    /// Of each request's KV: how far it has been pushed, and when the last of that arrives.
    pushes: Vec<Push>,
    /// Parts of each request's prompt that are still to be computed.
    parts: Vec<usize>,
    /// What the part that holds the blocks gave, while others compute.
    computed: HashMap<usize, (usize, Computed)>,
    /// When each prefill node's SSD is free again.
    ssd_until: Vec<Instant>,
    /// Number of each node's next event for the index.
    kv_sequence: Vec<u64>,
    open: usize,
    ticks: u64,
    samples: Vec<Sample>,
}

/// A request's KV on its way to the decode node.
#[derive(Debug, Clone, Copy)]
struct Push {
    /// Leading blocks that are there or under way; `None` before the first chunk.
    blocks: Option<u32>,
    arrives: Instant,
}

/// Plays a trace.
pub fn simulate(trace: &Trace, profile: &ModelProfile, options: &SimOptions) -> Outcome {
    World::new(trace, profile, options).run()
}

fn key(request: usize) -> RequestKey {
    RequestKey { request: RequestId(request as u128), attempt: Attempt(0) }
}

const GENERATION: Generation = Generation(1);

impl Outcome {
    /// The requests that arrived in this part of the time.
    pub(crate) fn counted(&self, window: Window) -> Vec<&RequestRecord> {
        let last = self.records.iter().map(|record| record.arrived).max().unwrap_or_default();
        self.records.iter().filter(|record| window.contains(record.arrived, last)).collect()
    }
}

impl<'a> World<'a> {
    fn new(trace: &'a Trace, profile: &'a ModelProfile, options: &'a SimOptions) -> Self {
        let queue = EventQueue::new();
        let now = queue.start();
        let cache_blocks = options.cache_blocks.unwrap_or((profile.cache_tokens / u64::from(BLOCK_TOKENS)) as u32);
        let decode_blocks = (profile.decode_kv_tokens / u64::from(BLOCK_TOKENS)) as u32;
        let config = ClusterConfig {
            placement: options.placement,
            admission: options.admission,
            fetches: true,
            decode_room: if options.as_live { DecodeRoom::Preferred } else { DecodeRoom::Ignored },
            bandwidth: profile.network_bytes_per_s,
            slow_start: Duration::ZERO,
            max_overtaken: options.max_overtaken,
            max_wait: None,
            max_held: usize::MAX,
            split_above: options.split_above,
            ..ClusterConfig::default()
        };
        let mut cluster = Cluster::new(config);
        let nodes = options.prefill + options.decode;
        let mut names = Vec::with_capacity(nodes);
        for n in 0..nodes {
            let is_prefill = n < options.prefill;
            let (role, number) =
                if is_prefill { (NodeRole::Prefill, n) } else { (NodeRole::Decode, n - options.prefill) };
            let letter = if is_prefill { 'p' } else { 'd' };
            let name = NodeId::new(&format!("{letter}{number:04}")).expect("letters and digits are a name");
            let blocks = if is_prefill { cache_blocks } else { decode_blocks };
            cluster.on_node_joined(now, node_info(&name, role, profile, blocks));
            names.push(name);
        }
        let pool = |blocks: u32| BlockPool::with_eviction(blocks, MAX_KV_EVENTS, options.eviction);
        let ssd = || (options.ssd_blocks > 0).then(|| TierCache::new(options.ssd_blocks, options.eviction));
        let requests = &trace.requests;
        let mut seeds = Random::new(options.seed);
        let mut world = Self {
            profile,
            options,
            requests,
            cluster,
            index: names.iter().cloned().zip(0..).collect(),
            names,
            prefill: (0..options.prefill).map(|_| PrefillNode::new(pool(cache_blocks), ssd(), profile)).collect(),
            decode: (0..options.decode).map(|_| DecodeNode::new(pool(decode_blocks), profile)).collect(),
            network: Network::new(nodes, profile.network_bytes_per_s, profile.latency(), now),
            ties: Random::new(seeds.next_u64()),
            noise: Random::new(seeds.next_u64()),
            records: requests.iter().map(|request| RequestRecord::arriving(request, options.speed)).collect(),
            placements: vec![None; requests.len()],
            hashes: vec![Arc::from([]); requests.len()],
            pushes: vec![Push { blocks: None, arrives: now }; requests.len()],
            parts: vec![0; requests.len()],
            computed: HashMap::new(),
            ssd_until: vec![now; options.prefill],
            kv_sequence: vec![0; nodes],
            open: requests.len(),
            ticks: 0,
            samples: Vec::new(),
            queue,
        };
        for request in 0..requests.len() {
            let at = now + world.records[request].arrived;
            world.queue.at(at, Event::Arrival(request));
        }
        world.queue.after(REPORT_INTERVAL, Event::Tick);
        world
    }

    fn run(mut self) -> Outcome {
        let last = self.records.iter().map(|record| record.arrived).max().unwrap_or_default();
        while self.open > 0 {
            let Some(event) = self.queue.pop() else { break };
            assert!(self.queue.elapsed() < last + LONGEST_BACKLOG, "{} requests never end: a bug", self.open);
            self.on_event(event);
        }
        self.check_integrity();
        Outcome {
            records: self.records,
            samples: self.samples,
            elapsed: self.queue.elapsed(),
            next_random: self.noise.next_u64() ^ self.ties.next_u64(),
            events: self.queue.turns(),
        }
    }

    /// When every request has ended, nobody is charged and no pool has lost a block.
    fn check_integrity(&self) {
        assert_eq!(self.cluster.placed(), 0, "requests that ended are charged");
        let pools = self.prefill.iter().map(|node| &node.pool).chain(self.decode.iter().map(|node| &node.pool));
        for pool in pools {
            assert!(pool.check_integrity().is_ok(), "{:?}", pool.check_integrity());
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Arrival(request) => self.on_arrival(request),
            Event::FetchDone { request, from, to, blocks } => {
                self.pool_of(from).release(&blocks);
                self.cluster.on_fetch_done(key(request));
                self.prefill[to].end_fetch(request, false);
                self.tell_kv_events(from);
                self.plan_prefill(to);
                self.plan(from);
            }
            Event::LoadDone { request, node } => {
                self.prefill[node].end_fetch(request, true);
                self.plan_prefill(node);
            }
            Event::ChunkDone { node, rows, attended, seconds } => {
                self.cluster.on_step(self.queue.now(), &self.names[node], rows, attended, seconds);
                self.on_chunk_done(node);
            }
            Event::Pushed { request, blocks, from, first_token_at } => {
                self.on_pushed(request, &blocks, from, first_token_at)
            }
            Event::Offer { request, node, blocks } => self.offer(request, node, blocks),
            Event::StepDone(node) => self.on_step_done(node),
            Event::Tick => self.on_tick(),
        }
    }

    fn slo(&self) -> Slo {
        Slo { ttft: Some(Ttft(self.options.ttft_slo)), tbt: Some(Tbt(self.options.tbt_slo)) }
    }

    /// Since the request arrived.
    fn waited(&self, request: usize) -> Duration {
        self.queue.elapsed().saturating_sub(self.records[request].arrived)
    }

    fn on_arrival(&mut self, request: usize) {
        let traced = &self.requests[request];
        let full = (traced.input_length / BLOCK_TOKENS) as usize;
        let hashes: Arc<[_]> = traced.hash_ids.iter().take(full).map(|id| block_hash(*id)).collect();
        let (slo, waited) = (self.slo(), self.waited(request));
        let wanted = PlacementRequest {
            key: key(request),
            prompt_tokens: traced.input_length,
            block_hashes: &hashes,
            max_tokens: self.asked_for(request),
            wants_decode: !self.options.as_live || self.asked_for(request) > 1,
            slo,
            waited,
            priority: 0,
            bypass_cache: false,
            exclude: &[],
        };
        let ties = &mut self.ties;
        let placed = self.cluster.place(self.queue.now(), &wanted, &mut || ties.next_u64());
        self.hashes[request] = hashes;
        match placed {
            Ok(placement) => self.on_placed(request, placement),
            Err(Refusal { hold: Some(after), .. }) => self.queue.after(after, Event::Arrival(request)),
            Err(_) => self.reject(request, RejectStage::Arrival),
        }
    }

    /// Tokens that a request asks for: the scheduler knows this, and not how long the answer will be.
    fn asked_for(&self, request: usize) -> u32 {
        if self.options.as_live { self.records[request].output_tokens } else { MAX_ANSWER_TOKENS }
    }

    fn on_placed(&mut self, request: usize, placement: Placement) {
        let to = self.index[&placement.prefill];
        let record = &mut self.records[request];
        record.prefill = Some(to);
        record.decode = placement.decode.as_ref().map(|node| self.index[node] - self.options.prefill);
        let waited = self.queue.elapsed().saturating_sub(record.arrived);
        record.predicted_ttft = Some(waited + placement.estimated_ttft.0 + placement.pace);
        record.predicted_tbt = placement.estimated_tbt.map(|Tbt(tbt)| tbt);
        let parts = 1 + placement.helpers.len();
        let job = Job {
            request,
            tokens: self.requests[request].input_length,
            hashes: self.hashes[request].clone(),
            arrived: self.queue.now(),
            terms: placement.terms,
            // Filling the pipeline costs a part of a chunk for each node more.
            share_of_work: if parts > 1 { 1.05 / parts as f64 } else { 1.0 },
            helps_from: None,
        };
        self.parts[request] = parts;
        self.prefill[to].submit(job.clone());
        match &placement.fetch {
            Some(fetch) => {
                self.begin_fetch(request, self.index[&fetch.from], to, (fetch.tokens / BLOCK_TOKENS) as usize);
            }
            None => self.begin_load(request, to),
        }
        for helper in &placement.helpers {
            let helper = self.index[helper];
            let helps_from = Some(placement.matched_tokens);
            self.prefill[helper].submit(Job { hashes: Arc::from([]), helps_from, ..job.clone() });
            self.plan_prefill(helper);
        }
        self.placements[request] = Some(placement);
        self.plan_prefill(to);
    }

    /// Brings what the holder still has of the prefix, if that is more than the target has.
    fn begin_fetch(&mut self, request: usize, from: usize, to: usize, blocks: usize) {
        let hashes = self.hashes[request].clone();
        let available = self.pool_of(from).match_prefix(&hashes[..blocks.min(hashes.len())]);
        let Some(missing) = self.prefill[to].begin_fetch(request, available.len()) else {
            self.cluster.on_fetch_done(key(request));
            return self.begin_load(request, to);
        };
        // A lease: the source keeps the blocks until they are copied.
        self.pool_of(from).acquire(&available);
        let bytes = missing as u64 * self.profile.kv_bytes(BLOCK_TOKENS);
        let now = self.queue.now();
        let done = self.network.send(now, from, to, bytes);
        if self.network.had_the_way(now, done, bytes) {
            // Nothing was before it: what it takes is what the pair can do.
            self.cluster.on_transfer(&self.names[from], &self.names[to], bytes, (done - now).as_secs_f64());
        }
        self.queue.at(done, Event::FetchDone { request, from, to, blocks: available });
    }

    /// Loads what the node's SSD has of the prefix beyond its memory.
    fn begin_load(&mut self, request: usize, node: usize) {
        let hashes = self.hashes[request].clone();
        let (memory, with_ssd) = self.prefill[node].held(&hashes);
        if with_ssd == memory {
            return;
        }
        let Some(missing) = self.prefill[node].begin_fetch(request, with_ssd) else { return };
        let bytes = missing as u64 * self.profile.kv_bytes(BLOCK_TOKENS);
        let begin = self.ssd_until[node].max(self.queue.now());
        let done = begin + Duration::from_secs_f64(bytes as f64 / self.profile.ssd_bytes_per_s);
        self.ssd_until[node] = done;
        self.queue.at(done, Event::LoadDone { request, node });
    }

    fn pool_of(&mut self, node: usize) -> &mut BlockPool {
        match node.checked_sub(self.options.prefill) {
            None => &mut self.prefill[node].pool,
            Some(decode) => &mut self.decode[decode].pool,
        }
    }

    fn reject(&mut self, request: usize, stage: RejectStage) {
        self.records[request].rejected = Some(stage);
        self.cluster.on_ended(self.queue.now(), key(request));
        self.end(request);
    }

    fn end(&mut self, request: usize) {
        self.open -= 1;
        self.hashes[request] = Arc::from([]);
        self.placements[request] = None;
    }

    fn plan_prefill(&mut self, node: usize) {
        let Some((shares, seconds)) = self.prefill[node].plan(self.queue.now(), self.profile) else { return };
        let seconds = seconds * step_noise(self.profile.step_noise, &mut || self.noise.unit());
        let rows = |share: &Share| f64::from(share.to - share.from) * share.of_work;
        let pairs = |share: &Share| attended(share.from, share.to) as f64 * share.of_work;
        let rows = shares.iter().map(rows).sum::<f64>().round() as u32;
        let attended = shares.iter().map(pairs).sum::<f64>() as u64;
        let computed = self.queue.now() + Duration::from_secs_f64(seconds);
        for share in &shares {
            self.push(node, share, computed);
        }
        self.prefill[node].begin_chunk(self.queue.now(), computed);
        self.queue.at(computed, Event::ChunkDone { node, rows, attended, seconds });
    }

    /// The blocks that a chunk fills go to the decode node layer by layer while the chunk is computed; its last layer's part follows when it is.
    fn push(&mut self, node: usize, share: &Share, computed: Instant) {
        let record = &self.records[share.request];
        // Whoever helps another node has nothing to push.
        let Some(decode) = record.decode.filter(|_| record.prefill == Some(node)) else { return };
        let held = || self.decode[decode].pool.match_prefix(&self.hashes[share.request]).len() as u32;
        let pushed = self.pushes[share.request].blocks.unwrap_or_else(held);
        let is_last = share.to == record.prompt_tokens;
        let filled = if is_last { share.to.div_ceil(BLOCK_TOKENS) } else { share.to / BLOCK_TOKENS };
        let bytes = u64::from(filled.saturating_sub(pushed)) * self.profile.kv_bytes(BLOCK_TOKENS);
        let arrives = self.network.send(self.queue.now(), node, self.options.prefill + decode, bytes);
        let last_layer = bytes as f64 / f64::from(self.profile.layers) / self.profile.network_bytes_per_s;
        let arrives = arrives.max(computed + Duration::from_secs_f64(last_layer) + self.profile.latency());
        self.pushes[share.request] = Push { blocks: Some(filled.max(pushed)), arrives };
    }

    fn on_chunk_done(&mut self, node: usize) {
        for computed in self.prefill[node].on_chunk_done() {
            self.on_part_computed(node, computed);
        }
        self.tell_kv_events(node);
        self.plan_prefill(node);
    }

    /// A part is computed; the prompt is when all are.
    fn on_part_computed(&mut self, node: usize, computed: Computed) {
        let request = computed.request;
        if self.records[request].prefill == Some(node) {
            self.computed.insert(request, (node, computed));
        }
        self.parts[request] -= 1;
        if self.parts[request] == 0
            && let Some((node, computed)) = self.computed.remove(&request)
        {
            self.on_computed(node, computed);
        }
    }

    /// The prompt is computed. Its first token goes out when the decode node can go on with it.
    fn on_computed(&mut self, node: usize, computed: Computed) {
        let request = computed.request;
        let record = &mut self.records[request];
        record.fetched_tokens = computed.fetched_tokens;
        record.ssd_tokens = computed.ssd_tokens;
        record.local_tokens = computed.cached_tokens - computed.fetched_tokens - computed.ssd_tokens;
        record.computed_tokens = record.prompt_tokens - computed.cached_tokens;
        self.cluster.on_prefilled(self.queue.now(), key(request));
        self.offer(request, node, computed.blocks);
    }

    /// Offers a computed prompt to its decode node.
    fn offer(&mut self, request: usize, node: usize, blocks: Vec<BlockId>) {
        if self.options.as_live {
            return self.on_first_token(request, node, blocks);
        }
        let slo = self.slo().after(self.waited(request));
        match self.cluster.recheck_decode(self.queue.now(), key(request), slo) {
            Ok(decode) => {
                if let Some(decode) = decode {
                    self.push_elsewhere(request, node, self.index[&decode]);
                }
                self.on_first_token(request, node, blocks);
            }
            Err(Refusal { hold: Some(after), .. }) => self.queue.after(after, Event::Offer { request, node, blocks }),
            Err(_) => {
                self.release(node, request, &blocks);
                self.reject(request, RejectStage::AfterPrefill);
            }
        }
    }

    /// Another decode node takes the sequence: its KV goes there once more.
    fn push_elsewhere(&mut self, request: usize, node: usize, to: usize) {
        let decode = to - self.options.prefill;
        self.records[request].decode = Some(decode);
        let held = self.decode[decode].pool.match_prefix(&self.hashes[request]).len() as u32;
        let blocks = self.records[request].prompt_tokens.div_ceil(BLOCK_TOKENS);
        let bytes = u64::from(blocks - held) * self.profile.kv_bytes(BLOCK_TOKENS);
        self.pushes[request].arrives = self.network.send(self.queue.now(), node, to, bytes);
    }

    /// The first token is there, and the KV but for what the last layer's push still takes.
    fn on_first_token(&mut self, request: usize, node: usize, blocks: Vec<BlockId>) {
        let now = self.queue.now();
        self.cluster.on_first_token(now, key(request));
        let pace = self.placements[request].as_ref().map_or(Duration::ZERO, |placement| placement.pace);
        let record = &mut self.records[request];
        record.ttft = Some(self.queue.elapsed().saturating_sub(record.arrived) + pace);
        if record.decode.is_none() || record.output_tokens <= 1 {
            self.release(node, request, &blocks);
            return self.finish(request, None);
        }
        let arrives = self.pushes[request].arrives;
        self.queue.at(arrives, Event::Pushed { request, blocks, from: node, first_token_at: now + pace });
    }

    fn on_pushed(&mut self, request: usize, blocks: &[BlockId], from: usize, first_token_at: Instant) {
        self.release(from, request, blocks);
        // There may be room now for whoever waits for it.
        self.plan_prefill(from);
        let record = &self.records[request];
        let Some(decode) = record.decode else { return };
        let max_tokens = self.asked_for(request);
        self.decode[decode].on_arrived(Arrived {
            request,
            prompt_tokens: record.prompt_tokens,
            max_tokens,
            to_come: record.output_tokens - 1,
            hashes: self.hashes[request].clone(),
            first_token_at,
        });
        self.plan_decode(decode);
    }

    /// Plans the next chunk or step of a node, by its index over all nodes.
    fn plan(&mut self, node: usize) {
        match node.checked_sub(self.options.prefill) {
            None => self.plan_prefill(node),
            Some(decode) => self.plan_decode(decode),
        }
    }

    fn plan_decode(&mut self, node: usize) {
        let (profile, rng) = (self.profile, &mut self.noise);
        if let Some(seconds) = self.decode[node].plan(profile, || step_noise(profile.step_noise, &mut || rng.unit())) {
            self.queue.after(Duration::from_secs_f64(seconds), Event::StepDone(node));
        }
    }

    fn on_step_done(&mut self, node: usize) {
        let finished = self.decode[node].on_step_done(self.queue.now());
        for finished in finished {
            self.finish(finished.request, finished.tbt);
        }
        self.plan_decode(node);
    }

    fn finish(&mut self, request: usize, tbt: Option<Duration>) {
        let elapsed = self.queue.elapsed();
        let record = &mut self.records[request];
        record.tbt = tbt;
        record.finished = Some(elapsed);
        let output_tokens = record.output_tokens;
        self.cluster.on_finished(self.queue.now(), key(request), output_tokens);
        self.end(request);
    }

    /// What changed in a node's cache reaches the index. Of decode nodes only where they are sources.
    fn tell_kv_events(&mut self, node: usize) {
        if node >= self.options.prefill && !self.options.decode_sources {
            return;
        }
        while let Some(batch) = self.pool_of(node).drain_events(MAX_KV_EVENTS) {
            let mut events = batch.events;
            // What the SSD still has is still here.
            if let Some(ssd) = self.prefill.get(node).and_then(|node| node.ssd.as_ref()) {
                events.retain(|event| !matches!(event, KvEvent::Removed { hash } if ssd.contains(*hash)));
            }
            self.tell(node, &events);
        }
    }

    fn tell(&mut self, node: usize, events: &[KvEvent]) {
        let sequence = self.kv_sequence[node];
        self.kv_sequence[node] += events.len() as u64;
        self.cluster.on_kv_events(&self.names[node], GENERATION, sequence, false, events);
    }

    /// A prefill node lets go of a prompt's blocks: they are cached from now on, and written through to its SSD.
    fn release(&mut self, node: usize, request: usize, blocks: &[BlockId]) {
        let core = &mut self.prefill[node];
        core.pool.release(blocks);
        if let Some(ssd) = &mut core.ssd {
            let evicted = ssd.insert_prompt(&self.hashes[request]);
            let gone = evicted.into_iter().filter(|hash| core.pool.match_prefix(&[*hash]).is_empty());
            let events: Vec<_> = gone.map(|hash| KvEvent::Removed { hash }).collect();
            self.tell(node, &events);
        }
        self.tell_kv_events(node);
    }

    fn on_tick(&mut self) {
        let now = self.queue.now();
        for node in 0..self.prefill.len() {
            let core = &self.prefill[node];
            let (queued_tokens, step) = (core.queued_tokens(now), core.progress(now));
            let load = Load { running: core.waiting() as u32, queued_tokens, step, ..Load::default() };
            self.cluster.on_load(now, &self.names[node], load);
        }
        for node in 0..self.decode.len() {
            let (running, waiting) = self.decode[node].sequences();
            let load = Load { running: running as u32, waiting: waiting as u32, ..Load::default() };
            let name = &self.names[self.options.prefill + node];
            self.cluster.on_load(now, name, load);
            if let Some((sequences, kv_tokens, seconds)) = self.decode[node].last_step() {
                self.cluster.on_step(now, name, sequences as u32, kv_tokens, seconds);
            }
            self.tell_kv_events(self.options.prefill + node);
        }
        if self.ticks.is_multiple_of(SAMPLE_EVERY) {
            let sample = self.sample();
            self.samples.push(sample);
        }
        self.ticks += 1;
        self.queue.after(REPORT_INTERVAL, Event::Tick);
    }

    fn sample(&self) -> Sample {
        let mean = |sum: f64, n: usize| sum / n.max(1) as f64;
        let backlog = self.prefill.iter().map(|node| node.backlog_s(self.profile)).sum();
        let demand = self.decode.iter().map(DecodeNode::demand).sum();
        Sample {
            at_s: self.queue.elapsed().as_secs_f64(),
            prefill_load: mean(backlog, self.prefill.len()) / self.options.ttft_slo.as_secs_f64(),
            decode_load: mean(demand, self.decode.len()),
        }
    }
}

fn node_info(name: &NodeId, role: NodeRole, profile: &ModelProfile, blocks: u32) -> NodeInfo {
    // K and V of two bytes a number.
    let head_dim = (profile.kv_bytes_per_token / (4 * u64::from(profile.layers))).max(1) as u32;
    let layout = KvLayout {
        model: 1,
        num_layers: profile.layers,
        num_kv_heads: 1,
        head_dim,
        block_tokens: BLOCK_TOKENS,
        dtype: KvDtype::F16,
        num_blocks: blocks,
    };
    NodeInfo {
        node: name.clone(),
        role,
        generation: GENERATION,
        address: String::new(),
        model: profile.name.clone(),
        vocab_size: 1,
        context_length: 1 << 20,
        numerics: "simulated".to_owned(),
        layout,
        profile: profile.node_profile(),
        copies_prefixes: false,
        splits_prompts: false,
    }
}
