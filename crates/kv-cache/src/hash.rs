//! Chained hashes of full blocks.

use baton_types::{BlockHash, ModelFingerprint, TokenId};

/// Domain of the key derivation: hashes of another scheme, or of a later version of this one, never
/// meet these.
const CONTEXT: &str = "baton kv-cache block hash v1";

/// Tokens that are hashed by one call.
const TOKENS_PER_UPDATE: usize = 256;

/// Hashes blocks: 128 bits of BLAKE3, keyed by the model and the salt, over (parent's hash, token
/// ids in little endian).
///
/// A cryptographic hash, because a collision would show one tenant another's conversation.
#[derive(Debug, Clone)]
pub struct BlockHasher {
    key: [u8; 32],
}

impl BlockHasher {
    /// Blocks are shared only if the model and the salt (tenant, adapter) are the same.
    pub fn new(model: ModelFingerprint, salt: &[u8]) -> Self {
        let mut derive = blake3::Hasher::new_derive_key(CONTEXT);
        derive.update(&model.0.to_le_bytes());
        derive.update(salt);
        Self { key: *derive.finalize().as_bytes() }
    }

    /// Hash of one full block of `tokens` that follows `parent`.
    pub fn next(&self, parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        // The tag keeps a first block apart from one whose parent's hash is all zeros.
        hasher.update(&[u8::from(parent.is_some())]);
        hasher.update(&parent.unwrap_or(BlockHash([0; 16])).0);
        // One call for many tokens: calls cost more than hashing.
        let mut bytes = [0; 4 * TOKENS_PER_UPDATE];
        for tokens in tokens.chunks(TOKENS_PER_UPDATE) {
            for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * tokens.len()]);
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        BlockHash(hash)
    }

    /// Hashes of the full blocks of `tokens`; a last, partial block has none.
    ///
    /// # Panics
    /// If `block_tokens` is 0.
    pub fn chain(&self, tokens: &[TokenId], block_tokens: u32) -> Vec<BlockHash> {
        let mut parent = None;
        let blocks = tokens.chunks_exact(block_tokens as usize);
        blocks.map(|block| *parent.insert(self.next(parent, block))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_hash_chain_equals_its_steps_and_omits_partial_block() {
        let hasher = BlockHasher::new(ModelFingerprint(1), b"");
        let tokens: Vec<_> = (0..10).collect();
        let chain = hasher.chain(&tokens, 4);
        assert_eq!(chain.len(), 2);
        assert_eq!(chain[0], hasher.next(None, &tokens[..4]));
        assert_eq!(chain[1], hasher.next(Some(chain[0]), &tokens[4..8]));
        assert!(hasher.chain(&tokens[..3], 4).is_empty());
    }

    #[test]
    fn block_hash_depends_on_model_salt_parent_and_tokens() {
        let hash = |model, salt: &[u8], parent, tokens: &[u32]| {
            BlockHasher::new(ModelFingerprint(model), salt).next(parent, tokens)
        };
        let base = hash(1, b"a", None, &[1, 2]);
        let zero_parent = Some(BlockHash([0; 16]));
        let others = [
            hash(2, b"a", None, &[1, 2]),
            hash(1, b"b", None, &[1, 2]),
            hash(1, b"a", zero_parent, &[1, 2]),
            hash(1, b"a", None, &[2, 1]),
            hash(1, b"a", None, &[1, 2, 0]),
        ];
        for other in others {
            assert_ne!(base, other);
        }
        assert_eq!(base, hash(1, b"a", None, &[1, 2]));
    }
}
