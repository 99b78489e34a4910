//! What a client has not read of its answer. It is kept here, within bounds, and the request goes
//! on beside it: nothing that others share waits for a client.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_intake::{Budget, Reservation};
use baton_runtime::{Clock, within};
use prost::Message;
use tokio::sync::mpsc;

use crate::frontend::Outgoing;

/// Most bytes of one answer: a context full of tokens with their texts.
pub(crate) const MAX_BYTES: usize = 8 << 20;
/// So many bytes of one answer do not count: they are a moment's, of a client that reads.
const ALLOWED: usize = 64 << 10;
/// What a message takes beside its own bytes.
const OVERHEAD: usize = 256;

/// What a message takes.
pub(crate) fn size(outgoing: &Outgoing) -> usize {
    OVERHEAD + outgoing.response.as_ref().map_or(0, Message::encoded_len)
}

/// Why a client is told nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// It left.
    Gone,
    /// It left so many bytes unread.
    TooMuch(usize),
}

/// The way to one client.
pub struct Unread {
    out: mpsc::Sender<Outgoing>,
    /// What the channel had no room for, with its size.
    queue: VecDeque<(usize, Outgoing)>,
    reserved: Reservation,
    bytes: usize,
    /// Since when the client has taken nothing; `None` if it has everything.
    since: Option<Instant>,
}

impl Unread {
    /// A client that reads from the other end of `out`. What it does not read comes from `budget`.
    pub fn new(out: mpsc::Sender<Outgoing>, budget: &Budget) -> Self {
        Self { out, queue: VecDeque::new(), reserved: budget.reserve(), bytes: 0, since: None }
    }

