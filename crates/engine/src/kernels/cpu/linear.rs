//! Weight matrices in the form that suits their file's type, and products with them.

use baton_formats::Dtype;

use crate::kernels::{Isa, Rows, Threads};

use super::matmul::{PackedMatrix, matmul};
use super::quantize::QuantizedRows;
use super::rounded::RoundedRows;
use super::quantized::{PANEL, QuantizedMatrix, quantized_matmul};

/// A part of a matrix: some of its outputs.
pub(crate) enum MatrixPart {
    /// Elements as f32, or as halves where the file has them.
    Float(PackedMatrix),
    /// Codes and scales.
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
}

/// A weight matrix, `outputs x inputs`: parts one below the other.
pub(crate) struct Matrix {
    parts: Vec<MatrixPart>,
}

impl Matrix {
    /// `parts` have the same inputs; all but the last have whole vectors of outputs ([`Self::can_follow`]).
    pub fn new(parts: Vec<MatrixPart>) -> Self {
        let (_, first) = parts.split_last().unwrap_or_else(|| unreachable!("a matrix without parts"));
        assert!(first.iter().all(|part| Self::can_follow(part.outputs())), "a part in the middle of a vector");
        Self { parts }
    }

    /// Whether a part may begin at this output.
    pub fn can_follow(outputs: usize) -> bool {
        outputs.is_multiple_of(PANEL)
    }

    /// Whether a matrix with rows of this type and length can stay quantized.
    pub fn stays_quantized(dtype: Dtype, inputs: usize) -> bool {
        dtype.code_form().is_some() && dtype.bytes_of(inputs).is_some()
    }

    /// Whether any part computes with quantized activations.
    pub fn is_quantized(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, MatrixPart::Quantized(_)))
    }

    /// Whether any part computes with activations rounded to bfloat16.
    pub fn is_rounded(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, MatrixPart::Float(matrix) if matrix.is_rounded()))
    }

    /// One row: an embedding, where the matrix is the head too.
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

/// Activations in the forms that products take: working memory of [`linear`].
pub(crate) struct Inputs {
    quantized: QuantizedRows,
    rounded: RoundedRows,
}

impl Inputs {
    /// No rows yet.
    pub fn new() -> Self {
        Self { quantized: QuantizedRows::new(), rounded: RoundedRows::new() }
    }
}

/// Y = X W^T: `x` is `[rows][inputs]`, `y` becomes `[rows][outputs]`.
pub(crate) fn linear(isa: Isa, threads: &Threads, x: &Rows, w: &Matrix, y: &mut Rows, inputs: &mut Inputs) {
    let outputs: usize = w.parts.iter().map(MatrixPart::outputs).sum();
    assert_eq!(y.columns(), outputs, "outputs of a product");
    y.resize(x.rows());
    if w.is_quantized() {
        inputs.quantized.quantize(isa, threads, x);
    }
    if w.is_rounded() {
        inputs.rounded.round(isa, threads, x);
    }
    let (shared, mut column) = (y.share(), 0);
    // One after the other: the last vector of a part that is not whole is padding, which the next part overwrites.
    for part in &w.parts {
        match part {
            MatrixPart::Float(matrix) => matmul(isa, threads, x, &inputs.rounded, matrix, &shared, column),
            MatrixPart::Quantized(matrix) => quantized_matmul(isa, threads, &inputs.quantized, matrix, &shared, column),
        }
        column += part.outputs();
    }
}
