//! Service level objectives.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Time to first token: from the arrival of the request to its first token at the frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ttft(pub Duration);

/// Time between tokens: the mean of the longest 10 % of a request's token gaps (Mooncake, section
/// 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tbt(pub Duration);

/// What a request must be served within. `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Slo {
    /// Limit for the time to first token.
    pub ttft: Option<Ttft>,
    /// Limit for the time between tokens.
    pub tbt: Option<Tbt>,
}

/// One of a request's objectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// Of the time to first token.
    Ttft,
    /// Of the time between tokens.
    Tbt,
}

impl Objective {
    /// Every objective.
    pub const ALL: [Self; 2] = [Self::Ttft, Self::Tbt];

    /// The conductor's setting of it. Fields and flags of requests end with the same.
    pub const fn setting(self) -> &'static str {
        match self {
            Self::Ttft => "ttft_slo_ms",
            Self::Tbt => "tbt_slo_ms",
        }
    }
}

impl Slo {
    /// Whether it limits this.
    pub fn has(self, objective: Objective) -> bool {
        match objective {
            Objective::Ttft => self.ttft.is_some(),
            Objective::Tbt => self.tbt.is_some(),
        }
    }

    /// These, and for what they do not limit the others.
    pub fn or(self, others: Self) -> Self {
        Self { ttft: self.ttft.or(others.ttft), tbt: self.tbt.or(others.tbt) }
    }

    /// What is left of them `waited` after the request's arrival: its first token comes nearer, the
    /// time between tokens stays.
    pub fn after(self, waited: Duration) -> Self {
        Self { ttft: self.ttft.map(|Ttft(limit)| Ttft(limit.saturating_sub(waited))), ..self }
    }
}

impl Tbt {
    /// Mean of the longest 10 % (at least one) of `gaps`, or `None` if there are none. Sorts
    /// `gaps`.
    pub fn of_gaps(gaps: &mut [Duration]) -> Option<Self> {
        if gaps.is_empty() {
            return None;
        }
        gaps.sort_unstable();
        let tail = &gaps[gaps.len() - gaps.len().div_ceil(10)..];
        let count = u32::try_from(tail.len()).unwrap_or(u32::MAX);
        Some(Self(tail.iter().sum::<Duration>() / count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tbt_is_the_mean_of_the_longest_tenth_of_gaps() {
        let mut gaps: Vec<_> = (1..=20).rev().map(Duration::from_millis).collect();
        assert_eq!(Tbt::of_gaps(&mut gaps), Some(Tbt(Duration::from_micros(19_500))));
        assert_eq!(Tbt::of_gaps(&mut [Duration::from_millis(3)]), Some(Tbt(Duration::from_millis(3))));
        assert_eq!(Tbt::of_gaps(&mut []), None);
    }
}
