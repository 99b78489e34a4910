//! Devices, and what they say of themselves.

#![allow(unsafe_code)] // calls into libibverbs; see each SAFETY note

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, fs, io};

use ibverbs_sys as ffi;

use crate::select::{parse_numa_node, parse_rate};
use crate::{Gid, GidEntry, GidKind, VerbsError};

/// Rows of a GID table that are looked at; drivers have at most 256 per port.
const MAX_GIDS: usize = 1024;

/// The library's list of devices. A device that is not open lives as long as the list.
struct DeviceList {
    first: NonNull<*mut ffi::ibv_device>,
    len: usize,
}

// SAFETY: the list is not changed after it is made, and libibverbs locks what its functions share.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl DeviceList {
    fn query() -> Result<Self, VerbsError> {
        let mut len = 0;
        // SAFETY: the call writes one integer, which is ours, and returns a list or null.
        let first = unsafe { ffi::ibv_get_device_list(&raw mut len) };
        let first = NonNull::new(first).ok_or_else(|| VerbsError::last("ibv_get_device_list", "this machine"))?;
        Ok(Self { first, len: usize::try_from(len).unwrap_or(0) })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from ibv_get_device_list, and no device of it is used through it
        // any more; open ones have their own count.
        unsafe { ffi::ibv_free_device_list(self.first.as_ptr()) };
    }
}

/// An RDMA device of this machine, not yet open.
#[derive(Clone)]
pub struct Device {
    list: Arc<DeviceList>,
    index: usize,
    name: String,
    node_guid: u64,
    numa_node: Option<u32>,
}

impl Device {
    /// All devices; none where the machine has none.
    pub fn list() -> Result<Vec<Self>, VerbsError> {
        let list = match DeviceList::query() {
            // What the library says where the kernel has no RDMA at all.
            Err(VerbsError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENOSYS) => {
                return Ok(vec![]);
            }
            list => Arc::new(list?),
        };
        Ok((0..list.len).map(|index| Self::at(&list, index)).collect())
    }

    fn at(list: &Arc<DeviceList>, index: usize) -> Self {
        // SAFETY: `index` is within the list.
        let device = unsafe { *list.first.as_ptr().add(index) };
        // SAFETY: the device is one of a living list; its name is a C string of its own.
        let name = unsafe { CStr::from_ptr(ffi::ibv_get_device_name(device)) }.to_string_lossy().into_owned();
        // SAFETY: as above.
        let node_guid = u64::from_be(unsafe { ffi::ibv_get_device_guid(device) });
        let numa_node = fs::read_to_string(format!("/sys/class/infiniband/{name}/device/numa_node"));
        let numa_node = numa_node.ok().as_deref().and_then(parse_numa_node);
        Self { list: list.clone(), index, name, node_guid, numa_node }
    }

    /// Name, such as `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's globally unique id.
    pub fn node_guid(&self) -> u64 {
        self.node_guid
    }

    /// NUMA node the device hangs on, where it says.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// Opens the device.
    pub fn open(&self) -> Result<Arc<Context>, VerbsError> {
        // SAFETY: `index` is within the list, which lives.
        let context = unsafe { ffi::ibv_open_device(*self.list.first.as_ptr().add(self.index)) };
        let raw = NonNull::new(context).ok_or_else(|| VerbsError::last("ibv_open_device", &*self.name))?;
        let mut context = Context { raw, name: self.name.clone(), attributes: ffi::ibv_device_attr::default() };
        // SAFETY: the device is open; the call writes one ibv_device_attr, which is ours.
        let rc = unsafe { ffi::ibv_query_device(raw.as_ptr(), &raw mut context.attributes) };
        VerbsError::check(rc, "ibv_query_device", || self.name.clone())?;
        Ok(Arc::new(context))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {:016x}, NUMA node {:?})", self.name, self.node_guid, self.numa_node)
    }
}

/// State of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// A link that does not carry data yet.
    Initializing,
    /// Data can be sent.
    Active,
}

/// What a port is plugged into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet (RoCE).
    Ethernet,
}

/// Largest payload of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(pub(crate) u8);

impl Mtu {
    /// Of that many bytes: 256, 512, 1024, 2048 or 4096.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        (1..=5).map(Self).find(|mtu| mtu.bytes() == bytes)
    }

    /// In bytes.
    pub fn bytes(self) -> u32 {
        128 << self.0
    }
}

