//! What the conductor carried out on this thread. A test has one thread, and so has everything that it starts.

use std::cell::RefCell;
use std::collections::BTreeSet;

use baton_proto::v1::node_command::Command;
use baton_scheduler::{Away, BookEntry, RequestEffect, RequestError, RequestNote};

thread_local! {
    static SEEN: RefCell<BTreeSet<(&'static str, &'static str)>> = const { RefCell::new(BTreeSet::new()) };
}

fn note(kind: &'static str, name: &'static str) {
    SEEN.with_borrow_mut(|seen| seen.insert((kind, name)));
}

/// A relay carries an effect out.
pub fn effect(effect: &RequestEffect) {
    note("effect", effect.name());
    match effect {
        RequestEffect::Book { entry, .. } => note("book", entry.name()),
        RequestEffect::Note(told) => note("note", told.name()),
        RequestEffect::End(Err(error)) => note("end", error.name()),
        _ => {}
    }
}

/// A command goes to a node.
pub fn command(command: &Command) {
    note("command", command_name(command));
}

/// Requests are told that their node is away.
pub fn away(away: Away) {
    note("away", away_name(away));
}

const COMMANDS: [&str; 9] =
    ["Hello", "Prefill", "Abort", "KvSnapshot", "ClearCache", "CopyPrefix", "Redirect", "NodeLost", "Drain"];

fn command_name(command: &Command) -> &'static str {
    match command {
        Command::Hello(_) => "Hello",
        Command::Prefill(_) => "Prefill",
        Command::Abort(_) => "Abort",
        Command::KvSnapshot(_) => "KvSnapshot",
        Command::ClearCache(_) => "ClearCache",
        Command::CopyPrefix(_) => "CopyPrefix",
        Command::Redirect(_) => "Redirect",
        Command::NodeLost(_) => "NodeLost",
        Command::Drain(_) => "Drain",
    }
}

const AWAY: [&str; 5] = ["Died", "Silent", "Stalled", "GivenUp", "Drained"];

fn away_name(away: Away) -> &'static str {
    match away {
        Away::Died => "Died",
        Away::Silent => "Silent",
        Away::Stalled => "Stalled",
        Away::GivenUp => "GivenUp",
        Away::Drained => "Drained",
    }
}

/// What the stories did not reach, and what they reached that no list names.
pub fn check_all() {
    let lists: [(&str, &[&str]); 6] = [
        ("effect", &RequestEffect::ALL),
        ("book", &BookEntry::ALL),
        ("note", &RequestNote::ALL),
        ("end", &RequestError::ALL),
        ("command", &COMMANDS),
        ("away", &AWAY),
    ];
    let all: BTreeSet<_> = lists.iter().flat_map(|(kind, names)| names.iter().map(|name| (*kind, *name))).collect();
    let seen = SEEN.with_borrow(Clone::clone);
    let missing: Vec<_> = all.difference(&seen).collect();
    let unlisted: Vec<_> = seen.difference(&all).collect();
    assert!(missing.is_empty() && unlisted.is_empty(), "not reached: {missing:?}; in no list: {unlisted:?}");
}
