//! Weight matrices in the form that suits their file's type, and products with them.

use baton_formats::Dtype;

use crate::kernels::{Compute, RowShape, Rows, SharedRows, Threads};

use super::matmul::{PackedMatrix, gated_matmul, rounded_matmul, single_matmul};
use super::product_buffers::ProductBuffers;
use super::quantize::QuantizedRows;
use super::quantized::{gated_quantized_matmul, quantized_matmul};
use super::quantized_matrix::{QuantizedMatrix, TILE_OUTPUTS};
use super::rounded::RoundedRows;
use super::row_buffers::RowBuffers;

/// A part of a matrix: some of its outputs.
pub(crate) enum MatrixPart {
    /// Elements as f32, or as halves if the file has them.
    Float(PackedMatrix),
    /// Quants and scales, whose products take quantized activations.
    Quantized(QuantizedMatrix),
}

impl MatrixPart {
    fn outputs(&self) -> usize {
        match self {
            Self::Float(matrix) => matrix.outputs(),
            Self::Quantized(matrix) => matrix.outputs(),
        }
    }

    fn copy_row(&self, row: usize, to: &mut [f32]) {
        match self {
            Self::Float(matrix) => matrix.copy_row(row, to),
            Self::Quantized(matrix) => matrix.copy_row(row, to),
        }
    }

    fn form(&self) -> Form<'_> {
        match self {
            Self::Float(matrix) if matrix.is_rounded() => Form::Rounded(matrix),
            Self::Float(matrix) => Form::Single(matrix),
            Self::Quantized(matrix) => Form::Quantized(matrix),
        }
    }

    fn products(&self) -> Products {
        match self.form() {
            Form::Single(_) => Products::Single,
            Form::Rounded(_) => Products::Rounded,
            Form::Quantized(_) => Products::Quantized,
        }
    }
}

/// A part by what its products take.
enum Form<'a> {
    Single(&'a PackedMatrix),
    Rounded(&'a PackedMatrix),
    Quantized(&'a QuantizedMatrix),
}

/// What products round activations to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Products {
    /// Single precision: not at all.
    Single,
    /// bfloat16.
    Rounded,
    /// 8-bit integers, with a scale per 32.
    Quantized,
}

/// How many outputs and inputs weights have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WeightShape {
    pub outputs: usize,
    pub inputs: usize,
}

/// A weight matrix, `outputs x inputs`: parts one below the other.
pub(crate) struct Matrix {
    parts: Vec<MatrixPart>,
}

impl Matrix {
    /// `parts` have the same inputs; all but the last have whole vectors of outputs
    /// ([`Self::can_follow`]).
    pub fn new(parts: Vec<MatrixPart>) -> Self {
        let (_, first) = parts.split_last().unwrap_or_else(|| unreachable!("a matrix without parts"));
        assert!(first.iter().all(|part| Self::can_follow(part.outputs())), "a part in the middle of a vector");
        let matrix = Self { parts };
        let same = |part: &MatrixPart| part.products() == matrix.products();
        assert!(matrix.parts.iter().all(same), "parts that take activations in different forms");
        matrix
    }

    /// Whether a part may begin at this output.
    pub fn can_follow(outputs: usize) -> bool {
        outputs.is_multiple_of(TILE_OUTPUTS)
    }

    /// Whether a matrix with rows of this type and length can stay quantized.
    pub fn stays_quantized(dtype: Dtype, inputs: usize) -> bool {
        dtype.quant_format().is_some() && dtype.bytes_of(inputs).is_some()
    }

    /// What its products round activations to. All parts agree.
    pub fn products(&self) -> Products {
        self.parts[0].products()
    }

    fn outputs(&self) -> usize {
        self.parts.iter().map(MatrixPart::outputs).sum()
    }

    fn inputs(&self) -> usize {
        match &self.parts[0] {
            MatrixPart::Float(matrix) => matrix.inputs(),
            MatrixPart::Quantized(matrix) => matrix.inputs(),
        }
    }

    /// One row: an embedding, if the matrix is the head too.
    pub fn copy_row(&self, mut row: usize, to: &mut [f32]) {
        for part in &self.parts {
            if row < part.outputs() {
                return part.copy_row(row, to);
            }
            row -= part.outputs();
        }
        unreachable!("a row beyond the matrix")
    }
}

/// What inputs were filled for.
#[derive(Debug, Clone, Copy)]
struct Filled {
    rows: usize,
    inputs: usize,
    products: Products,
}

impl Filled {
    /// So many rows, for products with `w`.
    fn of(rows: usize, w: &Matrix) -> Self {
        Self { rows, inputs: w.inputs(), products: w.products() }
    }
}

/// Activations in the form that a matrix takes, kept from one product to the next.
pub(crate) struct Inputs {
    filled: Filled,
    single: Rows,
    rounded: RoundedRows,
    quantized: QuantizedRows,
    row_buffers: RowBuffers,
    product_buffers: ProductBuffers,
}

