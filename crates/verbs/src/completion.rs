//! What became of work requests.

#![allow(unsafe_code)] // calls into libibverbs; see each SAFETY note

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_wc_status as status;

use crate::{Context, VerbsError};

/// Completions fetched by one call into the library.
const POLL_BATCH: usize = 32;
/// Events taken by one [`CompletionChannel::take_events`].
pub const MAX_EVENTS: usize = 64;

/// Why a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// Done.
    Success,
    /// The queue pair went to the error state before this one's turn.
    Flushed,
    /// The peer did not answer within all retries.
    RetryExceeded,
    /// The peer had no receive posted within all retries.
    ReceiverNotReady,
    /// The peer's device refused the remote key or range.
    RemoteAccess,
    /// The peer's device found the request malformed or not allowed on that queue pair.
    RemoteInvalidRequest,
    /// The peer's device could not carry it out.
    RemoteOperation,
    /// A local key or range is wrong, or the registration is gone.
    LocalProtection,
    /// The local device could not carry it out. Soft-RoCE says so of a dead link and of wrong local
    /// keys, too.
    LocalOperation,
    /// Any other, by its number in `enum ibv_wc_status`.
    Other(u32),
}

impl CompletionStatus {
    fn new(code: status::Type) -> Self {
        match code {
            status::IBV_WC_SUCCESS => Self::Success,
            status::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            status::IBV_WC_RETRY_EXC_ERR => Self::RetryExceeded,
            status::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            status::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            status::IBV_WC_REM_INV_REQ_ERR => Self::RemoteInvalidRequest,
            status::IBV_WC_REM_OP_ERR => Self::RemoteOperation,
            status::IBV_WC_LOC_PROT_ERR | status::IBV_WC_LOC_ACCESS_ERR => Self::LocalProtection,
            status::IBV_WC_LOC_QP_OP_ERR => Self::LocalOperation,
            other => Self::Other(other),
        }
    }

    /// Whether the request was carried out.
    pub fn is_success(self) -> bool {
        self == Self::Success
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::Flushed => "flushed: the queue pair is in the error state",
            Self::RetryExceeded => "the peer does not answer",
            Self::ReceiverNotReady => "the peer has no receive posted",
            Self::RemoteAccess => "the peer's device refused the key or range",
            Self::RemoteInvalidRequest => "the peer's device found the request invalid",
            Self::RemoteOperation => "the peer's device could not carry it out",
            Self::LocalProtection => "the local key or range is wrong",
            Self::LocalOperation => "the local device could not carry it out",
            Self::Other(code) => return write!(f, "work completion status {code}"),
        })
    }
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// A write, with or without an immediate.
    Write,
    /// A read.
    Read,
    /// A peer's write with immediate took a receive.
    ReceiveImmediate,
    /// Any other, by its number in `enum ibv_wc_opcode`.
    Other(u32),
}

impl Opcode {
    fn new(code: ffi::ibv_wc_opcode::Type) -> Self {
        match code {
            ffi::ibv_wc_opcode::IBV_WC_RDMA_WRITE => Self::Write,
            ffi::ibv_wc_opcode::IBV_WC_RDMA_READ => Self::Read,
            ffi::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => Self::ReceiveImmediate,
            other => Self::Other(other),
        }
    }
}

/// The end of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number its poster gave it.
    pub wr_id: u64,
    /// How it ended.
    pub status: CompletionStatus,
    /// The device's own code for an error; 0 on success.
    pub vendor_error: u32,
    /// What was done; none unless it succeeded, because a failed completion does not say.
    pub opcode: Option<Opcode>,
    /// Bytes read, or written by the peer with an immediate; 0 for a local write.
    pub bytes: u32,
    /// The peer's immediate.
    pub immediate: Option<u32>,
    /// The queue pair.
    pub qp_num: u32,
}

impl Completion {
    /// For the array that [`CompletionQueue::poll`] fills.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        status: CompletionStatus::Success,
        vendor_error: 0,
        opcode: None,
        bytes: 0,
        immediate: None,
        qp_num: 0,
    };

    fn new(wc: &ffi::ibv_wc) -> Self {
        let (code, vendor_error) = wc.error().unwrap_or((status::IBV_WC_SUCCESS, 0));
        let opcode = wc.is_valid().then(|| Opcode::new(wc.opcode()));
        // The length is defined for reads and receives only.
        let sized = matches!(opcode, Some(Opcode::Read | Opcode::ReceiveImmediate));
        Self {
            wr_id: wc.wr_id(),
            status: CompletionStatus::new(code),
            vendor_error,
            opcode,
            bytes: if sized { wc.len() as u32 } else { 0 },
            // Soft-RoCE marks the writer's completion as well; only the receiver's has a meaning.
            immediate: wc.imm_data().filter(|_| opcode == Some(Opcode::ReceiveImmediate)).map(u32::from_be),
            qp_num: wc.qp_num,
        }
    }
}

impl fmt::Display for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "work request {:#x} of queue pair {}: {}", self.wr_id, self.qp_num, self.status)?;
        if self.vendor_error != 0 { write!(f, " (vendor error {:#x})", self.vendor_error) } else { Ok(()) }
    }
}

