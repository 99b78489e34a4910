//! The runs that are asked for, in the order in which they are shown.

use baton_scheduler::{AdmissionKind, PlacementKind};

use super::args::{Compare, SimulateArgs};
use crate::options::{Feature, SimOptions};
use crate::policy::{SimAdmission, SimPlacement};

/// One run: what is played, and what it is called beside the others.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setting {
    pub name: String,
    pub options: SimOptions,
}

/// Every run, those of one name together, speeds ascending.
pub(crate) fn settings(args: &SimulateArgs) -> Vec<Setting> {
    let speeds = args.curve.as_ref().map_or_else(|| vec![args.speed], |curve| curve.speeds().to_vec());
    let at = |setting: &Setting, speed| Setting {
        options: SimOptions { speed, ..setting.options },
        name: setting.name.clone(),
    };
    compared(args).iter().flat_map(|setting| speeds.iter().map(|speed| at(setting, *speed))).collect()
}

fn compared(args: &SimulateArgs) -> Vec<Setting> {
    let base = args.options();
    let run = |name: &str, options| Setting { name: name.to_owned(), options };
    let placed = |placement| SimOptions { placement: args.tuned(placement), ..base };
    match args.compare {
        None => vec![run(base.placement.as_str(), base)],
        Some(Compare::Placement) => SimPlacement::ALL.map(|kind| run(kind.as_str(), placed(kind))).to_vec(),
        Some(Compare::Admission) => {
            SimAdmission::ALL.map(|admission| run(admission.as_str(), SimOptions { admission, ..base })).to_vec()
        }
        Some(Compare::Pairs) => pairs()
            .map(|(placement, admission)| {
                let name = format!("{} + {}", placement.as_str(), admission.as_str());
                Setting { name, options: SimOptions { admission, ..placed(placement) } }
            })
            .to_vec(),
        Some(Compare::Features) => {
            let without = Feature::ALL.iter().map(|kind| run(&format!("- {}", kind.as_str()), base.without(*kind)));
            std::iter::once(run("defaults", base)).chain(without).collect()
        }
    }
}

/// What Baton, the Mooncake papers, and a router by cached prefixes run with.
fn pairs() -> [(SimPlacement, SimAdmission); 3] {
    let cache_aware = SimPlacement::Production(PlacementKind::CacheAware);
    [
        (SimPlacement::MIN_TOTAL_DELAY, SimAdmission::default()),
        (SimPlacement::MOONCAKE, SimAdmission::Predictive),
        (cache_aware, SimAdmission::Production(AdmissionKind::Early)),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::*;

    fn names(line: &str) -> Vec<(String, f64)> {
        let settings = settings(&parse(line).unwrap());
        settings.into_iter().map(|setting| (setting.name, setting.options.speed)).collect()
    }

    #[test]
    fn plan_without_comparison_is_one_run() {
        assert_eq!(names("--trace t --speed 2"), [("min-total-delay".to_owned(), 2.0)]);
    }

    #[test]
    fn comparison_runs_each_policy_at_each_speed() {
        let runs = names("--trace t --compare admission --curve 1:2:1");
        assert_eq!(runs.len(), 2 * SimAdmission::ALL.len());
        assert_eq!(runs[..2], [("none".to_owned(), 1.0), ("none".to_owned(), 2.0)]);
    }

    #[test]
    fn comparison_runs_differ_only_in_what_is_compared() {
        let args = parse("--trace t --admission early --compare placement --balancing-threshold 3").unwrap();
        for Setting { options, .. } in settings(&args) {
            assert_eq!(options.admission, SimAdmission::Production(AdmissionKind::Early));
            if let SimPlacement::Mooncake { balancing_threshold } = options.placement {
                assert_eq!(balancing_threshold, 3.0);
            }
        }
    }

    #[test]
    fn comparison_of_features_leaves_each_out_once() {
        let runs = settings(&parse("--trace t --compare features").unwrap());
        for (index, run) in runs.iter().enumerate() {
            assert!(runs[..index].iter().all(|other| other.options != run.options), "{run:?}");
        }
        assert_eq!(runs.len(), Feature::ALL.len() + 1);
    }
}
