//! The virtual cable of a node that has a network namespace of its own: cut, or made slow.

use std::process::Command;

use serde_json::Value;

use super::processes::Process;
use crate::error::CliError;

/// The device that a namespace of `baton up --namespaces`, or of a pod, has.
const DEVICE: &str = "eth0";
/// What a slow cable carries.
const SLOW: [&str; 7] = ["tbf", "rate", "10mbit", "burst", "32kb", "latency", "2s"];

/// A pair of devices: one in the node's namespace, and one here that is plugged into a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cable {
    process: Process,
    here: String,
    bridge: String,
}

impl Cable {
    /// The cable of a process; `None` if it has no namespace of its own, or none with a bridge.
    pub fn of(process: Process) -> Option<Self> {
        let there = show(inside(process).args(["ip", "-j", "link", "show", DEVICE]))?;
        let peer = there.as_array()?.first()?.get("link_index")?.as_u64()?;
        let here = show(Command::new("ip").args(["-j", "link"]))?;
        let here = here.as_array()?.iter().find(|device| device["ifindex"].as_u64() == Some(peer))?;
        let name = |key: &str| Some(here.get(key)?.as_str()?.to_owned());
        Some(Self { process, here: name("ifname")?, bridge: name("master")? })
    }

    /// Nothing gets through, and neither end is told.
    pub fn cut(&self) -> Result<(), CliError> {
        run(Command::new("ip").args(["link", "set", &self.here, "nomaster"]))
    }

    /// Makes whole what was cut.
    pub fn mend(&self) -> Result<(), CliError> {
        run(Command::new("ip").args(["link", "set", &self.here, "master", &self.bridge]))
    }

    /// Both ways carry 10 Mbit/s, and each byte waits for its turn.
    pub fn slow_down(&self) -> Result<(), CliError> {
        run(Command::new("tc").args(["qdisc", "replace", "dev", &self.here, "root"]).args(SLOW))?;
        run(inside(self.process).args(["tc", "qdisc", "replace", "dev", DEVICE, "root"]).args(SLOW))
    }

    /// Makes it fast again.
    pub fn speed_up(&self) -> Result<(), CliError> {
        run(Command::new("tc").args(["qdisc", "delete", "dev", &self.here, "root"]))?;
        run(inside(self.process).args(["tc", "qdisc", "delete", "dev", DEVICE, "root"]))
    }
}

/// A command in the process's network namespace.
fn inside(process: Process) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["-n", "-t", &process.pid.to_string(), "--"]);
    command
}

fn show(command: &mut Command) -> Option<Value> {
    let output = command.output().ok()?;
    output.status.success().then(|| serde_json::from_slice(&output.stdout).ok())?
}

fn run(command: &mut Command) -> Result<(), CliError> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(CliError::Cluster(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}
