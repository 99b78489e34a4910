//! What a prefill node still has to compute, as the conductor tells it from outside.
//!
//! A node works in chunks: it takes the first of its queue, and a later prompt waits for the
//! chunk's end, whatever its rank. So time that passes is taken off the prompts that were there
//! when the chunk under way began. The node tells the chunk's end, with each step that it has done
//! and several times a second. In between it is guessed from the rule by which nodes make chunks.

use std::time::Instant;

use baton_types::{QueueOrdering, RequestKey, StepProgress};

use crate::cost::duration;
use crate::queue::{QueueItem, QueueRank, left_until};

/// Less than this is nothing, seconds.
const NOTHING: f64 = 1e-6;
/// No chunk is shorter, seconds: a bound on the chunks that are played through.
const MIN_CHUNK: f64 = 1e-3;

/// A prompt that a node was given and has not computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueuedPrompt {
    pub key: RequestKey,
    pub arrived: Instant,
    pub terms: QueueOrdering,
    /// Tokens to compute, at least one.
    pub tokens: u32,
    /// When it is late. The queue's order does not mind.
    pub deadline: Option<Instant>,
}

impl QueuedPrompt {
    /// Part of its work that so many seconds are.
    fn share(&self, seconds: f64) -> f64 {
        let all = self.terms.compute.as_secs_f64();
        if all > 0.0 { seconds / all } else { 0.0 }
    }
}

/// A prompt, and its number among those of the node.
#[derive(Debug, Clone, Copy)]
struct Entry {
    prompt: QueuedPrompt,
    turn: u64,
}

/// Where a prompt stands. Apart from the rest of it and small: each placement reads those of every
/// node.
#[derive(Debug, Clone, Copy)]
struct Place {
    rank: QueueRank,
    /// Seconds of it still to compute.
    left: f64,
    /// When it arrived.
    arrived: Instant,
    /// Index of its entry.
    entry: usize,
}

/// How long a node's chunks take, seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ChunkSeconds {
    /// One as large as they get.
    pub full: f64,
    /// One that is worth its fixed cost: a smaller one that ends a prompt is filled up so far with
    /// parts of others.
    pub least: f64,
}

impl Default for ChunkSeconds {
    fn default() -> Self {
        Self { full: MIN_CHUNK, least: 0.0 }
    }
}

/// The chunk that a node computes.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    /// Who came later is not in it.
    began: Instant,
    /// Seconds that it takes in all.
    seconds: f64,
    /// Seconds until it is done.
    left: f64,
    /// Whether the node said that it began.
    is_told: bool,
}

/// A node's work, in the node's own order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backlog {
    /// By rank.
    places: Vec<Place>,
    /// In no order.
    entries: Vec<Entry>,
    chunk: Option<Chunk>,
    chunk_seconds: ChunkSeconds,
    settled: Option<Instant>,
    turns: u64,
    /// Sum of what is left, when it was settled.
    total: f64,
}

/// What a newcomer would find, and do, in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct QueueImpact {
    /// Seconds of others' work that is done before its first token comes. That is the rest of the
    /// chunk under way, the prompts that go before it, and what fills up its own last chunk.
    pub ahead: f64,
    /// Prompts that it goes before.
    pub passed: usize,
}

