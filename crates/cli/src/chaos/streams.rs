//! Streams against the cluster, and what each of them is in peace.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::{kind_of_status, v1};
use baton_runtime::random_u64;
use baton_sim::Random;
use baton_types::ErrorKind;
use futures::future::join_all;

use super::{ANSWER, nodes};
use crate::client::Conductor;
use crate::error::CliError;

/// A client that has lost a conductor asks the next one after this long.
const LOST: Duration = Duration::from_millis(100);
/// A rejected client comes again after this long.
const COME_AGAIN: Duration = Duration::from_millis(500);
/// A stream that says nothing for so long is taken to be hung.
const HUNG: Duration = Duration::from_secs(60);
/// If there are several conductors, one that says nothing for so long is asked again.
const PATIENCE: Duration = Duration::from_secs(5);
/// So often a request is asked for.
const TRIES: usize = 16;
/// A gap that a fault makes begins less than this before the fault.
const FELT_WITHIN: Duration = Duration::from_millis(250);

/// What a request gave: tokens and the bits of their log-probabilities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedOutput {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    finish: String,
    prompt_tokens: u32,
}

/// How requests ended that were asked for again.
#[derive(Debug, Default)]
pub struct Again {
    /// All of them.
    pub count: u64,
    /// Those whose conductor was lost: another one was asked.
    pub elsewhere: u64,
    /// Those of which more than one other conductor was asked.
    pub at_several: u64,
    /// Those that had been taken in by a conductor that was lost or silent.
    pub interrupted: u64,
    /// Those of them that attached to the answer that was under way.
    pub attached: u64,
    /// Those of them that were served again, with a prompt whose beginning was in a node's cache.
    pub from_cache: u64,
}

/// How requests ended.
#[derive(Debug, Default)]
pub struct Ends {
    /// As in peace.
    pub right: u64,
    /// Those that were asked for again.
    pub again: Again,
    /// Ids of those that came out differently.
    pub different: Vec<String>,
    /// Why others failed after they were taken in.
    pub failed: Vec<String>,
    /// Why others were not taken in.
    pub rejected: Vec<String>,
}

impl Ends {
    /// All of them.
    pub fn count(&self) -> u64 {
        self.right + (self.different.len() + self.failed.len() + self.rejected.len()) as u64
    }
}

/// What the streams share.
pub struct Streams {
    requests: Vec<v1::GenerateRequest>,
    expected: Vec<ObservedOutput>,
    faults: Mutex<FaultGaps>,
    /// Of this run's keys.
    run: u64,
    pub stop: AtomicBool,
}

/// When faults were, and the longest gap that each made.
#[derive(Debug, Default)]
pub struct FaultGaps(Vec<(Instant, Duration)>);

impl FaultGaps {
    pub fn on_fault(&mut self, now: Instant) {
        self.0.push((now, Duration::ZERO));
    }

    /// A gap belongs to the last fault that it can be of: the next fault may come before it ends.
    fn on_gap(&mut self, began: Instant, ended: Instant) {
        let latest = ended.min(began + FELT_WITHIN);
        if let Some((_, longest)) = self.0.iter_mut().rev().find(|(at, _)| *at <= latest) {
            *longest = (*longest).max(ended - began);
        }
    }

    /// The longest gap of each fault, in order.
    pub fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.0.iter().map(|(_, longest)| *longest)
    }
}

