//! The devices of this host, and the memory they may touch.

#![allow(unsafe_code)] // a system call, and a raw file descriptor; see the SAFETY notes

use std::cmp::Reverse;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use baton_memory::MemoryRegion;
use baton_verbs::{
    Access, CompletionChannel, Context, Device, DeviceFilter, Gid, GidEntry, MAX_EVENTS, MemoryRegistration, Mtu, Path,
    PortInfo, ProtectionDomain, by_numa_distance, choose_gid,
};
use futures::future::join_all;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::RdmaAddress;
use crate::SegmentId;

/// Port of every device: adapters with several show each as a device of its own.
const PORT: u8 = 1;
/// Devices used.
const MAX_DEVICES: usize = 16;

/// The devices of an engine, its **rails**.
pub(crate) struct Devices {
    rails: Vec<Arc<Rail>>,
}

/// One device.
pub(crate) struct Rail {
    pub(super) context: Arc<Context>,
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) gid: Gid,
    registrations: RwLock<HashMap<SegmentId, Arc<MemoryRegistration>>>,
    /// One file descriptor for the completions of all lanes.
    channel: AsyncFd<ChannelFd>,
    /// Who waits for the events of a completion queue, by the queue's token.
    waiting: Mutex<HashMap<u64, Arc<Notify>>>,
    next_token: AtomicU64,
}

struct ChannelFd(Arc<CompletionChannel>);

impl AsRawFd for ChannelFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Events of one completion queue.
pub(super) struct Events {
    rail: Arc<Rail>,
    /// What they carry.
    pub(super) token: u64,
    /// Something has completed.
    pub(super) came: Arc<Notify>,
}

impl Drop for Events {
    fn drop(&mut self) {
        self.rail.waiting().remove(&self.token);
    }
}

impl Devices {
    /// Opens every device that `filter` names (all, if there is none) and that has an address.
    pub(crate) fn open(filter: Option<&str>, gid_index: Option<u32>) -> Result<Self, String> {
        let filter: Option<DeviceFilter> = filter.map(|f| f.parse().map_err(|error| format!("{error}"))).transpose()?;
        let mut devices = Device::list().map_err(|error| error.to_string())?;
        if let Some(node) = numa_node() {
            // Peers take the first of equals.
            by_numa_distance(&mut devices, node, Device::numa_node);
        }
        let mut rails = Vec::new();
        let mut problems = Vec::new();
        let wanted = |device: &&Device| filter.as_ref().is_none_or(|filter| filter.matches(device.name()));
        for device in devices.iter().filter(wanted).take(MAX_DEVICES) {
            match Rail::open(device, gid_index) {
                Ok(rail) => rails.push(Arc::new(rail)),
                Err(problem) => problems.push(format!("{}: {problem}", device.name())),
            }
        }
        if rails.is_empty() {
            let all = devices.iter().map(Device::name).collect::<Vec<_>>().join(", ");
            return Err(format!("no device can be used (there are: [{all}]); {}", problems.join("; ")));
        }
        Ok(Self { rails })
    }

    /// Tells lanes of their completions, as long as it is polled.
    pub(crate) async fn dispatch(&self) {
        join_all(self.rails.iter().map(|rail| rail.dispatch())).await;
    }

    /// Registers a segment with every device.
    pub(crate) fn register(&self, segment: SegmentId, region: &Arc<MemoryRegion>) -> Result<(), String> {
        let register = |rail: &Arc<Rail>| MemoryRegistration::register(&rail.domain, region, Access::ALL);
        // All or none: what one device has pinned is released if another one fails.
        let registered: Result<Vec<_>, _> = self.rails.iter().map(register).collect();
        for (rail, registered) in self.rails.iter().zip(registered.map_err(|error| error.to_string())?) {
            rail.registrations.write().unwrap_or_else(PoisonError::into_inner).insert(segment, Arc::new(registered));
        }
        Ok(())
    }

    /// Whether the devices may touch a segment.
    pub(crate) fn has(&self, segment: SegmentId) -> bool {
        self.rails.iter().all(|rail| rail.registration(segment).is_some())
    }

    /// Where peers find the rails: each has an address of its own, and the control connection is
    /// the same for all.
    pub(crate) fn addresses(&self, control: &str) -> Vec<String> {
        let address = |rail: &Arc<Rail>| RdmaAddress { gid: rail.gid.0, control: control.to_owned() }.to_string();
        self.rails.iter().map(address).collect()
    }

    /// The rail with this address.
    pub(crate) fn at(&self, gid: [u8; 16]) -> Option<Arc<Rail>> {
        self.rails.iter().find(|rail| rail.gid.0 == gid).cloned()
    }

