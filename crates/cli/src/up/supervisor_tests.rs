//! A supervisor over small shell scripts.

use std::path::Path;

use super::*;
use crate::up::console::Console;
use crate::up::plan::Role;

const SOON: Duration = Duration::from_secs(10);
const FAST: Backoff = Backoff {
    first: Duration::from_millis(20),
    cap: Duration::from_millis(80),
    healthy_after: Duration::from_secs(60),
};

struct Fixture {
    folder: tempfile::TempDir,
    tasks: TaskSet,
    events: mpsc::Receiver<Event>,
    orders: watch::Sender<Order>,
}

impl Fixture {
    fn new(role: Role, script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("cd {}; {script}", folder.path().display());
        let listen = vec![("--grpc", "first:0".to_owned()), ("--http", "first:0".to_owned())];
        let args = vec!["-c".into(), script.into(), "sh".into()];
        let spec = Spec { name: "it".into(), role, program: "/bin/sh".into(), args, listen };
        let log = RoleLog::new("it", Some(folder.path()), Console::new()).unwrap();
        let (sender, events) = mpsc::channel(64);
        let tasks = TaskSet::new();
        let orders = Supervisor::start(spec, FAST, log, sender, &tasks);
        Self { folder, tasks, events, orders }
    }

    async fn next(&mut self) -> ProcessEvent {
        tokio::time::timeout(SOON, self.events.recv()).await.expect("an event comes").expect("it is supervised").what
    }

    async fn until<T>(&mut self, mut wanted: impl FnMut(ProcessEvent) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(self.next().await) {
                return found;
            }
        }
    }

    async fn started(&mut self) -> u32 {
        self.until(|what| if let ProcessEvent::Started(pid) = what { Some(pid) } else { None }).await
    }

    async fn stop(&mut self, order: Order) -> Option<String> {
        self.orders.send(order).unwrap();
        let problem =
            self.until(|what| if let ProcessEvent::Ended(problem) = what { Some(problem) } else { None }).await;
        assert_eq!(self.tasks.join(SOON).await, Ok(()));
        problem
    }
}

const READY: &str = r#"echo 'READY {"role":"x","grpc":"real:1","http":"real:2"}'"#;

#[tokio::test]
async fn progress_and_ready_lines_are_reported_and_others_logged() {
    let script = format!("echo PROGRESS 0.5 half; echo hello; echo oops >&2; {READY}; exec sleep 100");
    let mut it = Fixture::new(Role::Prefill, &script);
    assert!(matches!(it.next().await, ProcessEvent::Started(_)));
    assert!(matches!(it.next().await, ProcessEvent::Progress(done, what) if done == 0.5 && what == "half"));
    assert!(matches!(it.next().await, ProcessEvent::Ready(ready) if ready.grpc == "real:1"));
    assert_eq!(it.stop(Order::Stop).await, None, "SIGTERM is how it was asked to end");
    let log = std::fs::read_to_string(it.folder.path().join("it.log")).unwrap();
    assert!(log.contains("hello\n") && log.contains("oops\n") && !log.contains("PROGRESS"), "{log}");
}

#[tokio::test]
async fn process_that_dies_is_restarted_with_growing_delay() {
    let mut it = Fixture::new(Role::Prefill, "echo why >&2; exit 3");
    let mut delays = Vec::new();
    for _ in 0..4 {
        let (reason, lines, delay) = it
            .until(|what| match what {
                ProcessEvent::Died { reason, last_lines, restart_in } => Some((reason, last_lines, restart_in)),
                _ => None,
            })
            .await;
        assert_eq!((reason.as_str(), lines), ("ended with status 3", vec!["why".to_owned()]));
        delays.push(delay.unwrap().as_millis());
    }
    assert_eq!(delays, [20, 40, 80, 80]);
    // Asked to end while it waits to be started again, or just as it died of itself.
    it.stop(Order::Stop).await;
}

