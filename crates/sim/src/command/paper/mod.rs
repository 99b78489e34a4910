//! `--paper`: the tables of the Mooncake papers beside the same experiments on this trace.
//!
//! The published figures come from other requests on other machines; only the order of the policies, and by how much they differ, can be compared. Each table says so.

mod caches;
mod eviction;
mod overload;
mod placement;

use std::io;

use serde_json::{Value, json};

use super::SimulateError;
use super::args::SimulateArgs;
use super::plan::{Setting, Varied};
use super::runs::Run;
use super::workload::Workload;
use super::{json, report, table};
use crate::options::SimOptions;

/// One of the paper's tables, with our rows.
#[derive(Debug)]
struct PaperTable {
    title: &'static str,
    /// What ours is, exactly.
    ours: String,
    /// The first column has names.
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    runs: Vec<Run>,
}

/// Published figures are marked with this.
const PAPER: &str = "paper: its own trace and cluster";

/// What has no published figure.
const NONE: &str = "-";

/// Makes a table, its runs included, with a line on stderr meanwhile if that is wanted.
type MakeTable = fn(&SimulateArgs, &Workload, bool) -> PaperTable;

/// The tables, in the order in which they are printed.
const TABLES: [MakeTable; 4] = [placement::table, overload::table, caches::table, eviction::table];

/// What goes to stdout.
pub(crate) fn answer(args: &SimulateArgs, workload: &Workload, json: bool) -> Result<String, SimulateError> {
    let tables: Vec<_> = TABLES.iter().map(|table| table(args, workload, !json)).collect();
    match json {
        true => Ok(tables_json(args, workload, &tables).map_err(io::Error::from)?.to_string()),
        false => Ok(text(args, workload, &tables)),
    }
}

fn text(args: &SimulateArgs, workload: &Workload, tables: &[PaperTable]) -> String {
    let setting = Setting::new(Varied::Placement, args);
    let head = report::lines(&report::paper_head(workload, args.window.as_str(), &setting));
    let tables = tables.iter().map(|table| format!("\n\n{}", table.text(workload)));
    std::iter::once(head).chain(tables).collect()
}

fn tables_json(args: &SimulateArgs, workload: &Workload, tables: &[PaperTable]) -> serde_json::Result<Value> {
    let tables = tables.iter().map(|table| table.json(args, workload)).collect::<serde_json::Result<Vec<_>>>()?;
    Ok(json!({ "tables": tables }))
}

impl PaperTable {
    fn text(&self, workload: &Workload) -> String {
        let header = self.header.iter().map(|head| (*head).to_owned()).collect();
        let rows: Vec<_> = std::iter::once(header).chain(self.rows.iter().cloned()).collect();
        let (title, ours, trace) = (self.title, &self.ours, &workload.name);
        format!("{title}\n{PAPER}; ours: {trace}, {ours}\n\n{}", table::table(1, &rows))
    }

    fn json(&self, args: &SimulateArgs, workload: &Workload) -> serde_json::Result<Value> {
        let runs = json::runs_json(args, workload, &self.runs)?;
        let ours = &self.ours;
        Ok(
            json!({ "title": self.title, "paper": PAPER, "ours": ours, "columns": self.header, "rows": self.rows, "runs": runs }),
        )
    }
}

/// Other nodes, at another speed.
fn replayed(setting: Setting, prefill: usize, decode: usize, speed: f64) -> Setting {
    Setting { options: SimOptions { prefill, decode, speed, ..setting.options }, ..setting }
}

/// A published figure, or none.
fn published(figure: Option<f64>) -> String {
    figure.map_or_else(|| NONE.to_owned(), |figure| format!("{figure:.2}"))
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::super::fixture::trace_file;
    use super::*;

    fn answer_of(rest: &str, json: bool) -> String {
        let trace = trace_file(40, |n| n * 700);
        let args = parse(&format!("--trace {} --paper {rest}", trace.path().display())).unwrap();
        answer(&args, &Workload::load(&args).unwrap(), json).unwrap()
    }

    #[test]
    fn published_figures_are_marked_as_such() {
        let text = answer_of("", false);
        assert_eq!(text.matches(PAPER).count(), TABLES.len(), "{text}");
        for figure in ["92.07", "60.41", "14.36", "6.26", "19.65", "4183", "3771", "3589", "2.22"] {
            assert!(text.contains(figure), "{figure}: {text}");
        }
        assert!(text.contains("14 prefill + 2 decode"), "{text}");
    }

    #[test]
    fn the_split_of_the_overload_can_be_set() {
        let json: Value = serde_json::from_str(&answer_of("--overload-split 3:1", true)).unwrap();
        let options = &json["tables"][1]["runs"][0]["options"];
        assert_eq!((&options["prefill"], &options["decode"], &options["speed"]), (&3.into(), &1.into(), &2.0.into()));
        let tables = json["tables"].as_array().unwrap();
        let sizes: Vec<_> = tables.iter().map(|table| table["runs"].as_array().unwrap().len()).collect();
        assert_eq!(sizes, [5, 4, 4, 0]);
    }
}
