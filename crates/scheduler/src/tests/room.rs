//! The decode core by itself: places in the line for room, and which sequence is preempted.

use std::time::Duration;

use baton_types::{ErrorKind, RequestKey, TokenId};

use super::decode::{MS, Node, config, grant_request, handoff, ranges, submitted, tokens};
use super::engine::key;
use crate::{DecodeConfig, DecodeEffect};

/// Prompts that share nothing.
pub(super) fn prompt(n: u64, len: u32) -> Vec<TokenId> {
    tokens(len).iter().map(|token| (token + 13 * n as u32) % 40).collect()
}

impl Node {
    pub fn wake(&mut self) {
        let due = self.core.next_wakeup().unwrap();
        self.after(due - self.now, |core, now| core.on_wakeup(now));
    }

    fn ask_later(&mut self, n: u64, tokens: u32, max_tokens: u32) {
        let request = grant_request(n, &prompt(n, tokens), max_tokens);
        self.after(100 * MS, |core, now| core.on_grant_request(now, request));
    }

    fn granted(&mut self) -> Vec<RequestKey> {
        let granted = |effect: &DecodeEffect| match effect {
            DecodeEffect::OpenGrant { key, .. } => Some(*key),
            _ => None,
        };
        let found = self.effects.iter().filter_map(granted).collect();
        self.effects.retain(|effect| granted(effect).is_none());
        found
    }
}

#[test]
fn large_grant_request_keeps_its_place_from_one_wait_to_the_next() {
    let wait = Duration::from_secs(4);
    let mut node = Node::new(DecodeConfig { grant_wait: wait, ..config(6) });
    node.admit(0, &prompt(0, 8), 13);
    node.ask_later(1, 16, 5);
    node.wake();
    assert_eq!(node.take_refusal().kind, ErrorKind::Overloaded);
    // There is a block for a small one, and it would be the large one's.
    node.ask_later(2, 2, 3);
    node.ask_later(1, 16, 5);
    assert_eq!(node.granted(), []);
    let _ = node.run();
    assert_eq!(node.granted(), [key(1), key(2)]);

    // One that does not ask again gives its place up.
    let mut node = Node::new(DecodeConfig { grant_wait: wait, ..config(6) });
    node.admit(0, &prompt(0, 8), 13);
    node.ask_later(1, 16, 5);
    node.after(wait / 2, |_, _| {});
    node.ask_later(2, 2, 3);
    node.wake();
    assert_eq!(node.take_refusal().kind, ErrorKind::Overloaded);
    assert_eq!((node.granted(), node.core.load().waiting), (vec![], 2));
    node.wake();
    assert_eq!((node.granted(), node.core.load().waiting), (vec![key(2)], 1));
    assert!(!node.effects.iter().any(|effect| matches!(effect, DecodeEffect::RefuseGrant { .. })));
    let due = node.core.next_wakeup().unwrap();
    assert!(due > node.now + Duration::from_secs(50), "nothing but the grants' own time limits is left");
}

#[test]
fn running_sequence_is_preempted_for_older_one_that_has_no_slot() {
    let mut node = Node::new(DecodeConfig { max_running: 1, growth_blocks: 0, ..config(6) });
    let reply = node.ask(grant_request(1, &prompt(1, 8), 3)).unwrap();
    node.after(MS, |core, now| core.on_submit(now, submitted(2, &prompt(2, 8), 12)));
    let mut plan = node.take_step();
    node.hand_off(handoff(1, &prompt(1, 8), 3, reply.grant, 2)).unwrap();
    node.arrive(reply.grant, 0, 2);
    assert_eq!(node.fence(), 1);
    while node.core.load().preemptions == 0 {
        assert_eq!(ranges(&plan)[0].0, 2);
        node.finish(&plan, 41);
        plan = node.take_step();
    }
    assert_eq!(ranges(&plan), [(1, 8..9)]);
    node.finish(&plan, 41);
    let _ = node.run();
    assert!(node.core.is_idle());
}
