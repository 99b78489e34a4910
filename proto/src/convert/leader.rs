//! What conductors ask and tell each other.

use std::time::Duration;

use baton_types as d;
use baton_types::{Assignment, LedgerEntry, NodeId, Objective, RequestKey, Tbt, Ttft};

use super::{
    InvalidMessage, at_most, count, generation, hashes_from_bytes, hashes_to_bytes, key, limit, node_id, parse,
};
use super::{required, seconds, total};
use crate::v1 as w;
use crate::v1::follower_message::Message;
use crate::v1::leader_message::Message as LeaderReply;
use crate::v1::ledger_update::Entry;
use crate::v1::place_answer::Answer;
use crate::{PROTOCOL_VERSION, check_protocol_version};

impl From<&d::ToLeader> for w::FollowerMessage {
    fn from(message: &d::ToLeader) -> Self {
        let message = match message {
            d::ToLeader::Greet { conductor, attempts } => Message::Greet(w::Greet {
                protocol_version: PROTOCOL_VERSION,
                conductor_id: conductor.to_string(),
                attempts: attempts.iter().map(declared_to_wire).collect(),
            }),
            d::ToLeader::Ask(d::Question::Place(question)) => Message::Place(question_to_wire(question)),
            d::ToLeader::Ask(d::Question::Explain(question)) => Message::Explain(question_to_wire(question)),
            d::ToLeader::Ask(d::Question::Reselect { key, from }) => {
                Message::Reselect(w::ReselectQuestion { key: Some((*key).into()), from_node: from.to_string() })
            }
            d::ToLeader::Ask(d::Question::Migrate(question)) => Message::Migrate(migration_question_to_wire(question)),
            d::ToLeader::LedgerUpdate(key, entry) => Message::Update(ledger_update_to_wire(*key, entry)),
        };
        Self { message: Some(message) }
    }
}

impl TryFrom<w::FollowerMessage> for d::ToLeader {
    type Error = InvalidMessage;

    fn try_from(message: w::FollowerMessage) -> Result<Self, Self::Error> {
        Ok(match required("message", message.message)? {
            Message::Greet(greet) => {
                check_protocol_version(greet.protocol_version)?;
                Self::Greet {
                    conductor: parse("conductor_id", &greet.conductor_id)?,
                    attempts: greet.attempts.into_iter().map(declared).collect::<Result<_, _>>()?,
                }
            }
            Message::Place(question) => Self::Ask(d::Question::Place(place_question(question)?)),
            Message::Explain(question) => Self::Ask(d::Question::Explain(place_question(question)?)),
            Message::Reselect(question) => Self::Ask(d::Question::Reselect {
                key: key(question.key)?,
                from: node_id("from_node", &question.from_node)?,
            }),
            Message::Migrate(question) => Self::Ask(d::Question::Migrate(migration_question(question)?)),
            Message::Update(entry) => {
                let (key, entry) = ledger_update(entry)?;
                Self::LedgerUpdate(key, entry)
            }
        })
    }
}

impl From<d::FromLeader<w::ExplainResponse>> for w::LeaderMessage {
    fn from(message: d::FromLeader<w::ExplainResponse>) -> Self {
        let message = match message {
            d::FromLeader::Greeted { term } => LeaderReply::Greeted(w::Greeted { term }),
            d::FromLeader::Placed { key, placed, why } => LeaderReply::Placed(w::PlaceAnswer {
                key: Some(key.into()),
                answer: Some(answer_to_wire(&placed)),
                explanation: why,
            }),
            d::FromLeader::Reselected(key, to) => LeaderReply::Reselected(w::ReselectAnswer {
                key: Some(key.into()),
                decode: to.as_ref().map(Into::into),
            }),
            d::FromLeader::Migrated(migrated, to) => LeaderReply::Migrated(migration_to_wire(migrated, to.as_ref())),
            d::FromLeader::Explained(key, explanation) => {
                LeaderReply::Explained(w::ExplainAnswer { key: Some(key.into()), explanation })
            }
        };
        Self { message: Some(message) }
    }
}

impl TryFrom<w::LeaderMessage> for d::FromLeader<w::ExplainResponse> {
    type Error = InvalidMessage;

