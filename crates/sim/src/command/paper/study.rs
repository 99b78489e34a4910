//! What the tables share: the trace, the policies as every table runs them, and the runs that were made.

use super::super::args::SimulateArgs;
use super::super::numbers::steps;
use super::super::plan::{Setting, Varied};
use super::super::runs::{Run, run_all};
use super::super::workload::Workload;
use super::tuning::{Trial, Tuning};
use crate::options::SimOptions;
use crate::policy::{SimAdmission, SimPlacement};

/// Speeds at equal steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Speeds {
    pub from: f64,
    pub to: f64,
    pub step: f64,
}

impl Speeds {
    pub(super) fn all(self) -> Vec<f64> {
        steps(self.from, self.to, self.step)
    }
}

/// How far the tables over the speed go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Of the table of means.
    pub means: Speeds,
    /// Of the search for the highest speed.
    pub search: Speeds,
}

impl Extent {
    /// What users see.
    pub(super) const FULL: Self =
        Self { means: Speeds { from: 0.6, to: 1.6, step: 0.1 }, search: Speeds { from: 0.5, to: 4.0, step: 0.05 } };
}

/// A trace under study.
pub(super) struct Study<'a> {
    pub args: &'a SimulateArgs,
    pub workload: &'a Workload,
    /// The same without jitter, where there is some.
    pub raw: Option<Workload>,
    pub extent: Extent,
    pub tuning: Tuning,
    progress: bool,
    made: Vec<Run>,
}

impl<'a> Study<'a> {
    /// Chooses mooncake's parameters.
    pub(super) fn new(
        args: &'a SimulateArgs,
        workload: &'a Workload,
        raw: Option<Workload>,
        extent: Extent,
        progress: bool,
    ) -> Self {
        let tuning = Tuning::new(args, workload, progress);
        Self { args, workload, raw, extent, tuning, progress, made: Vec::new() }
    }

    /// A policy on 8 + 8 nodes that take everything in.
    pub(super) fn placed(&self, kind: SimPlacement, speed: f64) -> Setting {
        let base = Setting::new(Varied::Placement, self.args);
        let (admission, max_wait) = (SimAdmission::NONE, None);
        let options = SimOptions { prefill: 8, decode: 8, speed, admission, max_wait, ..base.options };
        let Trial { threshold: balancing_threshold, eviction, .. } = self.tuning.best();
        let options = match kind {
            SimPlacement::Mooncake { .. } => {
                SimOptions { placement: SimPlacement::Mooncake { balancing_threshold }, eviction, ..options }
            }
            _ => SimOptions { placement: self.args.tuned(kind), ..options },
        };
        Setting { options, ..base }
    }

    /// The paper's baseline.
    pub(super) fn mooncake(&self, speed: f64) -> Setting {
        self.placed(SimPlacement::Mooncake { balancing_threshold: 1.0 }, speed)
    }

    /// Baton as a cluster runs it.
    pub(super) fn baton(&self, speed: f64) -> Setting {
        self.placed(SimPlacement::BATON, speed)
    }

    /// The runs of these settings, in their order. What another table has made is not made again.
    pub(super) fn runs(&mut self, settings: &[Setting]) -> Vec<Run> {
        let missing: Vec<_> = settings.iter().filter(|setting| self.find(setting).is_none()).copied().collect();
        self.made.extend(run_all(self.workload, &missing, self.progress));
        let run =
            |setting: &Setting| Run { setting: *setting, ..self.find(setting).expect("it was just made").clone() };
        settings.iter().map(run).collect()
    }

    /// Runs of the trace as it was recorded; none where that is what all runs are of.
    pub(super) fn raw_runs(&self, settings: &[Setting]) -> Vec<Run> {
        self.raw.as_ref().map_or_else(Vec::new, |raw| run_all(raw, settings, self.progress))
    }

    fn find(&self, setting: &Setting) -> Option<&Run> {
        self.made.iter().find(|run| run.setting.options == setting.options)
    }
}
