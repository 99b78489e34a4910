//! Children of this process, as the operating system sees them.

// A hook between fork and exec, and signals to children, have no safe interface in the standard
// library.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use tokio::process::{Child, Command};

/// Starts a child that dies with this process.
///
/// It gets a process group of its own, so that Ctrl-C in a terminal reaches only this process,
/// which then drains the children in order. It must be called on a thread that lives as long as the
/// process: the kernel binds the parent-death signal to the thread.
pub fn spawn(program: &Path, args: &[OsString]) -> io::Result<Child> {
    let parent = std::process::id();
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The plan has put the model into the arguments, or has none.
    command.env_remove("BATON_MODEL").process_group(0).kill_on_drop(true);
    // SAFETY: the hook runs in the child between fork and exec. It makes two system calls that are
    // async-signal-safe, allocates nothing and takes no lock.
    unsafe { command.pre_exec(move || die_with(parent)) };
    command.spawn()
}

fn die_with(parent: u32) -> io::Result<()> {
    // SAFETY: `prctl` with PR_SET_PDEATHSIG reads its second argument as a number and touches no
    // memory of ours.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // The parent may have died before the signal was asked for: then it would never come.
    // SAFETY: `getppid` takes nothing and always succeeds.
    if unsafe { libc::getppid() } as u32 != parent {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Sends `signal` to a child that has not been waited for, so that its id is still its own.
pub fn send(pid: u32, signal: libc::c_int) {
    // SAFETY: `kill` takes two numbers. A failure means that the child has just ended, which is
    // what the caller waits for.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// `status 2`, or `signal 9 (SIGKILL)`.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => format!("signal {signal}{}", name(signal)),
        (None, None) => "no status".to_owned(),
    }
}

fn name(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGINT => " (SIGINT)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGTERM => " (SIGTERM)",
        _ => "",
    }
}

/// Whether a child that was asked to end did so without complaint: one that had not yet installed
/// its handler dies of the signal.
pub fn ended_as_asked(status: ExitStatus) -> bool {
    status.success() || status.signal() == Some(libc::SIGTERM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_is_described_by_status_or_signal() {
        assert_eq!(describe(ExitStatus::from_raw(2 << 8)), "status 2");
        assert_eq!(describe(ExitStatus::from_raw(9)), "signal 9 (SIGKILL)");
        assert!(ended_as_asked(ExitStatus::from_raw(0)) && ended_as_asked(ExitStatus::from_raw(15)));
        assert!(!ended_as_asked(ExitStatus::from_raw(1 << 8)) && !ended_as_asked(ExitStatus::from_raw(9)));
    }

    #[tokio::test]
    async fn child_process_has_its_own_process_group() {
        // Field 5 of `stat` is the process group; the shell's own id is $$.
        let script = "read -r _ _ _ _ group _ </proc/$$/stat; echo $$ $group";
        let child = spawn(Path::new("/bin/sh"), &["-c".into(), script.into()]).unwrap();
        let pid = child.id().unwrap();
        let output = child.wait_with_output().await.unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), format!("{pid} {pid}"));
    }
}
