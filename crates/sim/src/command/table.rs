//! Tables of text: the first column to the left, figures to the right.

use super::columns::COLUMNS;
use super::plan::Varied;
use super::runs::Run;

/// Columns padded to their widest cell, two spaces apart; the first `names` columns are names.
pub(crate) fn table(names: usize, rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let pad = |(column, cell): (usize, &String)| match (column < names, widths[column]) {
        (true, width) => format!("{cell:<width$}"),
        (false, width) => format!("{cell:>width$}"),
    };
    let lines = rows.iter().map(|row| row.iter().enumerate().map(pad).collect::<Vec<_>>().join("  "));
    lines.map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// One row for each run.
pub(crate) fn comparison(runs: &[Run]) -> String {
    let kinds = runs.iter().any(|run| run.setting.varied != runs[0].setting.varied);
    let speeds = runs.iter().any(|run| run.setting.options.speed != runs[0].setting.options.speed);
    let (mut head, heads) = (Vec::new(), COLUMNS.iter().map(|column| column.head.to_uppercase()));
    if kinds {
        head.push("KIND".to_owned());
    }
    head.push(if kinds { "POLICY".to_owned() } else { heading(runs) });
    if speeds {
        head.push("SPEED".to_owned());
    }
    let row = |run: &Run| {
        let kind = kinds.then(|| run.setting.varied.as_str().to_owned());
        let speed = speeds.then(|| format!("{}x", run.setting.options.speed));
        let figures = COLUMNS.iter().map(|column| column.text(run));
        kind.into_iter().chain([run.setting.name().to_owned()]).chain(speed).chain(figures).collect()
    };
    let rows = std::iter::once(head.into_iter().chain(heads).collect()).chain(runs.iter().map(row));
    table(1 + usize::from(kinds), &rows.collect::<Vec<_>>())
}

fn heading(runs: &[Run]) -> String {
    runs.first().map_or(Varied::Placement, |run| run.setting.varied).as_str().to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_to_the_left_and_figures_to_the_right() {
        let rows = [["POLICY", "N"], ["décode", "200"], ["p", "1"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(1, &rows), "POLICY    N\ndécode  200\np         1");
    }
}
