//! One process of the cluster.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

/// Longest run of a bench.
const BENCH_LIMIT: Duration = Duration::from_secs(180);
/// A model may have to be loaded, on a machine that does other things too.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Of processor time: a hundredth of a second on every Linux.
const MILLIS_PER_TICK: u64 = 10;
/// A drain that takes longer is stuck.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

/// Where a process listens, as its `READY` line says.
#[derive(Debug, Clone, Deserialize)]
pub struct Ready {
    /// Address of its gRPC services.
    pub grpc: String,
    /// Address of its HTTP port, if it has one.
    pub http: Option<String>,
    /// Address of a node's transfer engine.
    pub transfer: Option<String>,
    /// Address of a conductor's port for operators, if it has one.
    pub operators: Option<String>,
    /// Address of a conductor's port for nodes, if it has one.
    pub nodes: Option<String>,
}

/// A running process; killed when dropped.
pub struct Process {
    child: Child,
    /// Where it listens.
    pub ready: Ready,
    /// Its log.
    pub log: PathBuf,
}

/// `baton bench` with these arguments, and no settings of the test's own environment.
pub fn bench(arguments: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(binary("baton")?);
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
        command.env_remove(key);
    }
    command.arg("bench").args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

/// What it printed, once it is over.
pub async fn bench_output(arguments: &[&str]) -> anyhow::Result<Output> {
    let output = bench(arguments)?.output();
    tokio::time::timeout(BENCH_LIMIT, output).await.context("the bench did not end")?.context("start")
}

/// Its report as JSON. Nothing may stand on stderr, which is no terminal here.
pub async fn bench_report(arguments: &[&str]) -> anyhow::Result<serde_json::Value> {
    let output = bench_output(arguments).await?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{arguments:?}: {stderr}");
    assert_eq!(stderr, "", "nothing for people if stderr is no terminal");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Path of a binary of the workspace, built by `cargo build --bins` beside this test.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    // target/<profile>/deps/<test>
    let folder = test.parent().and_then(|deps| deps.parent()).context("the test is not in a target folder")?;
    let path = folder.join(name);
    anyhow::ensure!(
        path.exists(),
        "{} does not exist: run `cargo build --workspace --bins` (make test does)",
        path.display()
    );
    Ok(path)
}

/// KV cache of a node, bytes.
const CACHE_BYTES: u64 = 1 << 30;

impl Process {
    /// Starts a binary and waits until it is ready.
    pub async fn start(name: &str, arguments: &[String], log: PathBuf) -> anyhow::Result<Self> {
        Self::run(Command::new(binary(name)?), name, arguments, log).await
    }

    /// Starts a binary through a command that sets bounds and then becomes it, as
    /// `prlimit --nofile=99` does, and waits until it is ready.
    pub async fn start_within(
        bounds: &[String],
        name: &str,
        arguments: &[String],
        log: PathBuf,
    ) -> anyhow::Result<Self> {
        let (first, rest) = bounds.split_first().context("no command")?;
        let mut command = Command::new(first);
        command.args(rest).arg(binary(name)?);
        Self::run(command, name, arguments, log).await
    }

