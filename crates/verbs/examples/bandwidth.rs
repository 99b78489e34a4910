//! Bandwidth of one queue pair between two threads of this process, to compare with `ib_write_bw`
//! and `ib_read_bw`: `bandwidth DEVICE write|read BYTES COUNT DEPTH SIGNAL_EVERY poll|events
//! [WORKING_SET_BYTES]`. MB are 2^20 bytes, as in perftest.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(unsafe_code)] // posting, and poll(2)

use std::error::Error;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use baton_memory::MemoryRegion;
use baton_verbs::{
    Access, Completion, CompletionChannel, CompletionQueue, Device, Endpoint, LocalSpan, MemoryRegistration, Path,
    ProtectionDomain, QueuePair, QueuePairConfig, RemoteSpan, Retries, WorkRequests, choose_gid,
};

struct Side {
    channel: Arc<CompletionChannel>,
    queue: Arc<CompletionQueue>,
    pair: QueuePair,
    registration: MemoryRegistration,
    path: Path,
    endpoint: Endpoint,
}

impl Side {
    fn new(device: &str, bytes: usize, depth: u32) -> Result<Self, Box<dyn Error>> {
        let devices = Device::list()?;
        let context = devices.iter().find(|d| d.name() == device).ok_or("no such device")?.open()?;
        let domain = ProtectionDomain::new(&context)?;
        let channel = CompletionChannel::new(&context)?;
        let queue = CompletionQueue::new(&channel, depth, 0)?;
        let config = QueuePairConfig { send_depth: depth, receive_depth: 1, ..QueuePairConfig::default() };
        let pair = QueuePair::new(&domain, &queue, &queue, config)?;
        let region = Arc::new(MemoryRegion::allocate(bytes)?);
        let registration = MemoryRegistration::register(&domain, &region, Access::ALL)?;
        let port = context.port(1)?;
        let gid = choose_gid(&context.gid_table()?, 1, None)?;
        let path = Path { port: 1, gid_index: gid.index as u8, traffic_class: 0, service_level: 0 };
        let qp_num = pair.qp_num();
        let endpoint = Endpoint { qp_num, psn: 1, gid: gid.gid, lid: port.lid, mtu: port.active_mtu, max_reads: 16 };
        Ok(Self { channel, queue, pair, registration, path, endpoint })
    }

    fn connect(&self, remote: &Endpoint) -> Result<(), Box<dyn Error>> {
        let retries = Retries::default();
        self.pair.init(1)?;
        self.pair.ready_to_receive(self.path, self.endpoint.mtu, remote, remote.max_reads, retries)?;
        Ok(self.pair.ready_to_send(self.endpoint.psn, remote.max_reads, retries)?)
    }
}

struct Plan {
    read: bool,
    bytes: usize,
    count: usize,
    depth: usize,
    signal_every: usize,
    events: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let text = |index: usize| arguments.get(index).map(String::as_str).ok_or("see the head of this file");
    let number = |index| Ok::<usize, Box<dyn Error>>(text(index)?.parse()?);
    let plan = Plan {
        read: text(2)? == "read",
        bytes: number(3)?,
        count: number(4)?,
        depth: number(5)?,
        signal_every: number(6)?,
        events: text(7)? == "events",
    };
    let working_set = number(8).unwrap_or(plan.bytes).max(plan.bytes);
    let a = Side::new(text(1)?, working_set, plan.depth as u32)?;
    let b = Side::new(text(1)?, working_set, 1)?;
    a.connect(&b.endpoint)?;
    b.connect(&a.endpoint)?;
    let began = Instant::now();
    run(&a, &b, &plan, working_set / plan.bytes)?;
    let rate = (plan.count * plan.bytes) as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 20);
    println!("{} {rate:.2} MB/s", arguments[1..].join(" "));
    Ok(())
}

fn run(a: &Side, b: &Side, plan: &Plan, slots: usize) -> Result<(), Box<dyn Error>> {
    let mut requests = WorkRequests::new(plan.depth, 1);
    let mut found = [Completion::EMPTY; 64];
    let mut added = 0;
    let mut done = 0;
    while done < plan.count {
        while added < plan.count && added - done < plan.depth {
            let offset = added % slots * plan.bytes;
            let local = [LocalSpan { registration: &a.registration, offset, len: plan.bytes as u32 }];
            let address = b.registration.address() + offset as u64;
            let remote = RemoteSpan { address, key: b.registration.remote_key() };
            added += 1;
            let signalled = added % plan.signal_every == 0 || added == plan.count;
            if plan.read {
                requests.read(added as u64, &local, remote, signalled)?
            } else {
                requests.write(added as u64, &local, remote, None, signalled)?
            }
        }
        // SAFETY: nothing looks at the bytes.
        unsafe { a.pair.post(&mut requests)? };
        requests.clear();
        for completion in wait(a, plan.events, &mut found)? {
            if !completion.status.is_success() {
                return Err(completion.to_string().into());
            }
            done = completion.wr_id as usize;
        }
    }
    Ok(())
}

fn wait<'a>(a: &Side, events: bool, found: &'a mut [Completion]) -> Result<&'a [Completion], Box<dyn Error>> {
    let mut count = a.queue.poll(found)?;
    while count == 0 {
        if events {
            a.queue.arm()?;
            count = a.queue.poll(found)?;
            if count == 0 {
                let mut fd = libc::pollfd { fd: a.channel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one record, which is ours.
                unsafe { libc::poll(&raw mut fd, 1, 1_000) };
                a.channel.take_events(|_| ())?;
            }
        }
        if count == 0 {
            count = a.queue.poll(found)?;
        }
    }
    Ok(&found[..count])
}
