//! Payload, straight from and into registered memory.

#![allow(unsafe_code)] // scatter and gather lists that point into registered memory; see the SAFETY notes

use std::io;

use baton_memory::MemoryRegion;

use super::stream::{NO_PIECE, Stream};

/// Pieces of memory handed to the kernel at once. Its own limit is 1024.
const MAX_PIECES: usize = 256;

/// A place in a list of spans of a region.
#[derive(Debug, Clone)]
pub(crate) struct Cursor {
    /// First byte and length; never empty ones.
    spans: Vec<(usize, usize)>,
    next: usize,
    /// Bytes of the next span that are done.
    done: usize,
    /// Bytes that are not done.
    remaining: usize,
}

impl Cursor {
    /// At the start of `(offset, length)` spans, each inside the region.
    ///
    /// # Panics
    /// If one is not: a bug, they have been checked.
    pub(crate) fn new(region: &MemoryRegion, spans: impl Iterator<Item = (usize, usize)>) -> Self {
        let spans: Vec<_> = spans.filter(|(_, len)| *len > 0).collect();
        for &(offset, len) in &spans {
            assert!(region.contains(&(offset..offset + len)), "{len} bytes at {offset} of {}", region.len());
        }
        let remaining = spans.iter().map(|(_, len)| len).sum();
        Self { spans, next: 0, done: 0, remaining }
    }

    pub(crate) fn remaining(&self) -> usize {
        self.remaining
    }

    pub(crate) fn is_done(&self) -> bool {
        self.next == self.spans.len()
    }

    /// Moves on, at most to the end; returns how many of the bytes were beyond it.
    pub(crate) fn advance(&mut self, mut bytes: usize) -> usize {
        while bytes > 0 && !self.is_done() {
            let step = bytes.min(self.spans[self.next].1 - self.done);
            self.done += step;
            self.remaining -= step;
            bytes -= step;
            if self.done == self.spans[self.next].1 {
                self.next += 1;
                self.done = 0;
            }
        }
        bytes
    }

    /// What is left, as pieces.
    fn pieces(&self) -> impl Iterator<Item = (usize, usize)> {
        let spans = self.spans[self.next..].iter().copied().enumerate();
        spans.map(|(i, (offset, len))| if i == 0 { (offset + self.done, len - self.done) } else { (offset, len) })
    }

    /// A copy of what is left.
    ///
    /// # Safety
    /// As for [`MemoryRegion::slice`]: nothing may write the spans meanwhile.
    unsafe fn copy(&self, region: &MemoryRegion) -> Vec<u8> {
        let mut copy = Vec::with_capacity(self.remaining());
        for (offset, len) in self.pieces() {
            // SAFETY: passed on to the caller.
            copy.extend_from_slice(unsafe { region.slice(offset..offset + len) });
        }
        copy
    }
}

/// Receives what is there into what is left of the spans, until `end` bytes of them are left. What
/// follows them goes into `ahead`. Does not wait; moves the cursor on. Returns how many bytes went
/// to the spans, and how many ahead; 0 and 0: the peer has closed.
///
/// The caller holds a pass of the fence guard of the spans: nothing else may use them.
pub(crate) fn try_receive(
    stream: &Stream,
    region: &MemoryRegion,
    cursor: &mut Cursor,
    end: usize,
    ahead: &mut [u8],
) -> io::Result<(usize, usize)> {
    let wanted = cursor.remaining() - end;
    let mut pieces = [NO_PIECE; MAX_PIECES];
    let mut count = 0;
    let mut room = wanted;
    for (slot, (offset, len)) in pieces.iter_mut().zip(cursor.pieces()) {
        let len = len.min(room);
        if len == 0 {
            break;
        }
        *slot = piece(region, offset, len);
        room -= len;
        count += 1;
    }
    if room == 0
        && let Some(slot) = pieces.get_mut(count)
    {
        *slot = libc::iovec { iov_base: ahead.as_mut_ptr().cast(), iov_len: ahead.len() };
        count += 1;
    }
    // SAFETY: each piece lies inside the region (checked by the cursor), which outlives this call,
    // the last perhaps in `ahead`, borrowed for it. The kernel writes plain bytes, valid in any
    // region; no reference to them is made here, and the caller's pass keeps others off.
    let received = unsafe { stream.try_receive(&mut pieces[..count]) }?;
    let landed = received.min(wanted);
    cursor.advance(landed);
    Ok((landed, received - landed))
}

