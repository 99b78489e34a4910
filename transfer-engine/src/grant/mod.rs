//! Grants: who may write where, until when; and what has landed under them.

mod table;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use baton_memory::MemoryRegion;
use baton_types::{GrantId, NodeId, NodeStart};
use tokio::sync::mpsc;

pub(crate) use table::GrantTable;

use crate::error::{Refusal, RefusalReason as Reason};
use crate::fence_guard::FenceGuard;
use crate::{SegmentId, TransferError};

/// Most ranges of one grant, after neighbours are joined.
const MAX_RANGES: usize = 1 << 20;
/// Most batches under one grant: the owner remembers each, so that a part that is sent twice counts
/// once.
const MAX_BATCHES: usize = 1 << 16;
/// Most parts of a batch. The writer makes parts as large as that needs.
pub(crate) const MAX_PARTS: u32 = 1 << 16;
/// Most parts under one grant that have landed while their batches are not complete.
const MAX_OPEN_PARTS: usize = 1 << 17;

/// What a grant allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To write.
    Write,
    /// To read: a lease.
    Read,
}

/// A right to write, or to read, given by the owner of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantSpec {
    /// Its name, unique within the owner's generation.
    pub id: GrantId,
    /// The segment.
    pub segment: SegmentId,
    /// Byte ranges of the segment that it is for.
    pub ranges: Vec<Range<u64>>,
    /// The writer that has it; `None`: any that knows the id.
    pub writer: Option<NodeStart>,
    /// When it ends by itself.
    pub expires: Instant,
}

/// What an owner of memory hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// Every byte of a batch is visible here. Exactly once per batch.
    Batch {
        /// The grant.
        grant: GrantId,
        /// As the writer gave it.
        tag: u64,
        /// Bytes of the batch.
        bytes: u64,
        /// The writer.
        from: NodeId,
    },
    /// A grant's time was over: it has ended, and nothing lands under it any more.
    GrantExpired {
        /// The grant.
        grant: GrantId,
    },
}

/// Yields what arrives, in the order of completion.
///
/// While it is full, trailers of further batches wait on their connections: writers see slow
/// completions, and failures once their progress timeout has passed. Nothing else waits. Revoking a
/// grant never does, so the reader of arrivals may wait for a fence in between. Dropping the
/// receiver turns notifications off; writes still complete.
#[derive(Debug)]
pub struct ArrivalReceiver(mpsc::Receiver<Arrival>);

impl ArrivalReceiver {
    /// One that never yields anything.
    pub fn empty() -> Self {
        Self(mpsc::channel(1).1)
    }

    /// The next arrival; `None` when the engine is gone.
    pub async fn recv(&mut self) -> Option<Arrival> {
        self.0.recv().await
    }

    /// The next arrival, if there is one already.
    pub fn try_recv(&mut self) -> Option<Arrival> {
        self.0.try_recv().ok()
    }
}

/// A batch of a writer; a retry has the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct BatchKey {
    pub(crate) writer: NodeStart,
    pub(crate) batch: u64,
}

/// Destination of some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemoteSpan {
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// The trailer of one part of a batch: what must have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) part: u32,
    pub(crate) parts: u32,
    pub(crate) bytes: u64,
    pub(crate) tag: u64,
}

/// What to do with bytes that may land.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Put them where they belong.
    Land,
    /// They have landed before: drop them.
    Duplicate,
}

enum Progress {
    /// Parts that have landed, and their bytes.
    Open(HashSet<u32>, u64),
    Complete,
    Cancelled,
}

/// A live grant.
pub(crate) struct Grant {
    pub(crate) id: GrantId,
    pub(crate) region: Arc<MemoryRegion>,
    /// Closed by the fence. A task that writes into the ranges holds a pass.
    pub(crate) fence: FenceGuard,
    segment: SegmentId,
    access: Access,
    /// Sorted, disjoint, not touching.
    ranges: Vec<Range<u64>>,
    writer: Option<NodeStart>,
    expires: Instant,
    batches: Mutex<LandedBatches>,
}

