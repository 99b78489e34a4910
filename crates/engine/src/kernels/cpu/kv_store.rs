//! One layer's K and V rows in the arena: `[block][kv_head][K|V][token]` rows of one head.
//!
//! ```text
//! f32, f16, bf16    [head_dim]
//! int8              [head_dim] quants, then scale = max |x| / 127 of the row, in single precision;  x is about scale * quant
//! ```

use baton_types::{BlockId, KvDtype};

use crate::arena::KvArena;
use crate::kernels::Isa;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, ROUND_MAGIC};

use super::quantize::scale_of;

/// One layer of the arena, as the running step sees it.
///
/// **Exclusion**: the step writes rows of positions that it computes, and reads rows of positions
/// that are complete. Both lie in blocks of its sequences' tables, which the block pool gives to no
/// other writer while the step runs. Writing ends before reading begins. The one exception: of a
/// sequence whose prefix came late (`await_prefix`), bytes may still arrive while they are read.
/// They are plain bytes, of which any are numbers, and all that is computed for that sequence is
/// dropped.
#[derive(Clone, Copy)]
pub(crate) struct KvStore<'a> {
    arena: &'a KvArena,
    layer: u32,
}

impl<'a> KvStore<'a> {
    pub fn new(arena: &'a KvArena, layer: u32) -> Self {
        Self { arena, layer }
    }

    /// Stores the rows of one position; `k` and `v` are `[kv_head][head_dim]`. Threads may store
    /// different positions at the same time.
    pub fn write(&self, isa: Isa, table: &[BlockId], position: usize, k: &[f32], v: &[f32]) {
        let layout = self.arena.layout();
        let tokens = layout.block_tokens as usize;
        let dim = layout.head_dim as usize;
        let block = table[position / tokens];
        let row_bytes = layout.row_bytes();
        let at = |plane: usize| (plane * tokens + position % tokens) * row_bytes;
        for (head, (k, v)) in k.chunks_exact(dim).zip(v.chunks_exact(dim)).enumerate() {
            for (plane, x) in [(2 * head, k), (2 * head + 1, v)] {
                // SAFETY: see the type's text; this position is the caller's alone.
                let to = unsafe { self.arena.part_mut(self.layer, block, at(plane)..at(plane) + row_bytes) };
                encode(isa, layout.dtype, x, to);
            }
        }
    }

    /// Where the K rows and the V rows of consecutive positions of one head lie. They go up to the
    /// end of `position`'s block, at most `most` of them.
    pub fn rows(&self, table: &[BlockId], kv_head: usize, position: usize, most: usize) -> KvRows<'a> {
        let layout = self.arena.layout();
        let tokens = layout.block_tokens as usize;
        let row_bytes = layout.row_bytes();
        let plane = layout.plane_bytes();
        let token = position % tokens;
        let count = most.min(tokens - token);
        // SAFETY: see the type's text; the rows of this layer are all written when attention
        // begins.
        let record = unsafe { self.arena.block(self.layer, table[position / tokens]) };
        let k = &record[2 * kv_head * plane..][..plane];
        let v = &record[(2 * kv_head + 1) * plane..][..plane];
        let part = token * row_bytes..(token + count) * row_bytes;
        KvRows { k: &k[part.clone()], v: &v[part], count }
    }
}

/// The largest half.
const MAX_F16: f32 = 65_504.0;

/// Rows of one head, encoded.
pub(crate) struct KvRows<'a> {
    pub k: &'a [u8],
    pub v: &'a [u8],
    pub count: usize,
}

per_isa! {
    /// Rounds a row to the type of the KV.
    fn encode(dtype: KvDtype, x: &[f32], to: &mut [u8]) = encode_of<Floats>
}

#[inline(always)]
fn encode_of<V: F32x16>(dtype: KvDtype, x: &[f32], to: &mut [u8]) {
    let (elements, scale) = to.split_at_mut(x.len() * dtype.element_bytes());
    let mut inverse = V::splat(0.0);
    if dtype == KvDtype::Int8 {
        let mut largest = V::splat(0.0);
        let mut finite = true;
        for x in x.chunks(LANES) {
            let lanes = bounded(V::read(x));
            largest = lanes.abs().max(largest);
            finite &= lanes.all_finite();
        }
        let (scale_of_row, to_codes) = scale_of(largest.largest(), finite);
        inverse = V::splat(to_codes);
        scale.copy_from_slice(&scale_of_row.to_ne_bytes());
    }
    for (x, to) in x.chunks(LANES).zip(elements.chunks_mut(LANES * dtype.element_bytes())) {
        let lanes = V::read(x);
        match dtype {
            KvDtype::F32 => put(&lanes.to_array(), to),
            KvDtype::F16 => {
                let mut halves = [0u16; LANES];
                // SAFETY: 16 elements.
                unsafe { bounded(lanes).store_f16(halves.as_mut_ptr()) };
                put(&halves, to);
            }
            KvDtype::Bf16 => {
                let mut halves = [0u16; LANES];
                // SAFETY: 16 elements.
                unsafe { lanes.store_bf16(halves.as_mut_ptr()) };
                put(&halves, to);
            }
            KvDtype::Int8 => {
                let quants = bounded(lanes).mul(inverse).add(V::splat(ROUND_MAGIC)).bytes_of_rounded();
                put(&quants, to);
            }
        }
    }
}

