//! Placement: candidates, choice, admission, charge.

use std::time::{Duration, Instant};

use baton_types::{ErrorKind, NodeId, NodeRole, QueueOrdering, Slo, Tbt, Ttft};

use super::candidates::{Matches, Needs, SizedRequest};
use super::explain::{Compared, Explanation, RowLimit, Rows};
use super::partial_prefill::PartialPrefill;
use super::{Cluster, ClusterNode, PromptsAtDecode};
use crate::admission::{AdmissionPolicy, Assessment, Excess, Relief};
use crate::backlog::QueuedPrompt;
use crate::cost::duration;
use crate::ledger::{Between, Charge, DecodeCharge, DecodeForecast, FetchCharge, NodeStart, Placed};
use crate::placement::{
    DecodeCandidate, Placement, PlacementPolicy, PlacementRequest, PrefillCandidate, PrefillPlan, PrefixFetch, Refusal,
    predicted_ttft,
};

/// What a client is told to wait if nothing better is known: nodes register and report about this
/// often.
pub(super) const RETRY_UNAVAILABLE: Duration = Duration::from_secs(1);
/// Shortest and longest hint to a client.
const RETRY_RANGE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

pub(super) fn refuse<T>(kind: ErrorKind, message: String, retry_after: Option<Duration>) -> Result<T, Refusal> {
    Err(refusal(kind, message, retry_after))
}

fn refusal(kind: ErrorKind, message: String, retry_after: Option<Duration>) -> Refusal {
    let retry_after = retry_after.map(|after| after.clamp(RETRY_RANGE.0, RETRY_RANGE.1));
    Refusal { kind, message, retry_after, hold: None, objective: None }
}

/// A choice, and what is predicted for it.
pub(super) struct Chosen {
    /// Of the prefill candidates; `None` if a decode node computes the prompt.
    pub(super) prefill_index: Option<usize>,
    /// Of the decode candidates; `None` if none is needed.
    pub(super) decode_index: Option<usize>,
    pub(super) prefill: NodeId,
    /// Tokens of the prompt that the prefill node holds.
    pub(super) locally_cached_tokens: u32,
    pub(super) plan: PrefillPlan,
    pub(super) terms: QueueOrdering,
    /// Prompts that were admitted and would miss their objective because of it.
    pub(super) broken: usize,
    /// If the decode node computes the last part (partial prefill).
    pub(super) partial: Option<PartialPrefill>,
    pub(super) fetches: bool,
    pub(super) decode: Option<ChosenDecode>,
    pub(super) ttft: Duration,
    /// Prefill nodes that it was made from.
    pub(super) candidates: usize,
    /// Expected of the answer.
    pub(super) output_tokens: f64,
}

pub(super) struct ChosenDecode {
    pub(super) node: NodeId,
    pub(super) tbt: Duration,
    /// The part of the push that compute does not hide.
    pub(super) exposed: Duration,
}

/// Whether a choice is taken in, and then how long its first token is kept back.
pub(super) fn verdict(admission: &mut dyn AdmissionPolicy, assessment: &Assessment) -> Result<Duration, Excess> {
    admission.admit(assessment).and_then(|()| assessment.check_wait())?;
    Ok(admission.first_token_delay(assessment))
}

pub(super) fn placement_of(chosen: Chosen, fetch: Option<PrefixFetch>, first_token_delay: Duration) -> Placement {
    Placement {
        first_token_delay,
        predicted_ttft: Ttft(chosen.ttft),
        predicted_tbt: chosen.decode.as_ref().map(|decode| Tbt(decode.tbt)),
        predicted_exposed: chosen.decode.as_ref().map(|decode| decode.exposed),
        predicted_output_tokens: chosen.output_tokens,
        matched_tokens: chosen.plan.matched_tokens,
        terms: chosen.terms,
        prefill: chosen.prefill,
        partial_prefill_tokens: chosen.partial.map_or(0, |partial| partial.partial_prefill_tokens),
        decode: chosen.decode.map(|decode| decode.node),
        fetch,
    }
}

