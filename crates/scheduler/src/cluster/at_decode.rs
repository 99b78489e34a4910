//! Prompts that a decode node computes itself: those short enough not to disturb its batch
//! (conditional disaggregation), and all if no prefill node is left.
//!
//! A chunk of a prompt joins a step of the batch (mixed batch). So the prompt takes its own compute
//! and a step of the batch per chunk, and the batch's streams wait for the chunk's compute in each
//! of these steps. The threshold follows from both: hardly longer to the first token than through a
//! prefill node, and no stream there beyond its objective.

use std::time::Instant;

use baton_types::Ttft;

use super::candidates::{Matches, SizedRequest};
use super::place::{Chosen, ChosenDecode};
use super::predictor::Predictor;
use super::{Cluster, ClusterNode, PromptsAtDecode};
use crate::cost::duration;
use crate::placement::{DecodeCandidate, PrefillPlan};

/// Chunks of a prompt that count as short.
const SHORT_CHUNKS: u32 = 4;
/// If a node does not say how long its chunks are.
const CHUNK_TOKENS: u32 = 64;
/// Seconds between tokens that a stream without an objective may take if a prompt's chunks share
/// its steps.
const UNDISTURBED: f64 = 0.1;

/// Tokens of a prompt that a decode node takes into a step of its batch.
pub(super) fn chunk_beside_batch(node: &ClusterNode) -> u32 {
    match node.info().profile.chunk_tokens {
        0 => CHUNK_TOKENS,
        told => told,
    }
}

/// A prompt at a decode node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptAtDecode {
    /// When it would be computed; the steps of the batch that its chunks join are in `compute`.
    pub plan: PrefillPlan,
    /// Seconds more that a step takes with nothing else in it: it reads all weights, for few tokens
    /// as for more. Other prompts may share it.
    pub idle: f64,
    /// Whether a stream of the node would miss its objective by it, or the prompt is not short.
    pub disturbs: bool,
}

impl PromptAtDecode {
    /// The plan, if no other prompt shares its steps.
    pub fn unshared(&self) -> PrefillPlan {
        PrefillPlan { compute: self.plan.compute + self.idle, ..self.plan }
    }
}

/// What a decode node decodes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch {
    pub sequences: f64,
    pub kv_tokens: f64,
}

/// A step of a batch that a part of a prompt joins.
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinedStep {
    /// Seconds of the batch's share.
    pub step: f64,
    /// Whether a stream of the node would miss its objective by it.
    pub breaks: bool,
}

impl Predictor {
    /// What it would be to compute the prompt at a decode node that holds `held` blocks of it.
    pub(super) fn prompt_at_decode(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        node: &ClusterNode,
        held: u32,
    ) -> PromptAtDecode {
        let request = sized.request;
        let info = node.info();
        let charges = &node.charges;
        let block_tokens = info.layout.block_tokens;
        // The last token is always computed.
        let held = held.min(request.prompt_tokens.saturating_sub(1) / block_tokens);
        let matched_tokens = held * block_tokens;
        let chunk = chunk_beside_batch(node);
        let chunks = (request.prompt_tokens - matched_tokens).div_ceil(chunk).max(1);
        let alone = self.prompt_seconds(node, request.prompt_tokens, matched_tokens);
        let batch = Batch { sequences: charges.sequences() as f64, kv_tokens: charges.kv_tokens as f64 };
        let JoinedStep { step, breaks } = self.step_beside(node, batch, alone / f64::from(chunks));
        // No step there is shorter than one of a single sequence: it reads all weights.
        let shortest = f64::from(chunks) * self.step_seconds(node, 1.0, f64::from(matched_tokens));
        let compute = alone + f64::from(chunks) * step;
        let plan = PrefillPlan {
            matched_tokens,
            transfer: 0.0,
            compute,
            // On average half of the step in hand is left.
            ahead: charges.backlog.total(now) + step / 2.0,
            passed: 0,
        };
        PromptAtDecode { plan, idle: (shortest - compute).max(0.0), disturbs: breaks || chunks > SHORT_CHUNKS }
    }

