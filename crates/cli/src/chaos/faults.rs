//! Which fault comes next, and where.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_sim::Random;
use clap::ValueEnum;

use super::ANSWER;
use super::cable::Cable;
use super::processes::{Process, other_ip};
use crate::args::ChaosArgs;
use crate::client::Conductor;
use crate::error::CliError;

/// Roles of those that are no nodes.
pub const CONDUCTOR: &str = "conductor";
pub const ETCD: &str = "etcd";
/// Of so many faults one goes to the node with the most work.
const AT_BUSIEST: (u64, u64) = (3, 10);
/// Shortest that a node is stopped, cut off or slow, seconds.
const SHORTEST_S: f64 = 1.0;
/// How long a node stays drained.
const DRAINED: Duration = Duration::from_secs(8);

/// What can happen to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum FaultKind {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after a while.
    Pause,
    /// `baton drain`, and `undrain` after 8 seconds.
    Drain,
    /// SIGTERM.
    Terminate,
    /// Drop all its traffic for a while, without an error (baton up --namespaces).
    Isolate,
    /// Limit its network to 10 Mbit/s for a while (baton up --namespaces).
    Slow,
    /// Part a conductor from etcd, nodes or other conductors for a while (baton up --namespaces).
    Partition,
}

impl FaultKind {
    /// As on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Drain => "drain",
            Self::Terminate => "terminate",
            Self::Isolate => "isolate",
            Self::Slow => "slow",
            Self::Partition => "partition",
        }
    }

    /// Whether it needs a cable that can be hurt.
    pub const fn is_of_cable(self) -> bool {
        matches!(self, Self::Isolate | Self::Slow | Self::Partition)
    }

    /// Whether it happens to those of a role.
    fn is_of(self, role: &str) -> bool {
        match self {
            Self::Kill | Self::Pause | Self::Terminate => true,
            // Of this host, where its clients are.
            Self::Isolate | Self::Slow => role != ETCD,
            Self::Drain => role != CONDUCTOR && role != ETCD,
            Self::Partition => role == CONDUCTOR,
        }
    }
}

/// A node that is not to be counted on.
struct FaultyNode {
    kind: FaultKind,
    process: Process,
    /// The start of the node that was hurt.
    generation: String,
    /// When it is made well again, if it does not get well by itself.
    until: Option<Instant>,
    /// What was done to its network is done there.
    cable: Option<Cable>,
    /// Whom it does not get through to.
    parted: Vec<Ipv4Addr>,
}

impl FaultyNode {
    /// Ends what does not end by itself. A drained node is undrained by the conductor.
    fn end(&self) {
        if self.kind == FaultKind::Pause {
            self.process.signal(libc::SIGCONT);
        }
        // If it fails, the cable is gone, or the node does not get well and the report says so.
        let _ = match (self.kind, &self.cable) {
            (FaultKind::Isolate, Some(cable)) => cable.mend(),
            (FaultKind::Slow, Some(cable)) => cable.speed_up(),
            (FaultKind::Partition, Some(cable)) => self.parted.iter().try_for_each(|other| cable.rejoin(*other)),
            _ => Ok(()),
        };
    }
}

/// See the module's text.
pub struct Faults {
    random: Random,
    kinds: Vec<FaultKind>,
    /// Longest that a node is stopped, cut off or slow, seconds.
    longest: f64,
    hurt: BTreeMap<String, FaultyNode>,
    /// Kinds of the faults so far, and roles of the nodes.
    done: Vec<(FaultKind, String)>,
}

impl Faults {
    pub fn new(args: &ChaosArgs) -> Self {
        Self {
            random: Random::new(args.seed ^ 0xc4a0_5000),
            kinds: args.faults.clone(),
            longest: args.longest,
            hurt: BTreeMap::new(),
            done: Vec::new(),
        }
    }

    /// Kinds of the faults so far, and roles of the nodes, in order.
    pub fn done(&self) -> &[(FaultKind, String)] {
        &self.done
    }

    /// Takes note of who is well again, and ends the faults whose time is over.
    pub fn look(&mut self, nodes: &[v1::NodeStatus]) {
        let now = baton_runtime::now();
        for hurt in self.hurt.values_mut().filter(|hurt| hurt.kind != FaultKind::Drain) {
            if hurt.until.take_if(|until| *until <= now).is_some() {
                hurt.end();
            }
        }
        self.hurt.retain(|name, hurt| {
            let node = nodes.iter().find(|node| node.info.as_ref().is_some_and(|info| info.name == *name));
            let generation = node.and_then(|node| Some(&node.info.as_ref()?.generation));
            let is_ready = node.is_some_and(|node| node.state == "ready");
            let is_new = generation.is_some_and(|generation| *generation != hurt.generation);
            let is_well = match hurt.kind {
                FaultKind::Kill | FaultKind::Terminate => is_ready && is_new,
                // One that is lost meanwhile comes back as the same start.
                FaultKind::Pause | FaultKind::Drain | FaultKind::Isolate | FaultKind::Slow | FaultKind::Partition => {
                    hurt.until.is_none() && is_ready
                }
            };
            !is_well
        });
    }

