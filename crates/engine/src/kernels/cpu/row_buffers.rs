//! Rows on their way into the form that a product takes.

use std::sync::{Mutex, PoisonError};

use crate::kernels::{AlignedBuf, RowShape, Rows, Threads};

/// Rows of a group: what a thread takes at once.
pub(super) const GROUP: usize = 16;

/// Where rows go that are taken in groups.
pub(super) struct Groups<'a, T> {
    pub to: &'a mut [T],
    /// Elements of 16 rows; the last ones may have fewer.
    pub len: usize,
}

/// A row for each thread, between what makes it and what rounds it: together they are one pass over
/// memory.
pub(crate) struct RowBuffers(Vec<Mutex<AlignedBuf>>);

impl RowBuffers {
    /// For rows of at most so many columns.
    pub fn new(threads: &Threads, most_columns: usize) -> Self {
        Self((0..threads.count()).map(|_| Mutex::new(AlignedBuf::zeroed(most_columns))).collect())
    }

    /// `make(row, values)` writes each of the rows, and `take(values, slot, group)` takes it.
    /// `slot` is the row's place in its group.
    pub(super) fn pass<T: Send>(
        &self,
        threads: &Threads,
        shape: RowShape,
        make: impl Fn(usize, &mut [f32]) + Sync,
        groups: Groups<'_, T>,
        take: impl Fn(&[f32], usize, &mut [T]) + Sync,
    ) {
        let RowShape { rows, columns } = shape;
        threads.for_each_chunk(groups.to, groups.len, rows > GROUP, |worker, group, to| {
            let mut buffer = self.0[worker].lock().unwrap_or_else(PoisonError::into_inner);
            let values = &mut buffer[..columns];
            for row in group * GROUP..rows.min((group + 1) * GROUP) {
                make(row, values);
                take(values, row % GROUP, to);
            }
        });
    }
}

/// As [`RowBuffers::pass`], of rows that are in memory.
pub(super) fn take_groups<T: Send>(
    threads: &Threads,
    x: &Rows,
    groups: Groups<'_, T>,
    take: impl Fn(&[f32], usize, &mut [T]) + Sync,
) {
    threads.for_each_chunk(groups.to, groups.len, x.rows() > GROUP, |_, group, to| {
        for row in group * GROUP..x.rows().min((group + 1) * GROUP) {
            take(x.row(row), row % GROUP, to);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_buffers_make_every_row_once_and_in_place() {
        for (count, rows) in [(1, 0), (1, 1), (1, 16), (3, 15), (3, 17), (3, 70)] {
            let threads = Threads::new(count).unwrap();
            let buffers = RowBuffers::new(&threads, 5);
            // Two elements a row, the last group as short as it is.
            let mut to = vec![0.0; rows * 2];
            let make = |row: usize, values: &mut [f32]| values.fill(row as f32 + 1.0);
            let groups = Groups { to: &mut to[..], len: GROUP * 2 };
            buffers.pass(&threads, RowShape { rows, columns: 3 }, make, groups, |values, slot, group| {
                group[slot * 2] += values.iter().sum::<f32>();
                group[slot * 2 + 1] += values[0];
            });
            let expected: Vec<_> = (1..=rows).flat_map(|row| [3.0 * row as f32, row as f32]).collect();
            assert_eq!(to, expected, "{count} threads, {rows} rows");
        }
    }
}