impl Backlog {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// When those arrived that wait or are computed.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = Instant> {
        self.places.iter().map(|place| place.arrived)
    }

    /// How long the node's chunks take from now on.
    pub(crate) fn set_chunk_seconds(&mut self, seconds: ChunkSeconds) {
        self.chunk_seconds = ChunkSeconds { full: seconds.full.max(MIN_CHUNK), ..seconds };
    }

    pub(crate) fn add(&mut self, now: Instant, prompt: QueuedPrompt) {
        self.settle(now);
        self.turns += 1;
        let left = prompt.terms.compute.as_secs_f64();
        let item = QueueItem { terms: prompt.terms, arrived: prompt.arrived, turn: self.turns, left: 1.0 };
        let rank = QueueRank::of(now, &item);
        self.places.push(Place { rank, left, arrived: prompt.arrived, entry: self.entries.len() });
        self.entries.push(Entry { prompt, turn: self.turns });
        self.sort(now);
        self.balance(now);
    }

    /// The prompt is computed, or will not be.
    pub(crate) fn remove(&mut self, now: Instant, key: RequestKey) {
        let Some(index) = self.entries.iter().position(|entry| entry.prompt.key == key) else { return };
        self.settle(now);
        self.entries.swap_remove(index);
        self.places.retain(|place| place.entry != index);
        let moved = self.entries.len();
        if let Some(place) = self.places.iter_mut().find(|place| place.entry == moved) {
            place.entry = index;
        }
        self.sort(now);
        self.balance(now);
    }

    /// The node says how many tokens it has still to compute, and what of the step under way.
    /// Prompts given to it after `known_until` it may not know yet.
    pub(crate) fn correct(
        &mut self,
        now: Instant,
        queued_tokens: u64,
        step: Option<StepProgress>,
        known_until: Instant,
    ) {
        self.settle(now);
        let entries = &self.entries;
        let prompt = |place: &Place| &entries[place.entry].prompt;
        let left_tokens = |place: &Place| f64::from(prompt(place).tokens) * prompt(place).share(place.left);
        let known = |place: &&mut Place| place.arrived <= known_until;
        let expected: f64 = self.places.iter_mut().filter(known).map(|place| left_tokens(place)).sum();
        let mut surplus = expected - queued_tokens as f64;
        for place in self.places.iter_mut().filter(known) {
            // What was counted as done too early comes back to the prompts that it was taken from.
            let left = left_tokens(place);
            let all = f64::from(prompt(place).tokens);
            let change = surplus.clamp(left - all, left);
            place.left -= change * prompt(place).terms.compute.as_secs_f64() / all;
            surplus -= change;
        }
        if let Some(StepProgress { elapsed, left }) = step {
            let left = left.as_secs_f64();
            let began = now.checked_sub(elapsed).unwrap_or(now);
            self.chunk = Some(Chunk { began, seconds: elapsed.as_secs_f64() + left, left, is_told: true });
        }
        self.sort(now);
        self.balance(now);
    }

    /// The node has done a chunk, and begins with the next one if there is one.
    pub(crate) fn on_chunk_done(&mut self, now: Instant) {
        self.settle(now);
        if let Some(chunk) = self.chunk.take() {
            let spent = chunk.seconds - chunk.left;
            if chunk.is_told || spent > chunk.left {
                self.spend(chunk.began, chunk.left);
            } else {
                // What was taken for the next chunk was the end of the last one.
                self.give_back(spent);
            }
        }
        self.chunk = self.next_chunk(now).map(|chunk| Chunk { is_told: true, ..chunk });
        self.total = self.sum();
    }

    /// Seconds of work in all.
    pub(crate) fn total(&self, now: Instant) -> f64 {
        if self.settled == Some(now) { self.total } else { self.at(now).total }
    }

    /// What a prompt on these terms would find, and do.
    pub(crate) fn impact(&self, now: Instant, terms: QueueOrdering) -> QueueImpact {
        if self.places.is_empty() {
            return QueueImpact::default();
        }
        if self.settled != Some(now) {
            return self.at(now).impact(now, terms);
        }
        let before = self.before(now, terms);
        let mut ahead = 0.0;
        let mut behind = 0.0;
        for (index, left) in self.left_after_chunk().enumerate() {
            *(if index < before { &mut ahead } else { &mut behind }) += left;
        }
        let ahead = self.until_first_token(ahead, terms, behind);
        QueueImpact { ahead, passed: self.places.len() - before }
    }

    /// How many go before a newcomer.
    fn before(&self, now: Instant, terms: QueueOrdering) -> usize {
        let rank = QueueRank::of(now, &newcomer(now, terms));
        self.places.partition_point(|place| place.rank < rank)
    }

    /// Prompts that would miss their deadline because a newcomer goes before them, and would meet
    /// it without, as it seems or with `margin` seconds more.
    pub(crate) fn broken(&self, now: Instant, terms: QueueOrdering, margin: f64) -> usize {
        if self.settled != Some(now) {
            return self.at(now).broken(now, terms, margin);
        }
        let before = self.before(now, terms);
        let newcomer = terms.compute.as_secs_f64();
        let mut elapsed: f64 = self.places[..before].iter().map(|place| place.left).sum();
        let breaks = |place: &&Place| {
            elapsed += place.left;
            let slack = self.entries[place.entry].prompt.deadline.map(|deadline| left_until(now, deadline));
            let is_broken = |slack, margin| elapsed + margin <= slack && elapsed + margin + newcomer > slack;
            slack.is_some_and(|slack| is_broken(slack, 0.0) || is_broken(slack, margin))
        };
        self.places[before..].iter().filter(breaks).count()
    }

    /// Seconds of others' work until a newcomer's first token. Of the work that is not in the chunk
    /// under way, so many seconds go before it and so many after it.
    fn until_first_token(&self, ahead: f64, terms: QueueOrdering, behind: f64) -> f64 {
        let own = terms.compute.as_secs_f64();
        let least = self.chunk_seconds.least;
        let chunk = if ahead + own < least { ahead + own } else { own };
        let filled_up = (least - chunk).max(0.0).min(behind);
        self.chunk.map_or(0.0, |chunk| chunk.left) + ahead + filled_up
    }

    /// Updates the books: time has passed for those who are in the chunks that it was spent on.
    pub(crate) fn settle(&mut self, now: Instant) {
        let mut at = self.settled.replace(now).unwrap_or(now);
        while at < now && !self.places.is_empty() {
            let Some(mut chunk) = self.chunk.or_else(|| self.next_chunk(at)) else { break };
            let seconds = (now - at).as_secs_f64().min(chunk.left);
            self.spend(chunk.began, seconds);
            chunk.left -= seconds;
            self.chunk = Some(chunk).filter(|chunk| chunk.left > NOTHING);
            at += duration(seconds.max(NOTHING));
        }
        self.balance(now);
    }

    /// After every change, so that settling twice at one time is settling once. An idle node begins
    /// at once, and a chunk without prompts belongs to none.
    fn balance(&mut self, now: Instant) {
        self.chunk = self.chunk.or_else(|| self.next_chunk(now)).filter(|_| !self.places.is_empty());
        self.total = self.sum();
    }

    /// The same books at another time.
    fn at(&self, now: Instant) -> Self {
        let mut later = self.clone();
        later.settle(now);
        // A clock that is behind the books changes nothing of them.
        later.settled = Some(now);
        later
    }

    /// What a node begins with that is idle: it goes on to the end of the first prompt, or as far
    /// as a chunk goes.
    fn next_chunk(&self, began: Instant) -> Option<Chunk> {
        let first = self.places.iter().find(|place| place.left > NOTHING)?;
        let ChunkSeconds { full, least } = self.chunk_seconds;
        let seconds = first.left.max(least.min(self.sum())).min(full).max(MIN_CHUNK);
        Some(Chunk { began, seconds, left: seconds, is_told: false })
    }

    /// Takes seconds of a chunk off those who are in it.
    fn spend(&mut self, began: Instant, mut seconds: f64) {
        for place in self.places.iter_mut().filter(|place| place.arrived <= began) {
            let done = seconds.min(place.left);
            place.left -= done;
            seconds -= done;
            if seconds <= 0.0 {
                break;
            }
        }
    }

    /// Gives seconds back to those whom they were taken from.
    fn give_back(&mut self, mut seconds: f64) {
        for place in &mut self.places {
            let all = self.entries[place.entry].prompt.terms.compute.as_secs_f64();
            let back = seconds.min((all - place.left).max(0.0));
            place.left += back;
            seconds -= back;
        }
    }

    /// Seconds that are left of each when the chunk under way is done, by rank.
    fn left_after_chunk(&self) -> impl Iterator<Item = f64> {
        let (began, mut chunk) = self.chunk.map_or((None, 0.0), |chunk| (Some(chunk.began), chunk.left));
        self.places.iter().map(move |place| {
            let done = if began.is_some_and(|began| place.arrived <= began) { chunk.min(place.left) } else { 0.0 };
            chunk -= done;
            place.left - done
        })
    }

    fn sum(&self) -> f64 {
        self.places.iter().map(|place| place.left).sum()
    }

    fn item(&self, place: &Place) -> QueueItem {
        let Entry { prompt, turn } = self.entries[place.entry];
        QueueItem { terms: prompt.terms, arrived: prompt.arrived, turn, left: prompt.share(place.left) }
    }

    fn sort(&mut self, now: Instant) {
        for index in 0..self.places.len() {
            self.places[index].rank = QueueRank::of(now, &self.item(&self.places[index]));
        }
        self.places.sort_unstable_by_key(|place| place.rank);
    }
}

