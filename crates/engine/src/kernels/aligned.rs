//! Memory that begins on a cache line.

use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Mutex, PoisonError};

use baton_memory::{MemoryError, MemoryRegion};

#[cfg(test)]
use super::guarded::Guarded;
use super::lanes::LANES;

/// What lines lie in. In tests, what is beyond either end may not be touched.
#[cfg(not(test))]
type Lines = Vec<Line>;
#[cfg(test)]
type Lines = Guarded<Line>;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

/// Zeroed floats that begin on a cache line, so that no vector of 16 at a multiple of 16 straddles
/// two.
pub(crate) struct AlignedBuf {
    lines: Lines,
    len: usize,
}

impl AlignedBuf {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let count = len.div_ceil(LANES);
        #[cfg(not(test))]
        let lines = vec![Line([0.0; LANES]); count];
        #[cfg(test)]
        let lines = Guarded::zeroed(count);
        Self { lines, len }
    }
}

impl Deref for AlignedBuf {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: `Line` is 16 floats without padding, and the lines hold at least `len` of them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// Zeroed bytes that begin on a cache line.
pub(crate) struct AlignedBytes {
    floats: AlignedBuf,
    len: usize,
}

impl AlignedBytes {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        Self { floats: AlignedBuf::zeroed(len.div_ceil(size_of::<f32>())), len }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: any float is 4 bytes, and the floats have at least `len` of them.
        unsafe { std::slice::from_raw_parts(self.floats.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; any bytes are floats, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.floats.as_mut_ptr().cast(), self.len) }
    }
}

/// Zeroed memory for weights, in pieces of large mappings. Together they lie on huge pages; each
/// matrix alone would be too small for one.
pub(crate) struct WeightMemory {
    /// The mapping of which the last piece was, and where the next begins.
    current: Mutex<Option<(Arc<MemoryRegion>, usize)>>,
    #[cfg(test)]
    guarded: bool,
}

/// Bytes of a mapping. Its pages are committed when they are first touched.
const MAPPING: usize = 256 << 20;
/// Where pieces begin.
const LINE: usize = 64;

impl WeightMemory {
    /// None yet.
    pub fn new() -> Self {
        Self {
            current: Mutex::new(None),
            #[cfg(test)]
            guarded: false,
        }
    }

    /// Memory for kernels under test: what they touch beyond a matrix's ends ends the process.
    #[cfg(test)]
    pub fn guarded() -> Self {
        Self { guarded: true, ..Self::new() }
    }

    /// `len` zeroed bytes.
    ///
    /// # Errors
    /// The system has no memory.
    pub fn zeroed(&self, len: usize) -> Result<WeightBytes, MemoryError> {
        #[cfg(test)]
        if self.guarded {
            return Ok(WeightBytes::Guarded(AlignedBytes::zeroed(len)));
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, start) = match current.take() {
            Some((region, start)) if len <= region.len() - start => (region, start),
            // A system that counts what may be committed may have as much as is needed, and no
            // more.
            _ => {
                (Arc::new(MemoryRegion::allocate(len.max(MAPPING)).or_else(|_| MemoryRegion::allocate(len.max(1)))?), 0)
            }
        };
        if start == 0 {
            region.advise_huge_pages();
        }
        let next = (start + len).next_multiple_of(LINE);
        if next < region.len() {
            *current = Some((Arc::clone(&region), next));
        }
        Ok(WeightBytes::Piece { region, range: start..start + len })
    }
}

/// A piece of [`WeightMemory`], this owner's alone.
pub(crate) enum WeightBytes {
    Piece {
        region: Arc<MemoryRegion>,
        range: Range<usize>,
    },
    /// Memory of its own, between guard pages.
    #[cfg(test)]
    Guarded(AlignedBytes),
}

impl Deref for WeightBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            // SAFETY: no two pieces have a byte in common, and this one is borrowed.
            Self::Piece { region, range } => unsafe { region.slice(range.clone()) },
            #[cfg(test)]
            Self::Guarded(bytes) => bytes,
        }
    }
}

impl DerefMut for WeightBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: as above, and it is borrowed exclusively.
            Self::Piece { region, range } => unsafe { region.slice_mut(range.clone()) },
            #[cfg(test)]
            Self::Guarded(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_memory_pieces_are_apart_and_cache_line_aligned() {
        let memory = WeightMemory::new();
        let mut pieces: Vec<_> = [1, 64, 100, MAPPING, 0, MAPPING + 1, 7].map(|len| memory.zeroed(len).unwrap()).into();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert!(piece.iter().step_by(4093).all(|&byte| byte == 0));
            if let Some(first) = piece.first_mut() {
                *first = i as u8 + 1;
            }
            if let Some(last) = piece.last_mut() {
                *last = i as u8 + 1;
            }
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert_eq!(piece.as_ptr() as usize % LINE, 0);
            assert!(piece.first().into_iter().chain(piece.last()).all(|&byte| byte == i as u8 + 1));
        }
    }
}
