//! An etcd of a test's own: Debian's `etcd-server`.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
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
    flags: Vec<String>,
}

impl Etcd {
    /// Starts one on free ports.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(&[])
    }

    /// The same, with flags of etcd's own. With `--cert-file`, clients are served over TLS.
    pub fn start_with(flags: &[&str]) -> anyhow::Result<Self> {
        let [first, second] = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
        let [client, peer] = [first.local_addr()?.to_string(), second.local_addr()?.to_string()];
        drop((first, second));
        let folder = tempfile::tempdir()?;
        let flags = flags.iter().map(ToString::to_string).collect::<Vec<_>>();
        let process = run(&folder.path().join("data"), &client, &peer, &flags)?;
        Ok(Self { process, folder, client, peer, flags })
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
        self.process = run(&data, &self.client, &self.peer, &self.flags)?;
        Ok(())
    }
}

fn run(data: &Path, client: &str, peer: &str, flags: &[String]) -> anyhow::Result<Child> {
    let scheme = if flags.iter().any(|flag| flag == "--cert-file") { "https" } else { "http" };
    let client = format!("{scheme}://{client}");
    let peer = format!("http://{peer}");
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(data).args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]).args(flags);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    command.spawn().context("starting etcd (Debian: etcd-server)")
}

/// Certificates of an authority of the test's own, made with `openssl`, with keys beside them.
pub struct Certificates(TempDir);

impl Certificates {
    /// Makes the authority (`ca`), and one that is not trusted (`other`).
    pub fn new() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        // Else the host's own decides which extensions there are.
        std::fs::write(folder.path().join("openssl.cnf"), "[req]\ndistinguished_name = dn\n[dn]\n")?;
        let certificates = Self(folder);
        for name in ["ca", "other"] {
            certificates.make(name, &["basicConstraints=critical,CA:TRUE"], &[])?;
        }
        Ok(certificates)
    }

    /// Makes one for a name and what it may be used for.
    pub fn issue(&self, name: &str, extensions: &[&str]) -> anyhow::Result<()> {
        let [authority, key] = [self.path("ca.pem"), self.path("ca.key")].map(|path| path.display().to_string());
        self.make(name, extensions, &["-CA", &authority, "-CAkey", &key])
    }

    fn make(&self, name: &str, extensions: &[&str], authority: &[&str]) -> anyhow::Result<()> {
        let mut command = std::process::Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]);
        command.args(["-subj", &format!("/CN={name}"), "-config"]).arg(self.path("openssl.cnf")).args(authority);
        command.args(extensions.iter().flat_map(|extension| ["-addext", extension]));
        command.arg("-keyout").arg(self.path(&format!("{name}.key")));
        command.arg("-out").arg(self.path(&format!("{name}.pem")));
        let output = command.output().context("openssl")?;
        anyhow::ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Of a file: `NAME.pem`, `NAME.key`.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }
}
