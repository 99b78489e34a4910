//! `--paper`: everything that Baton's claims rest on, on one trace, and the tables of the Mooncake papers beside it.
//!
//! Mooncake's parameters are chosen on the first half of the trace's time (`tuning`), and the second half is counted. Each table is a file. The published figures come from other
//! requests on other machines; only the order of the policies, and by how much they differ, can be compared. The tables that have some say so.

mod caches;
mod capacity;
mod cell;
mod eviction;
mod overload;
mod placement;
mod speeds;
mod study;
mod tuning;

use std::io;
use std::time::Duration;

use serde_json::{Value, json};

use super::SimulateError;
use super::args::SimulateArgs;
use super::plan::{Setting, Varied};
use super::runs::Run;
use super::workload::Workload;
use super::{json, report, table};
use cell::Cell;
use study::{Extent, Study};

/// A table, and the runs that its figures are of.
#[derive(Debug, Default)]
struct PaperTable {
    title: &'static str,
    /// Whether one of the columns is a paper's.
    published: bool,
    /// What ours is, exactly.
    ours: String,
    /// So many columns, from the first, have names.
    names: usize,
    header: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
    runs: Vec<Run>,
}

/// Published figures are marked with this.
const PAPER: &str = "paper: its own trace and cluster";

/// Makes a table, its runs included.
type MakeTable = fn(&mut Study<'_>) -> PaperTable;

/// The tables, in the order in which they are printed.
const TABLES: [MakeTable; 7] =
    [tuning::table, placement::table, speeds::table, capacity::table, overload::table, caches::table, eviction::table];

/// What goes to stdout.
pub(crate) fn answer(args: &SimulateArgs, workload: &Workload, json: bool) -> Result<String, SimulateError> {
    let mut study = Study::new(args, workload, unjittered(args)?, Extent::FULL, !json);
    answer_of(&mut study, json)
}

/// The trace as it was recorded, where it is played otherwise.
fn unjittered(args: &SimulateArgs) -> Result<Option<Workload>, SimulateError> {
    let raw = || Workload::load(&SimulateArgs { jitter: Duration::ZERO, ..args.clone() });
    (!args.jitter.is_zero()).then(raw).transpose()
}

fn answer_of(study: &mut Study<'_>, json: bool) -> Result<String, SimulateError> {
    let tables: Vec<_> = TABLES.iter().map(|table| table(study)).collect();
    match json {
        true => Ok(tables_json(study, &tables).map_err(io::Error::from)?.to_string()),
        false => Ok(text(study, &tables)),
    }
}

fn text(study: &Study<'_>, tables: &[PaperTable]) -> String {
    let (args, workload) = (study.args, study.workload);
    let mut head = report::paper_head(workload, args.counted().as_str(), &Setting::new(Varied::Placement, args));
    head.push(("mooncake", study.tuning.note()));
    head.push(("others", format!("eviction {}", args.eviction.as_str())));
    let tables = tables.iter().map(|table| format!("\n\n{}", table.text(workload)));
    std::iter::once(report::lines(&head)).chain(tables).collect()
}

fn tables_json(study: &Study<'_>, tables: &[PaperTable]) -> serde_json::Result<Value> {
    let tables = tables.iter().map(|table| table.json(study.args, study.workload));
    Ok(json!({ "tables": tables.collect::<serde_json::Result<Vec<_>>>()? }))
}

impl PaperTable {
    /// Where its figures come from.
    fn paper(&self) -> Option<&'static str> {
        self.published.then_some(PAPER)
    }

    fn text(&self, workload: &Workload) -> String {
        let header = self.header.iter().map(|head| (*head).to_owned()).collect();
        let rows = self.rows.iter().map(|row| row.iter().map(Cell::print).collect());
        let rows: Vec<_> = std::iter::once(header).chain(rows).collect();
        let (title, ours, trace) = (self.title, &self.ours, &workload.name);
        let paper = self.paper().map_or_else(String::new, |paper| format!("{paper}; ours: "));
        format!("{title}\n{paper}{trace}, {ours}\n\n{}", table::table(self.names, &rows))
    }

    fn json(&self, args: &SimulateArgs, workload: &Workload) -> serde_json::Result<Value> {
        let runs = json::runs_json(args, workload, &self.runs)?;
        let rows: Vec<Vec<_>> = self.rows.iter().map(|row| row.iter().map(Cell::json).collect()).collect();
        let (ours, columns) = (&self.ours, &self.header);
        Ok(
            json!({ "title": self.title, "paper": self.paper(), "ours": ours, "columns": columns, "rows": rows, "runs": runs }),
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::SimPlacement;

    use super::super::args::tests::parse;
    use super::super::fixture::trace_file;
    use super::study::Speeds;
    use super::*;
    use crate::options::Window;

    /// Few speeds: what holds for them holds for more.
    pub(super) const SMALL: Extent =
        Extent { means: Speeds { from: 0.5, to: 1.5, step: 0.5 }, search: Speeds { from: 1.0, to: 1.5, step: 0.25 } };

    pub(super) fn with_study<T>(rest: &str, extent: Extent, look: impl FnOnce(&mut Study<'_>) -> T) -> T {
        let trace = trace_file(40, |n| n * 700);
        let args = parse(&format!("--trace {} --paper {rest}", trace.path().display())).unwrap();
        let workload = Workload::load(&args).unwrap();
        look(&mut Study::new(&args, &workload, unjittered(&args).unwrap(), extent, false))
    }

    fn text_of(rest: &str) -> String {
        with_study(rest, SMALL, |study| answer_of(study, false).unwrap())
    }

    fn tables_of(rest: &str) -> Vec<Value> {
        let json = with_study(rest, SMALL, |study| answer_of(study, true).unwrap());
        serde_json::from_str::<Value>(&json).unwrap()["tables"].as_array().unwrap().clone()
    }

    fn is_published(table: &Value) -> bool {
        let columns = table["columns"].as_array().unwrap().iter().map(|column| column.as_str().unwrap());
        columns.into_iter().any(|column| column.contains("ARXIV") || column.contains("FAST"))
    }

    #[test]
    fn published_figures_are_marked_as_such_and_nothing_else_is() {
        let (text, tables) = (text_of(""), tables_of(""));
        for table in &tables {
            assert_eq!(table["paper"].is_string(), is_published(table), "{}", table["title"]);
        }
        let published = tables.iter().filter(|table| is_published(table)).count();
        assert_eq!((published, text.matches(PAPER).count()), (3, 3), "{text}");
        for figure in ["92.07", "60.41", "14.36", "6.26", "19.65", "4183", "3771", "3589", "2.22"] {
            assert!(text.contains(figure), "{figure}: {text}");
        }
    }

    #[test]
    fn every_row_has_all_columns_and_figures_are_numbers() {
        let tables = tables_of("--jitter 2");
        for table in &tables {
            let columns = table["columns"].as_array().unwrap().len();
            let rows: Vec<_> = table["rows"].as_array().unwrap().iter().map(|row| row.as_array().unwrap()).collect();
            assert!(!rows.is_empty() && rows.iter().all(|row| row.len() == columns), "{}: {rows:?}", table["title"]);
            assert!(rows.iter().all(|row| row.iter().any(Value::is_number)), "{}: {rows:?}", table["title"]);
        }
        let rows = &tables[1]["rows"];
        assert_eq!((&rows[0][0], &rows[0][1]), (&"random".into(), &92.07.into()));
        assert_eq!(rows[0][3], tables[1]["runs"][0]["ttft_mean_s"]);
    }

    /// The figures of a column, by the place of each row's run.
    fn column(table: &Value, head: &str) -> Vec<Value> {
        let columns = table["columns"].as_array().unwrap();
        let place = columns.iter().position(|column| column == head).unwrap_or_else(|| panic!("{head}: {columns:?}"));
        table["rows"].as_array().unwrap().iter().map(|row| row[place].clone()).collect()
    }

    #[test]
    fn columns_show_what_their_heads_say() {
        let (loose, tight) = (
            tables_of("--overload-split 1:1"),
            tables_of("--overload-split 1:1 --ttft-slo-ms 700 --tbt-slo-ms 28 --cache-blocks 20 --window all"),
        );
        for (table, head, figure) in [
            (1, "P90", "ttft_p90_s"),
            (1, "SLO MET", "slo_met_share"),
            (4, "REJECTED", "rejected"),
            (4, "LATE", "late"),
            (4, "PREFILL LOAD", "prefill_load_mean"),
            (4, "PREFILL SWING", "prefill_load_swing"),
            (4, "DECODE LOAD", "decode_load_mean"),
            (4, "DECODE SWING", "decode_load_swing"),
            (4, "SLO MET", "slo_met_share"),
            (4, "BY TOKENS", "slo_met_token_share"),
            (4, "LONGEST TENTH", "slo_met_share_longest_tenth"),
            (5, "HITS", "cache_hit_ratio"),
            (5, "OWN", "cache_hit_ratio_local"),
        ] {
            let figures = |tables: &[Value]| {
                let runs = tables[table]["runs"].as_array().unwrap();
                let figures: Vec<_> = runs.iter().map(|run| run[figure].clone()).collect();
                assert_eq!(column(&tables[table], head), figures, "{head}");
                figures
            };
            let mut figures = [figures(&loose), figures(&tight)].concat().into_iter();
            assert!(figures.any(|one| one.as_f64() > Some(0.0)), "{head} is put to no test");
        }
    }

    #[test]
    fn raw_stands_beside_jittered() {
        let raw = tables_of("")[1]["rows"].clone();
        let both = tables_of("--jitter 2")[1]["rows"].clone();
        for (raw, both) in raw.as_array().unwrap().iter().zip(both.as_array().unwrap()) {
            let (raw, both) = (raw.as_array().unwrap(), both.as_array().unwrap());
            assert_eq!(both[7..], raw[3..], "as without jitter");
            assert_ne!(both[3..7], raw[3..], "jittered");
        }
    }

    #[test]
    fn the_second_half_is_counted_unless_another_is_wanted() {
        let requests = |rest: &str| tables_of(rest)[1]["runs"][0]["requests"].clone();
        assert_eq!((requests(""), requests("--window all")), (20.into(), 40.into()));
    }

    #[test]
    fn tables_run_mooncake_with_what_is_best_on_the_first_half() {
        with_study("--cache-blocks 30", SMALL, |study| {
            let best = study.tuning.best();
            let setting = study.mooncake(1.0);
            let placement = SimPlacement::Mooncake { balancing_threshold: best.threshold };
            assert_eq!((setting.options.placement, setting.options.eviction), (placement, best.eviction));
            assert_eq!(setting.options.window, Window::SECOND_HALF);
            let runs = placement::table(study).runs;
            assert!(runs.iter().any(|run| run.setting == setting), "and the table has that run");
        });
        assert!(text_of("--balancing-threshold 3").contains("threshold 3, eviction"));
    }

    #[test]
    fn each_speed_is_a_row_and_each_policy_a_column() {
        with_study("", SMALL, |study| {
            let table = speeds::table(study);
            assert_eq!(table.rows.len(), 3);
            let run = table.runs.iter().find(|run| run.setting == study.baton(1.5)).unwrap();
            assert_eq!(table.rows[2][0], Cell::times(1.5));
            assert_eq!(table.rows[2][5], Cell::seconds(run.summary.ttft_mean_s));
            assert_eq!(table.rows[2][6], Cell::seconds(study.workload.floor_ttft_mean_s));
        });
    }

    #[test]
    fn the_split_of_the_overload_can_be_set() {
        let table = &tables_of("--overload-split 3:1")[4];
        let runs = table["runs"].as_array().unwrap();
        let options = |run: usize| &runs[run]["options"];
        assert_eq!((&options(0)["prefill"], &options(0)["decode"]), (&3.into(), &1.into()));
        assert_eq!((&options(4)["speed"], &options(5)["speed"], runs.len()), (&2.0.into(), &3.0.into(), 10));
        assert!(table["ours"].as_str().unwrap().contains("at 3+1 and 2x"), "{}", table["ours"]);
        let published = |row: usize| table["rows"][row][3].clone();
        assert_eq!((published(1), published(6)), (4183.into(), Value::Null), "published at 2x only");
        assert_eq!(tables_of("")[4]["rows"].as_array().unwrap().len(), 20, "two splits where none is given");
    }
}
