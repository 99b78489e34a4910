//! Whether a request is taken in.
//!
//! A load is a predicted latency over its objective: more than 1 is too much. What has no objective
//! is measured by its longest wait for others.

mod early;
mod value_density;

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use baton_types::{Objective, Slo, Tbt, Ttft};

pub use early::Early;
pub use value_density::ValueDensity;

/// A decode node at some time, the newcomer included.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DecodeLoad {
    /// Predicted time between tokens.
    pub tbt: Duration,
    /// The same as a high quantile of the steps: the tail, which is what an objective is about.
    pub tbt_high: Duration,
    /// Share of its blocks that would be in use: above 1 the newcomer waits for room.
    pub kv_share: f64,
    /// Sequences beside the newcomer; expected ones count by their probability.
    pub others: f64,
}

impl DecodeLoad {
    fn check(&self, slo: Slo) -> Result<(), Excess> {
        self.check_tbt(slo, self.tbt)
    }

    fn check_high(&self, slo: Slo) -> Result<(), Excess> {
        self.check_tbt(slo, self.tbt_high)
    }

    fn check_tbt(&self, slo: Slo, estimate: Duration) -> Result<(), Excess> {
        let Some(Tbt(limit)) = slo.tbt else { return Ok(()) };
        if estimate > limit {
            return Err(Excess::Tbt { estimate: Tbt(estimate), objective: Tbt(limit) });
        }
        if self.kv_share > 1.0 { Err(Excess::KvBlocks { share: self.kv_share }) } else { Ok(()) }
    }
}

/// What the cluster predicts for a request if it were placed now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Assessment {
    /// When it is placed.
    pub now: Instant,
    /// Its objectives, from its arrival on.
    pub slo: Slo,
    /// How long ago that was.
    pub waited: Duration,
    /// Larger is worth more; 0 is ordinary.
    pub priority: i32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// To compute what is not cached.
    pub compute: Duration,
    /// Others' work that goes before it.
    pub ahead: Duration,
    /// Longest that it may wait for others, since its arrival; `None`: for as long as it takes.
    pub max_wait: Option<Duration>,
    /// Prefill nodes that share the work.
    pub prefill_nodes: usize,
    /// Predicted time to first token.
    pub ttft: Duration,
    /// The same as a high quantile: predictions are wrong, and wrong in one direction is worse.
    pub ttft_high: Duration,
    /// Prompts admitted before that would be late because of it: miss their objective, or wait for
    /// too long.
    pub broken: usize,
    /// Sequences of the decode node whose time between tokens would exceed their objective because
    /// of it, by the high quantile.
    pub broken_sequences: usize,
    /// When it may look better.
    pub relief: Relief,
    /// The decode node as it runs now; `None` if none is needed.
    pub decode_now: Option<DecodeLoad>,
    /// When the prompt would be computed, every answer taking the same fixed number of times the
    /// mean.
    pub decode_then: Option<DecodeLoad>,
    /// When the prompt would be computed, each answer going on with its probability.
    pub decode_expected: Option<DecodeLoad>,
}

impl Assessment {
    /// What its objectives leave now.
    pub fn slo_left(&self) -> Slo {
        self.slo.after(self.waited)
    }

    /// Predicted time to first token over what its objective leaves, or the wait for others over
    /// its longest one.
    pub fn prefill_load(&self) -> f64 {
        let wait = self.max_wait.map_or(0.0, |limit| ratio(self.ahead, limit.saturating_sub(self.waited)));
        self.slo_left().ttft.map_or(0.0, |Ttft(limit)| ratio(self.ttft, limit)).max(wait)
    }

    /// It keeps its time to first token if that is as estimated.
    pub fn check_ttft(&self, estimate: Duration) -> Result<(), Excess> {
        let (Some(objective), Some(left)) = (self.slo.ttft, self.slo_left().ttft) else { return Ok(()) };
        if Ttft(estimate) > left { Err(Excess::Ttft { estimate: Ttft(estimate), objective, left }) } else { Ok(()) }
    }

