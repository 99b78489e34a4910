//! From the command line to what is to run.

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use baton_runtime::settings::variable;
use baton_runtime::{available_memory, default_cache_bytes, model_bytes};
use tempfile::TempDir;

use super::UpArgs;
use super::lines::Ready;
use super::setting::{add_settings, check_keys};
use crate::error::CliError;

/// An etcd of the cluster's own.
const SPAWN: &str = "spawn";
/// Where an etcd of the cluster's own is.
const LOOPBACK: &str = "127.0.0.1";
/// Engines that nodes have.
const ENGINES: [&str; 2] = ["cpu", "mock"];
/// The model, if no flag names it.
const MODEL_VARIABLE: &str = "BATON_MODEL";

/// Settings of a node that size its KV cache.
const CACHE_KEYS: [&str; 2] = ["cache_bytes", "cache_blocks"];

/// What the nodes of this machine share.
#[derive(Debug, Clone, Copy)]
struct Machine {
    cores: usize,
    /// Memory that is free; `None` if the system does not say.
    memory_bytes: Option<u64>,
}

impl Machine {
    fn this() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { cores, memory_bytes: available_memory() }
    }
}

/// What a process does in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Has the conductors elect the one that places.
    Etcd,
    /// A frontend.
    Conductor,
    /// Computes prompts.
    Prefill,
    /// Streams tokens.
    Decode,
}

impl Role {
    /// Its name in lines, tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Conductor => "conductor",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A process that is to run.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Unique in the cluster.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// Its binary.
    pub program: PathBuf,
    /// Arguments besides `listen`.
    pub args: Vec<OsString>,
    /// Flags of the addresses that it listens on.
    pub listen: Vec<(&'static str, String)>,
}

impl Spec {
    /// All arguments.
    pub fn arguments(&self) -> Vec<OsString> {
        let listen = self.listen.iter().flat_map(|(flag, address)| [OsString::from(flag), address.into()]);
        self.args.iter().cloned().chain(listen).collect()
    }

    /// A conductor that is started again must be where nodes and clients know it to be, even if its
    /// port was chosen at first start.
    pub fn keep_address(&mut self, ready: &Ready) {
        if self.role != Role::Conductor {
            return;
        }
        for (flag, address) in &mut self.listen {
            let bound = match *flag {
                "--grpc" => Some(&ready.grpc),
                "--operators" => ready.operators.as_ref(),
                "--nodes" => ready.nodes.as_ref(),
                _ => ready.http.as_ref(),
            };
            if let Some(bound) = bound {
                address.clone_from(bound);
            }
        }
    }
}

/// An etcd of the cluster's own.
#[derive(Debug, Clone)]
pub struct Etcd {
    /// The process.
    pub spec: Spec,
    /// Where it serves, `host:port`.
    pub address: String,
    /// What it keeps; removed at the end.
    _data: Arc<TempDir>,
}

/// What is to run, and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Starts first, ends last.
    pub etcd: Option<Etcd>,
    /// Start before the nodes, and end before them.
    pub conductors: Vec<Spec>,
    /// The nodes; they get the conductors' addresses when these are known.
    pub nodes: Vec<Spec>,
    /// How long requests may take to end.
    pub grace: Duration,
    /// How long all may take to be ready.
    pub start_timeout: Duration,
    /// Where logs go; none is stderr.
    pub log_dir: Option<PathBuf>,
    /// Written when all are ready.
    pub ready_file: Option<PathBuf>,
}

impl Plan {
    /// Checks what can be checked before anything is started.
    pub fn new(args: &UpArgs) -> Result<Self, CliError> {
        let machine = Machine::this();
        let model = args.model.clone().or_else(|| variable(MODEL_VARIABLE).map(PathBuf::from));
        let bin_dir = match &args.bin_dir {
            Some(folder) => folder.clone(),
            None => beside_this_binary()?,
        };
        let plan = Self::with(args, model, &bin_dir, machine)?;
        for role in [Role::Conductor, Role::Prefill, Role::Decode] {
            if let Some(spec) = plan.conductors.iter().chain(&plan.nodes).find(|spec| spec.role == role) {
                check_keys(role, &spec.program, &args.set)?;
            }
        }
        Ok(plan)
    }

