//! Which charts a group of runs has.

use std::time::Duration;

use super::super::runs::Run;
use super::chart::{Axis, Chart, Line, Mark};
use super::scale::Scale;
use crate::options::SimOptions;
use crate::record::Sample;

/// Most points of a load over time: more cannot be seen.
const MAX_POINTS: usize = 90;

/// Number of a line's colour. They are counted from the last line, which is Baton's own policy: the first colour is the strongest.
pub(super) fn colour(index: usize, lines: usize) -> usize {
    (lines - 1 - index) % 7
}

/// One line for each run.
fn lines(runs: &[&Run], points: impl Fn(&Run) -> Vec<(f64, f64)>) -> Vec<Line> {
    let line = |(index, run): (usize, &&Run)| Line {
        name: run.setting.name(),
        colour: colour(index, runs.len()),
        points: points(run),
    };
    runs.iter().enumerate().map(line).collect()
}

fn xs(lines: &[Line]) -> impl Iterator<Item = f64> + '_ {
    lines.iter().flat_map(|line| line.points.iter().map(|point| point.0))
}

fn ys(lines: &[Line]) -> impl Iterator<Item = f64> + '_ {
    lines.iter().flat_map(|line| line.points.iter().map(|point| point.1))
}

/// The share of requests that had their first token by then.
pub(super) fn ttft(runs: &[&Run]) -> Chart {
    distribution("Time to first token", lines(runs, |run| run.ttft.clone()), slo(runs, |options| options.ttft_slo))
}

/// The share of requests with such a time between tokens.
pub(super) fn tbt(runs: &[&Run]) -> Chart {
    distribution("Time between tokens", lines(runs, |run| run.tbt.clone()), slo(runs, |options| options.tbt_slo))
}

/// The runs' objective, seconds.
fn slo(runs: &[&Run], of: fn(&SimOptions) -> Option<Duration>) -> Option<f64> {
    Some(of(&runs.first()?.setting.options)?.as_secs_f64())
}

fn distribution(title: &str, lines: Vec<Line>, slo_s: Option<f64>) -> Chart {
    let scale = Scale::log(xs(&lines).chain(slo_s));
    Chart {
        title: title.to_owned(),
        x: Axis { label: "seconds or less, logarithmic", scale, percent: false },
        y: Axis { label: "requests", scale: Scale::Linear(1.0), percent: true },
        mark: slo_s.map(|slo_s| Mark::X(slo_s, "objective")),
        lines,
    }
}

/// Waiting work of the prefill nodes over time.
pub(super) fn prefill_load(runs: &[&Run]) -> Chart {
    load(runs, "Load of the prefill nodes", "seconds of work that wait", "", |sample| sample.prefill_load)
}

/// Used blocks of the decode nodes over time.
pub(super) fn decode_load(runs: &[&Run]) -> Chart {
    load(runs, "Load of the decode nodes", "KV blocks used or waited for / all", "full", |sample| sample.decode_load)
}

fn load(runs: &[&Run], title: &str, label: &'static str, one: &'static str, of: fn(&Sample) -> f64) -> Chart {
    let lines = lines(runs, |run| thinned(&run.samples, of));
    let (x, y) = (Scale::up_to_last(xs(&lines)), Scale::linear(ys(&lines)));
    Chart {
        title: title.to_owned(),
        x: Axis { label: "minutes", scale: x, percent: false },
        mark: (y.position(1.0) < 1.0).then_some(Mark::Y(1.0, one)),
        y: Axis { label, scale: y, percent: false },
        lines,
    }
}

/// Minutes and load, neighbours averaged so that there are not too many.
fn thinned(samples: &[Sample], of: fn(&Sample) -> f64) -> Vec<(f64, f64)> {
    let mean =
        |samples: &[Sample], of: &dyn Fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>() / samples.len() as f64;
    let point = |samples: &[Sample]| (mean(samples, &|sample| sample.at_s / 60.0), mean(samples, &of));
    samples.chunks(samples.len().div_ceil(MAX_POINTS).max(1)).map(point).collect()
}

/// Mean time to first token over the speed.
pub(super) fn ttft_curve(policies: &[Vec<&Run>]) -> Chart {
    let lines = curves(policies, |run| run.summary.ttft_mean_s);
    Chart {
        title: "Mean time to first token over the speed".to_owned(),
        x: Axis { label: "times the recorded speed", scale: Scale::up_to_last(xs(&lines)), percent: false },
        y: Axis { label: "seconds, logarithmic", scale: Scale::log(ys(&lines)), percent: false },
        lines,
        mark: None,
    }
}

/// Share of requests within both objectives over the speed.
pub(super) fn slo_curve(policies: &[Vec<&Run>]) -> Chart {
    let lines = curves(policies, |run| run.summary.slo_met_share);
    Chart {
        title: "Objectives met over the speed".to_owned(),
        x: Axis { label: "times the recorded speed", scale: Scale::up_to_last(xs(&lines)), percent: false },
        y: Axis { label: "requests within both objectives", scale: Scale::Linear(1.0), percent: true },
        lines,
        mark: None,
    }
}

/// One line for each policy, one point for each of its runs.
fn curves(policies: &[Vec<&Run>], of: fn(&Run) -> f64) -> Vec<Line> {
    let last: Vec<_> = policies.iter().filter_map(|runs| runs.last().copied()).collect();
    let mut lines = lines(&last, |_| Vec::new());
    for (line, runs) in lines.iter_mut().zip(policies) {
        line.points = runs.iter().map(|run| (run.setting.options.speed, of(run))).collect();
    }
    lines
}
