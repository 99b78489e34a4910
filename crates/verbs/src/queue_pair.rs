//! Reliable connections.

#![allow(unsafe_code)] // calls into libibverbs; see each SAFETY note

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_qp_attr_mask as mask;

use crate::device::Mtu;
use crate::{CompletionQueue, Gid, PostError, ProtectionDomain, VerbsError, WorkRequests};

/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0xff_ffff;
/// Routers that a packet may pass: enough for any data centre.
const HOP_LIMIT: u8 = 64;
/// Receives posted with one call.
const RECEIVE_BATCH: usize = 64;

/// Sizes of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// Work requests that may be under way. One that is not signalled counts until a later
    /// signalled one has completed.
    pub send_depth: u32,
    /// Receives that may be posted, each for one immediate of the peer.
    pub receive_depth: u32,
    /// Local spans of one work request.
    pub max_sge: u32,
    /// Bytes that can be sent from the work request itself.
    pub max_inline: u32,
}

impl Default for QueuePairConfig {
    fn default() -> Self {
        Self { send_depth: 256, receive_depth: 256, max_sge: 1, max_inline: 0 }
    }
}

/// Which way packets leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Local port, from 1.
    pub port: u8,
    /// Local index into the port's GID table.
    pub gid_index: u8,
    /// Traffic class: DSCP and ECN on RoCEv2.
    pub traffic_class: u8,
    /// Service level: the priority on lossless Ethernet.
    pub service_level: u8,
}

/// What the other side must know to connect; the two sides exchange theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number, 24 bits.
    pub qp_num: u32,
    /// First packet sequence number, 24 bits; random, so that stray packets of an earlier
    /// connection do not fit.
    pub psn: u32,
    /// Address.
    pub gid: Gid,
    /// InfiniBand's local id; 0 on Ethernet.
    pub lid: u16,
    /// Largest packet; the lower of both sides' is used.
    pub mtu: Mtu,
    /// Reads that the peer may have under way towards this side.
    pub max_reads: u8,
}

/// How long to wait for a peer that does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    /// Time for an acknowledgement: 4.096 µs × 2^this; at most 31. 0 waits for ever, and is
    /// refused.
    pub timeout: u8,
    /// Times a packet is sent again; at most 7.
    pub count: u8,
    /// Times to retry where the peer has no receive posted; at most 7, which means for ever.
    pub receiver_not_ready: u8,
    /// Time that this side asks of a peer before such a retry, as a code of the InfiniBand
    /// specification (12 is 0.64 ms, 0 is 655 ms).
    pub receiver_not_ready_timer: u8,
}

impl Default for Retries {
    /// 67 ms for an acknowledgement, seven times: a dead peer is noticed within seconds (devices
    /// round up, and some lengthen each try).
    fn default() -> Self {
        Self { timeout: 14, count: 7, receiver_not_ready: 7, receiver_not_ready_timer: 12 }
    }
}

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    /// New.
    Reset,
    /// Receives can be posted.
    Init,
    /// The peer's packets are taken.
    ReadyToReceive,
    /// Connected both ways.
    ReadyToSend,
    /// Nothing is sent or taken any more; all work requests are flushed.
    Error,
    /// Any other, by its number in `enum ibv_qp_state`.
    Other(u32),
}

/// One end of a reliable connection.
pub struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    config: QueuePairConfig,
    domain: Arc<ProtectionDomain>,
    _send_queue: Arc<CompletionQueue>,
    _receive_queue: Arc<CompletionQueue>,
}

