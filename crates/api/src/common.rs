//! What the APIs of one family have in common.

use baton_proto::v1;
use baton_types::SamplingDefaults;
use serde::Serialize;

use crate::BadRequest;
use crate::field::{Ignored, cut, objects, or_default};

objects! {
    /// What OpenAI's API has no field for.
    #[derive(Clone, Copy, Default)]
    pub struct Objectives {
        /// Objective of the time to first token.
        pub ttft_slo_ms: Option<f64>,
        /// Objective of the time between tokens.
        pub tbt_slo_ms: Option<f64>,
        /// How long the request may take.
        pub timeout_ms: Option<f64>,
    }

    /// What a stream tells besides its text.
    #[derive(Clone, Copy, Default)]
    pub(crate) struct StreamOptions {
        /// Usage comes in a chunk of its own, without choices, before `[DONE]`. False: it does not
        /// come at all.
        pub(crate) include_usage: Option<bool>,
        /// With it, every chunk tells the usage so far, as vLLM's do.
        #[serde(default, deserialize_with = "or_default")]
        pub(crate) continuous_usage_stats: bool,
        /// Chunks have no padding.
        #[serde(default, rename = "include_obfuscation")]
        _include_obfuscation: Ignored,
    }
}

/// The temperature of OpenAI's and Anthropic's APIs if none is given. It is not gRPC's.
const DEFAULT_TEMPERATURE: f32 = 1.0;

/// What a request leaves open, as the model's authors advise it. A limit of length is open if it is
/// [`u32::MAX`].
pub(crate) fn with_defaults(sampling: v1::SamplingParameters, defaults: &SamplingDefaults) -> v1::SamplingParameters {
    v1::SamplingParameters {
        temperature: sampling.temperature.or(defaults.temperature).or(Some(DEFAULT_TEMPERATURE)),
        top_k: sampling.top_k.or(defaults.top_k),
        top_p: sampling.top_p.or(defaults.top_p),
        min_p: sampling.min_p.or(defaults.min_p),
        repetition_penalty: sampling.repetition_penalty.or(defaults.repetition_penalty),
        max_tokens: sampling.max_tokens.filter(|&tokens| tokens < u32::MAX).or(defaults.max_tokens).or(Some(u32::MAX)),
        ..sampling
    }
}

/// Most strings that end an output; the tokenizer's side checks them.
pub(crate) const MAX_STOPS: usize = 64;

