//! What an earlier process left.

use crate::StoreError;
use crate::files::Files;
use crate::header::{Header, Parsed};
use crate::layout::{Layout, PREAMBLE_BYTES};

/// Headers are read this many bytes at a time, or one at a time if that is more.
const READ_BYTES: usize = 1 << 20;

/// What opening a store found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovery {
    /// Records of before. Their payloads have not been looked at.
    pub records: u32,
    /// Slots with a header that was not whole, with a record of which there was a later one, or
    /// beyond the capacity.
    pub dropped: u32,
    /// Whether there were files of another fingerprint, other sizes or another version, that were
    /// emptied.
    pub reset: bool,
}

/// Headers that are whole, with their slots, in the order in which they were put; and how many
/// slots were used.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) records: Vec<(u32, Header)>,
    pub(crate) used: u32,
    pub(crate) dropped: u32,
    pub(crate) reset: bool,
}

/// Reads the headers, and makes the files fit the layout: what is beyond the capacity is cut off.
pub(crate) fn recover(files: &Files) -> Result<Found, StoreError> {
    let reset = files.reset_if_foreign()?;
    let layout = &files.layout;
    let before = (files.headers_len()? - PREAMBLE_BYTES) / layout.header_bytes() as u64;
    let used = u32::try_from(before).unwrap_or(u32::MAX).min(layout.slots);
    files.set_lens(layout.header_offset(used), layout.payload_offset(used))?;
    let mut found = Found { used, reset, ..Found::default() };
    found.dropped = u32::try_from(before - u64::from(used)).unwrap_or(u32::MAX);
    let payloads_end = files.payloads_len()?;
    let per_read = (READ_BYTES / layout.header_bytes()).max(1) as u32;
    let mut bytes = vec![0; per_read as usize * layout.header_bytes()];
    for first in (0..used).step_by(per_read as usize) {
        let bytes = &mut bytes[..(used - first).min(per_read) as usize * layout.header_bytes()];
        files.read_headers(first, bytes)?;
        let slots = (first..).zip(bytes.chunks_exact(layout.header_bytes()));
        for (slot, parsed) in slots.map(|(slot, bytes)| (slot, files.sealer.parse(layout, slot, bytes))) {
            match parsed {
                Parsed::Record(header) if ends(layout, slot) <= payloads_end => found.records.push((slot, header)),
                Parsed::Record(_) | Parsed::Torn => found.dropped += 1,
                Parsed::Empty => {}
            }
        }
    }
    found.records.sort_unstable_by_key(|(_, header)| header.sequence);
    Ok(found)
}

/// Where a slot's record ends.
fn ends(layout: &Layout, slot: u32) -> u64 {
    layout.payload_offset(slot) + layout.record_bytes()
}
