//! Has hot prefixes replicated to more prefill nodes: what `Cluster::replicate` decides, sent out,
//! and what became of it.

use baton_proto::v1;
use baton_runtime::{Phase, random_u64};
use baton_scheduler::{HotPrefixes, Replication};
use baton_types::{Attempt, ErrorKind, FetchReport, PrefixReplication, Refused, RequestId, RequestKey};

use crate::frontend::Frontend;

fn failed(kind: ErrorKind, message: &str) -> FetchReport {
    FetchReport { failure: Some(Refused { kind, message: message.to_owned() }), ..FetchReport::default() }
}

impl Frontend {
    /// Orders the replications that are due.
    pub fn replicate(&self) {
        if self.shutdown.phase() >= Phase::Draining || !self.desk.leads() {
            return;
        }
        let now = self.clock.now();
        let mut name = || {
            let request = RequestId(u128::from(random_u64()) << 64 | u128::from(random_u64()));
            RequestKey { request, attempt: Attempt(0) }
        };
        let hot = self.hot_prefixes().heaviest(now, HotPrefixes::REPLICATED);
        let Replication { orders, overdue } = self.cluster().replicate(now, &hot, &mut name);
        for (key, node) in overdue {
            self.metrics.on_replication_done(None);
            tracing::info!(%node, "nothing was heard of the replication of a prefix: giving it up");
            self.nodes.send(&node, v1::node_command::Command::Abort(key.into()));
        }
        for (order, source) in orders {
            self.metrics.on_replication_ordered();
            tracing::info!(to = %order.to, from = %source.node, tokens = source.tokens, bytes = order.fetch.bytes, "replicating a hot prefix");
            let copy = PrefixReplication { key: order.key, conductor: self.id, source, block_hashes: order.hashes };
            let order_of = v1::ReplicatePrefixCommand { term: self.desk.term(), ..(&copy).into() };
            if !self.nodes.send(&order.to, v1::node_command::Command::ReplicatePrefix(order_of)) {
                self.on_replicated(order.key, &failed(ErrorKind::Cancelled, "its session ended in this moment"));
            }
        }
    }

    /// A node has fetched what it was told to, or has not.
    pub fn on_replicated(&self, key: RequestKey, report: &FetchReport) {
        if !self.cluster().on_replication_done(self.clock.now(), key, report) {
            return;
        }
        self.metrics.on_replication_done(report.failure.is_none().then_some(report.bytes));
        match &report.failure {
            None => {
                tracing::info!(tokens = report.tokens, bytes = report.bytes, elapsed = ?report.elapsed, "a hot prefix is replicated")
            }
            Some(reason) => tracing::info!(%reason, "a hot prefix could not be replicated"),
        }
    }
}