    /// Has etcd of the cluster's own listen on another address of this host, and conductors find it
    /// there. They are reached by the addresses that they listen on.
    pub fn move_etcd(&mut self, ip: &str) {
        let Some(etcd) = &mut self.etcd else { return };
        let replace = |args: &mut [OsString], from: &str, to: &str| {
            for arg in args.iter_mut() {
                if let Some(text) = arg.to_str().filter(|text| text.contains(from)) {
                    *arg = text.replace(from, to).into();
                }
            }
        };
        let before = std::mem::take(&mut etcd.address);
        etcd.address = before.replace(LOOPBACK, ip);
        replace(&mut etcd.spec.args, &format!("http://{LOOPBACK}:"), &format!("http://{ip}:"));
        for conductor in &mut self.conductors {
            replace(&mut conductor.args, &before, &etcd.address);
        }
    }

    fn with(args: &UpArgs, model: Option<PathBuf>, bin_dir: &Path, machine: Machine) -> Result<Self, CliError> {
        if args.prefill + args.decode == 0 {
            let problem =
                "0, and so is --prefill: no request could be served; a decode node alone can, it computes prompts, too";
            return Err(CliError::invalid("--decode", problem));
        }
        let is_apart = args.namespaces && args.conductors > 1;
        if let Some(etcd) = args.etcd.as_ref().filter(|etcd| is_apart && *etcd != SPAWN) {
            let problem = format!("conductors in namespaces of their own may not reach etcd at {etcd}: --etcd spawn");
            return Err(CliError::invalid("--namespaces", problem));
        }
        if args.mock_answers.is_some() && args.engine != "mock" {
            return Err(CliError::invalid("--mock-answers", format!("needs --engine mock, and not {}", args.engine)));
        }
        let cache = default_cache(args, model.as_deref(), machine);
        let common = common_args(args, model)?;
        let program = |name: &str| program(bin_dir, name);
        let etcd = (args.etcd.as_deref() == Some(SPAWN)).then(spawned_etcd).transpose()?;
        let elects = etcd.as_ref().map(|etcd| &etcd.address).or(args.etcd.as_ref());
        if args.conductors > 1 && elects.is_none() {
            let problem = format!("{}, which need an etcd: --etcd spawn starts one", args.conductors);
            return Err(CliError::invalid("--conductors", problem));
        }
        let mut conductors = Vec::new();
        for index in 0..args.conductors {
            let mut listen = vec![
                ("--grpc", port_after("--grpc", &args.grpc, index)?),
                ("--http", port_after("--http", &args.http, index)?),
            ];
            if let Some(operators) = &args.operators {
                listen.push(("--operators", port_after("--operators", operators, index)?));
            }
            let mut own = common.clone();
            if let Some(etcd) = elects {
                own.extend(["--etcd".into(), etcd.into()]);
                if reachable(&args.grpc) != args.grpc && !is_apart {
                    // The others are on this machine.
                    own.extend(["--advertise-host", "127.0.0.1"].map(OsString::from));
                }
            }
            let name = if args.conductors == 1 { "conductor".to_owned() } else { format!("conductor-{index}") };
            let program = program("baton-conductor")?;
            let mut conductor = Spec { name, role: Role::Conductor, program, args: own, listen };
            add_settings(&mut conductor, &args.set)?;
            conductors.push(conductor);
        }
        let total = (args.prefill + args.decode) as usize;
        let mut nodes = Vec::with_capacity(total);
        for (role, binary, count) in
            [(Role::Prefill, "baton-prefill", args.prefill), (Role::Decode, "baton-decode", args.decode)]
        {
            for index in 0..count {
                let threads =
                    args.threads.map_or_else(|| share(machine.cores, total, nodes.len()), |threads| threads as usize);
                let name = format!("{}-{index}", role.as_str());
                let mut own = common.clone();
                own.extend(["--name".into(), OsString::from(&name), "--threads".into(), threads.to_string().into()]);
                if args.namespaces {
                    // Shared memory knows no namespaces: what it carries could not be cut.
                    own.extend(["--transport", "tcp"].map(OsString::from));
                }
                if let Some(file) = &args.mock_answers {
                    own.extend(["--mock-answers".into(), file.into()]);
                }
                if let Some(tokens) = args.max_model_len {
                    own.extend(["--max-model-len".into(), tokens.to_string().into()]);
                }
                let has_cache = CACHE_KEYS.iter().any(|key| args.set.iter().any(|setting| setting.sets(role, key)));
                if let Some(bytes) = cache.filter(|_| !has_cache) {
                    own.extend(["--cache-bytes".into(), bytes.to_string().into()]);
                }
                let listen = ["--listen", "--transfer-listen"].map(|flag| (flag, "127.0.0.1:0".to_owned())).to_vec();
                let mut node = Spec { name, role, program: program(binary)?, args: own, listen };
                add_settings(&mut node, &args.set)?;
                nodes.push(node);
            }
        }
        Ok(Self {
            etcd,
            conductors,
            nodes,
            grace: Duration::from_secs_f64(args.grace),
            start_timeout: Duration::from_secs_f64(args.start_timeout),
            log_dir: args.log_dir.clone(),
            ready_file: args.ready_file.clone(),
        })
    }
}

