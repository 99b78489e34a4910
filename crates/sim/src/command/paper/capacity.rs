//! The highest speed at which nine of ten are served within both objectives.

use super::super::plan::Setting;
use super::super::runs::Run;
use super::PaperTable;
use super::cell::Cell;
use super::study::{Speeds, Study};
use crate::summary::Summary;

/// Share that must be within both objectives.
const SHARE: f64 = 0.9;
/// Speeds that are looked at together: one more than needed is wasted at most, and both threads have work when one policy is left.
const TOGETHER: usize = 2;

/// Of what the share is.
struct Measure {
    name: &'static str,
    share: fn(&Summary) -> f64,
}

const MEASURES: [Measure; 2] = [
    Measure { name: "requests", share: |summary| summary.slo_met_share },
    Measure { name: "tokens", share: |summary| summary.slo_met_token_share },
];

impl Measure {
    fn holds(&self, run: &Run) -> bool {
        (self.share)(&run.summary) >= SHARE
    }
}

/// A policy at a speed.
type Policy = fn(&Study<'_>, f64) -> Setting;

const POLICIES: [Policy; 2] = [|study, speed| study.mooncake(speed), |study, speed| study.baton(speed)];

/// A policy's runs, from the slowest speed to the first at which no measure holds any more.
type Ladder = Vec<Run>;

/// Climbs both ladders, two steps at a time.
fn climb(study: &mut Study<'_>) -> [Ladder; 2] {
    let mut ladders = [Ladder::new(), Ladder::new()];
    for speeds in study.extent.search.all().chunks(TOGETHER) {
        let open: Vec<_> = (0..POLICIES.len()).filter(|policy| goes_on(&ladders[*policy])).collect();
        let at_speeds =
            |policy: &usize| speeds.iter().map(|speed| POLICIES[*policy](study, *speed)).collect::<Vec<_>>();
        let settings: Vec<_> = open.iter().flat_map(at_speeds).collect();
        let runs = study.runs(&settings);
        for (policy, runs) in open.into_iter().zip(runs.chunks(speeds.len())) {
            ladders[policy].extend_from_slice(runs);
        }
    }
    ladders
}

fn goes_on(ladder: &[Run]) -> bool {
    MEASURES.iter().any(|measure| ladder.iter().all(|run| measure.holds(run)))
}

/// Where a ladder ends by one measure.
#[derive(Debug)]
struct Capacity<'a> {
    /// The highest step up to which all hold.
    last: Option<&'a Run>,
    /// The next one, which does not; none where the search ended before.
    next: Option<&'a Run>,
}

impl<'a> Capacity<'a> {
    fn of(ladder: &'a [Run], measure: &Measure) -> Self {
        let held = ladder.iter().take_while(|run| measure.holds(run)).count();
        Self { last: held.checked_sub(1).map(|last| &ladder[last]), next: ladder.get(held) }
    }

    /// Where it was found: between two steps.
    fn speed(&self) -> Option<f64> {
        self.next.and(self.last).map(|run| run.setting.options.speed)
    }

    fn cell(&self, search: Speeds) -> Cell {
        match (self.last, self.next) {
            (None, _) => Cell::text(format!("below {}x", search.from)),
            (Some(run), None) => Cell::text(format!("{}x or more", run.setting.options.speed)),
            (Some(run), Some(_)) => Cell::times(run.setting.options.speed),
        }
    }
}

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let ladders = climb(study);
    let rows = MEASURES.iter().flat_map(|measure| rows(study, measure, &ladders)).collect();
    let Speeds { from, to, step } = study.extent.search;
    PaperTable {
        title: "Highest speed with 90 % within the SLO",
        ours: format!(
            "8 prefill + 8 decode nodes, nothing rejected; the speed up to which each step of {step} from {from}x holds, to {to}x at most"
        ),
        names: 2,
        header: vec![
            "90 % OF",
            "PLACEMENT",
            "HIGHEST SPEED",
            "GAIN",
            "MET THERE",
            "A STEP ON",
            "LONGEST TENTH AT MOONCAKE'S",
            "AT BATON'S",
        ],
        rows,
        runs: ladders.concat(),
        ..PaperTable::default()
    }
}

