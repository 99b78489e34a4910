//! Writes, reads and immediates, verified byte by byte.

#![allow(unsafe_code)] // poll(2)

use std::os::fd::AsRawFd;

use baton_verbs::{LocalSpan, Opcode, QueuePairConfig, WorkRequests};

use crate::pair::{Random, Side, TOKEN, connected, connected_with};

const BYTES: usize = 1 << 20;
const LONGEST: usize = 40_000;

/// Random local spans, and the place of the other side where they go or come from.
fn random_request(random: &mut Random) -> (Vec<(usize, usize)>, usize) {
    let spans: Vec<_> = (0..=random.below(4))
        .map(|_| {
            let len = 1 + random.below(LONGEST);
            (random.below(BYTES - len), len)
        })
        .collect();
    let total: usize = spans.iter().map(|span| span.1).sum();
    (spans, random.below(BYTES - total))
}

fn local<'a>(side: &'a Side, spans: &[(usize, usize)]) -> Vec<LocalSpan<'a>> {
    let span =
        |&(offset, len): &(usize, usize)| LocalSpan { registration: &side.registration, offset, len: len as u32 };
    spans.iter().map(span).collect()
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn rdma_write_is_complete_when_its_immediate_arrives() {
    let (a, b) = connected("rxe0", BYTES);
    let mut random = Random(1);
    let source = random.bytes(BYTES);
    a.fill(&source);
    let mut expected = vec![0; BYTES];
    let mut requests = WorkRequests::new(16, 4);
    for round in 0..60_u32 {
        b.pair.post_receives(7, 1).unwrap();
        let last = random.below(16);
        for index in 0..=last {
            let (spans, mut at) = random_request(&mut random);
            let immediate = (index == last).then_some(0xdead_0000 + round);
            requests.write(index as u64, &local(&a, &spans), b.remote(at), immediate, index == last).unwrap();
            for (offset, len) in spans {
                expected[at..at + len].copy_from_slice(&source[offset..offset + len]);
                at += len;
            }
        }
        a.post(&mut requests);
        let arrival = b.wait();
        assert!(b.copy(0..BYTES) == expected, "round {round}: the bytes differ");
        assert_eq!((arrival.opcode, arrival.wr_id), (Some(Opcode::ReceiveImmediate), 7), "{arrival}");
        assert_eq!((arrival.immediate, arrival.qp_num), (Some(0xdead_0000 + round), b.pair.qp_num()));
        let sent = a.wait();
        assert_eq!((sent.opcode, sent.wr_id, sent.immediate), (Some(Opcode::Write), last as u64, None), "{sent}");
    }
    assert_eq!(a.copy(0..BYTES), source, "a write changes nothing here");
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn rdma_read_returns_the_peers_bytes() {
    let (a, b) = connected("rxe1", BYTES);
    let mut random = Random(2);
    let source = random.bytes(BYTES);
    b.fill(&source);
    let mut expected = vec![0; BYTES];
    let mut requests = WorkRequests::new(1, 4);
    for round in 0..200 {
        let (spans, mut at) = random_request(&mut random);
        requests.read(round, &local(&a, &spans), b.remote(at), true).unwrap();
        a.post(&mut requests);
        let done = a.wait();
        assert_eq!((done.opcode, done.wr_id), (Some(Opcode::Read), round), "{done}");
        assert_eq!(done.bytes as usize, spans.iter().map(|span| span.1).sum::<usize>());
        for (offset, len) in spans {
            expected[offset..offset + len].copy_from_slice(&source[at..at + len]);
            at += len;
        }
        assert!(a.copy(0..BYTES) == expected, "round {round}: the bytes differ");
    }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn armed_completion_queue_makes_one_event_with_its_token() {
    let (a, b) = connected("rxe0", 4096);
    assert!(!readable(&b, 0));
    b.pair.post_receives(0, 2).unwrap();
    b.queue.arm().unwrap();
    assert!(!readable(&b, 50), "nothing has come in yet");
    let mut requests = WorkRequests::new(1, 1);
    for _ in 0..2 {
        requests.write(0, &[], b.remote(0), Some(1), true).unwrap();
        a.post(&mut requests);
        assert!(a.wait().status.is_success());
    }
    assert!(readable(&b, 5_000));
    let mut tokens = Vec::new();
    assert_eq!(b.channel.take_events(|token| tokens.push(token)).unwrap(), 1, "armed once");
    assert_eq!(tokens, [TOKEN]);
    assert!(!readable(&b, 0));
    assert_eq!(b.channel.take_events(|_| panic!("there is none left")).unwrap(), 0);
    assert_eq!((b.wait().immediate, b.wait().immediate), (Some(1), Some(1)));
}

fn readable(side: &Side, timeout_ms: i32) -> bool {
    let mut fd = libc::pollfd { fd: side.channel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one record, which is ours.
    unsafe { libc::poll(&raw mut fd, 1, timeout_ms) == 1 }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn full_work_queue_says_how_many_requests_were_posted() {
    let config = QueuePairConfig { send_depth: 8, receive_depth: 8, ..QueuePairConfig::default() };
    let (a, b) = connected_with("rxe0", 4096, config);
    let error = b.pair.post_receives(0, 100_000).unwrap_err();
    assert!(error.full && (8..100_000).contains(&error.posted), "{error}");
    let mut requests = WorkRequests::new(2_000, 1);
    for id in 0..2_000 {
        requests.write(id, &[], b.remote(0), None, true).unwrap();
    }
    // SAFETY: the requests have no bytes.
    let error = unsafe { a.pair.post(&mut requests) }.unwrap_err();
    assert!(error.full && (8..2_000).contains(&error.posted), "{error}");
    for id in 0..error.posted {
        let done = a.wait();
        assert_eq!((done.wr_id, done.status.is_success()), (id as u64, true), "{done}");
    }
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn work_request_beyond_its_list_or_registration_is_refused() {
    let (a, b) = connected("rxe0", 4096);
    let span = |offset, len| LocalSpan { registration: &a.registration, offset, len };
    let mut requests = WorkRequests::new(1, 2);
    for bad in [span(4096, 1), span(4000, 97), span(usize::MAX, 1)] {
        assert!(requests.write(0, &[bad], b.remote(0), None, true).is_err(), "{bad:?}");
    }
    assert!(requests.read(0, &[span(0, 1); 3], b.remote(0), true).is_err(), "three spans");
    requests.read(0, &[span(0, 4096)], b.remote(0), true).unwrap();
    assert!(requests.read(0, &[], b.remote(0), true).is_err(), "two requests");
    assert_eq!(requests.len(), 1);
}
