//! Memory windows give a peer a key, and take it back. (Soft-RoCE does not check a window's range,
//! so that is not looked at here.)

use std::sync::Arc;

use baton_verbs::{
    Access, CompletionStatus, LocalSpan, MemoryRegistration, MemoryWindow, Opcode, QueuePairConfig, RemoteSpan,
    WorkRequests,
};

use crate::pair::{Side, connect, connected};

const WRITABLE: Access = Access { local_write: false, remote_write: true, remote_read: false, window_bind: false };

/// A window of the middle 1,000 bytes of `b`'s region, bound through its queue pair.
fn bound(b: &Side) -> MemoryWindow {
    let access = Access { window_bind: true, local_write: true, ..Access::default() };
    let registration = Arc::new(MemoryRegistration::register(&b.domain, &b.region, access).unwrap());
    let mut window = MemoryWindow::new(&registration).unwrap();
    bind(b, &mut window);
    window
}

fn bind(b: &Side, window: &mut MemoryWindow) {
    let mut requests = WorkRequests::new(1, 0);
    let key = requests.bind_window(5, window, 1_000, 1_000, WRITABLE, true).unwrap();
    b.post(&mut requests);
    let done = b.wait();
    assert_eq!((done.wr_id, done.opcode, key), (5, Some(Opcode::BindWindow), window.key()), "{done}");
}

fn invalidate(b: &Side, key: u32) {
    let mut requests = WorkRequests::new(1, 0);
    requests.invalidate(6, key, true).unwrap();
    b.post(&mut requests);
    let done = b.wait();
    assert_eq!((done.wr_id, done.opcode), (6, Some(Opcode::Invalidate)), "{done}");
}

/// Writes `len` bytes to `offset` of `b`'s region with `key`.
fn write(a: &Side, b: &Side, offset: usize, len: u32, key: u32) -> CompletionStatus {
    let remote = RemoteSpan { address: b.remote(offset).address, key };
    let mut requests = WorkRequests::new(1, 1);
    let local = LocalSpan { registration: &a.registration, offset: 0, len };
    requests.write(0, &[local], remote, None, true).unwrap();
    a.post(&mut requests);
    a.wait().status
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn memory_window_allows_writes_until_it_is_invalidated() {
    let (a, b) = connected("rxe0", 4096);
    assert!(a.context.has_memory_windows());
    a.fill(&[7; 4096]);
    let mut window = bound(&b);
    let first = window.key();
    assert!(write(&a, &b, 1_000, 1_000, first).is_success());
    let mut expected = [0; 4096];
    expected[1_000..2_000].fill(7);
    assert_eq!(b.copy(0..4096), expected);

    invalidate(&b, first);
    bind(&b, &mut window);
    assert_ne!(window.key(), first);
    a.fill(&[8; 4096]);
    assert!(write(&a, &b, 1_500, 500, window.key()).is_success(), "bound anew");
    expected[1_500..2_000].fill(8);
    invalidate(&b, window.key());
    assert_eq!(write(&a, &b, 1_000, 1_000, window.key()), CompletionStatus::RemoteAccess, "invalidated");
    assert_eq!(b.copy(0..4096), expected);
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn memory_window_refuses_reads_and_old_keys() {
    let (a, b) = connected("rxe0", 4096);
    b.fill(&[9; 4096]);
    let window = bound(&b);
    let span = LocalSpan { registration: &a.registration, offset: 0, len: 10 };
    let mut requests = WorkRequests::new(1, 1);
    requests.read(0, &[span], RemoteSpan { address: b.remote(1_000).address, key: window.key() }, true).unwrap();
    a.post(&mut requests);
    assert_eq!(a.wait().status, CompletionStatus::RemoteAccess, "it is for writing");
    assert_eq!(a.copy(0..4096), [0; 4096]);

    let (a, b) = connected("rxe0", 4096);
    let mut window = bound(&b);
    let old = window.key();
    invalidate(&b, old);
    bind(&b, &mut window);
    assert_eq!(write(&a, &b, 1_000, 10, old), CompletionStatus::RemoteAccess, "the key of the binding before");
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn memory_window_is_valid_only_for_its_queue_pair() {
    let (a, b) = connected("rxe0", 4096);
    let window = bound(&b);
    // Another connection into the same domain.
    let other = Side::new("rxe0", 4096, QueuePairConfig::default());
    let beside = Side::in_domain(&b.domain, 4096, QueuePairConfig::default());
    connect(&other, &beside);
    assert_eq!(write(&other, &b, 1_000, 10, window.key()), CompletionStatus::RemoteAccess);
    assert!(write(&a, &b, 1_000, 10, window.key()).is_success());
}
