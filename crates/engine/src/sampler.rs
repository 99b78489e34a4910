//! From logits to a token.
//!
//! The order is: penalties, biases and bans, the mask of structured output, temperature, top-k,
//! top-p (of what top-k left), min-p, draw. Draw `i` of a request is a function of (seed, i), the
//! tokens so far and the parameters. So a request that is recovered on another node draws the same
//! tokens.

use std::borrow::Cow;
use std::collections::HashMap;

use baton_types::{SamplingParams, TokenId, TokenLogprobs, TopLogprob};

use crate::error::EngineError;
use crate::kernels::Isa;
use crate::kernels::cpu::{exp_weights, largest, log_sum_exp};
use crate::philox::uniform;

/// Candidates that top-p looks at first; four times as many each further time.
const TOP_P_FIRST: usize = 64;

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Its log-probability and the alternatives, if the parameters ask for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Draws the token that follows `prompt` and `output`. `params` are valid; the index of the draw is
/// `output.len()`. `mask`: a bit per token, from the lowest bit of the first word on, without which
/// a token is not drawn.
///
/// # Errors
/// [`EngineError::NotFinite`] if a logit is NaN or infinite (minus infinity, for a masked token, is
/// allowed unless all are).
pub fn sample(
    logits: &[f32],
    params: &SamplingParams,
    prompt: &[TokenId],
    output: &[TokenId],
    mask: Option<&[u32]>,
) -> Result<Sampled, EngineError> {
    check_finite(Isa::of_process(), logits)?;
    let mut penalized = penalize(logits, params, prompt, output);
    favour(&mut penalized, params, output);
    if let Some(mask) = mask
        && !apply(&mut penalized, mask)
    {
        // All that the form lets come next is banned, the end of an answer that is complete for
        // one: the form goes first.
        penalized = penalize(logits, params, prompt, output);
        apply(&mut penalized, mask);
        check_finite(Isa::of_process(), &penalized)?;
    }
    let token = if params.is_greedy() {
        best(&penalized)
    } else {
        draw(&candidates(&penalized, params), uniform(params.seed, output.len() as u64))
    };
    let logprobs = params.logprobs.map(|n| {
        let total = log_sum_exp(Isa::of_process(), logits);
        TokenLogprobs { logprob: Some(logits[token as usize] - total), top: top(logits, n, total) }
    });
    Ok(Sampled { token, logprobs })
}

/// Log-probabilities at a position of the prompt. They are of the `token` that follows there
/// (`None` at the end of the prompt), and of the `n` most probable ones, best first, ties by
/// smaller id.
///
/// # Errors
/// As [`sample`].
pub fn logprobs(logits: &[f32], token: Option<TokenId>, n: u32) -> Result<TokenLogprobs, EngineError> {
    check_finite(Isa::of_process(), logits)?;
    let total = log_sum_exp(Isa::of_process(), logits);
    let logprob = token.and_then(|token| logits.get(token as usize)).map(|logit| logit - total);
    Ok(TokenLogprobs { logprob, top: top(logits, n, total) })
}

fn top(logits: &[f32], n: u32, total: f32) -> Vec<TopLogprob> {
    let mut best: Vec<TopLogprob> = Vec::with_capacity(n as usize + 1);
    let mut least = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate().take_while(|_| n > 0) {
        if best.len() == n as usize && logit <= least {
            continue;
        }
        let rank = best.partition_point(|entry| entry.logprob >= logit);
        best.insert(rank, TopLogprob { token: token as TokenId, logprob: logit });
        best.truncate(n as usize);
        least = best[best.len() - 1].logprob;
    }
    best.iter_mut().for_each(|entry| entry.logprob -= total);
    best
}

/// NaN and infinity are a bug of the model or its weights, and must never look like a token.
pub(crate) fn check_finite(isa: Isa, logits: &[f32]) -> Result<(), EngineError> {
    if !logits.is_empty() && largest(isa, logits).all_finite {
        return Ok(());
    }
    let wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
    if let Some(token) = logits.iter().position(wrong) {
        return Err(EngineError::NotFinite { token: token as u32, value: logits[token] });
    }
    if logits.iter().all(|&x| x == f32::NEG_INFINITY) {
        Err(EngineError::NotFinite { token: 0, value: f32::NEG_INFINITY })
    } else {
        Ok(())
    }
}

