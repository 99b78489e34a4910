//! The core against a made-up cluster, by hand; `random.rs`: with random events.

mod random;

use std::collections::BTreeSet;
use std::sync::Arc;

use baton_types::{
    ConductorId, DecodeTarget, FetchReport, Generation, KvTransfer, MigrationQuestion, QueueOrdering, Refused,
    RequestId, SamplingParams, Slo, TokenId, Ttft,
};

use super::events::HANDOFF_REPORT_TIMEOUT;
use super::recovery::RECOVERY_PATIENCE;
use super::*;

const MS: Duration = Duration::from_millis(1);
const LIMITS: RequestLimits = RequestLimits { stall_timeout: Duration::from_secs(30), max_attempts: 3 };

fn id(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn start(name: &str) -> NodeStart {
    NodeStart { node: id(name), generation: Generation(1) }
}

fn job(max_tokens: u32) -> RequestJob {
    RequestJob {
        request: RequestId(7),
        conductor: ConductorId(1),
        tokens: Arc::from([1, 2, 3]),
        sampling: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
        block_hashes: Arc::from([]),
        slo: Slo::default(),
        timeout: Duration::from_secs(3600),
        priority: 0,
        first_completion_nodes: Vec::new(),
    }
}

fn to(prefill: &str, decode: &str) -> Assignment {
    let placement = Placement {
        prefill: id(prefill),
        partial_prefill_tokens: 0,
        fetch: None,
        decode: Some(id(decode)),
        terms: QueueOrdering::default(),
        first_token_delay: Duration::ZERO,
        predicted_ttft: Ttft(MS),
        predicted_tbt: None,
        matched_tokens: 0,
        predicted_exposed: None,
        predicted_output_tokens: 1.0,
    };
    let target = DecodeTarget { node: id(decode), generation: Generation(1), address: String::new(), tbt: None };
    Assignment { placement, target: Some(target), source: None, starts: vec![start(prefill), start(decode)] }
}

fn refusal(hold: Option<Duration>) -> Refusal {
    Refusal { kind: ErrorKind::Overloaded, message: "full".to_owned(), retry_after: None, hold, objective: None }
}

fn unavailable() -> Refused {
    Refused { kind: ErrorKind::Unavailable, message: "gone".to_owned() }
}

fn first(token: TokenId) -> RequestEvent {
    let logprobs = None;
    let prompt_logprobs = Vec::new();
    let finish = None;
    let compute = MS;
    RequestEvent::Prefill(PrefillEvent::FirstToken { token, logprobs, prompt_logprobs, finish, compute })
}

fn token(index: u32, token: TokenId, finish: Option<FinishReason>) -> RequestEvent {
    RequestEvent::Decode(DecodeEvent::Token { index, token, logprobs: None, finish, queue: None })
}

fn handed_off() -> RequestEvent {
    RequestEvent::Prefill(PrefillEvent::HandedOff(KvTransfer::default()))
}

/// What the cluster answers.
enum Answer {
    Placed(RequestKey, Box<Result<Assignment, Refusal>>),
    Migrated(RequestKey, Option<MigrationAssignment>),
    Reselected(RequestKey, NodeId, Refused, Option<DecodeTarget>),
}

/// The core, and a shell that writes down what it is asked for.
struct Shell {
    core: RequestCore,
    now: Instant,
    delivered: Vec<TokenId>,
    /// Attempts that are in the ledger.
    open: BTreeSet<Attempt>,
    effects: Vec<RequestEffect>,
    ended: Option<Result<FinishReason, RequestError>>,
}

impl Shell {
    fn new(job: RequestJob) -> Self {
        let now = Instant::now();
        let core = RequestCore::new(now, now, job, LIMITS);
        Self { core, now, delivered: Vec::new(), open: BTreeSet::new(), effects: Vec::new(), ended: None }
    }

    fn placed(job: RequestJob) -> Self {
        let mut shell = Self::new(job);
        shell.take();
        shell.answer(Ok(to("p0", "d0")));
        shell.take();
        shell
    }

    fn answer(&mut self, placed: Result<Assignment, Refusal>) {
        let key = self.core.next_key();
        self.tell_answer(Answer::Placed(key, Box::new(placed)));
    }

    fn answer_migration(&mut self, attempt: u32, to: Option<MigrationAssignment>) {
        self.tell_answer(Answer::Migrated(RequestKey { request: RequestId(7), attempt: Attempt(attempt) }, to));
    }

    fn answer_reselect(&mut self, attempt: u32, from: &str, to: Option<DecodeTarget>) {
        let key = RequestKey { request: RequestId(7), attempt: Attempt(attempt) };
        self.tell_answer(Answer::Reselected(key, id(from), unavailable(), to));
    }

    fn tell_answer(&mut self, answer: Answer) {
        match answer {
            Answer::Placed(key, placed) => {
                if placed.is_err() {
                    self.open.remove(&key.attempt);
                }
                self.core.on_placed(self.now, key, *placed);
            }
            Answer::Migrated(key, to) => {
                if to.is_none() {
                    self.open.remove(&key.attempt);
                }
                self.core.on_migration_placed(key, to);
            }
            Answer::Reselected(key, from, refused, to) => self.core.on_reselected(self.now, key, &from, refused, to),
        }
    }

    fn tell(&mut self, attempt: u32, event: RequestEvent) -> Vec<RequestEffect> {
        self.core.on_event(self.now, Attempt(attempt), event);
        self.take()
    }

    /// Takes the effects in, and gives them back.
    fn take(&mut self) -> Vec<RequestEffect> {
        let effects: Vec<_> = std::iter::from_fn(|| self.core.poll_effect()).collect();
        for effect in &effects {
            assert!(self.ended.is_none(), "{effect:?} after the end");
            match effect {
                RequestEffect::Deliver { index, tokens, .. } => {
                    assert_eq!(*index as usize, self.delivered.len());
                    self.delivered.extend(tokens.iter().map(|token| token.token));
                }
                // The one who answers charges it when the question comes.
                RequestEffect::Place { key, .. }
                | RequestEffect::PlaceMigration(MigrationQuestion { migrated: key, .. }) => {
                    self.open.insert(key.attempt);
                }
                RequestEffect::UpdateLedger { key, entry: LedgerEntry::Ended } => {
                    self.open.remove(&key.attempt);
                }
                RequestEffect::End(outcome) => {
                    assert!(self.open.is_empty(), "{:?} are charged at the end", self.open);
                    self.ended = Some(outcome.clone());
                }
                _ => {}
            }
        }
        self.effects.extend(effects.iter().cloned());
        effects
    }

    fn pass(&mut self, time: Duration) -> Vec<RequestEffect> {
        self.now += time;
        self.core.on_wakeup(self.now);
        self.take()
    }

    fn aborted(&self) -> Vec<(String, u32)> {
        let aborts = self.effects.iter().filter_map(|effect| match effect {
            RequestEffect::Abort { node, key } => Some((node.to_string(), key.attempt.0)),
            _ => None,
        });
        aborts.collect()
    }
}

fn submitted(effects: &[RequestEffect]) -> Vec<String> {
    let jobs = effects.iter().filter_map(|effect| match effect {
        RequestEffect::Submit { node, .. } => Some(node.to_string()),
        _ => None,
    });
    jobs.collect()
}

#[test]
fn request_past_its_timeout_is_aborted_at_its_nodes() {
    let timeout = Duration::from_secs(20);
    let mut shell = Shell::new(RequestJob { timeout, ..job(8) });
    shell.take();
    shell.now += Duration::from_secs(5);
    shell.answer(Ok(to("p0", "d0")));
    let effects = shell.take();
    let job = effects.iter().find_map(|effect| match effect {
        RequestEffect::Submit { job, .. } => Some(job),
        _ => None,
    });
    assert_eq!(
        job.unwrap().terms.timeout,
        Duration::ZERO.max(QueueOrdering::default().timeout.min(Duration::from_secs(15)))
    );
    shell.tell(0, first(1));
    shell.tell(0, handed_off());
    shell.now += Duration::from_secs(10);
    shell.tell(0, token(1, 2, None));
    assert_eq!(shell.core.next_wakeup(), Some(shell.now + Duration::from_secs(5)));
    shell.pass(Duration::from_secs(5));
    assert_eq!(shell.ended, Some(Err(RequestError::TimedOut(timeout))));
    assert_eq!(shell.aborted(), [("p0".to_owned(), 0), ("d0".to_owned(), 0)]);

    // A request in the admission queue, too.
    let mut shell = Shell::new(RequestJob { timeout, ..self::job(8) });
    shell.take();
    shell.answer(Err(refusal(Some(Duration::from_secs(60)))));
    shell.take();
    shell.pass(timeout);
    assert_eq!(shell.ended, Some(Err(RequestError::TimedOut(timeout))));
}

#[test]
fn request_runs_from_placement_to_its_last_token() {
    let mut shell = Shell::new(job(3));
    assert!(matches!(&shell.take()[..], [RequestEffect::Place { exclude, .. }] if exclude.is_empty()));
    shell.answer(Ok(to("p0", "d0")));
    assert_eq!(submitted(&shell.take()), ["p0"]);
    assert!(shell.core.is_admitted());
    shell.tell(0, first(10));
    shell.tell(0, handed_off());
    shell.tell(0, token(1, 11, None));
    let last = shell.tell(0, token(2, 12, Some(FinishReason::Length)));
    assert!(
        matches!(
            last[..],
            [
                ..,
                RequestEffect::UpdateLedger { entry: LedgerEntry::Finished { output_tokens: 3 }, .. },
                RequestEffect::UpdateLedger { entry: LedgerEntry::Ended, .. },
                RequestEffect::End(Ok(FinishReason::Length))
            ]
        ),
        "{last:?}"
    );
    assert_eq!((shell.delivered.clone(), shell.aborted()), (vec![10, 11, 12], vec![]));
}

#[test]
fn request_end_waits_briefly_for_the_handoff_report() {
    for reported in [true, false] {
        let mut shell = Shell::placed(job(2));
        shell.tell(0, first(10));
        shell.tell(0, token(1, 11, Some(FinishReason::Stop)));
        assert_eq!(shell.ended, None);
        if reported {
            shell.tell(0, handed_off());
        } else {
            shell.pass(HANDOFF_REPORT_TIMEOUT - MS);
            assert_eq!(shell.ended, None);
            shell.pass(MS);
        }
        assert_eq!(shell.ended, Some(Ok(FinishReason::Stop)));
    }
}

/// A request for four tokens, whose client has the first one and the log-probabilities of the
/// prompt.
fn begun_with_prompt_logprobs() -> Shell {
    let sampling = SamplingParams { prompt_logprobs: Some(0), ..(*job(4).sampling).clone() };
    let mut shell = Shell::placed(RequestJob { sampling: Arc::new(sampling), ..job(4) });
    let logprobs = None;
    let prompt_logprobs = vec![Default::default(); 3];
    let finish = None;
    let compute = MS;
    let token_0 = PrefillEvent::FirstToken { token: 10, logprobs, prompt_logprobs, finish, compute };
    shell.tell(0, RequestEvent::Prefill(token_0));
    shell
}

#[test]
fn request_resumes_after_delivered_tokens_when_a_node_is_lost() {
    let mut shell = begun_with_prompt_logprobs();
    shell.tell(0, handed_off());
    shell.tell(0, token(1, 11, None));
    shell.core.on_node_away(shell.now, shell.now, &start("p0"), Departure::GivenUp);
    assert_eq!(shell.take(), [], "the prefill node has done its part");
    let other_start = NodeStart { generation: Generation(2), ..start("d0") };
    shell.core.on_node_away(shell.now, shell.now, &other_start, Departure::GivenUp);
    assert_eq!(shell.take(), [], "another start of it");
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::GivenUp);
    let effects = shell.take();
    assert!(
        matches!(effects.last(), Some(RequestEffect::Place { key, exclude, .. }) if key.attempt == Attempt(1) && *exclude == [id("d0")])
    );
    assert_eq!(shell.aborted(), [("p0".to_owned(), 0), ("d0".to_owned(), 0)]);
    shell.answer(Err(refusal(None)));
    assert!(
        matches!(&shell.take()[..], [RequestEffect::Place { exclude, .. }] if exclude.is_empty()),
        "it may be back"
    );
    shell.answer(Err(refusal(None)));
    assert_eq!(shell.core.next_wakeup(), Some(shell.now + RECOVERY_POLL));
    let [RequestEffect::Place { key, .. }] = shell.pass(RECOVERY_POLL)[..] else { panic!() };
    let wanted = shell.core.placement_request(key, &[], MS);
    assert_eq!((wanted.prompt_tokens, wanted.max_tokens, wanted.bypass_cache), (5, 2, false));
    shell.answer(Ok(to("p1", "d1")));
    let effects = shell.take();
    let [RequestEffect::Submit { node, job }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(
        (node, &job.tokens[..], job.output_tokens, job.is_migration),
        (&id("p1"), &[1, 2, 3, 10, 11][..], 2, false)
    );
    assert_eq!(
        (job.sampling.max_tokens, job.sampling.prompt_logprobs),
        (4, None),
        "the client has those of the prompt"
    );
    let again = PrefillEvent::Started { queue: 300 * MS, cached_tokens: 0 };
    shell.tell(1, RequestEvent::Prefill(again));
    shell.tell(0, token(2, 99, None));
    let slow = PrefillEvent::FirstToken {
        token: 12,
        logprobs: None,
        prompt_logprobs: Vec::new(),
        finish: None,
        compute: 900 * MS,
    };
    shell.tell(1, RequestEvent::Prefill(slow));
    let timeline = shell.core.timeline();
    let was = (Duration::ZERO, MS);
    assert_eq!((timeline.prefill_queue, timeline.prefill_compute), was, "of the token that the TTFT is of");
    shell.tell(1, handed_off());
    shell.tell(1, token(3, 13, Some(FinishReason::Length)));
    assert_eq!((shell.delivered.clone(), shell.ended), (vec![10, 11, 12, 13], Some(Ok(FinishReason::Length))));
}

#[test]
fn request_restarts_from_its_prompt_if_no_node_has_room_to_resume() {
    let mut shell = begun_with_prompt_logprobs();
    shell.tell(0, token(1, 11, None));
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::GivenUp);
    shell.take();
    let too_large = || Refusal { kind: ErrorKind::Invalid, ..refusal(None) };
    for wanted in [5, 5, 3] {
        let asked = shell.core.placement_request(shell.core.next_key(), &[], MS).prompt_tokens;
        assert_eq!(asked, wanted);
        if wanted == 5 {
            shell.answer(Err(too_large()));
            assert!(matches!(shell.take()[..], [RequestEffect::Place { .. }]));
        }
    }
    shell.answer(Ok(to("p1", "d1")));
    let effects = shell.take();
    let [RequestEffect::Submit { job, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((job.tokens.len(), job.output_tokens, job.sampling.prompt_logprobs), (3, 0, None), "it has those");
    shell.tell(1, first(10));
    shell.tell(1, handed_off());
    for (index, value) in [(1, 11), (2, 12), (3, 13)] {
        shell.tell(1, token(index, value, (index == 3).then_some(FinishReason::Length)));
    }
    assert_eq!((shell.delivered.clone(), shell.ended), (vec![10, 11, 12, 13], Some(Ok(FinishReason::Length))));
}

#[test]
fn draining_nodes_do_not_count_as_failures_of_a_request() {
    let mut shell = Shell::placed(job(4));
    shell.tell(0, first(10));
    for attempt in 0..8 {
        let effects = match attempt % 3 {
            0 => {
                shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::Drained);
                shell.take()
            }
            // It drained when the job came.
            1 => shell.tell(attempt, RequestEvent::Prefill(PrefillEvent::Failed(unavailable()))),
            // Its decode node drains, and no other has room.
            _ => {
                shell.tell(attempt, RequestEvent::Prefill(PrefillEvent::GrantRefused(unavailable())));
                shell.answer_reselect(attempt, "d0", None);
                shell.take()
            }
        };
        assert!(matches!(effects.last(), Some(RequestEffect::Place { .. })), "attempt {attempt}: {effects:?}");
        shell.answer(Ok(to("p0", "d0")));
        shell.take();
    }
    assert_eq!(shell.ended, None);
    for attempt in 8.. {
        shell.tell(attempt, RequestEvent::Prefill(PrefillEvent::Failed(unavailable())));
        if shell.ended.is_some() {
            assert_eq!(attempt, 15, "not for ever");
            break;
        }
        shell.answer(Ok(to("p0", "d0")));
    }
}

#[test]
fn request_that_two_nodes_died_with_is_not_placed_again() {
    let begun = RequestEvent::Prefill(PrefillEvent::Started { queue: MS, cached_tokens: 0 });
    let mut shell = Shell::placed(job(4));
    let dies = |shell: &mut Shell, node: &str| {
        shell.core.on_node_away(shell.now, shell.now, &start(node), Departure::Died);
    };
    dies(&mut shell, "p0");
    shell.answer(Ok(to("p1", "d1")));
    shell.tell(1, begun.clone());
    shell.core.on_node_away(shell.now, shell.now, &start("p1"), Departure::Stalled);
    assert_eq!(shell.ended, None, "the first one had not begun");
    shell.answer(Ok(to("p2", "d2")));
    shell.tell(2, begun);
    shell.tell(2, first(10));
    dies(&mut shell, "d2");
    shell.take();
    let died = RequestError::NodesDied(vec![id("p1"), id("d2")]);
    assert_eq!(died.to_string(), "p1 and d2 died or hung while they had the request: it is not placed again");
    assert_eq!((died.kind(), shell.ended), (ErrorKind::Internal, Some(Err(died))));
}

#[test]
fn request_with_spoiled_cache_is_tried_once_more_without_it() {
    let spoiled = || Refused { kind: ErrorKind::DataLoss, message: "the model computed NaN".to_owned() };
    let salt = |effects: &[RequestEffect]| match effects {
        [RequestEffect::Submit { job, .. }] => job.salt.to_vec(),
        other => panic!("{other:?}"),
    };
    // At the prefill node, and at the decode node; also if nothing else is tried twice.
    for (at_decode, max_attempts) in [(false, 3), (true, 3), (false, 1), (true, 1)] {
        let mut shell = Shell::placed(job(4));
        shell.core.limits.max_attempts = max_attempts;
        shell.tell(0, RequestEvent::Prefill(PrefillEvent::Started { queue: MS, cached_tokens: 0 }));
        if at_decode {
            shell.tell(0, first(10));
            shell.tell(0, handed_off());
            shell.tell(0, RequestEvent::Decode(DecodeEvent::Failed(spoiled())));
        } else {
            shell.tell(0, RequestEvent::Prefill(PrefillEvent::Failed(spoiled())));
        }
        let key = shell.core.next_key();
        assert!(shell.core.placement_request(key, &[], MS).bypass_cache, "nothing is looked up");
        shell.answer(Ok(to("p0", "d0")));
        assert_eq!(salt(&shell.take()), 7_u128.to_be_bytes(), "nothing of it is what others have");
        // What fails then is the model's fault.
        shell.tell(1, RequestEvent::Prefill(PrefillEvent::Failed(spoiled())));
        let Some(Err(error)) = shell.ended else { panic!("it goes on") };
        assert_eq!(error.kind(), ErrorKind::DataLoss);
    }
    let mut shell = Shell::new(job(4));
    shell.take();
    shell.answer(Ok(to("p0", "d0")));
    assert!(salt(&shell.take()).is_empty());
}

#[test]
fn replaced_sessions_are_no_deaths_and_their_nodes_are_not_avoided() {
    let begun = RequestEvent::Prefill(PrefillEvent::Started { queue: MS, cached_tokens: 0 });
    let mut shell = Shell::placed(job(4));
    shell.tell(0, begun.clone());
    shell.tell(0, first(10));
    // At two nodes, and again and again.
    for attempt in 0..40 {
        let node = if attempt % 2 == 0 { "d0" } else { "d1" };
        shell.core.on_node_away(shell.now, shell.now, &start(node), Departure::Replaced);
        assert!(!shell.take().iter().any(RequestEffect::is_question), "not as fast as sessions can be taken");
        shell.now += RECOVERY_POLL;
        shell.core.on_wakeup(shell.now);
        let effects = shell.take();
        let Some(RequestEffect::Place { exclude, .. }) = effects.last() else { panic!("{attempt}: {effects:?}") };
        assert_eq!(exclude, &[], "the node is well");
        shell.answer(Ok(to("p0", if attempt % 2 == 0 { "d1" } else { "d0" })));
        shell.tell(attempt + 1, begun.clone());
    }
    // What dies after that is still the first death.
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::Died);
    assert!(matches!(shell.take().last(), Some(RequestEffect::Place { .. })));
    shell.answer(Ok(to("p0", "d1")));
    shell.tell(41, begun);
    shell.core.on_node_away(shell.now, shell.now, &start("d1"), Departure::Died);
    shell.take();
    assert_eq!(shell.ended, Some(Err(RequestError::NodesDied(vec![id("d0"), id("d1")]))));
}

