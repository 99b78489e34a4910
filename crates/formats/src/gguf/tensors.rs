//! The tensor table of a GGUF file.

use std::ops::Range;
use std::path::Path;

use super::cursor::Cursor;
use crate::dtype::unsupported_ggml_name;
use crate::error::QuotedText;
use crate::{Dtype, FormatError, TensorView};

/// `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;
/// ggml itself allows 63; converters of other tools write longer ones.
const MAX_NAME_BYTES: u64 = 1024;

/// A checked entry of the tensor table.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    dtype: Dtype,
    /// Outermost first.
    shape: Vec<usize>,
    /// Index of the file that has it.
    pub(super) file: usize,
    /// Bytes in the file.
    bytes: Range<usize>,
}

impl TensorInfo {
    /// Length and one byte of name, number of dimensions, one dimension, type, offset.
    pub(super) const MIN_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

    /// The tensor; `file` is the one that has it.
    pub(super) fn view<'a>(&'a self, file: &'a [u8]) -> TensorView<'a> {
        TensorView { name: &self.name, dtype: self.dtype, shape: self.shape.clone(), data: &file[self.bytes.clone()] }
    }

    /// Reads one entry; `bytes` still counts from the start of the data.
    fn read(cursor: &mut Cursor<'_>, i: u64, alignment: usize, file: usize) -> Result<Self, FormatError> {
        let name = name(cursor, i)?;
        let shape = shape(cursor, name)?;
        let dtype = dtype(cursor, name)?;
        let len = byte_len(cursor, name, dtype, &shape)?;
        let offset = cursor.u64(format_args!("offset of tensor {}", QuotedText(name)))?;
        let start = usize::try_from(offset).ok().filter(|start| start.is_multiple_of(alignment));
        let end = start.and_then(|start| start.checked_add(len));
        let (Some(start), Some(end)) = (start, end) else {
            let allowed = format_args!("a multiple of {alignment} inside the file");
            let field = format_args!("offset of tensor {}", QuotedText(name));
            return Err(FormatError::invalid(cursor.file(), field, offset, allowed));
        };
        Ok(Self { name: name.to_owned(), dtype, shape, file, bytes: start..end })
    }
}

/// Reads the table of `count` tensors, which was checked against the file's length. `file` is the
/// index of the file.
pub(super) fn read(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: usize,
    file: usize,
) -> Result<Vec<TensorInfo>, FormatError> {
    let mut tensors = Vec::with_capacity(count as usize);
    for i in 0..count {
        tensors.push(TensorInfo::read(cursor, i, alignment, file)?);
    }
    place(cursor, &mut tensors, alignment)?;
    refuse_overlaps(cursor, &mut tensors)?;
    Ok(tensors)
}

/// Sorts the tensors of a model by name. Two of one name are an error.
pub(super) fn sort(path: &Path, tensors: &mut [TensorInfo]) -> Result<(), FormatError> {
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let Some([twice, _]) = tensors.array_windows().find(|[a, b]| a.name == b.name) else { return Ok(()) };
    let found = format_args!("{} twice", QuotedText(&twice.name));
    Err(FormatError::invalid(path, "tensor names", found, "once"))
}

/// Moves the tensors' ranges from the start of the data to the start of the file, and checks that
/// they lie inside it.
fn place(cursor: &Cursor<'_>, tensors: &mut [TensorInfo], alignment: usize) -> Result<(), FormatError> {
    let data_start = cursor.position().next_multiple_of(alignment);
    let available = cursor.file_len().saturating_sub(data_start);
    for TensorInfo { name, bytes, .. } in tensors {
        if bytes.end > available {
            let field = format_args!("data of tensor {}", QuotedText(name));
            return Err(FormatError::truncated(cursor.file(), field, bytes.end as u64, available as u64));
        }
        *bytes = data_start + bytes.start..data_start + bytes.end;
    }
    Ok(())
}

fn refuse_overlaps(cursor: &Cursor<'_>, tensors: &mut [TensorInfo]) -> Result<(), FormatError> {
    tensors.sort_unstable_by_key(|info| info.bytes.start);
    let Some([a, b]) = tensors.array_windows().find(|[a, b]| a.bytes.end > b.bytes.start) else { return Ok(()) };
    let field = format_args!("offset of tensor {}", QuotedText(&b.name));
    let found = format_args!("bytes {:?} of the file", b.bytes);
    let allowed = format_args!("none of {:?}, which are tensor {}", a.bytes, QuotedText(&a.name));
    Err(FormatError::invalid(cursor.file(), field, found, allowed))
}

fn name<'a>(cursor: &mut Cursor<'a>, i: u64) -> Result<&'a str, FormatError> {
    let name = cursor.string(format_args!("name of tensor {i}"), MAX_NAME_BYTES)?;
    if name.is_empty() {
        let field = format_args!("name of tensor {i}");
        return Err(FormatError::invalid(cursor.file(), field, QuotedText(name), "at least one character"));
    }
    Ok(name)
}

fn shape(cursor: &mut Cursor<'_>, name: &str) -> Result<Vec<usize>, FormatError> {
    let field = |what: &str| format!("{what} of tensor {}", QuotedText(name));
    let dims = cursor.u32(field("number of dimensions"))?;
    if !(1..=MAX_DIMS).contains(&dims) {
        let allowed = format_args!("1 to {MAX_DIMS}");
        return Err(FormatError::invalid(cursor.file(), field("number of dimensions"), dims, allowed));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    for _ in 0..dims {
        let dim = cursor.u64(field("dimension"))?;
        let Some(dim) = usize::try_from(dim).ok().filter(|&dim| dim > 0) else {
            return Err(FormatError::invalid(cursor.file(), field("dimension"), dim, "at least 1"));
        };
        shape.push(dim);
    }
    shape.reverse();
    Ok(shape)
}

fn dtype(cursor: &mut Cursor<'_>, name: &str) -> Result<Dtype, FormatError> {
    let id = cursor.u32(format_args!("type of tensor {}", QuotedText(name)))?;
    Dtype::from_ggml(id).ok_or_else(|| {
        let found = format_args!("{id} ({})", unsupported_ggml_name(id));
        FormatError::invalid(cursor.file(), format_args!("type of tensor {}", QuotedText(name)), found, Dtype::names())
    })
}

/// Bytes of a tensor whose rows are whole blocks.
fn byte_len(cursor: &Cursor<'_>, name: &str, dtype: Dtype, shape: &[usize]) -> Result<usize, FormatError> {
    let row = shape.last().copied().unwrap_or(1);
    let elements = shape.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim));
    let len = dtype.bytes_of(row).and_then(|_| dtype.bytes_of(elements?));
    len.ok_or_else(|| {
        let allowed = format_args!("rows of whole blocks of {} and a size below 2^64", dtype.block_elements());
        let field = format_args!("shape of {dtype} tensor {}", QuotedText(name));
        FormatError::invalid(cursor.file(), field, format_args!("{shape:?}"), allowed)
    })
}
