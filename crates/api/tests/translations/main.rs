//! Bodies in, answers out: every API, whole and as a stream.

mod agents;
mod characters;
mod completions;
mod messages;
mod responses;
mod support;