fn newcomer(now: Instant, terms: QueueOrdering) -> QueueItem {
    QueueItem { terms, arrived: now, turn: u64::MAX, left: 1.0 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{Attempt, RequestId};

    use super::*;
    use crate::queue::tests::terms;

    fn key(n: u128) -> RequestKey {
        RequestKey { request: RequestId(n), attempt: Attempt(0) }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn prompt(n: u128, arrived: Instant, patience: u64, seconds: f64) -> QueuedPrompt {
        QueuedPrompt { key: key(n), arrived, terms: terms(patience, seconds), tokens: 1000, deadline: None }
    }

    fn in_chunks(full: f64, least: f64) -> Backlog {
        let mut backlog = Backlog::default();
        backlog.set_chunk_seconds(ChunkSeconds { full, least });
        backlog
    }

    /// In milliseconds: what was summed up is not exact.
    fn ms(seconds: f64) -> i64 {
        (seconds * 1e3).round() as i64
    }

    fn step(elapsed_ms: u64, left_ms: u64) -> Option<StepProgress> {
        Some(StepProgress { elapsed: Duration::from_millis(elapsed_ms), left: Duration::from_millis(left_ms) })
    }

    #[test]
    fn backlog_shrinks_with_time_and_with_first_tokens() {
        let start = Instant::now();
        let mut backlog = in_chunks(0.5, 0.0);
        assert_eq!(backlog.total(start), 0.0);
        backlog.add(start, prompt(1, start, 0, 4.0));
        backlog.add(start + SECOND, prompt(2, start + SECOND, 0, 2.0));
        assert_eq!(ms(backlog.total(start + SECOND)), 5000);
        assert_eq!(ms(backlog.impact(start + SECOND, terms(0, 1.0)).ahead), 5000);
        assert_eq!(backlog.total(start + 60 * SECOND), 0.0, "both should be done");
        backlog.remove(start + 4 * SECOND, key(1));
        backlog.remove(start + 5 * SECOND, key(1));
        assert_eq!(ms(backlog.total(start + 5 * SECOND)), 1000);
        backlog.remove(start + 5 * SECOND, key(2));
        assert_eq!((backlog.len(), backlog.total(start)), (0, 0.0));
    }

    #[test]
    fn backlog_lets_prompts_overtake_until_patience_is_used_up() {
        let start = Instant::now();
        let mut backlog = in_chunks(0.5, 0.0);
        backlog.add(start, prompt(1, start, 10, 8.0));
        let short = backlog.impact(start, terms(1, 1.0));
        assert_eq!((ms(short.ahead), short.passed), (500, 1), "the chunk that is being computed");
        // After 6 of its 8 seconds a quarter of its patience is left: it is due at 2.5 s, the
        // newcomer at 7 s.
        backlog.add(start + 6 * SECOND, prompt(2, start + 6 * SECOND, 1, 1.0));
        let impact = backlog.impact(start + 6 * SECOND, terms(0, 1.0));
        assert_eq!((ms(impact.ahead), impact.passed), (2000, 1), "a third without patience goes between them");
    }

    #[test]
    fn backlog_puts_priority_before_all_but_the_current_chunk() {
        let start = Instant::now();
        let mut backlog = in_chunks(0.5, 0.0);
        backlog.add(start, prompt(1, start, 0, 8.0));
        let with = |priority| QueueOrdering { priority, ..terms(1, 1.0) };
        let urgent = backlog.impact(start + SECOND / 4, with(1));
        assert_eq!((ms(urgent.ahead), urgent.passed), (250, 1));
        assert_eq!(ms(backlog.impact(start, with(-1)).ahead), 8000);
    }

    #[test]
    fn backlog_does_not_deduct_chunk_time_from_later_prompts() {
        let start = Instant::now();
        let mut backlog = in_chunks(2.0, 0.0);
        backlog.add(start, prompt(1, start, 100, 8.0));
        backlog.add(start + SECOND / 2, prompt(2, start + SECOND / 2, 0, 1.0));
        let later = start + SECOND;
        assert_eq!(
            ms(backlog.impact(later, terms(0, 1.0)).ahead),
            2000,
            "the rest of the chunk, and the first of the short ones"
        );
        // The chunk after it is the short one's, and a third short one waits for that.
        assert_eq!(ms(backlog.impact(start + 5 * SECOND / 2, terms(0, 1.0)).ahead), 500);
    }

    #[test]
    fn backlog_fills_small_chunk_with_parts_of_other_prompts() {
        let start = Instant::now();
        let mut backlog = in_chunks(2.0, 0.5);
        backlog.add(start, prompt(1, start, 100, 8.0));
        let ahead = |seconds| ms(backlog.impact(start + SECOND, terms(0, seconds)).ahead);
        assert_eq!((ahead(0.1), ahead(0.75)), (1400, 1000));
        assert_eq!(in_chunks(2.0, 0.5).impact(start, terms(0, 0.1)).ahead, 0.0, "nothing to fill it up with");
    }

    #[test]
    fn backlog_uses_reported_step_instead_of_its_estimate() {
        let start = Instant::now();
        let mut backlog = in_chunks(2.0, 0.0);
        backlog.add(start, prompt(1, start, 100, 8.0));
        let ahead = |backlog: &Backlog, at: Instant| ms(backlog.impact(at, terms(0, 1.0)).ahead);
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut told = backlog.clone();
        told.correct(at(1000), 950, step(1000, 1500), at(1000));
        assert_eq!((ahead(&backlog, at(1000)), ahead(&told, at(1000))), (1000, 1500));
        assert_eq!(ms(told.total(at(1000))), 7600);
        // A chunk that was over earlier than thought took its work with it; one that was late had
        // not begun its successor.
        let mut early = told.clone();
        early.on_chunk_done(at(2000));
        assert_eq!((ahead(&early, at(2000)), ms(early.total(at(2000)))), (2000, 6100));
        let mut late = told.clone();
        late.on_chunk_done(at(2800));
        assert_eq!((ahead(&late, at(2800)), ms(late.total(at(2800)))), (2000, 6100));
    }

    #[test]
    fn backlog_counts_prompts_that_would_miss_their_deadline() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        let deadline = Some(start + 9 * SECOND);
        backlog.add(start, QueuedPrompt { deadline, ..prompt(1, start, 100, 8.0) });
        assert_eq!(backlog.broken(start, terms(0, 0.5), 0.0), 0);
        assert_eq!(backlog.broken(start, terms(0, 2.0), 0.0), 1);
        assert_eq!(backlog.broken(start, terms(0, 0.5), 0.6), 1, "it may take longer than it seems");
        assert_eq!(backlog.broken(start, terms(0, 0.5), 60.0), 0, "what is late with its margin anyway may be passed");
        backlog.add(start, prompt(2, start, 0, 5.0));
        assert_eq!(backlog.broken(start, terms(1, 2.0), 0.0), 0, "it is late anyway");
    }

    #[test]
    fn backlog_report_corrects_only_prompts_placed_before_it() {
        let start = Instant::now();
        let mut backlog = in_chunks(0.5, 0.0);
        backlog.add(start, prompt(1, start, 0, 4.0));
        backlog.add(start, prompt(2, start, 0, 4.0));
        backlog.add(start + 3 * SECOND, prompt(3, start + 3 * SECOND, 0, 5.0));
        backlog.correct(start + 3 * SECOND, 1875, None, start + 2 * SECOND);
        assert_eq!(ms(backlog.total(start + 3 * SECOND)), 12_500, "slower than thought");
        backlog.correct(start + 3 * SECOND, 250, None, start + 2 * SECOND);
        assert_eq!(ms(backlog.total(start + 3 * SECOND)), 6000, "faster than thought");
    }
}