/// The address of conductor `index`: as given, on the port that comes so many later. Port 0 takes a
/// free one.
fn port_after(flag: &str, address: &str, index: u32) -> Result<String, CliError> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    match parts {
        Some((host, port)) if port > 0 && index > 0 => match u16::try_from(u32::from(port) + index) {
            Ok(port) => Ok(format!("{host}:{port}")),
            Err(_) => Err(CliError::invalid(flag, format!("{address}: there is no port {index} after it"))),
        },
        _ => Ok(address.to_owned()),
    }
}

/// On free ports of loopback, in a folder of its own.
fn spawned_etcd() -> Result<Etcd, CliError> {
    let wrong = |problem: String| CliError::invalid("--etcd", problem);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("etcd")).find(|program| program.is_file());
    let program = found.ok_or_else(|| wrong("there is no etcd in PATH (Debian: etcd-server)".to_owned()))?;
    let cannot = |error: std::io::Error| wrong(error.to_string());
    let data = tempfile::Builder::new().prefix("baton-etcd-").tempdir().map_err(cannot)?;
    // Both are open at once: else they may be the same.
    let ports = [TcpListener::bind((LOOPBACK, 0)).map_err(cannot)?, TcpListener::bind((LOOPBACK, 0)).map_err(cannot)?];
    let [client, peer] = ports.map(|port| port.local_addr().map(|address| address.to_string()));
    let client = client.map_err(cannot)?;
    let peer = peer.map_err(cannot)?;
    let mut args: Vec<OsString> = vec!["--data-dir".into(), data.path().join("data").into()];
    // Of what goes well it would say much.
    args.extend(["--logger", "zap", "--log-level", "warn"].map(OsString::from));
    for (flag, address) in [
        ("--listen-client-urls", &client),
        ("--advertise-client-urls", &client),
        ("--listen-peer-urls", &peer),
        ("--initial-advertise-peer-urls", &peer),
    ] {
        args.extend([flag.into(), format!("http://{address}").into()]);
    }
    args.extend(["--initial-cluster".into(), format!("default=http://{peer}").into()]);
    let spec = Spec { name: "etcd".to_owned(), role: Role::Etcd, program, args, listen: Vec::new() };
    Ok(Etcd { spec, address: client, _data: Arc::new(data) })
}

fn beside_this_binary() -> Result<PathBuf, CliError> {
    let own = std::env::current_exe()?;
    own.parent().map(Path::to_owned).ok_or_else(|| CliError::invalid("--bin-dir", "this binary lies in no folder"))
}

fn program(bin_dir: &Path, name: &str) -> Result<PathBuf, CliError> {
    let path = bin_dir.join(name);
    if path.is_file() {
        return Ok(path);
    }
    let problem = format!(
        "there is no {name} in {}; `cargo build --bins` makes it, --bin-dir says where it is",
        bin_dir.display()
    );
    Err(CliError::invalid("--bin-dir", problem))
}

