//! Leases in the shell of a node: what the core decided, told to the transfer engine and to the
//! reader.

use std::collections::HashMap;
use std::time::Duration;

use baton_proto::v1;
use baton_scheduler::LeaseEffect;
use baton_transfer_engine::GrantSpec;
use baton_types::{ErrorKind, GrantId, LeaseReply, Refused, RequestKey};
use tokio::sync::oneshot;

use crate::metrics::LeaseMetrics;
use crate::node::NodeParts;

/// The answer to a lease request, once the transfer engine has the lease too.
pub type LeaseAnswer = Result<v1::LeaseReply, Refused>;

/// A lease in the transfer engine outlives the core's own time limit: the core decides, and this is
/// the net below it.
const LEASE_LIFETIME: Duration = Duration::from_secs(600);

/// Readers that wait for a lease.
#[derive(Default)]
pub struct LeaseDesk {
    answers: HashMap<RequestKey, oneshot::Sender<LeaseAnswer>>,
    metrics: LeaseMetrics,
}

impl LeaseDesk {
    /// A node asks; the core's effect answers. A second question for the same request drops the
    /// first one's sender: its caller hears that.
    pub fn ask(&mut self, key: RequestKey, answer: oneshot::Sender<LeaseAnswer>) {
        self.answers.insert(key, answer);
    }

    /// Carries out what the core decided. A lease that is returned could not be opened, or its
    /// reader has gone: the core has to be told.
    #[must_use = "a lease without a reader stays with the core"]
    pub fn carry_out<E>(&mut self, parts: &NodeParts<E>, effect: LeaseEffect) -> Option<GrantId> {
        #[cfg(any(test, feature = "testing"))]
        crate::testing::note(parts.info.role.as_str(), effect.name());
        match effect {
            LeaseEffect::Open { key, reader, reply } => {
                let spec = GrantSpec {
                    id: reply.lease,
                    segment: parts.segment,
                    ranges: parts.model.layout.ranges(&reply.blocks),
                    writer: Some(reader),
                    // The transfer engine keeps the machine's clock.
                    expires: baton_runtime::now() + LEASE_LIFETIME,
                };
                let opened = parts.transfer.lease(spec);
                let is_open = opened.is_ok();
                let answer = opened.map(|()| lease_reply(parts, &reply)).map_err(|error| Refused {
                    kind: ErrorKind::Internal,
                    message: format!("opening the lease: {error}"),
                });
                // If the reader has given up, or died, the lease will not be used.
                let is_heard = self.answer(key, answer);
                (!is_open || !is_heard).then_some(reply.lease)
            }
            LeaseEffect::Refuse { key, refused } => {
                self.answer(key, Err(refused));
                None
            }
            LeaseEffect::End { lease } => {
                // It takes effect with the call: a reader does not believe what it reads from here
                // on. The rest is the transfer engine's own tidying up.
                let ended = parts.transfer.revoke(lease);
                parts.tasks.spawn_request("lease end", ended);
                None
            }
        }
    }

    /// Whether the caller hears it.
    fn answer(&mut self, key: RequestKey, answer: LeaseAnswer) -> bool {
        self.metrics.on_answer(answer.is_ok());
        self.answers.remove(&key).is_some_and(|waiting| waiting.send(answer).is_ok())
    }
}

fn lease_reply<E>(parts: &NodeParts<E>, reply: &LeaseReply) -> v1::LeaseReply {
    v1::LeaseReply {
        lease: reply.lease.0,
        blocks: reply.blocks.iter().map(|block| block.0).collect(),
        segment: parts.descriptor.encode(),
        num_blocks: parts.model.layout.num_blocks,
    }
}