// SAFETY: libibverbs locks each of a queue pair's queues; every function may be called from any
// thread.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// A queue pair in the state reset. Completions of writes and reads go to `send_queue`, the
    /// peer's immediates to `receive_queue`.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        send_queue: &Arc<CompletionQueue>,
        receive_queue: &Arc<CompletionQueue>,
        config: QueuePairConfig,
    ) -> Result<Self, VerbsError> {
        let mut init = ffi::ibv_qp_init_attr {
            send_cq: send_queue.raw(),
            recv_cq: receive_queue.raw(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: config.send_depth,
                max_recv_wr: config.receive_depth,
                max_send_sge: config.max_sge,
                max_recv_sge: 1, // no receive has a span, but some drivers refuse 0
                max_inline_data: config.max_inline,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
            ..Default::default()
        };
        // SAFETY: domain and queues live, and the queue pair keeps them; the call reads and writes
        // one ibv_qp_init_attr, which is ours.
        let raw = unsafe { ffi::ibv_create_qp(domain.raw(), &raw mut init) };
        let name = domain.context().name();
        let raw =
            NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_qp", format!("{name} with {config:?}")))?;
        Ok(Self {
            raw,
            config,
            domain: domain.clone(),
            _send_queue: send_queue.clone(),
            _receive_queue: receive_queue.clone(),
        })
    }

    pub(crate) fn raw(&self) -> *mut ffi::ibv_qp {
        self.raw.as_ptr()
    }

    /// Its number, for the peer.
    pub fn qp_num(&self) -> u32 {
        // SAFETY: the library's record lives as long as the queue pair, and the number is written
        // once.
        unsafe { (*self.raw()).qp_num }
    }

    /// The sizes it was made with.
    pub fn config(&self) -> QueuePairConfig {
        self.config
    }

    /// Binds it to a port, and lets the peer write and read; from now on receives can be posted.
    pub fn init(&self, port: u8) -> Result<(), VerbsError> {
        let access = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        let attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            port_num: port,
            qp_access_flags: access.0,
            ..Default::default()
        };
        let set = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(attributes, set, "to init")
    }

    /// Takes packets of `remote` from now on, with the lower of both sides' MTU and at most
    /// `max_reads` reads of the peer at once.
    pub fn ready_to_receive(
        &self,
        path: Path,
        local_mtu: Mtu,
        remote: &Endpoint,
        max_reads: u8,
        retries: Retries,
    ) -> Result<(), VerbsError> {
        let attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: local_mtu.min(remote.mtu).0.into(),
            dest_qp_num: remote.qp_num,
            rq_psn: remote.psn & PSN_MASK,
            max_dest_rd_atomic: max_reads,
            min_rnr_timer: retries.receiver_not_ready_timer,
            ah_attr: address(path, remote),
            ..Default::default()
        };
        let set = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(attributes, set, "to ready-to-receive")
    }

    /// Sends from now on, beginning with `psn`, and with at most `max_reads` reads at once, which
    /// the peer must allow.
    pub fn ready_to_send(&self, psn: u32, max_reads: u8, retries: Retries) -> Result<(), VerbsError> {
        let attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            sq_psn: psn & PSN_MASK,
            max_rd_atomic: max_reads,
            timeout: retries.timeout.clamp(1, 31),
            retry_cnt: retries.count.min(7),
            rnr_retry: retries.receiver_not_ready.min(7),
            ..Default::default()
        };
        let set = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_MAX_QP_RD_ATOMIC
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY;
        self.modify(attributes, set, "to ready-to-send")
    }

    /// Ends the connection: all work requests complete as flushed, and no more packets of the peer
    /// are taken. Purely local, so it works on a peer that has stopped.
    ///
    /// It is a fence for the peer's writes once a receive that was posted before has been polled as
    /// flushed: some devices (Soft-RoCE) may still be copying the packet in hand when this returns,
    /// and flush receives after that. So keep one receive posted.
    pub fn to_error(&self) -> Result<(), VerbsError> {
        let attributes = ffi::ibv_qp_attr { qp_state: ffi::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        self.modify(attributes, mask::IBV_QP_STATE, "to error")
    }

    fn modify(&self, mut attributes: ffi::ibv_qp_attr, set: mask, to: &'static str) -> Result<(), VerbsError> {
        // SAFETY: the queue pair lives; the call reads one ibv_qp_attr, which is ours.
        let rc = unsafe { ffi::ibv_modify_qp(self.raw(), &raw mut attributes, set.0 as i32) };
        VerbsError::check(rc, "ibv_modify_qp", || format!("{self} {to}"))
    }

    /// Its state, asked of the device.
    pub fn state(&self) -> Result<QueuePairState, VerbsError> {
        let (mut attributes, mut init) = Default::default();
        let asked = mask::IBV_QP_STATE.0 as i32;
        // SAFETY: the queue pair lives; the call writes the two records, which are ours.
        let rc = unsafe { ffi::ibv_query_qp(self.raw(), &raw mut attributes, asked, &raw mut init) };
        VerbsError::check(rc, "ibv_query_qp", || self.to_string())?;
        Ok(state(attributes.qp_state))
    }

    /// Posts `count` receives, all with this `wr_id`. Each takes one immediate of the peer; the
    /// peer's bytes go where its write says.
    ///
    /// # Errors
    /// How many were posted before the queue was full or the device refused.
    pub fn post_receives(&self, wr_id: u64, count: usize) -> Result<(), PostError> {
        let mut posted = 0;
        while posted < count {
            let batch = RECEIVE_BATCH.min(count - posted);
            self.post_receive_batch(wr_id, batch).map_err(|error| error.after(posted))?;
            posted += batch;
        }
        Ok(())
    }

    fn post_receive_batch(&self, wr_id: u64, count: usize) -> Result<(), PostError> {
        let mut chain = [ffi::ibv_recv_wr { wr_id, ..Default::default() }; RECEIVE_BATCH];
        let chain = &mut chain[..count];
        let first = chain.as_mut_ptr();
        for (index, request) in chain.iter_mut().enumerate().take(count - 1) {
            // SAFETY: the one after `index` is inside the array.
            request.next = unsafe { first.add(index + 1) };
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: queue pair and chain live through the call, which copies the chain; no request
        // has a span, so no memory is given away.
        let rc = unsafe { (*(*self.raw()).context).ops.post_recv.map(|f| f(self.raw(), first, &raw mut bad)) };
        PostError::check(rc, || index_in(first, bad, count), "ibv_post_recv")
    }

    /// Posts all `requests` with one call. They are carried out in order; `requests` stay as they
    /// are, so that they can be posted again or cleared.
    ///
    /// # Errors
    /// How many were posted before the queue was full or the device refused; those will complete.
    ///
    /// # Safety
    /// Until a request's completion, or that of a later signalled one of this queue pair, is
    /// polled, or the queue pair is dropped: nothing writes the local spans of a write, nothing
    /// reads or writes the local spans of a read, and their registrations are kept.
    pub unsafe fn post(&self, requests: &mut WorkRequests) -> Result<(), PostError> {
        let Some((first, count)) = requests.link() else { return Ok(()) };
        let mut bad = std::ptr::null_mut();
        // SAFETY: queue pair, requests and their span lists live through the call, which copies
        // them; the memory is the caller's promise.
        let rc = unsafe { (*(*self.raw()).context).ops.post_send.map(|f| f(self.raw(), first, &raw mut bad)) };
        PostError::check(rc, || index_in(first, bad, count), "ibv_post_send")
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_qp, and destroyed before the domain and the queues it keeps.
        let rc = unsafe { ffi::ibv_destroy_qp(self.raw()) };
        debug_assert_eq!(rc, 0, "ibv_destroy_qp {}", self.domain.context().name());
    }
}

impl fmt::Display for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue pair {} of {}", self.qp_num(), self.domain.context().name())
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({}, {:?})", self, self.config)
    }
}