    /// It does not wait for others for too long. What it takes itself does not count.
    pub(crate) fn check_wait(&self) -> Result<(), Excess> {
        match self.max_wait {
            Some(limit) if self.waited + self.ahead > limit => {
                Err(Excess::Wait { estimate: self.ahead, waited: self.waited, limit })
            }
            _ => Ok(()),
        }
    }

    /// The decode node has room for it and keeps its time between tokens.
    pub fn check_decode(&self, load: Option<DecodeLoad>) -> Result<(), Excess> {
        load.map_or(Ok(()), |load| load.check(self.slo))
    }

    /// No admitted request misses an objective because of this one.
    fn check_admitted(&self) -> Result<(), Excess> {
        if self.broken > 0 {
            return Err(Excess::AdmittedTtft { requests: self.broken });
        }
        check_sequences(self.broken_sequences)
    }
}

/// No sequence misses its time between tokens because of a newcomer.
fn check_sequences(broken: usize) -> Result<(), Excess> {
    if broken > 0 { Err(Excess::AdmittedTbt { requests: broken }) } else { Ok(()) }
}

fn ratio(estimate: Duration, limit: Duration) -> f64 {
    if estimate.is_zero() { 0.0 } else { estimate.as_secs_f64() / limit.as_secs_f64() }
}

/// When the nodes that a request would go to have worked off something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relief {
    /// Until the prefill node has done what waits there now.
    pub prefill: Duration,
    /// Until the first sequence that the decode node has now should be over.
    pub decode: Duration,
}

/// Which estimate exceeds which objective.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Excess {
    /// Time to first token.
    #[error("the time to first token would be {:.1?}{}, the objective is {:?}", estimate.0, queued(*objective, *left), objective.0)]
    Ttft {
        /// Predicted, from now on.
        estimate: Ttft,
        /// What the request asked for.
        objective: Ttft,
        /// What is left of that: less than all of it if the request waited to be admitted.
        left: Ttft,
    },
    /// Time between tokens.
    #[error("the time between tokens would be {:.1?}, the objective is {:?}", estimate.0, objective.0)]
    Tbt {
        /// Predicted.
        estimate: Tbt,
        /// What the request asked for.
        objective: Tbt,
    },
    /// Either, while no node has anything to do: no wait makes it better.
    #[error("{} would be {estimate:.1?} even on idle nodes, the objective is {limit:?}", time_of(*objective))]
    OnIdleNodes {
        /// Which.
        objective: Objective,
        /// Predicted.
        estimate: Duration,
        /// What the request asked for.
        limit: Duration,
    },
    /// The decode node's blocks.
    #[error("the decode node would need {:.0} % of its KV blocks", share * 100.0)]
    KvBlocks {
        /// Share in use.
        share: f64,
    },
    /// For others, before its prompt is computed.
    #[error("the request would wait {estimate:.1?} for others{}, and may wait {limit:?}", after(*waited))]
    Wait {
        /// Predicted, from now on.
        estimate: Duration,
        /// How long it has waited already.
        waited: Duration,
        /// The cluster's limit, from the request's arrival on.
        limit: Duration,
    },
    /// Others' time to first token.
    #[error(
        "admitted requests would wait for too long, or miss the objective of their time to first token: {requests}"
    )]
    AdmittedTtft {
        /// How many.
        requests: usize,
    },
    /// Others' time between tokens.
    #[error("admitted requests would miss the objective of their time between tokens: {requests}")]
    AdmittedTbt {
        /// How many.
        requests: usize,
    },
    /// Demand exceeds what the cluster can do, and this is not the part of it that gives most for
    /// its time.
    #[error(
        "the cluster is overloaded, and the prompt takes {compute:.3?} to compute, but {affordable:.3?} can be afforded"
    )]
    Work {
        /// What is not cached.
        compute: Duration,
        /// What a request like it may take now.
        affordable: Duration,
    },
}

