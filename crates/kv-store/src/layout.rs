//! Sizes, and where in the files things lie.

use crate::StoreError;

/// Slots start at multiples of it: a page, and a sector of any disk.
const ALIGN: u64 = 4096;
/// Length of what precedes the headers, bytes.
pub(crate) const PREAMBLE_BYTES: u64 = ALIGN;
/// Of a header, what is not checksums, bytes.
pub(crate) const HEADER_FIXED_BYTES: usize = 64;
const MAX_PARTS: u32 = 1024;
/// Every offset stays far below what a file can have.
const MAX_CAPACITY_BYTES: u64 = 1 << 60;

/// What a store keeps, and how much of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// Hash of everything that decides what a record's bytes mean: model, dtype, block size, slice.
    /// Records of another are discarded.
    pub fingerprint: [u8; 16],
    /// Parts of a record, one per layer: 1 to 1024.
    pub parts: u32,
    /// Length of a part, bytes: at least 1. Multiples of 4096 are fastest.
    pub part_bytes: u32,
    /// Most that the files may have, with headers and padding, bytes. A file system that may fill
    /// up for others needs room beside it.
    pub capacity_bytes: u64,
}

impl StoreOptions {
    /// Length of a record's payload, bytes.
    pub const fn record_bytes(&self) -> u64 {
        self.parts as u64 * self.part_bytes as u64
    }
}

/// Checked options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) fingerprint: [u8; 16],
    pub(crate) parts: u32,
    pub(crate) part_bytes: u32,
    /// Slots that the capacity has room for, at least 1.
    pub(crate) slots: u32,
}

impl Layout {
    pub(crate) fn new(options: &StoreOptions) -> Result<Self, StoreError> {
        let StoreOptions { fingerprint, parts, part_bytes, capacity_bytes } = *options;
        if !(1..=MAX_PARTS).contains(&parts) {
            return Err(StoreError::invalid("parts", format!("{parts} is not 1 to {MAX_PARTS}")));
        }
        if part_bytes == 0 {
            return Err(StoreError::invalid("part_bytes", "0 is not at least 1"));
        }
        let mut layout = Self { fingerprint, parts, part_bytes, slots: 0 };
        let per_slot = layout.slot_bytes() + layout.header_bytes() as u64;
        if !(PREAMBLE_BYTES + per_slot..=MAX_CAPACITY_BYTES).contains(&capacity_bytes) {
            let least = PREAMBLE_BYTES + per_slot;
            let problem = format!("{capacity_bytes} is not {least} (one record) to {MAX_CAPACITY_BYTES}");
            return Err(StoreError::invalid("capacity_bytes", problem));
        }
        layout.slots = u32::try_from((capacity_bytes - PREAMBLE_BYTES) / per_slot).unwrap_or(u32::MAX);
        Ok(layout)
    }

    /// Whether buffers of these lengths are one for each part.
    pub(crate) fn check_parts(&self, mut lengths: impl ExactSizeIterator<Item = usize>) -> Result<(), StoreError> {
        if lengths.len() != self.parts as usize {
            return Err(StoreError::invalid("parts", format!("{} given, a record has {}", lengths.len(), self.parts)));
        }
        lengths.try_for_each(|length| self.check_part(length))
    }

    pub(crate) fn check_part(&self, length: usize) -> Result<(), StoreError> {
        if length != self.part_bytes as usize {
            return Err(StoreError::invalid("part", format!("{length} bytes given, a part has {}", self.part_bytes)));
        }
        Ok(())
    }

    pub(crate) const fn record_bytes(&self) -> u64 {
        self.parts as u64 * self.part_bytes as u64
    }

    /// From one slot's payload to the next.
    pub(crate) const fn slot_bytes(&self) -> u64 {
        self.record_bytes().next_multiple_of(ALIGN)
    }

    /// From one slot's header to the next.
    pub(crate) const fn header_bytes(&self) -> usize {
        (HEADER_FIXED_BYTES + 4 * self.parts as usize).next_power_of_two()
    }

    pub(crate) const fn header_offset(&self, slot: u32) -> u64 {
        PREAMBLE_BYTES + slot as u64 * self.header_bytes() as u64
    }

    pub(crate) const fn payload_offset(&self, slot: u32) -> u64 {
        slot as u64 * self.slot_bytes()
    }

    pub(crate) const fn part_offset(&self, slot: u32, part: u32) -> u64 {
        self.payload_offset(slot) + part as u64 * self.part_bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: StoreOptions =
        StoreOptions { fingerprint: [0; 16], parts: 30, part_bytes: 12 << 10, capacity_bytes: 100 << 30 };

    #[test]
    fn store_slots_and_headers_are_aligned_and_fit_capacity() {
        let layout = Layout::new(&OPTIONS).unwrap();
        assert_eq!((layout.record_bytes(), layout.slot_bytes(), layout.header_bytes()), (360 << 10, 360 << 10, 256));
        let end = layout.header_offset(layout.slots) + layout.payload_offset(layout.slots);
        let slots = layout.slots;
        assert!(
            end <= OPTIONS.capacity_bytes && OPTIONS.capacity_bytes - end < 361 << 10,
            "{slots} slots end at {end}"
        );
        assert_eq!(layout.part_offset(2, 3), (2 * 360 + 3 * 12) << 10);
    }

    #[test]
    fn bad_store_option_is_refused_with_field_name() {
        let cases = [
            ("parts", StoreOptions { parts: 0, ..OPTIONS }),
            ("parts", StoreOptions { parts: 1025, ..OPTIONS }),
            ("part_bytes", StoreOptions { part_bytes: 0, ..OPTIONS }),
            ("capacity_bytes", StoreOptions { capacity_bytes: 360 << 10, ..OPTIONS }),
            ("capacity_bytes", StoreOptions { capacity_bytes: u64::MAX, ..OPTIONS }),
        ];
        for (field, options) in cases {
            let error = Layout::new(&options).unwrap_err();
            assert!(matches!(error, StoreError::Invalid { what, .. } if what == field), "{error}");
        }
        let largest = StoreOptions { parts: 1024, part_bytes: u32::MAX, capacity_bytes: 1 << 60, ..OPTIONS };
        assert!(Layout::new(&largest).is_ok());
    }
}