    fn try_from(message: w::LeaderMessage) -> Result<Self, Self::Error> {
        Ok(match required("message", message.message)? {
            LeaderReply::Greeted(greeted) => Self::Greeted { term: greeted.term },
            LeaderReply::Placed(of) => {
                Self::Placed { key: key(of.key)?, placed: Box::new(answer(of.answer)?), why: of.explanation }
            }
            LeaderReply::Reselected(to) => {
                Self::Reselected(key(to.key)?, to.decode.map(TryInto::try_into).transpose()?)
            }
            LeaderReply::Migrated(answer) => {
                let (key, to) = migrated(answer)?;
                Self::Migrated(key, to)
            }
            LeaderReply::Explained(told) => Self::Explained(key(told.key)?, told.explanation),
        })
    }
}

fn names(nodes: &[NodeId]) -> Vec<String> {
    nodes.iter().map(ToString::to_string).collect()
}

/// Most nodes that a question names: a request has few attempts.
const MAX_NODES: usize = 256;

fn nodes(field: &'static str, names: &[String]) -> Result<Vec<NodeId>, InvalidMessage> {
    at_most(field, names.len(), MAX_NODES)?;
    names.iter().map(|name| node_id(field, name)).collect()
}

fn time(time: Option<Duration>) -> Option<f64> {
    time.map(|time| time.as_secs_f64())
}

fn start_to_wire(start: &d::NodeStart) -> w::NodeStart {
    w::NodeStart { node: start.node.to_string(), generation: start.generation.to_string() }
}

fn start(field: &'static str, start: w::NodeStart) -> Result<d::NodeStart, InvalidMessage> {
    Ok(d::NodeStart { node: node_id(field, &start.node)?, generation: generation(field, &start.generation)? })
}

/// A number that may be anything but not a number.
fn finite(field: &'static str, value: f64) -> Result<f64, InvalidMessage> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(InvalidMessage { field, found: value.to_string() })
}

fn declared_to_wire(declared: &d::Declared) -> w::DeclaredAttempt {
    w::DeclaredAttempt {
        key: Some(declared.key.into()),
        placed_ago_s: declared.placed_ago.as_secs_f64(),
        ttft_s: declared.ttft.as_secs_f64(),
        prefill: declared.prefill.as_ref().map(|prefill| w::DeclaredPrefill {
            node: Some(start_to_wire(&prefill.node)),
            queue: Some((&prefill.terms).into()),
            priority: prefill.terms.priority,
            tokens: prefill.tokens,
        }),
        decode: declared.decode.as_ref().map(start_to_wire),
        prompt_tokens: declared.prompt_tokens,
        max_tokens: declared.max_tokens,
        tbt_s: time(declared.tbt),
        first_token_ago_s: time(declared.first_token_ago),
    }
}

fn declared(attempt: w::DeclaredAttempt) -> Result<d::Declared, InvalidMessage> {
    let prefill = |prefill: w::DeclaredPrefill| {
        Ok(d::DeclaredPrefill {
            node: start("attempts.prefill.node", required("attempts.prefill.node", prefill.node)?)?,
            terms: required("attempts.prefill.queue", prefill.queue)?.into_domain(prefill.priority)?,
            tokens: count("attempts.prefill.tokens", prefill.tokens)?,
        })
    };
    Ok(d::Declared {
        key: key(attempt.key)?,
        placed_ago: seconds("attempts.placed_ago_s", attempt.placed_ago_s)?,
        ttft: seconds("attempts.ttft_s", attempt.ttft_s)?,
        prefill: attempt.prefill.map(prefill).transpose()?,
        decode: attempt.decode.map(|decode| start("attempts.decode", decode)).transpose()?,
        prompt_tokens: count("attempts.prompt_tokens", attempt.prompt_tokens)?,
        max_tokens: count("attempts.max_tokens", attempt.max_tokens)?,
        tbt: attempt.tbt_s.map(|tbt| limit("attempts.tbt_s", tbt)).transpose()?,
        first_token_ago: attempt.first_token_ago_s.map(|ago| seconds("attempts.first_token_ago_s", ago)).transpose()?,
    })
}

