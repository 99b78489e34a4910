//! A request whose decode node has no room for it, or is on its way out, goes on at another one.
//!
//! Its node offers it and goes on as it can. If another node has room, that one is asked to go on
//! under an attempt of its own, with the tokens that the client has. It fetches the blocks from the
//! first node. Until it says that it has taken the sequence, what the first node gives counts, and
//! whatever fails leaves the request there. From then on the new attempt counts, and the first node
//! is told to forget it. Tokens that come from both are the same, and come to the client once.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{Attempt, FetchReport, KvTransfer, MigrationQuestion, NodeId, PrefillEvent, PrefillJob, RequestKey};

use super::{
    Attempted, LedgerEntry, MigrationAssignment, RequestCore, RequestEffect, RequestEvent, RequestNote, State,
};
use crate::ledger::NodeStart;

/// How often other nodes are asked to take one request off a decode node.
const MAX_TRIES: u32 = 16;
/// How often one request migrates.
const MAX_MIGRATIONS: u32 = 4;

/// Who was asked to go on with a request, and the attempt that it would go on as.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MigrationTarget {
    pub(super) attempt: Attempt,
    pub(super) to: NodeStart,
}

/// What there was of an attempt's migrations.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    /// How often a node was asked, at this decode node.
    tries: u32,
    /// Nodes that did not take it; they are asked again once no other node is left.
    refused: Vec<NodeId>,
    /// The attempt that it would go on as, while the cluster is asked for a node.
    asking: Option<RequestKey>,
    /// Whether the attempt began at another decode node.
    has_migrated: bool,
}

impl Migrations {
    /// The attempt whose node the cluster is asked for; it is not waited for any more.
    pub(super) fn take_asking(&mut self) -> Option<RequestKey> {
        self.asking.take()
    }

    /// Whether the attempt goes on with what another decode node began.
    pub(super) fn has_migrated(&self) -> bool {
        self.has_migrated
    }
}

impl RequestCore {
    /// The request's decode node would rather have it go on elsewhere.
    pub(super) fn on_migration_requested(&mut self, output_tokens: u32) {
        let is_free = self.migrations.tries < MAX_TRIES
            && self.timeline.migrations < MAX_MIGRATIONS
            && self.migrations.asking.is_none();
        // Before the first token is in order, or the prefill node is done, it is early: it is
        // offered again.
        let is_settled = self.state == State::Decoding && self.output.len() == output_tokens;
        let Some(Attempted { key, .. }) = self.attempted.as_ref().filter(|_| is_free && is_settled) else { return };
        let tokens = self.job.tokens.len() as u32 + output_tokens;
        let key = *key;
        let migrated = self.next_key();
        let exclude = self.migrations.refused.clone();
        self.migrations.asking = Some(migrated);
        // The answer may come after the attempt has failed: the next one is another one.
        self.last_attempt = Some(migrated.attempt);
        let question = MigrationQuestion { key, migrated, tokens, exclude };
        self.effects.push_back(RequestEffect::PlaceMigration(question));
    }

    /// The cluster's answer to the [`RequestEffect::PlaceMigration`] that names this attempt;
    /// `None` if no node has room.
    pub fn on_migration_placed(&mut self, key: RequestKey, to: Option<MigrationAssignment>) {
        if self.migrations.asking.take_if(|asking| *asking == key).is_none() {
            // It is over, and so is what was charged.
            return;
        }
        let Some(MigrationAssignment { to, source }) = to else { return self.migrations.refused.clear() };
        let job = self.job.migrated(key, self.output.sent(), source);
        let job = PrefillJob { salt: Arc::clone(&self.salt), ..job };
        self.migrations.tries += 1;
        self.effects.push_back(RequestEffect::Submit { node: to.node.clone(), job });
        self.state = State::Migrating(MigrationTarget { attempt: key.attempt, to });
    }

    /// The node that was asked answers.
    pub(super) fn on_migrating(&mut self, now: Instant, event: RequestEvent) {
        match event {
            RequestEvent::Prefill(PrefillEvent::Fetched(report)) => {
                self.go_on_at_other(now);
                self.on_kv_fetched(report);
                self.heard = now;
            }
            RequestEvent::Prefill(PrefillEvent::Failed(refused)) => self.on_migration_failed(&refused.message),
            // It has nothing else to say before.
            RequestEvent::Prefill(_) | RequestEvent::Decode(_) | RequestEvent::MigrationRequested(_) => {}
        }
    }

    /// The node that was asked does not take the request: it stays at its node.
    pub(super) fn on_migration_failed(&mut self, reason: &str) {
        if let State::Migrating(asked) = &self.state {
            self.migrations.refused.push(asked.to.node.clone());
            self.note(RequestNote::MigrationFailed { reason: reason.to_owned() });
            self.give_up_migration();
        }
    }

    /// The node that was asked need not go on with it.
    pub(super) fn give_up_migration(&mut self) {
        let State::Migrating(asked) = &self.state else { return };
        let key = RequestKey { request: self.job.request, attempt: asked.attempt };
        let node = asked.to.node.clone();
        self.state = State::Decoding;
        self.update_ledger(key, LedgerEntry::Ended);
        self.effects.push_back(RequestEffect::Abort { node, key });
    }

    /// The request is the other node's from now on. Also if that has not answered yet, and the
    /// request's own node has failed. `false`: no node was asked.
    pub(super) fn go_on_at_other(&mut self, now: Instant) -> bool {
        let State::Migrating(MigrationTarget { attempt, to }) = &self.state else { return false };
        let attempt = *attempt;
        let to = to.clone();
        self.end_attempt(true);
        let Some(attempted) = &mut self.attempted else { return false };
        attempted.key.attempt = attempt;
        attempted.placement.decode = Some(to.node.clone());
        attempted.starts = vec![to.clone()];
        attempted.decodes = false;
        attempted.is_done = false;
        attempted.since = now;
        self.migrations = Migrations { has_migrated: true, ..Migrations::default() };
        self.timeline.migrations += 1;
        self.state = State::Decoding;
        self.note(RequestNote::WentOn { node: to.node, output_tokens: self.output.len() });
        true
    }

    /// The other node has it, and has fetched so much of it.
    pub(super) fn on_kv_fetched(&mut self, report: FetchReport) {
        if let Some(Attempted { key, .. }) = &self.attempted {
            self.update_ledger(*key, LedgerEntry::Fetched { way: None, report: report.clone() });
        }
        let migrated = &mut self.timeline.migrated;
        *migrated = KvTransfer {
            bytes: migrated.bytes.saturating_add(report.bytes),
            transport: if report.transport.is_empty() { migrated.transport.clone() } else { report.transport.clone() },
            elapsed: migrated.elapsed.saturating_add(report.elapsed),
            ..KvTransfer::default()
        };
        self.note(RequestNote::Fetched(report));
    }
}
