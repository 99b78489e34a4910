//! What was decided on the last requests, and what came of it.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_scheduler::{Placement, Refusal, RequestError};
use baton_types::{Attempt, FinishReason, NodeId, RequestId, RequestIdPrefix, Tbt, Timeline, Ttft, Usage};

use crate::error::GenerateError;
use crate::leader::{DecisionReasons, verdicts};

/// Requests that are remembered.
const RECORDS: usize = 1024;
/// Decisions of one request that are remembered: the first and the last ones.
const DECISIONS: usize = 4;
/// Turns of one decision that are remembered.
const RESELECTIONS: usize = 8;

/// One request's decisions and end.
#[derive(Debug, Clone)]
pub struct RequestRecord {
    /// The request.
    pub request: RequestId,
    /// The client's own id of it; empty if there is none.
    pub client_id: Arc<str>,
    /// Of its prompt.
    pub prompt_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Oldest first.
    pub decisions: Vec<Decision>,
    /// Between the first and the second of them.
    pub decisions_left_out: u32,
    /// None while it runs.
    pub end: Option<RequestEnd>,
}

/// What was decided, and by what.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Which of the request's placements.
    pub attempt: Attempt,
    /// From the request's arrival to the last time that it was decided so.
    pub at: Duration,
    /// How often in a row it was refused, or 1.
    pub times: u32,
    /// Where it goes, or why nowhere.
    pub placed: Result<Placement, Refusal>,
    /// The grounds, as of the last time.
    pub grounds: Arc<DecisionReasons>,
    /// Why the attempt did not last.
    pub failure: Option<String>,
    /// Where it went on other decode nodes than the one that was chosen, and why; the first of
    /// them.
    pub reselections: Vec<String>,
}

/// How a request ended.
#[derive(Debug, Clone)]
pub struct RequestEnd {
    /// Its finish, or why there was none.
    pub outcome: Result<FinishReason, GenerateError>,
    /// Where the time went.
    pub timeline: Timeline,
    /// Tokens.
    pub usage: Usage,
    /// The mean of the longest tenth of its gaps.
    pub tbt: Option<Tbt>,
    /// The node that it decoded at last; `None` if it did not decode.
    pub decode: Option<NodeId>,
    /// The attempt that gave the first token; `None` if none did.
    pub first_token: Option<Attempt>,
}

impl RequestRecord {
    fn decided(&mut self, decision: Decision) {
        if let Some(last) = self.decisions.last_mut()
            && last.attempt == decision.attempt
            && last.placed.is_err()
            && decision.placed.is_err()
        {
            *last = Decision { times: last.times.saturating_add(1), ..decision };
            return;
        }
        if self.decisions.len() == DECISIONS {
            self.decisions.remove(1);
            self.decisions_left_out = self.decisions_left_out.saturating_add(1);
        }
        self.decisions.push(decision);
    }

    /// The last placement, and when it was made.
    pub fn served_by(&self) -> Option<(&Placement, Duration)> {
        self.decisions.iter().rev().find_map(|decision| Some((decision.placed.as_ref().ok()?, decision.at)))
    }

    /// Predicted time between tokens, if the decode node that was chosen is the one that served it.
    pub fn predicted_tbt(&self, end: &RequestEnd) -> Option<Duration> {
        let (placement, _) = self.served_by().filter(|(placement, _)| placement.decode == end.decode)?;
        placement.predicted_tbt.map(|Tbt(tbt)| tbt)
    }

    /// Predicted time from the request's arrival to its first token: by the attempt that gave it,
    /// if one did.
    pub fn predicted_ttft(&self) -> Option<Duration> {
        let first = self.end.as_ref().and_then(|end| end.first_token);
        let gave = |decision: &&Decision| first.is_none_or(|first| decision.attempt == first);
        let placed = |decision: &'_ Decision| Some((decision.placed.as_ref().ok()?.clone(), decision.at));
        let (Placement { predicted_ttft: Ttft(ttft), first_token_delay, .. }, at) =
            self.decisions.iter().rev().filter(gave).find_map(placed)?;
        Some(at + ttft + first_token_delay)
    }

