//! Processes of this host, found by the port that they listen on.

// Signals to processes that are no children have no safe interface in the standard library.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// A process, and when it was started: its number may be another's later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    started: u64,
}

impl Process {
    /// The process of this host that listens on an address, `host:port` or `http://host:port`. It
    /// may have a network namespace of its own. `None` if there is none that this user may look at,
    /// or if the host is another one's name.
    pub fn listening(address: &str) -> Option<Self> {
        let address = address.trim_start_matches("http://");
        if other_ip(address).is_none() && !is_loopback(address) {
            return None;
        }
        let wanted = Wanted { port: address.rsplit(':').next()?.parse().ok()?, ip: other_ip(address) };
        let entries = fs::read_dir("/proc").ok()?;
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        let own = namespace_of("self");
        let mut tables = HashMap::new();
        for pid in pids {
            let Some(namespace) = namespace_of(&pid.to_string()) else { continue };
            // Each namespace has a loopback of its own.
            if wanted.ip.is_none() && own.as_ref() != Some(&namespace) {
                continue;
            }
            let sockets = match tables.get(&namespace) {
                Some(sockets) => sockets,
                None => match wanted.sockets(pid) {
                    Some(sockets) => &*tables.entry(namespace).or_insert(sockets),
                    // It has just ended.
                    None => continue,
                },
            };
            let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
            let mut links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            if links.any(|link| sockets.iter().any(|socket| link.as_os_str() == socket.as_str())) {
                return Some(Self { pid, started: started(pid)? });
            }
        }
        None
    }

    /// Tells its starts apart.
    pub fn start(self) -> String {
        format!("{}-{}", self.pid, self.started)
    }

    /// Whether it is still there.
    pub fn is_there(self) -> bool {
        started(self.pid) == Some(self.started)
    }

    /// Sends a signal, if it is still there.
    pub fn signal(self, signal: libc::c_int) {
        if self.is_there() {
            // SAFETY: `kill` takes two numbers and touches no memory of ours.
            unsafe { libc::kill(self.pid as libc::pid_t, signal) };
        }
    }

    /// Its resident memory, bytes.
    pub fn resident_bytes(self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
        let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kilobytes * 1024).filter(|_| self.is_there())
    }
}

/// Clock ticks after the machine's start: field 22 of `/proc/PID/stat`. The name before it may have
/// spaces.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit_once(')')?.1.split_whitespace().next()?;
    if state == "Z" {
        return None;
    }
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn namespace_of(pid: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}

/// Who is looked for.
struct Wanted {
    port: u16,
    /// If it is no address of loopback.
    ip: Option<Ipv4Addr>,
}

impl Wanted {
    /// Sockets that listen there, in the network namespace of a process, as links to them say.
    fn sockets(&self, pid: u32) -> Option<Vec<String>> {
        let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")).ok());
        // Not every kernel has the second.
        tables[0].as_ref()?;
        let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
        Some(lines.filter_map(|line| self.inode(line)).map(|inode| format!("socket:[{inode}]")).collect())
    }

    /// Of a line of the table, if it is about this one.
    fn inode<'a>(&self, line: &'a str) -> Option<&'a str> {
        const LISTEN: &str = "0A";
        let fields: Vec<_> = line.split_whitespace().collect();
        let (ip, port) = fields.get(1)?.rsplit_once(':')?;
        let is_there = match self.ip {
            // The kernel writes the bytes as a number of this machine.
            Some(wanted) => u32::from_str_radix(ip, 16) == Ok(u32::from_ne_bytes(wanted.octets())),
            None => true,
        };
        let is_port = u16::from_str_radix(port, 16) == Ok(self.port);
        (is_there && is_port && *fields.get(3)? == LISTEN).then(|| fields.get(9).copied())?
    }
}

/// Of an address that is none of loopback.
pub fn other_ip(address: &str) -> Option<Ipv4Addr> {
    match address.parse().ok()? {
        SocketAddr::V4(address) if !address.ip().is_loopback() => Some(*address.ip()),
        _ => None,
    }
}

/// Whether an address is one of this host, as far as one can tell without a query.
pub fn is_loopback(address: &str) -> bool {
    let host = address.trim_start_matches("http://");
    host.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback()) || host.starts_with("localhost:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chaos_finds_a_local_process_by_its_port() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let found = Process::listening(&format!("http://{address}")).unwrap();
        assert_eq!(found.pid, std::process::id());
        assert!(found.is_there() && found.resident_bytes().unwrap() > 0);
        assert!(!Process { started: 0, ..found }.is_there(), "an earlier one with its number");
        found.signal(0);
        drop(listener);
        assert_eq!(Process::listening(&address), None);
    }

    #[test]
    fn chaos_finds_no_process_on_other_hosts() {
        assert!(is_loopback("http://127.0.0.1:7100") && is_loopback("localhost:1") && is_loopback("[::1]:5"));
        assert!(!is_loopback("http://10.0.0.7:7100") && !is_loopback("node-3:7100"));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["node-3", "10.0.0.7", "[fd00::3]"] {
            assert_eq!(Process::listening(&format!("http://{host}:{port}")), None, "{host}");
        }
    }
}
