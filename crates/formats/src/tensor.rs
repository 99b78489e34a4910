//! A tensor in a mapped file.

use std::ops::Range;

use crate::error::QuotedText;
use crate::{Dtype, FormatError, QuantBlock, dequantize, quants};

/// A tensor in a mapped file. Views from this crate's readers have `data` that fits `shape` and
/// `dtype`, and rows of whole blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major, outermost first; the elements of the last dimension lie side by side. (GGUF
    /// writes its dimensions the other way round.) Empty for a scalar.
    pub shape: Vec<usize>,
    /// The bytes in the file, of any alignment.
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Elements in all.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of one row: the last dimension.
    pub fn row_elements(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        let outer = self.shape.len().saturating_sub(1);
        self.shape[..outer].iter().product()
    }

    /// Dequantizes the rows of `range` to `out`, which holds exactly `range.len() * row_elements()`
    /// elements.
    ///
    /// # Errors
    ///
    /// [`FormatError::Buffer`] if the range lies outside the tensor or `out` has another length.
    pub fn dequantize_rows(&self, range: Range<usize>, out: &mut [f32]) -> Result<(), FormatError> {
        if range.start > range.end || range.end > self.rows() {
            return Err(FormatError::buffer(QuotedText(self.name), "end of the row range", range.end, self.rows()));
        }
        let data = self.row_bytes(&range).ok_or_else(|| {
            let expected = self.dtype.bytes_of(self.elements()).unwrap_or(0);
            FormatError::buffer(QuotedText(self.name), "bytes of the tensor", self.data.len(), expected)
        })?;
        if out.len() != range.len() * self.row_elements() {
            let expected = range.len() * self.row_elements();
            return Err(FormatError::buffer(QuotedText(self.name), "elements of the output", out.len(), expected));
        }
        dequantize(self.dtype, data, out)
    }

    /// Dequantizes the whole tensor to `out`, which holds exactly `elements()` elements.
    ///
    /// # Errors
    ///
    /// As [`Self::dequantize_rows`].
    pub fn dequantize(&self, out: &mut [f32]) -> Result<(), FormatError> {
        self.dequantize_rows(0..self.rows(), out)
    }

    /// The quants of one row of a quantized tensor; `out` holds a 32nd of its elements.
    ///
    /// # Errors
    ///
    /// [`FormatError::Buffer`] if the row lies outside the tensor, `out` has another length, or the
    /// type is not quantized.
    pub fn row_quants(&self, row: usize, out: &mut [QuantBlock]) -> Result<(), FormatError> {
        let data = if row < self.rows() { self.row_bytes(&(row..row + 1)) } else { None };
        let data = data.ok_or_else(|| FormatError::buffer(QuotedText(self.name), "row", row, self.rows()))?;
        quants(self.dtype, data, out)
    }

    fn row_bytes(&self, range: &Range<usize>) -> Option<&[u8]> {
        let row = self.dtype.bytes_of(self.row_elements())?;
        self.data.get(range.start.checked_mul(row)?..range.end.checked_mul(row)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[usize], data: &'static [u8]) -> TensorView<'static> {
        TensorView { name: "t", dtype: Dtype::F16, shape: shape.to_vec(), data }
    }

    /// f16 of 0, 1, 2, 3, -4, 0.5.
    const SIX: &[u8] = &[0, 0, 0, 0x3c, 0, 0x40, 0, 0x42, 0, 0xc4, 0, 0x38];

    #[test]
    fn tensor_rows_are_slices_of_the_last_dimension() {
        let tensor = view(&[3, 2], SIX);
        let mut out = [9.0; 4];
        tensor.dequantize_rows(1..3, &mut out).unwrap();
        assert_eq!(out, [2.0, 3.0, -4.0, 0.5]);
        tensor.dequantize_rows(2..2, &mut []).unwrap();
        let mut all = [9.0; 6];
        view(&[6], SIX).dequantize(&mut all).unwrap();
        assert_eq!(all, [0.0, 1.0, 2.0, 3.0, -4.0, 0.5]);
    }

    #[test]
    fn scalar_tensor_is_one_row_of_one() {
        let mut out = [9.0];
        view(&[], &SIX[2..4]).dequantize(&mut out).unwrap();
        assert_eq!(out, [1.0]);
    }

    #[test]
    fn tensor_dequantize_of_wrong_size_is_an_error() {
        let tensor = view(&[3, 2], SIX);
        assert!(tensor.dequantize_rows(2..4, &mut [0.0; 4]).is_err());
        assert!(tensor.dequantize_rows(1..3, &mut [0.0; 3]).is_err());
        #[allow(clippy::reversed_empty_ranges)] // what a confused caller passes
        let reversed = 2..1;
        assert!(tensor.dequantize_rows(reversed, &mut []).is_err());
        assert!(view(&[4, 2], SIX).dequantize(&mut [0.0; 8]).is_err());
        let error = tensor.dequantize(&mut [0.0; 5]).unwrap_err();
        assert_eq!(error.to_string(), "tensor \"t\": elements of the output: found 5, expected 6");
    }
}
