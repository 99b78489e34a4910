//! Tables for people.

use crate::screen::Paint;

/// Columns padded to their widest cell, two spaces apart. `colour` gives a cell its colours after
/// it was padded; it is told row and column.
pub fn table(
    header: &[&str],
    rows: &[Vec<String>],
    paint: Paint,
    colour: impl Fn(usize, usize, &str) -> String,
) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let padded = |cell: &str, column: usize| format!("{cell:<width$}", width = widths[column]);
    let join = |cells: Vec<String>| cells.join("  ").trim_end().to_owned();

    let mut lines =
        vec![paint.dim(&join(header.iter().enumerate().map(|(column, name)| padded(name, column)).collect()))];
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().enumerate().map(|(column, cell)| colour(index, column, &padded(cell, column)));
        lines.push(join(cells.collect()));
    }
    lines.join("\n")
}

/// A table of nodes, whose column `state` has its colour.
pub fn node_table(header: &[&str], rows: &[Vec<String>], state: usize, paint: Paint) -> String {
    table(header, rows, paint, |row, column, cell| match rows[row][column].as_str() {
        _ if column != state => cell.to_owned(),
        "ready" => paint.green(cell),
        "lost" => paint.red(cell),
        _ => paint.yellow(cell),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned() {
        let rows = vec![vec!["décode-0".into(), "1".into()], vec!["p".into(), "200".into()]];
        let text = table(&["NAME", "N"], &rows, Paint::none(), |_, _, cell| cell.to_owned());
        assert_eq!(text, "NAME      N\ndécode-0  1\np         200");
    }
}