    /// The rail on the network of a peer's address: the one whose own has the longest common
    /// beginning with it.
    pub(crate) fn toward(&self, gid: [u8; 16]) -> Option<Arc<Rail>> {
        // The first of equals, which is the nearest to this processor.
        self.rails.iter().min_by_key(|rail| Reverse(common_bits(rail.gid.0, gid))).cloned()
    }
}

/// The NUMA node that this thread runs on: nodes of a cluster are pinned, or their memory is spread
/// anyway.
fn numa_node() -> Option<u32> {
    let mut cpu = 0;
    let mut node = 0;
    // SAFETY: the call writes two integers, which are ours.
    let rc = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, std::ptr::null::<u8>()) };
    let _: u32 = cpu;
    (rc == 0).then_some(node)
}

fn common_bits(a: [u8; 16], b: [u8; 16]) -> u32 {
    (u128::from_be_bytes(a) ^ u128::from_be_bytes(b)).leading_zeros()
}

impl Rail {
    fn open(device: &Device, gid_index: Option<u32>) -> Result<Self, String> {
        let text = |error: baton_verbs::VerbsError| error.to_string();
        let context = device.open().map_err(text)?;
        let gid = choose_gid(&context.gid_table().map_err(text)?, PORT, gid_index).map_err(text)?.gid;
        let domain = ProtectionDomain::new(&context).map_err(text)?;
        tracing::info!(device = device.name(), %gid, numa_node = ?device.numa_node(), "an RDMA device");
        let channel = ChannelFd(CompletionChannel::new(&context).map_err(text)?);
        // SAFETY: the descriptor is the channel's own, which the value keeps open, and it does not
        // change.
        let channel = unsafe { AsyncFd::register(channel) }.map_err(|error| error.to_string())?;
        let (registrations, waiting, next_token) = Default::default();
        Ok(Self { context, domain, gid, registrations, channel, waiting, next_token })
    }

    pub(super) fn channel(&self) -> &Arc<CompletionChannel> {
        &self.channel.get_ref().0
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, Arc<Notify>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the events of a new completion queue.
    pub(super) fn events(self: &Arc<Self>) -> Events {
        let token = self.next_token.fetch_add(1, Relaxed);
        let came = Arc::new(Notify::new());
        self.waiting().insert(token, Arc::clone(&came));
        Events { rail: Arc::clone(self), token, came }
    }

    async fn dispatch(&self) {
        loop {
            let Ok(mut ready) = self.channel.readable().await else { return };
            let taken = self.channel().take_events(|token| {
                if let Some(came) = self.waiting().get(&token) {
                    came.notify_one();
                }
            });
            match taken {
                // There may be more; others get their turn first.
                Ok(MAX_EVENTS) => tokio::task::yield_now().await,
                Ok(_) => ready.clear_ready(),
                Err(error) => {
                    tracing::warn!(device = self.context.name(), %error, "no events of completions");
                    ready.clear_ready();
                }
            }
        }
    }

    /// Where packets leave, by the address table as it is now: indices change when a link goes down
    /// and up.
    pub(super) fn path(&self) -> Result<(Path, PortInfo), String> {
        let table = self.context.gid_table().map_err(|error| error.to_string())?;
        let ours = |entry: &&GidEntry| entry.port == PORT && entry.gid == self.gid;
        let indices: Vec<_> = table.iter().filter(ours).copied().collect();
        let entry = choose_gid(&indices, PORT, None);
        let entry = entry.map_err(|_| format!("{} has lost its address {}", self.context.name(), self.gid))?;
        let port = self.context.port(PORT).map_err(|error| error.to_string())?;
        let gid_index = u8::try_from(entry.index).map_err(|_| format!("GID index {} is too large", entry.index))?;
        Ok((Path { port: PORT, gid_index, traffic_class: 0, service_level: 0 }, port))
    }

    pub(super) fn registration(&self, segment: SegmentId) -> Option<Arc<MemoryRegistration>> {
        self.registrations.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned()
    }
}

pub(super) fn mtu(bytes: u16) -> Result<Mtu, String> {
    Mtu::from_bytes(bytes.into()).ok_or_else(|| format!("{bytes} bytes are no MTU"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_address_has_the_longest_common_prefix() {
        let v4 = |last: [u8; 4]| [[0; 10].as_slice(), &[0xff, 0xff], &last].concat().try_into().unwrap();
        let bits = |a, b| common_bits(v4(a), v4(b));
        assert_eq!(bits([10, 0, 0, 1], [10, 0, 0, 1]), 128);
        assert!(bits([10, 0, 0, 1], [10, 0, 0, 9]) > bits([10, 0, 1, 1], [10, 0, 0, 9]));
    }
}
