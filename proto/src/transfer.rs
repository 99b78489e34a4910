//! What nodes say of their transfers.

use baton_types as d;

use crate::v1 as w;
use crate::{InvalidMessage, generation, node_id};

/// Longest name of a transport, bytes.
pub(crate) const MAX_TRANSPORT: usize = 16;
/// Longest address, bytes.
const MAX_ADDRESS: usize = 512;
/// Most ways to one node: each transport, over several adapters.
const MAX_ADDRESSES: usize = 64;

/// Text that operators read: printable, and of bounded length.
fn printable(field: &'static str, text: String, longest: usize) -> Result<String, InvalidMessage> {
    if text.is_empty() || text.len() > longest || text.contains(char::is_control) {
        let found = format!("{text:?}, but must have 1 to {longest} bytes without control characters");
        return Err(InvalidMessage { field, found });
    }
    Ok(text)
}

impl From<&d::TransferReport> for w::TransferReport {
    fn from(report: &d::TransferReport) -> Self {
        let address = |address: &d::TransferAddress| w::TransferAddress {
            transport: address.transport.clone(),
            address: address.address.clone(),
        };
        Self {
            addresses: report.addresses.iter().map(address).collect(),
            paths: report.paths.iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<w::TransferReport> for d::TransferReport {
    type Error = InvalidMessage;

    /// Of more than [`d::TransferReport::MAX_PATHS`] paths the first are taken.
    fn try_from(report: w::TransferReport) -> Result<Self, Self::Error> {
        let addresses = report.addresses.into_iter();
        let paths = report.paths.into_iter();
        Ok(Self {
            addresses: addresses.take(MAX_ADDRESSES).map(TryInto::try_into).collect::<Result<_, _>>()?,
            paths: paths.take(Self::MAX_PATHS).map(TryInto::try_into).collect::<Result<_, _>>()?,
        })
    }
}

impl TryFrom<w::TransferAddress> for d::TransferAddress {
    type Error = InvalidMessage;

    fn try_from(address: w::TransferAddress) -> Result<Self, Self::Error> {
        Ok(Self {
            transport: printable("transfer.addresses.transport", address.transport, MAX_TRANSPORT)?,
            address: printable("transfer.addresses.address", address.address, MAX_ADDRESS)?,
        })
    }
}

impl From<&d::TransferPath> for w::TransferPath {
    fn from(path: &d::TransferPath) -> Self {
        Self {
            node: path.node.to_string(),
            generation: path.generation.to_string(),
            transport: path.transport.clone(),
            lanes: path.lanes,
            bytes: path.bytes,
            batches: path.batches,
            retries: path.retries,
            fallbacks: path.fallbacks,
            in_flight_bytes: path.in_flight_bytes,
            bytes_per_second: path.bytes_per_second,
        }
    }
}

impl TryFrom<w::TransferPath> for d::TransferPath {
    type Error = InvalidMessage;

    /// A bandwidth that is negative or not finite is none.
    fn try_from(path: w::TransferPath) -> Result<Self, Self::Error> {
        Ok(Self {
            node: node_id("transfer.paths.node", &path.node)?,
            generation: generation("transfer.paths.generation", &path.generation)?,
            transport: printable("transfer.paths.transport", path.transport, MAX_TRANSPORT)?,
            lanes: path.lanes,
            bytes: path.bytes,
            batches: path.batches,
            retries: path.retries,
            fallbacks: path.fallbacks,
            in_flight_bytes: path.in_flight_bytes,
            bytes_per_second: path.bytes_per_second.filter(|rate| rate.is_finite() && *rate >= 0.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(index: u64, rate: Option<f64>) -> d::TransferPath {
        d::TransferPath {
            node: d::NodeId::new("decode-0").unwrap(),
            generation: d::Generation(index),
            transport: "shm".into(),
            lanes: 2,
            bytes: index * 3,
            batches: index + 1,
            retries: index + 2,
            fallbacks: index + 3,
            in_flight_bytes: index + 4,
            bytes_per_second: rate,
        }
    }

    fn address() -> d::TransferAddress {
        d::TransferAddress { transport: "tcp".into(), address: "[fe80::1]:7200".into() }
    }

    proptest! {
        #[test]
        fn transfer_reports_round_trip(paths in prop::collection::vec((0u64..1 << 60, prop::option::of(0.0f64..1e12)), 0..64)) {
            let paths = paths.into_iter().map(|(index, rate)| path(index, rate)).collect();
            let report = d::TransferReport { addresses: vec![address()], paths };
            prop_assert_eq!(d::TransferReport::try_from(w::TransferReport::from(&report)).unwrap(), report);
        }
    }

    #[test]
    fn transfer_report_of_node_is_bounded() {
        let many = d::TransferReport { addresses: vec![address(); 100], paths: vec![path(1, None); 100] };
        let taken = d::TransferReport::try_from(w::TransferReport::from(&many)).unwrap();
        assert_eq!((taken.addresses.len(), taken.paths.len()), (MAX_ADDRESSES, d::TransferReport::MAX_PATHS));
        for rate in [f64::NAN, f64::INFINITY, -1.0] {
            let path = d::TransferPath::try_from(w::TransferPath::from(&path(1, Some(rate)))).unwrap();
            assert_eq!(path.bytes_per_second, None, "{rate}");
        }
    }

    #[test]
    fn invalid_transfer_report_is_refused_by_field() {
        let refused = |change: fn(&mut w::TransferPath)| {
            let mut path = w::TransferPath::from(&path(1, None));
            change(&mut path);
            d::TransferPath::try_from(path).unwrap_err().field
        };
        assert_eq!(refused(|path| path.node = "two words".into()), "transfer.paths.node");
        assert_eq!(refused(|path| path.generation = "x".into()), "transfer.paths.generation");
        assert_eq!(refused(|path| path.transport = "\x1b[2J".into()), "transfer.paths.transport");
        assert_eq!(refused(|path| path.transport = "t".repeat(17)), "transfer.paths.transport");
        let nowhere = w::TransferAddress { transport: "tcp".into(), address: String::new() };
        assert_eq!(d::TransferAddress::try_from(nowhere).unwrap_err().field, "transfer.addresses.address");
    }
}
