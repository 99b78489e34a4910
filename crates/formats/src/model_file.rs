//! One front for all kinds of model files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::{FormatError, Gguf, Safetensors, TensorView, gguf};

/// A model: a GGUF file, a safetensors file, or a folder with `config.json` and safetensors.
#[derive(Debug)]
pub enum ModelFile {
    /// A GGUF file.
    Gguf(Gguf),
    /// A safetensors file or folder.
    Safetensors(Safetensors),
}

impl ModelFile {
    /// Opens a folder, or a file whose kind its first bytes say: GGUF has a magic; a safetensors
    /// file has none and needs its extension.
    ///
    /// # Errors
    ///
    /// It cannot be read, is of neither kind, or is damaged.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let about = std::fs::metadata(path).map_err(FormatError::io(path))?;
        if about.is_dir() || path.extension().is_some_and(|extension| extension == "safetensors") {
            return Safetensors::open(path).map(Self::Safetensors);
        }
        if path.extension().is_some_and(|extension| extension == "gguf") || (about.is_file() && has_gguf_magic(path)?) {
            return Gguf::open(path).map(Self::Gguf);
        }
        let allowed = "a GGUF file, a .safetensors file, or a folder with config.json and model.safetensors";
        Err(FormatError::invalid(path, "model file", "a file of another kind", allowed))
    }

    /// The file or folder, as it was given.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(file) => file.path(),
            Self::Safetensors(file) => file.path(),
        }
    }

    /// Size of all files with tensors, in bytes.
    pub fn total_bytes(&self) -> u64 {
        match self {
            Self::Gguf(file) => file.total_bytes(),
            Self::Safetensors(file) => file.total_bytes(),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        match self {
            Self::Gguf(file) => file.contains(name),
            Self::Safetensors(file) => file.contains(name),
        }
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// There is none, or (safetensors) it has a type that Baton does not read.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, FormatError> {
        match self {
            Self::Gguf(file) => file.tensor(name),
            Self::Safetensors(file) => file.tensor(name),
        }
    }

    /// A tensor of the file has been read. Its bytes need not stay in this process's memory, and
    /// come from the file if they are read again.
    pub fn release(&self, tensor: &TensorView<'_>) {
        match self {
            Self::Gguf(file) => file.release(tensor),
            Self::Safetensors(file) => file.release(tensor),
        }
    }

    /// All tensors of types that Baton reads, sorted by name.
    pub fn tensors(&self) -> Box<dyn Iterator<Item = TensorView<'_>> + '_> {
        match self {
            Self::Gguf(file) => Box::new(file.tensors()),
            Self::Safetensors(file) => Box::new(file.tensors()),
        }
    }
}

fn has_gguf_magic(path: &Path) -> Result<bool, FormatError> {
    let mut start = Vec::with_capacity(gguf::MAGIC.len());
    let file = File::open(path).map_err(FormatError::io(path))?;
    file.take(gguf::MAGIC.len() as u64).read_to_end(&mut start).map_err(FormatError::io(path))?;
    Ok(start == gguf::MAGIC)
}
