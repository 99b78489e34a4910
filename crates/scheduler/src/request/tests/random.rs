//! Random events, until every event has met every state.

use std::collections::{BTreeMap, VecDeque};

use super::*;

struct Random(baton_types::Random);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0.next_u64() % n
    }
}

fn name(state: &State) -> &'static str {
    match state {
        State::Placing => "placing",
        State::Queued { .. } => "queued",
        State::Prefilling => "prefilling",
        State::Following => "following",
        State::HandingOff => "handing off",
        State::Decoding => "decoding",
        State::Migrating(_) => "migrating",
        State::Recovering(_) => "recovering",
        State::Settling { .. } => "settling",
        State::Ended => "ended",
    }
}

const STATES: [&str; 10] = [
    "placing",
    "queued",
    "prefilling",
    "following",
    "handing off",
    "decoding",
    "migrating",
    "recovering",
    "settling",
    "ended",
];
const EVENTS: [&str; 24] = [
    "started",
    "fetched",
    "first token",
    "last first token",
    "handed off",
    "prefill failed",
    "decode failed",
    "grant refused",
    "token",
    "last token",
    "decode node failed",
    "offered",
    "progress",
    "node lost",
    "prefill node lost",
    "node silent",
    "other node",
    "stopped",
    "abort",
    "closing",
    "draining",
    "client stalled",
    "time",
    "unreachable",
];

/// Whatever comes, a request ends once with nothing charged, and what the client has never changes.
/// Every event meets every state.
#[test]
fn request_ends_once_for_every_event_in_every_state() {
    let mut met = BTreeMap::new();
    for seed in 0..3_000 {
        let mut rng = Random(baton_types::Random::new(seed));
        let mut shell = Shell::new(job(6));
        let mut names = 0;
        let mut late = VecDeque::new();
        // Answers come at once, or later and in order.
        let comes_late = rng.below(3);
        for _ in 0..60 {
            loop {
                let asked: Vec<_> = shell.take().into_iter().filter(RequestEffect::is_question).collect();
                late.extend(asked.into_iter().filter_map(|effect| answer_to(&mut rng, effect, &mut names)));
                let waits = late.is_empty() || comes_late > 0 && rng.below(1 + comes_late) > 0;
                match late.pop_front_if(|_| !waits) {
                    Some(answer) => shell.tell_answer(answer),
                    None => break,
                }
            }
            let event = EVENTS[pick(&mut rng)];
            *met.entry((name(&shell.core.state), event)).or_insert(0) += 1;
            happen(&mut shell, &mut rng, event);
        }
        let is_over = matches!(shell.core.state, State::Ended);
        assert!(is_over || shell.core.next_wakeup().is_some(), "seed {seed}: nothing would end {:?}", shell.core.state);
        match seed % 2 {
            // Whether or not the cluster has been asked what it was to be asked.
            0 => shell.core.on_abort(shell.now),
            // Nothing more is heard but refusals: time alone ends it.
            _ => (0..2_000).for_each(|_| {
                while let Some(effect) = shell.take().into_iter().find(RequestEffect::is_question) {
                    match effect {
                        RequestEffect::Place { .. } => shell.answer(Err(refusal(None))),
                        RequestEffect::PlaceMigration(question) => {
                            shell.answer_migration(question.migrated.attempt.0, None)
                        }
                        _ => {}
                    }
                }
                if let Some(due) = shell.core.next_wakeup() {
                    shell.now = shell.now.max(due);
                    shell.core.on_wakeup(shell.now);
                }
            }),
        }
        assert!(!shell.take().iter().any(RequestEffect::is_question) && shell.ended.is_some(), "seed {seed}");
        assert!((0..).zip(&shell.delivered).all(|(index, token)| *token == 10 + index), "seed {seed}");
    }
    let missing: Vec<_> = STATES
        .into_iter()
        .flat_map(|state| EVENTS.map(|event| (state, event)))
        .filter(|pair| !met.contains_key(pair))
        .collect();
    assert_eq!(missing, [], "pairs of state and event that never met");
}

/// What goes on goes on most of the time.
fn pick(rng: &mut Random) -> usize {
    if rng.below(3) == 0 { rng.below(EVENTS.len() as u64) as usize } else { [2, 4, 8, 11][rng.below(4) as usize] }
}