/// What every role is told.
fn common_args(args: &UpArgs, model: Option<PathBuf>) -> Result<Vec<OsString>, CliError> {
    if !ENGINES.contains(&&*args.engine) {
        let problem = format!("'{}', but must be {}", args.engine, ENGINES.join(" or "));
        return Err(CliError::invalid("--engine", problem));
    }
    let mut common =
        vec!["--engine".into(), OsString::from(&args.engine), "--grace-s".into(), args.grace.to_string().into()];
    if !args.served_model_name.is_empty() {
        common.extend(["--served-model-name".into(), args.served_model_name.join(",").into()]);
    }
    match model {
        // The mock engine takes a model, for its tokenizer, only if it is given on purpose.
        Some(_) if args.engine == "mock" && args.model.is_none() => {}
        Some(path) => {
            let bad = |problem: String| {
                CliError::invalid(if args.model.is_some() { "--model" } else { MODEL_VARIABLE }, problem)
            };
            let exists = path.try_exists().map_err(|error| bad(format!("{}: {error}", path.display())))?;
            if !exists {
                return Err(bad(format!("there is no {}", path.display())));
            }
            common.extend(["--model".into(), path.into()]);
        }
        None if args.engine == "mock" => {}
        None => {
            return Err(CliError::invalid(
                "--model",
                "not set; give --model FILE, set BATON_MODEL, or use --engine mock",
            ));
        }
    }
    // Without a folder for logs, stderr is for people, who do not want to read of every request.
    let default_log = if args.log_dir.is_some() { "info" } else { "warn" };
    common.extend(["--log".into(), args.log.as_deref().unwrap_or(default_log).into()]);
    Ok(common)
}

/// Bytes of KV cache of each node, so that all nodes get as much whichever starts first; `None` if
/// the mock engine needs none, or the environment sets it.
fn default_cache(args: &UpArgs, model: Option<&Path>, machine: Machine) -> Option<u64> {
    let is_set = CACHE_KEYS.iter().any(|key| variable(&format!("BATON_{}", key.to_uppercase())).is_some());
    if args.engine == "mock" || is_set {
        return None;
    }
    let nodes = args.prefill + args.decode;
    Some(default_cache_bytes(machine.memory_bytes?, model.map_or(0, model_bytes), nodes))
}

/// Cores of node `index` of `nodes`: as even as it goes, at least one.
fn share(cores: usize, nodes: usize, index: usize) -> usize {
    (cores / nodes + usize::from(index < cores % nodes)).max(1)
}

