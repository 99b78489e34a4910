//! A circuit breaker: failures trip it, and it lets one of many through to try again.

/// Of those that a tripped breaker turns away, one in so many is let through.
pub(crate) const PROBE_EVERY: u32 = 256;

/// Open, or shut (tripped) with a count of those turned away since.
#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker {
    turned_away: Option<u32>,
}

impl CircuitBreaker {
    pub(crate) fn is_shut(&self) -> bool {
        self.turned_away.is_some()
    }

    /// Also after a failed probe: the count starts anew.
    pub(crate) fn shut(&mut self) {
        self.turned_away = Some(0);
    }

    pub(crate) fn open(&mut self) {
        self.turned_away = None;
    }

    /// Whether the next one may go through.
    pub(crate) fn admits(&mut self) -> bool {
        let Some(turned_away) = &mut self.turned_away else { return true };
        *turned_away = (*turned_away + 1) % PROBE_EVERY;
        *turned_away == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tripped_circuit_breaker_admits_one_call_in_many() {
        let mut breaker = CircuitBreaker::default();
        assert!(breaker.admits() && !breaker.is_shut());
        breaker.shut();
        let let_through: Vec<_> = (1..=2 * PROBE_EVERY).filter(|_| breaker.admits()).collect();
        assert_eq!(let_through, [PROBE_EVERY, 2 * PROBE_EVERY]);
        breaker.open();
        assert!(breaker.admits());
    }
}
