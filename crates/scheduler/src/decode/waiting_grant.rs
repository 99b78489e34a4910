//! Prefill nodes that ask for grants, and those that wait in line for room.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::{ErrorKind, GrantReply, GrantRequest, NodeStart, Refused};

use super::{DecodeCore, DecodeEffect};

/// A prefill node whose wait for room is over asks again a moment later; its place in the line is
/// kept for so long.
const PLACE_KEPT: Duration = Duration::from_secs(1);

/// A prefill node that wants a grant for which there is no room.
#[derive(Debug)]
pub(super) struct WaitingGrant {
    pub request: GrantRequest,
    /// When it is refused; if it was refused already, when its place is given up.
    pub until: Instant,
    /// Whether it waits for the answer. A refused one keeps its place for a moment, and none passes
    /// it: what comes free would always be too little for a large one.
    pub waits: bool,
}

impl DecodeCore {
    /// A prefill node asks for room. Answered by [`DecodeEffect::OpenGrant`] or
    /// [`DecodeEffect::RefuseGrant`], at once or, if room is all that is missing, within
    /// [`crate::DecodeConfig::grant_wait`].
    pub fn on_grant_request(&mut self, now: Instant, request: GrantRequest) {
        let until = now + self.config.grant_wait;
        if let Some(waiting) = self.waiting_grants.iter_mut().find(|waiting| waiting.request.key == request.key) {
            // Its place is the one that it had; the answer goes to who asked last.
            *waiting = WaitingGrant { request, until, waits: true };
            return self.answer_asked(now);
        }
        let first = self.waiting_grants.is_empty() && !self.lacks_room;
        let opened = if first { self.open_grant(now, &request) } else { self.check_request(&request).and(Ok(None)) };
        match opened {
            Ok(None)
                if self.config.grant_wait > Duration::ZERO && self.waiting_grants.len() < self.config.max_waiting =>
            {
                self.waiting_grants.push_back(WaitingGrant { request, until, waits: true });
            }
            Ok(reply) => self.answer_grant(request, reply),
            Err(refused) => self.effects.push_back(DecodeEffect::RefuseGrant { key: request.key, refused }),
        }
    }

    fn answer_grant(&mut self, request: GrantRequest, reply: Option<GrantReply>) {
        let key = request.key;
        let effect = match reply {
            Some(reply) => {
                let prefill = NodeStart { node: request.prefill, generation: request.prefill_generation };
                DecodeEffect::OpenGrant { key, prefill, reply }
            }
            None => DecodeEffect::RefuseGrant { key, refused: self.no_room(&request) },
        };
        self.effects.push_back(effect);
    }

    /// Room may have come free. Those who asked for it get it, first come, first served, unless a
    /// running sequence already waits for it.
    pub(super) fn answer_asked(&mut self, now: Instant) {
        while !self.lacks_room
            && let Some(waiting) = self.waiting_grants.pop_front_if(|waiting| waiting.waits)
        {
            match self.open_grant(now, &waiting.request) {
                Ok(None) => return self.waiting_grants.push_front(waiting),
                Ok(reply) => self.answer_grant(waiting.request, reply),
                Err(refused) => self.effects.push_back(DecodeEffect::RefuseGrant { key: waiting.request.key, refused }),
            }
        }
    }

    /// Those who waited long enough are refused, and keep their place until it is clear that they
    /// do not ask again.
    pub(super) fn end_grant_waits(&mut self, now: Instant) {
        self.waiting_grants.retain(|waiting| waiting.waits || waiting.until > now);
        let mut refused = Vec::new();
        for waiting in self.waiting_grants.iter_mut().filter(|waiting| waiting.waits && waiting.until <= now) {
            waiting.waits = false;
            waiting.until = now + PLACE_KEPT;
            refused.push(waiting.request.clone());
        }
        for request in &refused {
            self.refuse_grant(request, ErrorKind::Overloaded, "no room came free in time");
        }
    }

    /// Refuses those who asked for room and of whom `which` is true, and forgets their places.
    pub(super) fn refuse_asked(&mut self, kind: ErrorKind, reason: &str, which: impl Fn(&GrantRequest) -> bool) {
        let waiting = std::mem::take(&mut self.waiting_grants);
        let (refused, kept): (VecDeque<_>, _) = waiting.into_iter().partition(|waiting| which(&waiting.request));
        self.waiting_grants = kept;
        for waiting in refused.into_iter().filter(|waiting| waiting.waits) {
            self.refuse_grant(&waiting.request, kind, reason);
        }
    }

    fn refuse_grant(&mut self, request: &GrantRequest, kind: ErrorKind, reason: &str) {
        let message = match kind {
            ErrorKind::Overloaded => format!("{reason}: {}", self.no_room(request).message),
            _ => reason.to_owned(),
        };
        self.effects.push_back(DecodeEffect::RefuseGrant { key: request.key, refused: Refused { kind, message } });
    }

    /// Blocks that must be free or cached before the first of those who asked has its grant.
    pub(super) fn asked_blocks(&self) -> Option<usize> {
        let request = &self.waiting_grants.front()?.request;
        let needed = self.needed_blocks(request).ok()?;
        let cached = self.cached_blocks(request);
        Some(self.pool.count_cached(&cached) + needed.beside(&cached))
    }

    fn no_room(&self, request: &GrantRequest) -> Refused {
        let prompt = request.prompt_tokens;
        let output = request.max_tokens;
        let needed = match self.needed_blocks(request) {
            Ok(needed) => needed,
            Err(refused) => return refused,
        };
        let cached = self.cached_blocks(request);
        let missing = match self.pool.check_fits(&cached, needed.beside(&cached)) {
            Ok(()) => "others wait for it, too".to_owned(),
            Err(error) => error.to_string(),
        };
        let message = format!("no room for {prompt} prompt and {output} output tokens: {missing}");
        Refused { kind: ErrorKind::Overloaded, message }
    }
}