#[test]
fn request_whose_sessions_are_taken_for_ever_ends_at_its_deadline() {
    let mut shell = Shell::placed(job(4));
    let deadline = shell.now + job(4).timeout;
    let mut attempts = 0;
    while shell.ended.is_none() {
        shell.core.on_node_away(shell.now, shell.now, &start("p0"), Departure::Replaced);
        shell.take();
        shell.now = shell.core.next_wakeup().unwrap();
        shell.core.on_wakeup(shell.now);
        shell.take();
        if shell.ended.is_none() {
            shell.answer(Ok(to("p0", "d0")));
            shell.take();
            attempts += 1;
        }
    }
    assert!(matches!(shell.ended, Some(Err(RequestError::TimedOut(_)))) && shell.now == deadline, "{:?}", shell.ended);
    assert!(attempts > 16);
}

#[test]
fn request_leaves_silent_node_except_in_its_last_attempt() {
    let mut shell = Shell::placed(job(4));
    shell.tell(0, first(10));
    for attempt in 0..2 {
        shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::Silent);
        assert!(matches!(shell.take().last(), Some(RequestEffect::Place { .. })));
        assert!(shell.aborted().contains(&("d0".to_owned(), attempt)), "should it come back, it is to stop");
        shell.answer(Ok(to("p1", "d0")));
        shell.tell(attempt + 1, RequestEvent::Prefill(PrefillEvent::Started { queue: MS, cached_tokens: 0 }));
    }
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::Silent);
    assert_eq!((shell.take(), shell.ended.clone()), (vec![], None), "it may come back");
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::GivenUp);
    shell.take();
    assert!(matches!(shell.ended, Some(Err(RequestError::Node { .. }))));
}

