//! The wire: types generated from `proto/baton/v1/*.proto`, and the only conversions between wire
//! and domain.
//!
//! **Invariant**: what comes out of a `TryFrom` here has been checked. A message that does not have
//! the form of its domain type becomes an [`InvalidMessage`] that names the field.

mod convert;
mod status;
mod transfer;

/// The generated types of the package `baton.v1`.
#[allow(missing_docs, clippy::all, unused_qualifications)] // generated
pub mod v1 {
    tonic::include_proto!("baton.v1");
}

pub use convert::{
    InvalidMessage, Step, count, generation, hashes_from_bytes, hashes_to_bytes, key, limit, node_id, required,
    seconds, token_text,
};
pub use status::{RETRY_AFTER_METADATA, http_status, kind_of_status, reason_of_status, status};

/// Version of everything that processes of a cluster say to each other. The one after it must take
/// this one, too, so that a cluster can be upgraded while it serves.
pub const PROTOCOL_VERSION: u32 = 1;

/// Largest message taken, bytes: a prompt of a million tokens with room to spare.
pub const MAX_MESSAGE_BYTES: usize = 32 << 20;

/// For gRPC reflection.
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The URL of an address as people give it: `http://` may be left out.
pub fn url(address: &str) -> String {
    if address.contains("://") { address.to_owned() } else { format!("http://{address}") }
}

/// Whether a peer of protocol version `theirs` can be served.
pub fn check_protocol_version(theirs: u32) -> Result<(), InvalidMessage> {
    if theirs == PROTOCOL_VERSION {
        return Ok(());
    }
    let found = format!("protocol version {theirs}, but this process speaks {PROTOCOL_VERSION}");
    Err(InvalidMessage { field: "protocol_version", found })
}
