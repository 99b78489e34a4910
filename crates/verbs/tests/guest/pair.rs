//! Two connected queue pairs of this process on one rail.

#![allow(unsafe_code)] // posting, and the bytes of regions; both ends are of one test, which says where it reads

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_verbs::{
    Access, Completion, CompletionChannel, CompletionQueue, Context, Device, Endpoint, MemoryRegistration, Path,
    ProtectionDomain, QueuePair, QueuePairConfig, RemoteSpan, Retries, WorkRequests, choose_gid,
};

/// Long enough for anything but a retry, under emulation.
pub const SOON: Duration = Duration::from_secs(20);
/// 16 ms × 4 tries at least; the device makes some of them longer.
pub const RETRIES: Retries = Retries { timeout: 12, count: 3, receiver_not_ready: 7, receiver_not_ready_timer: 12 };

pub fn open(name: &str) -> Arc<Context> {
    let devices = Device::list().unwrap();
    devices.iter().find(|device| device.name() == name).unwrap().open().unwrap()
}

/// What events of the queues carry.
pub const TOKEN: u64 = 0xfeed_0123_4567_89ab;

/// One end.
pub struct Side {
    pub context: Arc<Context>,
    pub domain: Arc<ProtectionDomain>,
    pub channel: Arc<CompletionChannel>,
    pub queue: Arc<CompletionQueue>,
    pub pair: QueuePair,
    pub region: Arc<MemoryRegion>,
    pub registration: MemoryRegistration,
}

impl Side {
    pub fn new(rail: &str, bytes: usize, config: QueuePairConfig) -> Self {
        let context = open(rail);
        let domain = ProtectionDomain::new(&context).unwrap();
        let channel = CompletionChannel::new(&context).unwrap();
        let queue = CompletionQueue::new(&channel, config.send_depth + config.receive_depth, TOKEN).unwrap();
        let pair = QueuePair::new(&domain, &queue, &queue, config).unwrap();
        let region = Arc::new(MemoryRegion::allocate(bytes).unwrap());
        let registration = MemoryRegistration::register(&domain, &region, Access::ALL).unwrap();
        Self { context, domain, channel, queue, pair, region, registration }
    }

    pub fn endpoint(&self) -> (Path, Endpoint) {
        let port = self.context.port(1).unwrap();
        let gid = choose_gid(&self.context.gid_table().unwrap(), 1, None).unwrap();
        let path = Path { port: 1, gid_index: gid.index as u8, traffic_class: 0, service_level: 0 };
        let qp_num = self.pair.qp_num();
        let endpoint =
            Endpoint { qp_num, psn: qp_num * 77, gid: gid.gid, lid: port.lid, mtu: port.active_mtu, max_reads: 16 };
        (path, endpoint)
    }

    pub fn connect(&self, remote: &Endpoint) {
        let (path, own) = self.endpoint();
        self.pair.init(1).unwrap();
        self.pair.ready_to_receive(path, own.mtu, remote, own.max_reads, RETRIES).unwrap();
        self.pair.ready_to_send(own.psn, remote.max_reads, RETRIES).unwrap();
    }

    pub fn remote(&self, offset: usize) -> RemoteSpan {
        RemoteSpan { address: self.registration.address() + offset as u64, key: self.registration.remote_key() }
    }

    /// Posts, on the promise that the test leaves the bytes alone.
    pub fn post(&self, requests: &mut WorkRequests) {
        // SAFETY: the tests write local bytes only while nothing is under way, or where overlapping
        // is what is looked at.
        unsafe { self.pair.post(requests).unwrap() };
        requests.clear();
    }

    /// The next completion.
    pub fn wait(&self) -> Completion {
        let mut found = [Completion::EMPTY];
        let deadline = Instant::now() + SOON;
        while self.queue.poll(&mut found).unwrap() == 0 {
            assert!(Instant::now() < deadline, "no completion within {SOON:?}");
            thread::yield_now();
        }
        found[0]
    }

    /// A copy of bytes.
    pub fn copy(&self, range: Range<usize>) -> Vec<u8> {
        // SAFETY: a copy of plain bytes; where the peer is writing them, any mixture will do for
        // the test.
        unsafe { self.region.slice(range).to_vec() }
    }

    pub fn fill(&self, bytes: &[u8]) {
        // SAFETY: called while nothing is under way.
        unsafe { self.region.slice_mut(0..bytes.len()).copy_from_slice(bytes) };
    }
}

pub fn connected_with(rail: &str, bytes: usize, config: QueuePairConfig) -> (Side, Side) {
    let a = Side::new(rail, bytes, config);
    let b = Side::new(rail, bytes, config);
    a.connect(&b.endpoint().1);
    b.connect(&a.endpoint().1);
    (a, b)
}

pub fn connected(rail: &str, bytes: usize) -> (Side, Side) {
    connected_with(rail, bytes, QueuePairConfig { max_sge: 4, ..QueuePairConfig::default() })
}

/// xorshift64*: the same numbers for the same seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(len).collect()
    }
}
