//! The desk of a conductor that leads, follows, or knows no leader.

use baton_types::{Declared, FromLeader};

use super::*;
use crate::cluster::tests::{cluster, id, key, request};
use crate::placement::PlacementKind;

const SECOND: Duration = Duration::from_secs(1);

fn start(node: &str) -> NodeStart {
    NodeStart { node: id(node), generation: baton_types::Generation(1) }
}

fn desk(id: u64) -> (Desk<()>, Cluster, Instant) {
    let now = Instant::now();
    (Desk::new(ConductorId(id)), cluster(now, PlacementKind::MinTotalDelay), now)
}

fn effects(desk: &mut Desk<()>) -> Vec<DeskEffect<()>> {
    std::iter::from_fn(|| desk.poll_effect()).collect()
}

#[test]
fn placement_question_is_asked_of_each_leader_until_answered() {
    let (mut desk, mut cluster, now) = desk(1);
    assert!(desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0).is_none());
    assert!(effects(&mut desk).is_empty() && desk.waiting() == 1);
    desk.on_other_leads(now, 4, &mut cluster);
    assert!(matches!(&effects(&mut desk)[..], [DeskEffect::NameLeader { term: 4 }]));
    for _ in 0..2 {
        let link = desk.on_follows(now, &mut cluster);
        let told = effects(&mut desk);
        assert!(matches!(&told[..], [
            DeskEffect::Tell(a, ToLeader::Greet { .. }),
            DeskEffect::Tell(b, ToLeader::Ask(Question::Place(of))),
        ] if (*a, *b, of.key) == (link, link, key(1))));
        desk.on_link_lost(link);
        // What comes yet from a leader that is not followed any more is not heard.
        desk.on_told(now, link, FromLeader::Migrated(key(1), None)).unwrap();
    }
    desk.on_elected(now, 5, SECOND, &mut cluster, &mut || 0);
    let told = effects(&mut desk);
    assert!(matches!(&told[..], [DeskEffect::NameLeader { term: 5 }]), "others may declare what they have");
    desk.on_tick(now + SECOND, &mut cluster, &mut || 0);
    assert!(matches!(&effects(&mut desk)[..], [DeskEffect::Answer(of, Answer::Placed(_))] if *of == key(1)));
    assert_eq!((desk.waiting(), desk.placed().len(), cluster.placed()), (0, 1, 1));
}

#[test]
fn placement_question_of_ended_attempt_is_not_answered() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0);
    desk.on_ledger_update(now, key(1), &LedgerEntry::Ended, &mut cluster);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    assert!(matches!(&effects(&mut desk)[..], [DeskEffect::NameLeader { .. }]) && cluster.placed() == 0);
}

fn asks(desk: &mut Desk<()>, n: u128, cluster: &mut Cluster, now: Instant) -> Option<Answer<()>> {
    desk.on_ask_for_nodes(now, &request(n, &[]), cluster, &mut || 0)
}

#[test]
fn leader_places_nothing_while_a_node_tells_of_a_later_term_that_etcd_was_not_asked_about() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    for (n, term) in [6, u64::MAX - 1, u64::MAX].into_iter().enumerate() {
        let now = now + 10 * SECOND * n as u32;
        let number = desk.on_heard(now, &start("p0"), term, &mut cluster, &mut || 0).unwrap();
        desk.on_heard(now, &start("d0"), term, &mut cluster, &mut || 0).unwrap();
        assert!(asks(&mut desk, 2 * n as u128, &mut cluster, now).is_none() && !desk.has_leader());
        effects(&mut desk);
        desk.on_etcd_named(now, 5, number, &mut cluster, &mut || 0);
        let told = effects(&mut desk);
        assert!(matches!(&told[..], [DeskEffect::DenyTerm { node, term: of }] if *node == id("p0") && *of == term));
        assert!(!desk.has_leader(), "etcd was asked before d0 told of it");
        desk.on_etcd_named(now, 5, number + 1, &mut cluster, &mut || 0);
        let told = effects(&mut desk);
        assert!(matches!(&told[..], [DeskEffect::DenyTerm { node, .. }, DeskEffect::Answer(..)] if *node == id("d0")));
        assert!(asks(&mut desk, 2 * n as u128 + 1, &mut cluster, now).is_some() && desk.term() == 5);
    }
}

