//! Rows of activations.

use std::marker::PhantomData;

use super::Threads;
use super::aligned::AlignedBuf;
use super::lanes::LANES;

/// Rows that a thread takes at once in operations that go row by row.
const ROW_GRAIN: usize = 16;

/// How many rows of how many columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowShape {
    pub rows: usize,
    pub columns: usize,
}

/// A matrix of activations `[rows][columns]`. Rows begin on cache lines. Their distance is an odd
/// number of lines, so that a column of rows does not fall into one cache set.
pub(crate) struct Rows {
    data: AlignedBuf,
    rows: usize,
    columns: usize,
    stride: usize,
}

impl Rows {
    /// No rows yet.
    pub fn new(columns: usize) -> Self {
        Self { data: AlignedBuf::zeroed(0), rows: 0, columns, stride: stride(columns) }
    }

    /// Makes it `rows` high. The contents are unspecified; memory is only ever added.
    pub fn resize(&mut self, rows: usize) {
        if rows * self.stride > self.data.len() {
            self.data = AlignedBuf::zeroed(rows * self.stride);
        }
        self.rows = rows;
    }

    /// Makes it `rows x columns`, as [`Self::resize`].
    pub fn reshape(&mut self, rows: usize, columns: usize) {
        self.columns = columns;
        self.stride = stride(columns);
        self.resize(rows);
    }

    /// Keeps some rows, in ascending order, as the first ones.
    pub fn keep(&mut self, rows: &[usize]) {
        for (to, &from) in rows.iter().enumerate() {
            assert!(to <= from && from < self.rows, "row {from} of {} as row {to}", self.rows);
            if to != from {
                let at = from * self.stride;
                self.data.copy_within(at..at + self.columns, to * self.stride);
            }
        }
        self.rows = rows.len();
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    pub fn shape(&self) -> RowShape {
        RowShape { rows: self.rows, columns: self.columns }
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn as_ptr(&self) -> *const f32 {
        self.data.as_ptr()
    }

    pub fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.data[row * self.stride..][..self.columns]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &mut self.data[row * self.stride..][..self.columns]
    }

    /// Runs `work(row, values)` for each row, on several threads.
    pub fn for_each(&mut self, threads: &Threads, work: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = self.rows;
        let columns = self.columns;
        let shared = self.share();
        threads.for_ranges(rows, ROW_GRAIN, |range| {
            for row in range {
                // SAFETY: the ranges are disjoint, so this thread alone has the row.
                work(row, unsafe { shared.part(row, 0, columns) });
            }
        });
    }

    /// A handle through which several threads write different parts.
    pub fn share(&mut self) -> SharedRows<'_> {
        let shape = self.shape();
        SharedRows::new(&mut self.data, shape, self.stride)
    }
}

fn stride(columns: usize) -> usize {
    (columns.div_ceil(LANES) | 1) * LANES
}

/// Rows that several threads write, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct SharedRows<'a, N = f32> {
    at: *mut N,
    rows: usize,
    columns: usize,
    stride: usize,
    owner: PhantomData<&'a mut [N]>,
}

// SAFETY: plain memory, borrowed exclusively for 'a; what is behind the pointers that it gives is
// touched in unsafe code alone, which answers for exclusion.
unsafe impl<N: Send> Send for SharedRows<'_, N> {}
// SAFETY: as above.
unsafe impl<N: Send> Sync for SharedRows<'_, N> {}

impl<'a, N> SharedRows<'a, N> {
    /// `[rows][columns]`, with `stride` elements from one row's start to the next one's.
    pub fn new(data: &'a mut [N], shape: RowShape, stride: usize) -> Self {
        let RowShape { rows, columns } = shape;
        assert!(columns <= stride && rows * stride <= data.len(), "{rows} rows of {columns}, {stride} apart");
        Self { at: data.as_mut_ptr(), rows, columns, stride, owner: PhantomData }
    }

    pub fn stride(&self) -> usize {
        self.stride
    }

    /// First element of a part of `width` columns from `column` on; beyond the last column, a row
    /// has room up to its stride.
    #[inline(always)]
    pub fn at(&self, row: usize, column: usize, width: usize) -> *mut N {
        assert!(row < self.rows && column + width <= self.stride, "row {row}, columns {column}+{width}");
        // SAFETY: inside the buffer, as just checked.
        unsafe { self.at.add(row * self.stride + column) }
    }

    /// A part of one row.
    ///
    /// # Safety
    /// Nothing else reads or writes the part while the slice lives.
    #[inline(always)]
    pub unsafe fn part(&self, row: usize, column: usize, width: usize) -> &'a mut [N] {
        assert!(column + width <= self.columns, "columns {column}+{width} of {}", self.columns);
        // SAFETY: inside the row (checked here and in `at`), exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, column, width), width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_stride_is_an_odd_number_of_cache_lines() {
        for columns in [1, 16, 17, 576, 1536] {
            let mut rows = Rows::new(columns);
            rows.resize(3);
            assert_eq!(rows.as_ptr() as usize % 64, 0);
            assert!(rows.stride() >= columns && rows.stride() / LANES % 2 == 1);
            rows.row_mut(2)[columns - 1] = 1.0;
            assert_eq!(rows.row(2)[columns - 1], 1.0);
            rows.resize(1);
            assert_eq!((rows.rows(), rows.columns()), (1, columns));
        }
    }

    #[test]
    fn kept_rows_move_up_in_order() {
        let mut rows = Rows::new(17);
        rows.resize(5);
        (0..5).for_each(|row| rows.row_mut(row).fill(row as f32));
        rows.keep(&[0, 2, 3]);
        assert_eq!(rows.rows(), 3);
        for (row, was) in [0.0, 2.0, 3.0].into_iter().enumerate() {
            assert_eq!(rows.row(row), [was; 17]);
        }
        rows.keep(&[2]);
        assert_eq!((rows.rows(), rows.row(0)), (1, &[3.0; 17][..]));
        rows.keep(&[]);
        assert_eq!(rows.rows(), 0);
    }
}
