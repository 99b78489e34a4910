//! The processes of a cluster together: who starts when, when all are ready, and the order in which
//! they end.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use baton_proto::v1;
use baton_runtime::{Signals, TaskSet};
use baton_types::ErrorKind;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

use super::console::{Console, RoleLog};
use super::lines::Ready;
use super::plan::{Plan, Role, Spec, reachable};
use super::supervisor::{Backoff, Event, Order, ProcessEvent, Supervisor};
use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::{Paint, line};
use crate::table::table;

/// Events that wait to be looked at.
const EVENT_QUEUE: usize = 256;
/// What a role may take beyond the grace period that it was given: to end what is left then, and to
/// close.
const CLOSING: Duration = Duration::from_secs(15);
/// The same after a second signal.
const HURRY: Duration = Duration::from_secs(5);
/// How often the conductor is asked whether all nodes have registered.
const REGISTERED_POLL: Duration = Duration::from_millis(50);

/// A process of the cluster.
struct Member {
    name: String,
    role: Role,
    pid: u32,
    ready: Option<Ready>,
    /// Whether it was ready before: that it is again is news.
    was_ready: bool,
    ended: bool,
    orders: watch::Sender<Order>,
}

/// The processes of a cluster.
pub struct Cluster {
    plan: Plan,
    /// What is said is for programs.
    json: bool,
    console: Console,
    tasks: TaskSet,
    members: Vec<Member>,
    sender: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
}

impl Cluster {
    /// Nothing runs yet.
    pub fn new(plan: Plan, json: bool, tasks: TaskSet) -> Result<Self, CliError> {
        if let Some(path) = &plan.ready_file {
            remove_if_there(path)?;
        }
        let (sender, events) = mpsc::channel(EVENT_QUEUE);
        Ok(Self { plan, json, console: Console::new(), tasks, members: Vec::new(), sender, events })
    }

    /// A line on stderr.
    pub fn say(&self, text: &str) {
        self.console.say(text);
    }

    /// Starts etcd, the conductors, then the nodes; returns when each conductor has all of them
    /// ready. A role that ends before is an error: it would end again.
    pub async fn start(&mut self) -> Result<(), CliError> {
        let timeout = self.plan.start_timeout;
        let started = tokio::time::timeout(timeout, self.start_all()).await;
        started.unwrap_or_else(|_| {
            let late: Vec<&str> = self.members.iter().filter(|m| m.ready.is_none()).map(|m| m.name.as_str()).collect();
            let who = if late.is_empty() { "registration with the conductor".to_owned() } else { late.join(", ") };
            Err(CliError::Cluster(format!("not ready within {timeout:?}: {who}")))
        })
    }

    async fn start_all(&mut self) -> Result<(), CliError> {
        if let Some(etcd) = &self.plan.etcd {
            self.supervise(etcd.spec.clone())?;
            self.all_ready().await?;
        }
        for conductor in self.plan.conductors.clone() {
            self.supervise(conductor)?;
        }
        self.all_ready().await?;
        let conductors = self.addresses(|ready| ready.nodes.as_ref()).join(",");
        for mut spec in self.plan.nodes.clone() {
            spec.args.extend(["--conductor".into(), conductors.clone().into()]);
            self.supervise(spec)?;
        }
        self.all_ready().await?;
        for operators in self.addresses(|ready| ready.operators.as_ref()) {
            self.all_registered(&operators).await?;
        }
        Ok(())
    }

    fn supervise(&mut self, spec: Spec) -> Result<(), CliError> {
        let log = RoleLog::new(&spec.name, self.plan.log_dir.as_deref(), self.console.clone())?;
        let name = spec.name.clone();
        let role = spec.role;
        self.console.waiting(&name, None, "starting");
        let orders = Supervisor::start(spec, Backoff::default(), log, self.sender.clone(), &self.tasks);
        self.members.push(Member { name, role, pid: 0, ready: None, was_ready: false, ended: false, orders });
        Ok(())
    }

    async fn all_ready(&mut self) -> Result<(), CliError> {
        while self.members.iter().any(|member| member.ready.is_none()) {
            self.next_before_ready().await?;
        }
        Ok(())
    }

