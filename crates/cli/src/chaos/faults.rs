//! Which fault comes next, and where.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_sim::Random;
use clap::ValueEnum;

use super::processes::Process;
use crate::args::ChaosArgs;
use crate::client::Conductor;
use crate::error::CliError;

/// Of so many faults one goes to the node with the most work.
const AT_BUSIEST: (u64, u64) = (3, 10);
/// How long a node is stopped, seconds.
const STOPPED_S: (f64, f64) = (1.0, 20.0);
/// How long a node stays drained.
const DRAINED: Duration = Duration::from_secs(8);

/// What can happen to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum FaultKind {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after 1 to 20 seconds.
    Stop,
    /// `baton drain`, and `undrain` after 8 seconds.
    Drain,
    /// SIGTERM.
    Term,
}

impl FaultKind {
    /// As on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Drain => "drain",
            Self::Term => "term",
        }
    }
}

/// A node that is not to be counted on.
struct Hurt {
    kind: FaultKind,
    process: Process,
    /// The start of the node that was hurt.
    generation: String,
    /// When it is made well again, if it does not get well by itself.
    until: Option<Instant>,
}

/// See the module's text.
pub struct Faults {
    random: Random,
    kinds: Vec<FaultKind>,
    hurt: BTreeMap<String, Hurt>,
    /// Kinds of the faults so far.
    done: Vec<FaultKind>,
}

impl Faults {
    pub fn new(args: &ChaosArgs) -> Self {
        Self {
            random: Random::new(args.seed ^ 0xc4a0_5000),
            kinds: args.faults.clone(),
            hurt: BTreeMap::new(),
            done: Vec::new(),
        }
    }

    /// Kinds of the faults so far, in order.
    pub fn done(&self) -> &[FaultKind] {
        &self.done
    }

    /// Takes note of who is well again, and lets go of those whose time is over.
    pub fn look(&mut self, nodes: &[v1::NodeStatus]) {
        let now = baton_runtime::now();
        for hurt in self.hurt.values_mut().filter(|hurt| hurt.kind == FaultKind::Stop) {
            if hurt.until.take_if(|until| *until <= now).is_some() {
                hurt.process.signal(libc::SIGCONT);
            }
        }
        self.hurt.retain(|name, hurt| {
            let node = nodes.iter().find(|node| node.info.as_ref().is_some_and(|info| info.name == *name));
            let generation = node.and_then(|node| Some(&node.info.as_ref()?.generation));
            let is_ready = node.is_some_and(|node| node.state == "ready");
            let is_new = generation.is_some_and(|generation| *generation != hurt.generation);
            let is_well = match hurt.kind {
                FaultKind::Kill | FaultKind::Term => is_ready && is_new,
                // One that is lost while it is stopped comes back as the same start.
                FaultKind::Stop => hurt.until.is_none() && is_ready,
                FaultKind::Drain => hurt.until.is_none() && is_ready,
            };
            !is_well
        });
    }

    /// Hurts a node, if one can be spared; says what was done.
    pub async fn next(&mut self, conductor: &Conductor, nodes: &[v1::NodeStatus]) -> Result<Option<String>, CliError> {
        self.undrain(conductor).await?;
        let kind = self.kinds[self.random.below(self.kinds.len() as u64) as usize];
        let Some((info, load)) = self.victim(nodes) else { return Ok(None) };
        let Some(process) = Process::listening(&info.address) else { return Ok(None) };
        let stopped = STOPPED_S.0 + (STOPPED_S.1 - STOPPED_S.0) * self.random.unit().powi(2);
        let (until, how) = match kind {
            FaultKind::Kill => {
                process.signal(libc::SIGKILL);
                (None, String::new())
            }
            FaultKind::Term => {
                process.signal(libc::SIGTERM);
                (None, String::new())
            }
            FaultKind::Stop => {
                process.signal(libc::SIGSTOP);
                (Some(Duration::from_secs_f64(stopped)), format!(" for {stopped:.1} s"))
            }
            FaultKind::Drain => {
                conductor.cluster().drain(v1::DrainRequest { node: info.name.clone() }).await?;
                (Some(DRAINED), String::new())
            }
        };
        let until = until.map(|time| baton_runtime::now() + time);
        self.hurt.insert(info.name.clone(), Hurt { kind, process, generation: info.generation.clone(), until });
        self.done.push(kind);
        let work = load.running.saturating_add(load.waiting);
        Ok(Some(format!("{} {}{how}, with {work} requests", kind.as_str(), info.name)))
    }