#[test]
fn end_of_an_earlier_start_of_a_node_takes_nothing_back_that_the_later_one_told() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    let later = NodeStart { generation: baton_types::Generation(2), ..start("p0") };
    desk.on_heard(now, &start("p0"), 9, &mut cluster, &mut || 0);
    desk.on_heard(now, &later, 9, &mut cluster, &mut || 0);
    desk.on_heard(now, &start("p0"), 0, &mut cluster, &mut || 0);
    assert!(!desk.is_certain(), "the later one still refuses");
    desk.on_heard(now, &later, 0, &mut cluster, &mut || 0);
    assert!(desk.is_certain());
}

#[test]
fn false_terms_faster_than_etcd_can_be_asked_stop_no_placement() {
    let (mut desk, mut cluster, began) = desk(1);
    desk.on_elected(began, 5, Duration::ZERO, &mut cluster, &mut || 0);
    let step = Duration::from_millis(1);
    let mut stopped = Duration::ZERO;
    let mut asked = 0;
    // A thousand a second, of three nodes in turn and of starts that come and go. Etcd answers
    // to what was heard a tenth of a second before.
    for n in 0..10_000_u32 {
        let now = began + step * n;
        let node = NodeStart {
            generation: baton_types::Generation(u64::from(n / 50)),
            ..start(["p0", "p1", "d0"][n as usize % 3])
        };
        let number = desk.on_heard(now, &node, 1000 + u64::from(n), &mut cluster, &mut || 0).unwrap();
        if n % 100 == 0 {
            desk.on_etcd_named(now, 5, asked, &mut cluster, &mut || 0);
            desk.on_tick(now, &mut cluster, &mut || 0);
            asked = number;
        }
        if !desk.is_certain() {
            stopped += step;
        }
    }
    assert!(stopped < SECOND, "{stopped:?} of 10 s");
    // What etcd names then is true, however sure it was.
    let now = began + 10 * SECOND;
    desk.on_heard(now, &start("p0"), 1 << 40, &mut cluster, &mut || 0).unwrap();
    desk.on_etcd_named(now, 1 << 40, u64::MAX, &mut cluster, &mut || 0);
    assert!(!desk.is_certain() && asks(&mut desk, 1, &mut cluster, now).is_none());
}

#[test]
fn later_term_is_in_doubt_until_it_is_taken_or_no_node_tells_of_it() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    let number = desk.on_heard(now, &start("p0"), 9, &mut cluster, &mut || 0).unwrap();
    desk.on_etcd_named(now, 9, number, &mut cluster, &mut || 0);
    assert!(asks(&mut desk, 1, &mut cluster, now).is_none(), "it is true");
    desk.on_other_leads(now, 9, &mut cluster);
    let link = desk.on_follows(now, &mut cluster);
    desk.on_told(now, link, FromLeader::Greeted { term: 9 }).unwrap();
    assert!(desk.has_leader());
    effects(&mut desk);
    // The session with the liar ends, or its node's does: etcd need not be there.
    desk.on_heard(now, &start("p0"), u64::MAX, &mut cluster, &mut || 0);
    assert!(asks(&mut desk, 2, &mut cluster, now).is_none() && effects(&mut desk).is_empty());
    assert_eq!(desk.on_heard(now, &start("p0"), 0, &mut cluster, &mut || 0), None);
    assert!(matches!(&effects(&mut desk)[..], [DeskEffect::Tell(_, ToLeader::Ask(of))] if of.key() == key(2)));
    assert!(desk.has_leader());
}

#[test]
fn question_in_doubt_is_refused_after_ten_seconds() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    desk.on_heard(now, &start("p0"), 9, &mut cluster, &mut || 0);
    assert!(asks(&mut desk, 1, &mut cluster, now).is_none());
    effects(&mut desk);
    desk.on_tick(now + PATIENCE, &mut cluster, &mut || 0);
    assert!(matches!(&effects(&mut desk)[..], [DeskEffect::Answer(of, _)] if *of == key(1)));
}

#[test]
fn conductor_without_elections_leads_in_term_0_whatever_nodes_tell_of() {
    let (mut desk, mut cluster, now) = desk(1);
    for term in [7, u64::MAX] {
        desk.on_heard(now, &start("p0"), term, &mut cluster, &mut || 0);
        desk.on_alone(now, &mut cluster, &mut || 0);
        assert_eq!(desk.on_heard(now, &start("p0"), term, &mut cluster, &mut || 0), None);
        assert_eq!((desk.leads(), desk.has_leader(), desk.term()), (true, true, 0));
        assert!(asks(&mut desk, term.into(), &mut cluster, now).is_some());
    }
}