    async fn all_registered(&mut self, conductor: &str) -> Result<(), CliError> {
        let names: Vec<String> = self.nodes().map(|member| member.name.clone()).collect();
        let registered = registered(conductor.to_owned(), names);
        let mut registered = std::pin::pin!(registered);
        loop {
            tokio::select! {
                result = &mut registered => return result,
                result = self.next_before_ready() => result?,
            }
        }
    }

    /// Takes one event. That a role ends is an error.
    async fn next_before_ready(&mut self) -> Result<(), CliError> {
        let Some(event) = self.events.recv().await else { return Ok(()) };
        if let ProcessEvent::Died { reason, last_lines, restart_in } = &event.what {
            self.console.done(&event.name);
            // People have seen it among the logs, unless those go to files. After the error, clap
            // says how to get help.
            let error = last_lines.iter().rev().find(|line| line.starts_with("error: "));
            let said = error.or(last_lines.last()).filter(|_| self.json || self.plan.log_dir.is_some());
            let said = said.map_or_else(String::new, |said| format!(": {said}"));
            let message = format!("{} {reason} before it was ready{said}", event.name);
            let refused = |message| CliError::Refused { kind: ErrorKind::Invalid, message, retry_after_s: None };
            return Err(if restart_in.is_none() { refused(message) } else { CliError::Cluster(message) });
        }
        self.note(event);
        Ok(())
    }

    /// Says that all are ready: a table for people, a line of JSON for programs, and the file that
    /// was asked for.
    pub fn announce(&mut self) -> Result<(), CliError> {
        self.write_ready_file()?;
        if self.json {
            return Ok(line(&self.summary().to_string())?);
        }
        line(&self.render(Paint::stdout()))?;
        if !self.members.iter().any(|member| member.role == Role::Decode) {
            self.say("no decode node: only requests for one token (--max-tokens 1) are served, until one registers");
        }
        let addresses = self.addresses(|_| None).join(",");
        let flag =
            if addresses == "http://127.0.0.1:7070" { String::new() } else { format!(" --conductor {addresses}") };
        let http = self.of(Role::Conductor).find_map(|member| member.ready.as_ref()?.http.as_deref());
        let longest = self.nodes().filter_map(|member| member.ready.as_ref()?.max_model_len).max();
        if let Some(tokens) = longest {
            self.say(&format!("a request may have {tokens} tokens, prompt and output together"));
        }
        let api = http.map(|http| format!("OpenAI API at http://{}/v1; ", reachable(http))).unwrap_or_default();
        self.say(&format!("ready: {api}try baton{flag} chat; Ctrl-C drains and stops"));
        Ok(())
    }

    /// Reports what happens, for ever.
    pub async fn watch(&mut self) -> Result<(), CliError> {
        while let Some(event) = self.events.recv().await {
            let changed = matches!(event.what, ProcessEvent::Ready(_));
            self.note(event);
            if changed && self.members.iter().all(|member| member.ready.is_some()) {
                self.write_ready_file()?;
            }
        }
        Ok(())
    }

    /// Ends the conductors, then the nodes: those end their requests by themselves, and need these
    /// for it. Then etcd, by which conductors know of each other.
    pub async fn stop(&mut self, signals: &mut Signals) -> Result<(), CliError> {
        let mut stopping = Stopping { allowed: self.plan.grace + CLOSING, problems: Vec::new() };
        self.stop_members(signals, &mut stopping, |role| role == Role::Conductor).await;
        self.stop_members(signals, &mut stopping, |role| matches!(role, Role::Prefill | Role::Decode)).await;
        self.stop_members(signals, &mut stopping, |role| role == Role::Etcd).await;
        if let Some(path) = &self.plan.ready_file {
            remove_if_there(path)?;
        }
        if stopping.problems.is_empty() { Ok(()) } else { Err(CliError::Cluster(stopping.problems.join("; "))) }
    }

