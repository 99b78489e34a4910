//! Engines that die and stand still.

use baton_proto::v1::node_event::Event;
use baton_scheduler::REPORT_INTERVAL;
use baton_types::PrefillEvent;
use baton_worker::config::Settings;
use baton_worker::testing::{Conductor, World, job, key, prompt, settings};

use crate::start;

/// Waits for the load that the next look reports.
async fn look(world: &World, session: &mut Conductor) -> bool {
    world.clock.pass(REPORT_INTERVAL).await;
    session.find(|event| if let Event::Load(load) = event { Some(load.stalled) } else { None }).await
}

pub(super) async fn a_dead_engine_thread_ends_the_node() {
    let world = World::default();
    let prefill = start(&world, settings("p0")).await;
    let mut session = prefill.session(7).await;
    prefill.hold.panic();
    session.submit(&job(1, &prompt(1, 40), 1)).await;
    // Conductors hear of a failure, not of a drain.
    let status = loop {
        match session.event().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the session ended as if it was drained"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.message(), "this node has failed");
    let reason = prefill.fails().await;
    assert!(reason.contains("'loop' failed: the engine's thread is gone"), "{reason}");
}

#[tokio::test]
async fn dead_engine_thread_ends_prefill_node_with_an_error() {
    a_dead_engine_thread_ends_the_node().await;
}

pub(super) async fn an_engine_that_stalls_is_not_ready_and_ends_the_node_if_it_stays_so() {
    let world = World::default();
    let patient = Settings { step_timeout_s: 3.0, ..settings("p0") };
    let prefill = start(&world, patient).await;
    let mut session = prefill.session(7).await;
    prefill.hold.hold_after(0);
    session.submit(&job(1, &prompt(1, 40), 1)).await;
    prefill.hold.is_held().await;
    // The load that was reported first.
    let mut looks = 0;
    while !look(&world, &mut session).await {
        looks += 1;
    }
    assert!(looks >= 9, "stalled after {looks} looks, and two seconds are ten");
    assert!(prefill.http("/ready").await.ends_with("stalled\n"));
    prefill.hold.release();
    while !matches!(session.prefill(key(1)).await, PrefillEvent::FirstToken { .. }) {}
    while look(&world, &mut session).await {}
    assert!(prefill.http("/ready").await.ends_with("serving\n"));

    prefill.hold.hold_after(0);
    session.submit(&job(2, &prompt(2, 40), 1)).await;
    prefill.hold.is_held().await;
    loop {
        tokio::select! {
            event = session.event() => if event.is_err() { break },
            () = world.clock.pass(REPORT_INTERVAL) => {}
        }
    }
    prefill.hold.release();
    let reason = prefill.fails().await;
    assert!(reason.contains("step_timeout_s"), "{reason}");
}

#[tokio::test]
async fn stalled_engine_makes_prefill_node_not_ready_then_ends_it() {
    an_engine_that_stalls_is_not_ready_and_ends_the_node_if_it_stays_so().await;
}
