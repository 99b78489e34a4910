//! Responses that are kept, so that a later request can refer to them and to their items.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::conversation::Entry;

/// Most bytes of kept responses that one request may refer to.
pub(crate) const MAX_REFERRED_BYTES: usize = 4 << 20;
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

/// Why what a request refers to is not given to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotGiven {
    NotKept,
    /// The request refers to more than [`MAX_REFERRED_BYTES`].
    TooLarge,
}

/// How much more one request may refer to, bytes.
#[derive(Debug)]
pub(crate) struct Room(usize);

impl Default for Room {
    fn default() -> Self {
        Self(MAX_REFERRED_BYTES)
    }
}

impl Room {
    /// Bytes that the request has referred to.
    pub(crate) fn used(&self) -> usize {
        MAX_REFERRED_BYTES - self.0
    }

    fn take(&mut self, bytes: usize) -> Result<(), NotGiven> {
        self.0 = self.0.checked_sub(bytes).ok_or(NotGiven::TooLarge)?;
        Ok(())
    }
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

    /// The item of an id: `msg_0f3a_1` is item 1 of response `0f3a`.
    pub(crate) fn item(&self, id: &str, now: u64, room: &mut Room) -> Result<Entry, NotGiven> {
        let (response, index) = response_and_index(id).ok_or(NotGiven::NotKept)?;
        let mut inner = self.inner();
        let stored = inner.used(response, now, self.max_age).ok_or(NotGiven::NotKept)?;
        let entry = stored.output.as_ref().and_then(|output| output.get(index)).ok_or(NotGiven::NotKept)?;
        room.take(entry.bytes())?;
        Ok(entry.clone())
    }

    /// Entries of all that was said up to a response and in it. A part that is kept no longer is an
    /// error.
    pub(crate) fn conversation(&self, id: &str, now: u64, room: &mut Room) -> Result<Vec<Entry>, NotGiven> {
        let mut inner = self.inner();
        let mut turns = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let id = id.strip_prefix("resp_").ok_or(NotGiven::NotKept)?;
            let stored = inner.used(id, now, self.max_age).ok_or(NotGiven::NotKept)?;
            let output = stored.output.as_ref().ok_or(NotGiven::NotKept)?;
            room.take(stored.bytes)?;
            turns.push(stored.input.iter().chain(output).cloned().collect::<Vec<_>>());
            next = stored.previous.clone();
        }
        Ok(turns.into_iter().rev().flatten().collect())
    }
}

fn response_and_index(item: &str) -> Option<(&str, usize)> {
    let (kind_and_response, index) = item.rsplit_once('_')?;
    let (_, response) = kind_and_response.split_once('_')?;
    Some((response, index.parse().ok()?))
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

    fn item(store: &ResponseStore, id: &str, now: u64) -> Option<Entry> {
        store.item(id, now, &mut Room::default()).ok()
    }

    fn conversation(store: &ResponseStore, id: &str, now: u64) -> Option<usize> {
        store.conversation(id, now, &mut Room::default()).ok().map(|entries| entries.len())
    }

    fn keep(store: &ResponseStore, id: &str, now: u64, previous: Option<&str>, text: &str) {
        let input = vec![Entry::Said { role: "user".into(), content: text.into() }];
        store.begin(id, now, previous.map(str::to_owned), input);
        assert_eq!(item(store, &format!("msg_{id}_1"), now), None, "it has not ended");
        store.finish(id, vec![Entry::Thought(String::new()), Entry::Answered(text.into())]);
    }

    #[test]
    fn items_and_conversations_are_found_by_id() {
        let store = ResponseStore::new(1 << 20, 60);
        keep(&store, "aa", 0, None, "x");
        keep(&store, "bb", 1, Some("resp_aa"), "y");
        assert_eq!(item(&store, "msg_bb_1", 2), Some(Entry::Answered("y".into())));
        for unknown in ["msg_bb_2", "msg_cc_1", "msg_bb", "msg", "", "msg_bb_x"] {
            assert_eq!(item(&store, unknown, 2), None, "{unknown}");
        }
        assert_eq!(conversation(&store, "resp_bb", 2), Some(6));
        assert_eq!(conversation(&store, "bb", 2), None);
    }

    #[test]
    fn request_refers_to_so_much_and_no_more() {
        let store = ResponseStore::new(64 << 20, 60);
        keep(&store, "aa", 0, None, &"x".repeat(MAX_REFERRED_BYTES / 4));
        keep(&store, "bb", 0, Some("resp_aa"), "y");
        keep(&store, "cc", 0, Some("resp_bb"), &"x".repeat(MAX_REFERRED_BYTES / 4));
        assert_eq!((conversation(&store, "resp_bb", 0), conversation(&store, "resp_cc", 0)), (Some(6), None));
        let mut room = Room::default();
        assert!((0..3).all(|_| store.item("msg_aa_1", 0, &mut room).is_ok()));
        assert_eq!(store.item("msg_aa_1", 0, &mut room), Err(NotGiven::TooLarge));
        assert!(room.used() > MAX_REFERRED_BYTES / 4 * 3);
    }

    #[test]
    fn response_is_kept_within_bytes_and_time() {
        let store = ResponseStore::new(9000, 60);
        (0..5).for_each(|id| keep(&store, &id.to_string(), 0, None, &"x".repeat(200)));
        assert!(item(&store, "msg_0_1", 0).is_some(), "it is used");
        keep(&store, "5", 1, None, &"x".repeat(200));
        assert!(item(&store, "msg_0_1", 0).is_some() && item(&store, "msg_1_1", 0).is_none());
        keep(&store, "6", 1, None, &"x".repeat(9000));
        assert!(item(&store, "msg_6_1", 1).is_none() && item(&store, "msg_5_1", 1).is_some(), "it alone is too large");
        assert!(item(&store, "msg_5_1", 61).is_some() && item(&store, "msg_5_1", 62).is_none());
        keep(&store, "7", 99, Some("resp_0"), "x");
        let inner = store.inner();
        assert!(inner.responses.len() == 1 && inner.by_use.len() == 1 && inner.bytes < 2000, "{inner:?}");
        drop(inner);
        assert_eq!(conversation(&store, "resp_7", 99), None, "its beginning is kept no longer");
    }
}
