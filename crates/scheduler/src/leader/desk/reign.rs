//! Who leads, as etcd, nodes and the leader itself say.

use std::time::{Duration, Instant};

use baton_types::{ErrorKind, FromLeader, NodeStart, Question, ToLeader};

use super::decide::answer_to;
use super::{
    Answer, Decided, DecisionReasons, Denials, Desk, DeskEffect, Followers, Heard, LinkId, OtherTerm, PATIENCE, Role,
    Waiting,
};
use crate::cluster::Cluster;
use crate::placement::Refusal;

impl<E> Desk<E> {
    /// This conductor leads from now on. What others have they declare; until `settle` has passed,
    /// nothing is placed without it.
    pub fn on_elected(
        &mut self,
        now: Instant,
        term: u64,
        settle: Duration,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) {
        self.end_term(now, cluster);
        self.alone = false;
        self.on_term(term);
        self.role = Role::Leads { settles: Some(now + settle) };
        self.placed.declared(now).iter().for_each(|declared| cluster.declare(now, declared));
        self.settle(now, cluster, random);
    }

    /// There are no elections: this conductor leads, in term 0.
    pub fn on_alone(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.on_elected(now, 0, Duration::ZERO, cluster, random);
        self.alone = true;
    }

    /// Another conductor leads from now on, in the term that its key has.
    pub fn on_other_leads(&mut self, now: Instant, term: u64, cluster: &mut Cluster) {
        self.end_term(now, cluster);
        self.alone = false;
        self.role = Role::Leaderless;
        self.on_term(term);
    }

    fn on_term(&mut self, term: u64) {
        self.term = term;
        self.denials = Denials::default();
        self.is_sure = false;
        self.keep_heard(|heard| heard.term > term);
        self.effects.push_back(DeskEffect::NameLeader { term });
    }

    fn keep_heard(&mut self, keeps: impl Fn(&Heard) -> bool) {
        self.heard.values_mut().for_each(|heard| heard.retain(&keeps));
        self.heard.retain(|_, heard| !heard.is_empty());
    }

    /// The conductor that leads is reached, and is told all from the beginning.
    pub fn on_follows(&mut self, now: Instant, cluster: &mut Cluster) -> LinkId {
        self.end_term(now, cluster);
        let link = LinkId(self.begin());
        self.role = Role::Follows { link, greeted: false };
        let attempts = self.placed.declared(now);
        self.tell(ToLeader::Greet { conductor: self.id, attempts });
        self.waiting.values_mut().for_each(|waiting| waiting.is_told = false);
        self.tell_waiting();
        link
    }

    /// A stream to a leader is over, or it does not keep up and is told all anew.
    pub fn on_link_lost(&mut self, link: LinkId) {
        if self.link() == Some(link) {
            self.role = Role::Leaderless;
        }
    }

    /// This conductor does not lead any more, and no other is known to.
    pub fn on_step_down(&mut self, now: Instant, cluster: &mut Cluster) {
        if self.leads() {
            self.end_term(now, cluster);
            self.role = Role::Leaderless;
        }
    }

    /// A node tells of a leader of that term, as another conductor has named it; 0: of none that is
    /// later than what this one has named. It is a claim: nothing is placed until etcd was asked.
    /// Gives its number, if etcd is to be.
    pub fn on_heard(
        &mut self,
        now: Instant,
        node: &NodeStart,
        term: u64,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) -> Option<u64> {
        if self.alone || term <= self.term {
            if self.heard.remove(node).is_some() {
                self.go_on(now, cluster, random);
            }
            return None;
        }
        self.is_sure = self.denials.is_sure(now);
        self.heard_so_far += 1;
        let heard = self.heard.entry(node.clone()).or_default();
        // The first one stays: etcd's answer to it would always be too old for the last one.
        heard.truncate(1);
        heard.push(Heard { term, number: self.heard_so_far });
        Some(self.heard_so_far)
    }

    /// Etcd has named the leader of that term. It was asked after everything up to a number was
    /// heard: what nodes told of until then is true or false.
    pub fn on_etcd_named(
        &mut self,
        now: Instant,
        term: u64,
        heard: u64,
        cluster: &mut Cluster,
        random: &mut impl FnMut() -> u64,
    ) {
        // What is true is taken with its leader.
        let is_false = |of: &Heard| of.number <= heard && of.term != term;
        let told = self.heard.iter().flat_map(|(node, told)| told.iter().map(move |told| (node, told)));
        let denied = told.filter(|(_, of)| is_false(of));
        let denied: Vec<_> =
            denied.map(|(node, of)| DeskEffect::DenyTerm { node: node.node.clone(), term: of.term }).collect();
        if !denied.is_empty() {
            self.denials.on_denied(now);
        }
        self.effects.extend(denied);
        self.keep_heard(|of| !is_false(of));
        self.is_sure = term == self.term && self.denials.is_sure(now);
        self.go_on(now, cluster, random);
    }

