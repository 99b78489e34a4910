//! The owner's side: connections of writers, and what lands over them.

pub(crate) mod accept;
pub(crate) mod connections;
pub(crate) mod receiver;