impl Cluster {
    /// Chooses the nodes for a request and charges them at once. `rng` decides ties. A request that
    /// is charged already is given back its charge first.
    pub fn place(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        rng: &mut impl FnMut() -> u64,
    ) -> Result<Placement, Refusal> {
        self.decide(now, request, None, rng).0
    }

    /// The same, with the grounds of what was decided: the candidates are those that it was decided
    /// by. Of many nodes the best are told, and the others counted.
    pub fn place_explained(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        rng: &mut impl FnMut() -> u64,
    ) -> Explanation {
        let (decision, rows) = self.decide(now, request, Some(RowLimit::BEST), rng);
        self.explanation(decision, rows.unwrap_or_default())
    }

    fn decide(
        &mut self,
        now: Instant,
        request: &PlacementRequest<'_>,
        keep: Option<RowLimit>,
        rng: &mut dyn FnMut() -> u64,
    ) -> (Result<Placement, Refusal>, Option<Rows>) {
        self.on_ended(now, request.key);
        self.on_tick(now);
        for node in self.nodes.values_mut() {
            // Once, and not for each of its plans.
            node.charges.backlog.settle(now);
        }
        let request = &self.bounded(request);
        let sized = self.predictor.sized(request);
        let matches = self.matches(request);
        let (chosen, rows) = self.look(now, sized, &matches, &*self.policies.placement, keep, rng);
        let placed = chosen.and_then(|chosen| self.take_in(now, sized, chosen, &matches));
        (placed.map_err(|refusal| self.ledger.keep_retryable(now, request.key, refusal, self.config.max_queued)), rows)
    }

