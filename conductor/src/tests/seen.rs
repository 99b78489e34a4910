//! What the conductor carried out on this thread. A test has one thread, and so has everything that
//! it starts.

use std::cell::RefCell;
use std::collections::BTreeSet;

use baton_proto::v1::node_command::Command;
use baton_scheduler::{Departure, LedgerEntry, RequestEffect, RequestError, RequestNote};

thread_local! {
    static SEEN: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

fn note(name: &'static str) {
    SEEN.with_borrow_mut(|seen| seen.insert(name));
}

/// A relay carries an effect out.
pub fn effect(effect: &RequestEffect) {
    note(effect.name());
    match effect {
        RequestEffect::UpdateLedger { entry, .. } => note(entry.name()),
        RequestEffect::Note(told) => note(told.name()),
        RequestEffect::End(Err(error)) => note(error.name()),
        _ => {}
    }
}

/// A command goes to a node.
pub fn command(command: &Command) {
    note(command_name(command));
}

/// Requests are told that their node is away.
pub fn away(away: Departure) {
    note(away.name());
}

const COMMANDS: &[&str] = &[
    "Command::Hello",
    "Command::Prefill",
    "Command::Abort",
    "Command::KvSnapshot",
    "Command::ClearCache",
    "Command::Reselect",
    "Command::NodeLost",
    "Command::Drain",
    "Command::Settings",
    "Command::Leader",
    "Command::ForgetPrefix",
];

fn command_name(command: &Command) -> &'static str {
    match command {
        Command::Hello(_) => "Command::Hello",
        Command::Prefill(_) => "Command::Prefill",
        Command::Abort(_) => "Command::Abort",
        Command::KvSnapshot(_) => "Command::KvSnapshot",
        Command::ClearCache(_) => "Command::ClearCache",
        Command::Reselect(_) => "Command::Reselect",
        Command::NodeLost(_) => "Command::NodeLost",
        Command::Drain(_) => "Command::Drain",
        Command::Settings(_) => "Command::Settings",
        Command::Leader(_) => "Command::Leader",
        Command::ForgetPrefix(_) => "Command::ForgetPrefix",
    }
}

/// What the stories did not reach, and what they reached that no list names.
pub fn check_all() {
    let lists = [RequestEffect::ALL, LedgerEntry::ALL, RequestNote::ALL, RequestError::ALL, Departure::ALL, COMMANDS];
    let all: BTreeSet<_> = lists.into_iter().flatten().copied().collect();
    let seen = SEEN.with_borrow(Clone::clone);
    let missing: Vec<_> = all.difference(&seen).collect();
    let unlisted: Vec<_> = seen.difference(&all).collect();
    assert!(missing.is_empty() && unlisted.is_empty(), "not reached: {missing:?}; in no list: {unlisted:?}");
}
