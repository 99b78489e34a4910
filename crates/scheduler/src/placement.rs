//! Which prefill and which decode node serve a request.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use baton_types::{BlockHash, ErrorKind, NodeId, RequestKey, Slo, Tbt, Ttft};

/// What placement needs to know of a request.
#[derive(Debug, Clone, Copy)]
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
    /// Its objectives.
    pub slo: Slo,
    /// Whether the prompt is computed whole, whatever is cached.
    pub bypass_cache: bool,
    /// Nodes that are not to be taken.
    pub exclude: &'a [NodeId],
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Computes the prompt.
    pub prefill: NodeId,
    /// Streams the answer; `None` where one token is wanted.
    pub decode: Option<NodeId>,
    /// Predicted time to first token, from the placement on.
    pub estimated_ttft: Ttft,
    /// Predicted time between tokens at the batch that the decode node then runs.
    pub estimated_tbt: Option<Tbt>,
    /// Tokens of the prompt that the prefill node should have cached.
    pub matched_tokens: u32,
}

impl Placement {
    /// The nodes in it, the prefill node first.
    pub fn nodes(&self) -> Vec<NodeId> {
        std::iter::once(&self.prefill).chain(&self.decode).cloned().collect()
    }
}

/// No node can take the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// `Overloaded`, `Unavailable` or `Invalid`.
    pub kind: ErrorKind,
    /// Why, with the numbers.
    pub message: String,
    /// When a retry may succeed.
    pub retry_after: Option<Duration>,
}

/// A prefill node that can take the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillCandidate {
    /// The node.
    pub node: NodeId,
    /// Until the prompts placed before are computed.
    pub queue: Duration,
    /// To compute what is not cached.
    pub compute: Duration,
    /// Tokens of the prompt that should be cached there.
    pub matched_tokens: u32,
    /// Prompts placed there whose first token has not come.
    pub pending: usize,
}

/// A decode node that has room for the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeCandidate {
    /// The node.
    pub node: NodeId,
    /// A step of the batch that it then runs.
    pub tbt: Duration,
    /// To push what it does not hold.
    pub push: Duration,
    /// The least part of it that no compute can hide: the last layer's.
    pub push_last_layer: Duration,
    /// Sequences placed there.
    pub sequences: usize,
}

/// Predicted time to first token of a pair: queue, prefill of what is not cached, and the part of the push that compute does not hide. The design counts the push
/// because the first token is of little use before the second.
pub fn estimated_ttft(prefill: &PrefillCandidate, decode: Option<&DecodeCandidate>) -> Duration {
    let exposed = decode.map_or(Duration::ZERO, |decode| {
        if decode.push.is_zero() {
            return Duration::ZERO;
        }
        decode.push.saturating_sub(prefill.compute).max(decode.push_last_layer)
    });
    prefill.queue + prefill.compute + exposed
}

/// A choice: indices into the candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Of the prefill candidates.
    pub prefill: usize,
    /// Of the decode candidates; `None` where there are none.
    pub decode: Option<usize>,
}

