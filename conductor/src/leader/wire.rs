//! What conductors ask each other, between wire and domain.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::booked::Entry;
use baton_proto::v1::place_answer::Answer;
use baton_proto::{
    InvalidMessage, count, generation, hashes_from_bytes, hashes_to_bytes, key, limit, node_id, required, seconds, v1,
};
use baton_scheduler::{
    Assignment, BookEntry, Declared, DeclaredPrefill, MoveAssignment, NodeStart, Placement, PlacementRequest,
    PrefixFetch, Refusal,
};
use baton_types::{BlockHash, NodeId, Refused, RequestKey, Slo, Tbt, Ttft};

fn names(nodes: &[NodeId]) -> Vec<String> {
    nodes.iter().map(ToString::to_string).collect()
}

fn nodes(field: &'static str, names: &[String]) -> Result<Vec<NodeId>, InvalidMessage> {
    names.iter().map(|name| node_id(field, name)).collect()
}

fn time(time: Option<Duration>) -> Option<f64> {
    time.map(|time| time.as_secs_f64())
}

fn start_to_wire((node, generation): &NodeStart) -> v1::NodeStart {
    v1::NodeStart { node: node.to_string(), generation: generation.to_string() }
}

fn start(field: &'static str, start: v1::NodeStart) -> Result<NodeStart, InvalidMessage> {
    Ok((node_id(field, &start.node)?, generation(field, &start.generation)?))
}

/// A number that may be anything but not a number.
fn finite(field: &'static str, value: f64) -> Result<f64, InvalidMessage> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(InvalidMessage { field, found: value.to_string() })
}