/// Request `n` of a run: of many lengths, some with a common beginning, greedy and drawn, with
/// penalties and log-probabilities.
fn request(n: u64, seed: u64, max_tokens: u32) -> v1::GenerateRequest {
    let mut random = Random::new(seed ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let shared = format!("These are the notes of day {}. ", n % 4).repeat((n % 5) as usize * 4);
    let own: String = (0..8 + random.below(60)).map(|_| format!("{} ", random.below(1000))).collect();
    let text = format!("{shared}Go on with the numbers: {own}");
    let sampling = v1::SamplingParameters {
        max_tokens: Some(1 + max_tokens / 4 + random.below(u64::from(max_tokens * 3 / 4).max(1)) as u32),
        ignore_eos: true,
        seed: Some(n),
        temperature: Some(if n.is_multiple_of(2) { 0.0 } else { 0.8 }),
        repetition_penalty: n.is_multiple_of(3).then_some(1.1),
        logprobs: Some((n % 3) as u32),
        ..v1::SamplingParameters::default()
    };
    let prompt = Prompt::Text(v1::TextPrompt { text, parse_special: false });
    v1::GenerateRequest { prompt: Some(prompt), sampling: Some(sampling), ..v1::GenerateRequest::default() }
}

impl Streams {
    /// Asks each of `count` requests once, in peace: what it says then it has to say always.
    pub async fn baseline(conductor: &Conductor, count: u64, seed: u64, max_tokens: u32) -> Result<Self, CliError> {
        let requests: Vec<_> = (0..count).map(|n| request(n, seed, max_tokens)).collect();
        let ask_one = async |request: &v1::GenerateRequest| {
            let mut answer = ChaosRequest::new(HUNG);
            answer.ask(conductor, request.clone(), HUNG, |_, _| {}).await.map(|()| answer.said)
        };
        let asked = join_all(requests.iter().map(ask_one)).await;
        let expected = asked.into_iter().collect::<Result<Vec<_>, _>>();
        let expected = expected.map_err(|end| CliError::Cluster(format!("without faults: {}", end.told())))?;
        let faults = Mutex::default();
        let run = random_u64();
        let stop = AtomicBool::new(false);
        Ok(Self { requests, expected, faults, run, stop })
    }

    /// One client: one request after the other, until it is to stop. It has a conductor of its own,
    /// and asks the next one if that is lost.
    pub async fn client(&self, conductors: &[Conductor], first: usize, step: usize) -> Ends {
        let mut ends = Ends::default();
        for count in (first..).step_by(step) {
            if self.stop.load(Ordering::Relaxed) {
                return ends;
            }
            let n = count % self.requests.len();
            let mut request = self.requests[n].clone();
            if conductors.len() > 1 {
                request.idempotency_key = format!("{:016x} {count}", self.run);
            }
            let mut answer = ChaosRequest::new(if conductors.len() > 1 { PATIENCE } else { HUNG });
            let mut turn = Turn::new(first % conductors.len());
            let end = loop {
                let on_gap = |from, to| self.faults().on_gap(from, to);
                let patience = if conductors.len() > 1 { turn.patience() } else { HUNG };
                let end = answer.ask(&conductors[turn.at], request.clone(), patience, on_gap).await;
                match end {
                    Err(failed) if conductors.len() > 1 && turn.next(&failed, conductors.len()) => {
                        baton_runtime::sleep(LOST).await;
                    }
                    end => break end,
                }
            };
            ends.again.count(&turn, &answer);
            match end {
                Ok(()) if answer.said == self.expected[n] => ends.right += 1,
                Ok(()) => ends.different.push(format!("request {n}")),
                Err(Failed::Refused(why) | Failed::Lost(why, false) | Failed::Silent(why, false)) => {
                    ends.rejected.push(why);
                    baton_runtime::sleep(COME_AGAIN).await;
                }
                Err(Failed::Lost(why, true) | Failed::Silent(why, true) | Failed::Ended(why)) => ends.failed.push(why),
            }
        }
        ends
    }

    pub fn faults(&self) -> MutexGuard<'_, FaultGaps> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Failed {
    Refused(String),
    /// Its conductor went away; after it was taken in, or before.
    Lost(String, bool),
    /// Its conductor says nothing.
    Silent(String, bool),
    Ended(String),
}

/// Which conductor a request is asked for at.
struct Turn {
    at: usize,
    asked: usize,
    /// So many other conductors were asked.
    others: usize,
    /// This conductor was asked again, as it had said nothing.
    is_second: bool,
    /// A conductor that did not end it had taken it in.
    is_interrupted: bool,
}

impl Turn {
    fn new(at: usize) -> Self {
        Self { at, asked: 1, others: 0, is_second: false, is_interrupted: false }
    }

    /// After what time it is asked whether the conductor answers at all. One that has the answer
    /// gives it at once.
    fn patience(&self) -> Duration {
        if self.is_second { ANSWER } else { PATIENCE }
    }

    /// Whether it is asked for again. A conductor that is only slow has the answer under way:
    /// elsewhere it would be computed anew. It is asked again whenever it has said nothing more for
    /// a while. If it says nothing at all then, does not answer, or has gone, another one is asked.
    fn next(&mut self, failed: &Failed, conductors: usize) -> bool {
        self.is_second = match failed {
            // One that takes it in answers, and is slow.
            Failed::Silent(_, is_taken) => *is_taken || !self.is_second,
            Failed::Lost(..) => false,
            Failed::Refused(_) | Failed::Ended(_) => return false,
        };
        self.is_interrupted |= matches!(failed, Failed::Silent(_, true) | Failed::Lost(_, true));
        if !self.is_second {
            self.at = (self.at + 1) % conductors;
            self.others += 1;
        }
        self.asked += 1;
        self.asked <= TRIES
    }
}

impl Again {
    fn count(&mut self, turn: &Turn, answer: &ChaosRequest) {
        if turn.asked == 1 {
            return;
        }
        self.count += 1;
        self.elsewhere += u64::from(turn.others > 0);
        self.at_several += u64::from(turn.others > 1);
        if turn.is_interrupted {
            self.interrupted += 1;
            self.attached += u64::from(answer.is_attached);
            self.from_cache += u64::from(!answer.is_attached && answer.cached_tokens > 0);
        }
    }

    /// Of all clients.
    pub fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.elsewhere += other.elsewhere;
        self.at_several += other.at_several;
        self.interrupted += other.interrupted;
        self.attached += other.attached;
        self.from_cache += other.from_cache;
    }
}

