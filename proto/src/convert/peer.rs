//! What nodes ask of each other: grants, leases, handoffs.

use std::sync::Arc;

use baton_types as d;

use super::{InvalidMessage, MAX_SALT, generation, hashes_from_bytes, key, limit, node_id, parse, required, short};
use crate::v1 as w;

impl TryFrom<w::GrantRequest> for d::GrantRequest {
    type Error = InvalidMessage;

    fn try_from(request: w::GrantRequest) -> Result<Self, Self::Error> {
        Ok(Self {
            key: key(request.key)?,
            prefill: node_id("prefill_node", &request.prefill_node)?,
            prefill_generation: generation("prefill_generation", &request.prefill_generation)?,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            block_hashes: hashes_from_bytes("block_hashes", &request.block_hashes)?,
            max_tokens: request.max_tokens,
            tbt: request.tbt_s.map(|tbt| limit("tbt_s", tbt)).transpose()?,
            partial_prefill_tokens: request.partial_prefill_tokens,
            // The node that receives it knows its own class.
            is_other_class: false,
        })
    }
}

impl TryFrom<w::LeaseRequest> for d::LeaseRequest {
    type Error = InvalidMessage;

    fn try_from(request: w::LeaseRequest) -> Result<Self, Self::Error> {
        if request.block_hashes.is_empty() {
            return Err(InvalidMessage { field: "block_hashes", found: "empty".into() });
        }
        Ok(Self {
            key: key(request.key)?,
            reader: node_id("reader_node", &request.reader_node)?,
            reader_generation: generation("reader_generation", &request.reader_generation)?,
            block_hashes: hashes_from_bytes("block_hashes", &request.block_hashes)?,
        })
    }
}

impl TryFrom<w::ReleaseLeaseRequest> for d::LeaseRelease {
    type Error = InvalidMessage;

    fn try_from(request: w::ReleaseLeaseRequest) -> Result<Self, Self::Error> {
        let node = node_id("reader_node", &request.reader_node)?;
        let generation = generation("reader_generation", &request.reader_generation)?;
        Ok(Self { lease: d::GrantId(request.lease), reader: Some(d::NodeStart { node, generation }) })
    }
}

impl From<&d::Handoff> for w::HandoffRequest {
    fn from(h: &d::Handoff) -> Self {
        Self {
            key: Some(h.key.into()),
            conductor_id: h.conductor.to_string(),
            grant: h.grant.0,
            tokens: h.tokens.to_vec(),
            first_token: h.first_token,
            sampling: Some(h.sampling.as_ref().into()),
            expected_bytes: h.expected_bytes,
            salt: h.salt.to_vec(),
        }
    }
}

impl TryFrom<w::HandoffRequest> for d::Handoff {
    type Error = InvalidMessage;

    fn try_from(h: w::HandoffRequest) -> Result<Self, Self::Error> {
        Ok(Self {
            key: key(h.key)?,
            conductor: parse("conductor_id", &h.conductor_id)?,
            grant: d::GrantId(h.grant),
            tokens: h.tokens.into(),
            first_token: h.first_token,
            sampling: Arc::new(required("sampling", h.sampling)?.try_into()?),
            expected_bytes: h.expected_bytes,
            salt: short("salt", h.salt, MAX_SALT)?.into(),
        })
    }
}
