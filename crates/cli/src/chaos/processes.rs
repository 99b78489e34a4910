//! Processes of this host, found by the port that they listen on.

// Signals to processes that are no children have no safe interface in the standard library.
#![allow(unsafe_code)]

use std::fs;
use std::net::SocketAddr;

/// A process, and when it was started: its number may be another's later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    started: u64,
}

impl Process {
    /// The process that listens on a port of this host, `host:port` or `http://host:port`; `None` if there is none that this user may look at.
    pub fn listening(address: &str) -> Option<Self> {
        let port = address.trim_start_matches("http://").rsplit(':').next()?.parse().ok()?;
        let inodes: Vec<String> =
            ["/proc/net/tcp", "/proc/net/tcp6"].iter().filter_map(|path| listening_inode(path, port)).collect();
        let wanted: Vec<_> = inodes.into_iter().map(|inode| format!("socket:[{inode}]")).collect();
        let pids =
            fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        for pid in pids {
            let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
            let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            if links.filter_map(|link| Some(link.to_str()?.to_owned())).any(|link| wanted.contains(&link)) {
                return Some(Self { pid, started: started(pid)? });
            }
        }
        None
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

/// Clock ticks after the machine's start: field 22 of `/proc/PID/stat`. The name before it may have spaces.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit_once(')')?.1.split_whitespace().next()?;
    if state == "Z" {
        return None;
    }
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn listening_inode(path: &str, port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let table = fs::read_to_string(path).ok()?;
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let at = u16::from_str_radix(fields.get(1)?.rsplit(':').next()?, 16).ok()?;
        (at == port && *fields.get(3)? == LISTEN).then(|| fields.get(9).map(ToString::to_string))?
    })
}

/// Whether an address is one of this host, as far as one can tell without asking anybody.
pub fn is_loopback(address: &str) -> bool {
    let host = address.trim_start_matches("http://");
    host.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback()) || host.starts_with("localhost:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_by_its_port() {
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
    fn other_hosts_are_left_alone() {
        assert!(is_loopback("http://127.0.0.1:7100") && is_loopback("localhost:1") && is_loopback("[::1]:5"));
        assert!(!is_loopback("http://10.0.0.7:7100") && !is_loopback("node-3:7100"));
    }
}
