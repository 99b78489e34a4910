//! The target as a process of its own.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::BenchError;

/// What a target prints first, before its address.
pub const LISTENING: &str = "LISTENING ";
/// Longest wait for that.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for its end.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// A target that this process started; killed when dropped. It also ends by itself once the control
/// connection is closed.
#[derive(Debug)]
pub struct Target {
    child: Child,
    /// Its control address.
    pub address: SocketAddr,
}

impl Target {
    /// Starts this program again.
    pub async fn start() -> Result<Self, BenchError> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "transfer", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let stdout = child.stdout.take().ok_or_else(|| BenchError::control("target", "has no stdout"))?;
        let mut line = String::new();
        let mut lines = BufReader::new(stdout);
        let read = tokio::time::timeout(START_TIMEOUT, lines.read_line(&mut line)).await;
        match read {
            Ok(read) => read?,
            Err(_) => return Err(BenchError::control("target", format!("not ready within {START_TIMEOUT:?}"))),
        };
        let address = line.strip_prefix(LISTENING).and_then(|rest| rest.trim().parse().ok());
        let address =
            address.ok_or_else(|| BenchError::control("target", format!("started with '{}'", line.trim())))?;
        Ok(Self { child, address })
    }

    /// Waits for its end, which comes once the control connection is closed.
    pub async fn ended(mut self) -> Result<(), BenchError> {
        match tokio::time::timeout(STOP_TIMEOUT, self.child.wait()).await {
            Err(_) => Err(BenchError::control("target", format!("still running after {STOP_TIMEOUT:?}"))),
            Ok(status) => match status? {
                status if status.success() => Ok(()),
                status => Err(BenchError::control("target", format!("ended with {status}"))),
            },
        }
    }
}
