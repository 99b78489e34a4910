//! Why a model file is refused.

use std::fmt::{self, Display, Write as _};
use std::io;
use std::path::{Path, PathBuf};

use baton_types::ErrorKind;

/// Why a model file is refused. Each names the file, the field or tensor, what was found and what
/// is allowed; text taken from the file is escaped and cut.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The operating system could not open or read the file.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The file ends before the field does.
    #[error("{}: {field}: needs {needed} bytes, but {available} are left", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The field that does not fit.
        field: String,
        /// Bytes it needs.
        needed: u64,
        /// Bytes the file still has.
        available: u64,
    },
    /// A value that the format or Baton does not allow.
    #[error("{}: {field}: found {found}, allowed: {allowed}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// The field or tensor.
        field: String,
        /// What the file has.
        found: String,
        /// What it may have.
        allowed: String,
    },
    /// A metadata value of another type than the reader needs.
    #[error("{}: metadata {key}: found {found}, expected {expected}", file.display())]
    WrongType {
        /// The file.
        file: PathBuf,
        /// The metadata key.
        key: String,
        /// Type and value found.
        found: String,
        /// Type needed.
        expected: &'static str,
    },
    /// The model has no such key, tensor or file.
    #[error("{}: no {what} {name}", file.display())]
    Missing {
        /// The file or folder.
        file: PathBuf,
        /// "metadata key", "tensor" or "file".
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The caller's rows, bytes or buffer do not fit the tensor: a bug of the caller.
    #[error("tensor {tensor}: {what}: found {found}, expected {expected}")]
    Buffer {
        /// The tensor, or the type if there is no tensor.
        tensor: String,
        /// What does not fit.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The size that fits.
        expected: usize,
    },
}

impl FormatError {
    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => ErrorKind::NotFound,
            Self::Io { .. } => ErrorKind::Unavailable,
            Self::Truncated { .. } => ErrorKind::DataLoss,
            Self::Invalid { .. } | Self::WrongType { .. } => ErrorKind::Invalid,
            Self::Missing { .. } => ErrorKind::NotFound,
            Self::Buffer { .. } => ErrorKind::Internal,
        }
    }

    pub(crate) fn io(file: &Path) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self::Io { file, source }
    }

    pub(crate) fn invalid(file: &Path, field: impl Display, found: impl Display, allowed: impl Display) -> Self {
        Self::Invalid {
            file: file.to_owned(),
            field: field.to_string(),
            found: found.to_string(),
            allowed: allowed.to_string(),
        }
    }

    pub(crate) fn truncated(file: &Path, field: impl Display, needed: u64, available: u64) -> Self {
        Self::Truncated { file: file.to_owned(), field: field.to_string(), needed, available }
    }

    pub(crate) fn missing(file: &Path, what: &'static str, name: &str) -> Self {
        Self::Missing { file: file.to_owned(), what, name: QuotedText(name).to_string() }
    }

    pub(crate) fn buffer(tensor: impl Display, what: &'static str, found: usize, expected: usize) -> Self {
        Self::Buffer { tensor: tensor.to_string(), what, found, expected }
    }
}

/// Characters of a file's own text that an error repeats.
const QUOTED_CHARS: usize = 80;

/// Text from an untrusted file, shown in quotes, escaped and cut, so that it can neither flood nor
/// forge a log line.
pub(crate) struct QuotedText<'a>(pub &'a str);

impl Display for QuotedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(QUOTED_CHARS) {
            write!(f, "{}", c.escape_debug())?;
        }
        f.write_str(if chars.next().is_some() { "…\"" } else { "\"" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_text_in_error_is_escaped_and_truncated() {
        assert_eq!(QuotedText("a\n\u{1b}[2J").to_string(), "\"a\\n\\u{1b}[2J\"");
        assert_eq!(QuotedText(&"é".repeat(80)).to_string().chars().count(), 82);
        assert_eq!(QuotedText(&"é".repeat(81)).to_string().chars().count(), 83);
    }

    #[test]
    fn format_error_kind_follows_its_cause() {
        let io = |kind: io::ErrorKind| FormatError::io(Path::new("m"))(kind.into()).kind();
        assert_eq!(io(io::ErrorKind::NotFound), ErrorKind::NotFound);
        assert_eq!(io(io::ErrorKind::PermissionDenied), ErrorKind::Unavailable);
        assert_eq!(FormatError::truncated(Path::new("m"), "magic", 4, 0).kind(), ErrorKind::DataLoss);
        assert_eq!(FormatError::invalid(Path::new("m"), "version", 9, "2, 3").kind(), ErrorKind::Invalid);
    }
}
