//! Y = X W^T, with W as quantized as its file has it, and X as signed bytes ([`QuantizedRows`]).
//!
//! ```text
//! y = sum over blocks of 32 inputs, in their order:
//!       dot = sum of code * a                      a: codes of the activations; exact in 32-bit integers
//!       y = fma(dot * a_scale, scale, y)           where the type has a zero: dot of (code - zero)
//!       y = fma(a_scale * sum of a, minimum, y)    where it has a minimum
//!
//! packed codes    [n / 16][k / 32][8 quads][16 outputs][4 inputs]          8-bit codes, 512 bytes a block
//!                 [n / 16][k / 32][4 + p][16 outputs][4 inputs]            codes of 4 + p bits: 4 times nibbles, quad 2 i low and 2 i + 1 high, then p planes:
//!                                                                          bit q of a byte of plane b is bit 4 + b of the code in quad q
//! packed scales   [n / 16][k / 32][scale of each group, then minimum][16 outputs]      f16 where the file's are, else f32
//! ```
//!
//! Vectors run over outputs, so each output is one chain of operations in the order of k: the same bits whatever the instruction set, the number of rows or the thread.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_formats::{CODES, CodeBlock, CodeForm, Dtype};
use half::f16;

use crate::error::EngineError;
use crate::kernels::dots::{Dots, QUADS};
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{CACHE_LINE, F32x16, LANES, prefetch_line};
use crate::kernels::{Isa, Threads, WeightBytes, WeightMemory};

use super::linear::{Destination, Target};
use super::product_buffers::{GATE_STRIDE, GATES, ProductBuffers};
use super::quantize::{BLOCK, QuantizedBlock, QuantizedRows, SharedQuantized, ZERO, quantize_block};
use super::row_buffers::GROUP;
use super::swiglu::gate_of;
use super::tile::Operand;
use super::unrolled::unrolled;

const _: () = assert!(CODES == BLOCK);
/// Outputs of one panel.
pub(crate) const PANEL: usize = LANES;
/// Groups of rows computed against a panel before the next panel: their activations (some 300 KB) stay in the second-level cache.
const ROW_GROUPS: usize = 8;
/// Multiply-adds below which another thread does not pay: some 3 us of work, where a helper that looks for work takes 1 to come.
const PARALLEL_WORK: usize = 100_000;

/// Panels of the widest register tile of any instruction set.
const WIDEST_TILE: usize = 2;
/// Panels of the gates that are made at once, and of their ups.
const GATED_PANELS: usize = 2 * WIDEST_TILE;
const _: () = assert!(WIDEST_TILE * PANEL == GATES && GATES == BLOCK);

/// Compiles an expression for each quantized type, and picks at run time: with the type's index in `Dtype::ALL` as a constant.
macro_rules! per_type {
    ($dtype:expr, $index:ident => $body:expr) => {
        $crate::kernels::cpu::quantized::per_type!($dtype, $index => $body; Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K)
    };
    ($dtype:expr, $index:ident => $body:expr; $($type:ident)*) => {
        match $dtype {
            $(baton_formats::Dtype::$type => {
                const $index: usize = baton_formats::Dtype::$type as usize;
                $body
            })*
            // By name, so that another quantized type is missed when this is compiled.
            dtype @ (baton_formats::Dtype::F32 | baton_formats::Dtype::F16 | baton_formats::Dtype::BF16) => {
                unreachable!("{dtype} is not quantized")
            }
        }
    };
}

pub(super) use per_type;

/// A quantized weight matrix, `outputs x inputs`.
pub(crate) struct QuantizedMatrix {
    dtype: Dtype,
    form: CodeForm,
    codes: WeightBytes,
    scales: WeightBytes,
    outputs: usize,
    inputs: usize,
}

