//! Two conductors, one of which places for both. Each has fake nodes of its own, of the same names.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_proto::{PROTOCOL_VERSION, v1};
use baton_runtime::ManualClock;
use baton_types::{Attempt, ErrorKind, FetchReport, PrefillEvent, QueueOrdering, Refused, RequestId, RequestKey};
use tokio::task::JoinHandle;
use tonic::Code;

use super::client::request;
use super::node::FakeNode;
use super::world::{World, settings, soon, until};
use crate::leader::{LinkError, follow};

const SETTLE: Duration = Duration::from_millis(500);

/// A conductor that leads, and one that does not.
async fn two(nodes: &[&str]) -> (World, World) {
    let clock = ManualClock::default();
    let leader = World::on(clock.clone(), settings(), nodes).await;
    let other = World::on(clock, settings(), nodes).await;
    other.frontend.step_down();
    (leader, other)
}

impl World {
    /// Follows another one.
    async fn follows(&self, leader: &World) -> JoinHandle<Result<(), LinkError>> {
        let frontend = Arc::clone(&self.frontend);
        let address = leader.addresses.grpc.to_string();
        let link = tokio::spawn(async move { follow(&frontend, &address).await });
        until("it follows", || self.frontend.desk.has_leader().then_some(())).await;
        link
    }

    fn placed(&self) -> usize {
        self.frontend.cluster().placed()
    }

    /// All nodes report so many requests from now on.
    async fn shows(&mut self, running: u32) {
        self.nodes.values_mut().for_each(|node| node.load.running = running);
        self.report().await;
    }

    async fn until_placed(&self, requests: usize) {
        until(&format!("{requests} are placed"), || (self.placed() == requests).then_some(())).await;
    }
}

pub async fn request_of_a_follower_is_placed_by_the_leader() {
    let (leader, mut w) = two(&["p0", "d0"]).await;
    let _link = w.follows(&leader).await;
    let mut answer = w.generate(v1::GenerateRequest { client_request_id: "mine".into(), ..request("hi", 2) }).await;
    let job = w.job().await;
    assert_eq!((leader.placed(), w.placed(), job.decode().as_str()), (1, 0, "d0"));
    w.node("p0").computes(job.key, 'a');
    answer.reads("a").await;
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
    leader.until_placed(0).await;
    let recall = v1::ExplainByIdRequest { request_id: "mine".into() };
    let recalled = soon(w.operator().explain_by_id(recall)).await.unwrap().into_inner();
    let why = recalled.decisions[0].explanation.clone().unwrap();
    let rows = (why.prefill[0].node.as_str(), why.decode[0].node.as_str(), why.prompt_tokens);
    assert_eq!(rows, ("p0", "d0", 3), "the leader's grounds are known where the request is");
}

pub async fn refusal_by_leader_reaches_client_of_follower() {
    let (mut leader, w) = two(&["p0", "d0"]).await;
    let _link = w.follows(&leader).await;
    leader.node("d0").die();
    leader.until_state("d0", "lost").await;
    let status = w.refusal(request("hi", 2)).await;
    assert!(status.code() == Code::Unavailable && status.message().contains("decode"), "{status}");
    assert_eq!((leader.placed(), leader.frontend.cluster().requests_queued()), (0, 0));
}

pub async fn follower_explains_placement_by_state_of_leader() {
    let (mut leader, mut w) = two(&["p0", "d0"]).await;
    let link = w.follows(&leader).await;
    // Only the leader's ledger has it.
    let _answer = leader.generate(request("first", 2)).await;
    leader.job().await;
    let explain = |of: &World| {
        let mut operator = of.operator();
        let asked = v1::ExplainRequest { request: Some(request("second", 2)) };
        tokio::spawn(async move { operator.explain(asked).await.map(tonic::Response::into_inner) })
    };
    let why = soon(explain(&w)).await.unwrap().unwrap();
    assert_eq!((why.prefill[0].pending, why.prompt_tokens), (1, 7), "{why:?}");
    assert_eq!(why, soon(explain(&leader)).await.unwrap().unwrap());
    leader.frontend.step_down();
    soon(link).await.unwrap().unwrap_err();
    let why = explain(&w);
    w.pass_ms(10_500).await;
    let status = soon(why).await.unwrap().unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "no conductor leads: nothing is placed"));
}