    async fn run(mut command: Command, name: &str, arguments: &[String], log: PathBuf) -> anyhow::Result<Self> {
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        command.stderr(std::fs::File::create(&log)?);
        // The test's own environment must not decide settings.
        for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
            command.env_remove(key);
        }
        // By default a node takes half of the machine's memory, and tests run side by side.
        command.env("BATON_CACHE_BYTES", CACHE_BYTES.to_string());
        let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
        let stdout = child.stdout.take().context("no stdout")?;
        let ready = tokio::time::timeout(START_TIMEOUT, ready(stdout)).await;
        match ready {
            Ok(Ok(ready)) => Ok(Self { child, ready, log }),
            Ok(Err(error)) => bail!("{name}: {error}; its log: {}", std::fs::read_to_string(&log)?),
            Err(_) => {
                bail!("{name} was not ready within {START_TIMEOUT:?}; its log: {}", std::fs::read_to_string(&log)?)
            }
        }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    /// Resident memory of its own, bytes. Arenas of other nodes of this host, which it has mapped
    /// to read from, are not in it. They are resident once, as their owners' memory.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid()))?;
        own_resident_bytes(&smaps).context("smaps")
    }

    /// The most that it ever had in RAM, bytes.
    pub fn peak_bytes(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
    }

    /// Processor time that it has taken so far, of all its threads.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        cpu_ticks(&stat).map(|ticks| Duration::from_millis(ticks * MILLIS_PER_TICK)).context("stat")
    }

    /// What its metrics page says of a name with its labels; 0 if it is not there.
    pub async fn metric(&self, name: &str) -> anyhow::Result<f64> {
        metric(self.ready.operators.as_deref().or(self.ready.http.as_deref()).context("no HTTP port")?, name).await
    }

    /// Ends it at once, as a crash would.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("kill")
    }

    /// Asks it to drain, and waits for its exit status.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self.pid();
        let status = Command::new("sh").args(["-c", &format!("kill -TERM {pid}")]).status().await?;
        anyhow::ensure!(status.success(), "kill -TERM {pid}");
        let exit = tokio::time::timeout(STOP_TIMEOUT, self.child.wait()).await;
        let exit = exit.with_context(|| format!("process {pid} did not stop; its log: {}", self.log.display()))??;
        anyhow::ensure!(
            exit.success(),
            "process {pid} ended with {exit}; its log: {}",
            std::fs::read_to_string(&self.log)?
        );
        Ok(())
    }
}

/// Of `/proc/PID/stat`: user and system time, fields 14 and 15. The name before them may have
/// spaces.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Adds up the mappings, less those of shared memory that can only be read.
fn own_resident_bytes(smaps: &str) -> Option<u64> {
    let mut own = true;
    let mut total = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next()?;
        let second = words.next();
        if first == "Rss:" {
            let kilobytes: u64 = second?.parse().ok()?;
            total += if own { kilobytes * 1024 } else { 0 };
        } else if !first.ends_with(':') {
            // Address range, permissions, offset, device, inode, name.
            own = !(second? == "r--s" && line.contains("/memfd:baton-kv"));
        }
    }
    Some(total)
}

/// Reads lines up to `READY {...}`, and goes on reading so that the process never waits for us.
async fn ready(stdout: tokio::process::ChildStdout) -> anyhow::Result<Ready> {
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await? {
        if let Some(json) = line.strip_prefix("READY ") {
            let ready = serde_json::from_str(json)?;
            #[allow(clippy::disallowed_methods)] // a test's helper, which ends with the process' output
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok(ready);
        }
    }
    bail!("it ended before it was ready")
}

/// Of the process whose HTTP port that is, the first value of a metric whose line begins so; 0 if
/// there is none.
pub async fn metric(address: &str, name: &str) -> anyhow::Result<f64> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream.write_all(format!("GET /metrics HTTP/1.0\r\nhost: {address}\r\n\r\n").as_bytes()).await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    let line = page.lines().find(|line| line.starts_with(name));
    Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0))
}

/// Sends a signal, `STOP` say, to a process that is there.
///
/// # Panics
/// If it is gone.
pub fn signal(pid: u32, name: &str) {
    let status = std::process::Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()), "kill -{name} {pid}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn cpu_time_is_the_sum_of_user_and_system() {
        let stat = "12 (a b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0";
        assert_eq!(super::cpu_ticks(stat), Some(300));
    }

    #[test]
    fn resident_bytes_exclude_kv_arenas_of_other_nodes() {
        let smaps = "00400000-00500000 r-xp 00000000 08:01 7   /usr/bin/x y\nSize: 1024 kB\nRss:  8 kB\nPss: 8 kB\nVmFlags: rd ex\n\
                     7f00-7f10 rw-s 00000000 00:01 5   /memfd:baton-kv (deleted)\nRss: 100 kB\n\
                     7f20-7f30 r--s 00000000 00:01 6   /memfd:baton-kv (deleted)\nRss: 1000 kB\n\
                     7f40-7f50 rw-p 00000000 00:00 0\nRss: 10 kB\n";
        assert_eq!(super::own_resident_bytes(smaps), Some(118 * 1024));
    }
}
