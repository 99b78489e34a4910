//! A batch of writes: spans in, one result out.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::fence_guard::FenceGuard;
use crate::{TransferError, TransportKind};

/// Bytes to move from the local to the remote segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanPair {
    /// First byte in the local segment.
    pub local_offset: u64,
    /// First byte in the remote segment.
    pub remote_offset: u64,
    /// Bytes.
    pub len: u64,
}

impl SpanPair {
    fn turned(self) -> Self {
        Self { local_offset: self.remote_offset, remote_offset: self.local_offset, len: self.len }
    }
}

/// How a batch is carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchOptions {
    /// The batch fails if it is not complete by then.
    pub deadline: Instant,
    /// Travels with the batch to [`Arrival::Batch`](crate::Arrival::Batch).
    pub tag: u64,
}

impl BatchOptions {
    /// A batch with tag 0.
    pub fn new(deadline: Instant) -> Self {
        Self { deadline, tag: 0 }
    }

    /// With a tag.
    pub fn tag(self, tag: u64) -> Self {
        Self { tag, ..self }
    }
}

/// Which way a batch goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// From the local to the remote segment.
    Write,
    /// From the remote to the local segment.
    Read,
}

/// A complete batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchReport {
    /// Bytes written, each counted once however often it was sent.
    pub bytes: u64,
    /// Spans after neighbours were joined.
    pub spans: usize,
    /// What carried them.
    pub transport: TransportKind,
    /// When the batch was given to the engine.
    pub started: Instant,
    /// When its last byte was acknowledged.
    pub completed: Instant,
}

/// A batch under way. Resolves once its local spans are not read any more, whatever the result.
///
/// Dropping it cancels the batch too, but then nothing tells when the local spans are free.
#[derive(Debug)]
#[must_use = "dropping a batch cancels it"]
pub struct Batch {
    result: oneshot::Receiver<Result<BatchReport, TransferError>>,
    source: Arc<FenceGuard>,
}

impl Batch {
    pub(crate) fn new(result: oneshot::Receiver<Result<BatchReport, TransferError>>, source: Arc<FenceGuard>) -> Self {
        Self { result, source }
    }

    /// A batch that failed before it began.
    pub(crate) fn failed(error: TransferError) -> Self {
        let (sender, result) = oneshot::channel();
        // The receiver is right here.
        let _ = sender.send(Err(error));
        Self { result, source: Arc::default() }
    }

    /// Ends the batch early. It still resolves, at once: to [`TransferError::Cancelled`] unless it
    /// was complete before.
    ///
    /// What has left by then may land, even as a whole, until the owner ends the grant; what has
    /// not, does not. The same holds after a deadline.
    pub fn cancel(&self) {
        self.source.close();
    }

    /// Cancels this batch from elsewhere.
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle(Arc::clone(&self.source))
    }
}

impl Future for Batch {
    type Output = Result<BatchReport, TransferError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // The sender is lost only if the runtime dropped the batch's task.
        Pin::new(&mut self.result).poll(cx).map(|result| result.unwrap_or(Err(TransferError::Closed)))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.source.close();
    }
}

/// Cancels a batch from elsewhere. Cheap to clone; outliving the batch does no harm.
#[derive(Debug, Clone)]
pub struct CancelHandle(Arc<FenceGuard>);

impl CancelHandle {
    /// As [`Batch::cancel`].
    pub fn cancel(&self) {
        self.0.close();
    }
}

/// Checks spans against both segments, sorts them by where they go to and joins neighbours. Spans
/// of no bytes are left out.
pub(crate) fn normalize(
    op: Op,
    spans: Vec<SpanPair>,
    local_len: u64,
    remote_len: u64,
) -> Result<Vec<SpanPair>, TransferError> {
    match op {
        Op::Write => normalize_write(spans, local_len, remote_len),
        Op::Read => {
            for span in &spans {
                check_inside("local span", span.local_offset, span.len, local_len)?;
                check_inside("remote span", span.remote_offset, span.len, remote_len)?;
            }
            let turned = spans.into_iter().map(SpanPair::turned).collect();
            let joined = normalize_write(turned, remote_len, local_len)?;
            Ok(joined.into_iter().map(SpanPair::turned).collect())
        }
    }
}

fn normalize_write(mut spans: Vec<SpanPair>, local_len: u64, remote_len: u64) -> Result<Vec<SpanPair>, TransferError> {
    spans.retain(|span| span.len > 0);
    spans.sort_unstable_by_key(|span| span.remote_offset);
    let mut joined: Vec<SpanPair> = Vec::with_capacity(spans.len().min(1024));
    for span in spans {
        check_inside("local span", span.local_offset, span.len, local_len)?;
        check_inside("remote span", span.remote_offset, span.len, remote_len)?;
        let Some(last) = joined.last_mut() else {
            joined.push(span);
            continue;
        };
        if span.remote_offset < last.remote_offset + last.len {
            let a = last.remote_offset;
            let b = span.remote_offset;
            return Err(TransferError::invalid("spans", format!("those to offsets {a} and {b} overlap")));
        }
        let neighbours =
            (last.remote_offset + last.len, last.local_offset + last.len) == (span.remote_offset, span.local_offset);
        if neighbours { last.len += span.len } else { joined.push(span) }
    }
    Ok(joined)
}