/// The largest logit's token; the smallest id of several.
fn best(logits: &[f32]) -> TokenId {
    largest(Isa::of_process(), logits).index as TokenId
}

/// Logits after the penalties, as [`SamplingParams`] defines them.
fn penalize<'a>(logits: &'a [f32], params: &SamplingParams, prompt: &[TokenId], output: &[TokenId]) -> Cow<'a, [f32]> {
    let mut logits = Cow::Borrowed(logits);
    let mut counts: HashMap<TokenId, u32> = HashMap::new();
    if params.repetition_penalty != 1.0 {
        counts.extend(prompt.iter().map(|&token| (token, 0)));
    }
    if params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
        output.iter().for_each(|&token| *counts.entry(token).or_default() += 1);
    }
    for (token, count) in counts {
        let Some(logit) = logits.to_mut().get_mut(token as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        if count > 0 {
            *logit -= params.presence_penalty + params.frequency_penalty * count as f32;
        }
        if *logit == f32::INFINITY {
            *logit = f32::MAX;
        }
    }
    logits
}

/// Biases, and bans: of end tokens before there are enough, and of the last token of a word that is
/// not wanted.
fn favour(logits: &mut Cow<'_, [f32]>, params: &SamplingParams, output: &[TokenId]) {
    for &(token, bias) in &params.logit_bias {
        if let Some(logit) = logits.to_mut().get_mut(token as usize) {
            *logit += bias;
        }
    }
    let mut ban = |token: TokenId| {
        if let Some(logit) = logits.to_mut().get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    };
    if output.len() < params.min_tokens as usize {
        params.stop_token_ids.iter().for_each(|&token| ban(token));
    }
    for word in &params.bad_words {
        if let Some((&last, before)) = word.split_last()
            && output.ends_with(before)
        {
            ban(last);
        }
    }
}

/// Leaves the tokens of the mask; whether one of them can be drawn.
fn apply(logits: &mut Cow<'_, [f32]>, mask: &[u32]) -> bool {
    let logits = logits.to_mut();
    let mut any = false;
    for (first, part) in (0..).zip(logits.chunks_mut(u32::BITS as usize)) {
        let word = mask.get(first).copied().unwrap_or_default();
        for (bit, logit) in (0..).zip(part) {
            if word >> bit & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
            any |= *logit > f32::NEG_INFINITY;
        }
    }
    any
}

/// Tokens that may be drawn, with weights in proportion to their probabilities, in a fixed order.
fn candidates(logits: &[f32], params: &SamplingParams) -> Vec<(TokenId, f32)> {
    let mut weights = vec![0.0; logits.len()];
    exp_weights(Isa::of_process(), logits, logits[best(logits) as usize], params.temperature, &mut weights);
    let mut tokens: Vec<_> = (0..logits.len() as TokenId).collect();
    let weight = |token: TokenId| weights[token as usize];
    let top_k = params.top_k as usize;
    if (1..tokens.len()).contains(&top_k) {
        rank(&mut tokens, top_k, logits);
        tokens.truncate(top_k);
    }
    if params.top_p < 1.0 {
        keep_top_p(&mut tokens, logits, &weights, params.top_p);
    }
    // The largest weight is 1.
    tokens.retain(|&token| weight(token) > 0.0 && weight(token) >= params.min_p);
    tokens.into_iter().map(|token| (token, weight(token))).collect()
}

/// Moves the `n` best tokens to the front, best first, ties by smaller id.
fn rank(tokens: &mut [TokenId], n: usize, logits: &[f32]) {
    let order = |a: &TokenId, b: &TokenId| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if n < tokens.len() {
        tokens.select_nth_unstable_by(n, order);
    }
    tokens[..n].sort_unstable_by(order);
}

/// Keeps the shortest run of the best tokens whose weight reaches `top_p` of all of theirs.
fn keep_top_p(tokens: &mut Vec<TokenId>, logits: &[f32], weights: &[f32], top_p: f32) {
    let total: f64 = tokens.iter().map(|&token| f64::from(weights[token as usize])).sum();
    let target = f64::from(top_p) * total;
    let mut looked_at = TOP_P_FIRST.min(tokens.len());
    loop {
        rank(tokens, looked_at, logits);
        let mut reached = 0.0;
        for (rank, &token) in tokens[..looked_at].iter().enumerate() {
            reached += f64::from(weights[token as usize]);
            if reached >= target {
                return tokens.truncate(rank + 1);
            }
        }
        if looked_at == tokens.len() {
            return;
        }
        looked_at = tokens.len().min(looked_at * 4);
    }
}

