//! Requests with an idempotency key. What is answered is kept, so a client that asks again with the
//! same key gets the same answer, from its first token.

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_intake::{Budget, Reservation};
use baton_proto::v1;
use baton_runtime::{Clock, Phase, within};
use baton_scheduler::RequestError;
use baton_types::{ErrorKind, RequestId};
use prost::Message;
use tokio::sync::{mpsc, watch};

use crate::error::GenerateError;
use crate::frontend::{Frontend, Outgoing, QUEUED_RESPONSES, Responses};
use crate::prompt::timeout;
use crate::unread::{MAX_BYTES, size};

/// So long after its last reader has left, a request goes on, and its answer is kept.
const KEPT_FOR: Duration = Duration::from_secs(10);
/// Messages that a reader takes at a time.
const AT_ONCE: usize = 16;
/// Larger requests are compared on another thread.
const COMPARED_INLINE_BYTES: usize = 256 << 10;

/// The answers that are kept.
pub struct KeyedAnswers {
    by_key: Mutex<HashMap<String, KeyedAnswer>>,
    /// For all of them.
    budget: Budget,
    readers: Arc<AtomicUsize>,
}

struct KeyedAnswer {
    /// The one that is served.
    request: RequestId,
    asked: blake3::Hash,
    answer: Arc<watch::Sender<Answer>>,
}