pub(super) fn declared_to_wire(declared: &Declared) -> v1::DeclaredAttempt {
    v1::DeclaredAttempt {
        key: Some(declared.key.into()),
        placed_ago_s: declared.placed_ago.as_secs_f64(),
        ttft_s: declared.ttft.as_secs_f64(),
        prefill: declared.prefill.as_ref().map(|prefill| v1::DeclaredPrefill {
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

pub(super) fn declared(attempt: v1::DeclaredAttempt) -> Result<Declared, InvalidMessage> {
    let prefill = |prefill: v1::DeclaredPrefill| {
        Ok(DeclaredPrefill {
            node: start("attempts.prefill.node", required("attempts.prefill.node", prefill.node)?)?,
            terms: prefill.queue.unwrap_or_default().into_domain(prefill.priority)?,
            tokens: count("attempts.prefill.tokens", prefill.tokens)?,
        })
    };
    Ok(Declared {
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

pub(super) fn question_to_wire(request: &PlacementRequest<'_>) -> v1::PlaceQuestion {
    v1::PlaceQuestion {
        key: Some(request.key.into()),
        prompt_tokens: request.prompt_tokens,
        block_hashes: hashes_to_bytes(request.block_hashes),
        max_tokens: request.max_tokens,
        wants_decode: request.wants_decode,
        ttft_slo_s: time(request.slo.ttft.map(|Ttft(limit)| limit)),
        tbt_slo_s: time(request.slo.tbt.map(|Tbt(limit)| limit)),
        waited_s: request.waited.as_secs_f64(),
        priority: request.priority,
        bypass_cache: request.bypass_cache,
        exclude: names(request.exclude),
        beside: names(request.beside),
        output_tokens: request.output_tokens,
        alike: names(request.alike),
        accepted: request.accepted,
    }
}

/// Another conductor's question for nodes.
#[derive(Debug)]
pub(super) struct PlaceQuestion {
    key: RequestKey,
    prompt_tokens: u32,
    pub(super) block_hashes: Arc<[BlockHash]>,
    max_tokens: u32,
    wants_decode: bool,
    slo: Slo,
    waited: Duration,
    priority: i32,
    bypass_cache: bool,
    exclude: Vec<NodeId>,
    beside: Vec<NodeId>,
    output_tokens: u32,
    alike: Vec<NodeId>,
    accepted: bool,
}

impl TryFrom<v1::PlaceQuestion> for PlaceQuestion {
    type Error = InvalidMessage;

    fn try_from(question: v1::PlaceQuestion) -> Result<Self, Self::Error> {
        let ttft = question.ttft_slo_s.map(|limit_s| limit("ttft_slo_s", limit_s)).transpose()?;
        let tbt = question.tbt_slo_s.map(|limit_s| limit("tbt_slo_s", limit_s)).transpose()?;
        let (prompt_tokens, output_tokens) = (count("prompt_tokens", question.prompt_tokens)?, question.output_tokens);
        if output_tokens >= prompt_tokens.max(1) {
            let found = format!("{output_tokens} of {prompt_tokens} tokens, but there must be a prompt");
            return Err(InvalidMessage { field: "output_tokens", found });
        }
        Ok(Self {
            key: key(question.key)?,
            prompt_tokens,
            block_hashes: hashes_from_bytes("block_hashes", &question.block_hashes)?,
            max_tokens: count("max_tokens", question.max_tokens)?,
            wants_decode: question.wants_decode,
            slo: Slo { ttft: ttft.map(Ttft), tbt: tbt.map(Tbt) },
            waited: seconds("waited_s", question.waited_s)?,
            priority: question.priority,
            bypass_cache: question.bypass_cache,
            exclude: nodes("exclude", &question.exclude)?,
            beside: nodes("beside", &question.beside)?,
            output_tokens,
            alike: nodes("alike", &question.alike)?,
            accepted: question.accepted,
        })
    }
}

impl PlaceQuestion {
    pub(super) fn request(&self) -> PlacementRequest<'_> {
        PlacementRequest {
            key: self.key,
            prompt_tokens: self.prompt_tokens,
            block_hashes: &self.block_hashes,
            max_tokens: self.max_tokens,
            wants_decode: self.wants_decode,
            slo: self.slo,
            waited: self.waited,
            max_wait: None,
            priority: self.priority,
            bypass_cache: self.bypass_cache,
            exclude: &self.exclude,
            beside: &self.beside,
            output_tokens: self.output_tokens,
            alike: &self.alike,
            accepted: self.accepted,
        }
    }
}

pub(super) fn answer_to_wire(placed: &Result<Assignment, Refusal>) -> Answer {
    match placed {
        Ok(to) => Answer::Placed(assignment_to_wire(to)),
        Err(refusal) => Answer::Refused(v1::RefusedPlacement {
            failure: Some((&Refused { kind: refusal.kind, message: refusal.message.clone() }).into()),
            retry_after_s: time(refusal.retry_after),
            hold_s: time(refusal.hold),
        }),
    }
}

fn assignment_to_wire(to: &Assignment) -> v1::PlacedAttempt {
    let (placement, Ttft(ttft)) = (&to.placement, to.placement.estimated_ttft);
    v1::PlacedAttempt {
        prefill: placement.prefill.to_string(),
        tail_tokens: placement.tail_tokens,
        fetch: placement.fetch.as_ref().map(|fetch| v1::PlannedFetch {
            from: fetch.from.to_string(),
            tokens: fetch.tokens,
            bytes: fetch.bytes,
        }),
        decode: placement.decode.as_ref().map(ToString::to_string).unwrap_or_default(),
        queue: Some((&placement.terms).into()),
        priority: placement.terms.priority,
        pace_s: placement.pace.as_secs_f64(),
        estimated_ttft_s: ttft.as_secs_f64(),
        estimated_tbt_s: time(placement.estimated_tbt.map(|Tbt(tbt)| tbt)),
        matched_tokens: placement.matched_tokens,
        estimated_exposed_s: time(placement.estimated_exposed),
        estimated_output_tokens: placement.estimated_output_tokens,
        target: to.target.as_ref().map(Into::into),
        source: to.source.as_ref().map(Into::into),
        starts: to.starts.iter().map(start_to_wire).collect(),
    }
}

pub(super) fn answer(answer: Option<Answer>) -> Result<Result<Assignment, Refusal>, InvalidMessage> {
    match required("answer", answer)? {
        Answer::Placed(placed) => assignment(placed).map(Ok),
        Answer::Refused(refused) => {
            let Refused { kind, message } = required("refused.failure", refused.failure)?.into();
            let retry_after = refused.retry_after_s.map(|after| seconds("refused.retry_after_s", after)).transpose()?;
            let hold = refused.hold_s.map(|hold| seconds("refused.hold_s", hold)).transpose()?;
            Ok(Err(Refusal { kind, message, retry_after, hold }))
        }
    }
}

fn assignment(placed: v1::PlacedAttempt) -> Result<Assignment, InvalidMessage> {
    let fetch = |fetch: v1::PlannedFetch| {
        Ok(PrefixFetch {
            from: node_id("placed.fetch.from", &fetch.from)?,
            tokens: count("placed.fetch.tokens", fetch.tokens)?,
            bytes: fetch.bytes,
        })
    };
    let decode = Some(placed.decode).filter(|decode| !decode.is_empty());
    let tbt = placed.estimated_tbt_s.map(|tbt| seconds("placed.estimated_tbt_s", tbt)).transpose()?;
    let exposed = placed.estimated_exposed_s.map(|time| seconds("placed.estimated_exposed_s", time));
    let placement = Placement {
        prefill: node_id("placed.prefill", &placed.prefill)?,
        tail_tokens: count("placed.tail_tokens", placed.tail_tokens)?,
        fetch: placed.fetch.map(fetch).transpose()?,
        decode: decode.map(|decode| node_id("placed.decode", &decode)).transpose()?,
        terms: placed.queue.unwrap_or_default().into_domain(placed.priority)?,
        pace: seconds("placed.pace_s", placed.pace_s)?,
        estimated_ttft: Ttft(seconds("placed.estimated_ttft_s", placed.estimated_ttft_s)?),
        estimated_tbt: tbt.map(Tbt),
        matched_tokens: count("placed.matched_tokens", placed.matched_tokens)?,
        estimated_exposed: exposed.transpose()?,
        estimated_output_tokens: finite("placed.estimated_output_tokens", placed.estimated_output_tokens)?,
    };
    let starts = placed.starts.into_iter().map(|of| start("placed.starts", of)).collect::<Result<Vec<_>, _>>()?;
    if placement.nodes().iter().any(|node| !starts.iter().any(|(name, _)| name == node)) {
        return Err(InvalidMessage { field: "placed.starts", found: "one of its nodes is missing".to_owned() });
    }
    Ok(Assignment {
        placement,
        target: placed.target.map(TryInto::try_into).transpose()?,
        source: placed.source.map(TryInto::try_into).transpose()?,
        starts,
    })
}

pub(super) fn move_to_wire(moved: RequestKey, to: Option<&MoveAssignment>) -> v1::MoveAnswer {
    v1::MoveAnswer {
        moved: Some(moved.into()),
        to: to.map(|to| start_to_wire(&to.to)),
        source: to.and_then(|to| to.source.as_ref()).map(Into::into),
    }
}

pub(super) fn moved(answer: v1::MoveAnswer) -> Result<(RequestKey, Option<MoveAssignment>), InvalidMessage> {
    let source = answer.source.map(TryInto::try_into).transpose()?;
    let to = answer.to.map(|to| start("to", to)).transpose()?;
    Ok((key(answer.moved)?, to.map(|to| MoveAssignment { to, source })))
}

/// Of a question for another node: the attempt, what it goes on as, its tokens, and who is not asked.
type MoveQuestion = ((RequestKey, RequestKey), u32, Vec<NodeId>);

pub(super) fn move_question(question: v1::MoveQuestion) -> Result<MoveQuestion, InvalidMessage> {
    let keys = (key(question.key)?, key(question.moved)?);
    Ok((keys, count("tokens", question.tokens)?, nodes("exclude", &question.exclude)?))
}

pub(super) fn move_question_to_wire(
    (key, moved): (RequestKey, RequestKey),
    tokens: u32,
    exclude: &[NodeId],
) -> v1::MoveQuestion {
    v1::MoveQuestion { key: Some(key.into()), moved: Some(moved.into()), tokens, exclude: names(exclude) }
}

pub(super) fn booked_to_wire(key: RequestKey, entry: &BookEntry) -> v1::Booked {
    let entry = match entry {
        BookEntry::Fetched { way, report } => {
            let (from, to) = way.as_ref().map(|(from, to)| (from.to_string(), to.to_string())).unwrap_or_default();
            Entry::Fetched(v1::FetchBooked { from, to, report: Some(report.into()) })
        }
        BookEntry::Pushed { to, transfer } => {
            Entry::Pushed(v1::PushBooked { to: to.to_string(), transfer: Some(transfer.into()) })
        }
        BookEntry::FirstToken => Entry::FirstToken(true),
        BookEntry::Finished { output_tokens } => Entry::Finished(*output_tokens),
        BookEntry::Ended => Entry::Ended(true),
    };
    v1::Booked { key: Some(key.into()), entry: Some(entry) }
}

pub(super) fn booked(booked: v1::Booked) -> Result<(RequestKey, BookEntry), InvalidMessage> {
    let entry = match required("entry", booked.entry)? {
        Entry::Fetched(fetched) => {
            let is_between = !fetched.from.is_empty() || !fetched.to.is_empty();
            let way = || Ok((node_id("fetched.from", &fetched.from)?, node_id("fetched.to", &fetched.to)?));
            let way = is_between.then(way).transpose()?;
            BookEntry::Fetched { way, report: required("fetched.report", fetched.report)?.try_into()? }
        }
        Entry::Pushed(pushed) => BookEntry::Pushed {
            to: node_id("pushed.to", &pushed.to)?,
            transfer: required("pushed.transfer", pushed.transfer)?.try_into()?,
        },
        Entry::FirstToken(_) => BookEntry::FirstToken,
        Entry::Finished(output_tokens) => BookEntry::Finished { output_tokens: count("finished", output_tokens)? },
        Entry::Ended(_) => BookEntry::Ended,
    };
    Ok((key(booked.key)?, entry))
}

#[cfg(test)]
mod tests {
    use baton_types::{
        Attempt, DecodeTarget, ErrorKind, FetchReport, FetchSource, Generation, KvTransfer, QueueTerms, RequestId,
    };

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn request_key() -> RequestKey {
        RequestKey { request: RequestId(7), attempt: Attempt(3) }
    }

    #[test]
    fn a_question_arrives_as_it_was_asked() {
        let hashes = [BlockHash([3; 16]), BlockHash([5; 16])];
        let (exclude, beside, alike) = ([node("a")], [node("b")], [node("c"), node("d")]);
        let request = PlacementRequest {
            key: request_key(),
            prompt_tokens: 40,
            block_hashes: &hashes,
            max_tokens: 9,
            wants_decode: true,
            slo: Slo { ttft: Some(Ttft(MS)), tbt: Some(Tbt(2 * MS)) },
            waited: 3 * MS,
            max_wait: None,
            priority: -4,
            bypass_cache: true,
            exclude: &exclude,
            beside: &beside,
            output_tokens: 5,
            alike: &alike,
            accepted: true,
        };
        let wire = question_to_wire(&request);
        let question = PlaceQuestion::try_from(wire.clone()).unwrap();
        assert_eq!(format!("{:?}", question.request()), format!("{request:?}"));
        let bad = |change: fn(&mut v1::PlaceQuestion)| {
            let mut wire = wire.clone();
            change(&mut wire);
            PlaceQuestion::try_from(wire).unwrap_err().field
        };
        assert_eq!(bad(|wire| wire.key = None), "key");
        assert_eq!(bad(|wire| wire.output_tokens = 40), "output_tokens");
        assert_eq!(bad(|wire| wire.block_hashes = vec![1]), "block_hashes");
        assert_eq!(bad(|wire| wire.waited_s = f64::NAN), "waited_s");
        assert_eq!(bad(|wire| wire.exclude = vec!["two words".into()]), "exclude");
    }

    #[test]
    fn an_answer_arrives_as_it_was_given() {
        let start = |name: &str| (node(name), Generation(9));
        let placement = Placement {
            prefill: node("p"),
            tail_tokens: 3,
            fetch: Some(PrefixFetch { from: node("q"), tokens: 4, bytes: 5 }),
            decode: Some(node("d")),
            terms: QueueTerms { priority: 6, patience: MS, max_overtaken: MS, timeout: 2 * MS, compute: MS },
            pace: MS,
            estimated_ttft: Ttft(MS),
            estimated_tbt: Some(Tbt(MS)),
            matched_tokens: 7,
            estimated_exposed: Some(MS),
            estimated_output_tokens: 8.5,
        };
        let (address, generation) = ("h:1".to_owned(), Generation(9));
        let target = DecodeTarget { node: node("d"), generation, address: address.clone(), tbt: Some(MS) };
        let source = FetchSource { node: node("q"), generation, address, tokens: 4 };
        let (target, source) = (Some(target), Some(source));
        let to = Assignment { placement, target, source: source.clone(), starts: vec![start("p"), start("d")] };
        let wire = answer_to_wire(&Ok(to.clone()));
        assert_eq!(answer(Some(wire.clone())).unwrap(), Ok(to));
        let Answer::Placed(mut placed) = wire else { panic!("placed") };
        placed.starts.pop();
        assert_eq!(answer(Some(Answer::Placed(placed))).unwrap_err().field, "placed.starts");
        let (kind, message) = (ErrorKind::Overloaded, "full".to_owned());
        let refusal = Refusal { kind, message, retry_after: Some(MS), hold: Some(2 * MS) };
        assert_eq!(answer(Some(answer_to_wire(&Err(refusal.clone())))).unwrap(), Err(refusal));
        let to = MoveAssignment { to: start("d"), source };
        assert_eq!(moved(move_to_wire(request_key(), Some(&to))).unwrap(), (request_key(), Some(to)));
        assert_eq!(moved(move_to_wire(request_key(), None)).unwrap(), (request_key(), None));
    }

    #[test]
    fn what_is_booked_and_declared_arrives() {
        let report = FetchReport { bytes: 3, elapsed: MS, ..FetchReport::default() };
        let entries = [
            BookEntry::Fetched { way: Some((node("a"), node("b"))), report: report.clone() },
            BookEntry::Fetched { way: None, report },
            BookEntry::Pushed {
                to: node("d"),
                transfer: KvTransfer { bytes: 3, elapsed: MS, ..KvTransfer::default() },
            },
            BookEntry::FirstToken,
            BookEntry::Finished { output_tokens: 4 },
            BookEntry::Ended,
        ];
        for entry in entries {
            assert_eq!(booked(booked_to_wire(request_key(), &entry)).unwrap(), (request_key(), entry));
        }
        let start = |name: &str| (node(name), Generation(9));
        let terms = QueueTerms { compute: MS, ..QueueTerms::default() };
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
        assert_eq!(declared(declared_to_wire(&attempt)).unwrap(), attempt);
        let decoding = Declared { prefill: None, first_token_ago: Some(MS), ..attempt };
        assert_eq!(declared(declared_to_wire(&decoding)).unwrap(), decoding);
        let wire = v1::DeclaredAttempt { placed_ago_s: -1.0, ..declared_to_wire(&decoding) };
        assert_eq!(declared(wire).unwrap_err().field, "attempts.placed_ago_s");
    }
}
