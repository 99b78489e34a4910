//! Messages of `leader.proto`, played against the desks of a leader and of a conductor that
//! follows.
//!
//! **Invariants**: a liar ends and takes no attempt of others. What it claims is given back once no
//! node's report shows it, and requests are placed as before. The term stays the one that etcd has
//! named. What a follower asks is answered once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_proto::v1 as w;
use baton_scheduler::{Answer, Cluster, Desk, DeskEffect, Following, LinkId};
use baton_types as d;
use prost::Message;

use super::leader::{from_followers, from_leaders};
use super::nodes::{NODES, cluster, id, key, request};
use crate::input::{join_steps, steps};

/// The term that etcd has named.
const TERM: u64 = 5;
const LEADER: d::ConductorId = d::ConductorId(1);
const HONEST: d::ConductorId = d::ConductorId(2);
const LIAR: d::ConductorId = d::ConductorId(5);
/// Attempts that are no liar's.
const OWN: u128 = 1000;
const HONESTS: u128 = 2000;
/// Asked by the conductor that follows.
const ASKED: [u128; 2] = [3000, 3001];
/// Longer than any claim lasts that no report shows.
const OVER: Duration = Duration::from_secs(40);
/// How often nodes report.
const REPORT: Duration = Duration::from_millis(250);

type Why = w::ExplainResponse;

/// What a step is of.
const CHOICES: usize = 4;

struct World {
    now: Instant,
    leader: Desk<Why>,
    cluster: Cluster,
    /// The liar's stream, as the leader knows it.
    liar: Following,
    /// Requests at each node, as it reports them.
    running: BTreeMap<d::NodeId, u32>,
    heard: u64,
    follower: Desk<Why>,
    others: Cluster,
    link: LinkId,
    answered: BTreeMap<d::RequestKey, u32>,
}

/// Ties go to the first one.
fn first() -> u64 {
    0
}

impl World {
    fn new(now: Instant) -> Self {
        let mut leader = Desk::new(LEADER);
        let mut cluster = cluster(now);
        leader.on_elected(now, TERM, Duration::ZERO, &mut cluster, &mut first);
        let own = leader.on_ask_for_nodes(now, &request(OWN), &mut cluster, &mut first);
        let honest = leader.on_follower(now, HONEST, &[], &mut cluster).expect("it leads");
        let question = d::Question::Place((&request(HONESTS)).into());
        let honests = leader.on_follower_asked(now, &honest, &question, &mut cluster, &mut first);
        let mut running = BTreeMap::new();
        for placed in [own, honests] {
            let Some(Answer::Placed(decided)) = placed else { panic!("it is placed at once") };
            let to = decided.placed.expect("there is room");
            *running.entry(to.placement.prefill).or_default() += 1;
        }
        let liar = leader.on_follower(now, LIAR, &[], &mut cluster).expect("it leads");

        let mut follower = Desk::new(HONEST);
        let mut others = super::nodes::cluster(now);
        follower.on_other_leads(now, TERM, &mut others);
        let link = follower.on_follows(now, &mut others);
        for n in ASKED {
            assert!(follower.on_ask_for_nodes(now, &request(n), &mut others, &mut first).is_none());
        }
        let answered = BTreeMap::new();
        Self { now, leader, cluster, liar, running, heard: 0, follower, others, link, answered }
    }

    /// As `conductor/src/leader/service.rs` does.
    fn on_follower_message(&mut self, message: d::ToLeader) {
        match message {
            // Ids are drawn: that of another conductor would have to be known.
            d::ToLeader::Greet { conductor: HONEST | LEADER, .. } => {}
            d::ToLeader::Greet { conductor, attempts } => {
                let following = self.leader.on_follower(self.now, conductor, &attempts, &mut self.cluster);
                self.liar = following.unwrap_or(self.liar);
            }
            d::ToLeader::Ask(question) => {
                let answer =
                    self.leader.on_follower_asked(self.now, &self.liar, &question, &mut self.cluster, &mut first);
                if let Some(answer) = answer {
                    check_readable(question.key(), answer);
                }
            }
            d::ToLeader::LedgerUpdate(key, entry) => {
                self.leader.on_follower_ledger_update(self.now, &self.liar, key, &entry, &mut self.cluster);
            }
        }
    }

    /// As `conductor/src/leader/link.rs` does.
    fn on_leader_message(&mut self, told: d::FromLeader<Why>) {
        if self.follower.on_told(self.now, self.link, told).is_err() {
            self.follower.on_link_lost(self.link);
            self.link = self.follower.on_follows(self.now, &mut self.others);
        }
    }

    fn on_leader_term(&mut self, node: &str, term: u64) {
        for (desk, cluster) in [(&mut self.leader, &mut self.cluster), (&mut self.follower, &mut self.others)] {
            let number = desk.on_heard(
                self.now,
                &d::NodeStart { node: id(node), generation: d::Generation(9) },
                term,
                cluster,
                &mut first,
            );
            self.heard = self.heard.max(number.unwrap_or(0));
        }
    }

