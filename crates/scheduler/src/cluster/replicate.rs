//! Replication of hot prefixes to more prefill nodes, before prompts ask for them there.
//!
//! A fetch on demand replicates a prefix too, but only after placement has sent a prompt to a node
//! that lacks it. That prompt waits for the bytes. What many prompts begin with is better there
//! before (Mooncake, arXiv 2407.00079, section 6.2, migrates hot blocks for the same reason).
//!
//! **How many.** A prefix that is asked for `r` times a second, and takes `c` seconds to compute,
//! saves `r c` nodes' worth of compute: that is its *demand*. One holder more is worth its room for
//! each [`HOLDER_SHARE`] of a node, up to [`ClusterConfig::replicas`](super::ClusterConfig). If
//! less than that is at stake, the prompts that come while the holder is busy cost little at any
//! node. The next replication is of the prefix with the most demand per holder, so that they are
//! shared out by D'Hondt's method.
//!
//! **Where.** The prefill node with the least work before it, if that is less than [`BUSY`], which
//! has room that is free or cold ([`COLD_AFTER`]). Only what each new holder will be asked for
//! within that same time is replicated: so what comes is never colder than what goes.
//!
//! **How often.** One replication at a time to a node, and [`MAX_REPLICATIONS`] in the cluster.
//! None of the same prefix to the same node follows within a pause, whether the replication failed
//! or its blocks were evicted so soon. The pause grows with each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{BlockHash, FetchReport, FetchSource, NodeId, NodeRole, RequestKey};

use super::candidates::Matches;
use super::{Cluster, ClusterNode};
use crate::backoff::Backoff;
use crate::config::COLD_AFTER;
use crate::ledger::NodeStart;
use crate::placement::PrefixFetch;

/// Nodes' worth of compute that a prefix saves for each of its holders.
const HOLDER_SHARE: f64 = 0.25;
/// Seconds of work before a node that takes no replications.
const BUSY: f64 = 0.5;
/// Replications under way.
const MAX_REPLICATIONS: usize = 4;
/// A node that has not answered by then will not.
const REPLICATION_TIMEOUT: Duration = Duration::from_secs(60);
/// Until the same prefix is replicated to the same node again.
const FIRST_PAUSE: Duration = Duration::from_secs(15);
const LONGEST_PAUSE: Duration = Duration::from_secs(900);
/// Pairs of node and prefix that are remembered.
const MOST_PAUSES: usize = 1024;

/// A prefix that prompts begin with.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixDemand {
    /// Its blocks, from the first.
    pub hashes: Arc<[BlockHash]>,
    /// Prompts a second that begin with it.
    pub per_second: f64,
}

/// A replication to be ordered of `to`.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicationOrder {
    /// Names it.
    pub key: RequestKey,
    /// Where it goes.
    pub to: NodeId,
    /// Where it comes from.
    pub fetch: PrefixFetch,
    /// The prefix.
    pub hashes: Arc<[BlockHash]>,
}

/// What is to be done about replications now.
#[derive(Debug, Default, PartialEq)]
pub struct Replication {
    /// Replications to order, and from whom each comes.
    pub orders: Vec<(ReplicationOrder, FetchSource)>,
    /// Replications of which nothing was heard, and the nodes that are to give them up.
    pub overdue: Vec<(RequestKey, NodeId)>,
}

#[derive(Debug)]
struct UnderWay {
    to: NodeId,
    from: NodeId,
    /// The same, while it has not left since: it is charged with the bytes.
    charged: Option<NodeStart>,
    bytes: u64,
    prefix: BlockHash,
    ordered: Instant,
}

/// What was ordered.
#[derive(Debug)]
pub(super) struct Replications {
    under_way: BTreeMap<RequestKey, UnderWay>,
    pauses: Backoff<(NodeId, BlockHash)>,
}

impl Default for Replications {
    fn default() -> Self {
        Self { under_way: BTreeMap::new(), pauses: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE, MOST_PAUSES) }
    }
}

/// Holders that a prefix of this demand is worth, one at least and `most` at most.
fn wanted_holders(demand: f64, most: usize) -> usize {
    // A number too large for the type becomes its largest.
    ((demand / HOLDER_SHARE).ceil() as usize).clamp(1, most.max(1))
}

/// A prefix as the cluster has it.
struct CachedPrefix<'a> {
    chain: &'a PrefixDemand,
    matches: Matches,
    demand: f64,
    /// Prefill nodes that hold it, or will.
    holders: usize,
}

