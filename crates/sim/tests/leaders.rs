//! Several frontends elect one of them while etcd, the network and the processes fail: no two place
//! in one term, and nothing is lost.
//!
//! `simulate_leaders` checks it.

use baton_sim::{LeaderFault, LeadersOutcome, simulate_leaders};

fn run(seeds: std::ops::Range<u64>) {
    let mut sum = LeadersOutcome::default();
    for seed in seeds {
        println!("seed {seed}");
        sum.add(simulate_leaders(seed));
    }
    println!("{sum:#?}");
    for fault in LeaderFault::ALL {
        assert!(sum.faults.contains_key(fault), "{} never happened", fault.as_str());
    }
    assert!(sum.stale > 0, "no leader was ever stopped, or cut off, for long enough");
    let failed: u64 =
        sum.failed.iter().filter(|(why, _)| *why != "RequestError::Aborted").map(|(_, count)| count).sum();
    assert!(sum.finished > 5 * failed, "{} finished, {failed} failed", sum.finished);
}

#[test]
fn two_leaders_never_place_in_one_term() {
    run(0..100);
}

#[test]
#[ignore = "takes half a minute: make test-long"]
fn two_leaders_never_place_in_one_term_a_thousand_times() {
    run(1000..2000);
}

#[test]
fn same_seed_gives_the_same_leader_terms() {
    assert_eq!(simulate_leaders(7), simulate_leaders(7));
    assert_ne!(simulate_leaders(7), simulate_leaders(8));
}