impl QuantizedMatrix {
    /// Packs a matrix of the quantized type `dtype` whose rows `read` gives, as blocks of codes. `inputs` is a multiple of 32.
    pub fn pack(
        threads: &Threads,
        memory: &WeightMemory,
        dtype: Dtype,
        (outputs, inputs): (usize, usize),
        read: impl Fn(usize, &mut [CodeBlock]) -> Result<(), EngineError> + Sync,
    ) -> Result<Self, EngineError> {
        let form = dtype.code_form().unwrap_or_else(|| unreachable!("{dtype} is not quantized"));
        let (blocks, panels) = (inputs / BLOCK, outputs.div_ceil(PANEL));
        let (code_bytes, scale_bytes) = (blocks * code_bytes(form), blocks * scale_bytes(form));
        let mut codes = memory.zeroed(panels * code_bytes)?;
        let mut scales = memory.zeroed(panels * scale_bytes)?;
        let slots = codes.chunks_exact_mut(code_bytes.max(1)).zip(scales.chunks_exact_mut(scale_bytes.max(1)));
        let slots: Vec<_> = slots.map(Mutex::new).collect();
        let failed = Mutex::new(None);
        threads.for_each(slots.len(), true, |_, panel| {
            let mut row = vec![CodeBlock::EMPTY; blocks];
            let mut slot = slots[panel].lock().unwrap_or_else(PoisonError::into_inner);
            let (codes, scales) = &mut *slot;
            for (lane, output) in (panel * PANEL..outputs.min((panel + 1) * PANEL)).enumerate() {
                match read(output, &mut row) {
                    Ok(()) => pack_row(form, &row, lane, codes, scales),
                    Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
                }
            }
        });
        drop(slots);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Self { dtype, form, codes, scales, outputs, inputs }),
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Whether each half of the outputs is whole blocks of inputs of what follows.
    pub fn halves_are_blocks(&self) -> bool {
        self.outputs.is_multiple_of(2 * BLOCK)
    }

    /// Panels of 16 outputs.
    pub fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }

    /// Codes and scales of some blocks of a panel.
    pub fn panel(&self, panel: usize, blocks: Range<usize>) -> (&[u8], &[u8]) {
        let of = |bytes: usize| {
            let at = panel * (self.inputs / BLOCK) * bytes;
            at + blocks.start * bytes..at + blocks.end * bytes
        };
        (&self.codes[of(code_bytes(self.form))], &self.scales[of(scale_bytes(self.form))])
    }

    /// The memory of the codes of some inputs of a panel and of the next. The panel may be one past the last.
    pub fn code_bytes(&self, panel: usize, depth: Range<usize>) -> (*const u8, usize) {
        let bytes = code_bytes(self.form);
        let at = (panel * (self.inputs / BLOCK) + depth.start / BLOCK) * bytes;
        (self.codes.as_ptr().wrapping_add(at), depth.len() / BLOCK * bytes)
    }

    /// One row of the weight matrix: an embedding, where the matrix is the head too.
    pub fn copy_row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.outputs && to.len() == self.inputs, "row {row} of {}", self.outputs);
        let (panel, lane, blocks) = (row / PANEL, row % PANEL, self.inputs / BLOCK);
        let (code_bytes, scale_bytes) = (code_bytes(self.form), scale_bytes(self.form));
        let codes = self.codes[panel * blocks * code_bytes..].chunks_exact(code_bytes);
        let scales = self.scales[panel * blocks * scale_bytes..].chunks_exact(scale_bytes);
        for ((codes, scales), to) in codes.zip(scales).zip(to.as_chunks_mut().0) {
            unpack_block(self.form, codes, scales, lane).elements(self.form, to);
        }
    }
}

/// Bytes of the codes of a block of 16 outputs.
pub(super) const fn code_bytes(form: CodeForm) -> usize {
    QUADS * if form.bits == 8 { BLOCK / 4 } else { form.bits as usize }
}

/// Scales of a block of one output.
pub(super) const fn groups(form: CodeForm) -> usize {
    BLOCK / form.group
}

/// Bytes of the scales, and of the minima, of a group of 16 outputs.
const fn lane_bytes(form: CodeForm) -> usize {
    LANES * if form.half_scales { 2 } else { 4 }
}

/// Bytes of the scales and minima of a block of 16 outputs.
pub(super) const fn scale_bytes(form: CodeForm) -> usize {
    groups(form) * lane_bytes(form) * if form.zero.is_none() { 2 } else { 1 }
}