/// How nodes are chosen from those that can take a request.
pub trait PlacementPolicy: fmt::Debug + Send {
    /// Chooses a pair. `prefill` is not empty; `decode` is where none is needed. `rng` decides ties.
    fn choose(
        &mut self,
        prefill: &[PrefillCandidate],
        decode: &[DecodeCandidate],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice;
}

/// The policies that there are, by the names used in settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// One after the other.
    RoundRobin,
    /// The fewest requests.
    LoadBalance,
    /// The least predicted time to first token, cached prefixes counted.
    #[default]
    CacheAware,
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a placement policy (round-robin, load-balance, cache-aware)")]
pub struct UnknownPolicy(pub String);

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::RoundRobin, Self::LoadBalance, Self::CacheAware];

    /// Its name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LoadBalance => "load-balance",
            Self::CacheAware => "cache-aware",
        }
    }

    pub(crate) fn policy(self) -> Box<dyn PlacementPolicy> {
        match self {
            Self::RoundRobin => Box::<RoundRobin>::default(),
            Self::LoadBalance => Box::new(LoadBalance),
            Self::CacheAware => Box::new(CacheAware),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// One node after the other.
#[derive(Debug, Default)]
pub struct RoundRobin {
    turn: usize,
}

impl PlacementPolicy for RoundRobin {
    fn choose(
        &mut self,
        prefill: &[PrefillCandidate],
        decode: &[DecodeCandidate],
        _: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let turn = self.turn;
        self.turn = self.turn.wrapping_add(1);
        Choice { prefill: turn % prefill.len(), decode: turn.checked_rem(decode.len()) }
    }
}

/// The nodes with the fewest requests.
#[derive(Debug, Default)]
pub struct LoadBalance;

impl PlacementPolicy for LoadBalance {
    fn choose(
        &mut self,
        prefill: &[PrefillCandidate],
        decode: &[DecodeCandidate],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let pending: Vec<_> = prefill.iter().map(|candidate| candidate.pending as f64).collect();
        let sequences: Vec<_> = decode.iter().map(|candidate| candidate.sequences as f64).collect();
        Choice { prefill: least(&pending, 0.0, rng).unwrap_or(0), decode: least(&sequences, 0.0, rng) }
    }
}

/// The least predicted time to first token, with some weight on the time between tokens.
#[derive(Debug, Default)]
pub struct CacheAware;

/// Gaps between tokens that weigh as much as the time to first token: about a sentence, after which a reader is slower than the tokens.
const WEIGHED_GAPS: f64 = 16.0;
/// Predictions are not better than this part of themselves: pairs so close to the best are ties.
const TIE: f64 = 0.05;

impl PlacementPolicy for CacheAware {
    fn choose(
        &mut self,
        prefill: &[PrefillCandidate],
        decode: &[DecodeCandidate],
        rng: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let choices = pairs(prefill.len(), decode.len());
        let score = |choice: &Choice| {
            let decode = choice.decode.map(|index| &decode[index]);
            let tbt = decode.map_or(0.0, |decode| decode.tbt.as_secs_f64());
            estimated_ttft(&prefill[choice.prefill], decode).as_secs_f64() + WEIGHED_GAPS * tbt
        };
        let scores: Vec<_> = choices.iter().map(score).collect();
        // Of ties, the longest prefix: it costs nothing and keeps conversations together.
        let best = scores.iter().copied().fold(f64::INFINITY, f64::min) * (1.0 + TIE);
        let tied: Vec<_> = choices.iter().zip(&scores).filter(|(_, score)| **score <= best).map(|(c, _)| *c).collect();
        let unmatched: Vec<_> = tied.iter().map(|choice| -f64::from(prefill[choice.prefill].matched_tokens)).collect();
        tied[least(&unmatched, 0.0, rng).unwrap_or(0)]
    }
}

fn pairs(prefill: usize, decode: usize) -> Vec<Choice> {
    let decodes: Vec<_> = if decode == 0 { vec![None] } else { (0..decode).map(Some).collect() };
    (0..prefill).flat_map(|prefill| decodes.iter().map(move |&decode| Choice { prefill, decode })).collect()
}

/// Index of one of the least values, those within `tolerance` of the least drawn from at random.
fn least(values: &[f64], tolerance: f64, rng: &mut dyn FnMut() -> u64) -> Option<usize> {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let tied: Vec<_> = (0..values.len()).filter(|index| values[*index] <= least + tolerance).collect();
    let turn = match tied.len() {
        0 => return None,
        1 => 0,
        // The bias of the remainder is below 2^-50 for any number of nodes.
        n => (rng() % n as u64) as usize,
    };
    tied.get(turn).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(queue_ms: u64, compute_ms: u64, matched_tokens: u32) -> PrefillCandidate {
        let ms = Duration::from_millis;
        let node = NodeId::new("p").unwrap();
        PrefillCandidate {
            node,
            queue: ms(queue_ms),
            compute: ms(compute_ms),
            matched_tokens,
            pending: queue_ms as usize,
        }
    }

    fn decode(tbt_ms: u64, push_ms: u64, sequences: usize) -> DecodeCandidate {
        let ms = Duration::from_millis;
        let node = NodeId::new("d").unwrap();
        DecodeCandidate { node, tbt: ms(tbt_ms), push: ms(push_ms), push_last_layer: ms(push_ms / 10), sequences }
    }

    fn choose(kind: PolicyKind, p: &[PrefillCandidate], d: &[DecodeCandidate]) -> (usize, Option<usize>) {
        let choice = kind.policy().choose(p, d, &mut || 0);
        (choice.prefill, choice.decode)
    }

    #[test]
    fn what_compute_hides_of_the_push_does_not_count() {
        let (p, slow) = (prefill(5, 100, 0), decode(10, 250, 0));
        assert_eq!(estimated_ttft(&p, None), Duration::from_millis(105));
        assert_eq!(estimated_ttft(&p, Some(&decode(10, 50, 0))), Duration::from_millis(110));
        assert_eq!(estimated_ttft(&p, Some(&slow)), Duration::from_millis(255));
        assert_eq!(estimated_ttft(&p, Some(&decode(10, 0, 0))), Duration::from_millis(105));
    }

    #[test]
    fn cache_aware_weighs_queue_against_prefix() {
        let candidates = [prefill(0, 1000, 0), prefill(300, 100, 900)];
        assert_eq!(choose(PolicyKind::CacheAware, &candidates, &[]), (1, None));
        let candidates = [prefill(0, 1000, 0), prefill(2000, 100, 900)];
        assert_eq!(choose(PolicyKind::CacheAware, &candidates, &[]), (0, None));
        let close = [prefill(0, 100, 0), prefill(0, 103, 16)];
        assert_eq!(choose(PolicyKind::CacheAware, &close, &[]), (1, None), "a tie goes to the longer prefix");
        let decodes = [decode(50, 0, 0), decode(20, 0, 9)];
        assert_eq!(choose(PolicyKind::CacheAware, &close[..1], &decodes), (0, Some(1)));
    }

    #[test]
    fn ties_are_drawn_fairly() {
        let candidates = [prefill(0, 100, 0), prefill(0, 100, 0), prefill(0, 100, 0)];
        for kind in [PolicyKind::CacheAware, PolicyKind::LoadBalance] {
            let mut hits = [0; 3];
            for draw in 0..300 {
                hits[kind.policy().choose(&candidates, &[], &mut || draw).prefill] += 1;
            }
            assert_eq!(hits, [100; 3], "{kind:?}");
        }
    }

    #[test]
    fn round_robin_takes_turns_and_load_balance_the_least() {
        let (p, d) = ([prefill(3, 1, 0), prefill(1, 1, 0)], [decode(1, 1, 4), decode(1, 1, 2), decode(1, 1, 9)]);
        let mut policy = RoundRobin::default();
        let turns: Vec<_> = (0..4).map(|_| policy.choose(&p, &d, &mut || 0)).map(|c| (c.prefill, c.decode)).collect();
        assert_eq!(turns, [(0, Some(0)), (1, Some(1)), (0, Some(2)), (1, Some(0))]);
        assert_eq!(choose(PolicyKind::LoadBalance, &p, &d), (1, Some(1)));
    }

    #[test]
    fn policies_have_names() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
        }
        let error = "mooncake".parse::<PolicyKind>().unwrap_err();
        assert_eq!(error.to_string(), "'mooncake' is not a placement policy (round-robin, load-balance, cache-aware)");
    }
}
