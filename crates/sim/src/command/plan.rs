//! The runs that are asked for, in the order in which they are shown.

use baton_kv_cache::EvictionKind;

use super::args::{Compare, SimulateArgs};
use crate::options::SimOptions;
use crate::policy::{SimAdmission, SimPlacement};

/// What tells the runs of a group from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Varied {
    Placement,
    Admission,
    Eviction,
}

impl Varied {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Placement => "placement",
            Self::Admission => "admission",
            Self::Eviction => "eviction",
        }
    }
}

/// One run: what is played, and what it is called beside the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Setting {
    pub varied: Varied,
    pub options: SimOptions,
}

impl Setting {
    pub(crate) fn new(varied: Varied, args: &SimulateArgs) -> Self {
        Self { varied, options: args.options() }
    }

    /// Name of the policy that is varied.
    pub(crate) const fn name(&self) -> &'static str {
        match self.varied {
            Varied::Placement => self.options.placement.as_str(),
            Varied::Admission => self.options.admission.as_str(),
            Varied::Eviction => self.options.eviction.as_str(),
        }
    }
}

/// Every run, those of one policy together, speeds ascending.
pub(crate) fn settings(args: &SimulateArgs) -> Vec<Setting> {
    policies(args).into_iter().flat_map(|setting| at_each_speed(setting, args)).collect()
}

fn policies(args: &SimulateArgs) -> Vec<Setting> {
    match args.compare {
        None => vec![Setting::new(Varied::Placement, args)],
        Some(Compare::Placement) => placements(args, &SimPlacement::ALL),
        Some(Compare::Admission) => admissions(args, &SimAdmission::ALL),
        Some(Compare::Eviction) => evictions(args),
        Some(Compare::All) => {
            let groups = [placements(args, &SimPlacement::ALL), admissions(args, &SimAdmission::ALL), evictions(args)];
            groups.concat()
        }
    }
}

pub(crate) fn placements(args: &SimulateArgs, kinds: &[SimPlacement]) -> Vec<Setting> {
    let base = Setting::new(Varied::Placement, args);
    let with = |kind: &SimPlacement| SimOptions { placement: args.tuned(*kind), ..base.options };
    kinds.iter().map(|kind| Setting { options: with(kind), ..base }).collect()
}

pub(crate) fn admissions(args: &SimulateArgs, kinds: &[SimAdmission]) -> Vec<Setting> {
    let base = Setting::new(Varied::Admission, args);
    let with = |admission: &SimAdmission| SimOptions { admission: *admission, ..base.options };
    kinds.iter().map(|kind| Setting { options: with(kind), ..base }).collect()
}

fn evictions(args: &SimulateArgs) -> Vec<Setting> {
    let base = Setting::new(Varied::Eviction, args);
    let with = |eviction| SimOptions { eviction, ..base.options };
    EvictionKind::ALL.into_iter().map(|kind| Setting { options: with(kind), ..base }).collect()
}

fn at_each_speed(setting: Setting, args: &SimulateArgs) -> Vec<Setting> {
    let Some(curve) = &args.curve else { return vec![setting] };
    let at = |speed: &f64| Setting { options: SimOptions { speed: *speed, ..setting.options }, ..setting };
    curve.speeds().iter().map(at).collect()
}

#[cfg(test)]
mod tests {
    use baton_scheduler::AdmissionKind;

    use super::super::args::tests::parse;
    use super::*;

    fn names(line: &str) -> Vec<(&'static str, &'static str, f64)> {
        let settings = settings(&parse(line).unwrap());
        settings.iter().map(|setting| (setting.varied.as_str(), setting.name(), setting.options.speed)).collect()
    }

    #[test]
    fn a_plain_run_is_one() {
        assert_eq!(names("--trace t --speed 2"), [("placement", "baton", 2.0)]);
    }

    #[test]
    fn each_policy_runs_at_each_speed() {
        let runs = names("--trace t --compare admission --curve 1:2:1");
        assert_eq!(runs.len(), 2 * SimAdmission::ALL.len());
        assert_eq!(runs[..3], [("admission", "none", 1.0), ("admission", "none", 2.0), ("admission", "baseline", 1.0)]);
    }

    #[test]
    fn all_kinds_follow_each_other() {
        let runs = names("--trace t --compare all");
        assert_eq!(runs.len(), SimPlacement::ALL.len() + SimAdmission::ALL.len() + EvictionKind::ALL.len());
        let (admission, eviction) = (SimPlacement::ALL.len(), SimPlacement::ALL.len() + SimAdmission::ALL.len());
        assert_eq!((runs[0].0, runs[admission].0, runs[eviction].0), ("placement", "admission", "eviction"));
    }

    #[test]
    fn only_what_is_compared_differs() {
        let args = parse("--trace t --admission early --compare placement --balancing-threshold 3").unwrap();
        for setting in settings(&args) {
            assert_eq!(setting.options.admission, SimAdmission::Production(AdmissionKind::Early));
            if let SimPlacement::Mooncake { balancing_threshold } = setting.options.placement {
                assert_eq!(balancing_threshold, 3.0);
            }
        }
    }
}
