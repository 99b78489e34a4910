//! Which prefill and which decode node serve a request, and in which order a prefill node computes
//! its prompts.

mod cache_aware;
mod candidate;
mod load_balance;
mod min_total_delay;
mod round_robin;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use baton_types::{BlockHash, NodeId, QueueOrdering, RequestKey, Slo, Ttft};

pub use baton_types::{Placement, PrefixFetch, Refusal};

use crate::cost::duration;

pub use cache_aware::CacheAware;
pub use candidate::{Choice, DecodeCandidate, PrefillCandidate, PrefillPlan, predicted_ttft};
pub use load_balance::LoadBalance;
pub use min_total_delay::{MinTotalDelay, MinTotalDelayConfig};
pub use round_robin::RoundRobin;

/// How long an answer after a request's first one leaves room to others. Those of a request begin
/// one after the other, so that in a full cluster one of them joins in each such time.
const LONGEST_YIELD: Duration = Duration::from_secs(5);

/// What placement needs to know of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlacementRequest<'a> {
    /// The request and attempt.
    pub key: RequestKey,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Chained hashes of the prompt's full blocks.
    pub block_hashes: &'a [BlockHash],
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Whether more than one token is wanted, so that a decode node is needed.
    pub wants_decode: bool,
    /// Its objectives, from its arrival on.
    pub slo: Slo,
    /// How long ago that was.
    pub waited: Duration,
    /// Longest that it may wait for others, from its arrival on: the cluster's setting, filled in
    /// when it is placed.
    pub max_wait: Option<Duration>,
    /// Larger goes first; 0 is ordinary.
    pub priority: i32,
    /// Whether the prompt is computed whole, whatever is cached.
    pub bypass_cache: bool,
    /// Nodes that are not to be taken.
    pub exclude: &'a [NodeId],
    /// Of an answer after a request's first one: the nodes of that one. They hold the prompt, and
    /// are taken if they can.
    pub first_completion_nodes: &'a [NodeId],
    /// Of the prompt's tokens, the last so many are output: an attempt goes on after them.
    pub output_tokens: u32,
    /// Whether it was taken in already: it is served, whatever that costs those who came after it.
    pub is_admitted: bool,
}

impl PlacementRequest<'_> {
    /// What its objectives leave now.
    pub fn slo_left(&self) -> Slo {
        self.slo.after(self.waited)
    }

    /// Whether it leaves room to others: an answer after the first one, for a while. A request for
    /// a hundred answers must not keep a neighbour from its second token.
    pub fn yields(&self) -> bool {
        !self.first_completion_nodes.is_empty() && self.waited < LONGEST_YIELD
    }

    /// Seconds in which its first token should come, of which `compute` are its own. What its
    /// objective leaves, and not more than its longest wait and that.
    pub fn time_left(&self, compute: f64) -> Option<f64> {
        let wait = self.max_wait.map(|limit| limit.saturating_sub(self.waited).as_secs_f64() + compute);
        let objective = self.slo_left().ttft.map(|Ttft(limit)| limit.as_secs_f64());
        objective.into_iter().chain(wait).min_by(f64::total_cmp)
    }
}

/// How nodes are chosen from those that can take a request.
pub trait PlacementPolicy: fmt::Debug + Send {
    /// Its name, as operators read it.
    fn name(&self) -> &'static str;

    /// Chooses a pair. `prefill` is not empty; `decode` is empty if none is needed. `rng` decides
    /// ties.
    fn choose(
        &self,
        request: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice;

    /// What a prefill node is compared by, the least winning: seconds, or requests if the policy
    /// counts them; with the decode node that was chosen. `None` if nothing is compared.
    fn cost(
        &self,
        _request: &PlacementRequest<'_>,
        _prefill: &PrefillCandidate<'_>,
        _decode: Option<&DecodeCandidate<'_>>,
    ) -> Option<f64> {
        None
    }

    /// One that decides as this one would, for asking what it would do.
    fn boxed_clone(&self) -> Box<dyn PlacementPolicy>;

    /// The terms on which a prompt waits that takes so many seconds to compute. First come, first
    /// served, if a policy says nothing.
    fn terms(&self, request: &PlacementRequest<'_>, compute: f64) -> QueueOrdering {
        QueueOrdering { priority: request.priority, compute: duration(compute), ..QueueOrdering::default() }
    }

    /// Whether shorter prompts may pass longer ones.
    fn reorders(&self) -> bool {
        false
    }

    /// Whether it lets nodes fetch prefixes from each other.
    fn fetches(&self) -> bool {
        false
    }
}

/// The policies that there are, by the names used in settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlacementKind {
    /// One after the other.
    RoundRobin,
    /// The fewest requests.
    LoadBalance,
    /// The least predicted time to first token, prefixes that the node itself has cached counted.
    CacheAware,
    /// The total predicted delay of all requests, prefixes fetched if that is faster.
    #[default]
    MinTotalDelay,
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a placement policy (round-robin, load-balance, cache-aware, min-total-delay)")]
pub struct UnknownPolicy(pub String);

impl PlacementKind {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::RoundRobin, Self::LoadBalance, Self::CacheAware, Self::MinTotalDelay];