    /// The record in one line.
    fn log(&self, end: &RequestEnd) {
        let placement = self.served_by().map(|(placement, _)| placement);
        let last = self.decisions.last();
        let seconds = |time: Duration| time.as_secs_f64();
        let (prefill_verdicts, decode_verdicts) = last.map(|decision| verdicts(&decision.grounds)).unzip();
        tracing::info!(
            request = %self.request,
            client_request = Some(&*self.client_id).filter(|id| !id.is_empty()),
            outcome = end.outcome.as_ref().map_or_else(|error| error.kind().as_str(), |finish| finish.as_str()),
            error = end.outcome.as_ref().err().map(tracing::field::display),
            prefill = placement.map(|placement| placement.prefill.as_str()),
            decode = end.decode.as_ref().map(|node| node.as_str()),
            attempts = last.map_or(0, |decision| decision.attempt.0 + 1),
            decisions = self.decisions.iter().map(|decision| decision.times).sum::<u32>() + self.decisions_left_out,
            prompt_tokens = self.prompt_tokens,
            cached_tokens = end.usage.cached_tokens,
            output_tokens = end.usage.completion_tokens,
            migrations = end.timeline.migrations,
            predicted_ttft_s = self.predicted_ttft().map(seconds),
            ttft_s = end.ttft().map(seconds),
            predicted_tbt_s = self.predicted_tbt(end).map(seconds),
            tbt_s = end.tbt.map(|Tbt(tbt)| seconds(tbt)),
            total_s = seconds(end.timeline.total),
            prefill_verdicts,
            decode_verdicts,
            "request ended"
        );
    }
}

impl RequestEnd {
    /// Since the request's arrival; none if no token came.
    pub fn ttft(&self) -> Option<Duration> {
        (self.usage.completion_tokens > 0).then_some(self.timeline.ttft)
    }
}

/// Whom an id names.
#[derive(Debug)]
pub enum Found {
    /// That of no request that is remembered.
    None,
    /// That of this one.
    One(Box<RequestRecord>),
    /// Those of several, the latest first.
    Several(Vec<RequestId>),
}

/// A request's record while the request lasts. Dropped before its end, the request was aborted.
pub struct OpenRecord(Arc<Mutex<RequestRecord>>);

impl OpenRecord {
    fn lock(&self) -> MutexGuard<'_, RequestRecord> {
        lock(&self.0)
    }

    /// Something was decided, so long after the request's arrival.
    pub fn decided(
        &self,
        attempt: Attempt,
        at: Duration,
        placed: Result<Placement, Refusal>,
        grounds: DecisionReasons,
    ) {
        let grounds = Arc::new(grounds);
        let reselections = Vec::new();
        self.lock().decided(Decision { attempt, at, times: 1, placed, grounds, failure: None, reselections });
    }

    /// The last placement did not last.
    pub fn failed(&self, why: &impl Display) {
        if let Some(decision) = self.lock().decisions.last_mut() {
            decision.failure = Some(why.to_string());
        }
    }

    /// The request goes on at another decode node than the one that was chosen.
    pub fn turned(&self, what: &impl Display) {
        let mut record = self.lock();
        if let Some(decision) =
            record.decisions.last_mut().filter(|decision| decision.reselections.len() < RESELECTIONS)
        {
            decision.reselections.push(what.to_string());
        }
    }

    /// The request ended: its record is complete, and goes to the log in one line. Only the first
    /// end counts.
    pub fn end(&self, end: RequestEnd) {
        let mut record = self.lock();
        if record.end.is_none() {
            record.end = Some(end.clone());
            record.log(&end);
        }
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        let outcome = Err(GenerateError::from(RequestError::Aborted));
        let timeline = Timeline::default();
        let usage = Usage::default();
        self.end(RequestEnd { outcome, timeline, usage, tbt: None, decode: None, first_token: None });
    }
}

/// The records of the last requests that were to be placed.
#[derive(Default)]
pub struct DecisionLog(Mutex<VecDeque<LoggedDecision>>);