#[test]
fn request_fails_if_a_repeated_token_differs() {
    let mut shell = Shell::placed(job(4));
    shell.tell(0, first(10));
    shell.tell(0, token(1, 11, None));
    assert_eq!(shell.tell(0, token(1, 11, None)), [], "a repeat");
    shell.tell(0, token(1, 12, None));
    assert!(matches!(shell.ended, Some(Err(RequestError::Contradicted(_)))));
}

#[test]
fn request_attempts_are_bounded_in_number_and_time() {
    let mut shell = Shell::placed(job(4));
    let begun = RequestEvent::Prefill(PrefillEvent::Started { queue: MS, cached_tokens: 0 });
    for attempt in 0..2 {
        shell.tell(attempt, begun.clone());
        shell.tell(attempt, RequestEvent::Prefill(PrefillEvent::Failed(unavailable())));
        shell.answer(Ok(to("p1", "d1")));
        shell.take();
    }
    shell.tell(2, begun);
    shell.tell(2, RequestEvent::Prefill(PrefillEvent::Failed(unavailable())));
    assert!(matches!(&shell.ended, Some(Err(RequestError::Node { node, .. })) if *node == id("p1")));

    // Nodes that are full will have room; those that are gone may not come back.
    for (kind, patience) in [(ErrorKind::Unavailable, RECOVERY_PATIENCE), (ErrorKind::Overloaded, LIMITS.stall_timeout)]
    {
        let mut shell = Shell::placed(job(4));
        shell.tell(0, RequestEvent::Decode(DecodeEvent::Failed(unavailable())));
        let begun = shell.now;
        let mut looks = 0;
        while shell.ended.is_none() {
            shell.answer(Err(Refusal { kind, ..refusal(None) }));
            if shell.take().is_empty() {
                let due = shell.core.next_wakeup().unwrap();
                shell.pass(due - shell.now);
                looks += 1;
            }
        }
        let ended = matches!(&shell.ended, Some(Err(RequestError::Node { node, .. })) if *node == id("d0"));
        assert!(ended, "its own reason");
        assert_eq!(shell.now - begun, patience);
        assert!((5..30).contains(&looks), "{looks}: less and less often");
    }

    let mut shell = Shell::placed(job(4));
    let invalid = Refused { kind: ErrorKind::Invalid, message: "no".to_owned() };
    shell.tell(0, RequestEvent::Prefill(PrefillEvent::Failed(invalid)));
    assert!(shell.ended.is_some(), "another node has no other answer");
}

