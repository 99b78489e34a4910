//! Prompts for a trace that has none: tokens that depend on the block's id alone, so that equal ids
//! are equal prefixes.

use baton_sim::{BLOCK_TOKENS, Random, TraceRequest};

/// Token ids are printable bytes: every model has them, they are one byte each on the wire, and
/// none ends an answer.
const FIRST_TOKEN: u32 = 32;
const TOKENS: u64 = 95;

/// The prompt of a request.
pub fn trace_prompt(request: &TraceRequest) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(request.hash_ids.len() * BLOCK_TOKENS as usize);
    for &id in &request.hash_ids {
        let mut random = Random::new(id);
        tokens.extend((0..BLOCK_TOKENS).map(|_| FIRST_TOKEN + random.below(TOKENS) as u32));
    }
    tokens.truncate(request.input_length as usize);
    tokens
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn request(input_length: u32, hash_ids: &[u64]) -> TraceRequest {
        TraceRequest { timestamp: Duration::ZERO, input_length, output_length: 1, hash_ids: hash_ids.to_vec() }
    }

    #[test]
    fn equal_hash_ids_give_equal_prompt_blocks() {
        let one = trace_prompt(&request(1100, &[7, 8, 9]));
        let other = trace_prompt(&request(1000, &[7, 10]));
        assert_eq!((one.len(), other.len()), (1100, 1000));
        assert_eq!(one[..512], other[..512]);
        assert_ne!(one[512..1000], other[512..]);
        assert!(one.iter().all(|token| (32..127).contains(token)));
    }

    #[test]
    fn neighbouring_hash_ids_give_unrelated_prompt_blocks() {
        let blocks: Vec<_> = (0..50).map(|id| trace_prompt(&request(512, &[id]))).collect();
        for (index, block) in blocks.iter().enumerate() {
            assert!(blocks[..index].iter().all(|before| before[..16] != block[..16]), "block {index}");
        }
    }
}