    /// Hurts a node, if one can be spared; says what was done.
    pub async fn next(
        &mut self,
        conductors: &[Conductor],
        nodes: &[v1::NodeStatus],
    ) -> Result<Option<String>, CliError> {
        self.undrain(conductors).await;
        let kind = self.kinds[self.random.below(self.kinds.len() as u64) as usize];
        let Some((info, load)) = self.victim(nodes, kind) else { return Ok(None) };
        let Some(process) = Process::listening(&info.address) else { return Ok(None) };
        let cable = kind.is_of_cable().then(|| Cable::of(process)).flatten();
        let stopped = SHORTEST_S + (self.longest - SHORTEST_S) * self.random.unit().powi(2);
        let for_a_while = Some(Duration::from_secs_f64(stopped));
        let (others, parted) = match kind {
            FaultKind::Partition => self.some_others(nodes, &info.name),
            _ => ("", Vec::new()),
        };
        let until = match (kind, &cable) {
            (FaultKind::Kill, _) => {
                process.signal(libc::SIGKILL);
                None
            }
            (FaultKind::Terminate, _) => {
                process.signal(libc::SIGTERM);
                None
            }
            (FaultKind::Pause, _) => {
                process.signal(libc::SIGSTOP);
                for_a_while
            }
            (FaultKind::Drain, _) => {
                let asked = v1::DrainRequest { node: info.name.clone() };
                let drain = async |conductor: &Conductor| conductor.cluster().drain(asked.clone()).await.is_ok();
                if !any(conductors, drain).await {
                    return Ok(None);
                }
                Some(DRAINED)
            }
            (FaultKind::Isolate, Some(cable)) => {
                cable.cut()?;
                for_a_while
            }
            (FaultKind::Slow, Some(cable)) => {
                cable.slow_down()?;
                for_a_while
            }
            (FaultKind::Partition, Some(cable)) if !parted.is_empty() => {
                parted.iter().try_for_each(|other| cable.part_from(*other))?;
                for_a_while
            }
            (FaultKind::Isolate | FaultKind::Slow | FaultKind::Partition, _) => return Ok(None),
        };
        let how = until.map_or_else(String::new, |time| format!(" for {:.1} s", time.as_secs_f64()));
        let generation = info.generation.clone();
        let until = until.map(|time| baton_runtime::now() + time);
        self.hurt.insert(info.name.clone(), FaultyNode { kind, process, generation, until, cable, parted });
        self.done.push((kind, info.role.clone()));
        let work = load.running.saturating_add(load.waiting);
        Ok(Some(format!("{} {}{others}{how}, with {work} requests", kind.as_str(), info.name)))
    }

    /// Whom a conductor is parted from: etcd, the nodes, or the other conductors.
    fn some_others(&mut self, nodes: &[v1::NodeStatus], own: &str) -> (&'static str, Vec<Ipv4Addr>) {
        let infos = nodes.iter().filter_map(|node| node.info.as_ref()).filter(|info| info.name != own);
        let addresses = |is_meant: fn(&str) -> bool| {
            let of_role = infos.clone().filter(|info| is_meant(&info.role));
            of_role.filter_map(|info| other_ip(info.address.trim_start_matches("http://"))).collect()
        };
        match self.random.below(3) {
            0 => (" from etcd", addresses(|role| role == ETCD)),
            1 => (" from nodes", addresses(|role| role != ETCD && role != CONDUCTOR)),
            _ => (" from conductors", addresses(|role| role == CONDUCTOR)),
        }
    }

    /// One whose role has another one that is well. Without etcd, all goes on.
    fn victim<'a>(&mut self, nodes: &'a [v1::NodeStatus], kind: FaultKind) -> Option<(&'a v1::NodeInfo, v1::Load)> {
        let well = |node: &&v1::NodeStatus| {
            let name = node.info.as_ref().map(|info| info.name.as_str());
            node.state == "ready" && name.is_some_and(|name| !self.hurt.contains_key(name))
        };
        let well: Vec<_> =
            nodes.iter().filter(well).filter_map(|node| Some((node.info.as_ref()?, node.load?))).collect();
        let of_role = |role: &str| well.iter().filter(|(info, _)| info.role == role).count();
        let can_be_spared = |info: &v1::NodeInfo| of_role(&info.role) > 1 || info.role == ETCD;
        let spare = well.iter().filter(|(info, _)| can_be_spared(info) && kind.is_of(&info.role));
        let mut spare: Vec<_> = spare.copied().collect();
        if spare.is_empty() {
            return None;
        }
        spare.sort_by_key(|(info, load)| (load.running, info.name.clone()));
        let at_busiest = self.random.below(AT_BUSIEST.1) < AT_BUSIEST.0;
        let index = if at_busiest { spare.len() - 1 } else { self.random.below(spare.len() as u64) as usize };
        Some(spare[index])
    }

    /// What no conductor takes now is tried again.
    async fn undrain(&mut self, conductors: &[Conductor]) {
        let now = baton_runtime::now();
        for (name, hurt) in self.hurt.iter_mut().filter(|(_, hurt)| hurt.kind == FaultKind::Drain) {
            let asked = v1::UndrainRequest { node: name.clone() };
            let undrain = async |conductor: &Conductor| conductor.cluster().undrain(asked.clone()).await.is_ok();
            if hurt.until.is_some_and(|until| until <= now) && any(conductors, undrain).await {
                hurt.until = None;
            }
        }
    }

    /// Makes all well that do not get well by themselves.
    pub async fn undo(&mut self, conductors: &[Conductor]) {
        for hurt in self.hurt.values_mut() {
            hurt.until = hurt.until.map(|_| baton_runtime::now());
            hurt.end();
        }
        self.undrain(conductors).await;
    }
}