    /// Nodes report, etcd is asked, and time passes.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now;
        for (name, _) in NODES {
            let node = id(name);
            let running = self.running.get(&node).copied().unwrap_or(0);
            self.cluster.on_load(now, &node, d::Load { running, ..d::Load::default() });
        }
        self.cluster.on_tick(now);
        for (desk, cluster) in [(&mut self.leader, &mut self.cluster), (&mut self.follower, &mut self.others)] {
            desk.on_etcd_named(now, TERM, self.heard, cluster, &mut first);
            desk.on_tick(now, cluster, &mut first);
        }
    }

    fn check(&mut self) {
        let mut effects = 0;
        while let Some(effect) = self.leader.poll_effect() {
            assert!(!matches!(effect, DeskEffect::ReignOver { .. }), "a message ends no term");
            effects += 1;
        }
        while let Some(effect) = self.follower.poll_effect() {
            if let DeskEffect::Answer(key, _) = effect {
                *self.answered.entry(key).or_default() += 1;
            }
            effects += 1;
        }
        assert!(effects <= 32, "{effects} effects of one message");
        assert!(self.leader.leads() && self.leader.term() == TERM && self.follower.term() == TERM);
        assert!(self.leader.followers() <= 64 && self.follower.waiting() <= ASKED.len());
        assert!(self.answered.keys().all(|key| ASKED.contains(&key.request.0)), "it asked for no other");
        for who in [self.liar.who, HONEST] {
            assert!(self.cluster.is_of_other(who, key(OWN)), "the leader's attempt is taken from it");
        }
    }

    /// Whether the attempt of the honest follower is charged, and its own.
    fn has_honests(&self) -> bool {
        self.cluster.is_of_other(LEADER, key(HONESTS)) && !self.cluster.is_of_other(HONEST, key(HONESTS))
    }

    /// All is as if the liar had said nothing.
    fn check_is_over(&mut self) {
        (0..OVER.as_secs()).for_each(|_| self.pass(Duration::from_secs(1)));
        self.check();
        assert!(self.cluster.placed() <= 2, "{} attempts are charged", self.cluster.placed());
        let now = self.now;
        let asked = self.leader.on_ask_for_nodes(now, &request(OWN + 1), &mut self.cluster, &mut first);
        let Some(Answer::Placed(decided)) = asked else { panic!("the leader places nothing") };
        decided.placed.expect("there is room again");
        self.follower.on_link_lost(self.link);
        self.follower.on_elected(now, TERM + 1, Duration::ZERO, &mut self.others, &mut first);
        while let Some(effect) = self.follower.poll_effect() {
            if let DeskEffect::Answer(key, _) = effect {
                *self.answered.entry(key).or_default() += 1;
            }
        }
        for n in ASKED {
            assert_eq!(self.answered.get(&key(n)), Some(&1), "each question has one answer");
        }
        assert_eq!(self.follower.waiting(), 0);
    }
}

/// What the leader answers can be told, and read.
fn check_readable(key: d::RequestKey, answer: Answer<Why>) {
    let told = match answer {
        Answer::Placed(decided) => d::FromLeader::Placed { key, placed: Box::new(decided.placed), why: None },
        Answer::Reselected(to) => d::FromLeader::Reselected(key, to),
        Answer::Migrated(to) => d::FromLeader::Migrated(key, to),
        Answer::Explained(_) => d::FromLeader::Explained(key, None),
    };
    d::FromLeader::try_from(w::LeaderMessage::from(told)).map(drop).expect("an answer can be read");
}

/// Plays the steps of an input. The first byte of each says from whom it is.
pub(super) fn play(input: &[u8]) {
    let mut world = World::new(baton_runtime::now());
    for (of, bytes) in steps(input, CHOICES) {
        let had = world.has_honests();
        match of {
            0 => {
                let message = w::FollowerMessage::decode(bytes).ok();
                let Some(message) = message.and_then(|message| message.try_into().ok()) else { continue };
                world.on_follower_message(message);
                assert_eq!(world.has_honests(), had, "a liar ends no attempt of another follower");
            }
            1 => {
                let message = w::LeaderMessage::decode(bytes).ok();
                let Some(told) = message.and_then(|message| message.try_into().ok()) else { continue };
                world.on_leader_message(told);
            }
            2 => {
                let Ok(w::NodeEvent { event: Some(w::node_event::Event::LeaderTerm(term)) }) =
                    w::NodeEvent::decode(bytes)
                else {
                    continue;
                };
                world.on_leader_term("p0", term);
            }
            _ => world.pass(REPORT * bytes.first().copied().unwrap_or(1).into()),
        }
        world.check();
    }
    world.check_is_over();
}

fn follower(message: w::follower_message::Message) -> (u8, Vec<u8>) {
    (0, w::FollowerMessage { message: Some(message) }.encode_to_vec())
}

fn leader(message: w::leader_message::Message) -> (u8, Vec<u8>) {
    (1, w::LeaderMessage { message: Some(message) }.encode_to_vec())
}

fn leader_term(term: u64) -> (u8, Vec<u8>) {
    (2, w::NodeEvent { event: Some(w::node_event::Event::LeaderTerm(term)) }.encode_to_vec())
}