/// Mooncake's row and Baton's.
fn rows(study: &mut Study<'_>, measure: &Measure, ladders: &[Ladder; 2]) -> [Vec<Cell>; 2] {
    let capacities = [0, 1].map(|policy| Capacity::of(&ladders[policy], measure));
    let longest = [0, 1].map(|policy| longest_tenths(study, POLICIES[policy], &capacities));
    let gain = match (capacities[0].speed(), capacities[1].speed()) {
        (Some(theirs), Some(ours)) => Cell::change(ours, theirs),
        _ => Cell::None,
    };
    let share = |run: Option<&Run>| run.map_or(Cell::None, |run| Cell::share((measure.share)(&run.summary)));
    let search = study.extent.search;
    let row = |name: &str, capacity: &Capacity<'_>, gain, longest: &[Cell; 2]| {
        let figures = [capacity.cell(search), gain, share(capacity.last), share(capacity.next)];
        let names = [Cell::text(measure.name), Cell::text(name)];
        names.into_iter().chain(figures).chain(longest.clone()).collect()
    };
    [row("mooncake", &capacities[0], Cell::None, &longest[0]), row("baton", &capacities[1], gain, &longest[1])]
}

/// How many of the longest tenth of prompts a policy serves in time at the speed that each policy reaches.
fn longest_tenths(study: &mut Study<'_>, policy: Policy, capacities: &[Capacity<'_>; 2]) -> [Cell; 2] {
    [0, 1].map(|reached| {
        let Some(speed) = capacities[reached].last.map(|run| run.setting.options.speed) else { return Cell::None };
        let setting = policy(study, speed);
        let runs = study.runs(&[setting]);
        Cell::share(runs[0].summary.slo_met_share_longest_tenth)
    })
}

#[cfg(test)]
mod tests {
    use super::super::study::Extent;
    use super::super::tests::{SMALL, with_study};
    use super::*;

    /// A cluster of which ten requests a second are too much for an objective of 1 s.
    fn extent(from: f64, to: f64) -> Extent {
        Extent { search: Speeds { from, to, step: 8.0 }, ..SMALL }
    }

    #[test]
    fn the_step_after_the_highest_speed_does_not_hold() {
        with_study("--ttft-slo-ms 1000", extent(1.0, 129.0), |study| {
            let ladders = climb(study);
            for (ladder, measure) in ladders.iter().flat_map(|ladder| MEASURES.iter().map(move |one| (ladder, one))) {
                let capacity = Capacity::of(ladder, measure);
                let (last, next) = (capacity.last.unwrap(), capacity.next.unwrap());
                assert!((measure.share)(&last.summary) >= SHARE && (measure.share)(&next.summary) < SHARE);
                assert_eq!(next.setting.options.speed, last.setting.options.speed + 8.0);
                assert!(ladder.iter().take_while(|run| run.setting != next.setting).all(|run| measure.holds(run)));
                assert_eq!(capacity.cell(study.extent.search), Cell::times(last.setting.options.speed));
            }
            assert!(
                ladders.iter().all(|ladder| ladder.len() < study.extent.search.all().len()),
                "none is climbed to its end"
            );
        });
    }

    #[test]
    fn a_search_that_finds_no_end_says_so() {
        with_study("", extent(1.0, 9.0), |study| {
            let table = table(study);
            let speeds: Vec<_> = table.rows.iter().map(|row| row[2].print()).collect();
            assert_eq!(speeds, ["9x or more"; 4]);
            assert!(table.rows.iter().all(|row| row[3] == Cell::None), "no gain without both ends: {table:?}");
        });
        with_study("--ttft-slo-ms 10", extent(1.0, 9.0), |study| {
            let table = table(study);
            assert_eq!(table.rows[0][2].print(), "below 1x");
            assert_eq!(table.runs.len(), 4, "both policies, and no look beyond the first");
        });
    }
}