/// The largest half instead of infinity, which times a weight of 0 is no number: a row would show
/// in those before it. NaN stays.
#[inline(always)]
fn bounded<V: F32x16>(x: V) -> V {
    V::splat(MAX_F16).min(V::splat(-MAX_F16).max(x))
}

/// Writes the first words, as many as there is room for, in the machine's order.
#[inline(always)]
fn put<T: Word>(words: &[T; LANES], to: &mut [u8]) {
    // SAFETY: plain numbers, read for as long as they live; `Word`s have no padding.
    let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words)) };
    if to.len() == bytes.len() {
        // Of a length that the compiler knows: a vector store, not a call.
        to.copy_from_slice(bytes);
    } else {
        to.copy_from_slice(&bytes[..to.len()]);
    }
}

/// Elements `from..from + 16` of an encoded row of `dim`; lanes past its end are 0.
#[inline(always)]
pub(super) fn decode<V: F32x16>(dtype: KvDtype, row: &[u8], from: usize, dim: usize) -> V {
    let count = LANES.min(dim - from);
    let size = dtype.element_bytes();
    let bytes = &row[from * size..(from + count) * size];
    match dtype {
        KvDtype::F32 => V::read(&words::<f32>(bytes)),
        KvDtype::F16 => V::from_f16(&words(bytes)),
        KvDtype::Bf16 => V::from_bf16(&words(bytes)),
        KvDtype::Int8 => {
            let scale = row.last_chunk().map_or(0.0, |bytes| f32::from_ne_bytes(*bytes));
            V::from_i8(&words(bytes)).mul(V::splat(scale))
        }
    }
}

/// As [`decode`], of a row that has all 16 elements.
///
/// # Safety
/// The encoded row of `dim` elements can be read, and `from + 16` is at most `dim`.
#[inline(always)]
pub(super) unsafe fn decode_whole<V: F32x16>(dtype: KvDtype, row: *const u8, from: usize, dim: usize) -> V {
    // SAFETY: the caller's promise; any bits are a number; the reads take any alignment.
    unsafe {
        let at = row.add(from * dtype.element_bytes());
        match dtype {
            KvDtype::F32 => V::load(at.cast()),
            KvDtype::F16 => V::from_f16(&at.cast::<[u16; LANES]>().read_unaligned()),
            KvDtype::Bf16 => V::from_bf16(&at.cast::<[u16; LANES]>().read_unaligned()),
            KvDtype::Int8 => {
                let scale = row.add(dim).cast::<f32>().read_unaligned();
                V::from_i8(&at.cast::<[i8; LANES]>().read_unaligned()).mul(V::splat(scale))
            }
        }
    }
}

/// A plain number, for which every pattern of bits is a value.
trait Word: Copy + Default {}
impl Word for f32 {}
impl Word for u16 {}
impl Word for i8 {}

