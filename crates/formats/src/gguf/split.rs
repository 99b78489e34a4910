//! Models in several GGUF files, as gguf-split of llama.cpp writes them: `NAME-00001-of-00003.gguf`
//! and so on. The first has the model's metadata, and each has some of its tensors.

use std::path::{Path, PathBuf};

use super::Metadata;
use crate::FormatError;
use crate::error::QuotedText;

/// Files that a model may have; DeepSeek-V3's has 30.
const MAX_FILES: u32 = 1024;

const COUNT: &str = "split.count";
const INDEX: &str = "split.no";
const TENSORS: &str = "split.tensors.count";

/// The files of a model after its first, in order; none if it has one file.
pub(super) fn others(first: &Path, metadata: &Metadata) -> Result<Vec<PathBuf>, FormatError> {
    let count = metadata.u32(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(Vec::new());
    }
    if count > MAX_FILES {
        return Err(wrong(first, COUNT, count, format_args!("at most {MAX_FILES}")));
    }
    let index = metadata.u32(INDEX)?.unwrap_or(0);
    if index != 0 {
        return Err(wrong(first, INDEX, index, format_args!("0: give the first file, ...{}", ending(0, count))));
    }
    let name = first.file_name().unwrap_or_default().to_string_lossy();
    let Some(stem) = name.strip_suffix(&ending(0, count)) else {
        let allowed = format_args!("a name that ends with {}: it is the first of {count} files", ending(0, count));
        return Err(FormatError::invalid(first, "file name", QuotedText(&name), allowed));
    };
    Ok((1..count).map(|index| first.with_file_name(format!("{stem}{}", ending(index, count)))).collect())
}

/// Whether a file name is that of a file after a model's first.
pub(crate) fn is_later_file(name: &str) -> bool {
    let Some((rest, count)) = name.strip_suffix(".gguf").and_then(|name| name.rsplit_once("-of-")) else {
        return false;
    };
    let Some((_, index)) = rest.rsplit_once('-') else { return false };
    let is_number = |digits: &str| digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
    is_number(count) && is_number(index) && index > "00001"
}

fn ending(index: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", index + 1)
}

/// Refuses a file that says that it is another one.
pub(super) fn check_file(path: &Path, metadata: &Metadata, index: u32, count: u32) -> Result<(), FormatError> {
    for (key, expected) in [(INDEX, index), (COUNT, count)] {
        let found: u32 = metadata.require(key)?;
        if found != expected {
            return Err(wrong(path, key, found, expected));
        }
    }
    Ok(())
}

/// Refuses a model whose files do not have all of its tensors.
pub(super) fn check_tensors(first: &Path, metadata: &Metadata, found: usize) -> Result<(), FormatError> {
    match metadata.u32(TENSORS)? {
        Some(promised) if promised as usize != found => {
            Err(wrong(first, TENSORS, promised, format_args!("{found}, as many as the files have")))
        }
        _ => Ok(()),
    }
}

fn wrong(path: &Path, key: &str, found: u32, allowed: impl std::fmt::Display) -> FormatError {
    FormatError::invalid(path, format_args!("metadata {}", QuotedText(key)), found, allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_files_of_a_split_model_are_known_by_name() {
        for name in ["m-00002-of-00003.gguf", "a-b-00999-of-01000.gguf"] {
            assert!(is_later_file(name), "{name}");
        }
        for name in ["m-00001-of-00003.gguf", "m.gguf", "m-2-of-3.gguf", "m-00002-of-00003.bin", "-of-.gguf"] {
            assert!(!is_later_file(name), "{name}");
        }
    }
}
