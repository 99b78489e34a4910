//! Reads little-endian fields from a file's bytes, each checked against what is left.

use std::fmt::Display;
use std::path::Path;

use crate::FormatError;

/// A position in a file's bytes. Every read names the field, for the error.
pub(super) struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a Path, bytes: &'a [u8]) -> Self {
        Self { file, bytes, at: 0 }
    }

    pub(super) fn file(&self) -> &'a Path {
        self.file
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes of the whole file.
    pub(super) fn file_len(&self) -> usize {
        self.bytes.len()
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: u64, field: impl Display) -> Result<&'a [u8], FormatError> {
        let left = &self.bytes[self.at..];
        let Some(taken) = usize::try_from(len).ok().and_then(|len| left.get(..len)) else {
            return Err(FormatError::truncated(self.file, field, len, left.len() as u64));
        };
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, field: impl Display) -> Result<[u8; N], FormatError> {
        let taken = self.take(N as u64, field)?;
        Ok(*taken.first_chunk().expect("take gives as many bytes as asked"))
    }

    pub(super) fn u32(&mut self, field: impl Display) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u64(&mut self, field: impl Display) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A count of items of at least `min_bytes` bytes each: at most `max`, and no more than the
    /// rest of the file can hold. What it returns is safe to reserve memory for.
    pub(super) fn count(&mut self, field: impl Display, max: u64, min_bytes: u64) -> Result<u64, FormatError> {
        let count = self.u64(&field)?;
        if count > max {
            return Err(FormatError::invalid(self.file, field, count, format_args!("at most {max}")));
        }
        let needed = count.saturating_mul(min_bytes);
        let left = (self.bytes.len() - self.at) as u64;
        if needed > left {
            return Err(FormatError::truncated(self.file, format_args!("{field} ({count})"), needed, left));
        }
        Ok(count)
    }

    /// A string of at most `max` bytes.
    pub(super) fn string(&mut self, field: impl Display, max: u64) -> Result<&'a str, FormatError> {
        let len = self.u64(format_args!("length of {field}"))?;
        if len > max {
            let allowed = format_args!("at most {max} bytes");
            return Err(FormatError::invalid(self.file, format_args!("length of {field}"), len, allowed));
        }
        let bytes = self.take(len, &field)?;
        std::str::from_utf8(bytes).map_err(|error| FormatError::invalid(self.file, field, error, "UTF-8"))
    }
}
