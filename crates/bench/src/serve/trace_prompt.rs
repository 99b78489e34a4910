//! Prompts for a trace that has none: tokens that depend on the block's id alone, so that equal ids
//! are equal prefixes.

use baton_sim::{Random, TraceRequest};

/// Token ids are printable bytes: every model has them, they are one byte each on the wire, and
/// none ends an answer.
const FIRST_TOKEN: u32 = 32;
const TOKENS: u64 = 95;

/// The prompt of a request. Its last id is of all that is left.
pub fn trace_prompt(request: &TraceRequest, block_tokens: u32) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(request.input_length as usize);
    let mut ids = request.hash_ids.iter().peekable();
    while let Some(&id) = ids.next() {
        let left = request.input_length.saturating_sub(tokens.len() as u32);
        let length = if ids.peek().is_none() { left } else { left.min(block_tokens) };
        let mut random = Random::new(id);
        tokens.extend((0..length).map(|_| FIRST_TOKEN + random.below(TOKENS) as u32));
    }
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
        let one = trace_prompt(&request(1100, &[7, 8, 9]), 512);
        let other = trace_prompt(&request(1000, &[7, 10]), 512);
        assert_eq!((one.len(), other.len()), (1100, 1000));
        assert_eq!(one[..512], other[..512]);
        assert_ne!(one[512..1000], other[512..]);
        assert!(one.iter().all(|token| (32..127).contains(token)));
    }

    #[test]
    fn prompt_is_as_long_as_the_trace_says_with_blocks_of_any_size_and_one_id() {
        let of = |ids, block_tokens| trace_prompt(&request(100, ids), block_tokens);
        let one = of(&[1, 2, 3, 4, 5, 6, 7], 16);
        let other = of(&[1, 2, 8, 9, 10, 11, 12], 16);
        assert_eq!((one.len(), &one[..32]), (100, &other[..32]));
        assert_ne!(one[32..48], other[32..48]);
        assert_eq!(of(&[u64::MAX], 16).len(), 100);
        assert_ne!(of(&[u64::MAX], 16)[..16], of(&[u64::MAX - 1], 16)[..16]);
    }

    #[test]
    fn neighbouring_hash_ids_give_unrelated_prompt_blocks() {
        let blocks: Vec<_> = (0..50).map(|id| trace_prompt(&request(512, &[id]), 512)).collect();
        for (index, block) in blocks.iter().enumerate() {
            assert!(blocks[..index].iter().all(|before| before[..16] != block[..16]), "block {index}");
        }
    }
}