impl Inputs {
    /// No rows yet; for matrices with at most so many inputs.
    pub fn new(threads: &Threads, most_inputs: usize) -> Self {
        Self {
            filled: Filled { rows: 0, inputs: 0, products: Products::Single },
            single: Rows::new(0),
            rounded: RoundedRows::new(),
            quantized: QuantizedRows::new(),
            row_buffers: RowBuffers::new(threads, most_inputs),
            product_buffers: ProductBuffers::new(threads),
        }
    }

    /// Takes so many rows, which `make(row, values)` writes, for products with `w`: what makes a
    /// row and what rounds it are one pass over memory.
    pub fn fill(&mut self, compute: &Compute, w: &Matrix, rows: usize, make: impl Fn(usize, &mut [f32]) + Sync) {
        let shape = RowShape { rows, columns: w.inputs() };
        self.filled = Filled::of(rows, w);
        match w.products() {
            Products::Single => {
                self.single.reshape(rows, w.inputs());
                self.single.for_each(&compute.threads, make);
            }
            Products::Rounded => self.rounded.fill(compute, shape, &self.row_buffers, make),
            Products::Quantized => self.quantized.fill(compute, shape, &self.row_buffers, make),
        }
    }

    /// Takes the rows of `x`, for products with `w`.
    pub fn fill_from(&mut self, compute: &Compute, w: &Matrix, x: &Rows) {
        assert_eq!(x.columns(), w.inputs(), "inputs of a product");
        self.filled = Filled::of(x.rows(), w);
        match w.products() {
            Products::Single => {
                self.single.reshape(x.rows(), x.columns());
                self.single.for_each(&compute.threads, |row, to| to.copy_from_slice(x.row(row)));
            }
            Products::Rounded => self.rounded.fill_from(compute, x),
            Products::Quantized => self.quantized.fill_from(compute, x),
        }
    }

    /// How many rows there are for products with `w`.
    fn rows_for(&self, w: &Matrix) -> usize {
        let Filled { rows, inputs, products } = self.filled;
        assert!(inputs == w.inputs() && products == w.products(), "inputs that were filled for another matrix");
        rows
    }
}

/// Fills `to`, for products with `down`, with silu(gate) x up, where gate and up are the halves of
/// X W^T. X is what `inputs` were filled with for this matrix. Returns whether it did: only what is
/// rounded in one way on both sides, and halves of whole packed tiles, are one pass over memory.
pub(crate) fn gated(compute: &Compute, inputs: &Inputs, w: &Matrix, down: &Matrix, to: &mut Inputs) -> bool {
    let [part] = &w.parts[..] else { return false };
    if w.products() != down.products() {
        return false;
    }
    let rows = inputs.rows_for(w);
    assert_eq!(2 * down.inputs(), w.outputs(), "gates and ups");
    match part.form() {
        Form::Rounded(matrix) if matrix.halves_are_whole_tiles() => {
            gated_matmul(compute, &inputs.rounded, matrix, &inputs.product_buffers, &mut to.rounded);
        }
        // A single row is bound by memory, which is read fastest in one stream.
        Form::Quantized(matrix) if rows > 1 && matrix.halves_are_blocks() => {
            gated_quantized_matmul(compute, &inputs.quantized, matrix, &inputs.product_buffers, &mut to.quantized);
        }
        _ => return false,
    }
    to.filled = Filled::of(rows, down);
    true
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Y = X W^T.
    Set,
    /// Y += X W^T.
    Add,
}

/// Y = X W^T, or Y += X W^T: X is what `inputs` were filled with for this matrix, `y` is
/// `[rows][outputs]`.
pub(crate) fn linear(compute: &Compute, inputs: &Inputs, w: &Matrix, y: &mut Rows, target: Target) {
    assert_eq!(y.columns(), w.outputs(), "outputs of a product");
    let rows = inputs.rows_for(w);
    match target {
        Target::Set => y.resize(rows),
        Target::Add => assert_eq!(y.rows(), rows, "rows of a sum"),
    }
    let y = y.share();
    let mut column = 0;
    for part in &w.parts {
        let to = Destination { y: &y, column, target };
        match part.form() {
            Form::Single(matrix) => single_matmul(compute, &inputs.single, matrix, to),
            Form::Rounded(matrix) => rounded_matmul(compute, &inputs.rounded, matrix, to),
            Form::Quantized(matrix) => quantized_matmul(compute, &inputs.quantized, matrix, to),
        }
        column += part.outputs();
    }
}

/// Where a product with a part goes: to the columns from `column` on, a multiple of 16. Rows have
/// room for whole vectors.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    pub y: &'a SharedRows<'a>,
    pub column: usize,
    pub target: Target,
}
