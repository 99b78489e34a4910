//! Wrong keys, dead links.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use baton_verbs::{Access, CompletionStatus, LocalSpan, MemoryRegistration, PortState, RemoteSpan, WorkRequests};

use crate::pair::{SOON, Side, connected};

fn write(a: &Side, local: &MemoryRegistration, remote: RemoteSpan) -> CompletionStatus {
    let span = LocalSpan { registration: local, offset: 0, len: 64 };
    let mut requests = WorkRequests::new(1, 1);
    requests.write(1, &[span], remote, None, true).unwrap();
    a.post(&mut requests);
    a.wait().status
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn rdma_write_with_wrong_key_or_range_is_refused_by_the_peer() {
    type Wrong = fn(&Side) -> RemoteSpan;
    let wrongs: [(&str, Wrong); 3] = [
        ("beyond the end", |b| b.remote(4096 - 63)),
        ("before the beginning", |b| RemoteSpan { address: b.registration.address() - 1, ..b.remote(0) }),
        ("wrong key", |b| RemoteSpan { key: b.registration.remote_key() ^ 0x55, ..b.remote(0) }),
    ];
    for (what, wrong) in wrongs {
        let (a, b) = connected("rxe0", 4096);
        a.fill(&[9; 4096]);
        assert_eq!(write(&a, &a.registration, wrong(&b)), CompletionStatus::RemoteAccess, "{what}");
        assert_eq!(write(&a, &a.registration, b.remote(0)), CompletionStatus::Flushed, "{what}: the pair is lost");
        assert_eq!(b.copy(0..4096), [0; 4096], "{what}");
    }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn registration_for_reads_refuses_remote_writes() {
    let (a, b) = connected("rxe0", 4096);
    let readable = Access { remote_read: true, ..Access::default() };
    let registration = MemoryRegistration::register(&b.domain, &b.region, readable).unwrap();
    let remote = RemoteSpan { address: registration.address(), key: registration.remote_key() };
    assert_eq!(write(&a, &a.registration, remote), CompletionStatus::RemoteAccess);
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn registration_of_other_protection_domain_is_refused_locally() {
    let (a, b) = connected("rxe0", 4096);
    let status = write(&a, &b.registration, b.remote(0));
    // Soft-RoCE reports the second, which is the less exact.
    assert!(matches!(status, CompletionStatus::LocalProtection | CompletionStatus::LocalOperation), "{status}");
    assert_eq!(b.copy(0..4096), [0; 4096]);
}

fn set_link(interface: &str, state: &str) {
    let status = Command::new("/bin/ip").args(["link", "set", interface, state]).status().unwrap();
    assert!(status.success(), "ip link set {interface} {state}");
}

/// Waits until the port is in this state.
fn wait_for(side: &Side, wanted: PortState) {
    let deadline = Instant::now() + SOON;
    while side.context.port(1).unwrap().state != wanted {
        assert!(Instant::now() < deadline, "the port is not {wanted:?} within {SOON:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn link_down_fails_work_requests_and_shows_in_the_port_state() {
    let (a, b) = connected("rxe0", 4096);
    assert!(write(&a, &a.registration, b.remote(0)).is_success());

    set_link("v0", "down");
    let began = Instant::now();
    let status = write(&a, &a.registration, b.remote(0));
    let took = began.elapsed();
    wait_for(&a, PortState::Down);
    set_link("v0", "up");
    // With a link but no answer it is the first; Soft-RoCE without a route gives the second at
    // once.
    assert!(matches!(status, CompletionStatus::RetryExceeded | CompletionStatus::LocalOperation), "{status}");
    assert!(took < Duration::from_secs(5), "took {took:?}");
    assert_eq!(write(&a, &a.registration, b.remote(0)), CompletionStatus::Flushed);

    wait_for(&a, PortState::Active);
    let (a, b) = connected("rxe0", 4096);
    assert!(write(&a, &a.registration, b.remote(0)).is_success(), "a new pair works");
}