/// Attempts of others, and many that no node has.
fn claims() -> Vec<(u8, Vec<u8>)> {
    use w::follower_message::Message;
    use w::ledger_update::Entry;
    let start = |node: &str| Some(w::NodeStart { node: node.into(), generation: d::Generation(9).to_string() });
    let declared = |n| w::DeclaredAttempt {
        key: Some(key(n).into()),
        decode: start("d0"),
        prompt_tokens: 40,
        max_tokens: 8,
        first_token_ago_s: Some(1.0),
        ..Default::default()
    };
    let greet = w::Greet {
        protocol_version: baton_proto::PROTOCOL_VERSION,
        conductor_id: d::ConductorId(6).to_string(),
        attempts: [OWN, HONESTS].into_iter().chain(0..40).map(declared).collect(),
    };
    let place = |n| w::PlaceQuestion {
        key: Some(key(n).into()),
        prompt_tokens: 40,
        max_tokens: 8,
        wants_decode: true,
        ..Default::default()
    };
    let migrate = |from, to| w::MigrationQuestion {
        key: Some(key(from).into()),
        migrated: Some(key(to).into()),
        tokens: 41,
        exclude: vec![],
    };
    let update = |n, entry| Message::Update(w::LedgerUpdate { key: Some(key(n).into()), entry: Some(entry) });
    let reselect = |n| w::ReselectQuestion { key: Some(key(n).into()), from_node: "d0".into() };
    let mut messages = vec![Message::Greet(greet)];
    for n in [OWN, HONESTS, 7] {
        messages.extend([
            Message::Place(place(n)),
            Message::Explain(place(n)),
            Message::Reselect(reselect(n)),
            Message::Migrate(migrate(n, n + 1)),
            Message::Migrate(migrate(7, n)),
            update(n, Entry::FirstToken(true)),
            update(n, Entry::FirstToken(false)),
            update(n, Entry::Finished(1 << 28)),
            update(n, Entry::Ended(true)),
        ]);
    }
    messages.into_iter().map(follower).collect()
}

/// Questions for places that nothing ends.
fn flood() -> Vec<(u8, Vec<u8>)> {
    let place = |n: u128| w::PlaceQuestion {
        key: Some(key(n).into()),
        prompt_tokens: 40,
        max_tokens: 8,
        wants_decode: true,
        ..Default::default()
    };
    let asked = |n| follower(w::follower_message::Message::Place(place(n)));
    (0..40).map(asked).chain([(3, vec![8])]).chain((40..60).map(asked)).collect()
}

/// A leader answers what is asked, and what is not.
fn answers() -> Vec<(u8, Vec<u8>)> {
    use w::leader_message::Message;
    let answered = from_leaders().into_iter().map(|message| match message {
        Message::Placed(placed) => Message::Placed(w::PlaceAnswer { key: Some(key(ASKED[0]).into()), ..placed }),
        Message::Greeted(_) => Message::Greeted(w::Greeted { term: TERM }),
        other => other,
    });
    answered.map(leader).collect()
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let pass = |reports| (3, vec![reports]);
    let told: Vec<_> = from_followers().into_iter().map(follower).collect();
    let terms = [leader_term(u64::MAX), pass(1), leader_term(6), leader_term(0), leader_term(u64::MAX - 1)];
    let greeted = leader(w::leader_message::Message::Greeted(w::Greeted { term: u64::MAX }));
    let mixed = [&claims()[..], &[pass(2), greeted], &terms, &answers(), &[pass(40)], &told].concat();
    [told, claims(), flood(), answers(), terms.to_vec(), mixed].iter().map(|steps| join_steps(steps)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leader_desk_seeds_are_read_step_by_step() {
        for seed in seeds() {
            for (of, bytes) in steps(&seed, CHOICES) {
                let is_read = match of {
                    0 => w::FollowerMessage::decode(bytes).is_ok_and(|message| d::ToLeader::try_from(message).is_ok()),
                    1 => w::LeaderMessage::decode(bytes).is_ok_and(|told| d::FromLeader::try_from(told).is_ok()),
                    2 => w::NodeEvent::decode(bytes).is_ok(),
                    _ => bytes.len() == 1,
                };
                assert!(is_read, "{of}: {bytes:?}");
            }
        }
    }

    /// As a leader that believed a liar's message would do.
    #[test]
    #[should_panic(expected = "the leader's attempt is taken from it")]
    fn leader_desk_target_sees_an_attempt_that_was_ended() {
        let mut world = World::new(baton_runtime::now());
        world.check();
        world.cluster.on_ended(world.now, key(OWN));
        world.check();
    }

    #[test]
    #[should_panic(expected = "attempts are charged")]
    fn leader_desk_target_sees_claims_that_stay() {
        let mut world = World::new(baton_runtime::now());
        let kept = d::Question::Place((&request(7)).into());
        world.leader.on_follower_asked(world.now, &world.liar, &kept, &mut world.cluster, &mut first);
        // A node that shows it.
        world.running.values_mut().for_each(|running| *running += 1);
        world.check_is_over();
    }
}
