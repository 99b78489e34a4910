//! What a request's core asks of the cluster, and tells its ledger.

use std::time::{Duration, Instant};

use baton_types::{DecodeTarget, FetchSource, NodeId, NodeRole, RequestKey, Tbt};

use super::{Cluster, MigrationChoice};
use crate::placement::{Placement, PrefixFetch};
use crate::request::{Assignment, LedgerEntry, MigrationAssignment};

/// How much earlier than it is heard of a time may have been measured, as its clock goes.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

impl Cluster {
    /// What the nodes of a placement are told of each other. `tbt` is the request's objective.
    pub fn assign(&self, placement: Placement, tbt: Option<Tbt>) -> Assignment {
        let is_decode = |node: &NodeId| self.nodes.get(node).is_some_and(|node| node.info().role == NodeRole::Decode);
        // A decode node that computes the prompt has no node to hand it off to.
        let decode = placement.decode.as_ref().filter(|_| !is_decode(&placement.prefill));
        let target = decode.and_then(|node| self.decode_target(node));
        let target = target.map(|target| DecodeTarget { tbt: tbt.map(|Tbt(tbt)| tbt), ..target });
        let source = placement.fetch.as_ref().and_then(|fetch| self.fetch_source(fetch));
        let starts = placement.nodes().iter().filter_map(|node| self.nodes.start_of(node)).collect();
        Assignment { placement, target, source, starts }
    }

    /// The same of a migration; `None` if the node has gone.
    pub fn assign_migration(&self, chosen: &MigrationChoice) -> Option<MigrationAssignment> {
        Some(MigrationAssignment { to: self.nodes.start_of(&chosen.to)?, source: self.fetch_source(&chosen.fetch) })
    }

    /// A decode node that is here, as a prefill node is told of it, to be asked for room whatever
    /// its steps take.
    pub fn decode_target(&self, node: &NodeId) -> Option<DecodeTarget> {
        self.nodes.decode_target(node)
    }

    /// The holder of a prefix, as its reader is told of it.
    pub fn fetch_source(&self, fetch: &PrefixFetch) -> Option<FetchSource> {
        self.nodes.fetch_source(fetch)
    }

    /// Something happened to an attempt.
    pub fn update_ledger(&mut self, now: Instant, key: RequestKey, entry: &LedgerEntry) {
        match entry {
            LedgerEntry::Fetched { way, report } => {
                let is_its_way = |(holder, reader): &&(NodeId, NodeId)| {
                    self.fetches_between(key, holder, reader)
                        && self.may_have_moved(now, key, reader, report.bytes, report.elapsed)
                };
                let way = way.as_ref().filter(is_its_way);
                self.on_fetch_done(key);
                if let Some((holder, reader)) = way {
                    self.on_fetched(now, holder, reader, report);
                }
            }
            LedgerEntry::Pushed { to, transfer } => {
                let decodes = self.ledger.decoding(key).is_some_and(|decode| decode.at.node == *to);
                if !decodes || !self.may_have_moved(now, key, to, transfer.bytes, transfer.elapsed) {
                    return;
                }
                let layers = self.nodes.get(to).map_or(1, |node| node.info().layout.num_layers);
                let exposed = transfer.exposed.as_secs_f64();
                let elapsed = transfer.elapsed.as_secs_f64();
                self.predictor.transfers.observe_push(to, transfer.bytes, layers, exposed, elapsed);
            }
            LedgerEntry::FirstToken => self.on_first_token(now, key),
            LedgerEntry::Decodes => self.on_decodes(now, key),
            LedgerEntry::Finished { output_tokens } => self.on_finished(now, key, *output_tokens),
            LedgerEntry::Ended => self.on_ended(now, key),
        }
    }

    /// Whether an attempt's prompt was placed with a fetch from the one node to the other.
    fn fetches_between(&self, key: RequestKey, holder: &NodeId, reader: &NodeId) -> bool {
        self.ledger.charge(key).is_some_and(|charge| {
            charge.fetch.as_ref().is_some_and(|fetch| fetch.from.node == *holder)
                && charge.prefill.as_ref().is_some_and(|prefill| prefill.node == *reader)
        })
    }

    /// Whether an attempt can have moved so many bytes to a node in that time: no more than a
    /// sequence has there, and since it was placed.
    fn may_have_moved(&self, now: Instant, key: RequestKey, to: &NodeId, bytes: u64, elapsed: Duration) -> bool {
        let (Some(charge), Some(node)) = (self.ledger.charge(key), self.nodes.get(to)) else { return false };
        let layout = &node.info().layout;
        let blocks = layout.blocks_for(node.info().max_sequence_tokens() as usize);
        let most = blocks as u64 * layout.block_bytes_all_layers() as u64;
        bytes <= most && elapsed <= now.saturating_duration_since(charge.placed) + ON_ITS_WAY
    }

    /// Requests that wait in the admission queue.
    pub fn requests_queued(&self) -> usize {
        self.ledger.queued()
    }
}
