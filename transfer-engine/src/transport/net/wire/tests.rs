use baton_types::{Generation, NodeId, NodeStart};
use proptest::prelude::*;

use super::*;
use crate::error::{Refusal, RefusalReason};
use crate::{SpanPair, TransportKind};

fn split(bytes: &[u8]) -> (Prefix, &[u8]) {
    let (prefix, body) = bytes.split_at(PREFIX_BYTES);
    let prefix = Prefix::decode(prefix.try_into().unwrap()).unwrap();
    assert_eq!(prefix.body, body.len());
    (prefix, body)
}

fn frame_of(put: impl FnOnce(&mut Vec<u8>)) -> Frame {
    let mut out = Vec::new();
    put(&mut out);
    let (prefix, body) = split(&out);
    Frame::decode(prefix, body).unwrap()
}

proptest! {
    #[test]
    fn wire_frames_round_trip(batch: u64, part in 0u32..9, grant: u64, segment: u32, bytes: u64, tag: u64, lens in prop::collection::vec(0u32..9999, 0..256)) {
        let target = Target { id: PartId { batch, part }, grant: GrantId(grant), segment: SegmentId(segment) };
        let span = |&len: &u32| SpanPair { local_offset: bytes, remote_offset: tag ^ u64::from(len), len: len.into() };
        let spans: Vec<_> = lens.iter().map(span).collect();
        let remote: Vec<_> = spans.iter().map(|span| RemoteSpan { offset: span.remote_offset, len: span.len as u32 }).collect();
        let data = Data { target, spans: remote.clone() };
        prop_assert_eq!(frame_of(|out| put_data(out, &target, &spans)), Frame::Data(data));
        let copied = remote.iter().map(|&to| CopySpan { to, from: bytes }).collect();
        let place = Place { slot: 3, token: tag };
        let copy = Frame::Copy(Copy { target, source: SegmentId(5), place, spans: copied });
        prop_assert_eq!(frame_of(|out| put_copy(out, &target, SegmentId(5), place, &spans)), copy);
        let commit = Commit { target, parts: 9, bytes, tag };
        prop_assert_eq!(frame_of(|out| put_commit(out, &commit)), Frame::Commit(commit));
        let others = [
            Frame::Commit(commit),
            Frame::Cancel { batch, grant: GrantId(grant) },
            Frame::Fence { connection: bytes },
            Frame::Slots { bytes },
            Frame::Source { source: SegmentId(segment), bytes },
            Frame::Map { segment: SegmentId(segment) },
            Frame::Endpoint { device: [part as u8; 16], endpoint: endpoint(segment) },
            Frame::Expect(Expect { sequence: segment, commit }),
            Frame::Open { grant: GrantId(grant), segment: SegmentId(segment) },
            Frame::Revoked { grant: GrantId(grant) },
        ];
        let read = Read { target, spans: remote };
        prop_assert_eq!(frame_of(|out| put_read(out, &target, &spans)), Frame::Read(read.clone()));
        prop_assert_eq!(frame_of(|out| put_check(out, &target, &spans)), Frame::Check(read));
        for other in others {
            prop_assert_eq!(frame_of(|out| other.encode(out)), other);
        }
    }

    #[test]
    fn wire_replies_round_trip(batch: u64, part: u32, generation: u64, version: u16, reason in 0usize..RefusalReason::ALL.len(), message in ".{0,100}") {
        let id = PartId { batch, part };
        let replies = [
            Reply::Welcome { version },
            Reply::Reject(Rejection::StaleOwner(Generation(generation))),
            Reply::Reject(Rejection::StaleWriter(Generation(generation))),
            Reply::Reject(Rejection::WrongNode("decode-7".into())),
            Reply::Reject(Rejection::Version(version)),
            Reply::Reject(Rejection::Full),
            Reply::Reject(Rejection::InUse),
            Reply::Reject(Rejection::Transport),
            Reply::Ack(id),
            Reply::Refuse(id, Refusal::new(RefusalReason::ALL[reason], message.clone())),
            Reply::Progress,
            Reply::Payload { id, bytes: part.min(MAX_FRAME_PAYLOAD) },
            Reply::Mapped { segment: SegmentId(part), bytes: batch, address: generation, key: part },
            Reply::Connected(endpoint(part)),
            Reply::Opened { grant: GrantId(batch), write: part % 3 == 0, more: part % 2 == 0, ranges: vec![1..batch; MAX_OPENED_RANGES] },
            Reply::Closed { grant: GrantId(batch), refusal: Refusal::new(RefusalReason::ALL[reason], message.clone()) },
            Reply::Revoke { grant: GrantId(batch) },
            Reply::Fault(message),
        ];
        for reply in replies {
            let bytes = reply.encode();
            let (prefix, body) = split(&bytes);
            prop_assert_eq!(Reply::decode(prefix, body).unwrap(), reply);
        }
    }

    #[test]
    fn decoding_random_frames_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..200)) {
        let prefix = Prefix { kind, body: body.len() };
        let _ = (Frame::decode(prefix, &body), Reply::decode(prefix, &body), Hello::decode(prefix, &body));
    }
}

