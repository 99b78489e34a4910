//! safetensors: a file, or a Hugging Face model folder (`config.json` with `model.safetensors`, or
//! with shards and their index).

mod folder;
mod header;

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::QuotedText;
use crate::map::{Bytes, map_file};
use crate::{Dtype, FormatError, TensorView};
use folder::Folder;
use header::{Header, TensorInfo};

/// A checked safetensors file or model folder.
pub struct Safetensors {
    path: PathBuf,
    config: Value,
    shards: Vec<Shard>,
    /// Which shard has a tensor; sorted by name.
    tensors: Vec<Placed>,
}

/// A tensor's name, its shard, and its entry in that shard's header.
struct Placed {
    name: String,
    shard: usize,
    info: TensorInfo,
}

/// One mapped file.
struct Shard {
    path: PathBuf,
    bytes: Bytes,
}

impl Safetensors {
    /// Whether a folder has weights in safetensors.
    pub(crate) fn is_in(folder: &Path) -> bool {
        [folder::SINGLE, folder::INDEX].iter().any(|name| folder.join(name).exists())
    }

    /// Opens a `.safetensors` file or a model folder.
    ///
    /// # Errors
    ///
    /// A file cannot be read, is cut off, or breaks a rule of the format or a bound of Baton.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        if !path.is_dir() {
            return Self::read(path, map_file(path)?);
        }
        let folder = Folder::open(path)?;
        let mut model = Self { path: path.to_owned(), config: folder.config, shards: Vec::new(), tensors: Vec::new() };
        for name in &folder.shards {
            let shard = path.join(name);
            let bytes = map_file(&shard)?;
            model.add_shard(shard, bytes)?;
        }
        model.sort()?;
        if let Some(index) = folder.index {
            index.check(|name| model.find(name).and_then(|placed| model.shards[placed.shard].path.file_name()))?;
        }
        Ok(model)
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
        let mut model = Self { path: path.to_owned(), config: Value::Null, shards: Vec::new(), tensors: Vec::new() };
        model.add_shard(path.to_owned(), bytes)?;
        model.sort()?;
        Ok(model)
    }

    fn add_shard(&mut self, path: PathBuf, bytes: Bytes) -> Result<(), FormatError> {
        let header = Header::read(&path, bytes.all())?;
        let shard = self.shards.len();
        self.tensors.extend(header.tensors.into_iter().map(|(name, info)| Placed { name, shard, info }));
        self.shards.push(Shard { path, bytes });
        Ok(())
    }

    fn sort(&mut self) -> Result<(), FormatError> {
        self.tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let Some([a, b]) = self.tensors.array_windows().find(|[a, b]| a.name == b.name) else { return Ok(()) };
        let found = format_args!("{} also in {}", QuotedText(&a.name), self.shards[a.shard].path.display());
        Err(FormatError::invalid(&self.shards[b.shard].path, "tensor names", found, "once"))
    }

    /// The file or folder, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// See [`crate::ModelFile::release`].
    pub(crate) fn release(&self, tensor: &TensorView<'_>) {
        self.shards.iter().for_each(|shard| shard.bytes.release(tensor.data));
    }

    /// Size of all files with tensors, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.data().len() as u64).sum()
    }

    /// A folder's `config.json`, an object; null for a single file.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Names of all tensors, sorted, of whatever type.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.iter().map(|placed| placed.name.as_str())
    }

    /// All tensors of types that Baton reads (F32, F16, BF16), sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().filter_map(|placed| self.view(placed))
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// There is none, or it has a type that Baton does not read.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, FormatError> {
        let placed = self.find(name).ok_or_else(|| FormatError::missing(&self.path, "tensor", name))?;
        self.view(placed).ok_or_else(|| {
            let shard = &self.shards[placed.shard].path;
            let allowed = [Dtype::F32, Dtype::F16, Dtype::BF16].map(Dtype::as_str).join(", ");
            FormatError::invalid(
                shard,
                format_args!("dtype of tensor {}", QuotedText(name)),
                placed.info.dtype,
                allowed,
            )
        })
    }

    fn find(&self, name: &str) -> Option<&Placed> {
        let at = self.tensors.binary_search_by(|placed| placed.name.as_str().cmp(name)).ok()?;
        self.tensors.get(at)
    }

    fn view<'a>(&'a self, Placed { name, shard, info }: &'a Placed) -> Option<TensorView<'a>> {
        let data = &self.shards[*shard].data()[info.bytes.clone()];
        Some(TensorView { name, dtype: info.dtype.readable()?, shape: info.shape.clone(), data })
    }
}

impl fmt::Debug for Safetensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shards = self.shards.len();
        let tensors = self.tensors.len();
        f.debug_struct("Safetensors")
            .field("path", &self.path)
            .field("shards", &shards)
            .field("tensors", &tensors)
            .finish_non_exhaustive()
    }
}

impl Shard {
    fn data(&self) -> &[u8] {
        self.bytes.all()
    }
}
