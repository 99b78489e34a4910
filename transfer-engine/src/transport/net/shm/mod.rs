//! Payload by the owner's own copy out of the writer's shared memory.
//!
//! The connection is a Unix socket between two processes of one host and user. The writer passes
//! its segments as sealed memfds and sends COPY frames where tcp sends payload. The owner maps the
//! segments read-only, checks the grant and copies. Only the owner ever writes its memory. So a
//! grant that has ended is fenced once the owner's own copies have stopped.
//!
//! **When the writer changes its mind**: the owner cannot be stopped from reading, so it is kept
//! from believing what it read. The writer has a page of slots that the owner maps, too. A part is
//! sent with a slot and a token, which stands in the slot as long as the part is wanted. The owner
//! looks again after its copies, before it accounts for the part. A batch that is over clears its
//! slots first and is over then: what is copied later is dropped.
//!
//! **Reads** go the other way round: the reader maps the owner's segment and copies. Afterwards it
//! asks (CHECK) whether its lease covered the spans and still lives. If not, what was copied is not
//! delivered.

mod address;
mod copy;
mod owner;
mod slots;
mod views;
mod writer;

pub(crate) use address::{Listener, ShmAddress, check_user, listen};
pub(crate) use slots::Armed;
pub(crate) use views::{ViewCache, Views};
pub(crate) use writer::ShmCarrier;

/// Bytes copied without looking at the grant and letting others run: about 30 microseconds.
const COPY_STEP: usize = 256 << 10;