/// Declares the request of an API: the fields of all of OpenAI's that generate text, and its own.
macro_rules! generation_request {
    ($(#[$head:meta])* $name:ident { $($(#[$meta:meta])* $field:ident: $type:ty,)* }) => {
        $crate::field::objects! {
            $(#[$head])*
            #[allow(dead_code)] // fields that are ignored or refused only need to be read
            pub struct $name {
                #[serde(default, deserialize_with = "or_default")]
                model: String,
                temperature: Option<f32>,
                top_p: Option<f32>,
                #[serde(default, deserialize_with = "crate::field::integer")]
                top_k: Option<i64>,
                min_p: Option<f32>,
                repetition_penalty: Option<f32>,
                presence_penalty: Option<f32>,
                frequency_penalty: Option<f32>,
                #[serde(default, deserialize_with = "crate::field::integer")]
                seed: Option<i64>,
                #[serde(default)]
                stop: $crate::field::Texts<{ $crate::common::MAX_STOPS }>,
                #[serde(default, deserialize_with = "or_default")]
                stop_token_ids: $crate::field::AtMost<u32, { $crate::common::MAX_STOPS }>,
                #[serde(default, deserialize_with = "or_default")]
                logit_bias: $crate::field::Entries<f32, 1024>,
                #[serde(default, deserialize_with = "crate::field::count::<_, 0, { u32::MAX }>")]
                min_tokens: Option<u32>,
                #[serde(default, deserialize_with = "or_default")]
                bad_words: $crate::field::AtMost<String, 64>,
                #[serde(default, deserialize_with = "or_default")]
                ignore_eos: bool,
                #[serde(default, deserialize_with = "crate::field::count::<_, 1, { crate::common::MAX_ANSWERS }>")]
                n: Option<u32>,
                #[serde(default, deserialize_with = "or_default")]
                stream: bool,
                stream_options: Option<$crate::common::StreamOptions>,
                #[serde(default, deserialize_with = "crate::field::integer")]
                priority: Option<i32>,
                /// Objectives.
                #[serde(default, deserialize_with = "or_default")]
                pub baton: $crate::common::Objectives,
                #[serde(default)]
                user: $crate::field::Ignored,
                #[serde(default)]
                metadata: $crate::field::Ignored,
                #[serde(default)]
                store: $crate::field::Ignored,
                #[serde(default)]
                service_tier: $crate::field::Ignored,
                #[serde(default)]
                safety_identifier: $crate::field::Ignored,
                #[serde(default)]
                prompt_cache_key: $crate::field::Ignored,
                #[serde(default)]
                prompt_cache_retention: $crate::field::Ignored,
                #[serde(default)]
                prompt_cache_options: $crate::field::Ignored,
                response_format: Option<$crate::format::ResponseFormat>,
                structured_outputs: Option<$crate::format::StructuredOutputs>,
                #[serde(default, deserialize_with = "crate::field::structured_outputs")]
                guided_json: $crate::field::Refused,
                #[serde(default, deserialize_with = "crate::field::structured_outputs")]
                guided_regex: $crate::field::Refused,
                #[serde(default, deserialize_with = "crate::field::structured_outputs")]
                guided_choice: $crate::field::Refused,
                #[serde(default, deserialize_with = "crate::field::structured_outputs")]
                guided_grammar: $crate::field::Refused,
                #[serde(default, deserialize_with = "crate::field::only_true")]
                skip_special_tokens: $crate::field::Ignored,
                #[serde(default, deserialize_with = "crate::field::only_true")]
                spaces_between_special_tokens: $crate::field::Ignored,
                #[serde(default, deserialize_with = "crate::field::only_false")]
                include_stop_str_in_output: $crate::field::Ignored,
                #[serde(default, deserialize_with = "crate::field::only_false")]
                use_beam_search: $crate::field::Ignored,
                #[serde(default, deserialize_with = "crate::field::only_one")]
                length_penalty: $crate::field::Ignored,
                $($(#[$meta])* $field: $type,)*
            }
        }

        impl $name {
            /// The parameters of sampling that the body has, without those of log-probabilities and
            /// of length.
            fn sampling(&self) -> Result<baton_proto::v1::SamplingParameters, $crate::BadRequest> {
                Ok(baton_proto::v1::SamplingParameters {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: $crate::common::top_k(self.top_k)?,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    // Any 64 bits.
                    seed: self.seed.map(i64::cast_unsigned),
                    stop: self.stop.0.clone(),
                    stop_token_ids: self.stop_token_ids.0.clone(),
                    ignore_eos: self.ignore_eos,
                    logit_bias: $crate::common::logit_bias(&self.logit_bias.0)?,
                    min_tokens: self.min_tokens.unwrap_or(0),
                    bad_words: self.bad_words.0.clone(),
                    structured_output: $crate::format::structured_output(
                        self.response_format.as_ref(),
                        self.structured_outputs.as_ref(),
                    )?,
                    ..Default::default()
                })
            }

            /// What a stream tells; `None`: the answer comes whole.
            fn stream(&self) -> Result<Option<$crate::common::StreamOptions>, $crate::BadRequest> {
                match (self.stream, self.stream_options) {
                    (true, options) => Ok(Some(options.unwrap_or_default())),
                    (false, None) => Ok(None),
                    (false, Some(_)) => Err($crate::BadRequest::new("stream_options", "says nothing without stream")),
                }
            }

            fn check(&self) -> Result<(), $crate::BadRequest> {
                $crate::common::check_bytes("model", [&self.model])?;
                $crate::common::check_bytes("stop", &self.stop.0)?;
                $crate::common::check_bytes("bad_words", &self.bad_words.0)
            }

            /// A request of the one type for a prompt.
            fn request(
                &self,
                prompt: baton_proto::v1::generate_request::Prompt,
                sampling: baton_proto::v1::SamplingParameters,
            ) -> baton_proto::v1::GenerateRequest {
                let Objectives { ttft_slo_ms, tbt_slo_ms, timeout_ms } = self.baton;
                baton_proto::v1::GenerateRequest {
                    model: self.model.clone(),
                    prompt: Some(prompt),
                    sampling: Some(sampling),
                    n: self.n.unwrap_or(1),
                    priority: self.priority.unwrap_or(0),
                    slo: Some(baton_proto::v1::ServiceLevelObjectives { ttft_ms: ttft_slo_ms, tbt_ms: tbt_slo_ms }),
                    timeout_ms,
                    ..Default::default()
                }
            }
        }
    };
}
pub(crate) use generation_request;

/// Most bytes of a field of names and short texts, of which each request of a call gets a copy.
const MAX_SHORT_BYTES: usize = 64 << 10;

pub(crate) fn check_bytes<'a>(field: &str, texts: impl IntoIterator<Item = &'a String>) -> Result<(), BadRequest> {
    let bytes: usize = texts.into_iter().map(String::len).sum();
    if bytes <= MAX_SHORT_BYTES {
        return Ok(());
    }
    Err(BadRequest::new(field, format!("{bytes} bytes, but at most {MAX_SHORT_BYTES} are taken")))
}

/// Most answers of a request.
pub(crate) const MAX_ANSWERS: u32 = 128;

/// -1 and 0 keep all.
pub(crate) fn top_k(top_k: Option<i64>) -> Result<Option<u32>, BadRequest> {
    match top_k {
        Some(k) if k < -1 => Err(BadRequest::new("top_k", format!("{k}, but must be -1, 0 or more"))),
        // Those beyond the vocabulary keep all, too.
        k => Ok(k.map(|k| u32::try_from(k.max(0)).unwrap_or(u32::MAX))),
    }
}

/// JSON has no numbers for keys.
pub(crate) fn logit_bias(biases: &[(String, f32)]) -> Result<std::collections::BTreeMap<u32, f32>, BadRequest> {
    let token = |(token, bias): &(String, f32)| match token.parse() {
        Ok(token) => Ok((token, *bias)),
        Err(_) => Err(BadRequest::new(format!("logit_bias.{}", cut(token)), "a key must be the id of a token")),
    };
    biases.iter().map(token).collect()
}

/// Usage of several requests in sum.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TotalUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    cached_tokens: u64,
}

impl TotalUsage {
    /// Adds the usage of answer number `sample` of a request: all have the one prompt.
    pub(crate) fn add(&mut self, completion: u32, usage: v1::Usage) {
        self.completion_tokens += u64::from(usage.completion_tokens);
        if completion == 0 {
            self.prompt_tokens += u64::from(usage.prompt_tokens);
            self.cached_tokens += u64::from(usage.cached_tokens);
        }
    }

    /// Adds a prompt that was taken in.
    pub(crate) fn prompt(&mut self, tokens: &[u32]) {
        self.prompt_tokens += tokens.len() as u64;
    }

    /// Adds some more of an answer.
    pub(crate) fn output(&mut self, tokens: &[u32]) {
        self.completion_tokens += tokens.len() as u64;
    }

    /// As OpenAI gives it; how much of it was reasoning, if that is known.
    pub(crate) fn json(&self, reasoning_tokens: Option<u64>) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: self.cached_tokens },
            completion_tokens_details: reasoning_tokens
                .map(|reasoning_tokens| CompletionTokensDetails { reasoning_tokens }),
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct CompletionTokensDetails {
    reasoning_tokens: u64,
}

/// An answer of OpenAI's older APIs, or a part of one.
#[derive(Serialize)]
pub(crate) struct Object<'a, C> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<C>,
    /// Null says that it comes later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![("Objectives", taken::<Objectives>()), ("StreamOptions", taken::<StreamOptions>())]
}
