//! What placed requests were charged, and which wait to be placed again.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use baton_types::{ConductorId, NodeId, RequestKey};

use super::table::NodeTable;
use crate::ledger::{Charge, DecodeCharge, NodeStart, Placed};
use crate::placement::Refusal;

/// The ledger of placed requests. A node carries the sum of what it was charged, and only these
/// methods change it for a request.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    charges: BTreeMap<RequestKey, Charge>,
    /// Requests that wait in the admission queue, to be placed.
    retryable: BTreeMap<RequestKey, Retryable>,
    in_flight: BytesInFlight,
}

/// A request that waits in the admission queue.
#[derive(Debug)]
struct Retryable {
    /// The conductor that has it; `None`: this one.
    owner: Option<ConductorId>,
    /// One that has not asked again by then does not wait any more.
    asks_by: Instant,
}

/// How late a request that waits may ask again.
const ASKS_LATE: Duration = Duration::from_secs(10);

/// Time to the first token of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ttfts {
    pub predicted: Duration,
    pub measured: Duration,
}

impl Ledger {
    /// Requests that are charged, or wait.
    pub(super) fn keys(&self) -> impl Iterator<Item = RequestKey> + '_ {
        self.charges.keys().chain(self.retryable.keys()).copied()
    }

    /// Requests that are charged.
    pub(super) fn placed(&self) -> usize {
        self.charges.len()
    }

    /// Requests that wait in the admission queue.
    pub(super) fn queued(&self) -> usize {
        self.retryable.len()
    }

    /// Bytes charged to a sender.
    pub(super) fn sending(&self, from: &NodeId) -> u64 {
        self.in_flight.of(from)
    }

    /// Where a request decodes, and what it was charged there when it was placed.
    pub(super) fn decoding(&self, key: RequestKey) -> Option<&Placed> {
        self.charges.get(&key)?.decode.as_ref()
    }

    /// A refused request that may wait does so in the admission queue, if there are fewer than
    /// `most`. Beyond that, requests are refused at once.
    pub(super) fn keep_retryable(
        &mut self,
        now: Instant,
        key: RequestKey,
        mut refusal: Refusal,
        most: usize,
    ) -> Refusal {
        if let Some(hold) = refusal.hold {
            if self.retryable.len() < most || self.retryable.contains_key(&key) {
                let asks_by = now.checked_add(hold + ASKS_LATE).unwrap_or(now);
                self.retryable.insert(key, Retryable { owner: None, asks_by });
            } else {
                refusal.hold = None;
            }
        }
        refusal
    }

    /// Time has passed: what does not ask again makes room for others.
    pub(super) fn forget_late(&mut self, now: Instant) {
        self.retryable.retain(|_, retryable| now < retryable.asks_by);
    }

    /// What is charged.
    pub(super) fn charges(&self) -> impl Iterator<Item = (RequestKey, &Charge)> {
        self.charges.iter().map(|(key, charge)| (*key, charge))
    }

    /// Who has an attempt that is charged or waits; `Some(None)`: this conductor.
    pub(super) fn owner(&self, key: RequestKey) -> Option<Option<ConductorId>> {
        let charged = self.charges.get(&key).map(|charge| charge.owner);
        charged.or_else(|| self.retryable.get(&key).map(|retryable| retryable.owner))
    }

    /// An attempt that is charged, or waits, is another conductor's.
    pub(super) fn set_owner(&mut self, key: RequestKey, owner: ConductorId) {
        if let Some(charge) = self.charges.get_mut(&key) {
            charge.owner = Some(owner);
        }
        if let Some(retryable) = self.retryable.get_mut(&key) {
            retryable.owner = Some(owner);
        }
    }

    /// What another conductor has.
    pub(super) fn keys_of(&self, owner: ConductorId) -> Vec<RequestKey> {
        self.keys().filter(|key| self.owner(*key) == Some(Some(owner))).collect()
    }

    /// Takes a charge in: what it says of a decode node and of a sender is charged to them. Its
    /// prompts are charged already.
    pub(super) fn insert(&mut self, key: RequestKey, charge: Charge, nodes: &mut NodeTable) {
        if let Some(Placed { at, charge }) = &charge.decode
            && let Some(node) = nodes.start_mut(at)
        {
            node.charges.add_decode(key, *charge);
            node.trust.on_placed(charge.charged);
        }
        if let Some(fetch) = &charge.fetch {
            self.in_flight.begin(&fetch.from.node, fetch.bytes);
        }
        self.charges.insert(key, charge);
    }

    /// A request decodes at another node from now on, or will.
    pub(super) fn change_decode_node(&mut self, now: Instant, key: RequestKey, to: &NodeId, nodes: &mut NodeTable) {
        let Some(charge) = self.charges.get_mut(&key) else { return };
        let Some(Placed { at: from, charge: decode }) = charge.decode.take() else { return };
        // The node's knows whether the first token is out.
        let decode = nodes.get_mut(&from.node).and_then(|node| node.charges.end_decode(key)).unwrap_or(decode);
        // The partial prefill, if there is one, is not computed there any more, nor at the other
        // node.
        if charge.tail.take_if(|tail| *tail == from).is_some()
            && let Some(node) = nodes.start_mut(&from)
        {
            node.charges.backlog.remove(now, key);
            node.charges.requests -= 1;
        }
        if let Some(node) = nodes.get_mut(to) {
            let begins = if decode.begun { decode.begins } else { decode.begins.max(now) };
            let decode = DecodeCharge { begins, charged: now, ..decode };
            node.charges.add_decode(key, decode);
            charge.decode = Some(Placed { at: node.info().start(), charge: decode });
            charge.since = now;
        }
    }

    /// The request's prefix was fetched by its prefill node, or will not be.
    pub(super) fn on_fetch_done(&mut self, key: RequestKey) {
        if let Some(fetch) = self.charges.get_mut(&key).and_then(|charge| charge.fetch.take()) {
            self.in_flight.end(&fetch.from.node, fetch.bytes);
        }
    }

    /// The request's prompt is computed. What was predicted of it, and what came, if that is told
    /// for the first time.
    pub(super) fn on_prefilled(&mut self, now: Instant, key: RequestKey, nodes: &mut NodeTable) -> Option<Ttfts> {
        self.on_fetch_done(key);
        let charge = self.charges.get_mut(&key).filter(|charge| !charge.prefilled)?;
        charge.prefilled = true;
        charge.since = now;
        for start in charge.prefill.iter().chain(&charge.tail) {
            if let Some(node) = nodes.start_mut(start) {
                node.charges.backlog.remove(now, key);
                node.trust.on_answer(now);
            }
        }
        Some(Ttfts { predicted: charge.ttft?, measured: now.saturating_duration_since(charge.placed) })
    }

    /// The request's first token goes out.
    pub(super) fn on_first_token(&self, now: Instant, key: RequestKey, nodes: &mut NodeTable) {
        if let Some(Placed { at, .. }) = self.decoding(key)
            && let Some(node) = nodes.start_mut(at)
        {
            node.charges.begin_decode(now, key);
        }
    }

    /// The request's decode node has given a token.
    pub(super) fn on_decodes(&self, now: Instant, key: RequestKey, nodes: &mut NodeTable) {
        if let Some(Placed { at, .. }) = self.decoding(key)
            && let Some(node) = nodes.start_mut(at)
        {
            node.trust.on_answer(now);
        }
    }

    /// The attempt is over: everything that it was charged is given back. Unknown ones are ignored.
    pub(super) fn on_ended(&mut self, now: Instant, key: RequestKey, nodes: &mut NodeTable) {
        self.retryable.remove(&key);
        self.on_fetch_done(key);
        let Some(charge) = self.charges.remove(&key) else { return };
        for start in charge.prefill.iter().chain(&charge.tail) {
            if let Some(node) = nodes.start_mut(start) {
                node.charges.backlog.remove(now, key);
                node.charges.requests -= 1;
            }
        }
        if let Some(Placed { at, .. }) = &charge.decode
            && let Some(node) = nodes.start_mut(at)
        {
            node.charges.end_decode(key);
        }
    }

    /// A start of a node is gone. It may come back as the same start, if its session broke and not
    /// the process: what was forgotten must not be given back to it then.
    pub(super) fn forget_start(&mut self, gone: &NodeStart) {
        self.in_flight.forget(&gone.node);
        for charge in self.charges.values_mut() {
            charge.prefill.take_if(|prefill| prefill == gone);
            charge.tail.take_if(|tail| tail == gone);
            charge.fetch.take_if(|fetch| fetch.from == *gone);
            charge.decode.take_if(|decode| decode.at == *gone);
        }
    }

    /// What a request was charged.
    pub(super) fn charge(&self, key: RequestKey) -> Option<&Charge> {
        self.charges.get(&key)
    }

    /// Bytes charged to all senders.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.0.values().sum()
    }
}