    async fn stop_members(&mut self, signals: &mut Signals, stopping: &mut Stopping, of: impl Fn(Role) -> bool) {
        let mut deadline = baton_runtime::now() + stopping.allowed;
        let mut order = Order::Stop;
        self.order(&of, order);
        while self.members.iter().any(|member| of(member.role) && !member.ended) {
            tokio::select! {
                Some(event) = self.events.recv() => {
                    if let ProcessEvent::Ended(Some(problem)) = &event.what {
                        stopping.problems.push(format!("{} {problem}", event.name));
                    }
                    self.note(event);
                }
                _ = signals.recv() => {
                    // The third signal means now.
                    stopping.allowed = if order < Order::Hurry { HURRY } else { Duration::ZERO };
                    deadline = deadline.min(baton_runtime::now() + stopping.allowed);
                    order = order.max(Order::Hurry);
                    self.order(&of, order);
                }
                () = baton_runtime::sleep_until(deadline), if order < Order::Kill => {
                    for member in self.members.iter().filter(|member| of(member.role) && !member.ended) {
                        self.say(&self.console.paint.red(&format!("{} did not end in time: killing it", member.name)));
                    }
                    order = Order::Kill;
                    self.order(&of, order);
                }
            }
        }
    }

    fn order(&self, of: impl Fn(Role) -> bool, order: Order) {
        for member in self.members.iter().filter(|member| of(member.role) && !member.ended) {
            member.orders.send_replace(order);
        }
    }

    /// Takes an event in, and tells people what is news to them.
    fn note(&mut self, event: Event) {
        let Some(index) = self.members.iter().position(|member| member.name == event.name) else { return };
        // Without a folder for logs, people have seen the last lines already.
        let show_lines = self.plan.log_dir.is_some();
        let console = self.console.clone();
        let member = &mut self.members[index];
        match event.what {
            ProcessEvent::Started(pid) => {
                member.pid = pid;
                if let Some(etcd) = self.plan.etcd.as_ref().filter(|_| member.role == Role::Etcd) {
                    let ready = Ready { role: "etcd".to_owned(), grpc: etcd.address.clone(), ..Ready::default() };
                    let orders = member.orders.subscribe();
                    let events = self.sender.clone();
                    self.tasks.spawn_request("etcd", ready_once_it_answers(member.name.clone(), ready, orders, events));
                }
            }
            ProcessEvent::Progress(done, what) => console.waiting(&member.name, Some(done), &what),
            ProcessEvent::Ready(ready) => {
                member.ready = Some(ready);
                console.done(&member.name);
                if std::mem::replace(&mut member.was_ready, true) {
                    console.say(&console.paint.green(&format!("{} is up again (pid {})", member.name, member.pid)));
                }
            }
            ProcessEvent::Died { reason, last_lines, restart_in } => {
                member.ready = None;
                console.done(&member.name);
                let again = restart_in.map(|after| format!("; starting it again in {after:?}")).unwrap_or_default();
                let text = format!("{} (pid {}) {reason}{again}", member.name, member.pid);
                console.say(&console.paint.red(&text));
                for said in last_lines.iter().filter(|_| show_lines) {
                    console.say(&console.paint.dim(&format!("  {said}")));
                }
            }
            ProcessEvent::Ended(_) => {
                member.ended = true;
                console.done(&member.name);
            }
        }
    }

    /// Where the conductors serve gRPC, from here: the ports that `own` names, if they have those,
    /// else the clients' ones.
    fn addresses(&self, own: impl Fn(&Ready) -> Option<&String>) -> Vec<String> {
        let ready = self.of(Role::Conductor).filter_map(|member| member.ready.as_ref());
        ready.map(|ready| format!("http://{}", reachable(own(ready).unwrap_or(&ready.grpc)))).collect()
    }

