//! Takes in what peers send, bodies over HTTP and messages over gRPC, within a budget of memory.
//!
//! **Invariant**: what is made of a body or a message is counted and reserved before it is made.

mod answers;
mod body;
mod budget;
mod message;
mod wire;

pub use answers::CountedChannel;
pub use body::{BodyError, BodyLimits, read, reserve};
pub use budget::{Budget, Exhausted, Reservation};
pub use message::{Intake, MessageBudget, NO_ROOM_RETRY, take_in};