    /// The request with the longest wait that the cluster grants it. What was accepted is served.
    pub(super) fn bounded<'a>(&self, request: &PlacementRequest<'a>) -> PlacementRequest<'a> {
        let is_new = self.policies.admission.refuses() && !request.is_admitted;
        PlacementRequest { max_wait: self.config.max_wait.filter(|_| is_new), ..*request }
    }

    /// Compares the candidates and chooses from them. What is said of the nodes is for those who
    /// asked what to keep.
    pub(super) fn look(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        matches: &Matches,
        policy: &dyn PlacementPolicy,
        keep: Option<RowLimit>,
        rng: &mut dyn FnMut() -> u64,
    ) -> (Result<Chosen, Refusal>, Option<Rows>) {
        let request = sized.request;
        let prefill = self.prefill_candidates(now, request, matches);
        let alone = self.decode_nodes_are_alone(&prefill);
        // Without a prefill node nothing depends on the decode nodes, but an explanation may ask
        // for them.
        let decode = if alone || request.wants_decode && (prefill.is_ok() || keep.is_some()) {
            self.decode_candidates(now, sized, matches)
        } else {
            Ok(Vec::new())
        };
        let chosen = match (&prefill, &decode) {
            (Ok(prefill), Ok(decode)) => {
                let pair = self.choose(now, sized, prefill, decode, policy, rng);
                Ok(self.or_at_decode(now, sized, matches, decode, pair))
            }
            (Err(refusal), Ok(decode)) if alone => {
                self.only_at_decode(now, sized, matches, decode).ok_or_else(|| refusal.clone())
            }
            // Decode nodes are there, and cannot take it now: that is what the client waits for.
            (Err(_), Err(refusal)) if alone && refusal.kind == ErrorKind::Overloaded => {
                Err(self.with_queue_time(refusal.clone(), request.slo_left()))
            }
            (Err(refusal), _) => Err(refusal.clone()),
            (_, Err(refusal)) => Err(self.with_queue_time(refusal.clone(), request.slo_left())),
        };
        let rows = keep.map(|keep| {
            let chosen = chosen.as_ref().ok();
            let compared = Compared {
                sized,
                matches,
                prefill: prefill.as_deref().unwrap_or_default(),
                decode: decode.as_deref().unwrap_or_default(),
                chosen_prefill: chosen.and_then(|chosen| chosen.prefill_index),
                chosen_decode: chosen.and_then(|chosen| chosen.decode_index),
            };
            self.rows(now, compared, policy, keep)
        });
        (chosen, rows)
    }

    /// Whether no prefill node takes requests, and decode nodes may compute prompts then.
    fn decode_nodes_are_alone(&self, prefill: &Result<Vec<PrefillCandidate<'_>>, Refusal>) -> bool {
        // None is ready, or none holds the prompt.
        let cannot = prefill.as_ref().is_err_and(|refusal| refusal.kind != ErrorKind::Overloaded);
        cannot && self.config.prompts_at_decode != PromptsAtDecode::Never
    }

    /// Takes a choice in and charges it, if the admission policy lets it.
    fn take_in(
        &mut self,
        now: Instant,
        sized: SizedRequest<'_>,
        chosen: Chosen,
        matches: &Matches,
    ) -> Result<Placement, Refusal> {
        let assessment = self.assess(now, sized, &chosen);
        let first_token_delay = if sized.request.is_admitted {
            self.policies.admission.first_token_delay(&assessment)
        } else {
            verdict(&mut *self.policies.admission, &assessment)
                .map_err(|excess| self.refusal_of(&assessment, excess))?
        };
        let fetch = self.fetch_of(now, &chosen, matches);
        self.charge(now, sized, &chosen, fetch.as_ref());
        Ok(placement_of(chosen, fetch, first_token_delay))
    }

    /// Why a choice is not taken in, and whether the request may wait for that to change.
    pub(super) fn refusal_of(&self, assessment: &Assessment, excess: Excess) -> Refusal {
        let excess = if excess.is_far() && self.is_idle() { excess.on_idle_nodes() } else { excess };
        // An objective of years is no reason to wait for years.
        let may_wait = assessment.max_wait.is_none_or(|limit| assessment.waited < limit);
        let admission = &self.policies.admission;
        let hold = admission.queue_for(assessment.slo_left(), assessment.ttft_high, &excess).filter(|_| may_wait);
        let retry_after = excess.retry_after(assessment.relief);
        let objective = excess.objective();
        Refusal { hold, objective, ..refusal(ErrorKind::Overloaded, excess.to_string(), retry_after) }
    }

    /// Whether no request is anywhere, and no node may come back: a wait improves no prediction.
    fn is_idle(&self) -> bool {
        self.ledger.placed() == 0 && self.nodes.values().all(ClusterNode::is_ready)
    }

    /// The policy's choice from these candidates, of which there is a prefill node at least.
    fn choose(
        &self,
        now: Instant,
        sized: SizedRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        policy: &dyn PlacementPolicy,
        rng: &mut dyn FnMut() -> u64,
    ) -> Chosen {
        let request = sized.request;
        let choice = policy.choose(request, prefill, decode, rng);
        let candidate = &prefill[choice.prefill];
        let terms = self.terms(request, candidate.plan(choice.fetch).compute);
        let (plan, broken) = self.reordered(now, terms, candidate.node, candidate.plan(choice.fetch));
        let decode = choice.decode.map(|index| &decode[index]);
        let partial = self.plan_partial_prefill(now, sized, candidate.node, &plan, decode);
        let (plan, terms, broken) = match &partial {
            Some(partial) => self.head_of(now, sized, candidate.node, &plan, partial),
            None => (plan, terms, broken),
        };
        let after = partial.map_or(0.0, |partial| partial.after);
        Chosen {
            prefill_index: Some(choice.prefill),
            decode_index: choice.decode,
            prefill: candidate.node.clone(),
            locally_cached_tokens: candidate.local.matched_tokens,
            plan,
            terms,
            broken,
            partial,
            fetches: choice.fetch && candidate.fetch.is_some(),
            decode: decode.map(|decode| ChosenDecode {
                node: decode.node.clone(),
                tbt: duration(decode.tbt),
                exposed: duration(decode.exposed(plan.compute)),
            }),
            ttft: duration(predicted_ttft(&plan, decode).max(plan.finish() + after)),
            candidates: prefill.len(),
            output_tokens: sized.output_tokens,
        }
    }

    /// A refusal for want of room, as one that may pass if the admission policy waits for such.
    fn with_queue_time(&self, refusal: Refusal, slo: Slo) -> Refusal {
        let full = Excess::KvBlocks { share: 1.0 };
        let hold = self
            .policies
            .admission
            .queue_for(slo, Duration::ZERO, &full)
            .filter(|_| refusal.kind == ErrorKind::Overloaded);
        Refusal { hold, ..refusal }
    }

    /// Until the first sequence that a decode node has now should be over.
    fn decode_relief(&self, now: Instant, node: Option<&ClusterNode>) -> Duration {
        node.and_then(|node| self.predictor.next_end(now, node)).unwrap_or(RETRY_UNAVAILABLE)
    }

    pub(super) fn assess(&self, now: Instant, sized: SizedRequest<'_>, chosen: &Chosen) -> Assessment {
        let request = sized.request;
        let ttft = chosen.ttft;
        let node = chosen.decode.as_ref().and_then(|decode| self.nodes.get(&decode.node));
        let newcomer = node.map(|node| DecodeForecast::of(&decode_charge(now, now, sized, node)));
        let then = now + ttft;
        let answer_factor = self.config.answer_factor;
        let decode_now = node.map(|node| node.charges.decoding_now());
        let decode_then = node.map(|node| {
            let answer = self.predictor.answer_time(node).mul_f64(answer_factor);
            node.charges.decoding_at(now, then, answer)
        });
        let decode_expected = node.map(|node| self.predictor.expected_at(now, then, node));
        let with = |others: Option<DecodeForecast>| Some(self.predictor.decode_load(node?, others?, newcomer?));
        // A request that is alone at its nodes waits for none. What others' waits taught does not
        // hold for it.
        let is_alone = chosen.plan.ahead <= 0.0 && node.is_none_or(|node| node.charges.sequences() == 0);
        let margin = if is_alone { Duration::ZERO } else { duration(self.predictor.ttft_margin()) };
        let prefill = self.nodes.get(&chosen.prefill);
        let relief = Relief {
            prefill: prefill.map_or(RETRY_UNAVAILABLE, |node| duration(node.charges.backlog.total(now))),
            decode: self.decode_relief(now, node),
        };
        Assessment {
            now,
            slo: request.slo,
            waited: request.waited,
            priority: request.priority,
            prompt_tokens: request.prompt_tokens,
            compute: duration(chosen.plan.compute),
            ahead: duration(chosen.plan.ahead),
            // What was accepted is served.
            max_wait: request.max_wait,
            prefill_nodes: chosen.candidates,
            ttft,
            ttft_high: ttft + margin,
            broken: chosen.broken,
            broken_sequences: node
                .zip(newcomer)
                .map_or(0, |(node, newcomer)| self.predictor.broken_sequences(Between { now, then }, node, newcomer)),
            relief,
            decode_now: with(decode_now),
            decode_then: with(decode_then),
            decode_expected: with(decode_expected),
        }
    }

    /// What the prefill node has to fetch, if the choice says so.
    pub(super) fn fetch_of(&self, now: Instant, chosen: &Chosen, matches: &Matches) -> Option<PrefixFetch> {
        let reader = self.nodes.get(&chosen.prefill).filter(|_| chosen.fetches)?;
        let layout = &reader.info().layout;
        let held = chosen.locally_cached_tokens;
        let (from, _) = self.holder_for(now, matches, reader, held / layout.block_tokens)?;
        let tokens = chosen.plan.matched_tokens;
        let blocks = u64::from((tokens - held) / layout.block_tokens);
        Some(PrefixFetch { from: from.clone(), tokens, bytes: blocks * layout.block_bytes_all_layers() as u64 })
    }

    /// The decode node that the request takes blocks and a slot of: the one that decodes, or that
    /// computes a prompt with one token of output.
    fn takes_room(&self, chosen: &Chosen) -> Option<&ClusterNode> {
        let node = chosen.decode.as_ref().map_or(&chosen.prefill, |decode| &decode.node);
        self.nodes.get(node).filter(|node| node.info().role == NodeRole::Decode)
    }

    fn charge(&mut self, now: Instant, sized: SizedRequest<'_>, chosen: &Chosen, fetch: Option<&PrefixFetch>) {
        let request = sized.request;
        let ttft = chosen.ttft;
        let key = request.key;
        let mut charge = Charge { ttft: Some(ttft), ..Charge::new(now, now) };
        if let Some(node) = self.takes_room(chosen) {
            let at = node.info().start();
            charge.decode = Some(Placed { at, charge: decode_charge(now, now + ttft, sized, node) });
        }
        if let Some(fetch) = fetch
            && let Some(from) = self.nodes.start_of(&fetch.from)
        {
            charge.fetch = Some(FetchCharge { from, bytes: fetch.bytes });
        }
        let prompt = queued_prompt(now, request, chosen);
        charge.prefill = self.charge_prefill(now, &chosen.prefill, prompt);
        if let (Some(partial), Some(decode)) = (&chosen.partial, &chosen.decode) {
            let terms = QueueOrdering { compute: duration(partial.tail), ..prompt.terms };
            let tail = QueuedPrompt { tokens: partial.partial_prefill_tokens, terms, ..prompt };
            charge.tail = self.charge_prefill(now, &decode.node, tail);
        }
        self.ledger.insert(key, charge, &mut self.nodes);
    }
}