struct LoggedDecision {
    request: RequestId,
    client_id: Arc<str>,
    record: Arc<Mutex<RequestRecord>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves the record whole, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DecisionLog {
    /// A request is about to be placed.
    pub fn open(&self, request: RequestId, client_id: Arc<str>, prompt_tokens: u32, max_tokens: u32) -> OpenRecord {
        let decisions = Vec::new();
        let decisions_left_out = 0;
        let end = None;
        let record =
            RequestRecord { request, client_id, prompt_tokens, max_tokens, decisions, decisions_left_out, end };
        let kept =
            LoggedDecision { request, client_id: Arc::clone(&record.client_id), record: Arc::new(Mutex::new(record)) };
        let record = Arc::clone(&kept.record);
        let mut records = lock(&self.0);
        if records.len() == RECORDS {
            records.pop_front();
        }
        records.push_back(kept);
        OpenRecord(record)
    }

    /// The record, as it stands, of the request that has this id, its own or the client's, or whose
    /// own begins so.
    pub fn find(&self, id: &str) -> Found {
        let prefix: Option<RequestIdPrefix> = id.parse().ok();
        let is_meant = |kept: &&LoggedDecision| {
            prefix.as_ref().is_some_and(|prefix| prefix.matches(kept.request))
                || !id.is_empty() && *kept.client_id == *id
        };
        let records = lock(&self.0);
        let matching: Vec<_> = records.iter().rev().filter(is_meant).collect();
        match matching[..] {
            [] => Found::None,
            [LoggedDecision { record, .. }] => Found::One(Box::new(lock(record).clone())),
            _ => Found::Several(matching.iter().map(|kept| kept.request).collect()),
        }
    }

    /// Requests that are remembered.
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{ErrorKind, NodeId, QueueOrdering};

    use super::*;

    fn refused(message: &str) -> Result<Placement, Refusal> {
        let kind = ErrorKind::Overloaded;
        let message = message.to_owned();
        Err(Refusal { kind, message, retry_after: None, hold: None, objective: None })
    }

    fn placed() -> Result<Placement, Refusal> {
        Ok(Placement {
            prefill: NodeId::new("p").unwrap(),
            partial_prefill_tokens: 0,
            fetch: None,
            decode: None,
            terms: QueueOrdering::default(),
            first_token_delay: Duration::from_millis(5),
            predicted_ttft: Ttft(Duration::from_millis(20)),
            predicted_tbt: None,
            matched_tokens: 0,
            predicted_exposed: None,
            predicted_output_tokens: 1.0,
        })
    }

    impl DecisionLog {
        fn of(&self, request: RequestId) -> Option<RequestRecord> {
            match self.find(&request.to_string()) {
                Found::One(record) => Some(*record),
                Found::None | Found::Several(_) => None,
            }
        }
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn decision_log_merges_repeated_refusals_of_queued_request() {
        let records = DecisionLog::default();
        let open = records.open(RequestId(1), "".into(), 10, 20);
        (0..9).for_each(|n| open.decided(Attempt(0), ms(n), refused("full"), DecisionReasons::NoLeader));
        open.decided(Attempt(0), ms(100), placed(), DecisionReasons::NoLeader);
        open.failed(&"it died");
        open.decided(Attempt(1), ms(200), placed(), DecisionReasons::NoLeader);
        let record = records.of(RequestId(1)).unwrap();
        let told: Vec<_> =
            record.decisions.iter().map(|decision| (decision.attempt.0, decision.times, decision.at)).collect();
        assert_eq!(told, [(0, 9, ms(8)), (0, 1, ms(100)), (1, 1, ms(200))]);
        assert_eq!(record.decisions[1].failure.as_deref(), Some("it died"));
        assert_eq!(record.predicted_ttft(), Some(ms(225)), "of the last placement, since the arrival");
        assert!(record.end.is_none());
        drop(open);
        let end = records.of(RequestId(1)).unwrap().end.unwrap();
        assert_eq!(
            (end.outcome, end.timeline.total),
            (Err(GenerateError::from(RequestError::Aborted)), Duration::ZERO)
        );
    }

