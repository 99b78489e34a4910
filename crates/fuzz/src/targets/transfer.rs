//! What nodes send each other besides gRPC: frames of a transfer, replies, and descriptors of
//! memory.

use baton_transfer_engine::fuzz::{GRANT, GRANTED, LEASE, LEASED, OWNER, Owner, WANTED, WRITER, read_replies};
use baton_transfer_engine::{SegmentDescriptor, SegmentId, TransportAddress, TransportKind};
use baton_types::{Generation, NodeId};

use crate::input::choice;

const KINDS: [TransportKind; 2] = [TransportKind::Tcp, TransportKind::Shm];

/// A connection of a writer: the first byte says over what.
pub(super) fn frames(input: &[u8]) {
    thread_local! {
        static OWNER_END: Owner = Owner::default();
    }
    let (kind, bytes) = choice(input, KINDS.len());
    let replies = OWNER_END.with(|owner| owner.serve(KINDS[kind], bytes));
    read_replies(&replies);
}

/// What an owner sends, or a descriptor.
pub(super) fn replies(input: &[u8]) {
    let (kind, bytes) = choice(input, 2);
    if kind == 0 {
        read_replies(bytes);
        return;
    }
    if let Ok(descriptor) = SegmentDescriptor::decode(bytes) {
        let again = SegmentDescriptor::decode(&descriptor.encode());
        assert_eq!(again.as_ref(), Ok(&descriptor), "what was read can be written");
    }
}

fn frame(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let body = fields.concat();
    [&[kind, 0, 0, 0][..], &(body.len() as u32).to_be_bytes(), &body].concat()
}

fn hello(kind: u8, (name, generation): (&str, u64)) -> Vec<u8> {
    let named = |(name, generation): (&str, u64)| {
        [&generation.to_be_bytes()[..], &[name.len() as u8], name.as_bytes()].concat()
    };
    let fields: [&[u8]; 5] =
        [&2u16.to_be_bytes(), &7u64.to_be_bytes(), &named((name, generation)), &named(OWNER), &[kind]];
    [b"BATONKV\n", &frame(1, &fields)[..]].concat()
}

/// Batch, grant, part, segment.
fn target(batch: u64, grant: u64) -> Vec<u8> {
    [&batch.to_be_bytes()[..], &grant.to_be_bytes(), &[0; 8]].concat()
}

fn span(offset: u64, bytes: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &bytes.to_be_bytes()].concat()
}

fn commit(batch: u64, grant: u64, bytes: u64) -> Vec<u8> {
    frame(3, &[&target(batch, grant), &1u32.to_be_bytes(), &bytes.to_be_bytes(), &9u64.to_be_bytes()])
}

/// In the form that `docs/internals/transfer-protocol.md` specifies.
pub(super) fn frame_seeds() -> Vec<Vec<u8>> {
    let write = GRANTED.start;
    let read = LEASED.start;
    let spans = [span(write, 40), span(write + 100, 24)].concat();
    let data = [frame(2, &[&target(1, GRANT), &spans]), vec![1; 64], commit(1, GRANT, 64)].concat();
    let more = [frame(2, &[&target(2, GRANT), &span(write, 32)]), vec![0; 32], commit(2, GRANT, 32)].concat();
    let copy_span = [span(write, 128), 8u64.to_be_bytes().to_vec()].concat();
    let copy = frame(8, &[&target(3, GRANT), &[0; 8], &[WANTED; 8], &copy_span]);
    let page = 4096u64.to_be_bytes();
    let shared = [frame(6, &[&page]), frame(7, &[&[0; 4], &page]), copy, commit(3, GRANT, 128)].concat();
    let cancel = frame(4, &[&1u64.to_be_bytes(), &GRANT.to_be_bytes()]);
    let fence = frame(5, &[&3u64.to_be_bytes()]);
    let asked = frame(9, &[&target(4, LEASE), &span(read, 700)]);
    let check = frame(10, &[&target(5, LEASE), &span(read, 1024)]);
    let map = frame(11, &[&0u32.to_be_bytes()]);
    let other = [frame(12, &[&[0; 8]]), frame(13, &[&[0; 45]]), frame(15, &[&[0; 12]])].concat();
    let tcp = |frames: &[&[u8]]| [&[0][..], &hello(1, WRITER), &frames.concat()].concat();
    let shm = |frames: &[&[u8]]| [&[1][..], &hello(2, WRITER), &frames.concat()].concat();
    vec![
        tcp(&[&data, &more]),
        tcp(&[&asked, &cancel, &fence, &data]),
        tcp(&[&cancel, &other]),
        shm(&[&shared, &fence]),
        shm(&[&map, &check, &shared, &cancel]),
        [&[0][..], &hello(1, ("other", 3)), &data].concat(),
    ]
}

pub(super) fn reply_seeds() -> Vec<Vec<u8>> {
    let part = [0; 12];
    let replies = [
        frame(64, &[&2u16.to_be_bytes()]),
        frame(65, &[&[1], &[0; 8]]),
        frame(65, &[&[3, 5], b"other"]),
        frame(66, &[&part]),
        frame(67, &[&part, &[2], b"why"]),
        frame(68, &[]),
        frame(70, &[&part, &3u32.to_be_bytes()]),
        b"abc".to_vec(),
        frame(71, &[&[0; 24]]),
        frame(73, &[&[0; 29]]),
        frame(74, &[&[0; 10], &[1; 32]]),
        frame(75, &[&[0; 8], &[1], b"gone"]),
        frame(72, &[&[0; 8]]),
        frame(69, &[b"fault"]),
    ];
    let kinds = [TransportKind::Fake, TransportKind::Tcp, TransportKind::Shm];
    let descriptor = SegmentDescriptor {
        id: SegmentId(3),
        node: NodeId::new("decode-0").expect("a name"),
        generation: Generation(8),
        length: 1 << 30,
        transports: kinds.map(|kind| TransportAddress { kind, address: "10.0.0.1:77".into() }).into(),
    };
    vec![[&[0][..], &replies.concat()].concat(), [&[1][..], &descriptor.encode()].concat()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kinds of what the owner sends for a seed.
    fn replies(seed: usize) -> Vec<u8> {
        let seeds = frame_seeds();
        let (kind, bytes) = choice(&seeds[seed], KINDS.len());
        let mut replies = &Owner::default().serve(KINDS[kind], bytes)[..];
        let mut kinds = Vec::new();
        while let Some((prefix, rest)) = replies.split_first_chunk::<8>() {
            let len = u32::from_be_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
            let (body, rest) = rest.split_at(len);
            // PAYLOAD is followed by so many bytes.
            let payload =
                if prefix[0] == 70 { u32::from_be_bytes([body[12], body[13], body[14], body[15]]) } else { 0 };
            replies = &rest[payload as usize..];
            kinds.push(prefix[0]);
        }
        kinds
    }

    #[test]
    fn transfer_frame_seeds_are_served_by_the_owner() {
        const WELCOME: u8 = 64;
        const ACK: u8 = 66;
        const REFUSE: u8 = 67;
        const FAULT: u8 = 69;
        const PAYLOAD: u8 = 70;
        const MAPPED: u8 = 71;
        assert_eq!(replies(0), [WELCOME, ACK, ACK]);
        assert_eq!(replies(1), [WELCOME, PAYLOAD, ACK, REFUSE]);
        assert_eq!(replies(2), [WELCOME, FAULT]);
        assert_eq!(replies(3), [WELCOME, ACK]);
        assert_eq!(replies(4), [WELCOME, MAPPED, ACK, ACK]);
        assert_eq!(replies(5), [WELCOME, REFUSE]);
    }
}