/// Whether any conductor does something. One that is stopped does not, and one that was just
/// started does not know the node.
async fn any(conductors: &[Conductor], does: impl AsyncFn(&Conductor) -> bool) -> bool {
    for conductor in conductors {
        if tokio::time::timeout(ANSWER, does(conductor)).await == Ok(true) {
            return true;
        }
    }
    false
}

impl Drop for Faults {
    /// No node stays stopped or cut off.
    fn drop(&mut self) {
        self.hurt.values().filter(|hurt| hurt.until.is_some()).for_each(FaultyNode::end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, generation: u64, running: u32) -> v1::NodeStatus {
        let role = name.split('-').next().unwrap().to_owned();
        let info = v1::NodeInfo { name: name.into(), role, generation: generation.to_string(), ..Default::default() };
        let load = Some(v1::Load { running, ..Default::default() });
        v1::NodeStatus { info: Some(info), state: "ready".into(), load, ..Default::default() }
    }

    fn faults() -> Faults {
        let kinds = vec![FaultKind::Kill];
        Faults { random: Random::new(3), kinds, longest: 20.0, hurt: BTreeMap::new(), done: Vec::new() }
    }

    #[test]
    fn chaos_cuts_conductors_off_and_never_drains_them() {
        let mut faults = faults();
        let nodes = [node("conductor-0", 1, 0), node("conductor-1", 1, 0), node("etcd", 1, 0)];
        assert!(faults.victim(&nodes, FaultKind::Drain).is_none());
        let mut hit =
            |kind| (0..50).filter_map(|_| Some(faults.victim(&nodes, kind)?.0.role.clone())).collect::<Vec<_>>();
        assert!(hit(FaultKind::Isolate).iter().all(|role| role == CONDUCTOR));
        assert!(hit(FaultKind::Partition).iter().all(|role| role == CONDUCTOR));
        assert!(hit(FaultKind::Kill).iter().any(|role| role == ETCD));
    }

    #[test]
    fn chaos_partition_separates_a_conductor_from_peers_of_one_role() {
        let mut faults = faults();
        let mut nodes = ["conductor-0", "conductor-1", "etcd", "prefill-0", "decode-0"].map(|name| node(name, 1, 0));
        for (index, node) in nodes.iter_mut().enumerate() {
            node.info.as_mut().unwrap().address = format!("http://198.18.0.{index}:7070");
        }
        let mut seen: Vec<_> = (0..50).map(|_| faults.some_others(&nodes, "conductor-0")).collect();
        seen.sort();
        seen.dedup();
        let others = |of: &[u8]| of.iter().map(|last| Ipv4Addr::new(198, 18, 0, *last)).collect::<Vec<_>>();
        let wanted =
            [(" from conductors", others(&[1])), (" from etcd", others(&[2])), (" from nodes", others(&[3, 4]))];
        assert_eq!(seen, wanted);
    }

    #[test]
    fn chaos_leaves_one_node_of_each_role_alone() {
        let mut faults = faults();
        let nodes = [node("prefill-0", 1, 0), node("decode-0", 1, 0), node("decode-1", 1, 5)];
        let mut busiest = 0;
        for _ in 0..200 {
            let (info, _) = faults.victim(&nodes, FaultKind::Kill).unwrap();
            assert_ne!(info.name, "prefill-0", "the only one");
            busiest += u32::from(info.name == "decode-1");
        }
        assert!((110..160).contains(&busiest), "three tenths, and half of the rest: {busiest}");
        let process = Process::listening("127.0.0.1:0");
        assert_eq!(process, None);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let process = Process::listening(&listener.local_addr().unwrap().to_string()).unwrap();
        let hurt = FaultyNode {
            kind: FaultKind::Kill,
            process,
            generation: "1".into(),
            until: None,
            cable: None,
            parted: Vec::new(),
        };
        faults.hurt.insert("decode-1".into(), hurt);
        assert!(faults.victim(&nodes, FaultKind::Kill).is_none(), "the other one may be the last");
        faults.look(&nodes);
        assert!(faults.victim(&nodes, FaultKind::Kill).is_none(), "the conductor has not noticed");
        faults.look(&[node("decode-1", 2, 0)]);
        assert!(faults.victim(&nodes, FaultKind::Kill).is_some(), "it was started again");
    }
}
