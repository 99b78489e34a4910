//! Nothing lands after the receiver has moved its queue pair to the error state and its receive is
//! flushed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use baton_verbs::{Completion, CompletionStatus, LocalSpan, QueuePairState, WorkRequests};

use crate::pair::{Random, SOON, Side, connected};

const BYTES: usize = 4 << 20;
const SPAN: usize = 64 << 10;
const DEPTH: usize = 64;

/// Writes random spans of `a` over all of `b`, up to [`DEPTH`] at once, until one fails; how it
/// failed.
fn stream(a: &Side, b: &Side, stop: &AtomicBool) -> CompletionStatus {
    let mut random = Random(3);
    let mut requests = WorkRequests::new(1, 1);
    let mut found = [Completion::EMPTY; DEPTH];
    let mut under_way = 0;
    while !stop.load(Ordering::Relaxed) {
        while under_way < DEPTH {
            let offset = random.below(BYTES - SPAN);
            let local = LocalSpan { registration: &a.registration, offset, len: SPAN as u32 };
            requests.write(0, &[local], b.remote(random.below(BYTES - SPAN)), None, true).unwrap();
            a.post(&mut requests);
            under_way += 1;
        }
        let count = a.queue.poll(&mut found).unwrap();
        if let Some(failed) = found[..count].iter().find(|done| !done.status.is_success()) {
            return failed.status;
        }
        under_way -= count;
    }
    CompletionStatus::Success
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn no_rdma_write_lands_after_the_receivers_fence() {
    for round in 0..5 {
        let (a, b) = connected("rxe0", BYTES);
        a.fill(&Random(4).bytes(BYTES));
        b.pair.post_receives(9, 1).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let writer = scope.spawn(|| stream(&a, &b, &stop));
            thread::sleep(Duration::from_millis(300));
            let before = b.copy(0..BYTES);
            thread::sleep(Duration::from_millis(100));
            assert!(b.copy(0..BYTES) != before, "round {round}: the stream must be running, or this shows nothing");

            b.pair.to_error().unwrap();
            let flushed = b.wait();
            assert_eq!((flushed.wr_id, flushed.status), (9, CompletionStatus::Flushed));
            let fenced = b.copy(0..BYTES);
            assert_eq!(b.pair.state().unwrap(), QueuePairState::Error);
            let deadline = Instant::now() + SOON;
            while !writer.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
            assert!(writer.is_finished(), "round {round}: the writer must hear of it");
            stop.store(true, Ordering::Relaxed);
            let failure = writer.join().unwrap();
            assert_eq!(failure, CompletionStatus::RetryExceeded, "round {round}");
            assert!(b.copy(0..BYTES) == fenced, "round {round}: bytes landed after the fence");
        });
    }
}