/// Where a process of this machine reaches one that listens on `address`.
pub fn reachable(address: &str) -> String {
    match address.parse::<SocketAddr>() {
        Ok(SocketAddr::V4(v4)) if v4.ip().is_unspecified() => format!("127.0.0.1:{}", v4.port()),
        Ok(SocketAddr::V6(v6)) if v6.ip().is_unspecified() => format!("[::1]:{}", v6.port()),
        _ => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn binaries() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in ["baton-conductor", "baton-prefill", "baton-decode"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        folder
    }

    fn plan(line: &str, model: Option<&str>) -> Result<Plan, CliError> {
        let cli = Cli::parse_from(["baton", "up"].into_iter().chain(line.split_whitespace()));
        let Command::Up(args) = cli.command else { panic!("another command") };
        let folder = binaries();
        Plan::with(&args, model.map(PathBuf::from), folder.path(), Machine { cores: 5, memory_bytes: Some(1 << 34) })
    }

    fn line(spec: &Spec) -> String {
        spec.arguments().iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_up_flag_and_setting_reaches_its_role() {
        let plan = plan(
            "--engine mock --prefill 3 --decode 2 --prefill 2 --decode 1 --grpc 127.0.0.1:0 --http 127.0.0.1:0 --grace 3 \
             --set conductor.max_wait_ms=off --set node.kv_dtype=f32 --set prefill.chunk_tokens=64 \
             --set decode.max_running=2",
            Some("/ignored/by/mock"),
        );
        let plan = plan.unwrap();
        assert_eq!(
            line(&plan.conductors[0]),
            "--engine mock --grace-s 3 --log warn --kv-dtype=f32 --max-wait-ms=off --grpc 127.0.0.1:0 --http 127.0.0.1:0"
        );
        let lines: Vec<String> = plan.nodes.iter().map(line).collect();
        let node = "--engine mock --grace-s 3 --log warn --name";
        let listen = "--listen 127.0.0.1:0 --transfer-listen 127.0.0.1:0";
        assert_eq!(
            lines,
            [
                format!("{node} prefill-0 --threads 2 --chunk-tokens=64 --kv-dtype=f32 {listen}"),
                format!("{node} prefill-1 --threads 2 --chunk-tokens=64 --kv-dtype=f32 {listen}"),
                format!("{node} decode-0 --threads 1 --kv-dtype=f32 --max-running=2 {listen}"),
            ]
        );
    }

    #[test]
    fn several_conductors_get_consecutive_ports_and_need_etcd() {
        let plan = plan("--engine mock --conductors 2 --etcd 10.0.0.9:2379 --http 127.0.0.1:0", None).unwrap();
        let lines: Vec<String> = plan.conductors.iter().map(line).collect();
        assert!(lines[0].ends_with("--etcd 10.0.0.9:2379 --grpc 127.0.0.1:7070 --http 127.0.0.1:0"), "{lines:?}");
        assert!(lines[1].ends_with("--etcd 10.0.0.9:2379 --grpc 127.0.0.1:7071 --http 127.0.0.1:0"), "{lines:?}");
        let names: Vec<&str> = plan.conductors.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!((names, plan.etcd.is_none()), (vec!["conductor-0", "conductor-1"], true));
        for (flags, said) in [
            ("--conductors 2", "--conductors: 2, which need an etcd: --etcd spawn starts one"),
            (
                "--conductors 2 --etcd h:1 --grpc 127.0.0.1:65535",
                "--grpc: 127.0.0.1:65535: there is no port 1 after it",
            ),
        ] {
            let error = self::plan(&format!("--engine mock {flags}"), None).unwrap_err();
            assert_eq!((error.exit_status(), error.to_string().as_str()), (2, said));
        }
    }

    #[test]
    fn nodes_in_namespaces_transfer_kv_over_tcp() {
        let plan = plan("--engine mock --namespaces", None).unwrap();
        assert!(plan.nodes.iter().all(|node| line(node).contains("--transport tcp")));
        let error = self::plan("--engine mock --namespaces --set node.transport=shm", None).unwrap_err().to_string();
        assert!(error.starts_with("--set: prefill.transport: "), "{error}");
    }

    #[test]
    fn conductors_in_namespaces_get_the_address_etcd_has_moved_to() {
        let mut plan = plan("--engine mock --conductors 2 --etcd 127.0.0.1:23 --grpc 127.0.0.1:7070", None).unwrap();
        let args = ["--listen-client-urls", "http://127.0.0.1:23", "--initial-cluster", "default=http://127.0.0.1:24"];
        let name = "etcd".to_owned();
        let role = Role::Etcd;
        let program = "etcd".into();
        let spec = Spec { name, role, program, args: args.map(OsString::from).to_vec(), listen: Vec::new() };
        let data = Arc::new(tempfile::tempdir().unwrap());
        plan.etcd = Some(Etcd { spec, address: "127.0.0.1:23".to_owned(), _data: data });
        plan.move_etcd("198.18.0.1");
        let etcd = plan.etcd.clone().unwrap();
        let said = "--listen-client-urls http://198.18.0.1:23 --initial-cluster default=http://198.18.0.1:24";
        assert_eq!((etcd.address.as_str(), line(&etcd.spec).as_str()), ("198.18.0.1:23", said));
        assert!(line(&plan.conductors[1]).contains("--etcd 198.18.0.1:23 --grpc 127.0.0.1:7071"), "{plan:?}");
        let error = self::plan("--engine mock --conductors 2 --etcd h:1 --namespaces", None).unwrap_err().to_string();
        assert!(error.starts_with("--namespaces: conductors in namespaces"), "{error}");
    }

    #[test]
    fn malformed_setting_is_refused_with_its_flag_and_form() {
        let error = Cli::try_parse_from(["baton", "up", "--set", "nodes.threads=1"]).unwrap_err();
        let said = error.to_string();
        assert!(error.exit_code() == 2 && said.contains("'nodes.threads=1' for '--set <ROLE.KEY=VALUE>'"), "{said}");
        assert!(said.contains("expected ROLE.KEY=VALUE, as in conductor.max_wait_ms=5000"), "{said}");
    }

    #[test]
    fn model_flag_is_required_and_must_exist() {
        assert!(plan("", None).unwrap_err().to_string().starts_with("--model: not set"));
        let error = plan("", Some("/no/such.gguf")).unwrap_err().to_string();
        assert_eq!(error, "BATON_MODEL: there is no /no/such.gguf", "no flag was given");
        let error = plan("--model /no/such.gguf", Some("/no/such.gguf")).unwrap_err().to_string();
        assert_eq!(error, "--model: there is no /no/such.gguf");
        let file = tempfile::NamedTempFile::new().unwrap();
        let plan = plan("", file.path().to_str()).unwrap();
        assert!(line(&plan.nodes[0]).contains(&format!("--model {}", file.path().display())));
    }

    #[test]
    fn nodes_share_the_free_memory_unless_their_cache_is_set() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines = |flags: &str| -> Vec<String> {
            plan(flags, file.path().to_str()).unwrap().nodes.iter().map(line).collect()
        };
        let named = lines("--prefill 1 --served-model-name a b/c --decode 1");
        assert!(named.iter().all(|line| line.contains("--served-model-name a,b/c ")), "{named:?}");
        let shared = lines("--prefill 1 --decode 3 --max-model-len 99");
        assert!(shared.iter().all(|line| line.contains("--max-model-len 99 --cache-bytes 2147483648 ")), "{shared:?}");
        let own = lines("--set decode.cache_blocks=7");
        assert!(own[0].contains("--cache-bytes 4294967296 "), "{own:?}");
        assert!(own[1].contains("--cache-blocks=7 ") && !own[1].contains("cache-bytes"), "{own:?}");
        let mock = lines("--engine mock");
        assert!(mock.iter().all(|line| !line.contains("cache")), "{mock:?}");
    }

    #[test]
    fn unknown_engine_is_refused_by_its_flag_and_not_by_the_models() {
        for model in [None, Some("/no/such.gguf")] {
            let error = plan("--engine nope", model).unwrap_err();
            assert_eq!(error.to_string(), "--engine: 'nope', but must be cpu or mock");
        }
    }

    #[test]
    fn cluster_without_any_node_is_refused() {
        let error = plan("--engine mock --prefill 0 --decode 0", None).unwrap_err();
        assert_eq!((error.exit_status(), error.to_string().starts_with("--decode: 0, and so is --prefill")), (2, true));
        for some in ["--prefill 0 --decode 1", "--prefill 1 --decode 0"] {
            assert_eq!(plan(&format!("--engine mock {some}"), None).unwrap().nodes.len(), 1, "{some}");
        }
    }

    #[test]
    fn missing_role_binary_is_named() {
        let cli = Cli::parse_from(["baton", "up", "--engine", "mock"]);
        let Command::Up(args) = cli.command else { panic!("another command") };
        let error = Plan::with(&args, None, Path::new("/nowhere"), Machine::this()).unwrap_err().to_string();
        assert!(error.contains("there is no baton-conductor in /nowhere"), "{error}");
    }

    #[test]
    fn cores_are_shared_evenly_among_nodes() {
        let shares = |cores, nodes| (0..nodes).map(|index| share(cores, nodes, index)).collect::<Vec<_>>();
        assert_eq!(shares(5, 3), [2, 2, 1]);
        assert_eq!(shares(2, 4), [1, 1, 1, 1]);
        assert_eq!(shares(64, 1), [64]);
    }

    #[test]
    fn restarted_conductor_keeps_its_address_and_node_does_not() {
        let mut plan = plan("--engine mock --grpc 127.0.0.1:0", None).unwrap();
        let ready =
            Ready { role: "x".into(), grpc: "1.1.1.1:1".into(), http: Some("1.1.1.1:2".into()), ..Ready::default() };
        plan.conductors[0].keep_address(&ready);
        assert_eq!(plan.conductors[0].listen, [("--grpc", "1.1.1.1:1".to_owned()), ("--http", "1.1.1.1:2".to_owned())]);
        plan.nodes[0].keep_address(&ready);
        assert_eq!(plan.nodes[0].listen[0].1, "127.0.0.1:0");
        assert_eq!(
            [reachable("0.0.0.0:7"), reachable("[::]:7"), reachable("10.0.0.1:7")],
            ["127.0.0.1:7", "[::1]:7", "10.0.0.1:7"]
        );
    }
}