/// A reader, counted while it is there.
struct Reading(Arc<AtomicUsize>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is answered, as far as it is known.
struct Answer {
    state: State,
    /// With their sizes.
    messages: VecDeque<(usize, Outgoing)>,
    /// Messages before those, for which there was no room.
    dropped: usize,
    /// Of the messages.
    bytes: usize,
    reserved: Reservation,
    /// Readers so far.
    readers: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It may be refused yet.
    Pending,
    Begun,
    Over,
}

/// Who is to answer.
enum Claim {
    /// This request.
    Mine(Key),
    /// Another one does: this one.
    Another(RequestId, watch::Receiver<Answer>),
}

/// A key in use. Given up when dropped.
struct Key {
    frontend: Arc<Frontend>,
    key: String,
    answer: Arc<watch::Sender<Answer>>,
}

/// The seed of a request that has a key and no seed of its own: whichever conductor serves it, the
/// tokens are the same.
pub fn seed(key: &str) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(key.as_bytes()).as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Of what is asked. What a client may do otherwise when it asks again does not count: its own id
/// of the request, and how long it waits.
fn digest(request: &mut v1::GenerateRequest) -> blake3::Hash {
    let id = std::mem::take(&mut request.client_request_id);
    let timeout = request.timeout_ms.take();
    let digest = blake3::hash(&request.encode_to_vec());
    request.client_request_id = id;
    request.timeout_ms = timeout;
    digest
}

async fn digested(mut request: v1::GenerateRequest) -> Result<(v1::GenerateRequest, blake3::Hash), GenerateError> {
    if request.encoded_len() <= COMPARED_INLINE_BYTES {
        let digest = digest(&mut request);
        return Ok((request, digest));
    }
    let compared = tokio::task::spawn_blocking(move || {
        let digest = digest(&mut request);
        (request, digest)
    });
    compared.await.map_err(|_| RequestError::Aborted.into())
}

impl Answer {
    fn new(budget: &Budget) -> Self {
        let messages = VecDeque::new();
        let reserved = budget.reserve();
        Self { state: State::Pending, messages, dropped: 0, bytes: 0, reserved, readers: 0 }
    }

    /// Adds a message. `false`: it is not kept as a whole any more.
    fn push(&mut self, outgoing: Outgoing) -> bool {
        let bytes = size(&outgoing);
        self.bytes += bytes;
        self.messages.push_back((bytes, outgoing));
        let mut fits = self.fits();
        // As many as a client without a key could be behind, however large: readers have to get
        // them.
        while !fits && self.messages.len() > QUEUED_RESPONSES {
            let Some((bytes, _)) = self.messages.pop_front() else { break };
            self.bytes -= bytes;
            self.dropped += 1;
            fits = self.fits();
        }
        fits && self.dropped == 0
    }

    /// Whether there is room for the messages.
    fn fits(&mut self) -> bool {
        self.bytes <= MAX_BYTES && self.reserved.resize(self.bytes).is_ok()
    }

    /// Some of what comes after `next` messages; `None` if it is not kept any more.
    fn after(&self, next: usize) -> Option<Vec<Outgoing>> {
        let skipped = next.checked_sub(self.dropped)?;
        Some(self.messages.iter().skip(skipped).take(AT_ONCE).map(|(_, outgoing)| outgoing.clone()).collect())
    }
}

impl KeyedAnswers {
    /// None yet, which may take so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self { by_key: Mutex::default(), budget: Budget::new(bytes), readers: Arc::default() }
    }

    /// Clients that read, or wait to.
    pub fn readers(&self) -> usize {
        self.readers.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KeyedAnswer>> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Frontend {
    /// Answers a request that has a key. If another one with the key is being answered, or was a
    /// moment ago, it gets the same answer.
    pub(crate) async fn generate_keyed(
        self: &Arc<Self>,
        id: RequestId,
        request: v1::GenerateRequest,
        taken_in: Option<Arc<Reservation>>,
    ) -> Result<Responses, GenerateError> {
        let limit = self.time(timeout(request.timeout_ms)?);
        let until = self.clock.now() + limit;
        self.model.check_size(&request)?;
        let (mut request, asked) = digested(request).await?;
        // How long its client waits is the reader's: another one may attach, and wait for longer.
        request.timeout_ms = None;
        let reading = self.reading()?;
        let timed_out = || RequestError::TimedOut(limit);
        loop {
            match self.claim(id, &request.idempotency_key, asked).inspect_err(|error| self.on_refused(id, error))? {
                Claim::Mine(key) => {
                    let time = until.saturating_duration_since(self.clock.now());
                    let begun = within(&*self.clock, time, self.begin(id, request, taken_in)).await;
                    let responses = begun.ok_or_else(timed_out)??;
                    let answer = attach(&key.answer);
                    key.answer.send_modify(|answer| answer.state = State::Begun);
                    self.tasks.spawn_request("keyed answer", key.keep(responses));
                    return Ok(self.read(answer, reading, true, until, limit));
                }
                Claim::Another(first, mut answer) => {
                    let time = until.saturating_duration_since(self.clock.now());
                    let begun =
                        within(&*self.clock, time, answer.wait_for(|answer| answer.state != State::Pending)).await;
                    // It ends without an answer if the other one is refused, or its client leaves
                    // before it was placed.
                    if begun.ok_or_else(timed_out)?.is_ok() {
                        tracing::info!(request = %id, answered_as = %first, "another request with its key is answered");
                        self.metrics.on_attached();
                        return Ok(self.read(answer, reading, false, until, limit));
                    }
                }
            }
        }
    }

    fn reading(&self) -> Result<Reading, GenerateError> {
        let reading = Reading(Arc::clone(&self.keyed.readers));
        if reading.0.fetch_add(1, Ordering::Relaxed) < self.limits().max_requests {
            Ok(reading)
        } else {
            Err(self.full())
        }
    }

    fn claim(self: &Arc<Self>, request: RequestId, key: &str, asked: blake3::Hash) -> Result<Claim, GenerateError> {
        let mut keyed = self.keyed.lock();
        if let Some(kept) = keyed.get(key) {
            if kept.asked == asked {
                return Ok(Claim::Another(kept.request, attach(&kept.answer)));
            }
            let message = "idempotency_key: another request has this key, and asks for something else".to_owned();
            return Err(GenerateError::Frontend { kind: ErrorKind::Conflict, message, retry_after: None });
        }
        let answer = Arc::new(watch::Sender::new(Answer::new(&self.keyed.budget)));
        keyed.insert(key.to_owned(), KeyedAnswer { request, asked, answer: Arc::clone(&answer) });
        Ok(Claim::Mine(Key { frontend: Arc::clone(self), key: key.to_owned(), answer }))
    }

    /// Sends an answer to a client until its own time is over. Of the first one, how long the
    /// messages took on their way counts.
    fn read(
        self: &Arc<Self>,
        answer: watch::Receiver<Answer>,
        reading: Reading,
        is_first: bool,
        until: Instant,
        limit: Duration,
    ) -> Responses {
        let (out, responses) = mpsc::channel(QUEUED_RESPONSES);
        let clock = Arc::clone(&self.clock);
        let limits = self.limits();
        let time = until.saturating_duration_since(clock.now());
        let mut reader = Reader { answer, out, is_first, stall: limits.request.stall_timeout };
        self.tasks.spawn_request("reader of a keyed answer", async move {
            let _reading = reading;
            if within(&*clock, time, reader.forward(&*clock)).await.is_none() {
                let response = Err(RequestError::TimedOut(limit).into());
                // One that does not read is cut off.
                let _ = reader.out.try_send(Outgoing { response, heard: None });
            }
        });
        responses
    }
}

/// On the way to one client.
struct Reader {
    answer: watch::Receiver<Answer>,
    out: mpsc::Sender<Outgoing>,
    is_first: bool,
    /// How long it may take nothing.
    stall: Duration,
}

impl Reader {
    /// Sends what is answered, until it is over, the client has left, or what it has not read is
    /// not kept any more.
    async fn forward(&mut self, clock: &dyn Clock) {
        let mut next = 0;
        loop {
            let (some, is_over) = {
                let answer = self.answer.borrow_and_update();
                (answer.after(next), answer.state == State::Over)
            };
            let Some(some) = some else { return };
            let has_all = some.is_empty();
            next += some.len();
            for mut outgoing in some {
                outgoing.heard = outgoing.heard.filter(|_| self.is_first);
                if !matches!(within(clock, self.stall, self.out.send(outgoing)).await, Some(Ok(()))) {
                    return;
                }
            }
            if has_all && is_over {
                return;
            }
            if has_all {
                tokio::select! {
                    changed = self.answer.changed() => if changed.is_err() { return },
                    () = self.out.closed() => return,
                }
            }
        }
    }
}

fn attach(answer: &watch::Sender<Answer>) -> watch::Receiver<Answer> {
    answer.send_if_modified(|answer| {
        answer.readers += 1;
        false
    });
    answer.subscribe()
}

impl Key {
    /// Keeps what is answered, until no client has read it for a while. A request that is not over
    /// then is aborted.
    async fn keep(self, mut responses: Responses) {
        let mut left = pin!(self.left_alone());
        loop {
            tokio::select! {
                biased;
                outgoing = responses.recv() => match outgoing {
                    Some(outgoing) if outgoing.response.is_err() => {
                        // A client that asks again is served anew. Other answers of the request end
                        // with this one.
                        self.forget();
                        self.push(outgoing);
                        break;
                    }
                    Some(outgoing) => self.push(outgoing),
                    None => break,
                },
                () = &mut left => {
                    if self.gave_up() {
                        return;
                    }
                    left.set(self.left_alone());
                }
            }
        }
        self.answer.send_modify(|answer| answer.state = State::Over);
        // Those who read it still hold it.
        while self.is_mine(&self.frontend.keyed.lock()) {
            tokio::select! {
                () = &mut left => {
                    self.gave_up();
                    left.set(self.left_alone());
                }
                () = self.frontend.shutdown.wait_for(Phase::Closing) => return,
            }
        }
    }

    fn push(&self, outgoing: Outgoing) {
        let mut is_kept = true;
        self.answer.send_modify(|answer| is_kept = answer.push(outgoing));
        if !is_kept {
            // A client that asks again is served anew.
            self.forget();
        }
    }

    /// Resolves when the last reader has been away for [`KEPT_FOR`].
    async fn left_alone(&self) {
        'read: loop {
            self.answer.closed().await;
            let readers = self.answer.borrow().readers;
            for _ in 0..KEPT_FOR.as_secs() {
                self.frontend.clock.sleep(Duration::from_secs(1)).await;
                if self.answer.borrow().readers != readers {
                    continue 'read;
                }
            }
            return;
        }
    }

    /// Gives the key up, if no client reads.
    fn gave_up(&self) -> bool {
        let mut keyed = self.frontend.keyed.lock();
        // A reader attaches under the lock.
        let is_left = self.answer.is_closed();
        if is_left && self.is_mine(&keyed) {
            keyed.remove(&self.key);
        }
        is_left
    }

    fn forget(&self) {
        let mut keyed = self.frontend.keyed.lock();
        if self.is_mine(&keyed) {
            keyed.remove(&self.key);
        }
    }

    /// Another request may have the key by now.
    fn is_mine(&self, keyed: &HashMap<String, KeyedAnswer>) -> bool {
        keyed.get(&self.key).is_some_and(|kept| Arc::ptr_eq(&kept.answer, &self.answer))
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        self.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unread::tests::message;

    #[test]
    fn keyed_message_over_limit_reaches_its_reader_and_is_not_kept() {
        let budget = Budget::new(100 << 20);
        let mut answer = Answer::new(&budget);
        assert!(answer.push(message(1)) && !answer.push(message(MAX_BYTES)) && !answer.push(message(1)));
        assert_eq!(answer.after(0).map(|some| some.len()), Some(3));
        for _ in 0..QUEUED_RESPONSES {
            answer.push(message(1));
        }
        assert!(answer.after(1).is_none(), "nor for one that is far behind");
        assert_eq!(answer.after(2).map(|some| some.len()), Some(AT_ONCE));
        assert!(answer.bytes < MAX_BYTES && budget.reserve().fits(74 << 20), "what is gone is given back");
    }

    #[test]
    fn keyed_message_without_budget_reaches_its_reader_and_is_not_kept() {
        let budget = Budget::new(1 << 20);
        let mut other = budget.reserve();
        let mut answer = Answer::new(&budget);
        assert!(answer.push(message(100 << 10)));
        other.grow(690 << 10).unwrap();
        for n in 0..3 {
            assert!(!answer.push(message(200 << 10)));
            assert_eq!(answer.after(n + 1).map(|some| some.len()), Some(1), "its reader gets it");
        }
        drop((other, answer));
        assert_eq!(budget.reserve().grow(700 << 10), Ok(()));
    }

    #[test]
    fn keyed_request_digest_ignores_the_timeout() {
        let ask = |text: &str, timeout_ms| {
            let prompt = v1::TextPrompt { text: text.into(), parse_special: false };
            let prompt = Some(v1::generate_request::Prompt::Text(prompt));
            v1::GenerateRequest { prompt, timeout_ms, client_request_id: "id".into(), ..Default::default() }
        };
        let mut asked = ask("a", Some(9.0));
        assert_eq!(digest(&mut asked), digest(&mut ask("a", None)));
        assert_eq!(asked, ask("a", Some(9.0)), "it is left as it was");
        assert_ne!(digest(&mut asked), digest(&mut ask("b", None)));
        assert!(seed("a") != seed("b") && seed("a") == seed("a"));
    }
}
