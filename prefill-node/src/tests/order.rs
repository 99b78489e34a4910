//! What the engine says goes before everything else in a node's loop.
//!
//! So the end of a step may be heard before what came first.

use std::time::{Duration, Instant};

use baton_runtime::MetricDoc;
use baton_scheduler::PrefillCore;
use baton_types::{Load, NodeRole, PrefillEvent, PrefillJob, QueueOrdering};
use baton_worker::config::Settings;
use baton_worker::testing::{World, job, key, prompt, settings};
use baton_worker::{EngineEvent, FetchEvent, Input, NodeParts, Role};

use crate::role::{PrefillInput, PrefillRole};
use crate::start;

/// A role whose loop is late with the ends of fetches.
///
/// It hears each after the engine's next word, unless that is of a layer.
struct LateFetches {
    role: PrefillRole,
    held: Option<Input<PrefillInput>>,
}

impl Role for LateFetches {
    const ROLE: NodeRole = NodeRole::Prefill;
    const METRICS: &'static [MetricDoc] = &[];
    type Core = PrefillCore;
    type Event = PrefillInput;

    fn new(settings: &Settings, parts: NodeParts<PrefillInput>) -> anyhow::Result<Self> {
        Ok(Self { role: PrefillRole::new(settings, parts)?, held: None })
    }

    fn core(&mut self) -> &mut PrefillCore {
        self.role.core()
    }

    fn on_input(&mut self, now: Instant, input: Input<PrefillInput>) {
        let is_over = matches!(&input, Input::Engine(event) if !matches!(event, EngineEvent::KvReady { .. }));
        if matches!(input, Input::Fetch(FetchEvent::Done(..))) {
            self.held = Some(input);
            return;
        }
        self.role.on_input(now, input);
        if let Some(held) = self.held.take_if(|_| is_over) {
            self.role.on_input(now, held);
        }
    }

    fn carry_out(&mut self) -> anyhow::Result<()> {
        self.role.carry_out()
    }

    fn load(&self, now: Instant) -> Load {
        self.role.load(now)
    }
}

#[tokio::test]
async fn step_ends_only_after_core_knows_its_fetched_prefix() {
    let world = World::default();
    let holder = start(&world, settings("p0")).await;
    let mut at_holder = holder.session(7).await;
    at_holder.submit(&job(1, &prompt(1, 60), 1)).await;
    let expected = at_holder.prefill_to_end(key(1)).await;

    let reader = world.start::<LateFetches>(settings("p1")).await;
    let mut session = reader.session(7).await;
    // A step that takes so long may begin with the first layer.
    let terms = QueueOrdering { compute: Duration::from_secs(3600), ..QueueOrdering::default() };
    session.submit(&PrefillJob { fetch: Some(holder.source(48)), terms, ..job(2, &prompt(1, 60), 1) }).await;
    let events = session.prefill_to_end(key(2)).await;
    let first = |events: &[PrefillEvent]| match events.last() {
        Some(PrefillEvent::FirstToken { token, .. }) => *token,
        other => panic!("{other:?}"),
    };
    assert_eq!(first(&events), first(&expected));
    reader.ends().await;
    holder.ends().await;
}
