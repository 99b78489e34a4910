//! Settings of an engine.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_types::{Generation, NodeId};

use crate::transport::net::MAX_FRAME_PAYLOAD;
use crate::{TransferError, TransportChoice};

/// Settings of a [`TransferEngine`](crate::TransferEngine). [`TransferConfig::new`] gives the
/// defaults; `bind` checks them.
#[derive(Debug, Clone)]
pub struct TransferConfig {
    /// Name of this node.
    pub node: NodeId,
    /// This start of it.
    pub generation: Generation,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Host or IP that peers reach this node at. Needed if `listen` is the unspecified address.
    pub advertise_host: Option<String>,
    /// Which transports may carry.
    pub transport: TransportChoice,
    /// Folder of the Unix socket by which processes of this host find each other's memory. Without
    /// one, the socket is known to the processes of this network namespace only; with one, to those
    /// that see the folder.
    pub shm_folder: Option<PathBuf>,
    /// RDMA devices to use, as `mlx5_0,rxe*`; `None`: all that have an address.
    pub rdma_devices: Option<String>,
    /// Index into each device's GID table; `None`: RoCEv2 over IPv4 if there is one.
    pub rdma_gid_index: Option<u32>,
    /// Most connections to one peer, of each kind.
    pub lanes_per_peer: usize,
    /// Most bytes on their way to one peer: handed to a connection and not yet acknowledged.
    pub max_bytes_in_flight_per_peer: u64,
    /// Largest part of a batch that goes over one connection; larger batches are striped. Also the
    /// load of the connections at which another one is opened.
    pub stripe_bytes: u64,
    /// Largest payload of one frame, bytes. A cancelled batch keeps its connection busy for at most
    /// one frame.
    pub frame_bytes: u32,
    /// Longest wait for a connection and its handshake, all attempts together; one that has begun
    /// may take half as long again.
    pub connect_timeout: Duration,
    /// A connection that owes something and on which nothing moves for this long is closed.
    pub progress_timeout: Duration,
    /// A connection without work for this long is closed.
    pub idle_timeout: Duration,
    /// How often a part of a batch is sent again after its connection failed.
    pub retries: u32,
    /// Most connections accepted.
    pub max_connections: usize,
    /// Most batches under way.
    pub max_batches: usize,
    /// Most spans of all batches under way.
    pub max_spans: usize,
    /// Most live grants.
    pub max_grants: usize,
    /// Arrivals that wait for their receiver; when they are as many, trailers, and with them their
    /// connections (not those of rdma), wait too.
    pub arrival_queue: usize,
}

impl TransferConfig {
    /// The defaults.
    pub fn new(node: NodeId, generation: Generation, listen: SocketAddr) -> Self {
        Self {
            node,
            generation,
            listen,
            advertise_host: None,
            transport: TransportChoice::Auto,
            shm_folder: None,
            rdma_devices: None,
            rdma_gid_index: None,
            lanes_per_peer: 4,
            max_bytes_in_flight_per_peer: 64 << 20,
            stripe_bytes: 2 << 20,
            frame_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(3),
            progress_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            retries: 8,
            max_connections: 1024,
            max_batches: 16_384,
            max_spans: 4 << 20,
            max_grants: 65_536,
            arrival_queue: 1024,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), TransferError> {
        let positive = [
            ("lanes_per_peer", self.lanes_per_peer as u64),
            ("max_bytes_in_flight_per_peer", self.max_bytes_in_flight_per_peer),
            ("stripe_bytes", self.stripe_bytes),
            ("frame_bytes", u64::from(self.frame_bytes)),
            ("connect_timeout", self.connect_timeout.as_micros() as u64),
            ("progress_timeout", self.progress_timeout.as_micros() as u64),
            ("idle_timeout", self.idle_timeout.as_micros() as u64),
            ("max_connections", self.max_connections as u64),
            ("max_batches", self.max_batches as u64),
            ("max_spans", self.max_spans as u64),
            ("max_grants", self.max_grants as u64),
            ("arrival_queue", self.arrival_queue as u64),
        ];
        if let Some((field, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(TransferError::Config { field, problem: "0, but must be positive".into() });
        }
        at_most("frame_bytes", u64::from(self.frame_bytes), u64::from(MAX_FRAME_PAYLOAD))?;
        at_most("max_bytes_in_flight_per_peer", self.max_bytes_in_flight_per_peer, u64::from(u32::MAX))?;
        // A read is asked for in one frame, which has at most as much.
        at_most("stripe_bytes", self.stripe_bytes, 1 << 30)?;
        at_most("lanes_per_peer", self.lanes_per_peer as u64, 64)?;
        at_most("retries", u64::from(self.retries), 64)?;
        // A host name has at most 253 characters (RFC 1035).
        at_most("advertise_host (characters)", self.advertise_host.as_deref().map_or(0, str::len) as u64, 253)?;
        if self.listen.ip().is_unspecified() && self.advertise_host.is_none() {
            let problem = format!("not set, but needed to listen on {}: peers cannot connect to that", self.listen);
            return Err(TransferError::Config { field: "advertise_host", problem });
        }
        Ok(())
    }

    /// Where peers connect to.
    pub(crate) fn advertised(&self, bound: SocketAddr) -> String {
        match self.advertise_host.as_deref() {
            None => bound.to_string(),
            Some(host) if host.contains(':') && !host.starts_with('[') => format!("[{host}]:{}", bound.port()),
            Some(host) => format!("{host}:{}", bound.port()),
        }
    }

    /// A part of a batch must fit into what may be in flight, or it would wait for ever.
    pub(crate) fn part_bytes(&self) -> u64 {
        self.stripe_bytes.min(self.max_bytes_in_flight_per_peer)
    }
}

fn at_most(field: &'static str, value: u64, limit: u64) -> Result<(), TransferError> {
    if value <= limit {
        return Ok(());
    }
    Err(TransferError::Config { field, problem: format!("{value}, but must be at most {limit}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(listen: &str) -> TransferConfig {
        TransferConfig::new(NodeId::new("n").unwrap(), Generation(1), listen.parse().unwrap())
    }

    #[test]
    fn transfer_setting_out_of_range_names_the_field() {
        config("127.0.0.1:0").validate().unwrap();
        let zero = TransferConfig { lanes_per_peer: 0, ..config("127.0.0.1:0") }.validate().unwrap_err();
        assert!(matches!(zero, TransferError::Config { field: "lanes_per_peer", .. }), "{zero}");
        let large = TransferConfig { frame_bytes: u32::MAX, ..config("127.0.0.1:0") }.validate().unwrap_err();
        assert!(matches!(large, TransferError::Config { field: "frame_bytes", .. }), "{large}");
        let nowhere = config("0.0.0.0:0").validate().unwrap_err();
        assert!(matches!(nowhere, TransferError::Config { field: "advertise_host", .. }), "{nowhere}");
    }

    #[test]
    fn advertised_address_has_the_bound_port() {
        let bound = "0.0.0.0:7".parse().unwrap();
        let mut config = config("0.0.0.0:0");
        for (host, address) in [("10.0.0.1", "10.0.0.1:7"), ("kv.example", "kv.example:7"), ("fe80::1", "[fe80::1]:7")]
        {
            config.advertise_host = Some(host.into());
            assert_eq!(config.advertised(bound), address);
        }
    }
}