fn endpoint(number: u32) -> RdmaEndpoint {
    RdmaEndpoint { gid: [7; 16], qp_num: number, psn: !number, lid: 3, mtu: 4096, max_reads: 16 }
}

fn hello() -> Hello {
    let writer = |name, generation| NodeStart { node: NodeId::new(name).unwrap(), generation: Generation(generation) };
    Hello { version: 2, connection: 9, writer: writer("p", 3), owner: writer("d", 4), transport: TransportKind::Shm }
}

#[test]
fn hello_frame_round_trips_and_may_grow() {
    let hello = hello();
    let bytes = hello.encode();
    let smallest = [
        &b"BATONKV\n"[..],
        &[1, 0, 0, 0, 0, 0, 0, 31, 0, 2, 0, 0, 0, 0, 0, 0, 0, 9],
        &[0, 0, 0, 0, 0, 0, 0, 3, 1, b'p', 0, 0, 0, 0, 0, 0, 0, 4, 1, b'd', 2],
    ];
    assert_eq!(bytes, smallest.concat(), "the bytes of the specification");
    assert_eq!(Reply::Welcome { version: 2 }.encode(), [64, 0, 0, 0, 0, 0, 0, 2, 0, 2]);
    let (prefix, body) = split(bytes.strip_prefix(&MAGIC).unwrap());
    assert_eq!(Hello::decode(prefix, body).as_ref(), Ok(&hello));
    assert_eq!(Hello::decode(prefix, &[body, &[1, 2, 3]].concat()), Ok(hello));
    assert!(Hello::decode(prefix, &body[..body.len() - 1]).is_err(), "without the transport");
    assert!(Hello::decode(prefix, &body[..body.len() - 2]).is_err());
}

#[test]
fn frames_beyond_wire_bounds_are_refused() {
    let mut prefix = [0; PREFIX_BYTES];
    prefix[4..].copy_from_slice(&(MAX_BODY + 1).to_be_bytes());
    assert!(Prefix::decode(prefix).is_err());
    let flagged = [kind::COMMIT, 1, 0, 0, 0, 0, 0, 0];
    assert!(Prefix::decode(flagged).unwrap_err().0.contains("unknown flags 0x01"));
    let mut out = Vec::new();
    let target = Target { id: PartId { batch: 1, part: 0 }, grant: GrantId(1), segment: SegmentId(0) };
    let span = SpanPair { local_offset: 0, remote_offset: 0, len: u64::from(MAX_FRAME_PAYLOAD) };
    put_data(&mut out, &target, &[span, SpanPair { len: 1, ..span }]);
    let (prefix, body) = split(&out);
    assert!(Frame::decode(prefix, body).is_err(), "more payload than a frame may have");
    let mut many = Vec::new();
    put_data(&mut many, &target, &[SpanPair { len: 1, ..span }; MAX_FRAME_SPANS]);
    many.extend([0; 12]);
    let many_prefix = Prefix { body: many.len() - PREFIX_BYTES, ..prefix };
    assert!(Frame::decode(many_prefix, &many[PREFIX_BYTES..]).is_err(), "more spans than a frame may have");
    let long = Reply::Fault("ü".repeat(1000)).encode();
    assert_eq!(long.len(), PREFIX_BYTES + MAX_MESSAGE);
}