fn question_to_wire(request: &d::PlaceQuestion) -> w::PlaceQuestion {
    w::PlaceQuestion {
        key: Some(request.key.into()),
        prompt_tokens: request.prompt_tokens,
        block_hashes: hashes_to_bytes(&request.block_hashes),
        max_tokens: request.max_tokens,
        wants_decode: request.wants_decode,
        ttft_slo_s: time(request.slo.ttft.map(|Ttft(limit)| limit)),
        tbt_slo_s: time(request.slo.tbt.map(|Tbt(limit)| limit)),
        waited_s: request.waited.as_secs_f64(),
        priority: request.priority,
        bypass_cache: request.bypass_cache,
        exclude: names(&request.exclude),
        first_completion_nodes: names(&request.first_completion_nodes),
        output_tokens: request.output_tokens,
        is_admitted: request.is_admitted,
    }
}

fn place_question(question: w::PlaceQuestion) -> Result<d::PlaceQuestion, InvalidMessage> {
    let ttft = question.ttft_slo_s.map(|limit_s| limit("ttft_slo_s", limit_s)).transpose()?;
    let tbt = question.tbt_slo_s.map(|limit_s| limit("tbt_slo_s", limit_s)).transpose()?;
    let prompt_tokens = count("prompt_tokens", question.prompt_tokens)?;
    let output_tokens = question.output_tokens;
    if output_tokens >= prompt_tokens.max(1) {
        let found = format!("{output_tokens} of {prompt_tokens} tokens, but there must be a prompt");
        return Err(InvalidMessage { field: "output_tokens", found });
    }
    Ok(d::PlaceQuestion {
        key: key(question.key)?,
        prompt_tokens,
        block_hashes: hashes_from_bytes("block_hashes", &question.block_hashes)?,
        max_tokens: count("max_tokens", question.max_tokens)?,
        wants_decode: question.wants_decode,
        slo: d::Slo { ttft: ttft.map(Ttft), tbt: tbt.map(Tbt) },
        waited: seconds("waited_s", question.waited_s)?,
        priority: question.priority,
        bypass_cache: question.bypass_cache,
        exclude: nodes("exclude", &question.exclude)?,
        first_completion_nodes: nodes("first_completion_nodes", &question.first_completion_nodes)?,
        output_tokens,
        is_admitted: question.is_admitted,
    })
}

fn answer_to_wire(placed: &Result<Assignment, d::Refusal>) -> Answer {
    match placed {
        Ok(to) => Answer::Placed(assignment_to_wire(to)),
        Err(refusal) => Answer::Refused(w::RefusedPlacement {
            failure: Some((&d::Refused { kind: refusal.kind, message: refusal.message.clone() }).into()),
            retry_after_s: time(refusal.retry_after),
            queue_for_s: time(refusal.hold),
            objective: refusal.objective.map(|objective| objective.setting().to_owned()).unwrap_or_default(),
        }),
    }
}

fn assignment_to_wire(to: &Assignment) -> w::PlacedAttempt {
    let (placement, Ttft(ttft)) = (&to.placement, to.placement.predicted_ttft);
    w::PlacedAttempt {
        prefill: placement.prefill.to_string(),
        partial_prefill_tokens: placement.partial_prefill_tokens,
        fetch: placement.fetch.as_ref().map(|fetch| w::PlannedFetch {
            from_node: fetch.from.to_string(),
            tokens: fetch.tokens,
            bytes: fetch.bytes,
        }),
        decode: placement.decode.as_ref().map(ToString::to_string).unwrap_or_default(),
        queue: Some((&placement.terms).into()),
        priority: placement.terms.priority,
        first_token_delay_s: placement.first_token_delay.as_secs_f64(),
        predicted_ttft_s: ttft.as_secs_f64(),
        predicted_tbt_s: time(placement.predicted_tbt.map(|Tbt(tbt)| tbt)),
        matched_tokens: placement.matched_tokens,
        predicted_exposed_s: time(placement.predicted_exposed),
        predicted_output_tokens: placement.predicted_output_tokens,
        target: to.target.as_ref().map(Into::into),
        source: to.source.as_ref().map(Into::into),
        starts: to.starts.iter().map(start_to_wire).collect(),
    }
}

fn answer(answer: Option<Answer>) -> Result<Result<Assignment, d::Refusal>, InvalidMessage> {
    match required("answer", answer)? {
        Answer::Placed(placed) => assignment(placed).map(Ok),
        Answer::Refused(refused) => {
            let d::Refused { kind, message } = required("refused.failure", refused.failure)?.into();
            let retry_after = refused.retry_after_s.map(|after| seconds("refused.retry_after_s", after)).transpose()?;
            let hold = refused.queue_for_s.map(|hold| seconds("refused.queue_for_s", hold)).transpose()?;
            // One that this version does not know is not told of.
            let objective = Objective::ALL.into_iter().find(|objective| objective.setting() == refused.objective);
            Ok(Err(d::Refusal { kind, message, retry_after, hold, objective }))
        }
    }
}

