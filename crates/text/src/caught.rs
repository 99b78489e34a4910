//! Panics of libraries over what is untrusted.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls a library that panics on some input; `None`: it has. What it left half done must be
/// dropped, or be of no harm.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}
