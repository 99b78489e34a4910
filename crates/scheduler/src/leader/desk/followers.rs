//! What conductors that follow ask of this one and say to it, while it leads.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{ConductorId, Declared, LedgerEntry, Question, RequestKey};

use super::decide::answer_to;
use super::{Answer, Decided, DecisionReasons, Desk, DeskEffect, Following, Role, StreamId};
use crate::cluster::Cluster;

impl<E> Desk<E> {
    /// Another conductor follows. `None` if this one does not lead.
    pub fn on_follower(
        &mut self,
        now: Instant,
        who: ConductorId,
        attempts: &[Declared],
        cluster: &mut Cluster,
    ) -> Option<Following> {
        let Role::Leads { settles } = self.role else { return None };
        if !self.followers.on_greeted(now, cluster, who, attempts) {
            return None;
        }
        // It made room for this one.
        let forgotten = self.streams.extract_if(.., |who, _| !self.followers.knows(*who));
        self.effects.extend(forgotten.map(|(_, stream)| DeskEffect::EndStream(stream)));
        let stream = StreamId(self.begin());
        if let Some(before) = self.streams.insert(who, stream) {
            // What it still has to say was said before what is declared now.
            self.effects.push_back(DeskEffect::EndStream(before));
        }
        Some(Following { who, stream, term: self.term, settles })
    }

    pub(super) fn is_current(&self, from: &Following) -> bool {
        self.streams.get(&from.who) == Some(&from.stream)
    }

    /// It asks. After the end of a term nothing is answered.
    pub fn on_follower_asked(
        &mut self,
        now: Instant,
        from: &Following,
        question: &Question,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<Answer<E>> {
        if !self.is_current(from) {
            return None;
        }
        // Of another conductor's attempts it has nothing to ask.
        if question.names().into_iter().any(|key| cluster.is_of_other(from.who, key)) {
            return None;
        }
        if let Question::Place(_) = question
            && let Some(refusal) = cluster.claims_refused(now, from.who)
        {
            let grounds = DecisionReasons::NoLeader;
            return Some(Answer::Placed(Box::new(Decided { at: now, placed: Err(refusal), grounds })));
        }
        let answer = answer_to(now, question, cluster, random);
        cluster.claim(from.who, question.key());
        match (&answer, question) {
            (Answer::Placed(decided), Question::Place(of))
                if decided.placed.is_ok() && !of.is_admitted && !of.bypass_cache =>
            {
                self.effects.push_back(DeskEffect::Observe(Arc::clone(&of.block_hashes)));
            }
            _ => {}
        }
        Some(answer)
    }

    /// Something happened to one of its attempts.
    pub fn on_follower_ledger_update(
        &mut self,
        now: Instant,
        from: &Following,
        key: RequestKey,
        entry: &LedgerEntry,
        cluster: &mut Cluster,
    ) {
        if !self.is_current(from) {
            return;
        }
        if !cluster.is_of_other(from.who, key) {
            cluster.update_ledger(now, key, entry);
        }
    }

    /// Its stream is over.
    pub fn on_follower_gone(&mut self, now: Instant, gone: &Following) {
        if self.is_current(gone) {
            self.streams.remove(&gone.who);
            self.followers.on_gone(now, gone.who);
        }
    }
}
