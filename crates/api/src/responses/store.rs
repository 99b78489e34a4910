//! Responses that are kept, so that a later request can refer to them and to their items.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::conversation::Entry;

/// Memory that one response takes beside its entries, bytes, at most.
const RESPONSE_BYTES: usize = 512;

/// Responses of this conductor, within a bound of bytes and one of time. The one that was not used
/// for longest goes first.
#[derive(Debug)]
pub struct ResponseStore {
    max_bytes: usize,
    /// How long one is kept, seconds.
    max_age: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Responses by their ids, without what those begin with.
    responses: HashMap<String, Stored>,
    /// Ids, the one that was not used for longest first.
    by_use: BTreeMap<u64, String>,
    uses: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Stored {
    created: u64,
    last_use: u64,
    bytes: usize,
    /// The response that it goes on from.
    previous: Option<String>,
    /// Entries of the request, without the instructions.
    input: Vec<Entry>,
    /// Entries of the answer; `None` until it has ended.
    output: Option<Vec<Entry>>,
}

fn bytes_of(entries: &[Entry]) -> usize {
    entries.iter().map(Entry::bytes).sum()
}

impl ResponseStore {
    /// An empty one. A response is kept for `max_age` seconds.
    pub fn new(max_bytes: usize, max_age: u64) -> Self {
        Self { max_bytes, max_age, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // What a panic left behind is a wrong count at worst.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response that has begun, unless it alone is over the bound.
    pub(crate) fn begin(&self, id: &str, now: u64, previous: Option<String>, input: Vec<Entry>) {
        let bytes = bytes_of(&input) + id.len() * 2 + previous.as_ref().map_or(0, String::len) + RESPONSE_BYTES;
        let mut inner = self.inner();
        inner.remove(id);
        inner.evict_old(now, self.max_age);
        inner.put(id, self.max_bytes, Stored { created: now, last_use: 0, bytes, previous, input, output: None });
    }

    /// Keeps the output of one that has ended, unless it had to go, or goes for it.
    pub(crate) fn finish(&self, id: &str, output: Vec<Entry>) {
        let mut inner = self.inner();
        let Some(stored) = inner.remove(id) else { return };
        let bytes = stored.bytes + bytes_of(&output);
        inner.put(id, self.max_bytes, Stored { bytes, output: Some(output), ..stored });
    }

    /// An item, by its id: `msg_0f3a_1` is item 1 of response `0f3a`.
    pub(crate) fn item(&self, id: &str, now: u64) -> Option<Entry> {
        let (id, index) = id.rsplit_once('_')?;
        let (_, response) = id.split_once('_')?;
        let index: usize = index.parse().ok()?;
        self.inner().used(response, now, self.max_age)?.output.as_ref()?.get(index).cloned()
    }

    /// All that was said up to a response and in it; `None` if any of it is kept no longer.
    pub(crate) fn conversation(&self, id: &str, now: u64) -> Option<Vec<Entry>> {
        let mut inner = self.inner();
        let mut turns = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let stored = inner.used(id.strip_prefix("resp_")?, now, self.max_age)?;
            turns.push(stored.input.iter().chain(stored.output.as_ref()?).cloned().collect::<Vec<_>>());
            next = stored.previous.clone();
        }
        Some(turns.into_iter().rev().flatten().collect())
    }
}

impl Inner {
    /// A response, which is used now.
    fn used(&mut self, id: &str, now: u64, max_age: u64) -> Option<&Stored> {
        let stored = self.responses.get_mut(id)?;
        if stored.created + max_age < now {
            self.remove(id);
            return None;
        }
        self.uses += 1;
        self.by_use.remove(&stored.last_use);
        stored.last_use = self.uses;
        self.by_use.insert(self.uses, id.to_owned());
        self.responses.get(id)
    }

    /// Puts one in that is used now; those that were not used for longest go for it.
    fn put(&mut self, id: &str, max_bytes: usize, stored: Stored) {
        if stored.bytes > max_bytes {
            return;
        }
        while self.bytes + stored.bytes > max_bytes {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            self.remove(&oldest);
        }
        self.uses += 1;
        self.bytes += stored.bytes;
        self.by_use.insert(self.uses, id.to_owned());
        self.responses.insert(id.to_owned(), Stored { last_use: self.uses, ..stored });
    }

    /// Forgets those that are too old, up to one that is not.
    fn evict_old(&mut self, now: u64, max_age: u64) {
        while let Some((_, id)) = self.by_use.first_key_value() {
            let id = id.clone();
            if self.responses.get(&id).is_some_and(|stored| stored.created + max_age >= now) {
                return;
            }
            self.by_use.pop_first();
            self.remove(&id);
        }
    }

    fn remove(&mut self, id: &str) -> Option<Stored> {
        let stored = self.responses.remove(id)?;
        self.by_use.remove(&stored.last_use);
        self.bytes -= stored.bytes;
        Some(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(store: &ResponseStore, id: &str, now: u64, previous: Option<&str>, text: &str) {
        let input = vec![Entry::Said { role: "user".into(), content: text.into() }];
        store.begin(id, now, previous.map(str::to_owned), input);
        assert_eq!(store.item(&format!("msg_{id}_1"), now), None, "it has not ended");
        store.finish(id, vec![Entry::Thought(String::new()), Entry::Answered(text.into())]);
    }

    #[test]
    fn items_and_conversations_are_found_by_id() {
        let store = ResponseStore::new(1 << 20, 60);
        keep(&store, "aa", 0, None, "x");
        keep(&store, "bb", 1, Some("resp_aa"), "y");
        assert_eq!(store.item("msg_bb_1", 2), Some(Entry::Answered("y".into())));
        for unknown in ["msg_bb_2", "msg_cc_1", "msg_bb", "msg", "", "msg_bb_x"] {
            assert_eq!(store.item(unknown, 2), None, "{unknown}");
        }
        assert_eq!(store.conversation("resp_bb", 2).map(|entries| entries.len()), Some(6));
        assert_eq!(store.conversation("bb", 2), None);
    }

    #[test]
    fn response_is_kept_within_bytes_and_time() {
        let store = ResponseStore::new(9000, 60);
        (0..5).for_each(|id| keep(&store, &id.to_string(), 0, None, &"x".repeat(200)));
        assert!(store.item("msg_0_1", 0).is_some(), "it is used");
        keep(&store, "5", 1, None, &"x".repeat(200));
        assert!(store.item("msg_0_1", 0).is_some() && store.item("msg_1_1", 0).is_none());
        keep(&store, "6", 1, None, &"x".repeat(9000));
        assert!(store.item("msg_6_1", 1).is_none() && store.item("msg_5_1", 1).is_some(), "it alone is too large");
        assert!(store.item("msg_5_1", 61).is_some() && store.item("msg_5_1", 62).is_none());
        keep(&store, "7", 99, Some("resp_0"), "x");
        let inner = store.inner();
        assert!(inner.responses.len() == 1 && inner.by_use.len() == 1 && inner.bytes < 2000, "{inner:?}");
        drop(inner);
        assert_eq!(store.conversation("resp_7", 99), None, "its beginning is kept no longer");
    }
}