fn pack_row(form: CodeForm, row: &[CodeBlock], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
    let slots = codes.chunks_exact_mut(code_bytes(form)).zip(scales.chunks_exact_mut(scale_bytes(form)));
    for (block, (codes, scales)) in row.iter().zip(slots) {
        for (i, &code) in block.codes.iter().enumerate() {
            let (quad, byte) = (i / 4, 4 * lane + i % 4);
            if form.bits == 8 {
                codes[quad * QUADS + byte] = code;
                continue;
            }
            codes[quad / 2 * QUADS + byte] |= (code & 15) << (4 * (quad % 2));
            for plane in 4..form.bits as usize {
                codes[plane * QUADS + byte] |= ((code >> plane) & 1) << quad;
            }
        }
        let groups = groups(form);
        let numbers = block.scales[..groups].iter().chain(&block.minima[..groups]);
        for (&x, to) in numbers.zip(scales.chunks_exact_mut(lane_bytes(form))) {
            match form.half_scales {
                true => to[2 * lane..2 * lane + 2].copy_from_slice(&f16::from_f32(x).to_ne_bytes()),
                false => to[4 * lane..4 * lane + 4].copy_from_slice(&x.to_ne_bytes()),
            }
        }
    }
}

fn unpack_block(form: CodeForm, codes: &[u8], scales: &[u8], lane: usize) -> CodeBlock {
    let code = |i: usize| {
        let (quad, byte) = (i / 4, 4 * lane + i % 4);
        if form.bits == 8 {
            return codes[quad * QUADS + byte];
        }
        let nibble = (codes[quad / 2 * QUADS + byte] >> (4 * (quad % 2))) & 15;
        let bit = |plane: usize| ((codes[plane * QUADS + byte] >> quad) & 1) << plane;
        (4..form.bits as usize).fold(nibble, |code, plane| code | bit(plane))
    };
    let number = |index: usize| {
        let lanes = &scales[index * lane_bytes(form)..][..lane_bytes(form)];
        match form.half_scales {
            true => f16::from_ne_bytes([lanes[2 * lane], lanes[2 * lane + 1]]).to_f32(),
            false => f32::from_ne_bytes(std::array::from_fn(|i| lanes[4 * lane + i])),
        }
    };
    let (groups, minimum) = (groups(form), form.zero.is_none());
    let minima = if minimum { [number(groups), number(2 * groups - 1)] } else { [0.0; 2] };
    CodeBlock { codes: std::array::from_fn(code), scales: [number(0), number(groups - 1)], minima }
}

/// Where products go.
#[derive(Clone, Copy)]
enum Output<'a> {
    Rows(Destination<'a>),
    /// silu(gate) x up, quantized.
    Gated(SharedQuantized<'a>, &'a ProductBuffers),
}

/// Y = X W^T, or Y += X W^T.
pub(super) fn quantized_matmul(
    isa: Isa,
    threads: &Threads,
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    to: Destination<'_>,
) {
    quantized_tasks(isa, threads, x, w, Output::Rows(to));
}

/// silu(gate) x up, quantized, where gate and up are the halves of X W^T, each of whole blocks: neither of them is ever in memory as a whole.
pub(super) fn gated_quantized_matmul(
    isa: Isa,
    threads: &Threads,
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    buffers: &ProductBuffers,
    to: &mut QuantizedRows,
) {
    assert!(w.halves_are_blocks(), "halves of whole blocks");
    quantized_tasks(isa, threads, x, w, Output::Gated(to.share(x.rows(), w.outputs / 2), buffers));
}

fn quantized_tasks(isa: Isa, threads: &Threads, x: &QuantizedRows, w: &QuantizedMatrix, to: Output<'_>) {
    let panels = if let Output::Gated(..) = to { w.panels() / 2 } else { w.panels() };
    let parallel = x.rows() * w.inputs * w.outputs >= PARALLEL_WORK;
    // Some tasks per thread, so that one that was late does not hold up the rest; whole register tiles each.
    let most_runs = threads.count() * if x.rows() > GROUP { 16 } else { 4 };
    let run = if parallel { panels.div_ceil(most_runs).next_multiple_of(WIDEST_TILE) } else { panels };
    let runs = panels.div_ceil(run);
    let run_of = |task: usize| task % runs * run..panels.min((task % runs + 1) * run);
    let groups = x.rows().div_ceil(GROUP);
    let tasks = groups.div_ceil(ROW_GROUPS) * runs;
    threads.for_each(tasks, parallel, |worker, task| {
        let (first_group, next) = (task / runs * ROW_GROUPS, task + threads.count());
        let part = Part {
            groups: first_group..groups.min(first_group + ROW_GROUPS),
            panels: run_of(task),
            then: if next < tasks { run_of(next) } else { 0..0 },
        };
        match to {
            Output::Rows(_) => panel_products(isa, x, w, &mut [], to, part),
            Output::Gated(_, buffers) => {
                let mut buffer = buffers.lock(worker, part.groups.len() * GROUP);
                panel_products(isa, x, w, &mut buffer.gates, to, part);
            }
        }
    });
}

