//! The loop of a prefill node.

mod effect;

pub use effect::{PrefillEffect, PushId, PushReport, PushSpan};
