//! Random interleavings: every request ends exactly once, with the tokens of the definition, and nothing is left behind.

use super::world::{Counts, Faults, World};

fn run(seed: u64, faults: Faults) -> (u64, Counts) {
    let mut world = World::new(seed, faults);
    world.submit_jobs(30);
    world.run();
    world.check();
    (world.trace, world.counts)
}

fn total(seeds: std::ops::Range<u64>, faults: Faults) -> Counts {
    let mut sum = Counts::default();
    for seed in seeds {
        let (_, counts) = run(seed, faults);
        sum.finished += counts.finished;
        sum.failed += counts.failed;
        sum.aborted += counts.aborted;
        sum.refused_grants += counts.refused_grants;
        sum.redirected += counts.redirected;
        sum.failed_pushes += counts.failed_pushes;
        sum.cached_tokens += counts.cached_tokens;
        sum.held_blocks += counts.held_blocks;
        sum.shared_chunks += counts.shared_chunks;
        sum.batched_steps += counts.batched_steps;
        sum.quarantined += counts.quarantined;
        sum.refused_at_once += counts.refused_at_once;
        sum.snapshots += counts.snapshots;
        sum.fetched_tokens += counts.fetched_tokens;
        sum.failed_fetches += counts.failed_fetches;
        sum.copied_tokens += counts.copied_tokens;
        sum.failed_copies += counts.failed_copies;
        sum.overlapped_fetches += counts.overlapped_fetches;
        sum.spoiled_steps += counts.spoiled_steps;
        sum.late_prefixes += counts.late_prefixes;
        sum.stored += counts.stored;
        sum.loaded_tokens += counts.loaded_tokens;
        sum.loaded_at_decode += counts.loaded_at_decode;
        sum.local_prompts += counts.local_prompts;
        sum.tails += counts.tails;
        sum.followed += counts.followed;
        sum.preemptions += counts.preemptions;
        sum.taken += counts.taken;
        sum.not_taken += counts.not_taken;
        sum.moved_tokens += counts.moved_tokens;
        sum.finished_there += counts.finished_there;
        sum.adopted += counts.adopted;
        sum.offered_running += counts.offered_running;
    }
    sum
}

#[test]
fn without_faults_only_a_full_decode_node_refuses() {
    let counts = total(0..60, Faults::default());
    assert_eq!(counts.aborted, 0);
    assert!(counts.finished > 60 * 15 && counts.refused_grants > 0 && counts.redirected > 0);
    assert!(counts.failed <= counts.refused_grants + counts.refused_at_once);
    assert!(counts.cached_tokens > 0 && counts.held_blocks > 0);
    assert!(counts.shared_chunks > 0 && counts.batched_steps > 0 && counts.snapshots > 0);
    assert!(counts.fetched_tokens > 0 && counts.overlapped_fetches > 0 && counts.spoiled_steps == 0, "{counts:?}");
    assert!(counts.local_prompts > 0 && counts.preemptions > 0, "{counts:?}");
    assert!(counts.tails > 50 && counts.followed > 100, "{counts:?}");
    assert!(counts.stored > 0 && counts.loaded_tokens > 0 && counts.loaded_at_decode > 0, "{counts:?}");
    assert!(counts.copied_tokens > 0 && counts.failed_copies > 0, "{counts:?}");
    assert!(counts.taken > 0 && counts.moved_tokens > 0 && counts.finished_there > 0, "{counts:?}");
}

#[test]
fn a_decode_node_on_its_way_out_hands_its_sequences_on() {
    let counts = total(3000..3060, Faults { drain: 100, ..Faults::default() });
    assert!(counts.offered_running > 30 && counts.taken > 30 && counts.finished_there > 30, "{counts:?}");
    let faults = Faults { abort: 20, step: 4, lost_conductor: 20, late: 2, fetch: 15, drain: 100, ..Faults::default() };
    let counts = total(4000..4120, faults);
    assert!(counts.taken > 30 && counts.not_taken > 0 && counts.adopted > 0, "{counts:?}");
}

#[test]
fn every_request_ends_once_under_aborts_and_faults() {
    let faults =
        Faults { abort: 33, grant: 5, push: 3, handover: 5, step: 1, lost_conductor: 30, late: 2, fetch: 8, drain: 0 };
    let counts = total(1000..1120, faults);
    assert!(counts.finished > 500 && counts.failed > 100 && counts.aborted > 100);
    assert!(counts.failed_pushes > 100 && counts.quarantined > 100);
    assert!(counts.fetched_tokens > 0 && counts.failed_fetches > 0 && counts.spoiled_steps > 0, "{counts:?}");
    assert!(counts.late_prefixes > 0 && counts.tails > 100 && counts.followed > 100, "{counts:?}");
    assert!(counts.copied_tokens > 0 && counts.failed_copies > 0, "{counts:?}");
}

#[test]
fn every_request_ends_once_where_nearly_everything_fails() {
    let faults = Faults {
        abort: 60,
        grant: 30,
        push: 30,
        handover: 30,
        step: 10,
        lost_conductor: 60,
        late: 20,
        fetch: 30,
        drain: 0,
    };
    let counts = total(2000..2060, faults);
    assert!(counts.finished > 0 && counts.failed > 100);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let faults =
        Faults { abort: 33, grant: 5, push: 3, handover: 5, step: 1, lost_conductor: 30, late: 2, fetch: 8, drain: 0 };
    assert_eq!(run(7, faults), run(7, faults));
    assert_ne!(run(7, faults).0, run(8, faults).0);
}