/// What one task computes.
struct Part {
    groups: Range<usize>,
    /// Of gates, where there are gates.
    panels: Range<usize>,
    /// The panels of the thread's next task, most likely.
    then: Range<usize>,
}

impl Part {
    /// The `step`th panels of a task that takes `most` at a time, and the first one's place among those that belong together: of two panels of gates, these and then those of the
    /// ups, the first of which is `ups`.
    #[inline(always)]
    fn step(&self, step: usize, most: usize, ups: Option<usize>) -> Option<(Range<usize>, usize)> {
        let at = step * most;
        let Some(ups) = ups else {
            let first = self.panels.start + at;
            return (first < self.panels.end).then_some((first..self.panels.end.min(first + most), 0));
        };
        let (gate, place) = (self.panels.start + at / GATED_PANELS * WIDEST_TILE + at % WIDEST_TILE, at % GATED_PANELS);
        let first = if place < WIDEST_TILE { gate } else { ups + gate };
        (gate < self.panels.end).then_some((first..first + most, place))
    }
}

per_isa! {
    /// Some rows against some panels.
    fn panel_products(x: &QuantizedRows, w: &QuantizedMatrix, gates: &mut [f32], to: Output<'_>, part: Part) = panel_products_of<Dots>
}

#[inline(always)]
fn panel_products_of<D: Dots>(x: &QuantizedRows, w: &QuantizedMatrix, gates: &mut [f32], to: Output<'_>, part: Part) {
    per_type!(w.dtype, TYPE => typed_products::<D, TYPE>(x, w, gates, to, part));
}

/// The form of the type with this index in `Dtype::ALL`, as a constant.
#[inline(always)]
pub(super) const fn form_of<const TYPE: usize>() -> CodeForm {
    const {
        match Dtype::ALL[TYPE].code_form() {
            Some(form) => form,
            None => panic!("the type is not quantized"),
        }
    }
}

#[inline(always)]
fn typed_products<D: Dots, const TYPE: usize>(
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    gates: &mut [f32],
    to: Output<'_>,
    part: Part,
) {
    let blocks = w.inputs / BLOCK;
    let (code_bytes, scale_bytes) = (blocks * code_bytes(form_of::<TYPE>()), blocks * scale_bytes(form_of::<TYPE>()));
    // One row is read from memory alone: one stream of it is faster than two.
    let most = if x.rows() == 1 { 1 } else { D::TILE_PANELS };
    let ups = if let Output::Gated(..) = to { Some(w.panels() / 2) } else { None };
    let mut step = 0;
    while let Some((panels, place)) = part.step(step, most, ups) {
        step += 1;
        let weights = Panels {
            count: panels.len(),
            codes: w.codes[panels.start * code_bytes..][..panels.len() * code_bytes].as_ptr(),
            scales: w.scales[panels.start * scale_bytes..][..panels.len() * scale_bytes].as_ptr(),
        };
        let tiles = part.groups.len() * GROUP.min(x.rows()).div_ceil(D::TILE_ROWS);
        let next = part.step(step, most, ups).map_or(part.then.clone(), |(next, _)| next);
        let next = next.start..next.end.min(next.start + panels.len());
        let mut ahead = Ahead {
            at: [w.codes[next.start * code_bytes..].as_ptr(), w.scales[next.start * scale_bytes..].as_ptr()],
            step: [code_bytes, scale_bytes].map(|bytes| (next.len() * bytes).div_ceil((tiles * blocks).max(1))),
        };
        for group in part.groups.clone() {
            let rows = GROUP.min(x.rows() - group * GROUP);
            for first in (0..rows).step_by(D::TILE_ROWS) {
                let (c, target) = match to {
                    Output::Rows(Destination { y, column, target }) => {
                        let at = y.at(group * GROUP + first, column + panels.start * PANEL, panels.len() * PANEL);
                        (Operand { at, stride: y.stride() }, target)
                    }
                    Output::Gated(..) => {
                        let row = (group - part.groups.start) * GROUP + first;
                        let at = gates[row * GATE_STRIDE + place * PANEL..].as_mut_ptr();
                        (Operand { at, stride: GATE_STRIDE }, Target::Set)
                    }
                };
                // SAFETY: the panels have the codes and scales of as many blocks as the group, rows `first..rows` are in the group, and this task alone has that part of Y or
                // these gates, whose rows have room for whole vectors.
                unsafe {
                    let rows = D::TILE_ROWS.min(rows - first);
                    of_shape::<D, TYPE>(weights, x.group(group), (first, rows), c, target, &mut ahead);
                }
            }
        }
        if let (Some(ups), Output::Gated(to, _)) = (ups, to)
            && place + panels.len() == GATED_PANELS
        {
            let block = (panels.end - ups) / WIDEST_TILE - 1;
            quantize_gates::<D::Floats>(gates, part.groups.clone(), x.rows(), block, to);
        }
    }
}

/// silu(gate) x up of 32 gates and ups of some groups' rows, quantized as block `block` of each row.
#[inline(always)]
fn quantize_gates<V: F32x16>(gates: &[f32], groups: Range<usize>, rows: usize, block: usize, to: SharedQuantized<'_>) {
    let first = groups.start * GROUP;
    for group in groups {
        // SAFETY: only this task has these rows and gates.
        let to = unsafe { &mut *to.block(group, block) };
        for row in group * GROUP..rows.min((group + 1) * GROUP) {
            let (gate, up) = gates[(row - first) * GATE_STRIDE..][..2 * GATES].split_at(GATES);
            let mut gated = [0.0; BLOCK];
            for ((gate, up), to) in
                gate.chunks_exact(LANES).zip(up.chunks_exact(LANES)).zip(gated.chunks_exact_mut(LANES))
            {
                gate_of(V::read(gate), V::read(up)).write(to);
            }
            quantize_block::<V>(&gated, row % GROUP, to);
        }
    }
}

/// Where the weights of some panels begin, which lie one after the other.
#[derive(Clone, Copy)]
struct Panels {
    count: usize,
    codes: *const u8,
    scales: *const u8,
}

/// The weights of the panels that follow, which are asked for while others are computed with: memory is never idle.
struct Ahead {
    /// Of codes and of scales.
    at: [*const u8; 2],
    /// Bytes of each per block of a tile.
    step: [usize; 2],
}

impl Ahead {
    /// Asks for what comes next. The addresses may be past the end: then nothing comes.
    #[inline(always)]
    fn ask(&mut self) {
        for (at, step) in self.at.iter_mut().zip(self.step) {
            for line in (0..step).step_by(CACHE_LINE) {
                prefetch_line(at.wrapping_add(line));
            }
            *at = at.wrapping_add(step);
        }
    }
}

/// `rows` rows of a group from `first` on, in a register tile of at least that height: rows beyond the last are computed and dropped.
///
/// # Safety
/// There are weights for all `blocks` of `panels.count` panels, at most `D::TILE_PANELS`; `first + rows` is at most 16, and `rows` at most `D::TILE_ROWS`, a divisor of 16; as many whole
/// vectors as there are panels can be written to each of `rows` rows of `c`, which nobody else touches.
#[inline(always)]
unsafe fn of_shape<D: Dots, const TYPE: usize>(
    panels: Panels,
    blocks: &[QuantizedBlock],
    (first, rows): (usize, usize),
    c: Operand<*mut f32>,
    target: Target,
    ahead: &mut Ahead,
) {
    macro_rules! pick {
        ($($height:literal x $width:literal)*) => {
            $(if rows <= $height && panels.count == $width && $height <= D::TILE_ROWS && $width <= D::TILE_PANELS {
                // SAFETY: the caller's promise; the next heights divide 16 into whole tiles.
                return unsafe { registers::<D, TYPE, $height, $width>(panels, blocks, (first, rows), c, target, ahead) };
            })*
        };
    }
    pick!(1 x 1 2 x 1 4 x 1 1 x 2 2 x 2 4 x 2);
    unreachable!("a tile of {rows} rows and {} panels", panels.count);
}

/// The inner loop: per row, block and panel, 8 dot products and two or three float operations. The dot products of all rows and panels go side by side: each alone is a chain of 8
/// instructions that wait for one another.
///
/// # Safety
/// As for [`of_shape`]; `first + ROWS` is at most 16, `ROWS` at most 4 and `PANELS` at most 2.
#[inline(always)]
unsafe fn registers<D: Dots, const TYPE: usize, const ROWS: usize, const PANELS: usize>(
    panels: Panels,
    blocks: &[QuantizedBlock],
    (first, rows): (usize, usize),
    c: Operand<*mut f32>,
    target: Target,
    ahead: &mut Ahead,
) {
    let form = form_of::<TYPE>();
    let (next_codes, next_scales) = (blocks.len() * code_bytes(form), blocks.len() * scale_bytes(form));
    let mut sums = [[D::Floats::splat(0.0); PANELS]; ROWS];
    let Panels { mut codes, mut scales, .. } = panels;
    for block in blocks {
        // First: behind the products, its branches would part them from the loads, all of which the compiler then keeps at once, in memory.
        ahead.ask();
        // SAFETY: the caller's promise: a block's codes and scales in each panel, and rows of the group; 4 bytes of codes are read as a number, of any alignment.
        unsafe {
            let inputs = block.codes.as_ptr().add(first).cast::<[i32; BLOCK / 4]>();
            let (a_scales, weighted_sums) = (block.scales.as_ptr().add(first), block.weighted_sums.as_ptr().add(first));
            let mut dots = [[D::splat(0); PANELS]; ROWS];
            unrolled!(pair in 0 1 2 3 => {
                if pair == 0 || pair == 2 && groups(form) == 2 {
                    unrolled!(row in 0 1 2 3 => if row < ROWS {
                        dots[row] = [D::splat(zero::<TYPE>(block, pair / 2, first, row)); PANELS];
                    });
                }
                let mut quads = [[D::bytes(codes); 2]; PANELS];
                unrolled!(panel in 0 1 => if panel < PANELS {
                    quads[panel] = two_quads::<D, TYPE>(codes.add(panel * next_codes), pair);
                });
                unrolled!(quad in 0 1 => { unrolled!(row in 0 1 2 3 => if row < ROWS {
                    let inputs = inputs.add(row).cast::<i32>().add(2 * pair + quad).read_unaligned();
                    unrolled!(panel in 0 1 => if panel < PANELS {
                        dots[row][panel] = match form.bits {
                            8 => D::dot_wide(dots[row][panel], quads[panel][quad], inputs),
                            _ => D::dot(dots[row][panel], quads[panel][quad], inputs),
                        };
                    });
                }); });
                if pair == 3 || pair == 1 && groups(form) == 2 {
                    unrolled!(panel in 0 1 => if panel < PANELS {
                        let scale = lanes::<D::Floats, TYPE>(scales.add(panel * next_scales), pair / 2 * (groups(form) - 1));
                        unrolled!(row in 0 1 2 3 => if row < ROWS {
                            let dot = D::floats(dots[row][panel]).mul(D::Floats::splat(*a_scales.add(row)));
                            sums[row][panel] = dot.mul_add(scale, sums[row][panel]);
                        });
                    });
                }
            });
            if form.zero.is_none() {
                unrolled!(panel in 0 1 => if panel < PANELS {
                    let minimum = lanes::<D::Floats, TYPE>(scales.add(panel * next_scales), groups(form));
                    unrolled!(row in 0 1 2 3 => if row < ROWS {
                        let weighted = D::Floats::splat(*weighted_sums.add(row));
                        sums[row][panel] = weighted.mul_add(minimum, sums[row][panel]);
                    });
                });
            }
            codes = codes.add(code_bytes(form));
            scales = scales.add(scale_bytes(form));
        }
    }
    unrolled!(row in 0 1 2 3 => if row < ROWS && row < rows {
        unrolled!(panel in 0 1 => if panel < PANELS {
            // SAFETY: the caller's promise.
            unsafe {
                let at = c.at.add(row * c.stride + panel * PANEL);
                match target {
                    Target::Set => sums[row][panel].store(at),
                    Target::Add => D::Floats::load(at).add(sums[row][panel]).store(at),
                }
            }
        });
    });
}

/// What the dot products of a row and a group of a block begin with: what its codes' zero takes off.
///
/// # Safety
/// `first + row` is below 16.
#[inline(always)]
unsafe fn zero<const TYPE: usize>(block: &QuantizedBlock, group: usize, first: usize, row: usize) -> i32 {
    let form = form_of::<TYPE>();
    let Some(zero) = form.zero else { return 0 };
    const {
        if let Some(zero) = form_of::<TYPE>().zero {
            assert!(zero as i32 % ZERO == 0);
        }
    }
    let zeros = if groups(form) == 1 { block.zeros.as_ptr() } else { block.half_zeros[group].as_ptr() };
    // Wrapping, so that nothing is checked in the inner loop: it is at most 2^20.
    // SAFETY: the caller's promise.
    unsafe { (*zeros.add(first).add(row)).wrapping_mul(i32::from(zero) / ZERO) }
}

/// The codes of a block of 16 outputs, 4 inputs a vector: vectors 2 `pair` and the next.
///
/// # Safety
/// A block's codes can be read; `pair` is below 4.
#[inline(always)]
unsafe fn two_quads<D: Dots, const TYPE: usize>(codes: *const u8, pair: usize) -> [D::Codes; 2] {
    let bits = form_of::<TYPE>().bits;
    // SAFETY: the caller's promise.
    unsafe {
        if bits == 8 {
            return [D::bytes(codes.add(2 * pair * QUADS)), D::bytes(codes.add((2 * pair + 1) * QUADS))];
        }
        let [mut low, mut high] = D::nibbles(codes.add(pair * QUADS));
        unrolled!(plane in 4 5 6 7 => if plane < bits as usize {
            let bits = D::bytes(codes.add(plane * QUADS));
            low = D::with_bit(low, bits, 2 * pair as u32, plane as u32);
            high = D::with_bit(high, bits, 2 * pair as u32 + 1, plane as u32);
        });
        [low, high]
    }
}

/// 16 numbers of a block.
///
/// # Safety
/// They can be read.
#[inline(always)]
pub(super) unsafe fn lanes<V: F32x16, const TYPE: usize>(scales: *const u8, index: usize) -> V {
    let form = form_of::<TYPE>();
    // SAFETY: the caller's promise; they begin at a multiple of 32 bytes.
    unsafe {
        let at = scales.add(index * lane_bytes(form));
        match form.half_scales {
            true => V::from_f16(&*at.cast()),
            false => V::load(at.cast()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::swiglu::swiglu;
    use super::*;
    use crate::kernels::guarded::on_both_sides;
    use crate::kernels::{Rows, reference};

    /// Rows of a quantized type, from a seed.
    pub fn random_blocks(dtype: Dtype, seed: u64, count: usize) -> Vec<CodeBlock> {
        let form = dtype.code_form().unwrap();
        let numbers = reference::random(seed, count * (CODES + 4));
        let blocks = numbers.chunks_exact(CODES + 4).map(|x| {
            let number = |i: usize| f16::from_f32(x[i] * 0.1).to_f32();
            let mut scales = [number(0), number(1)];
            let mut minima = if form.zero.is_none() { [number(2), number(3)] } else { [0.0; 2] };
            if form.group == CODES {
                (scales[1], minima[1]) = (scales[0], minima[0]);
            }
            let code = |i: usize| ((x[4 + i] + 1.0) * 0.5 * (1u32 << form.bits) as f32) as u8;
            CodeBlock { codes: std::array::from_fn(code), scales, minima }
        });
        blocks.collect()
    }

    pub fn packed(threads: &Threads, dtype: Dtype, blocks: &[CodeBlock], inputs: usize) -> QuantizedMatrix {
        let per_row = inputs / BLOCK;
        let read = |row: usize, to: &mut [CodeBlock]| {
            to.copy_from_slice(&blocks[row * per_row..][..per_row]);
            Ok(())
        };
        QuantizedMatrix::pack(threads, &WeightMemory::guarded(), dtype, (blocks.len() / per_row, inputs), read).unwrap()
    }

    pub fn quantized() -> impl Iterator<Item = Dtype> {
        Dtype::ALL.into_iter().filter(|dtype| dtype.code_form().is_some())
    }

    #[test]
    fn equals_the_reference_bit_for_bit_over_odd_shapes() {
        on_both_sides(compare_odd_shapes);
    }

    fn compare_odd_shapes() {
        for (rows, outputs, inputs) in
            [(1, 1, 32), (2, 47, 64), (15, 33, 96), (16, 16, 256), (17, 100, 64), (150, 40, 32)]
        {
            let mut x = Rows::new(inputs);
            x.resize(rows);
            for row in 0..rows {
                x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
            }
            for dtype in quantized() {
                let blocks = random_blocks(dtype, outputs as u64, outputs * inputs / BLOCK);
                for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                    let threads = Threads::new(count).unwrap();
                    let w = packed(&threads, dtype, &blocks, inputs);
                    let mut a = QuantizedRows::new();
                    a.quantize(isa, &threads, &x);
                    let mut y = Rows::new(outputs + 16);
                    y.resize(rows);
                    for (times, target) in [(1.0, Target::Set), (2.0, Target::Add)] {
                        quantized_matmul(isa, &threads, &a, &w, Destination { y: &y.share(), column: 16, target });
                        for row in 0..rows {
                            let expected = reference::quantized_matmul(x.row(row), dtype, &blocks);
                            let expected: Vec<_> = expected.into_iter().map(|y| times * y).collect();
                            assert_eq!(y.row(row)[16..], expected, "{isa} {dtype} {rows}x{outputs}x{inputs} row {row}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn gates_equal_products_and_then_gates_bit_for_bit() {
        on_both_sides(compare_gated);
    }

    fn compare_gated() {
        for (rows, half, inputs) in [(1, 32, 32), (15, 64, 96), (17, 96, 64), (33, 32, 608), (150, 160, 32)] {
            let mut x = Rows::new(inputs);
            x.resize(rows);
            for row in 0..rows {
                x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
            }
            for dtype in quantized() {
                let blocks = random_blocks(dtype, 3, 2 * half * inputs / BLOCK);
                for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                    let threads = Threads::new(count).unwrap();
                    let w = packed(&threads, dtype, &blocks, inputs);
                    let (mut a, mut found) = (QuantizedRows::new(), QuantizedRows::new());
                    a.quantize(isa, &threads, &x);
                    gated_quantized_matmul(isa, &threads, &a, &w, &ProductBuffers::new(&threads), &mut found);
                    assert_eq!(found.rows(), rows);
                    for row in 0..rows {
                        let both = reference::quantized_matmul(x.row(row), dtype, &blocks);
                        let mut expected = vec![0.0; half];
                        swiglu(Isa::SCALAR, &both[..half], &both[half..], &mut expected);
                        let found = found.group(row / GROUP);
                        assert_eq!(found.len(), half / BLOCK);
                        for (found, expected) in found.iter().zip(reference::quantize(&expected)) {
                            let found = (found.codes[row % GROUP], found.scales[row % GROUP]);
                            assert_eq!(
                                found,
                                (expected.codes, expected.scale),
                                "{isa} {dtype} {rows}x{half}x{inputs} row {row}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_reference_is_near_the_product_of_the_elements() {
        for dtype in quantized() {
            let blocks = random_blocks(dtype, 5, 3 * 4);
            let (x, form) = (reference::random(6, 128), dtype.code_form().unwrap());
            let mut w = vec![0.0; 3 * 128];
            blocks.iter().zip(w.as_chunks_mut().0).for_each(|(block, out)| block.elements(form, out));
            let found = reference::quantized_matmul(&x, dtype, &blocks);
            for (row, found) in w.chunks_exact(128).zip(found) {
                let expected: f32 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
                let size: f32 = row.iter().zip(&x).map(|(w, x)| (w * x).powi(2)).sum::<f32>().sqrt();
                assert!((found - expected).abs() < 0.03 * size, "{dtype}: {found}, {expected}, of {size}");
            }
        }
    }

    #[test]
    fn a_packed_row_reads_back() {
        let threads = Threads::new(2).unwrap();
        for dtype in quantized() {
            let blocks = random_blocks(dtype, 3, 37 * 2);
            let w = packed(&threads, dtype, &blocks, 64);
            let (mut found, mut expected) = ([0.0; 64], [0.0; 64]);
            w.copy_row(36, &mut found);
            let form = dtype.code_form().unwrap();
            blocks[72..].iter().zip(expected.as_chunks_mut().0).for_each(|(block, out)| block.elements(form, out));
            assert_eq!(found, expected, "{dtype}");
        }
    }

    #[test]
    fn memory_is_near_the_files() {
        for dtype in quantized() {
            let form = dtype.code_form().unwrap();
            let packed = (code_bytes(form) + scale_bytes(form)) as f64 / (BLOCK * PANEL) as f64;
            let file = dtype.block_bytes() as f64 / dtype.block_elements() as f64;
            assert!(packed <= 1.34 * file, "{dtype}: {packed} bytes an element, {file} in the file");
        }
    }

    #[test]
    fn a_failed_read_fails_the_packing() {
        let read = |row: usize, _: &mut [CodeBlock]| {
            if row == 32 { Err(EngineError::Model("row 32".to_owned())) } else { Ok(()) }
        };
        let (threads, memory) = (Threads::new(2).unwrap(), WeightMemory::new());
        let failed = QuantizedMatrix::pack(&threads, &memory, Dtype::Q8_0, (64, 32), read).err().unwrap();
        assert_eq!(failed.to_string(), "model: row 32");
    }
}