/// The time that an objective is about, as errors call it.
fn time_of(objective: Objective) -> &'static str {
    match objective {
        Objective::Ttft => "the time to first token",
        Objective::Tbt => "the time between tokens",
    }
}

/// How long it has waited, if that is noticeable.
fn after(waited: Duration) -> String {
    if waited < Duration::from_millis(10) { String::new() } else { format!(" after {waited:.1?}") }
}

/// How long a request has waited, by what its objective leaves, if that is noticeable.
fn queued(Ttft(objective): Ttft, Ttft(left): Ttft) -> String {
    let waited = after(objective.saturating_sub(left));
    if waited.is_empty() {
        return waited;
    }
    let more = if left.is_zero() { " or more" } else { "" };
    format!("{waited}{more} of waiting")
}

/// A prediction this many times over the objective is no matter of how well it predicts.
const FAR: u32 = 2;

impl Excess {
    /// Whether it is the request's own objective, and would be missed by far.
    pub fn is_far(&self) -> bool {
        match self {
            Self::Ttft { estimate: Ttft(estimate), objective: Ttft(objective), .. } => {
                *estimate > objective.saturating_mul(FAR)
            }
            Self::Tbt { estimate: Tbt(estimate), objective: Tbt(objective) } => {
                *estimate > objective.saturating_mul(FAR)
            }
            _ => false,
        }
    }

    /// The same, while no node has anything to do.
    pub fn on_idle_nodes(self) -> Self {
        match self {
            Self::Ttft { estimate, objective, .. } => {
                Self::OnIdleNodes { objective: Objective::Ttft, estimate: estimate.0, limit: objective.0 }
            }
            Self::Tbt { estimate, objective } => {
                Self::OnIdleNodes { objective: Objective::Tbt, estimate: estimate.0, limit: objective.0 }
            }
            other => other,
        }
    }

    /// The request's own objective that would be missed.
    pub fn objective(&self) -> Option<Objective> {
        match self {
            Self::Ttft { .. } => Some(Objective::Ttft),
            Self::Tbt { .. } => Some(Objective::Tbt),
            Self::OnIdleNodes { objective, .. } => Some(*objective),
            Self::KvBlocks { .. }
            | Self::Wait { .. }
            | Self::AdmittedTtft { .. }
            | Self::AdmittedTbt { .. }
            | Self::Work { .. } => None,
        }
    }

    /// When a retry may find a better estimate: when what stands in the way has been worked off.
    /// `None` if nothing does, and a retry finds the same.
    pub fn retry_after(&self, relief: Relief) -> Option<Duration> {
        match self {
            Self::OnIdleNodes { .. } => None,
            Self::Ttft { estimate: Ttft(estimate), left: Ttft(left), .. } => Some(estimate.saturating_sub(*left)),
            // Who comes again has not waited.
            Self::Wait { estimate, limit, .. } => Some(estimate.saturating_sub(*limit)),
            Self::Tbt { .. } | Self::KvBlocks { .. } | Self::AdmittedTbt { .. } => Some(relief.decode),
            Self::AdmittedTtft { .. } | Self::Work { .. } => Some(relief.prefill),
        }
    }
}

/// Whether a request is taken in.
pub trait AdmissionPolicy: fmt::Debug + Send {
    /// Its name, as operators read it.
    fn name(&self) -> &'static str;

    /// One that decides as this one would, for asking what it would do.
    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy>;

    /// Whether it refuses anything.
    fn refuses(&self) -> bool {
        true
    }

    /// At its arrival.
    fn admit(&mut self, request: &Assessment) -> Result<(), Excess>;

    /// Whether a request that is not taken in now may wait for things to change, and for how long
    /// until it is looked at again. `slo` is what its objective still leaves, `ttft` what serving
    /// it would take of that.
    fn queue_for(&self, _slo: Slo, _ttft: Duration, _excess: &Excess) -> Option<Duration> {
        None
    }

