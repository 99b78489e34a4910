//! Payload by the network adapters, one-sided: RDMA WRITE and READ over reliable connections.
//!
//! Each device is a **rail**. A lane is one queue pair per pair of nodes and rail, and the TCP
//! connection over which it was set up. The TCP connection carries the small frames, and its end is
//! the lane's end. A part is written by as many work requests as it needs. The last one carries an
//! immediate; its completion at the owner says that all of them are visible. EXPECT, over TCP,
//! tells what the immediate stands for.
//!
//! ```text
//!  writer                                                        owner
//!    ENDPOINT(my queue pair, your device)                 -->    queue pair made, receives posted
//!                                                         <--    CONNECTED(queue pair)
//!    WRITE of no bytes, immediate PROBE                   ==>    (completes: the rail works)
//!    MAP(segment), OPEN(grant)       once each            -->
//!                                                         <--    MAPPED(address, key), OPENED(ranges) | CLOSED(why)
//!    WRITE, WRITE, ... WRITE with immediate n             ==>    bytes land past the processor
//!    EXPECT(n, batch, part, bytes)                        -->    immediate n and EXPECT n: part accounted for
//!                                                         <--    ACK(batch, part)
//!    COMMIT(batch, part)  sent before, grant has ended    -->    ACK if the batch has arrived, else REFUSE
//!                                                         <--    REVOKE(grant)
//!    nothing more is posted under it; what was, completes
//!    REVOKED(grant)                                       -->    fenced
//! ```
//!
//! **What the owner's processor does not see**: a remote key covers a whole segment, so the owner
//! cannot check each span. The writer checks them, against the ranges that OPENED gave it, and
//! posts nothing under a grant it has not opened. A peer that is hostile *and* let in could write
//! anywhere in a registered segment; peers on rdma are trusted as far as that.
//!
//! **Fence**: a grant that ends is fenced when its writers have said REVOKED. If a writer does not
//! answer in time, the owner moves the queue pair to the error state. The fence is then complete
//! once the owner has seen the receives flushed: nothing lands after that. The others of that
//! writer resume on a new one.

mod devices;
mod link;
mod owner;
mod writer;

use std::io;

pub(crate) use devices::Devices;
pub(crate) use owner::Landing;
pub(crate) use writer::connect;

/// The immediate that stands for no part.
const PROBE: u32 = u32::MAX;

/// `gid@host:port`: a rail, by its address on the RDMA network, and where its control connections
/// are taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RdmaAddress {
    gid: [u8; 16],
    control: String,
}

impl RdmaAddress {
    /// Where control connections are taken.
    pub(crate) fn control(&self) -> &str {
        &self.control
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (gid, control) = text.split_once('@')?;
        let gid: std::net::Ipv6Addr = gid.parse().ok()?;
        Some(Self { gid: gid.octets(), control: control.to_owned() })
    }
}

impl std::fmt::Display for RdmaAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", std::net::Ipv6Addr::from(self.gid), self.control)
    }
}

fn failed(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}
