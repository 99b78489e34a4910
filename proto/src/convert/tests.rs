use proptest::prelude::*;

use super::*;

fn request_key() -> impl Strategy<Value = d::RequestKey> {
    (any::<u128>(), any::<u32>()).prop_map(|(r, a)| d::RequestKey { request: d::RequestId(r), attempt: d::Attempt(a) })
}

fn duration() -> impl Strategy<Value = Duration> {
    // Whole microseconds survive the trip through a double for any time that matters.
    (0u64..1 << 40).prop_map(Duration::from_micros)
}

fn close(a: Duration, b: Duration) -> bool {
    a.abs_diff(b) < Duration::from_nanos(500)
}

fn logprobs() -> impl Strategy<Value = d::TokenLogprobs> {
    let top = prop::collection::vec((any::<u32>(), -50.0f32..0.0), 0..5);
    (prop::option::of(-50.0f32..0.0), top).prop_map(|(logprob, top)| d::TokenLogprobs {
        logprob,
        top: top.into_iter().map(|(token, logprob)| d::TopLogprob { token, logprob }).collect(),
    })
}

fn finish() -> impl Strategy<Value = Option<d::FinishReason>> {
    prop_oneof![Just(None), Just(Some(d::FinishReason::Stop)), Just(Some(d::FinishReason::Length))]
}

fn sampling() -> impl Strategy<Value = d::SamplingParams> {
    (
        0.0f32..2.0,
        any::<u32>(),
        0.01f32..=1.0,
        any::<u64>(),
        1u32..,
        prop::collection::vec(any::<u32>(), 0..4),
        prop::option::of(0u32..=20),
        (prop::collection::vec((any::<u32>(), -100.0f32..=100.0), 0..4), any::<u32>()),
        (
            prop::collection::vec(prop::collection::vec(any::<u32>(), 1..4), 0..4),
            prop::option::of("[a-z]{1,8}".prop_map(Into::into)),
        ),
    )
        .prop_map(|(temperature, top_k, top_p, seed, max_tokens, stop_token_ids, logprobs, biased, formed)| {
            let ((logit_bias, min_tokens), (bad_words, grammar)) = (biased, formed);
            d::SamplingParams {
                temperature,
                top_k,
                top_p,
                seed,
                max_tokens,
                stop_token_ids,
                logit_bias,
                min_tokens,
                bad_words,
                grammar,
                logprobs,
                ..Default::default()
            }
        })
}