    /// How long the frontend keeps the first token of a request back that it takes in.
    fn first_token_delay(&self, _request: &Assessment) -> Duration {
        Duration::ZERO
    }
}

/// Takes everything.
#[derive(Debug)]
pub struct AdmitAll;

impl AdmissionPolicy for AdmitAll {
    fn name(&self) -> &'static str {
        "none"
    }

    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy> {
        Box::new(Self)
    }

    fn admit(&mut self, _: &Assessment) -> Result<(), Excess> {
        Ok(())
    }

    fn refuses(&self) -> bool {
        false
    }
}

/// The policies that there are, by the names used in settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdmissionKind {
    /// Takes everything.
    None,
    /// The larger of both at arrival.
    Early,
    /// By quantiles, never at the cost of those admitted, and under overload what gives most for
    /// its time.
    #[default]
    ValueDensity,
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an admission policy (none, early, value-density)")]
pub struct UnknownAdmission(pub String);

impl AdmissionKind {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::None, Self::Early, Self::ValueDensity];

    /// Its name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Early => "early",
            Self::ValueDensity => "value-density",
        }
    }

    /// The policy.
    pub fn policy(self) -> Box<dyn AdmissionPolicy> {
        match self {
            Self::None => Box::new(AdmitAll),
            Self::Early => Box::new(Early),
            Self::ValueDensity => Box::<ValueDensity>::default(),
        }
    }
}

