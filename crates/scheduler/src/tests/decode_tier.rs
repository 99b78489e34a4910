//! The tier below a decode node's arena, at the core by itself. Blocks have 4 tokens.

use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, BlockId, ErrorKind, FetchSource, Generation, PrefillEvent, PrefillJob, Refused, RequestKey,
};

use super::engine::{key, model, target};
use super::prefill::job;
use crate::{DecodeConfig, DecodeCore, DecodeEffect, StepOutput, TierEffect, TieredCore};

/// A core of 12 blocks, whose tier writes two blocks at once.
struct Node {
    core: DecodeCore,
    now: Instant,
    effects: Vec<DecodeEffect>,
}

impl Node {
    fn new() -> Self {
        let config = DecodeConfig { max_stores: 2, prompt_budget: 64, ..DecodeConfig::new(model(12)) };
        Self { core: DecodeCore::new(config).unwrap(), now: Instant::now(), effects: Vec::new() }
    }

    fn after(&mut self, time: Duration, event: impl FnOnce(&mut DecodeCore, Instant)) {
        self.now += time;
        event(&mut self.core, self.now);
        self.effects.extend(std::iter::from_fn(|| self.core.poll_effect()));
        self.core.check_integrity().unwrap();
    }

    fn now(&mut self, event: impl FnOnce(&mut DecodeCore, Instant)) {
        self.after(Duration::ZERO, event);
    }

    fn take<T>(&mut self, pick: impl Fn(&DecodeEffect) -> Option<T>) -> Option<T> {
        let index = self.effects.iter().position(|effect| pick(effect).is_some())?;
        pick(&self.effects.remove(index))
    }

    /// Positions of the next step, which is one sequence's; it is carried out.
    fn step(&mut self) -> Option<(RequestKey, std::ops::Range<usize>)> {
        let plan = self.take(|effect| match effect {
            DecodeEffect::RunStep(plan) => Some(plan.clone()),
            _ => None,
        })?;
        let [sequence] = &plan.sequences[..] else { panic!("{plan:?}") };
        let output = StepOutput {
            key: sequence.key,
            sampled: Some((41, None)),
            prompt_logprobs: Vec::new(),
            hidden: Vec::new(),
            failed: None,
            is_mask_late: false,
        };
        self.now(|core, now| core.on_step_done(now, plan.id, Ok(vec![output])));
        Some((sequence.key, sequence.range.clone()))
    }

    fn load(&mut self) -> Option<(RequestKey, Vec<BlockHash>, Vec<BlockId>)> {
        self.take(|effect| match effect {
            DecodeEffect::Tier(TierEffect::Load { key, hashes, destinations }) => {
                Some((*key, hashes.clone(), destinations.clone()))
            }
            _ => None,
        })
    }

    /// Carries every write out, and counts them.
    fn write_all(&mut self) -> usize {
        let mut written = 0;
        while let Some(hash) = self.take(|effect| match effect {
            DecodeEffect::Tier(TierEffect::Store { hash, .. }) => Some(*hash),
            _ => None,
        }) {
            self.now(|core, now| core.on_stored(now, hash, true));
            written += 1;
        }
        written
    }

    /// A prompt of 16 tokens that the arena has lost and the tier holds.
    fn with_lost_prompt() -> Self {
        let mut node = Self::new();
        node.now(|core, now| core.on_submit(now, job(0, 0..16, 1)));
        assert_eq!(node.step(), Some((key(0), 0..16)));
        assert_eq!((node.write_all(), node.core.load().blocks_ssd), (4, 4));
        // 11 of the 12 blocks.
        node.now(|core, now| core.on_submit(now, job(1, 5..49, 1)));
        assert_eq!(node.step(), Some((key(1), 0..44)));
        assert_eq!(node.write_all(), 11);
        let told = node.core.kv_snapshot().events.len();
        assert_eq!((told, node.core.load().blocks_ssd), (12, 15), "what only the tier holds is not told");
        node.effects.clear();
        node
    }