#[test]
fn request_waits_in_admission_queue_while_there_may_be_room() {
    let mut shell = Shell::new(job(4));
    shell.take();
    for _ in 0..3 {
        shell.answer(Err(refusal(Some(50 * MS))));
        shell.take();
        assert!(!shell.core.is_admitted() && shell.core.next_wakeup() == Some(shell.now + 50 * MS));
        assert!(shell.pass(49 * MS).is_empty());
        assert!(matches!(shell.pass(MS)[..], [RequestEffect::Place { .. }]));
    }
    shell.answer(Err(refusal(None)));
    shell.take();
    assert_eq!(shell.ended, Some(Err(RequestError::Refused(refusal(None)))));
    let held = shell.effects.iter().filter(|effect| **effect == RequestEffect::Note(RequestNote::Queued)).count();
    assert_eq!(held, 1, "it is told once");

    let mut shell = Shell::new(job(4));
    shell.take();
    shell.answer(Err(refusal(Some(MS))));
    shell.core.on_draining(shell.now);
    shell.take();
    assert_eq!(shell.ended, Some(Err(RequestError::GoingDown)));
}

#[test]
fn first_token_smoothing_keeps_back_later_tokens_too() {
    let mut shell = Shell::new(job(4));
    shell.take();
    let mut paced = to("p0", "d0");
    paced.placement.first_token_delay = 20 * MS;
    shell.answer(Ok(paced));
    shell.tell(0, first(10));
    shell.tell(0, token(1, 11, None));
    assert_eq!((shell.delivered.len(), shell.core.next_wakeup()), (0, Some(shell.now + 20 * MS)));
    shell.pass(20 * MS);
    assert_eq!((shell.delivered.clone(), shell.core.timeline().ttft), (vec![10, 11], 20 * MS));
}