    /// A step of the batch that takes so many `seconds` more for a part of a prompt.
    pub(super) fn step_beside(&self, node: &ClusterNode, batch: Batch, seconds: f64) -> JoinedStep {
        let Batch { sequences, kv_tokens } = batch;
        if sequences <= 0.0 {
            return JoinedStep { step: 0.0, breaks: node.charges.has_tbt_limit_below(seconds) };
        }
        let with_part = self.high_step_seconds(node, sequences, kv_tokens) + seconds;
        let breaks = node.charges.has_tbt_limit_below(with_part) || with_part > UNDISTURBED;
        JoinedStep { step: self.step_seconds(node, sequences, kv_tokens), breaks }
    }
}

impl Cluster {
    /// The pair that was chosen, or the decode node that does the whole better.
    pub(super) fn or_at_decode(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        matches: &Matches,
        decode: &[DecodeCandidate<'_>],
        pair: Chosen,
    ) -> Chosen {
        if self.config.prompts_at_decode != PromptsAtDecode::Short || !sized.request.wants_decode {
            return pair;
        }
        let pair_finish = pair.plan.finish() + pair.partial.map_or(0.0, |partial| partial.after);
        let objective = sized.request.slo_left().ttft.map(|Ttft(limit)| limit.as_secs_f64());
        // It may come later than through the pair by what a step idles, which takes its work off
        // the prefill nodes. It may not be too late for that reason.
        let before_pair = |(_, prompt): &(usize, PromptAtDecode)| {
            let is_in_time = objective.is_none_or(|limit| prompt.unshared().finish() <= limit.max(pair_finish));
            !prompt.disturbs && prompt.plan.finish() <= pair_finish && is_in_time
        };
        match self.best_at_decode(now, sized, matches, decode, before_pair) {
            Some((index, prompt)) => self.at_decode(sized, index, &decode[index], prompt, pair.candidates),
            None => pair,
        }
    }

    /// If no prefill node is left.
    pub(super) fn only_at_decode(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        matches: &Matches,
        decode: &[DecodeCandidate<'_>],
    ) -> Option<Chosen> {
        let (index, prompt) = self.best_at_decode(now, sized, matches, decode, |_| true)?;
        Some(self.at_decode(sized, index, &decode[index], prompt, decode.len()))
    }

    fn best_at_decode(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        matches: &Matches,
        decode: &[DecodeCandidate<'_>],
        may: impl Fn(&(usize, PromptAtDecode)) -> bool,
    ) -> Option<(usize, PromptAtDecode)> {
        let prompt = |(index, candidate): (usize, &DecodeCandidate<'_>)| {
            let node = self.nodes.get(candidate.node)?;
            Some((index, self.predictor.prompt_at_decode(now, sized, node, matches.of(node))))
        };
        let prompts = decode.iter().enumerate().filter_map(prompt).filter(may);
        prompts.min_by(|(_, a), (_, b)| a.plan.finish().total_cmp(&b.plan.finish()))
    }

    fn at_decode(
        &self,
        sized: SizedRequest<'_>,
        index: usize,
        candidate: &DecodeCandidate<'_>,
        prompt: PromptAtDecode,
        candidates: usize,
    ) -> Chosen {
        let plan = prompt.plan;
        let decode =
            ChosenDecode { node: candidate.node.clone(), tbt: duration(candidate.tbt), exposed: duration(0.0) };
        Chosen {
            prefill_index: None,
            decode_index: Some(index).filter(|_| sized.request.wants_decode),
            prefill: candidate.node.clone(),
            locally_cached_tokens: plan.matched_tokens,
            plan,
            terms: self.terms(sized.request, plan.compute),
            broken: 0,
            partial: None,
            fetches: false,
            decode: Some(decode).filter(|_| sized.request.wants_decode),
            ttft: duration(prompt.unshared().finish()),
            candidates,
            output_tokens: sized.output_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{ErrorKind, NodeRole, Slo, Tbt, Ttft};

    use super::super::tests::{id, info, key, place, refusal, request};
    use super::super::{ClusterConfig, Policies};
    use super::*;
    use crate::placement::PlacementRequest;

    /// Asks for one token, of which no decoding comes.
    fn one_token(n: u128, prompt_tokens: u32) -> PlacementRequest<'static> {
        PlacementRequest { wants_decode: false, max_tokens: 1, prompt_tokens, ..request(n, &[]) }
    }

    /// One decode node of 100 blocks and 12 sequence slots, and a context of 512 tokens.
    fn alone(now: Instant) -> Cluster {
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        let mut node = info("d0", NodeRole::Decode, 1);
        node.context_length = 512;
        cluster.on_node_joined(now, node);
        cluster
    }

    #[test]
    fn one_token_request_at_decode_node_needs_room_for_one_token() {
        let now = Instant::now();
        let mut cluster = alone(now);
        let placed = place(&mut cluster, now, &one_token(0, 511)).unwrap();
        assert_eq!((placed.prefill, placed.decode), (id("d0"), None));
        assert!(place(&mut cluster, now, &one_token(1, 512)).is_err());
        let two = PlacementRequest { wants_decode: true, max_tokens: 2, ..one_token(1, 511) };
        assert!(place(&mut cluster, now, &two).is_err());
        let two = PlacementRequest { prompt_tokens: 510, ..two };
        assert!(place(&mut cluster, now, &two).is_ok());
    }

    #[test]
    fn prompt_is_refused_as_overloaded_if_decode_nodes_are_full() {
        let now = Instant::now();
        // What has no room waits in one of the node's 12 sequence slots.
        for (prompt_tokens, fit) in [(320, 12), (16, 12)] {
            let mut cluster = alone(now);
            let placed: Vec<_> = (0..20).map(|n| place(&mut cluster, now, &one_token(n, prompt_tokens))).collect();
            assert!(placed[..fit].iter().all(Result::is_ok), "{placed:?}");
            for refusal in placed[fit..].iter().map(|placed| placed.as_ref().unwrap_err()) {
                assert_eq!(refusal.kind, ErrorKind::Overloaded, "{refusal}");
                assert!(refusal.message.starts_with("no decode node has room for"), "{refusal}");
                assert!(refusal.retry_after.is_some());
            }
            cluster.on_ended(now, key(0));
            assert!(place(&mut cluster, now, &one_token(30, prompt_tokens)).is_ok(), "what is charged is given back");
            cluster.on_node_left(now, &id("d0"), baton_types::Generation(1));
            let refused = place(&mut cluster, now, &one_token(31, prompt_tokens)).unwrap_err();
            assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Unavailable, "no prefill node is ready"));
        }
    }

    fn with_prompts_at_decode(now: Instant, prompts_at_decode: PromptsAtDecode, prefill: &[&str]) -> Cluster {
        let takes_partial_prefills = false;
        let slow_start = Duration::ZERO;
        let config =
            ClusterConfig { prompts_at_decode, takes_partial_prefills, slow_start, ..ClusterConfig::default() };
        let mut cluster = Cluster::new(config, Policies::default());
        prefill.iter().for_each(|name| cluster.on_node_joined(now, info(name, NodeRole::Prefill, 1)));
        cluster.on_node_joined(now, info("d0", NodeRole::Decode, 1));
        cluster.on_node_joined(now, info("d1", NodeRole::Decode, 1));
        cluster
    }

    #[test]
    fn decode_node_computes_prompts_as_fallback_without_a_prefill_node() {
        let now = Instant::now();
        let mut never = with_prompts_at_decode(now, PromptsAtDecode::Never, &[]);
        assert_eq!(
            refusal(&mut never, now, &request(0, &[])),
            (ErrorKind::Unavailable, "no prefill node is ready".into())
        );
        let mut cluster = with_prompts_at_decode(now, PromptsAtDecode::Fallback, &[]);
        let first = place(&mut cluster, now, &request(0, &[])).unwrap();
        assert!(first.is_at_decode() && first.fetch.is_none());
        assert_eq!(first.nodes().len(), 1, "{first:?}");
        let second = place(&mut cluster, now, &request(1, &[])).unwrap();
        assert_ne!(first.prefill, second.prefill, "the first one's prompt goes before");
        // One token needs no decoding, but a node has to compute the prompt, and has its blocks
        // meanwhile.
        let one = PlacementRequest { wants_decode: false, max_tokens: 1, ..request(2, &[]) };
        let charged = |cluster: &Cluster| -> (usize, usize) {
            let nodes = cluster.nodes().map(|node| (node.charges.blocks, node.charges.sequences()));
            nodes.fold((0, 0), |sum, node| (sum.0 + node.0, sum.1 + node.1))
        };
        let before = charged(&cluster);
        let placed = place(&mut cluster, now, &one).unwrap();
        assert_eq!((placed.decode, placed.predicted_tbt), (None, None));
        assert_eq!(charged(&cluster), (before.0 + blocks_of(one.prompt_tokens), before.1 + 1));
        cluster.on_node_joined(now, info("p0", NodeRole::Prefill, 1));
        assert_eq!(place(&mut cluster, now, &request(3, &[])).unwrap().prefill, id("p0"));
        (0..4).for_each(|n| cluster.on_ended(now, key(n)));
        assert!(cluster.nodes().all(|node| node.charges.is_zero()));
    }

    #[test]
    fn short_prompt_goes_to_decode_node_whose_objectives_it_keeps() {
        let now = Instant::now();
        let mut cluster = with_prompts_at_decode(now, PromptsAtDecode::Short, &["p0"]);
        let short = |n| PlacementRequest { prompt_tokens: 32, ..request(n, &[]) };
        assert!(place(&mut cluster, now, &short(0)).unwrap().is_at_decode(), "no push, and the node is idle");
        cluster.on_ended(now, key(0));
        // Five chunks of 64 tokens are not short.
        let long = PlacementRequest { prompt_tokens: 300, ..request(1, &[]) };
        assert!(!place(&mut cluster, now, &long).unwrap().is_at_decode());
        // That one's queue is what the next would wait for at the prefill node.
        assert!(place(&mut cluster, now, &short(2)).unwrap().is_at_decode());
        cluster.on_ended(now, key(2));
        // Streams whose objective leaves no time for a chunk: 11 ms for a step, 42 with 32 tokens
        // of prompt in it.
        let tbt = Some(Tbt(Duration::from_millis(30)));
        let strict =
            |n, prompt_tokens| PlacementRequest { slo: Slo { ttft: None, tbt }, prompt_tokens, ..request(n, &[]) };
        for n in [3, 4] {
            assert!(!place(&mut cluster, now, &strict(n, 300)).unwrap().is_at_decode());
        }
        assert!(!place(&mut cluster, now, &short(5)).unwrap().is_at_decode());
        cluster.on_ended(now, key(3));
        let freed = place(&mut cluster, now, &short(6)).unwrap();
        assert!(freed.is_at_decode(), "one decode node has no such stream any more: {freed:?}");
    }

    #[test]
    fn prompt_at_decode_node_takes_at_least_a_decode_step() {
        let now = Instant::now();
        let prompts_at_decode = PromptsAtDecode::Short;
        let config = ClusterConfig { prompts_at_decode, takes_partial_prefills: false, ..ClusterConfig::default() };
        let mut cluster = Cluster::new(config, Policies::default());
        cluster.on_node_joined(now, info("p0", NodeRole::Prefill, 1));
        let mut decode = info("d0", NodeRole::Decode, 1);
        decode.profile.decode_base = 0.03;
        cluster.on_node_joined(now, decode);
        // 11 ms as a chunk of the prefill node, 31 as a step of the decode node.
        let within = |n, millis| {
            let ttft = Some(Ttft(Duration::from_millis(millis)));
            PlacementRequest { prompt_tokens: 1, slo: Slo { ttft, tbt: None }, ..request(n, &[]) }
        };
        let tight = place(&mut cluster, now, &within(0, 20)).unwrap();
        assert!(!tight.is_at_decode(), "{tight:?}");
        cluster.on_ended(now, key(0));
        let lax = place(&mut cluster, now, &within(1, 50)).unwrap();
        assert!(lax.is_at_decode() && lax.predicted_ttft.0 > Duration::from_millis(30), "{lax:?}");
    }

    fn blocks_of(tokens: u32) -> usize {
        info("d0", NodeRole::Decode, 1).layout.blocks_for(tokens as usize)
    }
}
