//! How fast a port is read.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// All of a port's connections together, bytes per second. A core copies ten times as many from the
/// system: it is taken up by a tenth, however much is sent.
const RATE: f64 = (256 << 20) as f64;
/// How far ahead of the rate a port may be. Shorter waits cost more than they save.
const AHEAD: Duration = Duration::from_millis(2);

/// The read_rate of a port's connections: those that send a lot wait for each other, and leave the
/// machine's cores to the rest.
#[derive(Debug)]
pub(super) struct ReadRate(Mutex<Instant>);

impl ReadRate {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(now))
    }

    /// A connection has read so many bytes. Until when it waits before it reads on.
    pub(super) fn read(&self, bytes: usize, now: Instant) -> Option<Instant> {
        // An instant is whole.
        let mut even_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // What was overslept is made up for, and no more.
        let since = now.checked_sub(AHEAD).map_or(now, |since| since.max(*even_at));
        *even_at = since + Duration::from_secs_f64(bytes as f64 / RATE);
        (*even_at > now + AHEAD).then_some(*even_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_reads_above_its_rate_wait_after_a_small_burst() {
        let start = crate::now() + Duration::from_secs(9);
        let read_rate = ReadRate::new(start);
        assert_eq!(read_rate.read(256 << 10, start), None, "1 ms");
        let waits = read_rate.read(512 << 10, start).unwrap();
        assert_eq!((waits - start).as_micros(), 2929);
        assert_eq!(read_rate.read(1 << 10, waits), None, "what was read is made up for");
        let later = waits + Duration::from_secs(9);
        assert_eq!(read_rate.read(1 << 20, later), None, "2 ms of the time without bytes, and 2 ms ahead");
        assert!(read_rate.read(256 << 10, later).is_some());
    }
}
