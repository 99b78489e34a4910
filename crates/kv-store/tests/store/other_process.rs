//! Another process with a store. It is this test binary once more, in a role that it is given by
//! its environment.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::records::{SMALL, open, with_slots};
use crate::{full_disk, killed};

const ROLE: &str = "BATON_KV_STORE_TEST_ROLE";
const FOLDER: &str = "BATON_KV_STORE_TEST_FOLDER";
const READY: &str = "the other process is ready";

/// What the other process does.
pub fn run() {
    let role = env::var(ROLE).expect("a test starts its other process itself");
    let folder = PathBuf::from(env::var_os(FOLDER).expect("given with the role"));
    match role.as_str() {
        "hold" => {
            let _store = open(&folder, &with_slots(&SMALL, 4));
            say_ready();
            wait_for_the_end();
        }
        "write" => killed::write_for_ever(&folder),
        "fill" => full_disk::fill(&folder),
        "fill-and-free" => full_disk::fill_and_free(&folder),
        role => panic!("no role {role}"),
    }
}

pub fn say_ready() {
    println!("\n{READY}");
    std::io::stdout().flush().unwrap();
}

/// The test's end, if it does not kill this process before.
fn wait_for_the_end() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// The other process, as the test sees it. It is killed when this is dropped.
pub struct OtherProcess {
    child: Child,
}

impl OtherProcess {
    pub fn start(role: &str, folder: &Path) -> Self {
        Self::start_under(&[], role, folder)
    }

    /// Started by other programs, which get its command line as their last arguments.
    pub fn start_under(wrapper: &[&str], role: &str, folder: &Path) -> Self {
        let mut line: Vec<OsString> = wrapper.iter().map(OsString::from).collect();
        line.push(env::current_exe().unwrap().into());
        line.extend(["--exact", "other_process", "--ignored", "--nocapture"].map(OsString::from));
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).env(ROLE, role).env(FOLDER, folder);
        Self { child: command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap() }
    }

    /// Waits until it says so; its output ends if it fails.
    pub fn wait_ready(&mut self) {
        let stdout = self.child.stdout.take().expect("waited for once");
        assert!(BufReader::new(stdout).lines().any(|line| line.unwrap() == READY), "it ended");
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    pub fn ended(mut self) -> ExitStatus {
        drop(self.child.stdin.take());
        let _ = std::io::copy(&mut self.child.stdout.take().expect("not waited for"), &mut std::io::stderr());
        self.child.wait().unwrap()
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