/// A port of an open device, as it is now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PortInfo {
    /// Port number, from 1.
    pub port: u8,
    /// Whether it can send.
    pub state: PortState,
    /// The MTU in use.
    pub active_mtu: Mtu,
    /// What it is plugged into.
    pub link_layer: LinkLayer,
    /// InfiniBand's local id; 0 on Ethernet.
    pub lid: u16,
    /// Speed in Gbit/s, where the kernel says.
    pub gbit_per_s: Option<f64>,
}

/// An open device.
pub struct Context {
    raw: NonNull<ffi::ibv_context>,
    name: String,
    attributes: ffi::ibv_device_attr,
}

// SAFETY: libibverbs is thread-safe: every function may be called from any thread
// (ibv_open_device's context included).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn raw(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads that a queue pair may have under way at once, towards a peer and from it.
    pub fn max_reads(&self) -> u8 {
        self.attributes.max_qp_rd_atom.min(self.attributes.max_qp_init_rd_atom).clamp(0, 255) as u8
    }

    /// Spans that a work request may have.
    pub fn max_sge(&self) -> u32 {
        self.attributes.max_sge.max(0) as u32
    }

    /// All ports.
    pub fn ports(&self) -> Result<Vec<PortInfo>, VerbsError> {
        (1..=self.attributes.phys_port_cnt).map(|port| self.port(port)).collect()
    }

    /// One port, from 1.
    pub fn port(&self, port: u8) -> Result<PortInfo, VerbsError> {
        let mut attributes = ffi::ibv_port_attr::default();
        // SAFETY: the device is open. The function writes the beginning of an ibv_port_attr, which
        // its parameter's type, kept for old binaries, hides; the rest stays zero.
        let rc = unsafe { ffi::ibv_query_port(self.raw(), port, (&raw mut attributes).cast()) };
        VerbsError::check(rc, "ibv_query_port", || format!("port {port} of {}", self.name))?;
        let rate = fs::read_to_string(format!("/sys/class/infiniband/{}/ports/{port}/rate", self.name));
        Ok(PortInfo {
            port,
            state: port_state(attributes.state),
            active_mtu: Mtu(attributes.active_mtu.clamp(1, 5) as u8),
            link_layer: link_layer(attributes.link_layer),
            lid: attributes.lid,
            gbit_per_s: rate.ok().as_deref().and_then(parse_rate),
        })
    }

    /// The GID tables of all ports.
    pub fn gid_table(&self) -> Result<Vec<GidEntry>, VerbsError> {
        let mut rows = vec![ffi::ibv_gid_entry::default(); MAX_GIDS];
        let row_bytes = size_of::<ffi::ibv_gid_entry>();
        // SAFETY: the device is open, and the call writes at most `rows.len()` entries of
        // `row_bytes` each.
        let found = unsafe { ffi::_ibv_query_gid_table(self.raw(), rows.as_mut_ptr(), rows.len(), 0, row_bytes) };
        let found = usize::try_from(found).map_err(|_| VerbsError::Refused {
            operation: "ibv_query_gid_table",
            object: self.name.clone(),
            source: io::Error::from_raw_os_error(-found as i32),
        })?;
        Ok(rows.iter().take(found).filter_map(gid_entry).collect())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by ibv_open_device; all that was made of it holds an Arc of this and is
        // gone.
        let rc = unsafe { ffi::ibv_close_device(self.raw()) };
        debug_assert_eq!(rc, 0, "ibv_close_device {}", self.name);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.name)
    }
}

fn port_state(state: ffi::ibv_port_state::Type) -> PortState {
    match state {
        ffi::ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
        ffi::ibv_port_state::IBV_PORT_INIT | ffi::ibv_port_state::IBV_PORT_ARMED => PortState::Initializing,
        _ => PortState::Down,
    }
}

fn link_layer(code: u8) -> LinkLayer {
    // An unspecified link layer is InfiniBand (ibv_query_port(3)).
    if u32::from(code) == ffi::IBV_LINK_LAYER_ETHERNET { LinkLayer::Ethernet } else { LinkLayer::InfiniBand }
}

fn gid_entry(row: &ffi::ibv_gid_entry) -> Option<GidEntry> {
    // Numbers of enum ibv_gid_type; the bindings have its names only for the table's rows as plain
    // integers.
    let kind = [GidKind::InfiniBand, GidKind::RoceV1, GidKind::RoceV2].get(row.gid_type as usize).copied()?;
    // SAFETY: both variants of the union are 16 plain bytes.
    let gid = Gid(unsafe { row.gid.raw });
    Some(GidEntry { port: u8::try_from(row.port_num).ok()?, index: row.gid_index, gid, kind })
}
