//! Metadata values.

use std::fmt::{self, Display};

use super::cursor::Cursor;
use crate::FormatError;
use crate::error::QuotedText;

/// Longest string value; the largest in real files is an embedded `tokenizer.json`, under 20 MB.
const MAX_STRING_BYTES: u64 = 64 << 20;
/// Items of an array; the largest in real files are a vocabulary's merges, under 300,000.
const MAX_ARRAY_ITEMS: u64 = 1 << 24;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the variants are the format's types, by name
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of values of one type. Arrays of arrays, which the format has on paper and no model
/// uses, are refused.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the variants are the format's types, by name
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    pub(super) fn read(cursor: &mut Cursor<'_>, field: &impl Display) -> Result<Self, FormatError> {
        let kind = cursor.u32(format_args!("type of {field}"))?;
        Ok(match kind {
            0 => Self::U8(u8::from_le_bytes(cursor.array(field)?)),
            1 => Self::I8(i8::from_le_bytes(cursor.array(field)?)),
            2 => Self::U16(u16::from_le_bytes(cursor.array(field)?)),
            3 => Self::I16(i16::from_le_bytes(cursor.array(field)?)),
            4 => Self::U32(cursor.u32(field)?),
            5 => Self::I32(i32::from_le_bytes(cursor.array(field)?)),
            6 => Self::F32(f32::from_le_bytes(cursor.array(field)?)),
            7 => Self::Bool(boolean(cursor.array::<1>(field)?[0], cursor, field)?),
            8 => Self::String(cursor.string(field, MAX_STRING_BYTES)?.to_owned()),
            9 => Self::Array(Array::read(cursor, field)?),
            10 => Self::U64(cursor.u64(field)?),
            11 => Self::I64(i64::from_le_bytes(cursor.array(field)?)),
            12 => Self::F64(f64::from_le_bytes(cursor.array(field)?)),
            _ => return Err(unknown_type(cursor, field, kind, "0 to 12")),
        })
    }

    /// The value of any integer type.
    pub(super) fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }
}

/// Type and value, as an error shows them.
impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(v) => write!(f, "u8 {v}"),
            Self::I8(v) => write!(f, "i8 {v}"),
            Self::U16(v) => write!(f, "u16 {v}"),
            Self::I16(v) => write!(f, "i16 {v}"),
            Self::U32(v) => write!(f, "u32 {v}"),
            Self::I32(v) => write!(f, "i32 {v}"),
            Self::F32(v) => write!(f, "f32 {v}"),
            Self::Bool(v) => write!(f, "bool {v}"),
            Self::String(v) => write!(f, "string {}", QuotedText(v)),
            Self::Array(v) => write!(f, "array of {} {}", v.len(), v.item_type()),
            Self::U64(v) => write!(f, "u64 {v}"),
            Self::I64(v) => write!(f, "i64 {v}"),
            Self::F64(v) => write!(f, "f64 {v}"),
        }
    }
}

impl Array {
    fn read(cursor: &mut Cursor<'_>, field: &impl Display) -> Result<Self, FormatError> {
        let kind = cursor.u32(format_args!("item type of {field}"))?;
        Ok(match kind {
            0 => Self::U8(numbers(cursor, field, u8::from_le_bytes)?),
            1 => Self::I8(numbers(cursor, field, i8::from_le_bytes)?),
            2 => Self::U16(numbers(cursor, field, u16::from_le_bytes)?),
            3 => Self::I16(numbers(cursor, field, i16::from_le_bytes)?),
            4 => Self::U32(numbers(cursor, field, u32::from_le_bytes)?),
            5 => Self::I32(numbers(cursor, field, i32::from_le_bytes)?),
            6 => Self::F32(numbers(cursor, field, f32::from_le_bytes)?),
            7 => Self::Bool(booleans(cursor, field)?),
            8 => Self::String(strings(cursor, field)?),
            10 => Self::U64(numbers(cursor, field, u64::from_le_bytes)?),
            11 => Self::I64(numbers(cursor, field, i64::from_le_bytes)?),
            12 => Self::F64(numbers(cursor, field, f64::from_le_bytes)?),
            _ => return Err(unknown_type(cursor, format_args!("items of {field}"), kind, "0 to 12 but 9 (array)")),
        })
    }

    /// Items.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The items of any integer type, if all of them fit `T`.
    pub(super) fn integers<T: TryFrom<i128>>(&self) -> Option<Vec<T>> {
        match self {
            Self::U8(v) => converted(v),
            Self::I8(v) => converted(v),
            Self::U16(v) => converted(v),
            Self::I16(v) => converted(v),
            Self::U32(v) => converted(v),
            Self::I32(v) => converted(v),
            Self::U64(v) => converted(v),
            Self::I64(v) => converted(v),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) => None,
        }
    }

    fn item_type(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }
}

fn converted<I: Copy + Into<i128>, T: TryFrom<i128>>(items: &[I]) -> Option<Vec<T>> {
    items.iter().map(|&item| T::try_from(item.into()).ok()).collect()
}

fn numbers<T, const N: usize>(
    cursor: &mut Cursor<'_>,
    field: &impl Display,
    from_le_bytes: fn([u8; N]) -> T,
) -> Result<Vec<T>, FormatError> {
    let count = cursor.count(format_args!("items of {field}"), MAX_ARRAY_ITEMS, N as u64)?;
    let bytes = cursor.take(count * N as u64, field)?;
    Ok(bytes.as_chunks().0.iter().map(|&item| from_le_bytes(item)).collect())
}

fn booleans(cursor: &mut Cursor<'_>, field: &impl Display) -> Result<Vec<bool>, FormatError> {
    let bytes = numbers(cursor, field, u8::from_le_bytes)?;
    bytes.into_iter().map(|byte| boolean(byte, cursor, field)).collect()
}

fn boolean(byte: u8, cursor: &Cursor<'_>, field: &impl Display) -> Result<bool, FormatError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(FormatError::invalid(cursor.file(), field, format_args!("bool {byte}"), "0 or 1")),
    }
}

fn strings(cursor: &mut Cursor<'_>, field: &impl Display) -> Result<Vec<String>, FormatError> {
    const LENGTH_BYTES: u64 = 8;
    let count = cursor.count(format_args!("items of {field}"), MAX_ARRAY_ITEMS, LENGTH_BYTES)?;
    let item = |i: u64, cursor: &mut Cursor<'_>| -> Result<String, FormatError> {
        Ok(cursor.string(format_args!("{field}[{i}]"), MAX_STRING_BYTES)?.to_owned())
    };
    let mut strings = Vec::with_capacity(count as usize);
    for i in 0..count {
        strings.push(item(i, cursor)?);
    }
    Ok(strings)
}

fn unknown_type(cursor: &Cursor<'_>, field: impl Display, kind: u32, allowed: &str) -> FormatError {
    FormatError::invalid(cursor.file(), format_args!("type of {field}"), kind, allowed)
}
