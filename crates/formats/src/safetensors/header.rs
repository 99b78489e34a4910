//! The header of a safetensors file (the format's README in the `safetensors` repository).
//!
//! ```text
//! length:u64  { "name": { "dtype": .., "shape": [..], "data_offsets": [begin, end] }, .., "__metadata__": { string: string } }  data
//! ```

use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::QuotedText;
use crate::{Dtype, FormatError};

/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;
/// Longest header, as in the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Tensors a file or an index may have.
pub(super) const MAX_TENSORS: usize = 1 << 18;
/// Dimensions a tensor may have; weights have one or two.
const MAX_DIMS: usize = 8;

/// A checked header.
pub(super) struct Header {
    /// In the order of their data.
    pub(super) tensors: Vec<(String, TensorInfo)>,
}

/// A checked entry of the header.
pub(super) struct TensorInfo {
    pub(super) dtype: StoredDtype,
    /// Outermost first.
    pub(super) shape: Vec<usize>,
    /// Bytes in the file.
    pub(super) bytes: Range<usize>,
}

impl Header {
    /// Reads and checks the header of a file. As in the reference implementation, the tensors' data
    /// follow one another without holes up to the end of the file.
    pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<Self, FormatError> {
        let (json, data_start) = split(file, bytes)?;
        let mut tensors = parse(file, json)?;
        tensors.sort_unstable_by_key(|(_, info)| (info.bytes.start, info.bytes.end));
        let end = check_layout(file, &tensors, bytes.len() - data_start)?;
        if end != bytes.len() - data_start {
            let found = bytes.len() - data_start;
            let allowed = format!("{end}, the end of the last tensor");
            return Err(FormatError::invalid(file, "bytes of data", found, allowed));
        }
        for (_, info) in &mut tensors {
            info.bytes = data_start + info.bytes.start..data_start + info.bytes.end;
        }
        Ok(Self { tensors })
    }
}

/// The header's text and where the data begins.
fn split<'a>(file: &Path, bytes: &'a [u8]) -> Result<(&'a str, usize), FormatError> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(FormatError::truncated(file, "header length", LENGTH_BYTES as u64, bytes.len() as u64));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        let allowed = format_args!("at most {MAX_HEADER_BYTES} bytes");
        return Err(FormatError::invalid(file, "header length", length, allowed));
    }
    let Some(header) = rest.get(..length as usize) else {
        return Err(FormatError::truncated(file, "header", length, rest.len() as u64));
    };
    let json = std::str::from_utf8(header).map_err(|error| FormatError::invalid(file, "header", error, "UTF-8"))?;
    Ok((json, LENGTH_BYTES + header.len()))
}

/// The entries of the header, their `bytes` counted from the start of the data.
fn parse(file: &Path, json: &str) -> Result<Vec<(String, TensorInfo)>, FormatError> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let tensors = deserializer.deserialize_map(Tensors).and_then(|tensors| deserializer.end().map(|()| tensors));
    let mut tensors = tensors.map_err(|error| {
        let allowed = "a JSON object of {dtype, shape, data_offsets} by tensor name";
        FormatError::invalid(file, "header", error, allowed)
    })?;
    tensors.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    if let Some([(name, _), _]) = tensors.array_windows().find(|[a, b]| a.0 == b.0) {
        return Err(FormatError::invalid(file, "tensor names", format_args!("{} twice", QuotedText(name)), "once"));
    }
    Ok(tensors)
}

/// Checks that each tensor begins where the one before ends, has the bytes its shape needs and ends
/// inside the `available` bytes. Returns the end of the last.
fn check_layout(file: &Path, tensors: &[(String, TensorInfo)], available: usize) -> Result<usize, FormatError> {
    let mut end = 0;
    for (name, info) in tensors {
        let field = |what: &str| format!("{what} of tensor {}", QuotedText(name));
        if info.bytes.start != end {
            let allowed = format_args!("begin {end}, where the tensor before ends");
            return Err(FormatError::invalid(file, field("data_offsets"), format_args!("{:?}", info.bytes), allowed));
        }
        if info.bytes.end > available {
            return Err(FormatError::truncated(file, field("data"), info.bytes.end as u64, available as u64));
        }
        if info.dtype.bytes_of(&info.shape) != info.bytes.end.checked_sub(info.bytes.start) {
            let found = format_args!("{:?} for {} {:?}", info.bytes, info.dtype, info.shape);
            return Err(FormatError::invalid(
                file,
                field("data_offsets"),
                found,
                "as many bytes as dtype and shape need",
            ));
        }
        end = info.bytes.end;
    }
    Ok(end)
}

/// The format's element types. A file may hold any; Baton reads the floats of 16 and 32 bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredDtype {
    name: &'static str,
    bits: usize,
}

impl StoredDtype {
    const ALL: [Self; 21] = [
        Self { name: "BOOL", bits: 8 },
        Self { name: "F4", bits: 4 },
        Self { name: "F6_E2M3", bits: 6 },
        Self { name: "F6_E3M2", bits: 6 },
        Self { name: "U8", bits: 8 },
        Self { name: "I8", bits: 8 },
        Self { name: "F8_E5M2", bits: 8 },
        Self { name: "F8_E4M3", bits: 8 },
        Self { name: "F8_E8M0", bits: 8 },
        Self { name: "F8_E4M3FNUZ", bits: 8 },
        Self { name: "F8_E5M2FNUZ", bits: 8 },
        Self { name: "I16", bits: 16 },
        Self { name: "U16", bits: 16 },
        Self { name: "F16", bits: 16 },
        Self { name: "BF16", bits: 16 },
        Self { name: "I32", bits: 32 },
        Self { name: "U32", bits: 32 },
        Self { name: "F32", bits: 32 },
        Self { name: "F64", bits: 64 },
        Self { name: "I64", bits: 64 },
        Self { name: "U64", bits: 64 },
    ];

    /// The type, if it is one that Baton reads.
    pub(super) fn readable(self) -> Option<Dtype> {
        [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|dtype| dtype.as_str() == self.name)
    }

    /// Bytes of a tensor; `None` if the product overflows or is no whole number of bytes.
    fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let bits = shape.iter().try_fold(self.bits, |product, &dim| product.checked_mul(dim))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl<'de> Deserialize<'de> for StoredDtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = Self::ALL.into_iter().find(|dtype| dtype.name == name);
        known.ok_or_else(|| D::Error::custom(format_args!("unknown dtype {}", QuotedText(&name))))
    }
}

#[derive(Deserialize)]
struct Entry {
    dtype: StoredDtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

/// Dimensions, refused at the first one too many, before memory is spent on them.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;

        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == MAX_DIMS {
                        return Err(A::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }

        deserializer.deserialize_seq(Dims)
    }
}

/// Reads the header's object, so that a name given twice is seen.
struct Tensors;

impl<'de> Visitor<'de> for Tensors {
    type Value = Vec<(String, TensorInfo)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom(format_args!("more than {MAX_TENSORS} tensors")));
            }
            let entry: Entry = map
                .next_value()
                .map_err(|error| A::Error::custom(format_args!("tensor {}: {error}", QuotedText(&name))))?;
            let bytes = entry.data_offsets.0..entry.data_offsets.1;
            tensors.push((name, TensorInfo { dtype: entry.dtype, shape: entry.shape.0, bytes }));
        }
        Ok(tensors)
    }
}