/// What has arrived under a grant that has ended.
struct Arrived(HashMap<BatchKey, Progress>);

impl Arrived {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn contains(&self, key: &BatchKey) -> bool {
        matches!(self.0.get(key), Some(Progress::Complete))
    }
}

/// What has landed under a grant.
#[derive(Default)]
struct LandedBatches {
    batches: HashMap<BatchKey, Progress>,
    /// Parts that have landed of batches that are not complete.
    open_parts: usize,
}

impl Grant {
    fn new(spec: GrantSpec, access: Access, region: Arc<MemoryRegion>) -> Result<Self, TransferError> {
        Ok(Self {
            id: spec.id,
            fence: FenceGuard::default(),
            segment: spec.segment,
            access,
            ranges: join_ranges(spec.ranges, region.len() as u64)?,
            region,
            writer: spec.writer,
            expires: spec.expires,
            batches: Mutex::default(),
        })
    }

    /// Whether these spans of this part may land.
    pub(crate) fn admit(
        &self,
        key: &BatchKey,
        part: u32,
        segment: SegmentId,
        spans: &[RemoteSpan],
        now: Instant,
    ) -> Result<Admission, Refusal> {
        if self.is_complete(key) {
            return Ok(Admission::Duplicate);
        }
        self.check(Access::Write, &key.writer, segment, now)?;
        self.check_ranges(spans)?;
        match self.batches().batches.get(key) {
            None => Ok(Admission::Land),
            Some(Progress::Open(landed, _)) if !landed.contains(&part) => Ok(Admission::Land),
            Some(Progress::Open(..) | Progress::Complete) => Ok(Admission::Duplicate),
            Some(Progress::Cancelled) => Err(cancelled()),
        }
    }

    /// Whether a batch has arrived, all of it: that stays true when the grant ends, and a writer
    /// that missed the answer is told so.
    fn is_complete(&self, key: &BatchKey) -> bool {
        matches!(self.batches().batches.get(key), Some(Progress::Complete))
    }

    /// For when the grant is fenced: no part comes any more.
    fn forget_incomplete(&self) {
        self.batches().batches.retain(|_, progress| matches!(progress, Progress::Complete));
    }

    /// The batches that have arrived.
    fn take_complete(&self) -> Arrived {
        Arrived(std::mem::take(&mut self.batches().batches))
    }

    /// Takes account of a part that has landed. Returns the bytes of the batch if this part
    /// completes it.
    pub(crate) fn commit(
        &self,
        key: &BatchKey,
        segment: SegmentId,
        trailer: &Trailer,
        now: Instant,
    ) -> Result<Option<u64>, Refusal> {
        self.check(Access::Write, &key.writer, segment, now)?;
        let mut books = self.batches();
        if trailer.parts > MAX_PARTS || books.open_parts >= MAX_OPEN_PARTS {
            let message = format!("a batch has at most {MAX_PARTS} parts, all under a grant {MAX_OPEN_PARTS} at once");
            return Err(Refusal::new(Reason::TooManyBatches, message));
        }
        let LandedBatches { batches, open_parts } = &mut *books;
        if !batches.contains_key(key) && batches.len() >= MAX_BATCHES {
            return Err(Refusal::new(Reason::TooManyBatches, format!("grant {} has had {MAX_BATCHES}", self.id.0)));
        }
        let progress = batches.entry(key.clone()).or_insert_with(|| Progress::Open(HashSet::new(), 0));
        let (landed, bytes) = match progress {
            Progress::Open(landed, bytes) => (landed, bytes),
            Progress::Complete => return Ok(None),
            Progress::Cancelled => return Err(cancelled()),
        };
        if landed.insert(trailer.part) {
            *bytes = bytes.saturating_add(trailer.bytes);
            *open_parts += 1;
        }
        if landed.len() < trailer.parts as usize {
            return Ok(None);
        }
        let bytes = *bytes;
        *open_parts -= landed.len();
        *progress = Progress::Complete;
        Ok(Some(bytes))
    }

