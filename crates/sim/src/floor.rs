//! What no placement can be better than.

use std::collections::HashSet;

use crate::options::Window;
use crate::trace::{BLOCK_TOKENS, Trace, TraceRequest};
use baton_profile::ModelProfile;

/// Mean time to first token, seconds, of the window's requests if each were alone on a prefill node that holds every block that any request before it had: an infinite cache, no
/// queue, no fetch. The speed of the replay does not matter.
pub(crate) fn floor_ttft_mean(trace: &Trace, profile: &ModelProfile, window: Window) -> f64 {
    let last = trace.requests.iter().map(|request| request.timestamp).max().unwrap_or_default();
    let (mut seen, mut sum, mut counted) = (HashSet::new(), 0.0, 0_u32);
    for request in &trace.requests {
        let cached = cached_tokens(request, &seen);
        if window.contains(request.timestamp, last) {
            sum += profile.prompt(request.input_length, cached);
            counted += 1;
        }
        seen.extend(full_blocks(request));
    }
    sum / f64::from(counted.max(1))
}

fn full_blocks(request: &TraceRequest) -> impl Iterator<Item = u64> + '_ {
    request.hash_ids.iter().copied().take((request.input_length / BLOCK_TOKENS) as usize)
}

/// The last token is always computed, so the block that it fills is.
fn cached_tokens(request: &TraceRequest, seen: &HashSet<u64>) -> u32 {
    let reusable = (request.input_length.saturating_sub(1) / BLOCK_TOKENS) as usize;
    full_blocks(request).take(reusable).take_while(|id| seen.contains(id)).count() as u32 * BLOCK_TOKENS
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn request(second: u64, input_length: u32, hash_ids: &[u64]) -> TraceRequest {
        let timestamp = Duration::from_secs(second);
        TraceRequest { timestamp, input_length, output_length: 1, hash_ids: hash_ids.to_vec() }
    }

    fn floor(requests: Vec<TraceRequest>, window: Window) -> f64 {
        let trace = Trace { name: String::new(), requests, block_tokens: BLOCK_TOKENS };
        floor_ttft_mean(&trace, &ModelProfile::load("llama3-70b-a800").unwrap(), window)
    }

    #[test]
    fn what_any_request_had_is_cached() {
        let profile = ModelProfile::load("llama3-70b-a800").unwrap();
        let requests = vec![request(0, 1100, &[1, 2, 3]), request(9, 1600, &[1, 2, 3, 4])];
        // The third block of the first request is not full, so its id is not one that is kept.
        let (first, second) = (profile.prompt(1100, 0), profile.prompt(1600, 1024));
        assert_eq!(floor(requests.clone(), Window::ALL), (first + second) / 2.0);
        assert_eq!(floor(requests.clone(), Window::FIRST_HALF), first);
        assert_eq!(floor(requests, Window::SECOND_HALF), second);
    }

    #[test]
    fn the_last_token_is_computed() {
        let profile = ModelProfile::load("llama3-70b-a800").unwrap();
        let requests = vec![request(0, 1024, &[1, 2]), request(9, 1024, &[1, 2])];
        assert_eq!(floor(requests, Window::SECOND_HALF), profile.prompt(1024, 512));
    }

    #[test]
    fn no_requests_have_no_floor() {
        assert_eq!(floor(Vec::new(), Window::ALL), 0.0);
    }
}