proptest! {
    #[test]
    fn request_keys_round_trip(k in request_key()) {
        prop_assert_eq!(d::RequestKey::try_from(w::RequestKey::from(k)).unwrap(), k);
    }

    #[test]
    fn sampling_parameters_round_trip(s in sampling()) {
        prop_assert_eq!(d::SamplingParams::try_from(w::NodeSampling::from(&s)).unwrap(), s);
    }

    #[test]
    fn prefill_jobs_round_trip(k in request_key(), tokens in prop::collection::vec(any::<u32>(), 1..50), s in sampling(), has_target: bool, salt: Vec<u8>) {
        let target = d::DecodeTarget {
            node: d::NodeId::new("decode-0").unwrap(),
            generation: d::Generation(9),
            address: "http://127.0.0.1:1".into(),
            tbt: (k.attempt.0 % 2 == 0).then_some(Duration::from_millis(125)),
        };
        let lost = d::NodeStart { node: target.node.clone(), generation: target.generation };
        prop_assert_eq!(w::NodeLostCommand::new(&lost.node, lost.generation).into_domain().unwrap(), lost);
        let reselect = d::Reselect { key: k, decode: target.clone() };
        prop_assert_eq!(d::Reselect::try_from(w::ReselectCommand::from(&reselect)).unwrap(), reselect);
        let source = d::FetchSource {
            node: d::NodeId::new("decode-1").unwrap(),
            generation: d::Generation(3),
            address: "http://127.0.0.1:2".into(),
            tokens: 4096,
        };
        let job = d::PrefillJob {
            fetch: (!has_target).then_some(source),
            key: k,
            conductor: d::ConductorId(5),
            output_tokens: tokens.len() as u32 / 2,
            is_migration: k.attempt.0 % 2 == 1,
            partial_prefill_tokens: tokens.len() as u32 / 3,
            tokens: tokens.into(),
            sampling: Arc::new(s),
            decode: has_target.then_some(target),
            salt: salt.into(),
            terms: d::QueueOrdering { priority: -3, patience: Duration::from_millis(1500), max_overtaken: Duration::from_secs(600), timeout: Duration::from_secs(60), compute: Duration::from_millis(250) },
        };
        prop_assert_eq!(w::PrefillJob::from(&job).into_domain(d::ConductorId(5)).unwrap(), job);
    }

    #[test]
    fn first_token_events_round_trip(k in request_key(), token: u32, l in prop::option::of(logprobs()), p in prop::collection::vec(logprobs(), 0..4), f in finish(), c in duration()) {
        let event = d::PrefillEvent::FirstToken { token, logprobs: l, prompt_logprobs: p, finish: f, compute: c };
        let (key, back) = w::PrefillEvent::from_domain(k, &event).into_domain().unwrap();
        prop_assert_eq!(key, k);
        let (d::PrefillEvent::FirstToken { compute: c1, .. }, mut same) = (&back, back.clone()) else { panic!("{back:?}") };
        prop_assert!(close(*c1, c));
        if let d::PrefillEvent::FirstToken { compute, .. } = &mut same { *compute = c; }
        prop_assert_eq!(same, event);
    }

    #[test]
    fn unreadable_event_fails_its_request(k in request_key(), seconds in prop_oneof![Just(f64::NAN), Just(-1.0)]) {
        use w::{decode_event, prefill_event};
        let started = prefill_event::Event::Started(w::PrefillStarted { queue_s: seconds, cached_tokens: 0 });
        for event in [None, Some(started)] {
            let (key, event) = w::PrefillEvent { key: Some(k.into()), event }.into_domain().unwrap();
            let failed = matches!(event, d::PrefillEvent::Failed(d::Refused { kind: d::ErrorKind::Internal, .. }));
            prop_assert!(key == k && failed);
        }
        let token = w::DecodedToken { queue_s: Some(seconds), ..Default::default() };
        for event in [None, Some(decode_event::Event::Token(token))] {
            let (key, event) = w::DecodeEvent { key: Some(k.into()), event }.into_domain().unwrap();
            prop_assert!(key == k && matches!(event, d::DecodeEvent::Failed(_)));
        }
        let of_nobody = w::DecodeEvent { key: None, event: None }.into_domain();
        prop_assert!(of_nobody.is_err());
    }

    #[test]
    fn fetch_reports_round_trip(k in request_key(), tokens in 0..=MAX_COUNT, bytes in 0..=MAX_TOTAL, millis in 0u64..1 << 30, fails: bool) {
        let failure = fails.then(|| d::Refused { kind: d::ErrorKind::Unavailable, message: "gone".into() });
        let elapsed = Duration::from_millis(millis);
        let event = d::PrefillEvent::Fetched(d::FetchReport { tokens, bytes, transport: "shm".into(), elapsed, failure });
        prop_assert_eq!(w::PrefillEvent::from_domain(k, &event).into_domain().unwrap(), (k, event));
    }

    #[test]
    fn decoded_tokens_round_trip(k in request_key(), index: u32, token: u32, l in prop::option::of(logprobs()), f in finish()) {
        let event = d::DecodeEvent::Token { index, token, logprobs: l, finish: f, queue: None };
        prop_assert_eq!(w::DecodeEvent::from_domain(k, &event).into_domain().unwrap(), (k, event));
    }

    #[test]
    fn block_hashes_round_trip(hashes in prop::collection::vec(any::<[u8; 16]>(), 0..20)) {
        let hashes: Vec<_> = hashes.into_iter().map(d::BlockHash).collect();
        prop_assert_eq!(&*hashes_from_bytes("f", &hashes_to_bytes(&hashes)).unwrap(), &hashes[..]);
    }

    #[test]
    fn any_bytes_decode_without_panic(bytes: Vec<u8>) {
        use prost::Message;
        if let Ok(info) = w::NodeInfo::decode(&bytes[..]) { let _ = d::NodeInfo::try_from(info); }
        if let Ok(h) = w::HandoffRequest::decode(&bytes[..]) { let _ = d::Handoff::try_from(h); }
        if let Ok(g) = w::GrantRequest::decode(&bytes[..]) { let _ = d::GrantRequest::try_from(g); }
        if let Ok(l) = w::LeaseRequest::decode(&bytes[..]) { let _ = d::LeaseRequest::try_from(l); }
        if let Ok(l) = w::ReleaseLeaseRequest::decode(&bytes[..]) { let _ = d::LeaseRelease::try_from(l); }
    }
}