fn assignment(placed: w::PlacedAttempt) -> Result<Assignment, InvalidMessage> {
    let fetch = |fetch: w::PlannedFetch| {
        Ok(d::PrefixFetch {
            from: node_id("placed.fetch.from_node", &fetch.from_node)?,
            tokens: count("placed.fetch.tokens", fetch.tokens)?,
            bytes: total("placed.fetch.bytes", fetch.bytes)?,
        })
    };
    let decode = Some(placed.decode).filter(|decode| !decode.is_empty());
    let tbt = placed.predicted_tbt_s.map(|tbt| seconds("placed.predicted_tbt_s", tbt)).transpose()?;
    let exposed = placed.predicted_exposed_s.map(|time| seconds("placed.predicted_exposed_s", time));
    let placement = d::Placement {
        prefill: node_id("placed.prefill", &placed.prefill)?,
        partial_prefill_tokens: count("placed.partial_prefill_tokens", placed.partial_prefill_tokens)?,
        fetch: placed.fetch.map(fetch).transpose()?,
        decode: decode.map(|decode| node_id("placed.decode", &decode)).transpose()?,
        terms: required("placed.queue", placed.queue)?.into_domain(placed.priority)?,
        first_token_delay: seconds("placed.first_token_delay_s", placed.first_token_delay_s)?,
        predicted_ttft: Ttft(seconds("placed.predicted_ttft_s", placed.predicted_ttft_s)?),
        predicted_tbt: tbt.map(Tbt),
        matched_tokens: count("placed.matched_tokens", placed.matched_tokens)?,
        predicted_exposed: exposed.transpose()?,
        predicted_output_tokens: finite("placed.predicted_output_tokens", placed.predicted_output_tokens)?,
    };
    let starts = placed.starts.into_iter().map(|of| start("placed.starts", of)).collect::<Result<Vec<_>, _>>()?;
    if placement.nodes().iter().any(|node| !starts.iter().any(|start| start.node == *node)) {
        return Err(InvalidMessage { field: "placed.starts", found: "one of its nodes is missing".to_owned() });
    }
    Ok(Assignment {
        placement,
        target: placed.target.map(TryInto::try_into).transpose()?,
        source: placed.source.map(TryInto::try_into).transpose()?,
        starts,
    })
}

fn migration_to_wire(migrated: RequestKey, to: Option<&d::MigrationAssignment>) -> w::MigrationAnswer {
    w::MigrationAnswer {
        migrated: Some(migrated.into()),
        to: to.map(|to| start_to_wire(&to.to)),
        source: to.and_then(|to| to.source.as_ref()).map(Into::into),
    }
}

fn migrated(answer: w::MigrationAnswer) -> Result<(RequestKey, Option<d::MigrationAssignment>), InvalidMessage> {
    let source = answer.source.map(TryInto::try_into).transpose()?;
    let to = answer.to.map(|to| start("to", to)).transpose()?;
    Ok((key(answer.migrated)?, to.map(|to| d::MigrationAssignment { to, source })))
}

fn migration_question(question: w::MigrationQuestion) -> Result<d::MigrationQuestion, InvalidMessage> {
    Ok(d::MigrationQuestion {
        key: key(question.key)?,
        migrated: key(question.migrated)?,
        tokens: count("tokens", question.tokens)?,
        exclude: nodes("exclude", &question.exclude)?,
    })
}

fn migration_question_to_wire(question: &d::MigrationQuestion) -> w::MigrationQuestion {
    w::MigrationQuestion {
        key: Some(question.key.into()),
        migrated: Some(question.migrated.into()),
        tokens: question.tokens,
        exclude: names(&question.exclude),
    }
}

