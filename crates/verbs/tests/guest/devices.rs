//! Devices, addresses, locked memory.

#![allow(unsafe_code)] // rlimits and capabilities of the test's own thread

use std::sync::Arc;
use std::{net::Ipv4Addr, thread};

use baton_memory::MemoryRegion;
use baton_verbs::{Access, Device, LinkLayer, MemoryRegistration, PortState, ProtectionDomain, VerbsError, choose_gid};

use crate::pair::open;

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn both_rdma_rails_are_listed_and_described() {
    let devices = Device::list().unwrap();
    let mut names: Vec<_> = devices.iter().map(Device::name).collect();
    names.sort_unstable();
    assert_eq!(names, ["rxe0", "rxe1"]);
    assert_ne!(devices[0].node_guid(), devices[1].node_guid());
    for device in &devices {
        let context = device.open().unwrap();
        let [port] = context.ports().unwrap()[..] else { panic!("one port") };
        assert_eq!((port.port, port.state, port.link_layer), (1, PortState::Active, LinkLayer::Ethernet));
        assert_eq!(port.active_mtu.bytes(), 4096);
        assert!(port.gbit_per_s.unwrap() > 0.0);
        assert!(context.max_sge() >= 4 && context.max_reads() >= 16, "{context:?}");
        assert!(context.port(9).is_err());
    }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn chosen_gid_is_the_ipv4_address_of_the_interface() {
    for (rail, address) in [("rxe0", Ipv4Addr::new(10, 0, 0, 1)), ("rxe1", Ipv4Addr::new(10, 0, 1, 1))] {
        let table = open(rail).gid_table().unwrap();
        let chosen = choose_gid(&table, 1, None).unwrap();
        assert_eq!(chosen.gid.ipv4(), Some(address), "of {table:?}");
        assert_eq!(choose_gid(&table, 1, Some(0)).unwrap().index, 0);
        assert!(table.len() > 1 && choose_gid(&table, 1, Some(200)).is_err());
    }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn registration_beyond_memlock_limit_says_what_to_set() {
    let context = open("rxe0");
    let domain = ProtectionDomain::new(&context).unwrap();
    let limited = thread::spawn(move || {
        drop_ipc_lock();
        let before = set_memlock(1 << 20);
        let small = MemoryRegistration::register(&domain, &region(256 << 10), Access::ALL).map(|_| ());
        let large = MemoryRegistration::register(&domain, &region(2 << 20), Access::ALL).map(|_| ());
        set_memlock(before);
        (small, large)
    });
    let (small, large) = limited.join().unwrap();
    small.unwrap();
    let error = large.unwrap_err();
    assert!(matches!(error, VerbsError::MemlockTooLow { bytes: 2_097_152, limit: 1_048_576, .. }), "{error}");
    assert!(error.to_string().contains("ulimit -l"), "{error}");
}

fn region(bytes: usize) -> Arc<MemoryRegion> {
    Arc::new(MemoryRegion::allocate(bytes).unwrap())
}

/// Sets the soft limit of the process, and returns the one before.
fn set_memlock(bytes: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: plain system calls on a record of this function.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit), 0);
        let before = limit.rlim_cur;
        limit.rlim_cur = bytes;
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit), 0);
        before
    }
}

/// Takes from this thread what exempts it from the limit (capabilities are per thread).
fn drop_ipc_lock() {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable; the lower 32 capabilities, then the upper.
    let mut sets = [0_u32; 6];
    // SAFETY: the calls read the header and read or write six words, as version 3 says (capget(2)).
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[0] &= !(1 << 14);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}
