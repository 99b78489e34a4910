//! The writer's side: batches, cut into parts, over lanes to their owners.

pub(crate) mod carrier;
pub(crate) mod carry;
pub(crate) mod lane;
pub(crate) mod part;
pub(crate) mod peer;
pub(crate) mod route;