    fn of(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.role == role)
    }

    fn nodes(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| matches!(member.role, Role::Prefill | Role::Decode))
    }

    fn summary(&self) -> Value {
        let entry = |member: &Member| {
            let ready = member.ready.as_ref();
            json!({
                "name": member.name,
                "role": member.role.as_str(),
                "pid": member.pid,
                "grpc": ready.map(|r| &r.grpc),
                "http": ready.map(|r| &r.http),
                "transfer": ready.map(|r| &r.transfer),
                "operators": ready.map(|r| &r.operators),
                "kv_tokens": ready.and_then(|r| r.kv_tokens),
                "max_model_len": ready.and_then(|r| r.max_model_len),
            })
        };
        let nodes: Vec<Value> = self.nodes().map(entry).collect();
        let conductors: Vec<Value> = self.of(Role::Conductor).map(entry).collect();
        let etcd = self.plan.etcd.as_ref().map(|etcd| &etcd.address);
        json!({ "conductor": conductors.first(), "conductors": conductors, "etcd": etcd, "nodes": nodes })
    }

    fn render(&self, paint: Paint) -> String {
        let cell = |text: Option<&String>| text.cloned().unwrap_or_else(|| "-".to_owned());
        let operators = |member: &Member| member.ready.as_ref().and_then(|ready| ready.operators.clone());
        // Few clusters have such a port.
        let has_operators = self.members.iter().any(|member| operators(member).is_some());
        let row = |member: &Member| {
            let ready = member.ready.as_ref();
            let grpc = ready.map(|r| &r.grpc);
            let http = ready.and_then(|r| r.http.as_ref());
            let transfer = ready.and_then(|r| r.transfer.as_ref());
            let tokens = ready.and_then(|r| r.kv_tokens).map(|tokens| tokens.to_string());
            let mut row = vec![member.name.clone(), member.pid.to_string(), cell(grpc), cell(http), cell(transfer)];
            row.push(cell(tokens.as_ref()));
            row.extend(has_operators.then(|| cell(operators(member).as_ref())));
            row
        };
        let rows: Vec<Vec<String>> = self.members.iter().map(row).collect();
        let bold_names =
            |_: usize, column: usize, text: &str| if column == 0 { paint.bold(text) } else { text.to_owned() };
        let columns = ["ROLE", "PID", "GRPC", "HTTP", "TRANSFER", "KV TOKENS", "OPERATORS"];
        table(&columns[..rows.first().map_or(0, Vec::len)], &rows, paint, bold_names)
    }

    fn write_ready_file(&self) -> Result<(), CliError> {
        let Some(path) = &self.plan.ready_file else { return Ok(()) };
        let cannot = |error| CliError::invalid("--ready-file", format!("cannot write {}: {error}", path.display()));
        replace_file(path, &format!("{}\n", self.summary())).map_err(cannot)
    }
}

/// Writes beside it, then renames: a reader never sees half of it. The name beside it is new:
/// others may have put links to other files under known ones.
fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let readable = Permissions::from_mode(0o666);
    let mut beside = tempfile::Builder::new().permissions(readable).tempfile_in(folder)?;
    beside.write_all(text.as_bytes())?;
    beside.persist(path)?;
    Ok(())
}

/// How long members may take from now on, and what went wrong.
struct Stopping {
    allowed: Duration,
    problems: Vec<String>,
}

/// Resolves when the conductor says that all of `names` are ready.
async fn registered(conductor: String, names: Vec<String>) -> Result<(), CliError> {
    let conductor = Conductor::connect(&conductor).await?;
    loop {
        let nodes = conductor.cluster().list_nodes(v1::ListNodesRequest {}).await?.into_inner().nodes;
        let is_ready = |name: &String| {
            nodes.iter().any(|node| node.state == "ready" && node.info.as_ref().is_some_and(|info| info.name == *name))
        };
        if names.iter().all(is_ready) {
            return Ok(());
        }
        baton_runtime::sleep(REGISTERED_POLL).await;
    }
}

/// An etcd says that it is ready by answering.
async fn ready_once_it_answers(
    name: String,
    ready: Ready,
    mut orders: watch::Receiver<Order>,
    events: mpsc::Sender<Event>,
) {
    let answers = async {
        while TcpStream::connect(&ready.grpc).await.is_err() {
            baton_runtime::sleep(REGISTERED_POLL).await;
        }
    };
    let answers = tokio::select! {
        () = answers => true,
        _ = orders.wait_for(|order| *order > Order::Run) => false,
    };
    if answers {
        // The receiver is gone only when this process is on its way out.
        let _ = events.send(Event { name, what: ProcessEvent::Ready(ready) }).await;
    }
}

fn remove_if_there(path: &Path) -> Result<(), CliError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CliError::invalid("--ready-file", format!("cannot remove {}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn ready_file_replaces_links_and_writes_through_none() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        fs::write(&victim, "dear to its owner").unwrap();
        let ready = folder.path().join("ready.json");
        for link in ["ready.json", "ready.json.new"] {
            symlink(&victim, folder.path().join(link)).unwrap();
        }
        for text in ["first", "second"] {
            replace_file(&ready, text).unwrap();
            assert_eq!(fs::read_to_string(&ready).unwrap(), text);
        }
        assert!(!ready.is_symlink());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "dear to its owner");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left beside it");
        assert!(replace_file(&folder.path().join("none/ready.json"), "x").is_err());
    }
}
