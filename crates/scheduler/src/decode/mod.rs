//! The loop of a decode node.

mod effect;

pub use effect::DecodeEffect;
