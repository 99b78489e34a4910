//! One node after the other.

use std::cell::Cell;

use super::{Choice, DecodeCandidate, PlacementPolicy, PlacementRequest, PrefillCandidate};

/// One node after the other.
#[derive(Debug, Clone, Default)]
pub struct RoundRobin {
    turn: Cell<usize>,
}

impl PlacementPolicy for RoundRobin {
    fn name(&self) -> &'static str {
        "round-robin"
    }

    fn choose(
        &self,
        _: &PlacementRequest<'_>,
        prefill: &[PrefillCandidate<'_>],
        decode: &[DecodeCandidate<'_>],
        _: &mut dyn FnMut() -> u64,
    ) -> Choice {
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        Choice { prefill: turn % prefill.len(), fetch: false, decode: turn.checked_rem(decode.len()) }
    }

    fn boxed_clone(&self) -> Box<dyn PlacementPolicy> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate::tests::{decode, prefill, request};
    use super::*;

    #[test]
    fn round_robin_placement_takes_nodes_in_turn() {
        let p = [prefill(3, 1, 0), prefill(1, 1, 0)];
        let d = [decode(1, 1, 4), decode(1, 1, 2), decode(1, 1, 9)];
        let policy = RoundRobin::default();
        let turns: Vec<_> =
            (0..4).map(|_| policy.choose(&request(), &p, &d, &mut || 0)).map(|c| (c.prefill, c.decode)).collect();
        assert_eq!(turns, [(0, Some(0)), (1, Some(1)), (0, Some(2)), (1, Some(0))]);
    }
}
