//! Messages of gRPC: what clients, nodes and conductors may send, and what becomes of it.

use baton_proto::{hashes_from_bytes, required, v1 as w};
use baton_types as d;
use prost::Message;

use crate::input::choice;

/// Decodes a message and makes a value of it; what was taken can be told again.
type Read = fn(&[u8]) -> Option<()>;

fn decoded<T: Message + Default>(bytes: &[u8]) -> Option<T> {
    T::decode(bytes).ok()
}

/// What a conductor hears on its session with a node.
fn event(bytes: &[u8]) -> Option<()> {
    use w::node_event::Event;
    match decoded::<w::NodeEvent>(bytes)?.event? {
        Event::Welcome(welcome) => {
            baton_proto::check_protocol_version(welcome.protocol_version).ok()?;
            info(required("node", welcome.node).ok()?)
        }
        Event::Load(load) => {
            let load = d::Load::try_from(load).ok()?;
            let _ = w::Load::from(&load);
            Some(())
        }
        Event::Prefill(event) => {
            let (key, event) = event.into_domain().ok()?;
            w::PrefillEvent::from_domain(key, &event).into_domain().map(drop).ok()
        }
        Event::Decode(events) => {
            for event in events.events {
                let Ok((key, event)) = event.into_domain() else { continue };
                w::DecodeEvent::from_domain(key, &event);
            }
            Some(())
        }
        Event::Kv(events) => events.events.into_iter().try_for_each(|event| d::KvEvent::try_from(event).map(drop)).ok(),
        Event::MigrationRequest(offer) => baton_proto::key(offer.key).map(drop).ok(),
        Event::Transfer(report) => {
            let report = d::TransferReport::try_from(report).ok()?;
            assert!(report.paths.len() <= d::TransferReport::MAX_PATHS);
            Some(())
        }
        Event::Step(_) | Event::LeaderTerm(_) => Some(()),
    }
}

fn info(info: w::NodeInfo) -> Option<()> {
    let info = d::NodeInfo::try_from(info).ok()?;
    let layout = &info.layout;
    layout.check_compatible(layout).expect("a layout fits itself");
    let _ = (layout.fingerprint(), layout.arena_bytes(), w::NodeInfo::from(&info));
    Some(())
}

/// What a node hears on its session with a conductor.
fn command(bytes: &[u8]) -> Option<()> {
    use w::node_command::Command;
    let conductor = d::ConductorId(3);
    match decoded::<w::NodeCommand>(bytes)?.command? {
        Command::Hello(hello) => {
            baton_proto::check_protocol_version(hello.protocol_version).ok()?;
            hello.conductor_id.parse::<d::ConductorId>().map(drop).ok()
        }
        Command::Prefill(job) => {
            let job = job.into_domain(conductor).ok()?;
            let again = w::PrefillJob::from(&job).into_domain(conductor).expect("a job that was taken");
            assert_eq!(again.tokens, job.tokens);
            Some(())
        }
        Command::Abort(key) => d::RequestKey::try_from(key).map(drop).ok(),
        Command::KvSnapshot(_) | Command::ClearCache(_) | Command::Drain(_) | Command::Leader(_) => Some(()),
        Command::ForgetPrefix(forget) => hashes_from_bytes("block_hashes", &forget.block_hashes).map(drop).ok(),
        Command::Settings(settings) => settings.log.parse::<baton_runtime::telemetry::LogFilter>().map(drop).ok(),
        Command::NodeLost(lost) => lost.into_domain().map(drop).ok(),
        Command::Reselect(reselect) => d::Reselect::try_from(reselect).map(drop).ok(),
    }
}

const READS: [Read; 13] = [
    event,
    command,
    |bytes| info(required("node", decoded::<w::RegisterRequest>(bytes)?.node).ok()?),
    |bytes| d::GrantRequest::try_from(decoded::<w::GrantRequest>(bytes)?).map(drop).ok(),
    |bytes| d::LeaseRequest::try_from(decoded::<w::LeaseRequest>(bytes)?).map(drop).ok(),
    |bytes| d::LeaseRelease::try_from(decoded::<w::ReleaseLeaseRequest>(bytes)?).map(drop).ok(),
    |bytes| {
        let handoff = d::Handoff::try_from(decoded::<w::HandoffRequest>(bytes)?).ok()?;
        d::Handoff::try_from(w::HandoffRequest::from(&handoff)).map(drop).ok()
    },
    // What has no conversion of its own here is decoded.
    |bytes| {
        let request = decoded::<w::GenerateRequest>(bytes)?;
        assert_eq!(w::GenerateRequest::decode(&request.encode_to_vec()[..]).as_ref().map(|_| ()), Ok(()));
        Some(())
    },
    |bytes| decoded::<w::GenerateResponse>(bytes).map(drop),
    |bytes| decoded::<w::GrantReply>(bytes).map(drop),
    |bytes| decoded::<w::LeaseReply>(bytes).map(drop),
    |bytes| decoded::<w::ExplainRequest>(bytes).map(drop),
    |bytes| hashes_from_bytes("hashes", bytes).map(drop).ok(),
];

