//! The bytes of every token.

use baton_types::TokenId;

use crate::error::TextError;

/// Most tokens of a vocabulary; the largest in use have about 260,000.
pub(crate) const MAX_VOCAB_SIZE: usize = 4 << 20;

/// Bytes and flags of every token, in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl Vocabulary {
    /// Adds the token of the next id. Fails when the bytes of all tokens pass 4 GiB.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) -> Result<(), TextError> {
        self.bytes.extend_from_slice(bytes);
        let too_long = |_| TextError::model("tokens", "more than 4 GiB of text");
        self.ends.push(u32::try_from(self.bytes.len()).map_err(too_long)?);
        self.special.push(special);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id - 1] as usize };
        Some(&self.bytes[start..end])
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}
