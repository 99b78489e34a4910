//! Sampling parameters, and the only place where they are judged.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{ErrorKind, TokenId};

/// Most alternatives that may be asked for per position.
pub const MAX_TOP_LOGPROBS: u32 = 20;
/// Most tokens whose logits a request may move.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Most token sequences that a request may ban. Far fewer than a vocabulary has tokens, so that one
/// is always left.
pub const MAX_BAD_WORDS: usize = 128;
/// Longest of them, tokens.
pub const MAX_BAD_WORD_TOKENS: usize = 64;
/// Largest grammar, bytes.
pub const MAX_GRAMMAR_BYTES: usize = 64 << 10;

/// How the next token is drawn. Sampling has no hidden state: draw `i` of a request depends on
/// (seed, i), the tokens so far and these values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this; in (0, 1].
    pub top_p: f32,
    /// Drop tokens less probable than this times the most probable one; in [0, 1).
    pub min_p: f32,
    /// Over the prompt and the output: positive logits are divided by it, negative ones multiplied
    /// (CTRL, section 4.1); above 0, 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token of the output; in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once per occurrence in the output; in [-2, 2].
    pub frequency_penalty: f32,
    /// Fixed at admission, so that recovery draws the same tokens.
    pub seed: u64,
    /// Most tokens to generate, at least 1.
    pub max_tokens: u32,
    /// Tokens that end the output: the model's own end tokens (empty with `ignore_eos`) and the
    /// request's.
    pub stop_token_ids: Vec<TokenId>,
    /// Added to the logits of these tokens, after the penalties; each in [-100, 100].
    pub logit_bias: Vec<(TokenId, f32)>,
    /// No token that ends the output is drawn before so many.
    pub min_tokens: u32,
    /// The last token of each is not drawn after the others of it; none is empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// What the output follows, in llguidance's dialect of Lark: no other token is drawn. Goes
    /// before biases, bans and `min_tokens` if they leave no token.
    pub grammar: Option<Arc<str>>,
    /// Alternatives reported with each generated token; `None` reports no log-probabilities at all.
    pub logprobs: Option<u32>,
    /// Alternatives reported for each position of the prompt.
    pub prompt_logprobs: Option<u32>,
}

/// What a model's authors advise for sampling. It is used for what a request leaves open.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Temperature, in the range of [`SamplingParams`], as all of these are.
    pub temperature: Option<f32>,
    /// Tokens that are kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Probability that is kept.
    pub top_p: Option<f32>,
    /// Least probability, as a share of the largest.
    pub min_p: Option<f32>,
    /// Penalty of tokens that were there before.
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate.
    pub max_tokens: Option<u32>,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            max_tokens: 16,
            stop_token_ids: Vec::new(),
            logit_bias: Vec::new(),
            min_tokens: 0,
            bad_words: Vec::new(),
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// A sampling parameter is out of its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} is {value}, but must be {expected}")]
pub struct InvalidSampling {
    /// Name of the parameter.
    pub field: &'static str,
    /// What was given.
    pub value: String,
    /// What is taken.
    pub expected: &'static str,
}

impl InvalidSampling {
    /// Always [`ErrorKind::Invalid`].
    pub const fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

impl SamplingParams {
    /// Checks every range; NaN and infinity are in none of them.
    pub fn validate(&self) -> Result<(), InvalidSampling> {
        let within = |field, value: f32, ok: bool, expected| {
            if ok { Ok(()) } else { Err(InvalidSampling { field, value: value.to_string(), expected }) }
        };
        let t = self.temperature;
        let p = self.top_p;
        let m = self.min_p;
        let r = self.repetition_penalty;
        within("temperature", t, (0.0..=100.0).contains(&t), "from 0 to 100")?;
        within("top_p", p, p > 0.0 && p <= 1.0, "above 0 and at most 1")?;
        within("min_p", m, (0.0..1.0).contains(&m), "at least 0 and below 1")?;
        within("repetition_penalty", r, r > 0.0 && r <= 100.0, "above 0 and at most 100")?;
        for (field, v) in [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)] {
            within(field, v, (-2.0..=2.0).contains(&v), "from -2 to 2")?;
        }
        if self.max_tokens == 0 {
            return Err(InvalidSampling { field: "max_tokens", value: "0".into(), expected: "at least 1" });
        }
        if self.logit_bias.len() > MAX_LOGIT_BIAS {
            let value = format!("{} tokens", self.logit_bias.len());
            return Err(InvalidSampling { field: "logit_bias", value, expected: "at most 1024 tokens" });
        }
        for &(_, bias) in &self.logit_bias {
            within("logit_bias", bias, (-100.0..=100.0).contains(&bias), "from -100 to 100")?;
        }
        let tokens = self.bad_words.iter().map(Vec::len).find(|tokens| !(1..=MAX_BAD_WORD_TOKENS).contains(tokens));
        if let Some(tokens) = tokens {
            let value = format!("a word of {tokens} tokens");
            return Err(InvalidSampling { field: "bad_words", value, expected: "words of 1 to 64 tokens" });
        }
        if self.bad_words.len() > MAX_BAD_WORDS {
            let value = format!("{} words", self.bad_words.len());
            return Err(InvalidSampling { field: "bad_words", value, expected: "at most 128 words" });
        }
        if let Some(grammar) = self.grammar.as_ref().filter(|grammar| grammar.len() > MAX_GRAMMAR_BYTES) {
            let value = format!("a grammar of {} bytes", grammar.len());
            return Err(InvalidSampling { field: "structured_output", value, expected: "at most 65536 bytes" });
        }
        for (field, n) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(n) = n.filter(|&n| n > MAX_TOP_LOGPROBS) {
                return Err(InvalidSampling { field, value: n.to_string(), expected: "at most 20" });
            }
        }
        Ok(())
    }

    /// Whether the most probable token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_parameter_out_of_range_is_refused_by_name() {
        type Spoil = fn(&mut SamplingParams);
        let cases: [(&str, Spoil); 18] = [
            ("structured_output", |p| p.grammar = Some("x".repeat(65_537).into())),
            ("temperature", |p| p.temperature = -1.0),
            ("temperature", |p| p.temperature = f32::NAN),
            ("temperature", |p| p.temperature = f32::INFINITY),
            ("top_p", |p| p.top_p = 0.0),
            ("top_p", |p| p.top_p = f32::NAN),
            ("min_p", |p| p.min_p = 1.0),
            ("repetition_penalty", |p| p.repetition_penalty = 0.0),
            ("presence_penalty", |p| p.presence_penalty = 2.5),
            ("frequency_penalty", |p| p.frequency_penalty = f32::NAN),
            ("max_tokens", |p| p.max_tokens = 0),
            ("logit_bias", |p| p.logit_bias = vec![(0, 101.0)]),
            ("logit_bias", |p| p.logit_bias = vec![(0, f32::NAN)]),
            ("logit_bias", |p| p.logit_bias = vec![(0, 0.0); MAX_LOGIT_BIAS + 1]),
            ("bad_words", |p| p.bad_words = vec![Vec::new()]),
            ("bad_words", |p| p.bad_words = vec![vec![1]; MAX_BAD_WORDS + 1]),
            ("logprobs", |p| p.logprobs = Some(21)),
            ("prompt_logprobs", |p| p.prompt_logprobs = Some(21)),
        ];
        for (field, spoil) in cases {
            let mut params = SamplingParams::default();
            assert!(params.validate().is_ok());
            spoil(&mut params);
            assert_eq!(params.validate().unwrap_err().field, field);
        }
    }
}
