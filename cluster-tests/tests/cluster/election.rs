//! Conductors that elect a leader, against a real etcd.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::Etcd;
use baton_membership::{Candidate, Election, Eligibility, LEASE, Leadership, NamedLeader};
use baton_runtime::SystemClock;
use baton_types::ConductorId;
use tokio::sync::watch;
use tokio::task::JoinHandle;

const LIMIT: Duration = Duration::from_secs(20);

/// A conductor's part in the election.
struct Part {
    leadership: watch::Receiver<Leadership>,
    stand: watch::Sender<Eligibility>,
    hear: watch::Sender<u64>,
    named: watch::Receiver<NamedLeader>,
    task: JoinHandle<()>,
}

impl Part {
    fn of(etcd: &Etcd, prefix: &str, id: u64) -> Self {
        Self::of_members(vec![etcd.address().to_owned()], prefix, id)
    }

    fn of_members(members: Vec<String>, prefix: &str, id: u64) -> Self {
        let candidate = Candidate { id: ConductorId(id), address: format!("10.0.0.{id}:7070") };
        let etcd = baton_membership::Etcd::new(members, prefix);
        let (stand, standing) = watch::channel(Eligibility::Ready);
        let (hear, heard) = watch::channel(0);
        let election = Election::new(etcd, candidate, Arc::new(SystemClock), heard, standing);
        let leadership = election.leadership();
        let named = election.named();
        Self { leadership, stand, hear, named, task: tokio::spawn(election.run()) }
    }

    async fn until(&mut self, what: &str, is: impl Fn(&Leadership) -> bool) -> anyhow::Result<Leadership> {
        let found = tokio::time::timeout(LIMIT, self.leadership.wait_for(is)).await;
        Ok(found.with_context(|| format!("never: {what}"))??.clone())
    }

    async fn leads(&mut self) -> anyhow::Result<u64> {
        match self.until("it leads", |known| matches!(known, Leadership::Own { .. })).await? {
            Leadership::Own { term } => Ok(term),
            other => anyhow::bail!("{other:?}"),
        }
    }