pub async fn leader_reselects_and_migrates_for_requests_of_follower() {
    let (mut leader, mut w) = two(&["p0", "d0", "d1"]).await;
    leader.report().await;
    w.report().await;
    let _link = w.follows(&leader).await;
    let mut answer = w.generate(request("a prompt of more than one block of 16", 5)).await;
    let job = w.job().await;
    w.node("p0").started(job.key);
    let refused = Refused { kind: ErrorKind::Overloaded, message: "no blocks".into() };
    w.node("p0").prefill(job.key, &PrefillEvent::GrantRefused(refused));
    let reselected = |command: &Command| match command {
        Command::Reselect(reselect) => Some(reselect.decode.clone().unwrap().node),
        _ => None,
    };
    let second = w.node("p0").hears("a reselect", reselected).await;
    assert_ne!(second, job.decode());
    w.node("p0").first_token(job.key, 'a', None);
    w.node("p0").handed_off(job.key);
    w.node(&second).token(job.key, 1, 'b');
    answer.reads("ab").await;
    w.report().await;
    w.node(&second).offer(job.key, 2);
    let migrated = w.job().await;
    assert!(migrated.node == job.decode() && migrated.wire.is_migration);
    leader.until_placed(2).await;
    let report = FetchReport { tokens: 32, bytes: 8192, transport: "tcp".into(), ..FetchReport::default() };
    w.node(&migrated.node).prefill(migrated.key, &PrefillEvent::Fetched(report));
    w.node(&second).hears_abort(job.key).await;
    leader.until_placed(1).await;
    for (index, token) in [(2, 'c'), (3, 'd')] {
        w.node(&migrated.node).token(migrated.key, index, token);
    }
    w.node(&migrated.node).last_token(migrated.key, 4, 'e');
    assert_eq!(answer.end().await.unwrap().decode_node, migrated.node);
    leader.until_placed(0).await;
    w.ends().await;
}

pub async fn follower_refuses_request_placed_at_a_node_it_has_lost() {
    let (leader, mut w) = two(&["p0", "d0", "d1"]).await;
    let _link = w.follows(&leader).await;
    // The leader has not noticed, and chooses it again and again.
    w.node("p0").die();
    w.until_state("p0", "lost").await;
    let status = w.refusal(request("hi", 2)).await;
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    leader.until_placed(0).await;
}