impl Cluster {
    /// Orders the replications of these prefixes that are due, and gives up those of which nothing
    /// was heard.
    pub fn replicate(
        &mut self,
        now: Instant,
        hot: &[PrefixDemand],
        name: &mut impl FnMut() -> RequestKey,
    ) -> Replication {
        let overdue = self.overdue_replications(now);
        let orders = self.order_replications(now, hot, name);
        let orders = orders.into_iter().filter_map(|order| {
            let source = self.fetch_source(&order.fetch)?;
            Some((order, source))
        });
        Replication { orders: orders.collect(), overdue }
    }

    /// What is to be replicated now, of these prefixes. Everything that is told is charged as under
    /// way until [`Self::on_replication_done`]; `name` names it.
    fn order_replications(
        &mut self,
        now: Instant,
        hot: &[PrefixDemand],
        name: &mut impl FnMut() -> RequestKey,
    ) -> Vec<ReplicationOrder> {
        if self.config.replicas < 2 || !self.config.fetches {
            return Vec::new();
        }
        let mut prefixes: Vec<_> = hot.iter().filter_map(|chain| self.cached_prefix(chain)).collect();
        let mut orders = Vec::new();
        while self.replications.under_way.len() < MAX_REPLICATIONS {
            prefixes
                .sort_by(|a, b| (b.demand / b.holders.max(1) as f64).total_cmp(&(a.demand / a.holders.max(1) as f64)));
            let order = prefixes.iter().enumerate().find_map(|(index, prefix)| {
                let (to, from) = self.replication_of(now, prefix)?;
                let held = prefix.matches.of(to);
                let layout = &to.info().layout;
                let blocks = prefix.chain.hashes.len() as u64;
                let bytes = (blocks - u64::from(held)) * layout.block_bytes_all_layers() as u64;
                let tokens = blocks as u32 * layout.block_tokens;
                let fetch = PrefixFetch { from: from.info().node.clone(), tokens, bytes };
                let hashes = Arc::clone(&prefix.chain.hashes);
                Some((index, ReplicationOrder { key: name(), to: to.info().node.clone(), fetch, hashes }))
            });
            let Some((index, order)) = order else { break };
            self.begin_replication(now, &order);
            prefixes[index].holders += 1;
            orders.push(order);
        }
        orders
    }