#[test]
fn stalled_request_is_ended_despite_migration_offers() {
    let mut shell = Shell::placed(job(4));
    shell.pass(20_000 * MS);
    shell.tell(0, first(10));
    shell.pass(29_000 * MS);
    shell.tell(0, RequestEvent::MigrationRequested(1));
    assert_eq!(shell.ended, None);
    shell.pass(1_000 * MS);
    assert_eq!(shell.ended, Some(Err(RequestError::Stalled(LIMITS.stall_timeout))));
    assert_eq!(shell.aborted().len(), 2);
}

#[test]
fn request_migrates_once_the_new_decode_node_has_its_blocks() {
    let mut shell = Shell::placed(job(6));
    shell.tell(0, first(10));
    assert!(shell.tell(0, RequestEvent::MigrationRequested(1)).is_empty(), "the prefill node is not done");
    shell.tell(0, handed_off());
    assert!(shell.tell(0, RequestEvent::MigrationRequested(2)).is_empty(), "not all tokens are here");
    let asked = shell.tell(0, RequestEvent::MigrationRequested(1));
    let [RequestEffect::PlaceMigration(question)] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((question.migrated.attempt, question.tokens), (Attempt(1), 4));
    let to_d1 = || Some(MigrationAssignment { to: start("d1"), source: None });
    shell.answer_migration(1, to_d1());
    assert_eq!(submitted(&shell.take()), ["d1"]);
    shell.tell(0, token(1, 11, None));
    shell.tell(1, RequestEvent::Prefill(PrefillEvent::Failed(unavailable())));
    assert_eq!(shell.aborted(), [("d1".to_owned(), 1)], "it stays");
    let asked = shell.tell(0, RequestEvent::MigrationRequested(2));
    assert!(matches!(&asked[..], [RequestEffect::PlaceMigration(question)] if question.exclude == [id("d1")]));
    shell.answer_migration(2, None);
    let asked = shell.tell(0, RequestEvent::MigrationRequested(2));
    assert!(
        matches!(&asked[..], [RequestEffect::PlaceMigration(question)] if question.exclude.is_empty()),
        "asked again"
    );
    shell.answer_migration(3, to_d1());
    shell.take();
    shell.tell(3, RequestEvent::Prefill(PrefillEvent::Fetched(FetchReport { bytes: 5, ..FetchReport::default() })));
    assert_eq!(
        (shell.core.attempt(), shell.core.timeline().migrations, shell.core.timeline().migrated.bytes),
        (Attempt(3), 1, 5)
    );
    assert_eq!(shell.aborted()[1..], [("p0".to_owned(), 0), ("d0".to_owned(), 0)]);
    shell.tell(3, token(2, 12, Some(FinishReason::Stop)));
    assert_eq!((shell.delivered.clone(), shell.ended), (vec![10, 11, 12], Some(Ok(FinishReason::Stop))));
}

