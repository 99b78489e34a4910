//! The policies that are compared: production's, and those of the papers through the same traits.

mod baseline;
mod mooncake;
mod predictive;
mod random;

use std::str::FromStr;

use baton_scheduler::{
    AdmissionKind, AdmissionPolicy, MinTotalDelay, MinTotalDelayConfig, PlacementKind, PlacementPolicy,
};

use baseline::Baseline;
use mooncake::{BALANCING_THRESHOLD, Mooncake};
use predictive::Predictive;
use random::Random;

/// How requests are placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SimPlacement {
    /// Production's.
    Production(PlacementKind),
    /// Our own with its parts set by hand: for measuring what each is worth.
    MinTotalDelayWith(MinTotalDelayConfig),
    /// Any nodes.
    Random,
    /// Algorithm 1 of the Mooncake paper, with its `kvcache_balancing_threshold`.
    Mooncake {
        /// A node whose own prefix is shorter than the longest one by this factor or more gets the
        /// longest one.
        balancing_threshold: f64,
    },
}

impl Default for SimPlacement {
    fn default() -> Self {
        Self::MIN_TOTAL_DELAY
    }
}

impl SimPlacement {
    /// Algorithm 1 with the threshold of its default.
    pub const MOONCAKE: Self = Self::Mooncake { balancing_threshold: BALANCING_THRESHOLD };
    /// Our own.
    pub const MIN_TOTAL_DELAY: Self = Self::Production(PlacementKind::MinTotalDelay);
    /// Every policy that has a name, with its defaults.
    pub const ALL: [Self; 6] = [
        Self::Random,
        Self::Production(PlacementKind::RoundRobin),
        Self::Production(PlacementKind::LoadBalance),
        Self::Production(PlacementKind::CacheAware),
        Self::MOONCAKE,
        Self::MIN_TOTAL_DELAY,
    ];

    /// Its name on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Production(kind) => kind.as_str(),
            Self::MinTotalDelayWith(_) => PlacementKind::MinTotalDelay.as_str(),
            Self::Random => "random",
            Self::Mooncake { .. } => "mooncake",
        }
    }

    /// The policy.
    pub(crate) fn policy(self) -> Box<dyn PlacementPolicy> {
        match self {
            Self::Production(kind) => kind.policy(),
            Self::MinTotalDelayWith(config) => Box::new(MinTotalDelay::new(config)),
            Self::Random => Box::new(Random),
            Self::Mooncake { balancing_threshold } => Box::new(Mooncake { balancing_threshold }),
        }
    }
}

impl FromStr for SimPlacement {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|policy| policy.as_str() == name);
        known.ok_or_else(|| format!("'{name}' is none of {}", Self::ALL.map(Self::as_str).join(", ")))
    }
}

/// What is taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimAdmission {
    /// Production's.
    Production(AdmissionKind),
    /// What keeps its time to first token (Mooncake, section 7.1).
    Baseline,
    /// The same, and the decode load of the time when the prompt would be computed (Mooncake,
    /// section 7.4).
    Predictive,
}

impl Default for SimAdmission {
    fn default() -> Self {
        Self::Production(AdmissionKind::default())
    }
}

impl SimAdmission {
    /// Everything.
    pub const NONE: Self = Self::Production(AdmissionKind::None);
    /// Every policy.
    pub const ALL: [Self; 5] = [
        Self::NONE,
        Self::Baseline,
        Self::Production(AdmissionKind::Early),
        Self::Predictive,
        Self::Production(AdmissionKind::ValueDensity),
    ];

    /// Its name on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Production(kind) => kind.as_str(),
            Self::Baseline => "baseline",
            Self::Predictive => "predictive",
        }
    }

    /// The policy.
    pub(crate) fn policy(self) -> Box<dyn AdmissionPolicy> {
        match self {
            Self::Production(kind) => kind.policy(),
            Self::Baseline => Box::new(Baseline),
            Self::Predictive => Box::new(Predictive),
        }
    }
}

impl FromStr for SimAdmission {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|policy| policy.as_str() == name);
        known.ok_or_else(|| format!("'{name}' is none of {}", Self::ALL.map(Self::as_str).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_policies_have_the_names_they_are_chosen_by() {
        for placement in SimPlacement::ALL {
            assert_eq!((placement.as_str().parse(), placement.policy().name()), (Ok(placement), placement.as_str()));
        }
        for admission in SimAdmission::ALL {
            assert_eq!((admission.as_str().parse(), admission.policy().name()), (Ok(admission), admission.as_str()));
        }
        assert!("best".parse::<SimPlacement>().is_err() && "best".parse::<SimAdmission>().is_err());
    }
}