    /// Resolves when the client has left.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        let out = self.out.clone();
        async move { out.closed().await }
    }

    /// Sends a message, or keeps it until there is room.
    pub fn send(&mut self, now: Instant, outgoing: Outgoing) -> Result<(), Lost> {
        self.flush(now)?;
        if self.queue.is_empty() {
            match self.out.try_send(outgoing) {
                Ok(()) => return Ok(()),
                Err(mpsc::error::TrySendError::Closed(_)) => return Err(Lost::Gone),
                Err(mpsc::error::TrySendError::Full(outgoing)) => return self.keep(now, outgoing),
            }
        }
        self.keep(now, outgoing)
    }

    /// The same of the last message, for which there is always room.
    pub fn send_last(&mut self, now: Instant, outgoing: Outgoing) {
        self.since.get_or_insert(now);
        self.queue.push_back((0, outgoing));
        // The client may be gone: then it is as good as told.
        let _ = self.flush(now);
    }

    fn keep(&mut self, now: Instant, outgoing: Outgoing) -> Result<(), Lost> {
        let bytes = size(&outgoing);
        let too_much = Lost::TooMuch(self.bytes);
        if self.bytes + bytes > MAX_BYTES {
            return Err(too_much);
        }
        // However much others have left unread, a moment's is kept.
        let more = (self.bytes + bytes).saturating_sub(ALLOWED.max(self.bytes));
        self.reserved.grow(more).map_err(|_| too_much)?;
        self.bytes += bytes;
        self.since.get_or_insert(now);
        self.queue.push_back((bytes, outgoing));
        Ok(())
    }

    /// Sends what the client has room for.
    pub fn flush(&mut self, now: Instant) -> Result<(), Lost> {
        while let Some((bytes, outgoing)) = self.queue.pop_front() {
            match self.out.try_send(outgoing) {
                Ok(()) => self.took(now, bytes),
                Err(mpsc::error::TrySendError::Closed(_)) => {
                    self.clear();
                    return Err(Lost::Gone);
                }
                Err(mpsc::error::TrySendError::Full(outgoing)) => {
                    self.queue.push_front((bytes, outgoing));
                    return Ok(());
                }
            }
        }
        self.since = None;
        Ok(())
    }

    /// Forgets what the client has not taken.
    pub fn clear(&mut self) {
        self.queue.clear();
        self.reserved.shrink(std::mem::take(&mut self.bytes).saturating_sub(ALLOWED));
        self.since = None;
    }

    /// Whether the client has, or will have without waiting, all that was sent.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// When a client that goes on taking nothing has taken nothing for so long.
    pub fn stalls_at(&self, stall: Duration) -> Option<Instant> {
        self.since.map(|since| since + stall)
    }

    /// Waits until the client has room, and sends what it has room for. To be called while
    /// something is left. Dropped before its end, it has done nothing.
    ///
    /// # Errors
    /// The client has left.
    pub async fn room(&mut self, now: impl Fn() -> Instant) -> Result<(), Lost> {
        // The place is used at once. One that is given back would go to another waiting answer of
        // the same request, and so round for ever.
        let Ok(permit) = self.out.reserve().await else {
            self.clear();
            return Err(Lost::Gone);
        };
        match self.queue.pop_front() {
            Some((bytes, outgoing)) => {
                permit.send(outgoing);
                self.took(now(), bytes);
            }
            None => drop(permit),
        }
        self.flush(now())
    }

    /// The client took a message.
    fn took(&mut self, now: Instant, bytes: usize) {
        self.reserved.shrink(bytes.min(self.bytes.saturating_sub(ALLOWED)));
        self.bytes -= bytes;
        self.since = Some(now);
    }

    /// Waits until the client has read everything, has left, or has taken nothing for `stall`.
    pub async fn drain(&mut self, stall: Duration, clock: &dyn Clock) {
        while !self.queue.is_empty() {
            let room = within(clock, stall, self.room(|| clock.now())).await;
            if !matches!(room, Some(Ok(()))) {
                return;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use baton_proto::v1;
    use baton_runtime::ManualClock;

    use super::*;

    pub(crate) fn message(text_bytes: usize) -> Outgoing {
        let delta = v1::Delta { text: "x".repeat(text_bytes), ..v1::Delta::default() };
        let event = Some(v1::generate_response::Event::Delta(delta));
        Outgoing { response: Ok(v1::GenerateResponse { event, completion: 0 }), heard: None }
    }

    fn text_bytes(outgoing: &Outgoing) -> usize {
        match outgoing.response.as_ref().unwrap().event.as_ref().unwrap() {
            v1::generate_response::Event::Delta(delta) => delta.text.len(),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn unread_messages_are_queued_in_order_and_within_budget() {
        let clock = ManualClock::default();
        let second = Duration::from_secs(1);
        let now = clock.now();
        let budget = Budget::new(200 << 10);
        let (out, mut read) = mpsc::channel(2);
        let mut unread = Unread::new(out, &budget);
        for n in 1..=5 {
            unread.send(now, message(n)).unwrap();
        }
        assert_eq!((unread.queue.len(), unread.stalls_at(second)), (3, Some(now + second)));
        assert_eq!(text_bytes(&read.recv().await.unwrap()), 1);
        unread.room(|| now + second).await.unwrap();
        assert_eq!((unread.queue.len(), unread.stalls_at(second)), (2, Some(now + 2 * second)), "it reads");

        assert!(matches!(unread.send(now, message(300 << 10)), Err(Lost::TooMuch(bytes)) if bytes > 0), "others' room");
        unread.send_last(now, message(6));
        let reader = async {
            let mut sizes = Vec::new();
            while sizes.len() < 5 {
                sizes.push(text_bytes(&read.recv().await.unwrap()));
            }
            sizes
        };
        let ((), sizes) = tokio::join!(unread.drain(second, &clock), reader);
        assert_eq!((sizes, unread.is_empty(), unread.stalls_at(second)), (vec![2, 3, 4, 5, 6], true, None));
        assert_eq!(budget.reserve().grow(140 << 10), Ok(()), "all was given back");

        for n in 0..4 {
            unread.send(now, message(n)).unwrap();
        }
        let stall = async {
            tokio::task::yield_now().await;
            clock.advance(second);
        };
        tokio::join!(unread.drain(second, &clock), stall);
        assert!(!unread.is_empty(), "the client does not read");
        drop(read);
        assert_eq!(unread.flush(now), Err(Lost::Gone));
    }

    /// Answers of one request share a channel. Each that waits has its turn, and none takes a place
    /// only to give it back.
    #[tokio::test]
    async fn answers_sharing_one_channel_all_make_progress() {
        let clock = ManualClock::default();
        let now = clock.now();
        let budget = Budget::new(100 << 20);
        let (out, mut read) = mpsc::channel(2);
        let mut all: Vec<_> = (0..8).map(|_| Unread::new(out.clone(), &budget)).collect();
        drop(out);
        for n in 0..20 {
            all.iter_mut().for_each(|unread| unread.send(now, message(n)).unwrap());
        }
        let drains = all.iter_mut().map(|unread| unread.drain(Duration::from_secs(5), &clock));
        let reader = async {
            for _ in 0..160 {
                assert!(read.recv().await.is_some());
            }
        };
        let drained = futures::future::join(futures::future::join_all(drains), reader);
        tokio::time::timeout(Duration::from_secs(2), drained).await.unwrap();
        assert!(all.iter().all(Unread::is_empty) && budget.reserve().fits(70 << 20));
    }

    /// What others left unread ends no answer that is behind for a moment.
    #[test]
    fn small_unread_queue_needs_no_shared_budget() {
        let now = Instant::now();
        let budget = Budget::new(1 << 10);
        let (out, _read) = mpsc::channel(1);
        let mut unread = Unread::new(out, &budget);
        for n in 0..100 {
            unread.send(now, message(n)).unwrap();
        }
        unread.clear();
        assert_eq!(budget.reserve().grow(700), Ok(()));
    }
}
