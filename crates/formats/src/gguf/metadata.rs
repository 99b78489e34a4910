//! The metadata of a GGUF file: typed values by key.

use std::path::PathBuf;

use super::cursor::Cursor;
use super::value::{Array, Value};
use crate::FormatError;
use crate::error::QuotedText;

/// Longest key, from the format's specification.
const MAX_KEY_BYTES: u64 = (1 << 16) - 1;

/// What a GGUF file says about its model. The typed getters give `None` for a key that is not there
/// and an error for a value of another type. An integer of any width converts if its value fits,
/// and so does f64 to f32.
#[derive(Debug, Clone)]
pub struct Metadata {
    file: PathBuf,
    /// Sorted by key.
    entries: Vec<(String, Value)>,
}

impl Metadata {
    /// Length and one byte of key, type, one byte of value.
    pub(super) const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;

    /// Reads `count` entries; `count` was checked against the file's length.
    pub(super) fn read(cursor: &mut Cursor<'_>, count: u64) -> Result<Self, FormatError> {
        let file = cursor.file();
        let mut entries = Vec::with_capacity(count as usize);
        for i in 0..count {
            entries.push(entry(cursor, i)?);
        }
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(twice) = entries.array_windows().find(|[a, b]| a.0 == b.0) {
            return Err(FormatError::invalid(
                file,
                "metadata keys",
                format_args!("{} twice", QuotedText(&twice[0].0)),
                "once",
            ));
        }
        Ok(Self { file: file.to_owned(), entries })
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries, sorted by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let at = self.entries.binary_search_by(|(entry, _)| entry.as_str().cmp(key)).ok()?;
        self.entries.get(at).map(|(_, value)| value)
    }

    /// The value of a key, as a `T`.
    ///
    /// # Errors
    ///
    /// [`FormatError::WrongType`] if the value is no `T`; the named getters below fail the same
    /// way.
    pub fn typed<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).ok_or_else(|| FormatError::WrongType {
            file: self.file.clone(),
            key: QuotedText(key).to_string(),
            found: value.to_string(),
            expected: T::EXPECTED,
        })
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    ///
    /// [`FormatError::Missing`] if it is not, [`FormatError::WrongType`] if it is no `T`.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, FormatError> {
        self.typed(key)?.ok_or_else(|| FormatError::missing(&self.file, "metadata key", key))
    }

    /// An integer from 0 to 2^32 - 1.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, FormatError> {
        self.typed(key)
    }

    /// An integer from 0 to 2^64 - 1.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, FormatError> {
        self.typed(key)
    }

    /// An integer from -2^31 to 2^31 - 1.
    pub fn i32(&self, key: &str) -> Result<Option<i32>, FormatError> {
        self.typed(key)
    }

    /// A float; f64 is rounded.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, FormatError> {
        self.typed(key)
    }

    /// True or false.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, FormatError> {
        self.typed(key)
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, FormatError> {
        self.typed(key)
    }

    /// Strings.
    pub fn str_array(&self, key: &str) -> Result<Option<&[String]>, FormatError> {
        self.typed(key)
    }

    /// Floats; f64 is rounded.
    pub fn f32_array(&self, key: &str) -> Result<Option<Vec<f32>>, FormatError> {
        self.typed(key)
    }

    /// Integers from -2^31 to 2^31 - 1.
    pub fn i32_array(&self, key: &str) -> Result<Option<Vec<i32>>, FormatError> {
        self.typed(key)
    }

    /// Integers from 0 to 2^32 - 1.
    pub fn u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, FormatError> {
        self.typed(key)
    }
}

fn entry(cursor: &mut Cursor<'_>, i: u64) -> Result<(String, Value), FormatError> {
    let field = format_args!("key of metadata entry {i}").to_string();
    let key = cursor.string(&field, MAX_KEY_BYTES)?;
    if key.is_empty() {
        return Err(FormatError::invalid(cursor.file(), field, QuotedText(key), "at least one character"));
    }
    let value = Value::read(cursor, &format_args!("metadata {}", QuotedText(key)))?;
    Ok((key.to_owned(), value))
}

/// A type that a metadata value can be read as.
pub trait FromValue<'a>: Sized {
    /// What an error says was expected.
    const EXPECTED: &'static str;

    /// The value as this type, or `None` if it is of another type or does not fit.
    fn from_value(value: &'a Value) -> Option<Self>;
}

macro_rules! integers {
    ($($integer:ty: $one:literal, $many:literal;)*) => {$(
        impl FromValue<'_> for $integer {
            const EXPECTED: &'static str = $one;

            fn from_value(value: &Value) -> Option<Self> {
                value.integer()?.try_into().ok()
            }
        }

        impl FromValue<'_> for Vec<$integer> {
            const EXPECTED: &'static str = $many;

            fn from_value(value: &Value) -> Option<Self> {
                if let Value::Array(array) = value { array.integers() } else { None }
            }
        }
    )*};
}

integers! {
    u32: "an integer from 0 to 4294967295", "an array of integers from 0 to 4294967295";
    u64: "an integer from 0 to 18446744073709551615", "an array of integers from 0 to 18446744073709551615";
    i32: "an integer from -2147483648 to 2147483647", "an array of integers from -2147483648 to 2147483647";
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::F32(v) => Some(*v),
            Value::F64(v) => Some(*v as Self),
            _ => None,
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    const EXPECTED: &'static str = "an array of floats";

    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Array(Array::F32(v)) => Some(v.clone()),
            Value::Array(Array::F64(v)) => Some(v.iter().map(|&v| v as f32).collect()),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";

    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Bool(v) = value { Some(*v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::String(v) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const EXPECTED: &'static str = "an array of strings";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::String(v)) = value { Some(v) } else { None }
    }
}
