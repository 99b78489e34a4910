//! How much memory all connections together may take. Counted are bodies of requests, answers that
//! are kept until they are whole, and what clients have not read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A budget of bytes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: usize,
    reserved: Mutex<Reserved>,
}

/// Bytes that are reserved.
#[derive(Debug, Default)]
struct Reserved {
    now: usize,
    /// The most since it was last asked for.
    peak: usize,
}

/// There is no room now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exhausted;

/// Bytes of a budget; given back when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Shared>,
    bytes: usize,
}

impl Shared {
    fn reserved(&self) -> MutexGuard<'_, Reserved> {
        // Numbers are whole.
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a reservation of `own` bytes may become one of `bytes`. It gets at most three
    /// quarters of what the others leave: however many large bodies there are, a small one fits
    /// beside them.
    fn allows(&self, reserved: usize, own: usize, bytes: usize) -> bool {
        let left = self.limit - (reserved - own);
        bytes <= left / 4 * 3
    }
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Shared { limit, reserved: Mutex::default() }))
    }

    /// Bytes that were given back since it was last asked: fewer than at most were reserved then.
    pub fn freed(&self) -> usize {
        let mut reserved = self.0.reserved();
        let freed = reserved.peak - reserved.now;
        reserved.peak = reserved.now;
        freed
    }

    /// A reservation of nothing yet.
    pub fn reserve(&self) -> Reservation {
        Reservation { budget: Arc::clone(&self.0), bytes: 0 }
    }
}

impl Reservation {
    /// What it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Most that it can have, if there is no other.
    pub fn largest(&self) -> usize {
        self.budget.limit / 4 * 3
    }

    /// Whether it could grow by so many bytes now.
    pub fn fits(&self, by: usize) -> bool {
        self.budget.allows(self.budget.reserved().now, self.bytes, self.bytes.saturating_add(by))
    }

    /// Reserves more.
    pub fn grow(&mut self, by: usize) -> Result<(), Exhausted> {
        let mut reserved = self.budget.reserved();
        let bytes = self.bytes.saturating_add(by);
        if !self.budget.allows(reserved.now, self.bytes, bytes) {
            return Err(Exhausted);
        }
        reserved.now += by;
        reserved.peak = reserved.peak.max(reserved.now);
        self.bytes = bytes;
        Ok(())
    }

    /// Reserves so many in all, more or fewer than now.
    pub fn resize(&mut self, bytes: usize) -> Result<(), Exhausted> {
        match bytes.checked_sub(self.bytes) {
            // Also if others have taken all meanwhile.
            Some(0) => Ok(()),
            Some(more) => self.grow(more),
            None => {
                self.shrink(self.bytes - bytes);
                Ok(())
            }
        }
    }

    /// Gives some of it back.
    pub fn shrink(&mut self, by: usize) {
        let by = by.min(self.bytes);
        self.budget.reserved().now -= by;
        self.bytes -= by;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.reserved().now -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_reservation_returns_its_bytes_to_the_budget() {
        let budget = Budget::new(100);
        let mut one = budget.reserve();
        assert_eq!((one.grow(76), one.fits(75)), (Err(Exhausted), true));
        assert_eq!((one.grow(50), one.grow(25), one.grow(1)), (Ok(()), Ok(()), Err(Exhausted)));
        assert_eq!(budget.reserve().grow(75), Err(Exhausted));
        drop(one);
        assert_eq!(budget.reserve().grow(75), Ok(()));
        assert_eq!(budget.0.reserved().now, 0);
    }

    #[test]
    fn freed_bytes_are_told_once() {
        let budget = Budget::new(100);
        let mut one = budget.reserve();
        assert_eq!((one.grow(50), budget.freed()), (Ok(()), 0));
        one.shrink(20);
        assert_eq!((one.grow(5), budget.freed(), budget.freed()), (Ok(()), 15, 0));
        drop(one);
        assert_eq!(budget.freed(), 35);
    }

    #[test]
    fn reservation_is_resized_within_the_remaining_budget() {
        let budget = Budget::new(100);
        let mut one = budget.reserve();
        let mut other = budget.reserve();
        assert_eq!((one.resize(50), other.resize(36), other.resize(37)), (Ok(()), Ok(()), Err(Exhausted)));
        assert_eq!((one.resize(50), one.resize(10), other.resize(60)), (Ok(()), Ok(()), Ok(())));
    }

    #[test]
    fn small_body_fits_in_budget_beside_large_growing_ones() {
        let budget = Budget::new(256 << 20);
        let mut large: Vec<_> = (0..16).map(|_| budget.reserve()).collect();
        loop {
            let grown = large.iter_mut().filter_map(|body| body.grow(64 << 10).ok()).count();
            if grown == 0 {
                break;
            }
        }
        assert_eq!(budget.reserve().grow(1 << 20), Ok(()));
    }

    #[test]
    fn reservation_of_too_many_bytes_does_not_overflow() {
        let mut one = Budget::new(100).reserve();
        one.grow(1).unwrap();
        assert_eq!((one.grow(usize::MAX), one.fits(usize::MAX)), (Err(Exhausted), false));
    }
}