/// Where any number of completion queues say that something has come in: a descriptor that becomes
/// readable after [`CompletionQueue::arm`].
pub struct CompletionChannel {
    raw: NonNull<ffi::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: libibverbs keeps nothing in it but the descriptor; reads of that from several threads
// each get whole events.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// A channel for queues of this device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the device is open.
        let raw = unsafe { ffi::ibv_create_comp_channel(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_comp_channel", context.name()))?;
        let channel = Self { raw, context: context.clone() };
        set_nonblocking(channel.as_raw_fd()).map_err(|source| VerbsError::Refused {
            operation: "O_NONBLOCK of the completion channel",
            object: context.name().into(),
            source,
        })?;
        Ok(Arc::new(channel))
    }

    /// Takes at most [`MAX_EVENTS`] events, and calls `on` with the token of each one's queue.
    /// Returns how many there were; fewer than that: there is none left.
    pub fn take_events(&self, mut on: impl FnMut(u64)) -> Result<usize, VerbsError> {
        for taken in 0..MAX_EVENTS {
            let mut queue = std::ptr::null_mut();
            let mut token = std::ptr::null_mut();
            // SAFETY: the channel lives, and the call writes two pointers, which are ours.
            if unsafe { ffi::ibv_get_cq_event(self.raw.as_ptr(), &raw mut queue, &raw mut token) } != 0 {
                let source = io::Error::last_os_error();
                return match source.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(taken),
                    _ => Err(VerbsError::Refused {
                        operation: "ibv_get_cq_event",
                        object: self.context.name().into(),
                        source,
                    }),
                };
            }
            // SAFETY: the event is of this queue, which cannot be destroyed before it is
            // acknowledged, and that is done once.
            unsafe { ffi::ibv_ack_cq_events(queue, 1) };
            on(token.expose_provenance() as u64);
        }
        Ok(MAX_EVENTS)
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the channel lives, and its descriptor does not change.
        unsafe { (*self.raw.as_ptr()).fd }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_comp_channel; the queues that use it hold an Arc of this and
        // are gone.
        let rc = unsafe { ffi::ibv_destroy_comp_channel(self.raw.as_ptr()) };
        debug_assert_eq!(rc, 0, "ibv_destroy_comp_channel {}", self.context.name());
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionChannel({})", self.context.name())
    }
}

/// Completions of any number of queue pairs. After [`arm`](Self::arm), the next one makes an event
/// on the queue's channel.
///
/// To wait without missing any: poll until empty, arm, poll until empty once more, wait for the
/// event.
pub struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    channel: Arc<CompletionChannel>,
    depth: u32,
}

// SAFETY: libibverbs locks its completion queues; every function may be called from any thread.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue for `depth` completions. It must have room for all that can be under way in the
    /// queue pairs that use it: an overrun is fatal to them. `token` is what its events carry.
    pub fn new(channel: &Arc<CompletionChannel>, depth: u32, token: u64) -> Result<Arc<Self>, VerbsError> {
        let context = &channel.context;
        let token = std::ptr::without_provenance_mut(token as usize);
        // SAFETY: device and channel live; the queue's context is a number for us alone, and never
        // followed.
        let raw = unsafe { ffi::ibv_create_cq(context.raw(), depth as i32, token, channel.raw.as_ptr(), 0) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_cq", context.name()))?;
        Ok(Arc::new(Self { raw, channel: channel.clone(), depth }))
    }

    fn context(&self) -> &Context {
        &self.channel.context
    }

    pub(crate) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// Completions there is room for.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Makes the next completion, one time, an event on the channel.
    pub fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue lives; its context has the function, as every driver must.
        let rc = unsafe { (*(*self.raw()).context).ops.req_notify_cq.map(|f| f(self.raw(), 0)) };
        VerbsError::check(rc.unwrap_or(libc::ENOSYS), "ibv_req_notify_cq", || self.context().name().into())
    }

    /// Fills `into` from its beginning with what has come in, and returns how many.
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut filled = 0;
        while filled < into.len() {
            let wanted = POLL_BATCH.min(into.len() - filled);
            let found = self.poll_batch(&mut into[filled..filled + wanted])?;
            filled += found;
            if found < wanted {
                break;
            }
        }
        Ok(filled)
    }

    /// At most [`POLL_BATCH`].
    fn poll_batch(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut raw = [const { MaybeUninit::<ffi::ibv_wc>::uninit() }; POLL_BATCH];
        let wanted = into.len().min(POLL_BATCH) as i32;
        // SAFETY: the queue lives; the call writes at most `wanted` entries, which fit.
        let found =
            unsafe { (*(*self.raw()).context).ops.poll_cq.map(|f| f(self.raw(), wanted, raw.as_mut_ptr().cast())) };
        let found = usize::try_from(found.unwrap_or(-libc::ENOSYS));
        let found = found.map_err(|_| VerbsError::last("ibv_poll_cq", self.context().name()))?;
        for (completion, wc) in into.iter_mut().zip(&raw[..found]) {
            // SAFETY: the library has written the first `found` entries.
            *completion = Completion::new(unsafe { wc.assume_init_ref() });
        }
        Ok(found)
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_cq; the queue pairs that use it hold an Arc of this and are
        // gone. It waits for events that were taken and are not yet acknowledged, between which
        // there is nothing that waits.
        let rc = unsafe { ffi::ibv_destroy_cq(self.raw()) };
        debug_assert_eq!(rc, 0, "ibv_destroy_cq {}", self.context().name());
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({}, {} deep)", self.context().name(), self.depth)
    }
}

fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain system calls on a descriptor that the caller owns.
    let rc = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
