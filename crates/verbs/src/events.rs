//! What a device reports by itself.

#![allow(unsafe_code)] // calls into libibverbs; see each SAFETY note

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::{fmt, io};

use ibverbs_sys as ffi;

use crate::completion::set_nonblocking;
use crate::{Context, VerbsError};

/// Something happened to a device, a port or a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A port can send again.
    PortActive {
        /// Port number, from 1.
        port: u8,
    },
    /// A port lost its link.
    PortDown {
        /// Port number, from 1.
        port: u8,
    },
    /// A port's addresses changed: its GID table must be read anew.
    AddressChange {
        /// Port number, from 1.
        port: u8,
    },
    /// The device is lost; all that was made on it with it.
    DeviceFatal,
    /// A queue pair went to the error state by itself.
    QueuePairError {
        /// Its number.
        qp_num: u32,
    },
    /// A completion queue overran; its queue pairs are lost.
    CompletionQueueError,
    /// Any other, by its number in `enum ibv_event_type`.
    Other(u32),
}

/// Events of an open device, and a descriptor that is readable while there are any. Make one per
/// [`Context`]: each event is delivered once.
pub struct AsyncEvents {
    context: Arc<Context>,
}

impl AsyncEvents {
    /// The events of `context`.
    pub fn new(context: &Arc<Context>) -> Result<Self, VerbsError> {
        let events = Self { context: context.clone() };
        set_nonblocking(events.as_raw_fd()).map_err(|source| events.refused(source))?;
        Ok(events)
    }

    fn refused(&self, source: io::Error) -> VerbsError {
        VerbsError::Refused { operation: "ibv_get_async_event", object: self.context.name().into(), source }
    }

    /// The next event, or none for now.
    pub fn next_event(&mut self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the device is open; the call writes one event, or fails.
        if unsafe { ffi::ibv_get_async_event(self.context.raw(), raw.as_mut_ptr()) } != 0 {
            let error = io::Error::last_os_error();
            let none = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            return if none { Ok(None) } else { Err(self.refused(error)) };
        }
        // SAFETY: the call succeeded.
        let mut raw: ffi::ibv_async_event = unsafe { raw.assume_init() };
        let event = translate(&raw);
        // SAFETY: the event was taken just now, and is acknowledged once.
        unsafe { ffi::ibv_ack_async_event(&raw mut raw) };
        Ok(Some(event))
    }
}

impl AsRawFd for AsyncEvents {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the device is open, and its descriptor does not change.
        unsafe { (*self.context.raw()).async_fd }
    }
}

impl fmt::Debug for AsyncEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncEvents({})", self.context.name())
    }
}

fn translate(raw: &ffi::ibv_async_event) -> AsyncEvent {
    // SAFETY: read for events of ports only, where this is the variant that is set.
    let port = || unsafe { raw.element.port_num } as u8;
    match raw.event_type {
        ffi::IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive { port: port() },
        ffi::IBV_EVENT_PORT_ERR => AsyncEvent::PortDown { port: port() },
        ffi::IBV_EVENT_GID_CHANGE | ffi::IBV_EVENT_LID_CHANGE => AsyncEvent::AddressChange { port: port() },
        ffi::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        ffi::IBV_EVENT_QP_FATAL | ffi::IBV_EVENT_QP_REQ_ERR | ffi::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: the variant that is set for these; a queue pair cannot be destroyed before
            // its events are acknowledged.
            AsyncEvent::QueuePairError { qp_num: unsafe { (*raw.element.qp).qp_num } }
        }
        ffi::IBV_EVENT_CQ_ERR => AsyncEvent::CompletionQueueError,
        other => AsyncEvent::Other(other),
    }
}