    /// The writer gave the batch up.
    pub(crate) fn cancel(&self, key: &BatchKey) {
        let theirs = self.writer.as_ref().is_none_or(|granted| *granted == key.writer);
        let mut books = self.batches();
        if theirs && (books.batches.contains_key(key) || books.batches.len() < MAX_BATCHES) {
            let before = books.batches.insert(key.clone(), Progress::Cancelled);
            if let Some(Progress::Open(landed, _)) = before {
                books.open_parts -= landed.len();
            }
        }
    }

    /// Whether these spans may be read.
    pub(crate) fn admit_read(
        &self,
        reader: &NodeStart,
        segment: SegmentId,
        spans: &[RemoteSpan],
        now: Instant,
    ) -> Result<(), Refusal> {
        self.check(Access::Read, reader, segment, now)?;
        self.check_ranges(spans)
    }

    #[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Sorted, disjoint, not touching.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
    pub(crate) fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    fn check_ranges(&self, spans: &[RemoteSpan]) -> Result<(), Refusal> {
        let Some(span) = spans.iter().find(|span| !self.covers(span)) else { return Ok(()) };
        let message = format!("{} bytes at {} are not granted by grant {}", span.len, span.offset, self.id.0);
        Err(Refusal::new(Reason::OutOfRange, message))
    }

    /// Whether it is this writer's, for this segment, for that, and live.
    pub(crate) fn check(
        &self,
        access: Access,
        writer: &NodeStart,
        segment: SegmentId,
        now: Instant,
    ) -> Result<(), Refusal> {
        let id = self.id.0;
        if self.fence.is_closed() || now >= self.expires {
            let reason = if now >= self.expires { Reason::Expired } else { Reason::Revoked };
            return Err(ended(self.id, reason));
        }
        if self.writer.as_ref().is_some_and(|granted| granted != writer) {
            let message = format!("grant {id} is not for node {} generation {}", writer.node, writer.generation);
            return Err(Refusal::new(Reason::WrongWriter, message));
        }
        if access != self.access {
            let message = format!("grant {id} is to {:?}, not to {access:?}", self.access).to_lowercase();
            return Err(Refusal::new(Reason::WrongAccess, message));
        }
        if segment != self.segment {
            let message = format!("grant {id} is for segment {}, not {segment}", self.segment);
            return Err(Refusal::new(Reason::WrongSegment, message));
        }
        Ok(())
    }

    fn covers(&self, span: &RemoteSpan) -> bool {
        covers(&self.ranges, span.offset, span.len.into())
    }