fn answer_to(rng: &mut Random, effect: RequestEffect, names: &mut u32) -> Option<Answer> {
    *names += 1;
    let node = |role: &str| format!("{role}{names}");
    match effect {
        RequestEffect::Place { key, .. } => {
            let mut placed = to(&node("p"), &node("d"));
            placed.placement.first_token_delay = MS * rng.below(2) as u32;
            let refused = refusal((rng.below(4) > 0).then_some(MS));
            Some(Answer::Placed(key, Box::new(if rng.below(3) > 0 { Ok(placed) } else { Err(refused) })))
        }
        RequestEffect::PlaceMigration(question) => {
            let there = rng.below(4) > 0;
            let to = there.then(|| MigrationAssignment { to: start(&node("d")), source: None });
            Some(Answer::Migrated(question.migrated, to))
        }
        RequestEffect::AskReselect { key, from, refused } => {
            let target = to("p", &node("d")).target.filter(|_| rng.below(4) > 0);
            Some(Answer::Reselected(key, from, refused, target))
        }
        _ => None,
    }
}

fn happen(shell: &mut Shell, rng: &mut Random, event: &str) {
    let index = (shell.delivered.len() as u32 + rng.below(2) as u32).min(5);
    let moving = match &shell.core.state {
        State::Migrating(asked) => Some(asked.clone()),
        _ => None,
    };
    let attempt = match (&moving, rng.below(8)) {
        (_, 0) => Attempt(0),
        (Some(asked), 1..5) => asked.attempt,
        _ => shell.core.attempt(),
    };
    let drawn = shell.core.first_index();
    let event = match event {
        // At once after the submission, or never.
        "unreachable" => {
            let node = shell.core.placement().map_or(id("x"), |placement| placement.prefill.clone());
            return shell.core.on_unreachable(shell.now, &node);
        }
        "started" => RequestEvent::Prefill(PrefillEvent::Started { queue: MS, cached_tokens: 1 }),
        "fetched" => RequestEvent::Prefill(PrefillEvent::Fetched(FetchReport::default())),
        "first token" => first(10 + drawn),
        "last first token" if rng.below(4) == 0 => {
            let logprobs = None;
            let prompt_logprobs = Vec::new();
            let finish = Some(FinishReason::Stop);
            let first = PrefillEvent::FirstToken { token: 10 + drawn, logprobs, prompt_logprobs, finish, compute: MS };
            RequestEvent::Prefill(first)
        }
        "last first token" => token(drawn, 10 + drawn, None),
        "handed off" => handed_off(),
        "prefill failed" if rng.below(4) == 0 => {
            let refused = Refused { kind: ErrorKind::Internal, message: "a bug".into() };
            RequestEvent::Prefill(PrefillEvent::Failed(refused))
        }
        "prefill failed" => RequestEvent::Prefill(PrefillEvent::Failed(unavailable())),
        "decode failed" => RequestEvent::Prefill(PrefillEvent::DecodeFailed(unavailable())),
        "grant refused" => RequestEvent::Prefill(PrefillEvent::GrantRefused(unavailable())),
        "token" => token(index, 10 + index, None),
        "last token" => token(index, 10 + index, Some(FinishReason::Length)),
        "decode node failed" => RequestEvent::Decode(DecodeEvent::Failed(unavailable())),
        "progress" => RequestEvent::Prefill(PrefillEvent::Progress { tokens: 1 }),
        "offered" => RequestEvent::MigrationRequested(shell.delivered.len() as u32),
        "node lost" | "other node" | "prefill node lost" | "node silent" => {
            let placed = shell.core.placement();
            let node = match event {
                "node lost" | "node silent" => placed.and_then(|placement| placement.decode.clone()),
                "other node" => moving.map(|asked| asked.to.node),
                _ => placed.map(|placement| placement.prefill.clone()),
            };
            let node = node.unwrap_or(id("x"));
            if event == "node silent" {
                return shell.core.on_node_away(shell.now, shell.now, &start(node.as_str()), Departure::Silent);
            }
            return shell.core.on_node_away(shell.now, shell.now, &start(node.as_str()), Departure::GivenUp);
        }
        "stopped" => return shell.core.on_stopped(shell.now, shell.delivered.len() as u32),
        "abort" => return shell.core.on_abort(shell.now),
        "closing" => return shell.core.on_closing(shell.now),
        "draining" => {
            let was_queued = matches!(shell.core.state, State::Queued { .. });
            let was_over = shell.core.is_over();
            shell.core.on_draining(shell.now);
            assert!(was_queued || was_over == shell.core.is_over(), "who is served goes on");
            return;
        }
        "client stalled" => return shell.core.on_client_stalled(shell.now, RequestError::Unread(7)),
        _ => {
            let due = shell.core.next_wakeup().unwrap_or(shell.now);
            shell.now = shell.now.max(due);
            return shell.core.on_wakeup(shell.now);
        }
    };
    shell.core.on_event(shell.now, attempt, event);
}