impl Cluster {
    pub(super) fn charge_prefill(&mut self, now: Instant, node: &NodeId, prompt: QueuedPrompt) -> Option<NodeStart> {
        let seconds = self.predictor.chunk_seconds(self.nodes.get(node)?);
        let node = self.nodes.get_mut(node)?;
        node.charges.backlog.set_chunk_seconds(seconds);
        node.charges.add_prefill(now, prompt);
        node.trust.on_placed(now);
        Some(node.info().start())
    }
}

fn decode_charge(now: Instant, begins: Instant, sized: SizedRequest<'_>, node: &ClusterNode) -> DecodeCharge {
    let Needs { blocks, kv_tokens } = sized.needs(node);
    let prompt_tokens = sized.request.prompt_tokens;
    let max_tokens = sized.request.max_tokens;
    let tbt = sized.request.slo.tbt.map(|Tbt(limit)| limit);
    DecodeCharge { blocks, prompt_tokens, max_tokens, kv_tokens, tbt, begins, begun: false, charged: now }
}

fn queued_prompt(now: Instant, request: &PlacementRequest<'_>, chosen: &Chosen) -> QueuedPrompt {
    QueuedPrompt {
        key: request.key,
        arrived: now,
        terms: chosen.terms,
        tokens: (request.prompt_tokens - chosen.partial.map_or(0, |partial| partial.partial_prefill_tokens))
            .saturating_sub(chosen.plan.matched_tokens)
            .max(1),
        deadline: request.time_left(chosen.plan.compute).and_then(|seconds| now.checked_add(duration(seconds))),
    }
}

#[cfg(test)]
mod tests {
    use baton_types::Objective;

    use super::super::tests::{cluster, place, request};
    use super::*;
    use crate::placement::PlacementKind;

    #[test]
    fn objective_missed_only_behind_others_has_a_retry_time() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        let refused = |cluster: &mut Cluster, n, ttft| {
            let slo = Slo { ttft: Some(Ttft(ttft)), tbt: None };
            place(cluster, now, &PlacementRequest { slo, ..request(n, &[]) }).unwrap_err()
        };
        let ms = Duration::from_millis;
        let idle = refused(&mut cluster, 0, ms(50));
        assert!(idle.is_out_of_reach() && idle.hold.is_none(), "{idle:?}");
        let alone = place(&mut cluster, now, &request(1, &[])).unwrap().predicted_ttft.0;
        (2..6).for_each(|n| _ = place(&mut cluster, now, &request(n, &[])).unwrap());
        for limit in [ms(50), alone + ms(1)] {
            let behind = refused(&mut cluster, 6, limit);
            assert!(!behind.is_out_of_reach() && behind.objective == Some(Objective::Ttft), "{behind:?}");
            assert!(!behind.message.contains("idle"), "{behind:?}");
        }
    }
}
