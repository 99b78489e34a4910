//! Harness and scenarios over the real binaries.
