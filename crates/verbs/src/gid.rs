//! Addresses of a port, and which of them to use.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::VerbsError;

/// A port's 128-bit address, in network byte order. On RoCEv2 it is the IPv6 or IPv4-mapped address
/// of the interface.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IPv4 address, where the GID is one.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    fn is_link_local(&self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// How packets with a GID are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: Ethernet frames of their own, not routable.
    RoceV1,
    /// RoCE version 2: UDP packets.
    RoceV2,
}

/// One row of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    /// Port number, from 1.
    pub port: u8,
    /// Index in the port's table.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// How packets with it are framed.
    pub kind: GidKind,
}

/// The entry to connect `port` with: the one at `index` where that is given; else RoCEv2 before
/// InfiniBand before RoCEv1, and among equals IPv4 before other addresses before link-local ones,
/// whose peers might be out of reach; among equals the lowest index.
pub fn choose_gid(table: &[GidEntry], port: u8, index: Option<u32>) -> Result<GidEntry, VerbsError> {
    let usable = || table.iter().filter(|entry| entry.port == port && !entry.gid.is_zero());
    if let Some(index) = index {
        return usable()
            .find(|entry| entry.index == index)
            .copied()
            .ok_or_else(|| VerbsError::NoSuchGid { index, present: usable().map(|entry| entry.index).collect() });
    }
    usable().min_by_key(|entry| preference(entry)).copied().ok_or(VerbsError::NoGid { entries: table.len() })
}

/// Smaller is better.
fn preference(entry: &GidEntry) -> (u8, u8, u32) {
    let kind = match entry.kind {
        GidKind::RoceV2 => 0,
        GidKind::InfiniBand => 1,
        GidKind::RoceV1 => 2,
    };
    let address = match entry.gid {
        gid if gid.ipv4().is_some() => 0,
        // Every InfiniBand GID of the default subnet is link-local, and it is the right one there.
        gid if gid.is_link_local() && entry.kind != GidKind::InfiniBand => 2,
        _ => 1,
    };
    (kind, address, entry.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, address: &str, kind: GidKind) -> GidEntry {
        let gid = Gid(address.parse::<Ipv6Addr>().unwrap().octets());
        GidEntry { port: 1, index, gid, kind }
    }

    #[test]
    fn gid_of_ipv4_over_roce_v2_is_preferred_and_link_local_is_last() {
        let mut table = vec![
            entry(0, "fe80::1", GidKind::RoceV1),
            entry(1, "fe80::1", GidKind::RoceV2),
            entry(2, "::ffff:10.0.0.1", GidKind::RoceV1),
            entry(3, "2001:db8::1", GidKind::RoceV2),
            entry(4, "::ffff:10.0.0.1", GidKind::RoceV2),
            entry(5, "::ffff:10.0.0.2", GidKind::RoceV2),
        ];
        for best in [4, 5, 3, 1, 2, 0] {
            let chosen = choose_gid(&table, 1, None).unwrap().index;
            assert_eq!(chosen, best, "of {table:?}");
            table.retain(|entry| entry.index != chosen);
        }
        assert!(matches!(choose_gid(&table, 1, None), Err(VerbsError::NoGid { entries: 0 })));
    }

    #[test]
    fn gid_index_overrides_the_choice_and_a_wrong_one_is_an_error() {
        let table = [entry(0, "fe80::1", GidKind::RoceV2), entry(1, "::ffff:10.0.0.1", GidKind::RoceV2)];
        assert_eq!(choose_gid(&table, 1, Some(0)).unwrap().index, 0);
        let error = choose_gid(&table, 1, Some(7)).unwrap_err().to_string();
        assert_eq!(error, "GID index 7 is not in the table, which has [0, 1]");
    }

    #[test]
    fn empty_gid_rows_and_other_ports_are_skipped() {
        let mut other = entry(0, "::ffff:10.0.0.1", GidKind::RoceV2);
        other.port = 2;
        let table = [other, entry(0, "::", GidKind::RoceV2), entry(1, "fe80::1", GidKind::InfiniBand)];
        assert_eq!(choose_gid(&table, 1, None).unwrap().index, 1);
        assert!(choose_gid(&table, 1, Some(0)).is_err());
    }

    #[test]
    fn gid_is_printed_as_its_ip_address() {
        let gid = entry(0, "::ffff:10.0.0.1", GidKind::RoceV2).gid;
        assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(gid.to_string(), "::ffff:10.0.0.1");
    }
}
