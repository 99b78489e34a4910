//! Lists of work requests, posted with one call.

#![allow(unsafe_code)] // unions of the C interface; see each SAFETY note

use std::{fmt, io};

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_wr_opcode as opcode;

use crate::{MemoryRegistration, VerbsError};

/// Bytes of a local registration.
#[derive(Debug, Clone, Copy)]
pub struct LocalSpan<'a> {
    /// The registration.
    pub registration: &'a MemoryRegistration,
    /// Offset of the first byte in it.
    pub offset: usize,
    /// Bytes.
    pub len: u32,
}

/// Where bytes of a peer begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSpan {
    /// Address of the first byte, as the peer gave it.
    pub address: u64,
    /// The peer's remote key.
    pub key: u32,
}

/// Some work requests, or receives, could not be posted.
#[derive(Debug)]
pub struct PostError {
    /// Those before it were posted, and will complete.
    pub posted: usize,
    /// Whether the queue was full: completions make room.
    pub full: bool,
    source: io::Error,
    operation: &'static str,
}

impl PostError {
    pub(crate) fn check(rc: Option<i32>, posted: impl Fn() -> usize, operation: &'static str) -> Result<(), Self> {
        let source = match rc {
            Some(0) => return Ok(()),
            Some(-1) => io::Error::last_os_error(),
            Some(code) => io::Error::from_raw_os_error(code.abs()),
            None => io::Error::from_raw_os_error(libc::ENOSYS),
        };
        let full = source.raw_os_error() == Some(libc::ENOMEM);
        Err(Self { posted: posted(), full, source, operation })
    }

    /// With `posted` more that went before.
    pub(crate) fn after(mut self, posted: usize) -> Self {
        self.posted += posted;
        self
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.full { "the queue is full" } else { "refused" };
        write!(f, "{}: {why} after {} work requests: {}", self.operation, self.posted, self.source)
    }
}

impl std::error::Error for PostError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A bounded list of work requests, made once and used again and again: it does not allocate after
/// it is made.
pub struct WorkRequests {
    requests: Vec<ffi::ibv_send_wr>,
    spans: Vec<ffi::ibv_sge>,
    capacity: usize,
    max_sge: usize,
}

// SAFETY: the pointers in the requests are written by `link` just before each use, and lead into
// this value's own lists.
unsafe impl Send for WorkRequests {}

impl WorkRequests {
    /// Room for `capacity` work requests of at most `max_sge` local spans each.
    pub fn new(capacity: usize, max_sge: usize) -> Self {
        let requests = Vec::with_capacity(capacity);
        let spans = Vec::with_capacity(capacity * max_sge);
        Self { requests, spans, capacity, max_sge }
    }

    /// Work requests in the list.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether there is no room for more.
    pub fn is_full(&self) -> bool {
        self.requests.len() == self.capacity
    }

    /// Removes all.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.spans.clear();
    }

    /// Adds a write of the local spans, one after the other, to `remote`. With an immediate, the
    /// peer's queue gets a completion when all bytes of this and of all earlier writes of the queue
    /// pair are visible; that takes one of its receives. `signalled`: its completion is reported.
    pub fn write(
        &mut self,
        wr_id: u64,
        local: &[LocalSpan<'_>],
        remote: RemoteSpan,
        immediate: Option<u32>,
        signalled: bool,
    ) -> Result<(), VerbsError> {
        let operation = match immediate {
            Some(_) => opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            None => opcode::IBV_WR_RDMA_WRITE,
        };
        let request = self.one_sided(operation, wr_id, local, remote, signalled)?;
        request.__bindgen_anon_1.imm_data = immediate.unwrap_or(0).to_be();
        Ok(())
    }

    /// Adds a read from `remote` into the local spans, one after the other.
    pub fn read(
        &mut self,
        wr_id: u64,
        local: &[LocalSpan<'_>],
        remote: RemoteSpan,
        signalled: bool,
    ) -> Result<(), VerbsError> {
        self.one_sided(opcode::IBV_WR_RDMA_READ, wr_id, local, remote, signalled).map(|_| ())
    }

    fn one_sided(
        &mut self,
        operation: opcode::Type,
        wr_id: u64,
        local: &[LocalSpan<'_>],
        remote: RemoteSpan,
        signalled: bool,
    ) -> Result<&mut ffi::ibv_send_wr, VerbsError> {
        self.check_room(local)?;
        self.spans.extend(local.iter().map(|span| ffi::ibv_sge {
            addr: span.registration.address() + span.offset as u64,
            length: span.len,
            lkey: span.registration.local_key(),
        }));
        let request = self.push(operation, wr_id, signalled);
        request.num_sge = local.len() as i32;
        request.wr.rdma =
            ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.address, rkey: remote.key };
        Ok(request)
    }

    fn check_room(&self, local: &[LocalSpan<'_>]) -> Result<(), VerbsError> {
        if self.is_full() {
            return Err(VerbsError::TooMany { what: "work requests of a list", limit: self.capacity });
        }
        if local.len() > self.max_sge {
            return Err(VerbsError::TooMany { what: "local spans of a work request", limit: self.max_sge });
        }
        local.iter().try_for_each(|span| span.registration.check(span.offset, span.len as usize))
    }

    fn push(&mut self, operation: opcode::Type, wr_id: u64, signalled: bool) -> &mut ffi::ibv_send_wr {
        let signalled = if signalled { ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        self.requests.push(ffi::ibv_send_wr { wr_id, opcode: operation, send_flags: signalled, ..Default::default() });
        let last = self.requests.len() - 1;
        &mut self.requests[last]
    }

    /// Chains the requests and points them at their spans; the first one, and how many.
    pub(crate) fn link(&mut self) -> Option<(*mut ffi::ibv_send_wr, usize)> {
        let count = self.requests.len();
        let first = self.requests.as_mut_ptr();
        let mut span = self.spans.as_mut_ptr();
        for (index, request) in self.requests.iter_mut().enumerate() {
            request.sg_list = span;
            span = span.wrapping_add(request.num_sge as usize);
            request.next = if index + 1 < count { first.wrapping_add(index + 1) } else { std::ptr::null_mut() };
        }
        (count > 0).then_some((first, count))
    }
}

impl fmt::Debug for WorkRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkRequests({} of {})", self.len(), self.capacity)
    }
}