pub async fn request_outlives_its_leader() {
    let (leader, mut w) = two(&["p0", "d0"]).await;
    let link = w.follows(&leader).await;
    let mut first = w.generate(request("hi", 3)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    first.reads("a").await;
    link.abort();
    until("no conductor leads", || (!w.frontend.desk.has_leader()).then_some(())).await;
    let second = w.ask(request("ho", 2));
    w.node("d0").token(job.key, 1, 'b');
    first.reads("ab").await;
    assert!(!w.has_job().await, "no conductor places");

    w.frontend.lead(2, SETTLE);
    assert_eq!(w.placed(), 1, "what it had");
    w.report().await;
    assert!(!w.has_job().await, "others may declare what they have");
    w.pass(2 * SETTLE).await;
    let other = w.job().await;
    assert_eq!(w.placed(), 2);
    w.node("d0").last_token(job.key, 2, 'c');
    first.end().await.unwrap();
    w.node("p0").computes(other.key, 'a');
    w.node("d0").last_token(other.key, 1, 'b');
    soon(second).await.unwrap().unwrap().end().await.unwrap();
    w.ends().await;
}

pub async fn new_leader_learns_running_requests_from_followers() {
    let (mut leader, mut w) = two(&["p0", "d0"]).await;
    let link = w.follows(&leader).await;
    let mut answer = w.generate(request("hi", 3)).await;
    let job = w.job().await;
    link.abort();
    leader.frontend.step_down();
    assert_eq!(leader.placed(), 0, "the ledger of a term ends with it");
    until("no conductor leads", || (!w.frontend.desk.has_leader()).then_some(())).await;
    leader.frontend.lead(3, SETTLE);
    w.frontend.other_leads(3);
    leader.shows(1).await;
    let waits = w.ask(request("ho", 2));
    let _link = w.follows(&leader).await;
    leader.until_placed(1).await;
    let charged =
        |node: &str| leader.frontend.cluster().node(&baton_types::NodeId::new(node).unwrap()).unwrap().placed();
    assert_eq!((charged("p0"), charged("d0")), (1, 1));
    w.node("p0").computes(job.key, 'a');
    answer.reads("a").await;
    leader.pass(2 * SETTLE).await;
    leader.until_placed(2).await;
    let other = w.job().await;
    w.node("d0").token(job.key, 1, 'b');
    w.node("d0").last_token(job.key, 2, 'c');
    answer.end().await.unwrap();
    w.node("p0").computes(other.key, 'a');
    w.node("d0").last_token(other.key, 1, 'b');
    soon(waits).await.unwrap().unwrap().end().await.unwrap();
    leader.until_placed(0).await;
}

pub async fn request_is_refused_after_ten_seconds_without_a_leader() {
    let mut w = World::with(&["p0", "d0"]).await;
    w.frontend.step_down();
    let asked = w.ask(request("hi", 2));
    w.pass(Duration::from_secs(9)).await;
    assert!(!asked.is_finished());
    w.pass(Duration::from_secs(2)).await;
    let status = soon(asked).await.unwrap().err().expect("it is refused");
    assert!(status.code() == Code::Unavailable && status.message().contains("no conductor"), "{status}");
    w.ends().await;
}

pub async fn placements_of_lost_follower_are_released_after_ten_seconds() {
    let (mut leader, mut w) = two(&["p0", "d0"]).await;
    let link = w.follows(&leader).await;
    let _answer = w.generate(request("hi", 3)).await;
    w.job().await;
    leader.shows(1).await;
    link.abort();
    leader.pass(Duration::from_secs(9)).await;
    assert_eq!(leader.placed(), 1, "it may be back");
    leader.pass(Duration::from_secs(2)).await;
    leader.until_placed(0).await;
}

pub async fn conductor_that_does_not_lead_refuses_followers() {
    let (leader, w) = two(&["p0", "d0"]).await;
    leader.frontend.step_down();
    let error = soon(follow(&w.frontend, &leader.addresses.grpc.to_string())).await.unwrap_err().to_string();
    assert!(error.contains("does not lead"), "{error}");
    assert!(!w.frontend.desk.has_leader());
    let error = soon(follow(&w.frontend, "127.0.0.1:1")).await.unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:1"), "{error}");
    // It is tried again and again, and that is no leader.
    let mut w = w;
    for _ in 0..3 {
        w.pass(Duration::from_secs(2)).await;
        soon(follow(&w.frontend, &leader.addresses.grpc.to_string())).await.unwrap_err();
    }
    assert!(!w.frontend.is_ready());
}

pub async fn conductor_without_leader_is_not_ready_after_five_seconds() {
    let mut w = World::with(&["p0", "d0"]).await;
    assert!(w.frontend.is_ready());
    w.frontend.step_down();
    w.pass(Duration::from_secs(4)).await;
    assert!(w.frontend.is_ready(), "another one may be elected");
    w.pass(Duration::from_secs(2)).await;
    assert!(!w.frontend.is_ready());
    w.frontend.lead(2, SETTLE);
    assert!(w.frontend.is_ready());
}

/// What a node is told of leaders.
fn known_leader(command: &Command) -> Option<v1::KnownLeader> {
    if let Command::Leader(leader) = command { Some(*leader) } else { None }
}

pub async fn leader_places_again_once_etcd_denies_what_a_node_tells_of() {
    let mut w = World::with(&["p0", "d0"]).await;
    w.frontend.lead(7, Duration::ZERO);
    let mut heard = w.frontend.desk.heard();
    let is_seven = |command: &Command| known_leader(command).filter(|leader| leader.term == 7);
    w.node("p0").hears("who leads", is_seven).await;
    for term in [8, u64::MAX] {
        w.node("p0").say(Event::LeaderTerm(term));
        soon(heard.changed()).await.unwrap();
        let number = *heard.borrow_and_update();
        let waits = w.ask(request("hi", 2));
        assert!(!w.has_job().await && w.placed() == 0, "the node would refuse it");
        w.frontend.on_etcd_named(7, number);
        assert_eq!(w.node("p0").hears("a denial", is_seven).await.denied, term);
        let job = w.job().await;
        assert_eq!((job.wire.term, w.frontend.desk.leads()), (7, true));
        w.node("p0").computes(job.key, 'a');
        w.node("d0").last_token(job.key, 1, 'b');
        soon(waits).await.unwrap().unwrap().end().await.unwrap();
    }
    // It goes on: for a while no further one is in doubt.
    w.node("p0").say(Event::LeaderTerm(u64::MAX - 1));
    soon(heard.changed()).await.unwrap();
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn leader_that_hears_of_a_later_leader_places_nothing_until_it_follows() {
    let mut w = World::with(&["p0", "d0"]).await;
    w.frontend.lead(1, Duration::ZERO);
    let mut heard = w.frontend.desk.heard();
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    // As after a pause in which others have found a leader.
    w.node("p0").say(Event::LeaderTerm(9));
    w.node("p0").failed(job.key, ErrorKind::Unavailable);
    soon(heard.changed()).await.unwrap();
    let number = *heard.borrow_and_update();
    w.frontend.on_etcd_named(9, number);
    assert!(!w.has_job().await && !w.frontend.desk.has_leader(), "it is true");
    w.frontend.other_leads(9);
    assert!(!w.frontend.desk.leads() && w.placed() == 0);
    // The other one dies.
    w.frontend.lead(10, Duration::ZERO);
    let again = w.job().await;
    assert_eq!((job.wire.term, again.wire.term), (1, 10));
    w.node("p0").computes(again.key, 'a');
    w.node("d0").last_token(again.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn term_that_a_node_told_of_ends_with_its_session() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    w.frontend.lead(7, Duration::ZERO);
    // No etcd is there to say anything.
    w.node("p1").say(Event::LeaderTerm(u64::MAX));
    until("it is in doubt", || (!w.frontend.desk.has_leader()).then_some(())).await;
    let _answer = w.ask(request("hi", 2));
    assert!(!w.has_job().await);
    w.node("p1").die();
    w.until_state("p1", "lost").await;
    let job = w.job().await;
    assert_eq!((job.node.as_str(), job.wire.term), ("p0", 7));
}

pub async fn single_conductor_places_whatever_terms_nodes_tell_of() {
    let mut w = World::with(&["p0", "d0"]).await;
    for (node, term) in [("p0", 9), ("d0", u64::MAX), ("p0", u64::MAX - 1)] {
        w.node(node).say(Event::LeaderTerm(term));
        w.report().await;
        let mut answer = w.generate(request("hi", 2)).await;
        let job = w.job().await;
        assert_eq!((job.wire.term, w.frontend.desk.leads()), (0, true), "nodes take jobs of term 0");
        w.node("p0").computes(job.key, 'a');
        w.node("d0").last_token(job.key, 1, 'b');
        answer.end().await.unwrap();
    }
    w.ends().await;
}

/// A greeting of an earlier version: it names the latest term that was heard of.
#[derive(Clone, PartialEq, prost::Message)]
struct EarlierGreet {
    #[prost(uint32, tag = "1")]
    protocol_version: u32,
    #[prost(string, tag = "2")]
    conductor_id: String,
    #[prost(uint64, tag = "4")]
    latest_term: u64,
}

pub async fn term_in_a_greeting_is_not_heard() {
    let mut w = World::with(&["p0", "d0"]).await;
    w.frontend.lead(7, Duration::ZERO);
    for latest_term in [8, u64::MAX - 1, u64::MAX] {
        let conductor_id = baton_types::ConductorId(5).to_string();
        let greet = EarlierGreet { protocol_version: PROTOCOL_VERSION, conductor_id, latest_term };
        let greet = prost::Message::encode_to_vec(&greet);
        let greet = <v1::Greet as prost::Message>::decode(&*greet).unwrap();
        let message = v1::FollowerMessage { message: Some(v1::follower_message::Message::Greet(greet)) };
        let mut leader = v1::leader_client::LeaderClient::new(w.channel());
        let mut answers = soon(leader.follow(tokio_stream::once(message))).await.unwrap().into_inner();
        let greeted = soon(answers.message()).await.unwrap().unwrap();
        let expected = v1::leader_message::Message::Greeted(v1::Greeted { term: 7 });
        assert_eq!((greeted.message, w.frontend.desk.leads()), (Some(expected), true));
    }
    let mut answer = w.generate(request("hi", 1)).await;
    let job = w.job().await;
    w.node("p0").first_token(job.key, 'a', Some(baton_types::FinishReason::Length));
    answer.end().await.unwrap();
}

pub async fn leader_that_greets_with_another_term_than_its_key_has_is_not_followed() {
    let (leader, w) = two(&["p0", "d0"]).await;
    for term in [6, 8, u64::MAX] {
        leader.frontend.lead(term, Duration::ZERO);
        w.frontend.other_leads(7);
        let error = soon(follow(&w.frontend, &leader.addresses.grpc.to_string())).await.unwrap_err().to_string();
        assert!(error.contains(&format!("term {term} greets, but etcd names one of term 7")), "{error}");
        assert!(!w.frontend.desk.has_leader() && w.frontend.desk.term() == 7);
    }
    leader.frontend.lead(7, Duration::ZERO);
    let _link = w.follows(&leader).await;
}

/// A leader that takes calls and says nothing.
struct Mute(tokio::sync::mpsc::UnboundedSender<()>);

#[tonic::async_trait]
impl v1::leader_server::Leader for Mute {
    type FollowStream = tokio_stream::Pending<Result<v1::LeaderMessage, tonic::Status>>;

    async fn follow(
        &self,
        _: tonic::Request<tonic::Streaming<v1::FollowerMessage>>,
    ) -> Result<tonic::Response<Self::FollowStream>, tonic::Status> {
        self.0.send(()).unwrap();
        Ok(tonic::Response::new(tokio_stream::pending()))
    }
}

pub async fn leader_that_does_not_greet_is_left_after_two_seconds() {
    let mut w = World::with(&["p0", "d0"]).await;
    w.frontend.other_leads(7);
    let (called, mut calls) = tokio::sync::mpsc::unbounded_channel();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = tonic::transport::Server::builder()
        .add_service(v1::leader_server::LeaderServer::new(Mute(called)))
        .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
    let server = tokio::spawn(serving);
    let frontend = Arc::clone(&w.frontend);
    let link = tokio::spawn(async move { follow(&frontend, &address).await });
    soon(calls.recv()).await.unwrap();
    // Its answer is on its way, as what the nodes say is.
    w.report().await;
    while !link.is_finished() {
        w.clock.advance(Duration::from_millis(100));
        tokio::task::yield_now().await;
    }
    let error = soon(link).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("did not greet within 2s") && !w.frontend.desk.has_leader(), "{error}");
    server.abort();
}

pub async fn later_stream_of_a_follower_ends_the_earlier_one() {
    let (mut leader, mut w) = two(&["p0", "d0"]).await;
    let first = w.follows(&leader).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    leader.until_placed(1).await;
    leader.shows(2).await;
    let frontend = Arc::clone(&w.frontend);
    let address = leader.addresses.grpc.to_string();
    let _second = tokio::spawn(async move { follow(&frontend, &address).await });
    let ended = soon(first).await.unwrap().unwrap_err();
    assert!(matches!(ended, LinkError::Ended(_)), "{ended}");
    // The end of the first one is not the conductor's: what it had stays charged.
    let _other = w.generate(request("ho", 2)).await;
    leader.until_placed(2).await;
    for _ in 0..11 {
        leader.pass(Duration::from_secs(1)).await;
        w.report().await;
    }
    assert_eq!(leader.placed(), 2);
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    leader.until_placed(1).await;
}

/// A stranger's stream, which greets with these attempts.
async fn stranger(leader: &World, attempts: Vec<v1::DeclaredAttempt>) -> tonic::Streaming<v1::LeaderMessage> {
    let mut client = v1::leader_client::LeaderClient::new(leader.channel());
    let conductor_id = baton_types::ConductorId(attempts.len() as u64).to_string();
    let greet = v1::Greet { protocol_version: PROTOCOL_VERSION, conductor_id, attempts };
    let greet = v1::FollowerMessage { message: Some(v1::follower_message::Message::Greet(greet)) };
    let messages = tokio_stream::StreamExt::chain(tokio_stream::once(greet), tokio_stream::pending());
    let mut stream = soon(client.follow(messages)).await.unwrap().into_inner();
    soon(stream.message()).await.unwrap();
    stream
}

pub async fn attempts_that_a_stranger_declares_make_no_node_full() {
    let mut w = World::with(&["p0", "d0"]).await;
    w.report().await;
    let start = |node: &FakeNode| v1::NodeStart {
        node: node.info.node.to_string(),
        generation: node.info.generation.to_string(),
    };
    let [prefill, decode] = ["p0", "d0"].map(|name| start(w.node(name)));
    let attempt = |n: u128| v1::DeclaredAttempt {
        key: Some(RequestKey { request: RequestId(n), attempt: Attempt(0) }.into()),
        ttft_s: 1.0,
        prefill: Some(v1::DeclaredPrefill {
            node: Some(prefill.clone()),
            queue: Some((&QueueOrdering { compute: Duration::from_secs(1), ..QueueOrdering::default() }).into()),
            priority: 0,
            tokens: 100,
        }),
        decode: Some(decode.clone()),
        prompt_tokens: 100,
        max_tokens: 100,
        ..v1::DeclaredAttempt::default()
    };
    let mut streams = Vec::new();
    for attempts in [3000, 1, 2, 3000, 2999] {
        streams.push(stranger(&w, (0..attempts).map(attempt).collect()).await);
        let mut answer = w.generate(request("hi", 2)).await;
        let job = w.job().await;
        w.node("p0").computes(job.key, 'a');
        w.node("d0").last_token(job.key, 1, 'b');
        answer.end().await.unwrap();
        w.until_placed(0).await;
    }
    w.ends().await;
}
