//! The only place that reads the clock of the machine or its randomness, or waits for time to pass.

// This is the one place.
#![allow(clippy::disallowed_methods)]

use std::fmt::Debug;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_types::Generation;
use tokio::sync::watch;

/// Ends when a time has come.
pub type Waited = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where time comes from.
pub trait Clock: Debug + Send + Sync {
    /// Monotonic time.
    fn now(&self) -> Instant;
    /// Milliseconds since 1970, for what people read.
    fn unix_ms(&self) -> u64;
    /// Waits until then; not at all if that has passed.
    fn sleep_until(&self, at: Instant) -> Waited;
    /// Waits so long from now on.
    fn sleep(&self, duration: Duration) -> Waited {
        self.sleep_until(self.now() + duration)
    }
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn unix_ms(&self) -> u64 {
        since_epoch().as_millis() as u64
    }

    fn sleep_until(&self, at: Instant) -> Waited {
        Box::pin(sleep_until(at))
    }
}

/// A clock that tests move.
#[derive(Debug, Clone)]
pub struct ManualClock(Arc<watch::Sender<(Instant, u64)>>);

impl Default for ManualClock {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new((Instant::now(), 0))))
    }
}

impl ManualClock {
    /// Moves the clock on, and wakes the tasks that waited for a time that has come.
    pub fn advance(&self, by: Duration) {
        self.0.send_modify(|(now, unix_ms)| {
            *now += by;
            *unix_ms += by.as_millis() as u64;
        });
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.0.borrow().0
    }

    fn unix_ms(&self) -> u64 {
        self.0.borrow().1
    }

    fn sleep_until(&self, at: Instant) -> Waited {
        let mut time = self.0.subscribe();
        let clock = self.clone();
        Box::pin(async move {
            // An error would say that the clock is gone, and it is kept here.
            let _ = time.wait_for(|(now, _)| *now >= at).await;
            drop(clock);
        })
    }
}

/// What a future says if it is over within `limit`; `None` if it is not, and it is dropped.
pub async fn within<T>(clock: &dyn Clock, limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    // Many need not wait, and a timer costs more than they do.
    if let Poll::Ready(done) = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        return Some(done);
    }
    tokio::select! {
        biased;
        done = future => Some(done),
        () = clock.sleep(limit) => None,
    }
}

/// Monotonic time, for the shells; cores are given theirs.
pub fn now() -> Instant {
    Instant::now()
}

/// Waits.
pub fn sleep(duration: Duration) -> tokio::time::Sleep {
    tokio::time::sleep(duration)
}

/// Waits until then; not at all if that has passed.
pub fn sleep_until(at: Instant) -> tokio::time::Sleep {
    tokio::time::sleep_until(at.into())
}

/// Ticks, the first at once.
pub fn interval(period: Duration) -> tokio::time::Interval {
    tokio::time::interval(period)
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A number from the operating system's entropy: for ids and seeds, not for keys.
pub fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Every `RandomState` has fresh keys, seeded by the operating system; the standard library
    // offers no plainer way to them.
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u64(since_epoch().as_nanos() as u64);
    hasher.finish()
}

/// The generation of a process that starts now: microseconds since 1970, so that a later start is
/// larger.
pub fn new_generation() -> Generation {
    Generation(since_epoch().as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_generations_increase_and_random_numbers_differ() {
        let first = new_generation();
        std::thread::sleep(Duration::from_millis(1));
        assert!(new_generation() > first);
        assert_ne!(random_u64(), random_u64());
    }

    #[test]
    fn manual_clock_moves_only_when_advanced() {
        let clock = ManualClock::default();
        let before = clock.now();
        clock.advance(Duration::from_secs(2));
        assert_eq!((clock.now() - before, clock.unix_ms()), (Duration::from_secs(2), 2000));
    }

    #[tokio::test]
    async fn manual_clock_advance_wakes_a_sleeping_task() {
        let clock = ManualClock::default();
        let waited = tokio::spawn(clock.sleep(Duration::from_secs(60)));
        tokio::task::yield_now().await;
        clock.advance(Duration::from_secs(59));
        tokio::task::yield_now().await;
        assert!(!waited.is_finished(), "a second is left");
        clock.advance(Duration::from_secs(1));
        waited.await.unwrap();
        clock.sleep_until(clock.now() - Duration::from_secs(1)).await;
    }

    #[tokio::test]
    async fn future_past_its_time_limit_gives_none() {
        let clock = ManualClock::default();
        let second = Duration::from_secs(1);
        assert_eq!(within(&clock, Duration::ZERO, async { 1 }).await, Some(1), "it did not wait");
        let late = clock.clone();
        let waited = tokio::spawn(async move { within(&late, second, std::future::pending::<()>()).await });
        tokio::task::yield_now().await;
        clock.advance(second);
        assert_eq!(waited.await.unwrap(), None);
        let soon = clock.clone();
        let woken = clock.sleep(second);
        let waited = tokio::spawn(async move { within(&soon, 2 * second, woken).await });
        tokio::task::yield_now().await;
        clock.advance(second);
        assert_eq!(waited.await.unwrap(), Some(()));
    }
}
