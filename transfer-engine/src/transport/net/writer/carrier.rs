//! What carries the payload of a lane: one implementation per transport.

use std::io;

use baton_types::GrantId;
use futures::future::BoxFuture;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::lane::LaneTask;
use super::part::{Carried, LaneEnd, Part, Sending};
use crate::transport::net::wire::incoming::Incoming;
use crate::transport::net::wire::{PartId, Reply};

/// What carries the payload of a lane. Its methods run beside each other in the lane's one task.
pub(crate) trait Carrier: Send + Sync + 'static {
    /// Sends what goes before the first part.
    fn begin(&self, _: &LaneTask) -> impl Future<Output = io::Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Sends what there is of a part, after `head`.
    ///
    /// # Errors
    /// `Unsupported`: another transport must carry the part, and the lane goes on. Any other error
    /// ends the lane.
    fn carry_part(
        &self,
        lane: &LaneTask,
        part: &Part,
        head: Vec<u8>,
    ) -> impl Future<Output = io::Result<Carried>> + Send;

    /// Takes a reply that not every lane gets. An error ends the lane.
    fn on_reply(&self, lane: &LaneTask, reply: Reply) -> Result<(), String> {
        Err(format!("{reply:?} has no place on a connection over {}", lane.kind()))
    }

    /// Receives the payload of a PAYLOAD. Nothing was asked for unless the carrier says so.
    fn land(
        &self,
        lane: &LaneTask,
        incoming: &mut Incoming,
        _: PartId,
        bytes: usize,
    ) -> impl Future<Output = io::Result<()>> + Send {
        lane.drop_payload(incoming, bytes)
    }

    /// Whether the owner may acknowledge a part now.
    fn may_acknowledge(&self, _: &Sending) -> bool {
        true
    }

    /// Takes completions until the lane ends.
    fn completions(&self, _: &LaneTask) -> impl Future<Output = LaneEnd> + Send {
        std::future::pending()
    }

    /// What the lane is to send after completions. Called once.
    fn follow_ups(&mut self) -> UnboundedReceiver<FollowUp> {
        // Without a sender, it never yields anything.
        mpsc::unbounded_channel().1
    }
}

/// What is to be sent after a completion.
#[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
pub(crate) enum FollowUp {
    /// A part has been read: was its lease alive?
    Check(PartId),
    /// Nothing is under way under a grant that the owner has ended.
    Revoked(GrantId),
}

/// A [`Carrier`] of any kind. One future is boxed for the whole lane, and none per part.
pub(crate) trait AnyCarrier: Send {
    /// Runs a lane with it.
    fn run(self: Box<Self>, lane: LaneTask) -> BoxFuture<'static, LaneEnd>;
}

impl<C: Carrier> AnyCarrier for C {
    fn run(self: Box<Self>, lane: LaneTask) -> BoxFuture<'static, LaneEnd> {
        Box::pin(lane.run(*self))
    }
}