#[tokio::test]
async fn wrong_setting_ends_a_process_for_good_unless_it_has_served() {
    let restart_in = |what| if let ProcessEvent::Died { restart_in, .. } = what { Some(restart_in) } else { None };
    let mut it = Fixture::new(Role::Prefill, "exit 2");
    assert_eq!(it.until(restart_in).await, None);
    assert_eq!(it.stop(Order::Stop).await, None);
    let mut it = Fixture::new(Role::Prefill, &format!("{READY}; exit 2"));
    assert_eq!(it.until(restart_in).await, Some(Duration::from_millis(20)));
    it.stop(Order::Stop).await;
}

#[tokio::test]
async fn killed_process_is_reported_with_its_signal() {
    let mut it = Fixture::new(Role::Prefill, "exec sleep 100");
    let pid = it.started().await;
    process::send(pid, libc::SIGKILL);
    let reason = it.until(|what| if let ProcessEvent::Died { reason, .. } = what { Some(reason) } else { None }).await;
    assert_eq!(reason, "ended with signal 9 (SIGKILL)");
    assert_ne!(it.started().await, pid);
    assert_eq!(it.stop(Order::Stop).await, None);
}

#[tokio::test]
async fn restarted_conductor_listens_at_its_earlier_address() {
    let script =
        format!(r#"echo "$@" >> args; {READY}; [ -e again ] && exec sleep 100; touch again; sleep 0.2; exit 1"#);
    let mut it = Fixture::new(Role::Conductor, &script);
    let is_ready = |what| if let ProcessEvent::Ready(ready) = what { Some(ready) } else { None };
    it.until(is_ready).await;
    it.until(is_ready).await;
    let args = std::fs::read_to_string(it.folder.path().join("args")).unwrap();
    assert_eq!(args, "--grpc first:0 --http first:0\n--grpc real:1 --http real:2\n");
    assert_eq!(it.stop(Order::Stop).await, None);
}

#[tokio::test]
async fn process_that_ignores_sigterm_is_killed() {
    let mut it =
        Fixture::new(Role::Decode, &format!("trap 'echo term >> asked' TERM; {READY}; while :; do sleep 0.02; done"));
    it.until(|what| if let ProcessEvent::Ready(_) = what { Some(()) } else { None }).await;
    let asked = it.folder.path().join("asked");
    for (order, times) in [(Order::Stop, 1), (Order::Hurry, 2)] {
        it.orders.send(order).unwrap();
        wait_for(&asked, times).await;
    }
    assert_eq!(it.stop(Order::Kill).await.as_deref(), Some("ended with signal 9 (SIGKILL)"));
}

async fn wait_for(file: &Path, lines: usize) {
    let there = async {
        while std::fs::read_to_string(file).unwrap_or_default().lines().count() < lines {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, there).await.expect("the signal arrives");
}

#[tokio::test]
async fn binary_that_cannot_be_started_is_reported() {
    let (sender, mut events) = mpsc::channel(8);
    let spec =
        Spec { name: "it".into(), role: Role::Prefill, program: "/no/binary".into(), args: vec![], listen: vec![] };
    let folder = tempfile::tempdir().unwrap();
    let log = RoleLog::new("it", Some(folder.path()), Console::new()).unwrap();
    let tasks = TaskSet::new();
    let orders = Supervisor::start(spec, FAST, log, sender, &tasks);
    let Some(Event { what: ProcessEvent::Died { reason, .. }, .. }) = events.recv().await else {
        panic!("it cannot start")
    };
    assert!(reason.contains("/no/binary") && reason.contains("No such file"), "{reason}");
    orders.send(Order::Stop).unwrap();
    while let Some(event) = events.recv().await {
        if matches!(event.what, ProcessEvent::Ended(_)) {
            break;
        }
    }
}

#[test]
fn restart_delay_is_capped() {
    assert_eq!(
        [FAST.delay(0), FAST.delay(1), FAST.delay(31), FAST.delay(u32::MAX)].map(|d| d.as_millis()),
        [20, 40, 80, 80]
    );
}
