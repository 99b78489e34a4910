//! GGUF, versions 2 and 3, little endian (`docs/gguf.md` of the ggml repository).
//!
//! ```text
//! "GGUF" version:u32 tensors:u64 metadata:u64
//! metadata x { key:string type:u32 value }
//! tensors  x { name:string dims:u32 dim:u64.. type:u32 offset:u64 }
//! padding to general.alignment, then the tensors' bytes, each at its offset
//! ```

mod cursor;
mod metadata;
mod split;
mod tensors;
mod value;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::QuotedText;
use crate::map::{Bytes, map_file};
use crate::{FormatError, TensorView};
use cursor::Cursor;
pub use metadata::{FromValue, Metadata};
pub(crate) use split::is_later_file;
use tensors::TensorInfo;
pub use value::{Array, Value};

/// First bytes of every GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// Metadata entries a file may have; real files have a few dozen.
const MAX_METADATA: u64 = 1 << 16;
/// Tensors a file may have; the largest known models have under 100,000.
const MAX_TENSORS: u64 = 1 << 18;
/// `GGUF_DEFAULT_ALIGNMENT`.
const DEFAULT_ALIGNMENT: u32 = 32;
/// More than a huge page serves no purpose.
const MAX_ALIGNMENT: u32 = 1 << 21;

/// A checked GGUF file, or several that are one model.
pub struct Gguf {
    /// The first, which has the metadata.
    path: PathBuf,
    files: Vec<Bytes>,
    metadata: Metadata,
    /// Sorted by name.
    tensors: Vec<TensorInfo>,
}

impl Gguf {
    /// Maps and checks a file. If it is the first of a model in several files, those beside it are
    /// opened, too.
    ///
    /// # Errors
    ///
    /// A file cannot be read, is cut off, or breaks a rule of the format or a bound of Baton.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        Self::read(path, map_file(path)?)
    }

    /// Checks a file that is in memory; errors call it `<memory>`.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn parse(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Self, FormatError> {
        Self::read(Path::new("<memory>"), Bytes::Given(Box::new(bytes)))
    }

    fn read(path: &Path, bytes: Bytes) -> Result<Self, FormatError> {
        let (metadata, mut tensors) = header(path, &bytes, 0)?;
        let mut files = vec![bytes];
        let others = split::others(path, &metadata)?;
        for (index, other) in (1..).zip(&others) {
            let bytes = map_file(other)?;
            let (own, more) = header(other, &bytes, index)?;
            split::check_file(other, &own, index as u32, others.len() as u32 + 1)?;
            tensors.extend(more);
            files.push(bytes);
        }
        split::check_tensors(path, &metadata, tensors.len())?;
        tensors::sort(path, &mut tensors)?;
        Ok(Self { path: path.to_owned(), files, metadata, tensors })
    }

    /// The file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of all files in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.all().len() as u64).sum()
    }

    /// Everything the file says about the model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|info| self.view(info))
    }

    /// See [`crate::ModelFile::release`].
    pub(crate) fn release(&self, tensor: &TensorView<'_>) {
        if let Some(info) = self.find(tensor.name) {
            self.files[info.file].release(tensor.data);
        }
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// [`FormatError::Missing`] if the file has none.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, FormatError> {
        let info = self.find(name).ok_or_else(|| FormatError::missing(&self.path, "tensor", name))?;
        Ok(self.view(info))
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        let at = self.tensors.binary_search_by(|info| info.name.as_str().cmp(name)).ok()?;
        self.tensors.get(at)
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorView<'a> {
        info.view(self.files[info.file].all())
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metadata = self.metadata.len();
        let tensors = self.tensors.len();
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("metadata", &metadata)
            .field("tensors", &tensors)
            .finish_non_exhaustive()
    }
}

/// The metadata and the tensors of a model's file number `index`.
fn header(path: &Path, bytes: &Bytes, index: usize) -> Result<(Metadata, Vec<TensorInfo>), FormatError> {
    let mut cursor = Cursor::new(path, bytes.all());
    let counts = Counts::read(&mut cursor)?;
    let metadata = Metadata::read(&mut cursor, counts.metadata)?;
    let alignment = alignment(path, &metadata)?;
    let tensors = tensors::read(&mut cursor, counts.tensors, alignment, index)?;
    Ok((metadata, tensors))
}

/// What the first 24 bytes promise.
struct Counts {
    tensors: u64,
    metadata: u64,
}

impl Counts {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, FormatError> {
        let magic = cursor.array::<4>("magic")?;
        if &magic != MAGIC {
            let found = format!("bytes {magic:02x?}");
            return Err(FormatError::invalid(cursor.file(), "magic", found, "\"GGUF\""));
        }
        check_version(cursor)?;
        let tensors = cursor.count("number of tensors", MAX_TENSORS, TensorInfo::MIN_BYTES)?;
        let metadata = cursor.count("number of metadata entries", MAX_METADATA, Metadata::MIN_ENTRY_BYTES)?;
        Ok(Self { tensors, metadata })
    }
}

fn check_version(cursor: &mut Cursor<'_>) -> Result<(), FormatError> {
    let version = cursor.u32("version")?;
    if matches!(version, 2 | 3) {
        return Ok(());
    }
    let swapped = version.swap_bytes();
    let found = if swapped < version { format!("{swapped} in big-endian order") } else { version.to_string() };
    Err(FormatError::invalid(cursor.file(), "version", found, "2 or 3, little endian"))
}

fn alignment(path: &Path, metadata: &Metadata) -> Result<usize, FormatError> {
    let key = "general.alignment";
    let alignment = metadata.u32(key)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || !(8..=MAX_ALIGNMENT).contains(&alignment) {
        let allowed = format!("a power of two from 8 to {MAX_ALIGNMENT}");
        return Err(FormatError::invalid(path, format_args!("metadata {}", QuotedText(key)), alignment, allowed));
    }
    Ok(alignment as usize)
}