/// Copies bytes that were received before into the spans, and moves the cursor on.
///
/// The caller holds a pass of the fence guard of the spans: nothing else may use them.
///
/// # Panics
/// If they are more than what is left of the spans.
pub(crate) fn put(region: &MemoryRegion, cursor: &mut Cursor, mut bytes: &[u8]) {
    assert!(bytes.len() <= cursor.remaining());
    while !bytes.is_empty() {
        let Some((offset, len)) = cursor.pieces().next() else { return };
        let (now, later) = bytes.split_at(len.min(bytes.len()));
        // SAFETY: the caller's pass keeps others off; `slice_mut` checks that the span lies inside.
        unsafe { region.slice_mut(offset..offset + now.len()) }.copy_from_slice(now);
        cursor.advance(now.len());
        bytes = later;
    }
}

fn piece(region: &MemoryRegion, offset: usize, len: usize) -> libc::iovec {
    // SAFETY: the span lies inside the region's one mapping (checked by the cursor).
    libc::iovec { iov_base: unsafe { region.as_ptr().add(offset) }.cast(), iov_len: len }
}

/// A frame on its way out: head, payload from a region, and what follows it.
pub(crate) struct Outgoing<'a> {
    pub(crate) head: &'a [u8],
    pub(crate) region: &'a MemoryRegion,
    pub(crate) payload: Cursor,
    pub(crate) tail: &'a [u8],
}

impl Outgoing<'_> {
    pub(crate) fn is_done(&self) -> bool {
        self.head.is_empty() && self.payload.is_done() && self.tail.is_empty()
    }

    pub(crate) fn payload_is_done(&self) -> bool {
        self.head.is_empty() && self.payload.is_done()
    }

    /// Sends as much as the socket takes, without waiting, and moves on.
    ///
    /// The caller holds a pass of the fence guard of the payload: nothing writes it meanwhile.
    pub(crate) fn try_send(&mut self, stream: &Stream) -> io::Result<usize> {
        let mut pieces = [NO_PIECE; MAX_PIECES];
        let count = self.fill(&mut pieces);
        // SAFETY: the pieces lie inside head, region (checked by the cursor) and tail, all of which
        // outlive this call; the kernel only reads them.
        let sent = unsafe { stream.try_send(&mut pieces[..count], None) }?;
        self.advance(sent);
        Ok(sent)
    }

    fn fill(&self, pieces: &mut [libc::iovec; MAX_PIECES]) -> usize {
        let bytes = |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let head = Some(bytes(self.head)).filter(|_| !self.head.is_empty());
        let payload = self.payload.pieces().map(|(offset, len)| piece(self.region, offset, len));
        let tail = Some(bytes(self.tail)).filter(|_| !self.tail.is_empty());
        let mut count = 0;
        for (slot, piece) in pieces.iter_mut().zip(head.into_iter().chain(payload).chain(tail)) {
            *slot = piece;
            count += 1;
        }
        count
    }

    fn advance(&mut self, sent: usize) {
        let head = sent.min(self.head.len());
        self.head = &self.head[head..];
        let beyond = self.payload.advance(sent - head);
        self.tail = &self.tail[beyond..];
    }

    /// A copy of what is left of head and payload.
    ///
    /// The caller holds a pass of the fence guard of the payload.
    pub(crate) fn copy_rest(&self) -> Vec<u8> {
        // SAFETY: the batch's source is left unchanged until its fence guard is drained, and the
        // caller holds a pass of it.
        let payload = unsafe { self.payload.copy(self.region) };
        [self.head, &payload].concat()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn payload_cursor_visits_each_byte_once(spans in prop::collection::vec((0usize..90, 0usize..10), 0..12), steps in prop::collection::vec(1usize..25, 1..60)) {
            let region = MemoryRegion::allocate(100).unwrap();
            let all: Vec<usize> = spans.iter().flat_map(|&(offset, len)| offset..offset + len).collect();
            let mut cursor = Cursor::new(&region, spans.into_iter());
            let mut seen = 0;
            for step in steps {
                let left: Vec<usize> = cursor.pieces().flat_map(|(offset, len)| offset..offset + len).collect();
                prop_assert_eq!(&left[..], &all[seen..]);
                prop_assert_eq!((cursor.remaining(), cursor.is_done()), (left.len(), left.is_empty()));
                prop_assert_eq!(cursor.advance(step), step.saturating_sub(left.len()));
                seen = (seen + step).min(all.len());
            }
        }
    }

    #[test]
    #[should_panic(expected = "2 bytes at 99 of 100")]
    fn payload_cursor_outside_its_region_panics() {
        let region = MemoryRegion::allocate(100).unwrap();
        let _ = Cursor::new(&region, [(0, 100), (99, 2)].into_iter());
    }
}
