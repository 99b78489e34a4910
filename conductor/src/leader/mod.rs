//! One conductor places the requests of all: the one that leads. `desk.rs`: where questions go;
//! `link.rs`: to the leader; `service.rs`: from those who follow.

mod desk;
mod link;
mod service;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_membership::{Candidate, Election, Eligibility, Etcd, Leadership, NamedLeader};
use baton_runtime::Phase;
use baton_runtime::settings::BadSetting;
use tokio::sync::watch;

pub use desk::{Answer, Decided, DecisionReasons, Desk, PendingAnswer, verdicts};
#[cfg(test)]
pub use link::LinkError;
pub use link::follow;
pub use service::LeaderService;

use crate::config::Settings;
use crate::frontend::Frontend;

/// How long a new leader waits for what the others have: their streams are there within a round
/// trip of their knowing of it.
const SETTLE: Duration = Duration::from_millis(250);
/// How often this conductor looks whether it reaches nodes.
const LOOK: Duration = Duration::from_millis(100);
/// Waits between attempts to reach the leader.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// This conductor leads, alone or as it is elected, until it drains.
pub fn start(
    frontend: &Arc<Frontend>,
    settings: &Settings,
    etcd: Option<Etcd>,
    own: SocketAddr,
) -> Result<(), BadSetting> {
    let Some(etcd) = etcd else {
        frontend.lead_alone();
        return Ok(());
    };
    let candidate = Candidate { id: frontend.id, address: advertised(own, settings.advertise_host.as_deref())? };
    let (stand, standing) = watch::channel(Eligibility::NoNodes);
    let election = Election::new(etcd, candidate, Arc::clone(&frontend.clock), frontend.desk.heard(), standing);
    let leadership = election.leadership();
    let named = election.named();
    let obeying = Arc::clone(frontend);
    frontend.tasks.spawn("election", async move {
        tokio::select! {
            () = election.run() => {}
            () = obey(&obeying, leadership) => {}
            () = check_heard(&obeying, named) => {}
            () = keep_standing(&obeying, &stand) => {}
            () = obeying.tasks.cancelled() => {}
        }
        Ok::<(), anyhow::Error>(())
    });
    Ok(())
}

/// Says whether this conductor can place well.
async fn keep_standing(frontend: &Frontend, stand: &watch::Sender<Eligibility>) {
    loop {
        let standing = match frontend.shutdown.phase() {
            Phase::Serving | Phase::NotReady if frontend.cluster().reaches_nodes() => Eligibility::Ready,
            Phase::Serving | Phase::NotReady => Eligibility::NoNodes,
            Phase::Draining | Phase::Closing | Phase::Flushed => Eligibility::Drains,
        };
        stand.send_if_modified(|known| std::mem::replace(known, standing) != standing);
        tokio::select! {
            () = frontend.shutdown.wait_for(Phase::Draining), if standing != Eligibility::Drains => {}
            () = frontend.clock.sleep(LOOK) => {}
        }
    }
}

/// Does what was decided on who leads.
async fn obey(frontend: &Frontend, mut leadership: watch::Receiver<Leadership>) {
    loop {
        let known = leadership.borrow_and_update().clone();
        match &known {
            Leadership::Unknown => frontend.step_down(),
            Leadership::Own { term } => {
                frontend.lead(*term, SETTLE);
                frontend.clock.sleep(SETTLE).await;
                frontend.on_desk_tick();
            }
            Leadership::Other { address, term } => {
                frontend.other_leads(*term);
                tokio::select! {
                    () = keep_following(frontend, address) => {}
                    changed = leadership.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return,
                    },
                }
            }
        }
        if leadership.changed().await.is_err() {
            return;
        }
    }
}

/// Tells what nodes have told of from what etcd names.
async fn check_heard(frontend: &Frontend, mut named: watch::Receiver<NamedLeader>) {
    while named.changed().await.is_ok() {
        let NamedLeader { term, heard } = *named.borrow_and_update();
        frontend.on_etcd_named(term, heard);
    }
}

async fn keep_following(frontend: &Frontend, leader: &str) {
    let mut wait = RETRY;
    loop {
        let began = frontend.clock.now();
        if let Err(error) = follow(frontend, leader).await {
            if wait < RETRY_MAX {
                tracing::warn!(leader, %error, retry_in = ?wait, "does not follow the leader");
            } else {
                // It was said.
                tracing::debug!(leader, %error, "still does not follow the leader");
            }
        }
        if frontend.clock.now().saturating_duration_since(began) > RETRY_MAX {
            wait = RETRY;
        }
        frontend.clock.sleep(wait).await;
        wait = (wait * 2).min(RETRY_MAX);
    }
}

/// Where others reach an address that was bound.
fn advertised(bound: SocketAddr, host: Option<&str>) -> Result<String, BadSetting> {
    match host {
        Some(host) if host.contains(':') => Ok(format!("[{host}]:{}", bound.port())),
        Some(host) => Ok(format!("{host}:{}", bound.port())),
        None if bound.ip().is_unspecified() => {
            let problem = format!("not set, but other conductors cannot reach {}, where this one listens", bound.ip());
            Err(BadSetting::invalid("advertise_host", problem))
        }
        None => Ok(bound.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertised_address_is_reachable_from_other_hosts() {
        let bound = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(advertised(bound("127.0.0.1:7"), None).unwrap(), "127.0.0.1:7");
        assert_eq!(advertised(bound("0.0.0.0:7"), Some("front-0.baton")).unwrap(), "front-0.baton:7");
        assert_eq!(advertised(bound("[::]:7"), Some("fd00::1")).unwrap(), "[fd00::1]:7");
        let error = advertised(bound("0.0.0.0:7"), None).unwrap_err().to_string();
        assert!(error.contains("advertise_host") && error.contains("0.0.0.0"), "{error}");
    }
}