    /// Its name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LoadBalance => "load-balance",
            Self::CacheAware => "cache-aware",
            Self::MinTotalDelay => "min-total-delay",
        }
    }

    /// The policy with its defaults.
    pub fn policy(self) -> Box<dyn PlacementPolicy> {
        match self {
            Self::RoundRobin => Box::<RoundRobin>::default(),
            Self::LoadBalance => Box::new(LoadBalance),
            Self::CacheAware => Box::new(CacheAware),
            Self::MinTotalDelay => Box::new(MinTotalDelay::default()),
        }
    }
}

impl FromStr for PlacementKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// Predictions are not better than this part of themselves: what is so close to the best is a tie.
const TIE: f64 = 0.05;

/// The decode node with the shortest step, and last layer's push; of ties the one with the fewest
/// sequences, and of those any.
pub fn lightest_decode(decode: &[DecodeCandidate<'_>], rng: &mut dyn FnMut() -> u64) -> Option<usize> {
    lightest_by(decode, |candidate| candidate.tbt + candidate.push_last_layer, rng)
}

/// The decode node with the least of some time; of ties the one with the fewest sequences, and of
/// those any.
fn lightest_by(
    decode: &[DecodeCandidate<'_>],
    seconds: impl Fn(&DecodeCandidate<'_>) -> f64,
    rng: &mut dyn FnMut() -> u64,
) -> Option<usize> {
    let limit = decode.iter().map(&seconds).fold(f64::INFINITY, f64::min) * (1.0 + TIE);
    let sequences = |candidate: &DecodeCandidate<'_>| {
        if seconds(candidate) <= limit { candidate.sequences as f64 } else { f64::INFINITY }
    };
    least(decode.iter().map(sequences), 0.0, rng)
}

/// Index of one of the least values, those that exceed it by no more than the part `tolerance`
/// drawn from at random.
pub fn least(values: impl Iterator<Item = f64> + Clone, tolerance: f64, rng: &mut dyn FnMut() -> u64) -> Option<usize> {
    let limit = values.clone().fold(f64::INFINITY, f64::min) * (1.0 + tolerance);
    let tied = || values.clone().enumerate().filter(|(_, value)| *value <= limit).map(|(index, _)| index);
    match tied().count() {
        0 => None,
        1 => tied().next(),
        // The bias of the remainder is below 2^-50 for any number of nodes.
        n => tied().nth((rng() % n as u64) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::candidate::tests::{decode, prefill, request};
    use super::*;

    #[test]
    fn placement_ties_are_drawn_fairly() {
        let candidates = [prefill(0, 100, 0), prefill(0, 100, 0), prefill(0, 100, 0)];
        let decodes = [decode(20, 0, 0), decode(20, 0, 0), decode(20, 0, 0)];
        for kind in PlacementKind::ALL {
            let mut prefills = [0; 3];
            let mut decode_hits = [0; 3];
            let policy = kind.policy();
            for draw in 0..300 {
                let choice = policy.choose(&request(), &candidates, &decodes, &mut || draw);
                prefills[choice.prefill] += 1;
                decode_hits[choice.decode.unwrap()] += 1;
            }
            assert_eq!((prefills, decode_hits), ([100; 3], [100; 3]), "{kind:?}");
        }
    }

    #[test]
    fn placement_policy_chooses_the_least_cost() {
        let candidates = [prefill(300, 100, 0), prefill(20, 100, 0), prefill(100, 500, 0)];
        let decodes = [decode(20, 0, 0)];
        for kind in PlacementKind::ALL {
            let policy = kind.policy();
            let costs = candidates.iter().filter_map(|prefill| policy.cost(&request(), prefill, Some(&decodes[0])));
            let costs: Vec<_> = costs.collect();
            let chosen = policy.choose(&request(), &candidates, &decodes, &mut || 0).prefill;
            let least = least(costs.iter().copied(), 0.0, &mut || 0);
            assert!(least.is_none_or(|least| least == chosen), "{kind:?}");
        }
    }

    #[test]
    fn placement_policy_names_parse_and_error_lists_them() {
        for kind in PlacementKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
        }
        let error = "best".parse::<PlacementKind>().unwrap_err().to_string();
        assert!(PlacementKind::ALL.iter().all(|kind| error.contains(kind.as_str())), "{error}");
    }

    #[test]
    fn placement_chooses_no_decode_node_if_there_is_none() {
        for kind in PlacementKind::ALL {
            let choice = kind.policy().choose(&request(), &[prefill(0, 1, 0)], &[], &mut || 7);
            assert_eq!(choice, Choice { prefill: 0, fetch: false, decode: None }, "{kind:?}");
        }
    }
}
