//! One end of an RDMA connection.

use bytes::{Buf, BufMut};

/// What the other end must know of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RdmaEndpoint {
    pub(crate) gid: [u8; 16],
    pub(crate) qp_num: u32,
    /// First packet sequence number.
    pub(crate) psn: u32,
    pub(crate) lid: u16,
    /// Largest packet, bytes.
    pub(crate) mtu: u16,
    /// Reads taken at once.
    pub(crate) max_reads: u8,
}

impl RdmaEndpoint {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_slice(&self.gid);
        out.put_u32(self.qp_num);
        out.put_u32(self.psn);
        out.put_u16(self.lid);
        out.put_u16(self.mtu);
        out.put_u8(self.max_reads);
    }

    pub(super) fn take(rest: &mut &[u8]) -> Option<Self> {
        Some(Self {
            gid: take_gid(rest)?,
            qp_num: rest.try_get_u32().ok()?,
            psn: rest.try_get_u32().ok()?,
            lid: rest.try_get_u16().ok()?,
            mtu: rest.try_get_u16().ok()?,
            max_reads: rest.try_get_u8().ok()?,
        })
    }
}

pub(super) fn take_gid(rest: &mut &[u8]) -> Option<[u8; 16]> {
    rest.split_off(..16)?.try_into().ok()
}
