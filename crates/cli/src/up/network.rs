//! A network namespace for each node, as a pod has one: then `baton chaos` can cut a node off. So
//! can it cut off conductors, if there are several.
//!
//! ```text
//!   this namespace:
//!   clients, and a conductor that is alone - bridge 198.18.B.1
//!   etcd                                          | 198.18.B.254
//!                                                 +-- veth -- | eth0 198.18.B.2  prefill-0   |
//!                                                 +-- veth -- | eth0 198.18.B.3  decode-0    |
//!                                                 +-- veth -- | eth0 198.18.B.4  conductor-0 |
//!                                                 +-- veth -- | eth0 198.18.B.5  conductor-1 |
//! ```

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use super::plan::{Plan, Role, Spec};
use crate::error::CliError;

const FLAG: &str = "--namespaces";
/// Where `ip netns` keeps them.
const FOLDER: &str = "/run/netns";

/// Bridge and namespaces; removed when dropped.
#[derive(Debug)]
pub struct Network {
    bridge: String,
    namespaces: Vec<String>,
}

impl Network {
    /// Makes a namespace for each node of the plan, and for each of several conductors, and has
    /// them run there.
    pub fn new(plan: &mut Plan) -> Result<Self, CliError> {
        remove_left_over();
        let pid = std::process::id();
        // Set aside for tests of networks (RFC 2544): no host's own.
        let subnet = format!("198.{}.{}", 18 + (pid >> 8) % 2, pid % 256);
        let mut network = Self { bridge: bridge_of(pid), namespaces: Vec::new() };
        let bridge = network.bridge.as_str();
        // With an address of its own: else it has that of a port, and another one when that is cut
        // off.
        ip(&["link", "add", bridge, "address", "02:00:00:00:00:01", "type", "bridge"])?;
        ip(&["address", "add", &format!("{subnet}.1/24"), "dev", bridge])?;
        ip(&["link", "set", bridge, "up"])?;
        let is_apart = plan.conductors.len() > 1;
        if is_apart {
            // Not the address that this host's clients have: a conductor may be parted from one and
            // not from the other.
            ip(&["address", "add", &format!("{subnet}.254/24"), "dev", bridge])?;
            plan.move_etcd(&format!("{subnet}.254"));
        }
        let conductors = plan.conductors.iter_mut().filter(|_| is_apart);
        for (index, member) in plan.nodes.iter_mut().chain(conductors).enumerate() {
            let namespace = format!("baton-{pid}-{}", member.name);
            let address = format!("{subnet}.{}", index + 2);
            let cable = cable_of(&network.bridge, index);
            ip(&["netns", "add", &namespace])?;
            network.namespaces.push(namespace.clone());
            ip(&["link", "add", &cable, "type", "veth", "peer", "name", "eth0", "netns", &namespace])?;
            ip(&["link", "set", &cable, "master", &network.bridge, "up"])?;
            ip(&["-n", &namespace, "address", "add", &format!("{address}/24"), "dev", "eth0"])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            ip(&["-n", &namespace, "link", "set", "eth0", "up"])?;
            enter(member, &namespace, &address);
        }
        for conductor in plan.conductors.iter_mut().filter(|_| !is_apart) {
            conductor.listen.push(("--nodes", format!("{subnet}.1:0")));
        }
        Ok(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // What cannot be removed now is looked for by the next one.
        for (index, namespace) in self.namespaces.iter().enumerate() {
            // By itself it would go with the last connection of its namespace, which may take
            // minutes.
            let _ = ip(&["link", "delete", &cable_of(&self.bridge, index)]);
            let _ = ip(&["netns", "delete", namespace]);
        }
        let _ = ip(&["link", "delete", &self.bridge]);
    }
}

fn bridge_of(pid: impl std::fmt::Display) -> String {
    format!("bt{pid}")
}

fn cable_of(bridge: &str, index: usize) -> String {
    format!("{bridge}-{index}")
}

/// Has a process start in a namespace, and listen on its address there. Clients know the ports of
/// conductors.
fn enter(member: &mut Spec, namespace: &str, address: &str) {
    let program = std::mem::replace(&mut member.program, "nsenter".into());
    let net = format!("--net={FOLDER}/{namespace}");
    let before: [OsString; 3] = [net.into(), "--".into(), program.into_os_string()];
    member.args.splice(0..0, before);
    for (_, listen) in &mut member.listen {
        let port = listen.rsplit(':').next().filter(|_| member.role == Role::Conductor);
        *listen = format!("{address}:{}", port.unwrap_or("0"));
    }
}

/// Removes what a process left that was killed.
fn remove_left_over() {
    let Ok(entries) = std::fs::read_dir(FOLDER) else { return };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    for name in names {
        let Some((pid, _)) = name.strip_prefix("baton-").and_then(|rest| rest.split_once('-')) else { continue };
        if pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists() {
            let _ = ip(&["netns", "delete", &name]);
            let _ = ip(&["link", "delete", &bridge_of(pid)]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), CliError> {
    let failed = |why: String| CliError::invalid(FLAG, format!("ip {}: {why}", arguments.join(" ")));
    let output = Command::new("ip").args(arguments).output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}