/// Bytes that were charged to their senders.
#[derive(Debug, Default)]
struct BytesInFlight(HashMap<NodeId, u64>);

impl BytesInFlight {
    fn of(&self, from: &NodeId) -> u64 {
        self.0.get(from).copied().unwrap_or(0)
    }

    fn begin(&mut self, from: &NodeId, bytes: u64) {
        *self.0.entry(from.clone()).or_default() += bytes;
    }

    /// They have arrived, or will not.
    fn end(&mut self, from: &NodeId, bytes: u64) {
        if let Some(waiting) = self.0.get_mut(from) {
            *waiting = waiting.saturating_sub(bytes);
            if *waiting == 0 {
                self.0.remove(from);
            }
        }
    }

    fn forget(&mut self, node: &NodeId) {
        self.0.remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_flight_are_counted_by_sender_and_never_below_zero() {
        let a = NodeId::new("a").unwrap();
        let b = NodeId::new("b").unwrap();
        let mut in_flight = BytesInFlight::default();
        in_flight.begin(&a, 3_000_000_000);
        assert_eq!((in_flight.of(&a), in_flight.of(&b)), (3_000_000_000, 0));
        in_flight.end(&a, 1_000_000_000);
        assert_eq!(in_flight.of(&a), 2_000_000_000);
        in_flight.end(&a, u64::MAX);
        assert!(in_flight.0.is_empty());
    }
}