/// The first byte says which message.
pub(super) fn message(input: &[u8]) {
    let (read, bytes) = choice(input, READS.len());
    // A message that is refused is as good as one that is taken.
    let _ = READS[read](bytes);
}

fn key() -> Option<w::RequestKey> {
    Some(w::RequestKey { request_id: d::RequestId(77).to_string(), attempt: 2 })
}

fn generation() -> String {
    d::Generation(9).to_string()
}

pub(super) fn node_info() -> w::NodeInfo {
    let layout = w::KvLayout {
        model_fingerprint: d::ModelFingerprint(5).to_string(),
        num_layers: 4,
        num_kv_heads: 2,
        head_dim: 64,
        block_tokens: 16,
        dtype: "f16".into(),
        num_blocks: 100,
    };
    w::NodeInfo {
        name: "decode-0".into(),
        role: "decode".into(),
        generation: generation(),
        address: "http://127.0.0.1:1".into(),
        model: "m".into(),
        vocab_size: 512,
        context_length: 2048,
        layout: Some(layout),
        profile: Some(w::NodeProfile { decode_base: 0.1, max_running: 8, ..Default::default() }),
        ..Default::default()
    }
}

fn sampling() -> w::NodeSampling {
    w::NodeSampling {
        top_p: 0.9,
        repetition_penalty: 1.0,
        max_tokens: 9,
        stop_token_ids: vec![1, 2],
        logit_bias: vec![w::LogitBias { token_id: 3, bias: -1.0 }],
        bad_words: vec![w::TokenIds { ids: vec![7, 8] }],
        grammar: "start: \"a\"".into(),
        logprobs: Some(3),
        ..Default::default()
    }
}

pub(super) fn commands() -> Vec<w::node_command::Command> {
    use w::node_command::Command;
    let target = w::DecodeTarget {
        node: "decode-0".into(),
        generation: generation(),
        address: "http://127.0.0.1:1".into(),
        tbt_s: Some(0.1),
    };
    let source = w::FetchSource {
        node: "decode-1".into(),
        generation: generation(),
        address: "http://127.0.0.1:2".into(),
        tokens: 64,
    };
    let queue = w::QueueOrdering { overtake_window_s: 1.0, max_overtaken_s: 2.0, timeout_s: 3.0, compute_s: 0.5 };
    let job = w::PrefillJob {
        key: key(),
        tokens: vec![1, 2, 300],
        output_tokens: 1,
        partial_prefill_tokens: 1,
        sampling: Some(sampling()),
        decode: Some(target.clone()),
        fetch: Some(source),
        salt: vec![1],
        queue: Some(queue),
        ..Default::default()
    };
    vec![
        Command::Hello(w::Hello {
            protocol_version: baton_proto::PROTOCOL_VERSION,
            conductor_id: d::ConductorId(5).to_string(),
        }),
        Command::Prefill(job),
        Command::Abort(key().unwrap_or_default()),
        Command::NodeLost(w::NodeLostCommand { node: "decode-0".into(), generation: generation() }),
        Command::Reselect(w::ReselectCommand { key: key(), decode: Some(target) }),
        Command::Settings(w::NodeSettings { version: 2, log: "debug,a=info".into() }),
        Command::Leader(w::KnownLeader { term: 7, denied: u64::MAX }),
    ]
}

fn logprobs() -> w::TokenLogprobs {
    let top = vec![w::TopLogprob { token_id: 1, logprob: -0.5, ..Default::default() }];
    w::TokenLogprobs { logprob: Some(-1.0), top, ..Default::default() }
}