    fn batches(&self) -> MutexGuard<'_, LandedBatches> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether one of the ranges, which are sorted and do not touch, has all these bytes.
pub(crate) fn covers(ranges: &[Range<u64>], offset: u64, len: u64) -> bool {
    let Some(end) = offset.checked_add(len) else { return false };
    let after = ranges.partition_point(|range| range.start <= offset);
    after > 0 && end <= ranges[after - 1].end
}

fn cancelled() -> Refusal {
    Refusal::new(Reason::BatchCancelled, "its writer cancelled the batch")
}

fn ended(id: GrantId, reason: Reason) -> Refusal {
    let message = match reason {
        Reason::Revoked => format!("grant {} was revoked", id.0),
        Reason::Expired => format!("the time of grant {} is over", id.0),
        _ => format!("grant {} is not known here", id.0),
    };
    Refusal::new(reason, message)
}

fn join_ranges(mut ranges: Vec<Range<u64>>, segment_len: u64) -> Result<Vec<Range<u64>>, TransferError> {
    let invalid = |problem| TransferError::invalid("grant.ranges", problem);
    if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > segment_len) {
        return Err(invalid(format!("{range:?} does not lie in a segment of {segment_len} bytes")));
    }
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    if joined.len() > MAX_RANGES {
        Err(invalid(format!("{} ranges, but at most {MAX_RANGES} are taken", joined.len())))
    } else {
        Ok(joined)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::Generation;
    use proptest::prelude::*;

    use super::*;

    pub(super) fn spec(ranges: Vec<Range<u64>>) -> GrantSpec {
        let expires = Instant::now() + Duration::from_secs(60);
        GrantSpec { id: GrantId(1), segment: SegmentId(3), ranges, writer: Some(start("w", 5)), expires }
    }

    fn start(name: &str, generation: u64) -> NodeStart {
        NodeStart { node: NodeId::new(name).unwrap(), generation: Generation(generation) }
    }

    fn key(name: &str, generation: u64) -> BatchKey {
        BatchKey { writer: start(name, generation), batch: 1 }
    }

    fn grant(spec: GrantSpec) -> Grant {
        Grant::new(spec, Access::Write, Arc::new(MemoryRegion::allocate(200).unwrap())).unwrap()
    }

    pub(super) fn reason<T: std::fmt::Debug>(result: Result<T, Refusal>) -> Reason {
        result.unwrap_err().reason
    }

    proptest! {
        #[test]
        fn grant_covers_a_span_only_if_it_covers_each_byte(
            ranges in prop::collection::vec((0u64..100, 0u64..30), 0..8), offset in 0u64..120, len in 1u32..40,
        ) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| start..start + len).collect();
            let naive = (offset..offset + u64::from(len)).all(|byte| ranges.iter().any(|range| range.contains(&byte)));
            prop_assert_eq!(grant(spec(ranges)).covers(&RemoteSpan { offset, len }), naive);
        }
    }

    #[test]
    fn each_grant_violation_has_its_refusal_reason() {
        let grant = grant(spec(vec![10..20]));
        let now = Instant::now();
        let inside = [RemoteSpan { offset: 10, len: 10 }];
        let segment = SegmentId(3);
        assert_eq!(grant.admit(&key("w", 5), 0, segment, &inside, now), Ok(Admission::Land));
        assert_eq!(reason(grant.admit(&key("x", 5), 0, segment, &inside, now)), Reason::WrongWriter);
        assert_eq!(reason(grant.admit(&key("w", 4), 0, segment, &inside, now)), Reason::WrongWriter);
        assert_eq!(reason(grant.admit(&key("w", 5), 0, SegmentId(4), &inside, now)), Reason::WrongSegment);
        for (offset, len) in [(9, 2), (19, 2), (u64::MAX, 1)] {
            let outside = [inside[0], RemoteSpan { offset, len }];
            assert_eq!(reason(grant.admit(&key("w", 5), 0, segment, &outside, now)), Reason::OutOfRange);
        }
        let later = now + Duration::from_secs(61);
        assert_eq!(reason(grant.admit(&key("w", 5), 0, segment, &inside, later)), Reason::Expired);
        grant.fence.close();
        assert_eq!(reason(grant.admit(&key("w", 5), 0, segment, &inside, now)), Reason::Revoked);
    }

    #[test]
    fn batch_parts_count_once_and_the_batch_completes_once() {
        let grant = grant(spec(vec![0..100]));
        let now = Instant::now();
        let segment = SegmentId(3);
        let key = key("w", 5);
        let commit = |part| grant.commit(&key, segment, &Trailer { part, parts: 2, bytes: 9, tag: 0 }, now);
        assert_eq!([commit(0), commit(0), commit(1), commit(1), commit(0)], [None, None, Some(18), None, None].map(Ok));
        assert_eq!(grant.admit(&key, 1, segment, &[], now), Ok(Admission::Duplicate));
        let other = BatchKey { batch: 2, ..key.clone() };
        grant.cancel(&other);
        assert_eq!(reason(grant.admit(&other, 0, segment, &[], now)), Reason::BatchCancelled);
    }
}