impl Failed {
    fn told(&self) -> &str {
        match self {
            Self::Refused(why) | Self::Lost(why, _) | Self::Silent(why, _) | Self::Ended(why) => why,
        }
    }

    fn of(id: &str, status: &tonic::Status) -> Self {
        let why = format!("{id}: {:?}: {}", status.code(), status.message());
        match kind_of_status(status) {
            ErrorKind::Unavailable => Self::Lost(why, !id.is_empty()),
            _ if id.is_empty() => Self::Refused(why),
            _ => Self::Ended(why),
        }
    }
}

/// A request on its way, however often it was asked for.
struct ChaosRequest {
    said: ObservedOutput,
    /// When its client got a token that it did not have.
    last: Option<Instant>,
    /// Most tokens that it had.
    had: usize,
    patience: Duration,
    /// Its ids at conductors.
    ids: Vec<String>,
    /// Whether the last conductor had its answer under way, or kept.
    is_attached: bool,
    /// Of its prompt, at the last conductor.
    cached_tokens: u32,
}

impl ChaosRequest {
    fn new(patience: Duration) -> Self {
        let said = ObservedOutput::default();
        let ids = Vec::new();
        Self { said, last: None, had: 0, patience, ids, is_attached: false, cached_tokens: 0 }
    }

    /// Asks for it, from its first token on.
    async fn ask(
        &mut self,
        conductor: &Conductor,
        request: v1::GenerateRequest,
        begin_patience: Duration,
        mut on_gap: impl FnMut(Instant, Instant),
    ) -> Result<(), Failed> {
        self.said = ObservedOutput::default();
        self.is_attached = false;
        self.cached_tokens = 0;
        let mut id = String::new();
        let patience = self.patience;
        let silent = |id: &str| Failed::Silent(format!("{id}: silent for {patience:?}"), !id.is_empty());
        let asked = baton_runtime::now();
        let mut client = conductor.inference();
        let mut begun = pin!(client.generate(request));
        // While none leads, or no node has room, it waits, and its conductor answers others.
        let begun = loop {
            match tokio::time::timeout(begin_patience, &mut begun).await {
                Ok(begun) => break begun,
                Err(_) if asked.elapsed() >= HUNG => return Err(silent(&id)),
                Err(_) if !answers(conductor).await => {
                    return Err(Failed::Lost(format!("{} does not answer", conductor.address()), false));
                }
                Err(_) => {}
            }
        };
        let mut stream = begun.map_err(|status| Failed::of(&id, &status))?.into_inner();
        loop {
            let message = tokio::time::timeout(patience, stream.message()).await.map_err(|_| silent(&id))?;
            let event = match message.map_err(|status| Failed::of(&id, &status))? {
                Some(response) => response.event,
                None => break,
            };
            match event {
                Some(Event::Accepted(accepted)) => {
                    id = accepted.request_id;
                    // The first message of an answer is kept with it: it names the request that is
                    // served.
                    self.is_attached = self.ids.contains(&id);
                    self.ids.push(id.clone());
                }
                Some(Event::Delta(delta)) => {
                    let said = &mut self.said;
                    if delta.index as usize != said.tokens.len() {
                        let why = format!("{id}: token {} came as number {}", said.tokens.len(), delta.index);
                        return Err(Failed::Ended(why));
                    }
                    said.tokens.extend(delta.token_ids);
                    said.logprobs.extend(delta.logprobs.iter().filter_map(|one| Some(one.logprob?.to_bits())));
                    if said.tokens.len() > self.had {
                        self.had = said.tokens.len();
                        let now = baton_runtime::now();
                        if let Some(last) = self.last.replace(now) {
                            on_gap(last, now);
                        }
                    }
                }
                Some(Event::Finished(finished)) => {
                    self.said.finish = finished.finish_reason;
                    let usage = finished.usage.unwrap_or_default();
                    self.said.prompt_tokens = usage.prompt_tokens;
                    self.cached_tokens = usage.cached_tokens;
                }
                _ => {}
            }
        }
        if self.said.finish.is_empty() {
            return Err(Failed::Ended(format!("{id}: the stream ended without a word")));
        }
        Ok(())
    }
}