    fn cached_tokens(&mut self, of: u64) -> Option<u32> {
        self.take(|effect| match effect {
            DecodeEffect::EmitPrefill { key: whose, event: PrefillEvent::Started { cached_tokens, .. }, .. } => {
                Some(*cached_tokens).filter(|_| *whose == key(of))
            }
            _ => None,
        })
    }
}

fn failed(kind: ErrorKind) -> Result<usize, Refused> {
    Err(Refused { kind, message: String::new() })
}

#[test]
fn evicted_blocks_are_read_from_ssd_before_the_sequence_runs() {
    let mut node = Node::with_lost_prompt();
    node.now(|core, now| core.on_submit(now, job(2, 0..18, 1)));
    let (of, hashes, destinations) = node.load().unwrap();
    assert_eq!((of, destinations.len() + node.core.load().prefix_hits as usize / 4), (key(2), 4));
    assert_eq!((node.step(), node.cached_tokens(2)), (None, None), "it waits for them");
    // One that needs nothing of the tier does not wait for it.
    node.now(|core, now| core.on_submit(now, job(3, 30..34, 1)));
    assert_eq!(node.step(), Some((key(3), 0..4)));
    node.now(|core, now| core.on_load_done(now, key(2), Ok(hashes.len())));
    assert_eq!((node.cached_tokens(2), node.step()), (Some(16), Some((key(2), 16..18))));
    node.write_all();
    assert!(node.core.is_idle());
}

#[test]
fn failed_ssd_read_is_computed_and_hung_ssd_is_not_read_for_a_while() {
    for (kind, asked_again) in [(ErrorKind::DataLoss, true), (ErrorKind::DeadlineExceeded, false)] {
        let mut node = Node::with_lost_prompt();
        node.now(|core, now| core.on_submit(now, job(2, 0..18, 1)));
        let asked = node.load().unwrap().1.len();
        node.now(|core, now| core.on_load_done(now, key(2), failed(kind)));
        assert_eq!(node.step(), Some((key(2), 16 - 4 * asked..18)));
        node.write_all();
        // The other prompt has lost some of its blocks by now.
        node.now(|core, now| core.on_submit(now, job(4, 5..49, 1)));
        assert_eq!(node.load().is_some(), asked_again, "{kind:?}");
    }
}

#[test]
fn blocks_of_aborted_request_wait_for_their_ssd_read() {
    let mut node = Node::with_lost_prompt();
    node.now(|core, now| core.on_submit(now, job(2, 0..18, 4)));
    assert!(node.load().is_some());
    let used = node.core.load().blocks_used;
    node.now(|core, now| core.on_abort(now, key(2)));
    assert_eq!((node.core.load().blocks_used, node.core.is_idle()), (used, false));
    node.now(|core, now| core.on_load_done(now, key(2), Ok(1)));
    assert_eq!((node.core.load().blocks_used, node.core.is_idle()), (0, true));
    assert_eq!(node.step(), None);
}

#[test]
fn migrated_blocks_that_are_not_fetched_are_read_from_ssd() {
    let mut node = Node::with_lost_prompt();
    let fetch = FetchSource { node: target().node, generation: Generation(1), address: String::new(), tokens: 17 };
    let resumed = PrefillJob { is_migration: true, output_tokens: 2, fetch: Some(fetch), ..job(2, 0..18, 4) };
    node.now(|core, now| core.on_submit(now, resumed));
    assert!(node.load().is_none(), "nothing else is written into its blocks while it is fetched");
    let gone = Refused { kind: ErrorKind::NotFound, message: String::new() };
    node.now(|core, now| core.on_fetch_done(now, key(2), Err(gone)));
    let taken = node.take(|effect| match effect {
        DecodeEffect::AnswerMigration { result, .. } => Some(result.is_ok()),
        _ => None,
    });
    let (of, hashes, _) = node.load().unwrap();
    assert_eq!((taken, of, node.step()), (Some(true), key(2), None));
    node.now(|core, now| core.on_load_done(now, key(2), Ok(hashes.len())));
    assert_eq!(node.step(), Some((key(2), 16..18)));
    while node.step().is_some() {}
    node.write_all();
    assert!(node.core.is_idle());
}