    fn cached_prefix<'a>(&self, chain: &'a PrefixDemand) -> Option<CachedPrefix<'a>> {
        let prefix = *chain.hashes.last()?;
        let blocks = chain.hashes.len() as u32;
        let matches = self.matches_of(&chain.hashes);
        let ready = || self.nodes.of_role(NodeRole::Prefill).filter(|node| node.is_ready());
        let holders = ready().filter(|node| matches.of(node) >= blocks).count();
        let coming = self.replications.under_way.values().filter(|replication| replication.prefix == prefix).count();
        // What it saves is told by any node: a cluster's nodes cost about the same.
        let node = ready().next()?;
        let tokens = blocks * node.info().layout.block_tokens;
        let seconds = node.speed.seconds(self.costs[node.class].1.prefill.prompt(tokens, 0));
        Some(CachedPrefix { chain, matches, demand: chain.per_second * seconds, holders: holders + coming })
    }

    /// The node that a prefix is replicated to next, and the node that it is fetched from, if there
    /// are such.
    fn replication_of(&self, now: Instant, prefix: &CachedPrefix<'_>) -> Option<(&ClusterNode, &ClusterNode)> {
        let wanted = wanted_holders(prefix.demand, self.config.replicas);
        let per_replication = prefix.chain.per_second / (prefix.holders + 1) as f64;
        if prefix.holders >= wanted || per_replication * COLD_AFTER.as_secs_f64() < 1.0 {
            return None;
        }
        let mut targets: Vec<_> =
            self.nodes.of_role(NodeRole::Prefill).filter(|node| self.may_replicate_to(now, node, prefix)).collect();
        let work = |node: &ClusterNode| self.work(now, node);
        targets.sort_by(|a, b| work(a).total_cmp(&work(b)).then_with(|| room(b).cmp(&room(a))));
        targets.into_iter().find_map(|to| Some((to, self.source_of(now, prefix, to)?)))
    }

    fn may_replicate_to(&self, now: Instant, node: &ClusterNode, prefix: &CachedPrefix<'_>) -> bool {
        let info = node.info();
        let chain = &prefix.chain.hashes;
        let held = prefix.matches.of(node) as usize;
        let is_free = || self.replications.under_way.values().all(|replication| replication.to != info.node);
        let is_due =
            || chain.last().is_some_and(|last| !self.replications.pauses.is_paused(now, &(info.node.clone(), *last)));
        let is_idle = node.load().waiting == 0 && self.work(now, node) < BUSY;
        let lacks = held < chain.len() && room(node) >= chain.len() - held;
        info.replicates_prefixes && node.is_ready() && lacks && is_idle && is_free() && is_due()
    }

    /// Seconds of work before a node: what it was charged here, or, if others give it work, too,
    /// what it says.
    fn work(&self, now: Instant, node: &ClusterNode) -> f64 {
        let charged = node.charges.backlog.total(now);
        let reported = match u32::try_from(node.load().queued_tokens).unwrap_or(u32::MAX) {
            0 => 0.0,
            tokens => node.speed.seconds(self.costs[node.class].1.prefill.prompt(tokens, 0)),
        };
        charged.max(reported)
    }

    /// A node that has all of it for this reader.
    fn source_of(&self, now: Instant, prefix: &CachedPrefix<'_>, to: &ClusterNode) -> Option<&ClusterNode> {
        let may = |node: &ClusterNode| !self.is_paused(now, &node.info().node, &to.info().node);
        let (from, blocks) = self.longest_holder(&prefix.matches, to.kv_class, may)?;
        (blocks as usize >= prefix.chain.hashes.len()).then_some(from)
    }

    fn begin_replication(&mut self, now: Instant, order: &ReplicationOrder) {
        let Some(prefix) = order.hashes.last().copied() else { return };
        let from = order.fetch.from.clone();
        let bytes = order.fetch.bytes;
        self.transfers.begin(&from, bytes);
        let charged = self.nodes.get(&from).map(|node| (from.clone(), node.info().generation));
        // Whatever becomes of it: what is evicted again so soon is not fetched again at once.
        self.replications.pauses.failed(now, (order.to.clone(), prefix));
        let replication = UnderWay { to: order.to.clone(), from, charged, bytes, prefix, ordered: now };
        self.replications.under_way.insert(order.key, replication);
    }

    /// What became of a replication. `false` if it is none of those under way.
    pub fn on_replication_done(&mut self, now: Instant, key: RequestKey, report: &FetchReport) -> bool {
        let Some(replication) = self.end_replication(key) else { return false };
        // Bulk transfers yield to others, so their time says nothing of the link.
        let timeless = FetchReport { bytes: 0, ..report.clone() };
        self.on_fetched(now, &replication.from, &replication.to, &timeless);
        true
    }

    /// Replications of which nothing has been heard for too long, and their targets: they are
    /// forgotten here, and to be aborted there.
    fn overdue_replications(&mut self, now: Instant) -> Vec<(RequestKey, NodeId)> {
        let is_late =
            |replication: &UnderWay| now.saturating_duration_since(replication.ordered) >= REPLICATION_TIMEOUT;
        let late: Vec<_> = self
            .replications
            .under_way
            .iter()
            .filter(|(_, replication)| is_late(replication))
            .map(|(key, _)| *key)
            .collect();
        late.into_iter().filter_map(|key| Some((key, self.end_replication(key)?.to))).collect()
    }

    /// A start of a node is gone: what came to it will not, and what it sends is charged to no
    /// node.
    pub(super) fn end_replications_of(&mut self, gone: &NodeStart) {
        self.replications.pauses.retain(|(node, _)| *node != gone.0);
        for replication in self.replications.under_way.values_mut() {
            replication.charged.take_if(|charged| charged == gone);
        }
        let to_it = self.replications.under_way.iter().filter(|(_, replication)| replication.to == gone.0);
        for key in to_it.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.end_replication(key);
        }
    }

    fn end_replication(&mut self, key: RequestKey) -> Option<UnderWay> {
        let replication = self.replications.under_way.remove(&key)?;
        if let Some((from, _)) = &replication.charged {
            self.transfers.end(from, replication.bytes);
        }
        Some(replication)
    }
}

/// Blocks of a node that are unused, or have been for long.
fn room(node: &ClusterNode) -> usize {
    let load = node.load();
    let taken = load.blocks_used.saturating_add(load.blocks_cached).saturating_add(load.blocks_reserved);
    load.blocks_total.saturating_sub(taken).saturating_add(load.blocks_cold) as usize
}

#[cfg(test)]
#[path = "replicate_tests.rs"]
mod tests;
