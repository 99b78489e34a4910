//! What conductors ask and tell each other: `leader.proto`.

use baton_proto::v1 as w;
use baton_types as d;
use prost::Message;

use crate::input::choice;

/// Decodes a message and makes a value of it. What was taken arrives as it was sent.
type Read = fn(&[u8]) -> Option<()>;

/// What a follower says.
fn to_leader(bytes: &[u8]) -> Option<()> {
    let message = d::ToLeader::try_from(w::FollowerMessage::decode(bytes).ok()?).ok()?;
    let again = d::ToLeader::try_from(w::FollowerMessage::from(&message)).expect("what was taken can be told");
    assert_eq!(head(&again), head(&message));
    Some(())
}

/// Times are told in seconds, and rounded: what is compared is not.
fn head(message: &d::ToLeader) -> String {
    match message {
        d::ToLeader::Greet { conductor, attempts } => format!("{conductor}, {} attempts", attempts.len()),
        d::ToLeader::Ask(question) => format!("{:?}", question.key()),
        d::ToLeader::LedgerUpdate(key, entry) => format!("{key:?} {}", entry.name()),
    }
}

/// What the leader says.
fn from_leader(bytes: &[u8]) -> Option<()> {
    let told = d::FromLeader::try_from(w::LeaderMessage::decode(bytes).ok()?).ok()?;
    if let d::FromLeader::Placed { placed, .. } = &told
        && let Ok(to) = &**placed
    {
        let is_known = |node: &d::NodeId| to.starts.iter().any(|start| start.node == *node);
        assert!(to.placement.nodes().iter().all(is_known));
    }
    d::FromLeader::try_from(w::LeaderMessage::from(told)).map(drop).expect("what was taken can be told");
    Some(())
}

const READS: [Read; 2] = [to_leader, from_leader];

/// The first byte says from whom it is.
pub(super) fn message(input: &[u8]) {
    let (read, bytes) = choice(input, READS.len());
    // A message that is refused is as good as one that is taken.
    let _ = READS[read](bytes);
}

fn key() -> Option<w::RequestKey> {
    Some(w::RequestKey { request_id: d::RequestId(77).to_string(), attempt: 2 })
}

fn start(node: &str) -> w::NodeStart {
    w::NodeStart { node: node.into(), generation: d::Generation(9).to_string() }
}

fn queue() -> Option<w::QueueOrdering> {
    Some(w::QueueOrdering { overtake_window_s: 1.0, max_overtaken_s: 2.0, timeout_s: 3.0, compute_s: 0.5 })
}

pub(super) fn from_followers() -> Vec<w::follower_message::Message> {
    use w::follower_message::Message;
    use w::ledger_update::Entry;
    let prefill = w::DeclaredPrefill { node: Some(start("prefill-0")), queue: queue(), priority: -1, tokens: 64 };
    let attempt = w::DeclaredAttempt {
        key: key(),
        placed_ago_s: 0.5,
        ttft_s: 0.1,
        prefill: Some(prefill),
        decode: Some(start("decode-0")),
        prompt_tokens: 64,
        max_tokens: 9,
        tbt_s: Some(0.1),
        first_token_ago_s: None,
    };
    let greet = w::Greet {
        protocol_version: baton_proto::PROTOCOL_VERSION,
        conductor_id: d::ConductorId(5).to_string(),
        attempts: vec![attempt],
    };
    let place = w::PlaceQuestion {
        key: key(),
        prompt_tokens: 64,
        block_hashes: vec![7; 32],
        max_tokens: 9,
        wants_decode: true,
        ttft_slo_s: Some(1.0),
        exclude: vec!["prefill-1".into()],
        ..Default::default()
    };
    let migrated = w::MigrationQuestion { key: key(), migrated: key(), tokens: 70, exclude: vec!["decode-1".into()] };
    let fetched = w::FetchReported {
        from_node: "prefill-0".into(),
        to: "prefill-1".into(),
        report: Some(w::PrefixFetched { tokens: 16, transport: "shm".into(), seconds: 0.1, ..Default::default() }),
    };
    let transfer = w::KvTransfer { bytes: 9, transport: "tcp".into(), seconds: 0.1, ..Default::default() };
    let pushed = w::PushReported { to: "decode-0".into(), transfer: Some(transfer) };
    let entries = [
        Entry::Fetched(fetched),
        Entry::Pushed(pushed),
        Entry::FirstToken(true),
        Entry::Finished(5),
        Entry::Ended(true),
    ];
    let mut messages = vec![
        Message::Greet(greet),
        Message::Place(place.clone()),
        Message::Explain(place),
        Message::Reselect(w::ReselectQuestion { key: key(), from_node: "decode-0".into() }),
        Message::Migrate(migrated),
    ];
    messages.extend(entries.map(|entry| Message::Update(w::LedgerUpdate { key: key(), entry: Some(entry) })));
    messages
}

pub(super) fn from_leaders() -> Vec<w::leader_message::Message> {
    use w::leader_message::Message;
    use w::place_answer::Answer;
    let generation = d::Generation(9).to_string();
    let address = "http://127.0.0.1:1".to_owned();
    let target = w::DecodeTarget {
        node: "decode-0".into(),
        generation: generation.clone(),
        address: address.clone(),
        tbt_s: Some(0.1),
    };
    let source = w::FetchSource { node: "prefill-1".into(), generation, address, tokens: 64 };
    let attempt = w::PlacedAttempt {
        prefill: "prefill-0".into(),
        decode: "decode-0".into(),
        fetch: Some(w::PlannedFetch { from_node: "prefill-1".into(), tokens: 64, bytes: 100 }),
        queue: queue(),
        predicted_tbt_s: Some(0.01),
        target: Some(target.clone()),
        source: Some(source.clone()),
        starts: vec![start("prefill-0"), start("decode-0")],
        ..Default::default()
    };
    let failure = w::Failure { kind: "overloaded".into(), message: "full".into() };
    let refused = w::RefusedPlacement {
        failure: Some(failure),
        retry_after_s: Some(1.0),
        queue_for_s: Some(0.1),
        objective: "tbt_slo_ms".into(),
    };
    let placed = |answer| w::PlaceAnswer { key: key(), answer: Some(answer), explanation: Some(Default::default()) };
    vec![
        Message::Greeted(w::Greeted { term: 7 }),
        Message::Placed(placed(Answer::Placed(attempt))),
        Message::Placed(placed(Answer::Refused(refused))),
        Message::Reselected(w::ReselectAnswer { key: key(), decode: Some(target) }),
        Message::Migrated(w::MigrationAnswer { migrated: key(), to: Some(start("decode-1")), source: Some(source) }),
        Message::Explained(w::ExplainAnswer { key: key(), explanation: Some(Default::default()) }),
    ]
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let from_followers = from_followers().into_iter();
    let from_leaders = from_leaders().into_iter();
    let from_followers =
        from_followers.map(|message| (0, w::FollowerMessage { message: Some(message) }.encode_to_vec()));
    let from_leaders = from_leaders.map(|message| (1, w::LeaderMessage { message: Some(message) }.encode_to_vec()));
    let all = from_followers.chain(from_leaders);
    all.map(|(read, bytes)| [&[read][..], &bytes].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leader_message_seeds_are_valid() {
        for seed in seeds() {
            let (read, bytes) = choice(&seed, READS.len());
            assert_eq!(READS[read](bytes), Some(()), "{read}: {bytes:?}");
        }
    }
}
