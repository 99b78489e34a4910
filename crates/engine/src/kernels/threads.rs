//! The threads of one engine.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::pool::Pool;

/// Splits the work of an operation among the caller and a pool of helpers. Which thread does what
/// does not change any result.
pub(crate) struct Threads {
    helpers: Option<Pool>,
    count: usize,
}

impl Threads {
    /// `count` threads with the caller's, at least 1.
    pub fn new(count: usize) -> io::Result<Self> {
        let helpers = match count {
            0 | 1 => None,
            _ => Some(Pool::new(count - 1)?),
        };
        Ok(Self { helpers, count: count.max(1) })
    }

    /// Threads, the caller's included.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs `work(worker, task)` for each task, on at most `count` threads; `worker` is below
    /// `count`, and no two calls with the same worker overlap. With `parallel` false all run on the
    /// caller's thread: waking another costs more than small work.
    pub fn for_each(&self, tasks: usize, parallel: bool, work: impl Fn(usize, usize) + Sync) {
        let next = AtomicUsize::new(0);
        let drain = |worker| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                work(worker, task);
            }
        };
        match &self.helpers {
            Some(pool) if parallel && tasks > 1 => pool.run(&drain),
            _ => drain(0),
        }
    }

    /// Runs `work(worker, index, chunk)` over the chunks of `data`, the last of which may be
    /// shorter.
    pub fn for_each_chunk<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        parallel: bool,
        work: impl Fn(usize, usize, &mut [T]) + Sync,
    ) {
        let len = data.len();
        let shared = Shared(data.as_mut_ptr());
        self.for_each(len.div_ceil(chunk), parallel, |worker, task| {
            let first = task * chunk;
            let end = len.min((task + 1) * chunk);
            // SAFETY: inside `data`, which is borrowed exclusively; each task runs once, and no two
            // have an element in common.
            work(worker, task, unsafe { std::slice::from_raw_parts_mut(shared.at(first), end - first) });
        });
    }

    /// Runs `work` over `0..total` in ranges of `grain`; on one thread if there is but one range.
    pub fn for_ranges(&self, total: usize, grain: usize, work: impl Fn(Range<usize>) + Sync) {
        self.for_each(total.div_ceil(grain), true, |_, task| {
            work(task * grain..total.min((task + 1) * grain));
        });
    }
}

/// The first element of a slice whose parts go to several threads.
struct Shared<T>(*mut T);

// SAFETY: threads get disjoint parts (see `for_each_chunk`).
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn parallel_tasks_run_once_each_and_workers_do_not_overlap() {
        for count in [1, 2, 5] {
            let threads = Threads::new(count).unwrap();
            let workers: Vec<_> = (0..count).map(|_| Mutex::new(Vec::new())).collect();
            threads.for_each(100, true, |worker, task| workers[worker].try_lock().unwrap().push(task));
            let mut done: Vec<_> = workers.into_iter().flat_map(|w| w.into_inner().unwrap()).collect();
            done.sort_unstable();
            assert_eq!(done, (0..100).collect::<Vec<_>>());
        }
    }

    #[test]
    fn parallel_chunks_cover_the_slice() {
        let mut data = vec![0; 23];
        let work = |_: usize, index: usize, chunk: &mut [usize]| chunk.iter_mut().for_each(|x| *x += 10 + index);
        Threads::new(2).unwrap().for_each_chunk(&mut data, 5, true, work);
        assert_eq!(data, (0..23).map(|i| 10 + i / 5).collect::<Vec<_>>());
    }

    #[test]
    fn parallel_ranges_cover_the_total() {
        let seen = Mutex::new(vec![0; 23]);
        Threads::new(2)
            .unwrap()
            .for_ranges(23, 5, |range| seen.lock().unwrap()[range].iter_mut().for_each(|n| *n += 1));
        assert_eq!(*seen.lock().unwrap(), vec![1; 23]);
    }
}