pub(super) fn events() -> Vec<w::node_event::Event> {
    use w::node_event::Event;
    use w::{decode_event, kv_event, prefill_event};
    let failure = || w::Failure { kind: "unavailable".into(), message: "gone".into() };
    let transfer = w::KvTransfer { bytes: 9, transport: "tcp".into(), seconds: 0.1, ..Default::default() };
    let fetched = w::PrefixFetched { tokens: 16, transport: "shm".into(), seconds: 0.1, ..Default::default() };
    let first = w::FirstToken {
        token: 5,
        logprobs: Some(logprobs()),
        prompt_logprobs: vec![logprobs()],
        finish_reason: "stop".into(),
        compute_s: 0.2,
    };
    let prefill = [
        prefill_event::Event::Started(w::PrefillStarted { queue_s: 0.1, cached_tokens: 16 }),
        prefill_event::Event::FirstToken(first),
        prefill_event::Event::Fetched(fetched),
        prefill_event::Event::HandedOff(transfer),
        prefill_event::Event::Failed(failure()),
    ];
    let token =
        w::DecodedToken { index: 1, token: 6, logprobs: Some(logprobs()), queue_s: Some(0.1), ..Default::default() };
    let decode = [decode_event::Event::Token(token), decode_event::Event::Failed(failure())];
    let decode = decode.map(|event| w::DecodeEvent { key: key(), event: Some(event) });
    let kv = [
        kv_event::Event::Stored(w::KvStored { hash: vec![1; 16], parent: vec![2; 16] }),
        kv_event::Event::Removed(vec![3; 16]),
        kv_event::Event::Cleared(true),
    ];
    let kv = kv.map(|event| w::KvEvent { event: Some(event) });
    let path = w::TransferPath {
        node: "decode-0".into(),
        generation: generation(),
        transport: "tcp".into(),
        bytes_per_second: Some(1e9),
        ..Default::default()
    };
    let address = w::TransferAddress { transport: "tcp".into(), address: "[fe80::1]:7200".into() };
    let load = w::Load {
        running: 3,
        blocks_total: 100,
        step: Some(w::StepProgress { elapsed_s: 0.1, left_s: 0.2 }),
        ..Default::default()
    };
    let mut events: Vec<_> =
        prefill.map(|event| Event::Prefill(w::PrefillEvent { key: key(), event: Some(event) })).into();
    events.extend([
        Event::Welcome(w::Welcome { protocol_version: baton_proto::PROTOCOL_VERSION, node: Some(node_info()) }),
        Event::Load(load),
        Event::Decode(w::DecodeEvents { events: decode.into() }),
        Event::Kv(w::KvEvents { events: kv.into(), ..Default::default() }),
        Event::Transfer(w::TransferReport { addresses: vec![address], paths: vec![path] }),
        Event::MigrationRequest(w::MigrationRequest { key: key(), output_tokens: 3 }),
    ]);
    events
}

fn requests() -> Vec<(u8, Vec<u8>)> {
    let prefill_node = "prefill-0".to_owned();
    let block_hashes = vec![7; 48];
    let grant = w::GrantRequest {
        key: key(),
        prefill_node,
        prefill_generation: generation(),
        prompt_tokens: 48,
        block_hashes: block_hashes.clone(),
        max_tokens: 9,
        tbt_s: Some(0.1),
        ..Default::default()
    };
    let reader_node = "prefill-1".to_owned();
    let reader_generation = generation();
    let lease = w::LeaseRequest {
        key: key(),
        reader_node: reader_node.clone(),
        reader_generation: reader_generation.clone(),
        block_hashes,
        ..Default::default()
    };
    let release = w::ReleaseLeaseRequest { lease: 5, reader_node, reader_generation, target_generation: generation() };
    let handoff = w::HandoffRequest {
        key: key(),
        conductor_id: d::ConductorId(5).to_string(),
        grant: 4,
        tokens: vec![1, 2, 3],
        sampling: Some(sampling()),
        expected_bytes: 100,
        ..Default::default()
    };
    let message = w::ChatMessage { role: "user".into(), content: "x".into(), ..Default::default() };
    let prompt = w::MessagesPrompt { messages: vec![message], tools: vec!["{}".into()], ..Default::default() };
    let generate = w::GenerateRequest {
        prompt: Some(w::generate_request::Prompt::Messages(prompt)),
        sampling: Some(w::SamplingParameters { temperature: Some(0.5), ..Default::default() }),
        ..Default::default()
    };
    vec![
        (2, w::RegisterRequest { node: Some(node_info()), ..Default::default() }.encode_to_vec()),
        (3, grant.encode_to_vec()),
        (4, lease.encode_to_vec()),
        (5, release.encode_to_vec()),
        (6, handoff.encode_to_vec()),
        (7, generate.encode_to_vec()),
        (12, vec![3; 32]),
    ]
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let events = events().into_iter().map(|event| (0, w::NodeEvent { event: Some(event) }.encode_to_vec()));
    let commands = commands().into_iter().map(|command| (1, w::NodeCommand { command: Some(command) }.encode_to_vec()));
    let all = events.chain(commands).chain(requests());
    all.map(|(read, bytes)| [&[read][..], &bytes].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proto_message_seeds_are_valid() {
        for seed in seeds() {
            let (read, bytes) = choice(&seed, READS.len());
            assert_eq!(READS[read](bytes), Some(()), "{read}: {bytes:?}");
        }
    }
}