#[test]
fn migration_target_goes_on_if_the_source_node_fails() {
    let mut shell = Shell::placed(job(6));
    shell.tell(0, first(10));
    shell.tell(0, handed_off());
    shell.tell(0, RequestEvent::MigrationRequested(1));
    shell.answer_migration(1, Some(MigrationAssignment { to: start("d1"), source: None }));
    shell.take();
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::GivenUp);
    shell.take();
    assert_eq!((shell.core.attempt(), &shell.core.state), (Attempt(1), &State::Decoding));
}

#[test]
fn request_is_not_accepted_if_its_node_is_unreachable() {
    let mut shell = Shell::placed(job(6));
    shell.core.on_unreachable(shell.now, &id("p0"));
    let asked = shell.take();
    assert!(
        matches!(asked.last(), Some(RequestEffect::Place { key, exclude, .. }) if key.attempt == Attempt(0) && *exclude == [id("p0")])
    );
    assert!(!shell.core.is_admitted());
    shell.answer(Err(refusal(None)));
    shell.take();
    assert!(matches!(shell.ended, Some(Err(RequestError::Refused(_)))));
}

#[test]
fn node_loss_from_before_the_placement_is_ignored() {
    let mut shell = Shell::placed(job(6));
    shell.core.on_node_away(shell.now, shell.now - MS, &start("d0"), Departure::GivenUp);
    assert_eq!(shell.take(), []);
}

