//! What a comparison shows of each run, on a terminal and on the page.

use super::runs::Run;
use crate::summary::Summary;

/// How a figure is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Seconds; milliseconds count.
    Seconds,
    /// 0 to 1, as percent.
    Share,
    /// A whole number.
    Count,
    /// Of something per second.
    Rate,
}

impl Unit {
    pub(crate) fn text(self, value: f64) -> String {
        match self {
            Self::Seconds => format!("{value:.3}"),
            Self::Share => format!("{:.1} %", value * 100.0),
            Self::Count => format!("{value:.0}"),
            Self::Rate => format!("{value:.3}"),
        }
    }
}

/// Which of two figures is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    Less,
    More,
    /// It depends.
    Neither,
}

/// One figure of a run.
#[derive(Debug)]
pub(crate) struct Column {
    /// Above it.
    pub head: &'static str,
    /// What it is.
    pub meaning: &'static str,
    pub unit: Unit,
    pub better: Better,
    pub value: fn(&Summary) -> f64,
}

impl Column {
    pub(crate) fn text(&self, run: &Run) -> String {
        self.unit.text((self.value)(&run.summary))
    }

    /// The best figure of these runs, if there is one that not all of them have.
    pub(crate) fn best(&self, runs: &[&Run]) -> Option<String> {
        let values = || runs.iter().map(|run| (self.value)(&run.summary));
        let best = match self.better {
            Better::Less => values().fold(f64::INFINITY, f64::min),
            Better::More => values().fold(f64::NEG_INFINITY, f64::max),
            Better::Neither => return None,
        };
        let best = self.unit.text(best);
        runs.iter().any(|run| self.text(run) != best).then_some(best)
    }
}

macro_rules! column {
    ($head:literal, $unit:ident, $better:ident, $value:expr, $meaning:literal) => {
        Column { head: $head, meaning: $meaning, unit: Unit::$unit, better: Better::$better, value: $value }
    };
}

/// The columns, from left to right.
pub(crate) const COLUMNS: [Column; 13] = [
    column!("SLO met", Share, More, |s| s.slo_met_share, "requests that met both objectives"),
    column!("by tokens", Share, More, |s| s.slo_met_token_share, "the same, weighted by tokens"),
    column!("longest", Share, More, |s| s.slo_met_share_longest_tenth, "the same, of the longest tenth of prompts"),
    column!("goodput/s", Rate, More, |s| s.goodput_per_s, "requests within both objectives per second"),
    column!("TTFT", Seconds, Less, |s| s.ttft_mean_s, "mean time to first token, seconds"),
    column!("p50", Seconds, Less, |s| s.ttft_p50_s, "half of the times to first token are below, seconds"),
    column!("p90", Seconds, Less, |s| s.ttft_p90_s, "90 % are below"),
    column!("p99", Seconds, Less, |s| s.ttft_p99_s, "99 % are below"),
    column!("TBT p90", Seconds, Neither, |s| s.tbt_p90_s, "90 % of the times between tokens are below, seconds"),
    column!("rejected", Count, Neither, |s| s.rejected as f64, "refused"),
    column!("late", Count, Neither, |s| s.late as f64, "served, but not within both objectives"),
    column!("failed", Count, Neither, |s| s.failed as f64, "taken in, but not served to their end"),
    column!("hits", Share, More, |s| s.cache_hit_ratio, "tokens of prompts that were cached"),
];