#[test]
fn follower_cannot_change_attempts_of_others() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    desk.on_ask_for_nodes(now, &request(1, &[]), &mut cluster, &mut || 0);
    let follow = |desk: &mut Desk<()>, cluster: &mut Cluster, id, attempts: &[Declared]| {
        desk.on_follower(now, ConductorId(id), attempts, cluster).unwrap()
    };
    let honest = follow(&mut desk, &mut cluster, 2, &[]);
    let place = |n| Question::Place((&request(n, &[])).into());
    let asked = desk.on_follower_asked(now, &honest, &place(2), &mut cluster, &mut || 0);
    assert!(matches!(asked, Some(Answer::Placed(_))));
    let own = desk.placed().declared(now);
    let liar = follow(&mut desk, &mut cluster, 3, &own);
    for n in [1, 2] {
        let migrate = |from, to| {
            let migrated = RequestKey { attempt: baton_types::Attempt(1), ..key(to) };
            Question::Migrate(MigrationQuestion { key: key(from), migrated, tokens: 8, exclude: Vec::new() })
        };
        let from = NodeId::new("d0").unwrap();
        for question in [place(n), Question::Reselect { key: key(n), from }, migrate(n, n), migrate(n, 9)] {
            assert!(desk.on_follower_asked(now, &liar, &question, &mut cluster, &mut || 0).is_none());
        }
        for entry in [LedgerEntry::FirstToken, LedgerEntry::Ended, LedgerEntry::Finished { output_tokens: 1 }] {
            desk.on_follower_ledger_update(now, &liar, key(n), &entry, &mut cluster);
        }
    }
    desk.on_follower_gone(now, &liar);
    desk.on_tick(now + 20 * SECOND, &mut cluster, &mut || 0);
    assert_eq!(cluster.placed(), 2);
}

#[test]
fn followers_are_bounded_and_keep_no_other_out_unless_reports_show_what_they_placed() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_elected(now, 5, Duration::ZERO, &mut cluster, &mut || 0);
    let follow = |desk: &mut Desk<()>, cluster: &mut Cluster, at: u64, id| {
        desk.on_follower(now + SECOND * at as u32 / 100, ConductorId(id), &[], cluster).unwrap()
    };
    let honest = follow(&mut desk, &mut cluster, 1, 2);
    let question = Question::Place((&request(1, &[])).into());
    assert!(desk.on_follower_asked(now, &honest, &question, &mut cluster, &mut || 0).is_some());
    for node in ["p0", "p1"] {
        let load = baton_types::Load { running: 1, ..Default::default() };
        cluster.on_load(now + SECOND, &NodeId::new(node).unwrap(), load);
    }
    cluster.on_tick(now + SECOND);
    assert!(cluster.is_proven(honest.who));
    let streams: Vec<_> = (3..66).map(|id| follow(&mut desk, &mut cluster, id, id)).collect();
    effects(&mut desk);
    // One that was restarted, beside 63 that place nothing.
    let restarted = follow(&mut desk, &mut cluster, 99, 99);
    assert!(matches!(&effects(&mut desk)[..], [DeskEffect::EndStream(first)] if *first == streams[0].stream));
    assert!(desk.is_current(&honest) && desk.is_current(&restarted) && !desk.is_current(&streams[0]));
    desk.on_follower_gone(now, &streams[4]);
    follow(&mut desk, &mut cluster, 100, 100);
    assert!(effects(&mut desk).is_empty(), "one that went away makes room first");
    assert_eq!(desk.followers(), 64);
}

#[test]
fn leader_counts_only_after_its_greeting() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_other_leads(now, 3, &mut cluster);
    let link = desk.on_follows(now, &mut cluster);
    assert!(!desk.has_leader(), "it may hang");
    desk.on_told(now, link, FromLeader::Greeted { term: 3 }).unwrap();
    assert!(desk.has_leader());
    desk.on_link_lost(link);
    assert!(!desk.has_leader());
}

#[test]
fn leader_is_followed_in_the_term_of_its_key_only() {
    let (mut desk, mut cluster, now) = desk(1);
    desk.on_other_leads(now, 9, &mut cluster);
    let link = desk.on_follows(now, &mut cluster);
    for term in [0, 8, 10, u64::MAX] {
        assert_eq!(desk.on_told(now, link, FromLeader::Greeted { term }), Err(OtherTerm { term, named: 9 }));
        assert!(!desk.has_leader() && desk.term() == 9);
    }
    desk.on_told(now, link, FromLeader::Greeted { term: 9 }).unwrap();
    assert!(desk.has_leader());
}
