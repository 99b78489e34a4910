//! Why requests failed, counted.

use std::collections::BTreeMap;

/// Reasons that are told apart; the rest is "others".
const MAX_REASONS: usize = 16;

/// Failures by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reasons(BTreeMap<String, usize>);

impl Reasons {
    /// One more. A reason that would be one too many counts as "others".
    pub fn add(&mut self, reason: &str) {
        let known = self.0.len() < MAX_REASONS || self.0.contains_key(reason);
        *self.0.entry(if known { reason.to_owned() } else { "others".to_owned() }).or_insert(0) += 1;
    }

    /// How many there were of each.
    pub fn into_map(self) -> BTreeMap<String, usize> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_reasons_are_bounded_and_all_failures_counted() {
        let mut reasons = Reasons::default();
        for index in 0..100 {
            reasons.add("same");
            reasons.add(&format!("kind {index}"));
        }
        let map = reasons.into_map();
        assert_eq!((map.len(), map["same"], map.values().sum::<usize>()), (MAX_REASONS + 1, 100, 200));
    }
}