impl FromStr for AdmissionKind {
    type Err = UnknownAdmission;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name).ok_or_else(|| UnknownAdmission(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    pub(super) fn assessment() -> Assessment {
        let ok = DecodeLoad { tbt: SECOND / 20, tbt_high: SECOND / 18, kv_share: 0.5, others: 3.0 };
        Assessment {
            now: Instant::now(),
            slo: Slo { ttft: Some(Ttft(30 * SECOND)), tbt: Some(Tbt(SECOND / 10)) },
            waited: Duration::ZERO,
            priority: 0,
            prompt_tokens: 1000,
            compute: SECOND,
            ahead: SECOND,
            max_wait: Some(30 * SECOND),
            prefill_nodes: 8,
            ttft: 3 * SECOND,
            ttft_high: 4 * SECOND,
            broken: 0,
            broken_sequences: 0,
            relief: Relief { prefill: 5 * SECOND, decode: 2 * SECOND },
            decode_now: Some(ok),
            decode_then: Some(ok),
            decode_expected: Some(ok),
        }
    }

    fn verdicts(request: &Assessment) -> Vec<bool> {
        AdmissionKind::ALL.into_iter().map(|kind| kind.policy().admit(request).is_ok()).collect()
    }

    #[test]
    fn each_admission_policy_refuses_by_its_own_estimates() {
        let fine = assessment();
        let slow = DecodeLoad { tbt: SECOND, tbt_high: SECOND, kv_share: 0.5, others: 3.0 };
        let full = Some(DecodeLoad { kv_share: 1.1, ..fine.decode_now.unwrap() });
        assert_eq!(verdicts(&fine), [true; 3]);
        assert_eq!(verdicts(&Assessment { ttft: 31 * SECOND, ttft_high: 40 * SECOND, ..fine }), [true, false, false]);
        assert_eq!(verdicts(&Assessment { decode_now: Some(slow), ..fine }), [true, false, true]);
        let tail = Some(DecodeLoad { tbt_high: SECOND, ..fine.decode_now.unwrap() });
        let by_tail = Assessment { decode_now: tail, decode_expected: tail, ..fine };
        assert_eq!(verdicts(&by_tail), [true, true, false]);
        assert_eq!(verdicts(&Assessment { broken: 1, ..fine }), [true, true, false]);
        assert_eq!(verdicts(&Assessment { broken_sequences: 1, ..fine }), [true, true, false]);
        let without = Assessment { slo: Slo::default(), ttft: 99 * SECOND, decode_now: full, ..fine };
        assert_eq!(verdicts(&without), [true; 3], "nothing is promised");
    }

    #[test]
    fn prefill_load_is_latency_over_objective_or_longest_wait() {
        let fine = assessment();
        assert_eq!(fine.prefill_load(), 0.1);
        let waits = Assessment { slo: Slo::default(), ahead: 15 * SECOND, ..fine };
        assert_eq!(waits.prefill_load(), 0.5, "without an objective it is the wait over the longest one");
        assert_eq!(Assessment { max_wait: None, ..waits }.prefill_load(), 0.0);
    }

    #[test]
    fn admission_refusal_names_estimate_and_objective() {
        let late = Assessment { ttft: 31 * SECOND, ..assessment() };
        let excess = Early.admit(&late).unwrap_err();
        assert_eq!(excess.to_string(), "the time to first token would be 31.0s, the objective is 30s");
        assert_eq!(excess.retry_after(late.relief), Some(SECOND));
        let slow = DecodeLoad { tbt: SECOND / 4, ..late.decode_now.unwrap() };
        let excess = slow.check(late.slo).unwrap_err();
        assert_eq!(excess.to_string(), "the time between tokens would be 250.0ms, the objective is 100ms");
        let full = DecodeLoad { kv_share: 1.25, ..late.decode_now.unwrap() };
        let excess = full.check(late.slo).unwrap_err();
        assert_eq!(excess.retry_after(late.relief), Some(late.relief.decode), "when a sequence is over");
        assert_eq!(excess.to_string(), "the decode node would need 125 % of its KV blocks");
    }

    #[test]
    fn objective_missed_on_idle_nodes_has_no_retry_time() {
        let late = Assessment { ttft: 31 * SECOND, ..assessment() };
        let excess = Early.admit(&late).unwrap_err().on_idle_nodes();
        let said = "the time to first token would be 31.0s even on idle nodes, the objective is 30s";
        assert_eq!(excess.to_string(), said);
        assert_eq!((excess.retry_after(late.relief), excess.objective()), (None, Some(Objective::Ttft)));
        let slow = DecodeLoad { tbt: SECOND / 4, ..late.decode_now.unwrap() };
        let excess = slow.check(late.slo).unwrap_err().on_idle_nodes();
        let said = "the time between tokens would be 250.0ms even on idle nodes, the objective is 100ms";
        assert_eq!(excess.to_string(), said);
        assert_eq!((excess.retry_after(late.relief), excess.objective()), (None, Some(Objective::Tbt)));
    }

    #[test]
    fn admission_refusal_after_waiting_names_the_wait() {
        let slo = Slo { ttft: Some(Ttft(SECOND * 3 / 10)), tbt: None };
        let held = Assessment { slo, waited: SECOND / 4, ttft: SECOND / 5, ttft_high: SECOND / 5, ..assessment() };
        let expected = "the time to first token would be 200.0ms after 250.0ms of waiting, the objective is 300ms";
        assert_eq!(Early.admit(&held).unwrap_err().to_string(), expected);
        assert_eq!(ValueDensity::default().admit(&held).unwrap_err().to_string(), expected);
        let at_once = Assessment { waited: SECOND / 1000, ttft: SECOND, ..held };
        let said = Early.admit(&at_once).unwrap_err().to_string();
        assert_eq!(said, "the time to first token would be 1.0s, the objective is 300ms", "it did not wait");
        let too_late = Assessment { waited: SECOND, ..held };
        let said = Early.admit(&too_late).unwrap_err().to_string();
        assert!(said.contains("would be 200.0ms after 300.0ms or more of waiting,"), "{said}");
    }

    #[test]
    fn admission_policy_names_parse_and_error_lists_them() {
        for kind in AdmissionKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
        }
        let error = "late".parse::<AdmissionKind>().unwrap_err().to_string();
        assert!(AdmissionKind::ALL.iter().all(|kind| error.contains(kind.as_str())), "{error}");
    }
}