fn check_inside(what: &'static str, offset: u64, len: u64, segment_len: u64) -> Result<(), TransferError> {
    match offset.checked_add(len) {
        Some(end) if end <= segment_len => Ok(()),
        _ => Err(TransferError::invalid(what, format!("{len} bytes at {offset} of a segment of {segment_len} bytes"))),
    }
}

/// Cuts spans into groups of at most `max_bytes` and `max_spans`, in order. No spans, no groups.
pub(crate) fn cut(spans: &[SpanPair], max_bytes: u64, max_spans: usize) -> Vec<Vec<SpanPair>> {
    let mut groups = Vec::new();
    let mut group = Vec::new();
    let mut room = max_bytes;
    for &span in spans {
        let mut rest = span;
        while rest.len > 0 {
            let piece = SpanPair { len: rest.len.min(room), ..rest };
            group.push(piece);
            room -= piece.len;
            rest = SpanPair {
                local_offset: rest.local_offset + piece.len,
                remote_offset: rest.remote_offset + piece.len,
                len: rest.len - piece.len,
            };
            if room == 0 || group.len() == max_spans {
                groups.push(std::mem::take(&mut group));
                room = max_bytes;
            }
        }
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

/// Bytes of all spans.
pub(crate) fn total(spans: &[SpanPair]) -> u64 {
    spans.iter().map(|span| span.len).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn span(local_offset: u64, remote_offset: u64, len: u64) -> SpanPair {
        SpanPair { local_offset, remote_offset, len }
    }

    /// The naive model: where each remote byte comes from.
    fn bytes(spans: &[SpanPair]) -> BTreeMap<u64, u64> {
        spans.iter().flat_map(|s| (0..s.len).map(move |i| (s.remote_offset + i, s.local_offset + i))).collect()
    }

    fn disjoint_spans() -> impl Strategy<Value = Vec<SpanPair>> {
        let gaps = prop::collection::vec((0u64..3, 0u64..9, 0u64..40), 0..30);
        let placed = gaps.prop_map(|gaps| {
            let mut at = 0;
            let place = |(gap, len, local): (u64, u64, u64)| {
                at += gap + len;
                // Half of them continue where the last one ended, so that there is something to
                // join.
                span(if local < 20 { at - len } else { local }, at - len, len)
            };
            gaps.into_iter().map(place).collect::<Vec<_>>()
        });
        placed.prop_shuffle()
    }

    proptest! {
        #[test]
        fn joined_and_split_spans_move_the_same_bytes(spans in disjoint_spans(), max_bytes in 1u64..20, max_spans in 1usize..5) {
            let joined = normalize(Op::Write, spans.clone(), 1000, 1000).unwrap();
            prop_assert_eq!(bytes(&joined), bytes(&spans));
            let touching = |w: &[SpanPair]| {
                w[0].remote_offset + w[0].len == w[1].remote_offset && w[0].local_offset + w[0].len == w[1].local_offset
            };
            prop_assert!(!joined.windows(2).any(touching), "{:?}", joined);
            let groups = cut(&joined, max_bytes, max_spans);
            prop_assert_eq!(bytes(&groups.concat()), bytes(&spans));
            for group in &groups {
                prop_assert!(total(group) <= max_bytes && group.len() <= max_spans && !group.is_empty());
            }
        }
    }

    #[test]
    fn spans_outside_the_segment_or_overlapping_are_refused() {
        let error = |spans: &[SpanPair]| normalize(Op::Write, spans.to_vec(), 100, 50).unwrap_err().to_string();
        assert_eq!(error(&[span(99, 0, 2)]), "local span: 2 bytes at 99 of a segment of 100 bytes");
        assert_eq!(error(&[span(0, 49, 2)]), "remote span: 2 bytes at 49 of a segment of 50 bytes");
        assert_eq!(
            error(&[span(u64::MAX, 0, 2)]),
            format!("local span: 2 bytes at {} of a segment of 100 bytes", u64::MAX)
        );
        assert_eq!(error(&[span(0, 10, 5), span(50, 14, 1)]), "spans: those to offsets 10 and 14 overlap");
    }

    #[tokio::test]
    async fn batch_whose_task_is_gone_resolves_as_closed() {
        let (sender, result) = oneshot::channel();
        drop(sender);
        assert_eq!(Batch::new(result, Arc::default()).await, Err(TransferError::Closed));
    }
}