/// How many elements lie before `bad`; where the driver did not say which was bad, none counts as
/// posted.
fn index_in<T>(first: *const T, bad: *const T, count: usize) -> usize {
    let offset = (bad as usize).wrapping_sub(first as usize) / size_of::<T>();
    if offset < count { offset } else { 0 }
}

fn address(path: Path, remote: &Endpoint) -> ffi::ibv_ah_attr {
    ffi::ibv_ah_attr {
        grh: ffi::ibv_global_route {
            dgid: ffi::ibv_gid { raw: remote.gid.0 },
            flow_label: 0,
            sgid_index: path.gid_index,
            hop_limit: HOP_LIMIT,
            traffic_class: path.traffic_class,
        },
        dlid: remote.lid,
        sl: path.service_level,
        is_global: 1,
        port_num: path.port,
        ..Default::default()
    }
}

fn state(code: ffi::ibv_qp_state::Type) -> QueuePairState {
    match code {
        ffi::ibv_qp_state::IBV_QPS_RESET => QueuePairState::Reset,
        ffi::ibv_qp_state::IBV_QPS_INIT => QueuePairState::Init,
        ffi::ibv_qp_state::IBV_QPS_RTR => QueuePairState::ReadyToReceive,
        ffi::ibv_qp_state::IBV_QPS_RTS => QueuePairState::ReadyToSend,
        ffi::ibv_qp_state::IBV_QPS_ERR => QueuePairState::Error,
        other => QueuePairState::Other(other),
    }
}
