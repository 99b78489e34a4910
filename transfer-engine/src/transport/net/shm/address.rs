//! Where a process listens for others of its host.

#![allow(unsafe_code)] // one system call that cannot fail; see the SAFETY note

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use baton_types::Generation;
use tokio::net::{UnixListener, UnixStream};

/// Names the running kernel: two processes that read the same one share a host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Its target names the network namespace, as in `net:[4026531840]`: names without a file are seen
/// within it alone.
const NETWORK: &str = "/proc/self/ns/net";
/// Longest name of a socket, bytes (unix(7)).
const MAX_NAME: usize = 107;

/// `boot-id/@name` (a name without a file, for processes that share a network namespace, which it
/// ends with) or `boot-id//path` (for those that share a folder).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShmAddress {
    boot_id: String,
    socket: String,
}

impl ShmAddress {
    /// A name of its own for each engine; in `folder`, or without a file.
    fn new(generation: Generation, folder: Option<&Path>) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let process = std::process::id();
        let engine = NEXT.fetch_add(1, Relaxed);
        let name = format!("baton-kv-{process}-{engine}-{:016x}", generation.0);
        let socket = match folder {
            None => format!("@{name}-{}", network()),
            Some(folder) => folder.join(name).to_string_lossy().into_owned(),
        };
        if socket.len() > MAX_NAME {
            let problem = format!("the name of the socket is longer than {MAX_NAME} bytes: {socket}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        Ok(Self { boot_id: boot_id().to_owned(), socket })
    }

    /// Reads an address of a descriptor.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (boot_id, socket) = text.split_once('/')?;
        Some(Self { boot_id: boot_id.to_owned(), socket: socket.to_owned() })
    }

    /// Whether it can be reached from here: it is on this host, and in this network namespace or a
    /// folder that this process sees.
    pub(crate) fn is_here(&self) -> bool {
        let is_seen = match self.socket.strip_prefix('@') {
            Some(name) => name.ends_with(network()),
            None => Path::new(&self.socket).exists(),
        };
        is_seen && !self.boot_id.is_empty() && boot_id() == self.boot_id
    }

    /// Connects to a process of the same user: each side lets the other read its memory.
    pub(crate) async fn connect(&self) -> io::Result<UnixStream> {
        // A name without a file begins with a zero byte (unix(7)).
        let stream = match self.socket.strip_prefix('@') {
            Some(name) => UnixStream::connect(format!("\0{name}")).await?,
            None => UnixStream::connect(&self.socket).await?,
        };
        check_user(&stream)?;
        Ok(stream)
    }
}

impl std::fmt::Display for ShmAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.boot_id, self.socket)
    }
}

/// Empty if the kernel does not tell.
fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| std::fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned()).unwrap_or_default())
}

/// Empty if the kernel does not tell.
fn network() -> &'static str {
    static NETWORK_ID: OnceLock<String> = OnceLock::new();
    NETWORK_ID
        .get_or_init(|| std::fs::read_link(NETWORK).map(|id| id.to_string_lossy().into_owned()).unwrap_or_default())
}

/// A listener; its socket's file, if it has one, goes with it.
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    file: Option<PathBuf>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // No peer can connect any more; a file that is left is only litter.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Listens for processes of this host.
pub(crate) fn listen(generation: Generation, folder: Option<&Path>) -> io::Result<(Listener, ShmAddress)> {
    let address = ShmAddress::new(generation, folder)?;
    let (at, file) = match address.socket.strip_prefix('@') {
        Some(name) => (SocketAddr::from_abstract_name(name)?, None),
        None => (SocketAddr::from_pathname(&address.socket)?, Some(PathBuf::from(&address.socket))),
    };
    let listener = StdListener::bind_addr(&at)?;
    listener.set_nonblocking(true)?;
    Ok((Listener { socket: UnixListener::from_std(listener)?, file }, address))
}

/// Refuses another user's process.
pub(crate) fn check_user(stream: &UnixStream) -> io::Result<()> {
    let theirs = stream.peer_cred()?.uid();
    // SAFETY: always succeeds and touches nothing.
    let ours = unsafe { libc::geteuid() };
    if theirs == ours {
        return Ok(());
    }
    let problem = format!("the process at the other end runs as user {theirs}, this one as user {ours}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn shm_socket_is_found_by_its_address_alone() {
        let folder = std::env::temp_dir().join(format!("baton-shm-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for folder in [None, Some(folder.as_path())] {
            let (listener, address) = listen(Generation(7), folder).unwrap();
            let parsed = ShmAddress::parse(&address.to_string()).unwrap();
            assert!(parsed.is_here() && parsed == address);
            let _client = parsed.connect().await.unwrap();
            check_user(&listener.socket.accept().await.unwrap().0).unwrap();
        }
        std::fs::remove_dir(&folder).expect("the socket's file is gone");
        assert!(ShmAddress::parse("no slash").is_none());
    }

    #[test]
    fn shm_address_of_other_host_network_or_folder_is_not_here() {
        let at = |socket: String| ShmAddress { boot_id: boot_id().to_owned(), socket };
        assert!(at(format!("@x-{}", network())).is_here());
        assert!(!at("@x-net:[1]".to_owned()).is_here(), "another pod of the same machine");
        assert!(!at("/no/such/folder/x".to_owned()).is_here(), "a folder that is not mounted here");
        let elsewhere = ShmAddress { boot_id: "another-boot".to_owned(), ..at(format!("@x-{}", network())) };
        assert!(!elsewhere.is_here());
    }
}