    /// A node whose role has another one that is well.
    fn victim<'a>(&mut self, nodes: &'a [v1::NodeStatus]) -> Option<(&'a v1::NodeInfo, v1::Load)> {
        let well = |node: &&v1::NodeStatus| {
            let name = node.info.as_ref().map(|info| info.name.as_str());
            node.state == "ready" && name.is_some_and(|name| !self.hurt.contains_key(name))
        };
        let well: Vec<_> =
            nodes.iter().filter(well).filter_map(|node| Some((node.info.as_ref()?, node.load?))).collect();
        let of_role = |role: &str| well.iter().filter(|(info, _)| info.role == role).count();
        let mut spare: Vec<_> = well.iter().filter(|(info, _)| of_role(&info.role) > 1).copied().collect();
        if spare.is_empty() {
            return None;
        }
        spare.sort_by_key(|(info, load)| (load.running, info.name.clone()));
        let at_busiest = self.random.below(AT_BUSIEST.1) < AT_BUSIEST.0;
        let index = if at_busiest { spare.len() - 1 } else { self.random.below(spare.len() as u64) as usize };
        Some(spare[index])
    }

    async fn undrain(&mut self, conductor: &Conductor) -> Result<(), CliError> {
        let now = baton_runtime::now();
        for (name, hurt) in self.hurt.iter_mut().filter(|(_, hurt)| hurt.kind == FaultKind::Drain) {
            if hurt.until.take_if(|until| *until <= now).is_some() {
                conductor.cluster().undrain(v1::UndrainRequest { node: name.clone() }).await?;
            }
        }
        Ok(())
    }

    /// Makes all well that do not get well by themselves.
    pub async fn undo(&mut self, conductor: &Conductor) -> Result<(), CliError> {
        for hurt in self.hurt.values_mut() {
            hurt.until = hurt.until.map(|_| baton_runtime::now());
            if hurt.kind == FaultKind::Stop {
                hurt.process.signal(libc::SIGCONT);
            }
        }
        self.undrain(conductor).await
    }
}

impl Drop for Faults {
    /// Nobody stays stopped.
    fn drop(&mut self) {
        for hurt in self.hurt.values().filter(|hurt| hurt.kind == FaultKind::Stop) {
            hurt.process.signal(libc::SIGCONT);
        }
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
        Faults { random: Random::new(3), kinds, hurt: BTreeMap::new(), done: Vec::new() }
    }

    #[test]
    fn a_node_of_each_role_is_left_alone() {
        let mut faults = faults();
        let nodes = [node("prefill-0", 1, 0), node("decode-0", 1, 0), node("decode-1", 1, 5)];
        let mut busiest = 0;
        for _ in 0..200 {
            let (info, _) = faults.victim(&nodes).unwrap();
            assert_ne!(info.name, "prefill-0", "the only one");
            busiest += u32::from(info.name == "decode-1");
        }
        assert!((110..160).contains(&busiest), "three tenths, and half of the rest: {busiest}");
        let process = Process::listening("127.0.0.1:0");
        assert_eq!(process, None);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let process = Process::listening(&listener.local_addr().unwrap().to_string()).unwrap();
        let hurt = Hurt { kind: FaultKind::Kill, process, generation: "1".into(), until: None };
        faults.hurt.insert("decode-1".into(), hurt);
        assert!(faults.victim(&nodes).is_none(), "the other one may be the last");
        faults.look(&nodes);
        assert!(faults.victim(&nodes).is_none(), "the conductor has not noticed");
        faults.look(&[node("decode-1", 2, 0)]);
        assert!(faults.victim(&nodes).is_some(), "it was started again");
    }
}
