//! `baton up` over shell scripts that stand in for the roles, and a conductor's services that this
//! test plays.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
// The whole file is a test; clippy only knows functions that are marked as one.
#![allow(clippy::unwrap_used)]

mod fake;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake::Fake;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);

/// A folder with stand-ins that say READY, note in `ended` the order in which they end, and run
/// until SIGTERM.
struct Scene {
    folder: tempfile::TempDir,
    _fake: Fake,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { folder: tempfile::tempdir().unwrap(), _fake: Fake::start() };
        let address = scene._fake.address();
        let address = address.trim_start_matches("http://");
        let ready =
            format!(r#"READY {{"role":"x","node":null,"grpc":"{address}","http":"{address}","transfer":null}}"#);
        for name in ["conductor", "prefill", "decode"] {
            scene.script(name, &serving(name, &format!("echo {name} >>ended; exit 0"), &ready));
        }
        scene
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn script(&self, name: &str, body: &str) {
        let path = self.path().join(format!("baton-{name}"));
        fs::write(&path, format!("#!/bin/sh\ncd {}\n{body}\n", self.path().display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn up(&self, args: &[&str]) -> Up {
        self.up_for_people(&[&["--json"], args].concat())
    }

    fn up_for_people(&self, args: &[&str]) -> Up {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command
            .args(["up", "--engine", "mock", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--bin-dir"])
            .arg(self.path());
        command.args(["--ready-file"]).arg(self.path().join("ready")).args(args).env_remove("BATON_MODEL");
        Up(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn ready(&self) -> Value {
        until("readiness", || {
            fs::read_to_string(self.path().join("ready")).ok().and_then(|text| serde_json::from_str(&text).ok())
        })
    }

    fn lines(&self, file: &str) -> Vec<String> {
        fs::read_to_string(self.path().join(file)).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    fn pids(&self) -> Vec<String> {
        ["conductor", "prefill", "decode"].iter().flat_map(|name| self.lines(&format!("{name}.pids"))).collect()
    }
}

/// A stand-in that runs `on_term` at SIGTERM.
fn serving(name: &str, on_term: &str, ready: &str) -> String {
    format!("trap '{on_term}' TERM; echo $$ >>{name}.pids; echo '{ready}'; while :; do sleep 0.02; done")
}

/// A running `baton up`, killed with the test.
struct Up(Child);

impl Up {
    fn signal(&self, signal: &str) {
        kill(signal, &self.0.id().to_string());
    }

    fn end(mut self) -> (Option<i32>, String, String) {
        let status = until("the end", || self.0.try_wait().unwrap());
        let mut text = [String::new(), String::new()];
        std::io::Read::read_to_string(&mut self.0.stdout.take().unwrap(), &mut text[0]).unwrap();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut text[1]).unwrap();
        let [out, err] = text;
        (status.code(), out, err)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn kill(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().unwrap().success(), "{pid} runs");
}

fn until<T>(what: &str, mut there: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = there() {
            return found;
        }
        assert!(start.elapsed() < SOON, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_alive(pid: &str) -> bool {
    // A zombie that its parent has not waited for yet is dead enough.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn up_starts_all_roles_and_ends_the_conductor_first() {
    let scene = Scene::new();
    let up = scene.up(&[]);
    let ready = scene.ready();
    let names: Vec<&str> = ready["nodes"].as_array().unwrap().iter().filter_map(|node| node["name"].as_str()).collect();
    assert_eq!(names, ["prefill-0", "decode-0"]);
    assert_eq!(ready["conductor"]["pid"].to_string(), scene.lines("conductor.pids")[0]);
    up.signal("-TERM");
    let (status, out, err) = up.end();
    assert_eq!(status, Some(0), "{err}");
    let line: Value = serde_json::from_str(out.trim_end()).expect("one line of JSON");
    assert_eq!(line, ready);
    let ended = scene.lines("ended");
    assert_eq!((ended.len(), ended[0].as_str()), (3, "conductor"));
    assert!(!scene.path().join("ready").exists(), "no process is ready any more");
}

#[test]
fn up_reports_and_restarts_a_role_that_dies() {
    let scene = Scene::new();
    let up = scene.up(&["--prefill", "1", "--decode", "1"]);
    let first = scene.ready();
    kill("-KILL", &scene.lines("decode.pids")[0]);
    let second = until("another process", || Some(scene.ready()).filter(|ready| *ready != first));
    assert_eq!(second["conductor"], first["conductor"]);
    assert_eq!(second["nodes"][1]["pid"].to_string(), scene.lines("decode.pids")[1]);
    up.signal("-INT");
    let (status, _, err) = up.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(
        err.contains("ended with signal 9 (SIGKILL); starting it again in 500ms")
            && err.contains("decode-0 is up again"),
        "{err}"
    );
}

#[test]
fn up_ends_with_the_reason_if_a_role_cannot_start() {
    let scene = Scene::new();
    scene.script("decode", "echo 'baton-decode: model: not a GGUF file' >&2; exit 2");
    let (status, out, err) = scene.up(&[]).end();
    assert_eq!((status, out.as_str()), (Some(2), ""));
    let last = err.lines().last().unwrap();
    let ended = "decode-0 ended with status 2 before it was ready";
    assert!(last.contains(&format!("{ended}: baton-decode: model: not a GGUF file")), "{err}");
    assert!(scene.pids().iter().all(|pid| !is_alive(pid)));
    let (_, _, err) = scene.up_for_people(&[]).end();
    assert_eq!((err.matches("not a GGUF file").count(), err.contains(ended)), (1, true), "{err}");
    assert!(!err.contains("starting it again"), "{err}");
}

#[test]
fn up_kills_and_names_a_process_that_does_not_end() {
    let scene = Scene::new();
    let path = scene.path().join("baton-decode");
    let deaf = fs::read_to_string(&path).unwrap().replace("echo decode >>ended; exit 0", "echo deaf >>asked");
    fs::write(&path, deaf).unwrap();
    let up = scene.up(&["--grace", "0"]);
    scene.ready();
    for asked in 1..=2 {
        up.signal("-TERM");
        until("the signal", || (scene.lines("asked").len() >= asked).then_some(()));
    }
    up.signal("-TERM");
    let (status, _, err) = up.end();
    assert_eq!(status, Some(1));
    assert!(err.contains("decode-0 did not end in time: killing it"), "{err}");
    assert!(scene.pids().iter().all(|pid| !is_alive(pid)));
}

#[test]
fn children_of_killed_up_process_die() {
    let scene = Scene::new();
    let up = scene.up(&[]);
    scene.ready();
    let pids = scene.pids();
    assert_eq!(pids.len(), 3);
    up.signal("-KILL");
    until("the end of all children", || pids.iter().all(|pid| !is_alive(pid)).then_some(()));
}

#[test]
fn ctrl_c_during_start_ends_all_processes() {
    let scene = Scene::new();
    scene.script("prefill", "echo $$ >>prefill.pids; echo PROGRESS 0.10 loading weights; exec sleep 100");
    let up = scene.up(&[]);
    until("the prefill node", || (!scene.lines("prefill.pids").is_empty()).then_some(()));
    up.signal("-INT");
    let (status, _, err) = up.end();
    assert_eq!(status, Some(130));
    assert!(err.contains("SIGINT before the cluster was ready"), "{err}");
    assert!(scene.pids().iter().all(|pid| !is_alive(pid)));
}