fn ledger_update_to_wire(key: RequestKey, entry: &LedgerEntry) -> w::LedgerUpdate {
    let entry = match entry {
        LedgerEntry::Fetched { way, report } => {
            let (from_node, to) = way.as_ref().map(|(from, to)| (from.to_string(), to.to_string())).unwrap_or_default();
            Entry::Fetched(w::FetchReported { from_node, to, report: Some(report.into()) })
        }
        LedgerEntry::Pushed { to, transfer } => {
            Entry::Pushed(w::PushReported { to: to.to_string(), transfer: Some(transfer.into()) })
        }
        LedgerEntry::FirstToken => Entry::FirstToken(true),
        LedgerEntry::Decodes => Entry::FirstToken(false),
        LedgerEntry::Finished { output_tokens } => Entry::Finished(*output_tokens),
        LedgerEntry::Ended => Entry::Ended(true),
    };
    w::LedgerUpdate { key: Some(key.into()), entry: Some(entry) }
}

fn ledger_update(update: w::LedgerUpdate) -> Result<(RequestKey, LedgerEntry), InvalidMessage> {
    let entry = match required("entry", update.entry)? {
        Entry::Fetched(fetched) => {
            let is_between = !fetched.from_node.is_empty() || !fetched.to.is_empty();
            let way = || Ok((node_id("fetched.from_node", &fetched.from_node)?, node_id("fetched.to", &fetched.to)?));
            let way = is_between.then(way).transpose()?;
            LedgerEntry::Fetched { way, report: required("fetched.report", fetched.report)?.try_into()? }
        }
        Entry::Pushed(pushed) => LedgerEntry::Pushed {
            to: node_id("pushed.to", &pushed.to)?,
            transfer: required("pushed.transfer", pushed.transfer)?.try_into()?,
        },
        Entry::FirstToken(true) => LedgerEntry::FirstToken,
        Entry::FirstToken(false) => LedgerEntry::Decodes,
        Entry::Finished(output_tokens) => LedgerEntry::Finished { output_tokens: count("finished", output_tokens)? },
        Entry::Ended(_) => LedgerEntry::Ended,
    };
    Ok((key(update.key)?, entry))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_types::{
        Attempt, BlockHash, ConductorId, Declared, DeclaredPrefill, DecodeTarget, ErrorKind, FetchReport, FetchSource,
        FromLeader, Generation, KvTransfer, MigrationAssignment, MigrationQuestion, PlaceQuestion, Placement,
        PrefixFetch, Question, QueueOrdering, Refusal, RequestId, Slo, ToLeader,
    };

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn request_key() -> RequestKey {
        RequestKey { request: RequestId(7), attempt: Attempt(3) }
    }

    fn question() -> PlaceQuestion {
        PlaceQuestion {
            key: request_key(),
            prompt_tokens: 40,
            block_hashes: Arc::from([BlockHash([3; 16]), BlockHash([5; 16])]),
            max_tokens: 9,
            wants_decode: true,
            slo: Slo { ttft: Some(Ttft(MS)), tbt: Some(Tbt(2 * MS)) },
            waited: 3 * MS,
            priority: -4,
            bypass_cache: true,
            exclude: vec![node("a")],
            first_completion_nodes: vec![node("b")],
            output_tokens: 5,
            is_admitted: true,
        }
    }

    #[test]
    fn leader_questions_round_trip_or_name_the_invalid_field() {
        let key = request_key();
        let migrated = MigrationQuestion { key, migrated: key, tokens: 5, exclude: vec![node("a")] };
        let questions = [
            Question::Place(question()),
            Question::Explain(question()),
            Question::Reselect { key, from: node("d") },
            Question::Migrate(migrated),
        ];
        for question in questions.map(ToLeader::Ask) {
            assert_eq!(ToLeader::try_from(w::FollowerMessage::from(&question)).unwrap(), question);
        }
        let bad = |change: fn(&mut w::PlaceQuestion)| {
            let mut wire = question_to_wire(&question());
            change(&mut wire);
            place_question(wire).unwrap_err().field
        };
        assert_eq!(bad(|wire| wire.key = None), "key");
        assert_eq!(bad(|wire| wire.output_tokens = 40), "output_tokens");
        assert_eq!(bad(|wire| wire.block_hashes = vec![1]), "block_hashes");
        assert_eq!(bad(|wire| wire.waited_s = f64::NAN), "waited_s");
        assert_eq!(bad(|wire| wire.exclude = vec!["two words".into()]), "exclude");
        assert_eq!(ToLeader::try_from(w::FollowerMessage { message: None }).unwrap_err().field, "message");
    }

    #[test]
    fn leader_answers_round_trip() {
        let start = |name: &str| d::NodeStart { node: node(name), generation: Generation(9) };
        let placement = Placement {
            prefill: node("p"),
            partial_prefill_tokens: 3,
            fetch: Some(PrefixFetch { from: node("q"), tokens: 4, bytes: 5 }),
            decode: Some(node("d")),
            terms: QueueOrdering { priority: 6, patience: MS, max_overtaken: MS, timeout: 2 * MS, compute: MS },
            first_token_delay: MS,
            predicted_ttft: Ttft(MS),
            predicted_tbt: Some(Tbt(MS)),
            matched_tokens: 7,
            predicted_exposed: Some(MS),
            predicted_output_tokens: 8.5,
        };
        let address = "h:1".to_owned();
        let generation = Generation(9);
        let key = request_key();
        let target = DecodeTarget { node: node("d"), generation, address: address.clone(), tbt: Some(MS) };
        let source = FetchSource { node: node("q"), generation, address, tokens: 4 };
        let target = Some(target);
        let source = Some(source);
        let starts = vec![start("p"), start("d")];
        let to = Assignment { placement, target: target.clone(), source: source.clone(), starts };
        let refusal = Refusal {
            kind: ErrorKind::Overloaded,
            message: "full".to_owned(),
            retry_after: Some(MS),
            hold: Some(2 * MS),
            objective: Some(Objective::Tbt),
        };
        let why = Some(w::ExplainResponse { prompt_tokens: 8, ..w::ExplainResponse::default() });
        let answers = [
            FromLeader::Greeted { term: 5 },
            FromLeader::Placed { key, placed: Box::new(Ok(to.clone())), why: why.clone() },
            FromLeader::Placed { key, placed: Box::new(Err(refusal)), why: None },
            FromLeader::Reselected(key, target),
            FromLeader::Reselected(key, None),
            FromLeader::Migrated(key, Some(MigrationAssignment { to: start("d"), source })),
            FromLeader::Migrated(key, None),
            FromLeader::Explained(key, why),
        ];
        for answer in answers {
            assert_eq!(FromLeader::try_from(w::LeaderMessage::from(answer.clone())).unwrap(), answer);
        }
        let Answer::Placed(mut placed) = answer_to_wire(&Ok(to)) else { panic!("placed") };
        placed.starts.pop();
        assert_eq!(answer(Some(Answer::Placed(placed))).unwrap_err().field, "placed.starts");
    }

    #[test]
    fn leader_book_entries_and_declared_attempts_round_trip() {
        let report = FetchReport { bytes: 3, elapsed: MS, ..FetchReport::default() };
        let entries = [
            LedgerEntry::Fetched { way: Some((node("a"), node("b"))), report: report.clone() },
            LedgerEntry::Fetched { way: None, report },
            LedgerEntry::Pushed {
                to: node("d"),
                transfer: KvTransfer { bytes: 3, elapsed: MS, ..KvTransfer::default() },
            },
            LedgerEntry::FirstToken,
            LedgerEntry::Decodes,
            LedgerEntry::Finished { output_tokens: 4 },
            LedgerEntry::Ended,
        ];
        for entry in entries {
            let update = ToLeader::LedgerUpdate(request_key(), entry);
            assert_eq!(ToLeader::try_from(w::FollowerMessage::from(&update)).unwrap(), update);
        }
        let start = |name: &str| d::NodeStart { node: node(name), generation: Generation(9) };
        let terms = QueueOrdering { compute: MS, ..QueueOrdering::default() };
        let attempt = Declared {
            key: request_key(),
            placed_ago: MS,
            ttft: 2 * MS,
            prefill: Some(DeclaredPrefill { node: start("p"), terms, tokens: 5 }),
            decode: Some(start("d")),
            prompt_tokens: 8,
            max_tokens: 9,
            tbt: Some(MS),
            first_token_ago: None,
        };
        let decoding = Declared { prefill: None, first_token_ago: Some(MS), ..attempt.clone() };
        let greet = ToLeader::Greet { conductor: ConductorId(4), attempts: vec![attempt, decoding.clone()] };
        assert_eq!(ToLeader::try_from(w::FollowerMessage::from(&greet)).unwrap(), greet);
        let wire = w::DeclaredAttempt { placed_ago_s: -1.0, ..declared_to_wire(&decoding) };
        assert_eq!(declared(wire).unwrap_err().field, "attempts.placed_ago_s");
    }
}
