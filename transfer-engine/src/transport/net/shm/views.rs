//! The owner's end: the writer's memory, mapped read-only.

#![allow(unsafe_code)] // one copy between mappings; see the SAFETY note

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use baton_memory::{MemoryRegion, SharedView};
use baton_types::NodeStart;

use super::copy::copy_out;
use super::slots::is_wanted;
use crate::SegmentId;
use crate::engine::MAX_SEGMENTS;
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{CopySpan, Place};

/// Most segments of a writer.
const MAX_SOURCES: usize = MAX_SEGMENTS;
/// Largest page of slots that is mapped, bytes.
const MAX_SLOT_BYTES: u64 = 1 << 20;

/// Segments of all writers that are mapped: the lanes of a writer share a mapping, and with it its
/// page tables.
#[derive(Default)]
pub(crate) struct ViewCache(Mutex<HashMap<(NodeStart, SegmentId), Weak<SharedView>>>);

impl ViewCache {
    fn map(
        &self,
        writer: &NodeStart,
        source: SegmentId,
        bytes: u64,
        file: impl AsFd,
    ) -> Result<Arc<SharedView>, String> {
        let mut views = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        views.retain(|_, view| view.strong_count() > 0);
        let key = (writer.clone(), source);
        if let Some(view) = views.get(&key).and_then(Weak::upgrade).filter(|view| view.len() as u64 == bytes) {
            return Ok(view);
        }
        let view = Arc::new(SharedView::map(file.as_fd(), bytes).map_err(|error| error.to_string())?);
        views.insert(key, Arc::downgrade(&view));
        Ok(view)
    }
}

/// What the writer of one lane has passed.
#[derive(Default)]
pub(crate) struct Views {
    slots: Option<SharedView>,
    sources: HashMap<SegmentId, Arc<SharedView>>,
}

impl Views {
    pub(crate) fn on_slots(&mut self, stream: &Stream, bytes: u64) -> Result<(), String> {
        let file = stream.take_file().ok_or("SLOTS without a file")?;
        if self.slots.is_some() || bytes > MAX_SLOT_BYTES {
            return Err(format!("SLOTS of {bytes} bytes, or for the second time"));
        }
        self.slots = Some(SharedView::map(file.as_fd(), bytes).map_err(|error| format!("slots: {error}"))?);
        Ok(())
    }

    pub(crate) fn on_source(
        &mut self,
        stream: &Stream,
        cache: &ViewCache,
        writer: &NodeStart,
        source: SegmentId,
        bytes: u64,
    ) -> Result<(), String> {
        let file = stream.take_file().ok_or("SOURCE without a file")?;
        if self.sources.len() >= MAX_SOURCES || self.sources.contains_key(&source) {
            return Err(format!("segment {source} for the second time, or one of more than {MAX_SOURCES}"));
        }
        let view = cache.map(writer, source, bytes, file).map_err(|error| format!("segment {source}: {error}"))?;
        self.sources.insert(source, view);
        Ok(())
    }

    /// The writer's segment, if all spans lie inside.
    pub(crate) fn source(&self, source: SegmentId, spans: &[CopySpan]) -> Result<Arc<SharedView>, String> {
        let view =
            self.sources.get(&source).ok_or_else(|| format!("COPY from segment {source}, which was not passed"))?;
        let inside =
            |span: &CopySpan| span.from.checked_add(span.to.len.into()).is_some_and(|end| end <= view.len() as u64);
        match spans.iter().find(|span| !inside(span)) {
            None => Ok(Arc::clone(view)),
            Some(span) => {
                let len = span.to.len;
                let from = span.from;
                Err(format!("COPY of {len} bytes at {from} of segment {source}, which has {} bytes", view.len()))
            }
        }
    }

    /// Whether the writer still wants a part. What was copied for it before the call is whole, if
    /// so.
    pub(crate) fn is_wanted(&self, place: Place) -> bool {
        self.slots.as_ref().is_some_and(|page| is_wanted(page, place))
    }
}

/// Copies bytes of a view into a region.
///
/// The caller holds a pass of the fence guard of the destination: nothing else uses it.
///
/// # Panics
/// If either lies outside: a bug, they have been checked.
pub(crate) fn copy_in(view: &SharedView, from: usize, region: &MemoryRegion, to: usize, len: usize) {
    assert!(from.checked_add(len).is_some_and(|end| end <= view.len()) && region.contains(&(to..to + len)));
    // SAFETY: both ranges lie inside their mappings (asserted), which the borrows keep; a view is
    // never the region's own mapping; the caller keeps others off.
    unsafe { copy_out(view.as_ptr().add(from), region.as_ptr().add(to), len) };
}
