//! What operators see of a node's transfers.

use baton_proto::v1::node_event::Event;
use baton_transfer_engine::{PathReport, SegmentDescriptor, TransferEngine};
use baton_types::{TransferAddress, TransferPath, TransferReport};

/// Looks at a node's transfers.
pub struct TransferView {
    engine: TransferEngine,
    addresses: Vec<TransferAddress>,
}

impl TransferView {
    /// Of this engine, whose peers know `arena`.
    pub fn new(engine: TransferEngine, arena: &SegmentDescriptor) -> Self {
        let address = |way: &baton_transfer_engine::TransportAddress| TransferAddress {
            transport: way.kind.to_string(),
            address: way.address.clone(),
        };
        Self { engine, addresses: arena.transports.iter().map(address).collect() }
    }

    /// The transports that this node offers, with commas, the best first.
    pub fn transports(&self) -> String {
        kinds(&self.addresses)
    }

    /// What conductors are told of the transfers up to now.
    pub fn event(&self) -> Event {
        let report = TransferReport { addresses: self.addresses.clone(), paths: written(self.engine.paths()) };
        Event::Transfer((&report).into())
    }
}

fn kinds(addresses: &[TransferAddress]) -> String {
    let mut kinds: Vec<_> = addresses.iter().map(|address| address.transport.as_str()).collect();
    // RDMA has an address for each device.
    kinds.dedup();
    kinds.join(",")
}

/// The paths over which bytes have moved, one per peer: that of its latest start. Those with the
/// most bytes, as many as a report holds.
fn written(mut paths: Vec<PathReport>) -> Vec<TransferPath> {
    paths.retain(|path| path.bytes > 0);
    paths.sort_unstable_by(|a, b| (&a.node, b.generation, b.bytes).cmp(&(&b.node, a.generation, a.bytes)));
    paths.dedup_by(|later, earlier| later.node == earlier.node);
    paths.sort_by_key(|path| std::cmp::Reverse(path.bytes));
    paths.truncate(TransferReport::MAX_PATHS);
    paths.into_iter().filter_map(path).collect()
}

/// `None` if nothing has ever carried bytes there.
fn path(report: PathReport) -> Option<TransferPath> {
    Some(TransferPath {
        transport: report.transport?.to_string(),
        node: report.node,
        generation: report.generation,
        lanes: u32::try_from(report.lanes).unwrap_or(u32::MAX),
        bytes: report.bytes,
        batches: report.batches,
        retries: report.retries,
        fallbacks: report.fallbacks,
        in_flight_bytes: report.in_flight_bytes,
        bytes_per_second: report.bytes_per_second,
    })
}

#[cfg(test)]
mod tests {
    use baton_transfer_engine::TransportKind;
    use baton_types::{Generation, NodeId};

    use super::*;

    fn report(node: &str, generation: u64, bytes: u64) -> PathReport {
        PathReport {
            node: NodeId::new(node).unwrap(),
            generation: Generation(generation),
            transport: (bytes > 0).then_some(TransportKind::Shm),
            lanes: 1,
            bytes,
            batches: 1,
            retries: 0,
            fallbacks: 0,
            in_flight_bytes: 0,
            bytes_per_second: None,
        }
    }

    fn seen(paths: Vec<PathReport>) -> Vec<(String, u64)> {
        written(paths).into_iter().map(|path| (path.node.to_string(), path.bytes)).collect()
    }

    #[test]
    fn transport_of_several_devices_is_named_once() {
        let address = |transport: &str| TransferAddress { transport: transport.into(), address: "a".into() };
        assert_eq!(kinds(&["rdma", "rdma", "shm", "tcp"].map(address)), "rdma,shm,tcp");
        assert_eq!(kinds(&[]), "");
    }

    #[test]
    fn transfer_report_lists_each_peer_once_if_bytes_were_sent() {
        let paths = vec![report("b", 1, 900), report("a", 1, 5), report("b", 2, 7), report("c", 1, 0)];
        assert_eq!(seen(paths), [("b".to_owned(), 7), ("a".to_owned(), 5)]);
    }

    #[test]
    fn transfer_report_keeps_the_peers_with_the_most_bytes() {
        let paths = (1..=200).map(|bytes| report(&format!("n{bytes}"), 1, bytes)).collect();
        let seen = seen(paths);
        assert_eq!((seen.len(), seen[0].1, seen[63].1), (TransferReport::MAX_PATHS, 200, 137));
    }
}