/// The candidate at a share `u` in [0, 1) of the whole weight.
fn draw(candidates: &[(TokenId, f32)], u: f64) -> TokenId {
    let total: f64 = candidates.iter().map(|&(_, weight)| f64::from(weight)).sum();
    let mut passed = 0.0;
    for &(token, weight) in candidates {
        passed += f64::from(weight);
        if passed > u * total {
            return token;
        }
    }
    candidates[candidates.len() - 1].0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
        let mut params = SamplingParams { temperature: 1.0, seed: 7, ..Default::default() };
        change(&mut params);
        params.validate().unwrap();
        params
    }

    fn kept(logits: &[f32], params: &SamplingParams) -> Vec<TokenId> {
        let mut tokens: Vec<_> = candidates(logits, params).into_iter().map(|(token, _)| token).collect();
        tokens.sort_unstable();
        tokens
    }

    /// Sorts everything, in double precision.
    fn naive_kept(logits: &[f32], params: &SamplingParams) -> Vec<TokenId> {
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let weight = |logit: f32| f64::from((logit - max) / params.temperature).exp();
        let mut ranked: Vec<_> = logits.iter().enumerate().map(|(i, &l)| (i as TokenId, weight(l))).collect();
        ranked.sort_by(|a, b| logits[b.0 as usize].total_cmp(&logits[a.0 as usize]).then(a.0.cmp(&b.0)));
        if params.top_k > 0 {
            ranked.truncate(params.top_k as usize);
        }
        let total: f64 = ranked.iter().map(|r| r.1).sum();
        let mut reached = 0.0;
        let before_target = |r: &&(TokenId, f64)| {
            let before = reached < f64::from(params.top_p) * total || params.top_p == 1.0;
            reached += r.1;
            before
        };
        let mut tokens: Vec<_> =
            ranked.iter().take_while(before_target).filter(|r| r.1 >= f64::from(params.min_p)).map(|r| r.0).collect();
        tokens.sort_unstable();
        tokens
    }

    proptest! {
        #[test]
        fn sampling_candidates_match_naive_top_k_top_p_and_min_p(
            // Eighths: ties are common, and weights lie far from any threshold.
            eighths in prop::collection::vec(-40i32..40, 1..400),
            temperature in prop::sample::select(vec![0.5f32, 1.0, 2.0]),
            top_k in 0u32..50,
            top_p in prop::sample::select(vec![0.1234f32, 0.7531, 0.98765, 1.0]),
            min_p in prop::sample::select(vec![0.0f32, 0.0123, 0.2345]),
        ) {
            let logits: Vec<_> = eighths.iter().map(|&e| e as f32 / 8.0).collect();
            let params = params(|p| (p.temperature, p.top_k, p.top_p, p.min_p) = (temperature, top_k, top_p, min_p));
            prop_assert_eq!(kept(&logits, &params), naive_kept(&logits, &params));
            let token = sample(&logits, &params, &[], &[], None).unwrap().token;
            prop_assert!(params.top_k == 1 || kept(&logits, &params).contains(&token));
        }

        #[test]
        fn top_logprobs_are_the_sorted_best_tokens(eighths in prop::collection::vec(-40i32..40, 1..300), n in 0u32..21) {
            let logits: Vec<_> = eighths.iter().map(|&e| e as f32 / 8.0).collect();
            let mut ranked: Vec<_> = (0..logits.len() as TokenId).collect();
            ranked.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            ranked.truncate(n as usize);
            let found = logprobs(&logits, None, n).unwrap();
            prop_assert_eq!(found.logprob, None);
            prop_assert_eq!(found.top.iter().map(|t| t.token).collect::<Vec<_>>(), ranked);
            let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            for entry in found.top {
                let expected = f64::from(logits[entry.token as usize]) - total.ln();
                prop_assert!((f64::from(entry.logprob) - expected).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn greedy_sampling_takes_smallest_id_of_equal_logits() {
        let logits = [1.0, 3.0, 2.0, 3.0];
        assert_eq!(sample(&logits, &SamplingParams::default(), &[], &[], None).unwrap().token, 1);
        assert_eq!(sample(&logits, &params(|p| p.top_k = 1), &[], &[], None).unwrap().token, 1);
    }

    #[test]
    fn sampled_frequencies_follow_the_probabilities() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln(), f32::NEG_INFINITY];
        let mut counts = [0u32; 4];
        let mut output = Vec::new();
        for _ in 0..20_000 {
            let token = sample(&logits, &params(|_| ()), &[], &output, None).unwrap().token;
            counts[token as usize] += 1;
            output.push(token);
        }
        for (count, expected) in counts.into_iter().zip([10_000, 6_000, 4_000, 0]) {
            assert!(count.abs_diff(expected) < 250, "{counts:?}");
        }
    }

    #[test]
    fn sampled_token_depends_on_seed_and_index_alone() {
        let logits: Vec<_> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let at =
            |seed, index: usize| sample(&logits, &params(|p| p.seed = seed), &[], &vec![0; index], None).unwrap().token;
        assert_eq!(at(1, 5), at(1, 5));
        assert!((0..20).any(|i| at(1, i) != at(2, i)) && (1..20).any(|i| at(1, i) != at(1, 0)));
    }

    #[test]
    fn sampling_penalties_follow_their_definitions() {
        let logits = [2.0, -2.0, 1.0, 1.0, 4.0];
        let p = params(|p| (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) = (2.0, 0.5, 0.25));
        // Token 0 in the prompt, 1 in the output once, 2 in both, twice in the output.
        assert_eq!(*penalize(&logits, &p, &[0, 2, 0], &[1, 2, 2]), [1.0, -4.75, -0.5, 1.0, 4.0]);
        let p = params(|p| p.presence_penalty = -1.0);
        assert_eq!(*penalize(&logits, &p, &[0], &[1]), [2.0, -1.0, 1.0, 1.0, 4.0]);
        let p = params(|p| p.repetition_penalty = 1e-30);
        assert_eq!(penalize(&[1e30], &p, &[0], &[])[0], f32::MAX);
    }

    #[test]
    fn logit_bias_min_tokens_and_bad_words_change_the_sampled_token() {
        let logits = [2.0, 3.0, 1.0];
        let drawn =
            |params: &SamplingParams, output: &[TokenId]| sample(&logits, params, &[], output, None).unwrap().token;
        let of = |change: fn(&mut SamplingParams)| {
            params(|p| {
                p.temperature = 0.0;
                change(p);
            })
        };
        assert_eq!(drawn(&of(|p| p.logit_bias = vec![(2, 2.5), (9, 100.0)]), &[]), 2);
        let ends = of(|p| (p.stop_token_ids, p.min_tokens) = (vec![1], 2));
        assert_eq!((drawn(&ends, &[0]), drawn(&ends, &[0, 0])), (0, 1));
        let words = of(|p| p.bad_words = vec![vec![5, 1], vec![1]]);
        assert_eq!((drawn(&words, &[5]), drawn(&words, &[])), (0, 0));
        let word = of(|p| p.bad_words = vec![vec![5, 1]]);
        assert_eq!((drawn(&word, &[5]), drawn(&word, &[1, 5, 2])), (0, 1));
    }

    #[test]
    fn logprobs_are_of_the_unmodified_distribution() {
        let logits = [0.6f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let p = SamplingParams { repetition_penalty: 50.0, logprobs: Some(2), ..Default::default() };
        let sampled = sample(&logits, &p, &[0], &[1], None).unwrap();
        assert_eq!(sampled.token, 2);
        let logprobs = sampled.logprobs.unwrap();
        assert!((logprobs.logprob.unwrap() - 0.1f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|t| t.token).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn non_finite_logits_are_never_sampled() {
        for wrong in [f32::NAN, f32::INFINITY] {
            let error = sample(&[0.0, wrong, 1.0], &params(|_| ()), &[], &[], None).unwrap_err();
            assert!(matches!(error, EngineError::NotFinite { token: 1, .. }), "{error}");
        }
        assert!(sample(&[f32::NEG_INFINITY; 3], &SamplingParams::default(), &[], &[], None).is_err());
        assert_eq!(
            sample(&[f32::NEG_INFINITY, 0.0], &params(|p| p.temperature = 1e-30), &[], &[], None).unwrap().token,
            1
        );
    }
}