async fn answers(conductor: &Conductor) -> bool {
    matches!(tokio::time::timeout(ANSWER, nodes(conductor)).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_gap_is_attributed_to_the_fault_before_it() {
        let began = baton_runtime::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut felt = FaultGaps::default();
        felt.on_gap(at(0), at(90));
        felt.on_fault(at(100));
        felt.on_gap(at(99), at(1000));
        felt.on_gap(at(110), at(5000));
        felt.on_fault(at(2000));
        felt.on_gap(at(2000), at(2010));
        felt.on_gap(at(1900), at(1990));
        felt.on_gap(at(1990), at(2100));
        let gaps: Vec<_> = felt.gaps().map(|gap| gap.as_millis()).collect();
        assert_eq!(gaps, [4890, 110], "a gap may end after the next fault, and begins a moment before its own");
    }

    #[test]
    fn slow_conductor_is_asked_again_and_silent_or_lost_one_is_left() {
        let silent = |is_taken| Failed::Silent(String::new(), is_taken);
        let mut turn = Turn::new(1);
        assert_eq!(turn.patience(), PATIENCE);
        for _ in 0..2 {
            assert!(turn.next(&silent(true), 2));
            assert_eq!((turn.at, turn.others, turn.patience()), (1, 0, ANSWER), "it answers, and is slow");
        }
        assert!(turn.next(&silent(false), 2));
        assert_eq!((turn.at, turn.others, turn.patience()), (0, 1, PATIENCE), "it does not answer");
        assert!(turn.next(&silent(false), 2) && turn.at == 0, "the next one is asked twice, too");
        assert!(turn.next(&Failed::Lost(String::new(), true), 2));
        assert_eq!((turn.at, turn.others), (1, 2));
        assert!(!turn.next(&Failed::Ended(String::new()), 2) && !turn.next(&Failed::Refused(String::new()), 2));
        let asked = (0..).take_while(|_| turn.next(&silent(true), 2)).count();
        assert_eq!(asked, TRIES - 6, "there is an end to it");
    }

    #[test]
    fn chaos_requests_are_varied_and_the_same_in_each_run() {
        let all: Vec<_> = (0..64).map(|n| request(n, 7, 200)).collect();
        assert!(all.iter().zip(0..).all(|(one, n)| *one == request(n, 7, 200)));
        let lengths: Vec<_> = all.iter().filter_map(|one| one.sampling.as_ref()?.max_tokens).collect();
        assert!(lengths.iter().all(|length| (51..=201).contains(length)), "{lengths:?}");
        assert!(all.iter().any(|one| one.sampling.as_ref().is_some_and(|s| s.repetition_penalty.is_some())));
        assert_eq!(request(3, 7, 1).sampling.unwrap().max_tokens, Some(1));
    }
}
