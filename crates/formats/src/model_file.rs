//! One front for all kinds of model files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::QuotedText;
use crate::map::refuse_lfs_pointer;
use crate::{FormatError, Gguf, Safetensors, TensorView, gguf};

/// Most names of a folder's files that an error repeats.
const NAMED_FILES: usize = 8;
/// Bytes of a file that say of which kind it is.
const KIND_BYTES: u64 = 64;

/// A model: a GGUF file, a safetensors file, or a folder with `config.json` and safetensors, or
/// with one model in GGUF.
#[derive(Debug)]
pub enum ModelFile {
    /// A GGUF file.
    Gguf(Gguf),
    /// A safetensors file or folder.
    Safetensors(Safetensors),
}

impl ModelFile {
    /// Opens a folder, or a file whose kind its first bytes say: GGUF has a magic; a safetensors
    /// file has none and needs its extension. A folder that has no safetensors may have a GGUF
    /// file.
    ///
    /// # Errors
    ///
    /// It cannot be read, is of neither kind, or is damaged.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let about = std::fs::metadata(path).map_err(FormatError::io(path))?;
        if about.is_dir()
            && !Safetensors::is_in(path)
            && let Some(file) = gguf_file(path)?
        {
            return Gguf::open(&file).map(Self::Gguf);
        }
        if about.is_dir() || path.extension().is_some_and(|extension| extension == "safetensors") {
            return Safetensors::open(path).map(Self::Safetensors);
        }
        if path.extension().is_some_and(|extension| extension == "gguf") || (about.is_file() && has_gguf_magic(path)?) {
            return Gguf::open(path).map(Self::Gguf);
        }
        let allowed = "a GGUF file, a .safetensors file, or a folder with a .gguf file, or with config.json and model.safetensors";
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

/// The GGUF file of a folder, the first if its model has several; `None` if there is none. Files of
/// several models are an error, except for an encoder of images (`mmproj`), which is no model.
fn gguf_file(folder: &Path) -> Result<Option<PathBuf>, FormatError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(FormatError::io(folder))? {
        let name = entry.map_err(FormatError::io(folder))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".gguf") && !name.contains("mmproj") && !gguf::is_later_file(&name) {
            names.push(name);
        }
    }
    names.sort_unstable();
    if let [name] = names.as_slice() {
        return Ok(Some(folder.join(name)));
    }
    if names.is_empty() {
        return Ok(None);
    }
    let some: Vec<_> = names.iter().take(NAMED_FILES).map(|name| QuotedText(name).to_string()).collect();
    let found = format_args!("{} models: {}", names.len(), some.join(", "));
    Err(FormatError::invalid(folder, "files", found, "one model: give its file"))
}

fn has_gguf_magic(path: &Path) -> Result<bool, FormatError> {
    let mut start = Vec::new();
    let file = File::open(path).map_err(FormatError::io(path))?;
    file.take(KIND_BYTES).read_to_end(&mut start).map_err(FormatError::io(path))?;
    refuse_lfs_pointer(path, &start)?;
    Ok(start.starts_with(gguf::MAGIC))
}
