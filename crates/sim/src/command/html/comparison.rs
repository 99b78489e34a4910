//! The comparison as a table.

use super::super::columns::{COLUMNS, Column};
use super::super::runs::Run;
use super::escape::escape;

/// One row for each run, its speed where that differs, the best figure at each speed in bold.
pub(super) fn table(runs: &[&Run]) -> String {
    let heads: String = COLUMNS.iter().map(head).collect();
    let speeds = runs.iter().any(|run| run.setting.options.speed != runs[0].setting.options.speed);
    let rows: String = runs.iter().map(|run| row(run, speeds, &rivals(run, runs))).collect();
    let speed = if speeds { "<th>speed</th>" } else { "" };
    format!(
        "<div class=\"scroll\"><table><thead><tr><th>policy</th>{speed}{heads}</tr></thead><tbody>{rows}</tbody></table></div>\n"
    )
}

fn head(column: &Column) -> String {
    format!("<th title=\"{}\">{}</th>", escape(column.meaning), escape(column.head))
}

/// The runs of the same speed, itself included.
fn rivals<'a>(run: &Run, runs: &[&'a Run]) -> Vec<&'a Run> {
    runs.iter().copied().filter(|other| other.setting.options.speed == run.setting.options.speed).collect()
}

fn row(run: &Run, speeds: bool, rivals: &[&Run]) -> String {
    let speed = if speeds { format!("<td>{}x</td>", run.setting.options.speed) } else { String::new() };
    let cells: String = COLUMNS.iter().map(|column| cell(column, run, rivals)).collect();
    format!("<tr><th>{}</th>{speed}{cells}</tr>", escape(run.setting.name()))
}

fn cell(column: &Column, run: &Run, rivals: &[&Run]) -> String {
    let text = column.text(run);
    match column.best(rivals).is_some_and(|best| best == text) {
        true => format!("<td class=\"best\">{text}</td>"),
        false => format!("<td>{text}</td>"),
    }
}

/// What the columns are.
pub(super) fn meanings() -> String {
    let row = |column: &Column| format!("<dt>{}</dt><dd>{}</dd>", escape(column.head), escape(column.meaning));
    format!("<dl class=\"meanings\">{}</dl>", COLUMNS.iter().map(row).collect::<String>())
}