/// Up to 16 words, which lie in the arena in the machine's order; the rest are 0.
#[inline(always)]
fn words<T: Word>(bytes: &[u8]) -> [T; LANES] {
    if bytes.len() == size_of::<[T; LANES]>() {
        // SAFETY: as many bytes as 16 words have; any bits are a word; the read takes any
        // alignment. A single vector load, where a loop over bytes is 16.
        return unsafe { bytes.as_ptr().cast::<[T; LANES]>().read_unaligned() };
    }
    let mut words = [T::default(); LANES];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
        // SAFETY: as above, for one word.
        *word = unsafe { bytes.as_ptr().cast::<T>().read_unaligned() };
    }
    words
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::kernels::guarded::{Guarded, on_both_sides};
    use crate::kernels::reference;

    #[test]
    fn int8_kv_is_near_the_row_and_the_same_on_all_isas() {
        on_both_sides(compare_bytes);
    }

    fn compare_bytes() {
        for dim in [1, 9, 15, 16, 17, 33, 64] {
            let x = Guarded::copy_of(&reference::random(dim as u64, dim));
            let largest = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            let mut expected = vec![0; KvDtype::Int8.row_bytes(dim)];
            encode(Isa::SCALAR, KvDtype::Int8, &x, &mut expected);
            for isa in Isa::available() {
                let mut bytes = Guarded::copy_of(&vec![0xff; expected.len()]);
                encode(isa, KvDtype::Int8, &x, &mut bytes);
                assert_eq!(*bytes, expected, "{isa}, {dim}");
                let found = decoded(isa, KvDtype::Int8, &bytes, dim);
                for (&x, found) in x.iter().zip(found) {
                    assert!((x - found).abs() <= largest / 254.0 * 1.0001, "{isa}: {found}, not {x}");
                }
            }
        }
    }

    #[test]
    fn int8_kv_of_nan_is_nan_and_of_infinity_is_the_largest_f16() {
        for isa in Isa::available() {
            let encoded = |x: &[f32]| {
                let mut bytes = vec![0xff; KvDtype::Int8.row_bytes(x.len())];
                encode(isa, KvDtype::Int8, x, &mut bytes);
                decoded(isa, KvDtype::Int8, &bytes, x.len())
            };
            let mut row = [0.5; 40];
            row[37] = f32::NAN;
            assert!(encoded(&row).into_iter().all(f32::is_nan), "{isa}");
            row[37] = f32::NEG_INFINITY;
            assert!((encoded(&row)[37] / -MAX_F16 - 1.0).abs() < 1e-6, "{isa}");
            assert_eq!(encoded(&[0.0; 20]), [0.0; 20], "{isa}");
            assert!(encoded(&[1e-45; 20]).into_iter().all(|x| x.abs() < 1e-35), "{isa}");
        }
    }

    per_isa! {
        fn decode_row(dtype: KvDtype, row: &[u8], dim: usize, to: &mut [f32]) = decode_row_of<Floats>
    }

    fn decode_row_of<V: F32x16>(dtype: KvDtype, row: &[u8], dim: usize, to: &mut [f32]) {
        for from in (0..dim).step_by(LANES) {
            let elements = decode::<V>(dtype, row, from, dim);
            elements.write(&mut to[from..dim.min(from + LANES)]);
            if from + LANES <= dim {
                // SAFETY: the row has them.
                let whole = unsafe { decode_whole::<V>(dtype, row.as_ptr(), from, dim) };
                assert_eq!(
                    whole.to_array().map(f32::to_bits),
                    elements.to_array().map(f32::to_bits),
                    "{dtype:?} {dim}"
                );
            }
        }
    }

    fn decoded(isa: Isa, dtype: KvDtype, row: &[u8], dim: usize) -> Vec<f32> {
        let mut to = vec![0.0; dim];
        decode_row(isa, dtype, row, dim, &mut to);
        to
    }

    #[test]
    fn float_kv_is_rounded_to_its_dtype_without_writing_beyond() {
        on_both_sides(|| {
            for (dim, dtype) in [1, 15, 16, 17, 40]
                .into_iter()
                .flat_map(|dim| [KvDtype::F32, KvDtype::F16, KvDtype::Bf16].map(|of| (dim, of)))
            {
                let x = Guarded::copy_of(&reference::random(dim as u64, dim));
                let expected: Vec<_> = x
                    .iter()
                    .map(|&x| match dtype {
                        KvDtype::F16 => f16::from_f32(x).to_f32(),
                        KvDtype::Bf16 => half::bf16::from_f32(x).to_f32(),
                        _ => x,
                    })
                    .collect();
                for isa in Isa::available() {
                    let mut bytes = Guarded::zeroed(dtype.row_bytes(dim));
                    encode(isa, dtype, &x, &mut bytes);
                    assert_eq!(decoded(isa, dtype, &bytes, dim), expected, "{isa} {dtype:?} {dim}");
                }
            }
        });
    }

    #[test]
    fn f16_kv_is_finite_or_nan() {
        let x = [1e6, -1e6, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65_519.0, -3.25, 0.0];
        let expected = [65_504.0, -65_504.0, 65_504.0, -65_504.0, f32::NAN, 65_504.0, -3.25, 0.0];
        for isa in Isa::available() {
            let mut bytes = [0; 16];
            encode(isa, KvDtype::F16, &x, &mut bytes);
            let found = bytes.as_chunks::<2>().0.iter().map(|&half| f16::from_ne_bytes(half).to_f32());
            for (found, expected) in found.zip(expected) {
                assert!(found == expected || found.is_nan() && expected.is_nan(), "{isa}: {found}, not {expected}");
            }
        }
    }
}
