//! A queue whose clients take turns: one that asks for much waits behind itself.

use std::collections::{BTreeMap, VecDeque};

/// What waits, by client. Clients take turns, and what one of them asks for is first come, first
/// served.
#[derive(Debug)]
pub struct Turns<C, T> {
    /// Clients with something that waits, the next one first.
    order: VecDeque<C>,
    waiting: BTreeMap<C, VecDeque<T>>,
}

impl<C, T> Default for Turns<C, T> {
    fn default() -> Self {
        Self { order: VecDeque::new(), waiting: BTreeMap::new() }
    }
}

impl<C: Copy + Ord, T> Turns<C, T> {
    /// How many items of a client wait.
    pub fn len_of(&self, client: C) -> usize {
        self.waiting.get(&client).map_or(0, VecDeque::len)
    }

    /// Puts an item behind what its client has waiting.
    pub fn push(&mut self, client: C, item: T) {
        let items = self.waiting.entry(client).or_default();
        if items.is_empty() {
            self.order.push_back(client);
        }
        items.push_back(item);
    }

    /// The first item of the client whose turn it is.
    pub fn pop(&mut self) -> Option<T> {
        let client = self.order.pop_front()?;
        let items = self.waiting.get_mut(&client)?;
        let item = items.pop_front();
        if items.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.order.push_back(client);
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_take_turns_whatever_each_asks_for() {
        let mut turns = Turns::default();
        for item in ["a1", "a2", "a3", "a4"] {
            turns.push('a', item);
        }
        assert_eq!(turns.pop(), Some("a1"));
        turns.push('b', "b1");
        turns.push('b', "b2");
        turns.push('c', "c1");
        assert_eq!(['a', 'b', 'c', 'd'].map(|client| turns.len_of(client)), [3, 2, 1, 0]);
        let rest: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(rest, ["a2", "b1", "c1", "a3", "b2", "a4"]);
        assert!(turns.order.is_empty() && turns.waiting.is_empty(), "a client that has nothing is forgotten");
        turns.push('a', "again");
        assert_eq!(turns.pop(), Some("again"));
    }
}