    #[test]
    fn decision_log_finds_request_by_unique_beginning_of_its_id() {
        let records = DecisionLog::default();
        let ids =
            ["aaaaaa1", "aaaaaa2", "bbbbbb1"].map(|digits| RequestId(u128::from_str_radix(digits, 16).unwrap() << 100));
        let _open: Vec<_> = ids.iter().map(|id| records.open(*id, format!("mine-{id}").into(), 1, 1)).collect();
        let find = |id: &str| records.find(id);
        assert!(matches!(find("bbbbbb"), Found::One(record) if record.request == ids[2]));
        assert!(matches!(find("aaaaaa2"), Found::One(record) if record.request == ids[1]));
        assert!(matches!(find("aaaaaa"), Found::Several(several) if several == [ids[1], ids[0]]));
        assert!(matches!(find("cccccc"), Found::None) && matches!(find(""), Found::None));
        let mine = format!("mine-{}", ids[0]);
        assert!(matches!(find(&mine), Found::One(record) if record.request == ids[0]));
        assert!(matches!(find(&mine[..20]), Found::None), "all of it");
    }

    #[test]
    fn decision_log_keeps_the_first_end_of_a_request() {
        let records = DecisionLog::default();
        let open = records.open(RequestId(1), "".into(), 10, 20);
        let timeline = Timeline::default();
        let usage = Usage::default();
        let end = |outcome| {
            let timeline = timeline.clone();
            RequestEnd { outcome, timeline, usage, tbt: None, decode: None, first_token: None }
        };
        open.end(end(Ok(FinishReason::Length)));
        drop(open);
        assert_eq!(records.of(RequestId(1)).unwrap().end.unwrap().outcome, Ok(FinishReason::Length));
    }

    #[test]
    fn decision_log_has_no_tbt_prediction_for_reselected_decode_node() {
        let records = DecisionLog::default();
        let open = records.open(RequestId(1), "".into(), 10, 20);
        let node = |name| Some(NodeId::new(name).unwrap());
        let chosen = placed().unwrap();
        let predicted_tbt = Some(Tbt(ms(30)));
        let chosen = Placement { decode: node("d0"), predicted_tbt, ..chosen };
        open.decided(Attempt(0), ms(1), Ok(chosen), DecisionReasons::NoLeader);
        (0..20).for_each(|n| open.turned(&format_args!("d1 instead of d0: {n}")));
        let record = records.of(RequestId(1)).unwrap();
        assert_eq!(
            (record.decisions[0].reselections.len(), record.decisions[0].reselections[7].as_str()),
            (8, "d1 instead of d0: 7")
        );
        assert_eq!(record.decisions[0].failure, None, "it did not fail");
        let predicted = |decode| {
            let outcome = Ok(FinishReason::Stop);
            let timeline = Timeline::default();
            let usage = Usage::default();
            record.predicted_tbt(&RequestEnd { outcome, timeline, usage, tbt: None, decode, first_token: None })
        };
        assert_eq!((predicted(node("d0")), predicted(node("d1"))), (Some(ms(30)), None));
    }

    #[test]
    fn ttft_prediction_is_of_attempt_that_gave_the_first_token() {
        let records = DecisionLog::default();
        let open = records.open(RequestId(1), "".into(), 10, 20);
        open.decided(Attempt(0), ms(1), placed(), DecisionReasons::NoLeader);
        open.decided(Attempt(1), ms(1400), placed(), DecisionReasons::NoLeader);
        let outcome = Ok(FinishReason::Stop);
        let timeline = Timeline::default();
        let usage = Usage::default();
        let first_token = Some(Attempt(0));
        open.end(RequestEnd { outcome, timeline, usage, tbt: None, decode: None, first_token });
        assert_eq!(records.of(RequestId(1)).unwrap().predicted_ttft(), Some(ms(26)));
    }

    #[test]
    fn decision_log_bounds_its_decisions_and_requests() {
        let records = DecisionLog::default();
        let open = records.open(RequestId(0), "".into(), 1, 1);
        (0..10).for_each(|n| open.decided(Attempt(n), ms(n.into()), placed(), DecisionReasons::NoLeader));
        let record = records.of(RequestId(0)).unwrap();
        let attempts: Vec<_> = record.decisions.iter().map(|decision| decision.attempt.0).collect();
        assert_eq!((attempts, record.decisions_left_out), (vec![0, 7, 8, 9], 6));
        let kept: Vec<_> = (1..=RECORDS as u128).map(|n| records.open(RequestId(n), "".into(), 1, 1)).collect();
        assert_eq!((records.len(), records.of(RequestId(0)).is_none()), (RECORDS, true));
        assert!(records.of(RequestId(1)).is_some() && kept.len() == RECORDS);
    }
}