#[test]
fn refused_grant_is_reselected_at_another_decode_node() {
    let mut shell = Shell::placed(job(6));
    let asked = shell.tell(0, RequestEvent::Prefill(PrefillEvent::GrantRefused(unavailable())));
    assert!(matches!(&asked[..], [RequestEffect::AskReselect { from, .. }] if *from == id("d0")));
    let target = to("p0", "d1").target;
    shell.answer_reselect(0, "d0", target);
    assert!(
        matches!(&shell.take()[..], [RequestEffect::Note(_), RequestEffect::Reselect { node, .. }] if *node == id("p0"))
    );
    shell.core.on_node_away(shell.now, shell.now, &start("d0"), Departure::GivenUp);
    assert_eq!(shell.take(), [], "it is not there any more");
    shell.answer_reselect(0, "d1", None);
    assert!(matches!(shell.take().last(), Some(RequestEffect::Place { .. })), "that one is gone");
}

#[test]
fn stop_string_ends_request_and_aborts_its_nodes() {
    let mut shell = Shell::placed(job(6));
    shell.tell(0, first(10));
    shell.tell(0, handed_off());
    shell.tell(0, token(1, 11, None));
    shell.core.on_stopped(shell.now, 2);
    shell.take();
    assert_eq!((shell.ended.clone(), shell.aborted().len()), (Some(Ok(FinishReason::Stop)), 2));
    assert_eq!(shell.core.usage().completion_tokens, 2);
}
