//! The virtual cable of a process that has a network namespace of its own: cut, made slow, or deaf
//! to some others.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::os::linux::fs::MetadataExt;
use std::process::Command;

use serde_json::Value;

use super::processes::Process;
use crate::error::CliError;

/// The device that a namespace of `baton up --namespaces` has.
const DEVICE: &str = "eth0";
/// A link-layer address that no device has: what is sent there gets lost, without a notice to the
/// sender.
const UNUSED: &str = "02:00:00:00:00:ff";
/// What a slow cable carries.
const SLOW: [&str; 7] = ["tbf", "rate", "10mbit", "burst", "32kb", "latency", "2s"];

/// A pair of devices: one in the node's namespace, and one here that is plugged into a bridge.
#[derive(Debug)]
pub struct Cable {
    /// The namespace, which may outlive the process.
    namespace: File,
    here: String,
    bridge: String,
}

impl Cable {
    /// The cable of a process; `None` if it has no namespace of its own, or none with a bridge.
    pub fn of(process: Process) -> Option<Self> {
        let namespace = File::open(format!("/proc/{}/ns/net", process.pid)).ok().filter(|_| process.is_there())?;
        let own = std::fs::metadata("/proc/self/ns/net").ok()?;
        if namespace.metadata().ok()?.st_ino() == own.st_ino() {
            return None;
        }
        let there = show(inside(&namespace).args(["ip", "-j", "link", "show", DEVICE]))?;
        let there = there.as_array()?.first()?;
        let here = show(Command::new("ip").args(["-j", "link"]))?;
        let is_other_end =
            |device: &&Value| device["ifindex"] == there["link_index"] && device["link_index"] == there["ifindex"];
        let here = here.as_array()?.iter().find(is_other_end)?;
        let name = |key: &str| Some(here.get(key)?.as_str()?.to_owned());
        Some(Self { namespace, here: name("ifname")?, bridge: name("master")? })
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
        let [here, there] = self.both_ends("replace", &SLOW);
        if here.is_err() || there.is_err() {
            let _ = self.speed_up();
        }
        here.and(there)
    }

    /// Makes it fast again.
    pub fn speed_up(&self) -> Result<(), CliError> {
        let [here, there] = self.both_ends("delete", &[]);
        here.and(there)
    }

    /// What is sent to an address gets lost.
    pub fn part_from(&self, other: Ipv4Addr) -> Result<(), CliError> {
        self.neighbour("replace", other, &["lladdr", UNUSED, "nud", "permanent"])
    }

    /// It gets through again.
    pub fn rejoin(&self, other: Ipv4Addr) -> Result<(), CliError> {
        self.neighbour("delete", other, &[])
    }

    fn neighbour(&self, verb: &str, other: Ipv4Addr, how: &[&str]) -> Result<(), CliError> {
        let other = other.to_string();
        run(inside(&self.namespace).args(["ip", "neighbour", verb, &other, "dev", DEVICE]).args(how))
    }

    fn both_ends(&self, verb: &str, what: &[&str]) -> [Result<(), CliError>; 2] {
        let arguments = |device| [&["qdisc", verb, "dev", device, "root"], what].concat();
        [
            run(Command::new("tc").args(arguments(self.here.as_str()))),
            run(inside(&self.namespace).arg("tc").args(arguments(DEVICE))),
        ]
    }
}

/// A command in a network namespace.
fn inside(namespace: &File) -> Command {
    let path = format!("--net=/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd());
    let mut command = Command::new("nsenter");
    command.args([&path, "--"]);
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