#[test]
fn invalid_message_is_refused_by_field() {
    let layout = w::KvLayout { model_fingerprint: "1".into(), dtype: "f8".into(), ..Default::default() };
    assert_eq!(d::KvLayout::try_from(layout).unwrap_err().field, "layout.num_layers");
    let job = w::PrefillJob {
        key: Some(w::RequestKey { request_id: "zz".into(), attempt: 0 }),
        tokens: vec![1],
        ..Default::default()
    };
    assert_eq!(job.into_domain(d::ConductorId(0)).unwrap_err().field, "request_id");
    assert_eq!(hashes_from_bytes("block_hashes", &[0; 17]).unwrap_err().field, "block_hashes");
    let nan = w::KvTransfer { seconds: f64::NAN, ..Default::default() };
    assert_eq!(d::KvTransfer::try_from(nan).unwrap_err().field, "kv_transfer.seconds");
}

#[test]
fn lease_release_names_its_reader() {
    let unsaid = w::ReleaseLeaseRequest { lease: 7, ..Default::default() };
    assert_eq!(d::LeaseRelease::try_from(unsaid.clone()).unwrap_err().field, "reader_node");
    let incomplete = w::ReleaseLeaseRequest { reader_node: "p0".into(), ..unsaid.clone() };
    assert_eq!(d::LeaseRelease::try_from(incomplete).unwrap_err().field, "reader_generation");
    let generation = d::Generation(5);
    let complete =
        w::ReleaseLeaseRequest { reader_node: "p0".into(), reader_generation: generation.to_string(), ..unsaid };
    let reader = Some(d::NodeStart { node: d::NodeId::new("p0").unwrap(), generation });
    assert_eq!(d::LeaseRelease::try_from(complete), Ok(d::LeaseRelease { lease: d::GrantId(7), reader }));
}

#[test]
fn other_protocol_version_is_refused() {
    assert!(crate::check_protocol_version(crate::PROTOCOL_VERSION).is_ok());
    assert!(crate::check_protocol_version(crate::PROTOCOL_VERSION + 1).is_err());
    assert!(crate::check_protocol_version(0).is_err());
}

#[test]
fn out_of_range_numbers_are_refused_by_field() {
    fn field<T: std::fmt::Debug>(result: Result<T, InvalidMessage>) -> &'static str {
        result.unwrap_err().field
    }
    let load = w::Load::default;
    assert!(d::Load::try_from(load()).is_ok());
    assert_eq!(field(d::Load::try_from(w::Load { blocks_used: u32::MAX, ..load() })), "blocks_used");
    assert_eq!(field(d::Load::try_from(w::Load { queued_tokens: u64::MAX, ..load() })), "queued_tokens");
    let step = Some(w::StepProgress { elapsed_s: 1.0, left_s: 1e19 });
    assert_eq!(field(d::Load::try_from(w::Load { step, ..load() })), "step.left_s");

    let layout = w::KvLayout {
        model_fingerprint: d::ModelFingerprint(1).to_string(),
        num_layers: MAX_COUNT,
        num_kv_heads: MAX_COUNT,
        head_dim: 1,
        block_tokens: 1,
        dtype: "f16".into(),
        num_blocks: 1,
    };
    assert!(d::KvLayout::try_from(layout.clone()).is_ok());
    assert_eq!(field(d::KvLayout::try_from(w::KvLayout { head_dim: 2, ..layout })), "layout");

    let profile = w::NodeProfile::default;
    let negative = w::NodeProfile { decode_base: -1.0, prefill_base: f64::NAN, ..profile() };
    assert_eq!(d::NodeProfile::try_from(negative).unwrap(), d::NodeProfile::default());
    let slow = w::NodeProfile { decode_base: 1e154, ..profile() };
    assert_eq!(field(d::NodeProfile::try_from(slow)), "profile.decode_base");
    let large = w::NodeProfile { chunk_tokens: u32::MAX, ..profile() };
    assert_eq!(field(d::NodeProfile::try_from(large)), "profile.chunk_tokens");

    assert!(Step::of(4096, 1 << 40, 0.5).is_ok());
    assert_eq!(field(Step::of(u32::MAX, 1, 0.5)), "step.rows");
    assert_eq!(field(Step::of(1, u64::MAX, 0.5)), "step.attended_tokens");
    for seconds in [f64::NAN, f64::INFINITY, -1.0, 1e308] {
        assert_eq!(field(Step::of(1, 1, seconds)), "step.seconds");
    }
    let transfer = w::KvTransfer { bytes: u64::MAX, ..w::KvTransfer::default() };
    assert_eq!(field(d::KvTransfer::try_from(transfer)), "kv_transfer.bytes");
    assert_eq!(limit("tbt_s", 1e300), Ok(LONGEST));
    assert_eq!(field(limit("tbt_s", f64::NAN)), "tbt_s");
}

