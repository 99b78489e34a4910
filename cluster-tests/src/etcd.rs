//! An etcd of a test's own: Debian's `etcd-server`.

use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context;
use tempfile::TempDir;
use tokio::process::{Child, Command};

/// A running etcd; it is killed when it is dropped.
pub struct Etcd {
    process: Child,
    folder: TempDir,
    client: String,
    peer: String,
}

impl Etcd {
    /// Starts one on free ports.
    pub fn start() -> anyhow::Result<Self> {
        let [first, second] = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
        let [client, peer] = [first.local_addr()?.to_string(), second.local_addr()?.to_string()];
        drop((first, second));
        let folder = tempfile::tempdir()?;
        let process = run(&folder.path().join("data"), &client, &peer)?;
        Ok(Self { process, folder, client, peer })
    }

    /// Its address, `host:port`.
    pub fn address(&self) -> &str {
        &self.client
    }

    /// Ends it at once, as a crash would.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        self.process.kill().await.context("kill")
    }

    /// Starts it again with what it had, or with nothing.
    pub fn restart(&mut self, with_data: bool) -> anyhow::Result<()> {
        let data = self.folder.path().join("data");
        if !with_data {
            std::fs::remove_dir_all(&data)?;
        }
        self.process = run(&data, &self.client, &self.peer)?;
        Ok(())
    }
}

fn run(data: &Path, client: &str, peer: &str) -> anyhow::Result<Child> {
    let (client, peer) = (format!("http://{client}"), format!("http://{peer}"));
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(data).args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    command.spawn().context("starting etcd (Debian: etcd-server)")
}