    async fn follows(&mut self, id: u64) -> anyhow::Result<()> {
        let other = format!("10.0.0.{id}:7070");
        let is_other = |known: &Leadership| matches!(known, Leadership::Other { address, .. } if *address == other);
        self.until("it follows", is_other).await.map(drop)
    }
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_another_candidate_leads_if_the_leader_dies_or_drains() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let mut first = Part::of(&etcd, "/baton", 1);
    let term = first.leads().await?;
    let [mut second, mut third] = [2, 3].map(|id| Part::of(&etcd, "/baton", id));
    second.follows(1).await?;
    third.follows(1).await?;
    first.task.abort();
    let died = baton_runtime::now();
    let (next, is_second) = tokio::select! {
        next = second.leads() => (next?, true),
        next = third.leads() => (next?, false),
    };
    println!("another one leads {:.2} s after the first has died", died.elapsed().as_secs_f64());
    assert!(next > term, "{next} follows {term}");
    let (mut leader, mut last, id) = if is_second { (second, third, 3) } else { (third, second, 2) };
    leader.stand.send(Eligibility::Drains)?;
    let resigned = baton_runtime::now();
    let latest = last.leads().await?;
    assert!(latest > next);
    println!("another one leads {:.2} s after the second has resigned", resigned.elapsed().as_secs_f64());
    leader.follows(id).await?;
    last.task.abort();
    assert!(leader.leads().await? > latest, "though it drains: no other candidate is there");
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_member_that_hangs_changes_no_leader() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    // It takes connections and says nothing, as one that was stopped.
    let hangs = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let members = |first: bool| {
        let both = [hangs.local_addr().map(|it| it.to_string())?, etcd.address().to_owned()];
        anyhow::Ok(if first { both.to_vec() } else { both.iter().rev().cloned().collect() })
    };
    let mut leader = Part::of_members(members(true)?, "/baton", 1);
    leader.leads().await?;
    let mut other = Part::of_members(members(false)?, "/baton", 2);
    other.follows(1).await?;
    for part in [&mut leader, &mut other] {
        part.leadership.borrow_and_update();
    }
    baton_runtime::sleep(3 * LEASE).await;
    assert!(!leader.leadership.has_changed()? && !other.leadership.has_changed()?);
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_leader_without_nodes_resigns_for_one_with_nodes() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let mut first = Part::of(&etcd, "/baton", 1);
    let term = first.leads().await?;
    let mut second = Part::of(&etcd, "/baton", 2);
    second.follows(1).await?;
    first.stand.send(Eligibility::NoNodes)?;
    let parted = baton_runtime::now();
    let next = second.leads().await?;
    println!("another one leads {:.2} s after the first has lost its nodes", parted.elapsed().as_secs_f64());
    assert!(next > term && parted.elapsed() > LEASE, "it waits for nodes that come back");
    first.follows(2).await?;
    // No candidate reaches a node: the leader goes on until one does.
    second.stand.send(Eligibility::NoNodes)?;
    let last = tokio::select! {
        term = first.leads() => term?,
        term = async { second.until("it resigns", |known| *known == Leadership::Unknown).await?; second.leads().await } => term?,
    };
    assert!(last > next);
    baton_runtime::sleep(2 * LEASE).await;
    let (first, second) = (first.leadership.borrow().clone(), second.leadership.borrow().clone());
    assert!([first, second].contains(&Leadership::Own { term: last }), "it is not handed to and fro");
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_outage_keeps_the_leader_and_data_loss_elects_one_anew() -> anyhow::Result<()> {
    let mut etcd = Etcd::start()?;
    let mut first = Part::of(&etcd, "/baton", 1);
    let term = first.leads().await?;
    let mut second = Part::of(&etcd, "/baton", 2);
    second.follows(1).await?;
    assert_eq!(second.leadership.borrow().term(), Some(term), "its key says it");
    etcd.kill().await?;
    assert!(tokio::time::timeout(2 * LEASE, first.leadership.changed()).await.is_err(), "it leads on");
    assert!(!second.leadership.has_changed()?);
    etcd.restart(true)?;
    // Whether its lease has outlived that is etcd's business: one of the two leads, and the other
    // follows.
    let leads = tokio::time::timeout(LIMIT, async {
        tokio::select! {
            changed = first.leadership.changed() => changed,
            changed = second.leadership.changed() => changed,
            () = baton_runtime::sleep(2 * LEASE) => Ok(()),
        }
    });
    leads.await??;
    let of_first = first.leadership.borrow().clone();
    assert!(of_first == Leadership::Own { term } || matches!(of_first, Leadership::Other { .. }), "{of_first:?}");

    etcd.kill().await?;
    first.task.abort();
    etcd.restart(false)?;
    assert_ne!(second.leads().await?, term);
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_is_asked_about_what_is_heard_and_renewals_go_on() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let mut first = Part::of(&etcd, "/baton", 1);
    let term = first.leads().await?;
    let began = baton_runtime::now();
    for heard in 1.. {
        first.hear.send(heard)?;
        let named = first.named.wait_for(|named| named.heard == heard);
        assert_eq!(tokio::time::timeout(LIMIT, named).await??.term, term);
        if began.elapsed() > 2 * LEASE {
            println!("asked {heard} times in {:.1?}", began.elapsed());
            assert!((10..60).contains(&heard), "at once, and ten times a second at most");
            break;
        }
    }
    assert_eq!(*first.leadership.borrow(), Leadership::Own { term }, "its lease was renewed meanwhile");
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_key_that_is_no_conductors_is_deleted() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let mut first = Part::of(&etcd, "/baton", 1);
    first.leads().await?;
    let mut second = Part::of(&etcd, "/baton", 2);
    second.follows(1).await?;
    let mut client = etcd_client::Client::connect([etcd.address()], None).await?;
    let long = format!(r#"{{"conductor": "{:016x}", "address": "{}"}}"#, 9, "x".repeat(100_000));
    let values: [&[u8]; 8] = [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        br#"{"conductor": 5, "address": "10.0.0.9:1"}"#,
        br#"{"conductor": "none", "address": "10.0.0.9:1"}"#,
        br#"{"conductor": "ffffffffffffffff", "address": ""}"#,
        long.as_bytes(),
        br#"{"conductor": "ffffffffffffffff", "address": "no address at all"}"#,
    ];
    let years = client.lease_grant(100_000_000, None).await?.id();
    let leased = values.iter().map(|value| (*value, 0)).chain([(values[7], years)]);
    for (value, lease) in leased {
        let before = first.leadership.borrow().term();
        let options = etcd_client::PutOptions::new().with_lease(lease);
        client.put("/baton/leader", value, Some(options)).await?;
        let put = baton_runtime::now();
        let led = async {
            while client.get("/baton/leader", None).await?.kvs().first().is_none_or(|key| key.value() == value) {
                baton_runtime::sleep(Duration::from_millis(10)).await;
            }
            let leads = |part: &Part| matches!(*part.leadership.borrow(), Leadership::Own { .. });
            let terms = || (first.leadership.borrow().term(), second.leadership.borrow().term());
            // Each has seen it by then.
            while leads(&first) == leads(&second) || terms().0 != terms().1 || terms().0 == before {
                baton_runtime::sleep(Duration::from_millis(10)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(LIMIT, led).await.context("none leads, or they differ")??;
        println!("{} bytes: one leads {:.2?} after they were put", value.len(), put.elapsed());
        assert!(put.elapsed() < Duration::from_secs(5));
        assert!(!first.task.is_finished() && !second.task.is_finished(), "no panic");
    }
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_started_late_elects_a_leader_for_each_cluster() -> anyhow::Result<()> {
    let mut etcd = Etcd::start()?;
    etcd.kill().await?;
    let mut first = Part::of(&etcd, "/baton", 1);
    assert!(tokio::time::timeout(LEASE / 4, first.leadership.changed()).await.is_err());
    etcd.restart(true)?;
    first.leads().await?;
    Part::of(&etcd, "/another", 2).leads().await.map(drop)
}