    /// What waited is placed, or asked of the leader, if nothing is in doubt any more.
    fn go_on(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.tell_waiting();
        if self.decides() {
            self.place_waiting(now, cluster, random);
        }
    }

    /// The ledger of a term ends with it.
    fn end_term(&mut self, now: Instant, cluster: &mut Cluster) {
        if self.leads() {
            let streams = std::mem::take(&mut self.streams);
            self.effects.push_back(DeskEffect::ReignOver { term: self.term });
            self.effects.extend(streams.into_values().map(DeskEffect::EndStream));
            self.followers = Followers::default();
            cluster.forget_charges(now);
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        self.is_sure &= self.denials.is_sure(now);
        if self.leads() {
            self.settle(now, cluster, random);
            self.followers.on_tick(now, cluster);
        }
        if !self.leads() || !self.is_certain() {
            // A leader answers at once, unless it hangs, is unreachable or is in doubt.
            self.refuse_patient(now);
        }
    }

    /// Who declares does so at once: what waited for it is placed.
    pub(super) fn settle(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        let Role::Leads { settles } = &mut self.role else { return };
        if settles.take_if(|at| *at <= now).is_some() {
            self.go_on(now, cluster, random);
        }
    }

    fn place_waiting(&mut self, now: Instant, cluster: &mut Cluster, random: &mut impl FnMut() -> u64) {
        let asked: Vec<_> = self.waiting.values().map(|waiting| waiting.question.clone()).collect();
        for question in asked {
            let answer = answer_to(now, &question, cluster, random);
            self.answer(now, question.key(), answer);
        }
    }

    /// A question that has waited for long enough for a leader is refused.
    fn refuse_patient(&mut self, now: Instant) {
        let due = |waiting: &Waiting| now.saturating_duration_since(waiting.since) >= PATIENCE;
        let due: Vec<_> = self.waiting.iter().filter(|(_, waiting)| due(waiting)).map(|(key, _)| *key).collect();
        for key in due {
            let Some(waiting) = self.waiting.get(&key) else { continue };
            let answer = match waiting.question {
                Question::Place(_) => {
                    let kind = ErrorKind::Unavailable;
                    let retry_after = Some(Duration::from_secs(1));
                    let message = format!("no conductor has led for {} s: nothing is placed", PATIENCE.as_secs());
                    let placed = Err(Refusal { kind, message, retry_after, hold: None, objective: None });
                    Answer::Placed(Box::new(Decided { at: now, placed, grounds: DecisionReasons::NoLeader }))
                }
                Question::Reselect { .. } => Answer::Reselected(None),
                Question::Explain(_) => Answer::Explained(DecisionReasons::NoLeader),
                Question::Migrate(_) => Answer::Migrated(None),
            };
            self.answer(now, key, answer);
        }
    }

    /// The leader said something. What comes from one that is followed no more is not heard: it is
    /// asked of the next one.
    pub fn on_told(&mut self, now: Instant, link: LinkId, told: FromLeader<E>) -> Result<(), OtherTerm> {
        if self.link() != Some(link) {
            return Ok(());
        }
        let grounds =
            |why: Option<E>| why.map_or(DecisionReasons::NoLeader, |why| DecisionReasons::FromLeader(Box::new(why)));
        let (key, answer) = match told {
            FromLeader::Greeted { term } if term != self.term => return Err(OtherTerm { term, named: self.term }),
            FromLeader::Greeted { .. } => {
                self.role = Role::Follows { link, greeted: true };
                return Ok(());
            }
            FromLeader::Placed { key, placed, why } => {
                (key, Answer::Placed(Box::new(Decided { at: now, placed: *placed, grounds: grounds(why) })))
            }
            FromLeader::Reselected(key, to) => (key, Answer::Reselected(to)),
            FromLeader::Migrated(key, to) => (key, Answer::Migrated(to)),
            FromLeader::Explained(key, why) => (key, Answer::Explained(grounds(why))),
        };
        self.answer(now, key, answer);
        Ok(())
    }
}