#[test]
fn texts_of_messages_are_bounded_by_field() {
    let long = || "x".repeat(32 << 20);
    let node = |change: fn(&mut w::NodeInfo, String)| {
        let layout = w::KvLayout {
            model_fingerprint: "1".into(),
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 1,
            block_tokens: 1,
            dtype: "f16".into(),
            num_blocks: 1,
        };
        let mut node = w::NodeInfo {
            name: "p0".into(),
            role: "prefill".into(),
            generation: "1".into(),
            vocab_size: 1,
            context_length: 1,
            layout: Some(layout),
            profile: Some(w::NodeProfile::default()),
            ..w::NodeInfo::default()
        };
        assert!(d::NodeInfo::try_from(node.clone()).is_ok());
        change(&mut node, long());
        d::NodeInfo::try_from(node).unwrap_err().field
    };
    assert_eq!(node(|node, text| node.address = text), "address");
    assert_eq!(node(|node, text| node.model = text), "model");
    assert_eq!(node(|node, text| node.kv_class = text), "kv_class");
    assert_eq!(node(|node, text| node.vocabulary = text), "vocabulary");
    let target = w::DecodeTarget { node: "d0".into(), generation: "1".into(), address: long(), tbt_s: None };
    assert_eq!(d::DecodeTarget::try_from(target).unwrap_err().field, "decode.address");
    let source = w::FetchSource { node: "d0".into(), generation: "1".into(), address: long(), tokens: 1 };
    assert_eq!(d::FetchSource::try_from(source).unwrap_err().field, "fetch.address");
    let transfer = w::KvTransfer { transport: long(), ..w::KvTransfer::default() };
    assert_eq!(d::KvTransfer::try_from(transfer).unwrap_err().field, "kv_transfer.transport");
    let fetched = w::PrefixFetched { transport: long(), ..w::PrefixFetched::default() };
    assert_eq!(d::FetchReport::try_from(fetched).unwrap_err().field, "fetched.transport");
    let refused = d::Refused::from(w::Failure { kind: "internal".into(), message: "é".repeat(1 << 20) });
    assert_eq!(refused.message.len(), MAX_MESSAGE);
    let finish = w::FirstToken { finish_reason: long(), ..w::FirstToken::default() };
    let event = Some(w::prefill_event::Event::FirstToken(finish));
    let key = Some(w::RequestKey { request_id: "1".into(), attempt: 0 });
    let (_, event) = w::PrefillEvent { key, event }.into_domain().unwrap();
    assert!(matches!(event, d::PrefillEvent::Failed(refused) if refused.message.len() < 2 * MAX_MESSAGE));
    let sampling = d::SamplingParams { stop_token_ids: vec![7; 1 << 20], ..d::SamplingParams::default() };
    let sampling = w::NodeSampling::from(&sampling);
    assert_eq!(d::SamplingParams::try_from(sampling).unwrap_err().field, "stop_token_ids");
    let top = vec![w::TopLogprob::default(); 1 << 20];
    assert_eq!(d::TokenLogprobs::from(w::TokenLogprobs { top, ..Default::default() }).top.len(), 20);
}
