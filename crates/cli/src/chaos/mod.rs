//! `baton chaos`: faults at the nodes of a running cluster, and streams that must not notice more
//! than a pause.
//!
//! First each request is asked in peace. Then clients ask them again and again. Every few seconds a
//! process of this host is killed, stopped for a while, drained, asked to end, cut off, or left
//! with a slow network. It is a node, if there are several a conductor, and if it is named etcd.
//! One of each role is left alone at any time, but etcd. The supervisor of the processes has to
//! start them again, as `baton up` does. A client whose conductor is lost asks the next one, with
//! its key. If it is only slow, that one is asked again. At the end the nodes prove that every
//! block is accounted for.

mod cable;
mod faults;
mod processes;
mod report;
mod streams;

use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_proto::v1;
use baton_runtime::Signals;
use futures::future::join_all;

use crate::args::ChaosArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::{Waiting, line};

use cable::Cable;
pub use faults::FaultKind;
use faults::{CONDUCTOR, ETCD, Faults};
use processes::Process;
use report::{Memory, Report};
use streams::{Ends, Streams};

/// How long nodes may take to be back, and the cluster to be idle, at the end. It is more than
/// `grant_ttl_s`: a node that was cut off may have a grant that no prefill node waits for any more.
const AFTERMATH: Duration = Duration::from_secs(90);
/// How often is looked at the nodes.
const LOOK: Duration = Duration::from_millis(200);
/// How long a conductor may take to say how the nodes are. One that is stopped does not.
pub const ANSWER: Duration = Duration::from_secs(1);

/// Runs the streams and the faults, and says what came of them.
pub async fn run(args: &ChaosArgs, address: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(address).await?;
    let conductors = Conductor::each(address)?;
    check_here(&nodes(&conductor).await?, &args.faults)?;
    let began = baton_runtime::now();
    let mut waiting = Waiting::new("asking each request without faults", json);
    let streams = Streams::baseline(&conductor, args.requests, args.seed, args.max_tokens).await?;
    waiting.clear();
    say(json, &format!("{} requests without faults took {:.1} s", args.requests, began.elapsed().as_secs_f64()))?;

    let mut signals = Signals::new()?;
    let mut faults = Faults::new(args);
    let mut memory = Memory::default();
    let clients = (0..args.streams).map(|client| streams.client(&conductors, client, args.streams));
    let faulty = async {
        let ended = tokio::select! {
            ended = disturb(args, &conductors, &streams, &mut faults, &mut memory, json) => ended,
            signal = signals.recv() => Err(CliError::Interrupted(format!("{signal}: nodes are left as they were"))),
        };
        streams.stop.store(true, Ordering::Relaxed);
        faults.undo(&conductors).await;
        ended
    };
    let (ends, disturbed) = tokio::join!(join_all(clients), faulty);
    disturbed?;
    let over = baton_runtime::now();
    let aftermath = aftermath(&conductors).await.map_or_else(|| Ok(over.elapsed()), Err);
    memory.at_end();
    let report = Report::new(Ends::of_all(ends), &faults, &streams, &memory, aftermath);
    line(&if json { report.json().to_string() } else { report.text() })?;
    report.verdict()
}

async fn nodes(conductor: &Conductor) -> Result<Vec<v1::NodeStatus>, CliError> {
    Ok(conductor.cluster().list_nodes(v1::ListNodesRequest {}).await?.into_inner().nodes)
}

/// Only processes of this host can be hurt from here.
fn check_here(nodes: &[v1::NodeStatus], faults: &[FaultKind]) -> Result<(), CliError> {
    let infos = nodes.iter().filter(|node| node.state == "ready").filter_map(|node| node.info.as_ref());
    let addresses: Vec<_> = infos.map(|info| info.address.clone()).collect();
    let is_elsewhere = |address: &&String| !processes::is_loopback(address) && Process::listening(address).is_none();
    if let Some(other) = addresses.iter().find(is_elsewhere) {
        return Err(CliError::Cluster(format!("a node is at {other}, and chaos hurts only processes of this host")));
    }
    let processes: Vec<_> = addresses.iter().filter_map(|address| Process::listening(address)).collect();
    if processes.is_empty() {
        return Err(CliError::Cluster("no process of a node is found that this user may signal".to_owned()));
    }
    let of_cables = faults.iter().find(|fault| fault.is_of_cable());
    match of_cables.filter(|_| processes.iter().any(|process| Cable::of(*process).is_none())) {
        Some(fault) => {
            let problem =
                format!("{}: a node has no network namespace with a cable (baton up --namespaces)", fault.as_str());
            Err(CliError::invalid("--faults", problem))
        }
        None => Ok(()),
    }
}

/// How all are: the nodes, as a conductor says that answers, and of several conductors each, and
/// etcd, as if they were nodes.
async fn all(conductors: &[Conductor], etcd: Option<&str>) -> Vec<v1::NodeStatus> {
    let asked = conductors.iter().map(|conductor| tokio::time::timeout(ANSWER, nodes(conductor)));
    let answers = join_all(asked).await;
    let is_well: Vec<_> = answers.iter().map(|answer| matches!(answer, Ok(Ok(_)))).collect();
    // A conductor that was just started knows few of the nodes.
    let known = answers.into_iter().filter_map(|answer| answer.ok()?.ok()).max_by_key(Vec::len);
    let mut all = known.unwrap_or_default();
    if conductors.len() > 1 {
        let each = conductors.iter().zip(is_well).enumerate();
        all.extend(each.filter_map(|(index, (conductor, is_well))| {
            other(format!("{CONDUCTOR}-{index}"), CONDUCTOR, conductor.address(), is_well)
        }));
    }
    all.extend(etcd.and_then(|address| other(ETCD.to_owned(), ETCD, address, true)));
    all
}

/// A process that is no node; `None` while it is not there.
fn other(name: String, role: &str, address: &str, is_well: bool) -> Option<v1::NodeStatus> {
    let generation = Process::listening(address)?.start();
    let info =
        v1::NodeInfo { name, role: role.to_owned(), address: address.to_owned(), generation, ..Default::default() };
    let state = if is_well { "ready" } else { "lost" }.to_owned();
    Some(v1::NodeStatus { info: Some(info), state, load: Some(v1::Load::default()), ..Default::default() })
}

async fn disturb(
    args: &ChaosArgs,
    conductors: &[Conductor],
    streams: &Streams,
    faults: &mut Faults,
    memory: &mut Memory,
    json: bool,
) -> Result<(), CliError> {
    let began = baton_runtime::now();
    let every = Duration::from_secs_f64(args.every);
    let duration = Duration::from_secs_f64(args.duration);
    let mut next = every;
    while began.elapsed() < duration {
        baton_runtime::sleep(LOOK).await;
        let nodes = all(conductors, args.etcd.as_deref()).await;
        faults.look(&nodes);
        if !memory.has_begun() && began.elapsed() >= (duration / 5).min(Duration::from_secs(120)) {
            let infos = nodes.iter().filter_map(|node| node.info.as_ref());
            let infos = infos.map(|info| (info.name.clone(), info.address.clone()));
            let only = conductors.first().filter(|_| conductors.len() == 1);
            memory.begin(infos.chain(only.map(|it| (CONDUCTOR.to_owned(), it.address().to_owned()))));
        }
        if began.elapsed() < next || began.elapsed() + every > duration {
            continue;
        }
        next += every;
        if let Some(done) = faults.next(conductors, &nodes).await? {
            streams.faults().on_fault(baton_runtime::now());
            say(json, &format!("{:6.1} s  {done}", began.elapsed().as_secs_f64()))?;
        }
    }
    Ok(())
}

/// What is left when all is over: `None` if nothing is.
async fn aftermath(conductors: &[Conductor]) -> Option<String> {
    let began = baton_runtime::now();
    loop {
        let looked = join_all(conductors.iter().map(left)).await.into_iter().map(|left| match left {
            Ok(left) => left,
            Err(error) => Some(error.to_string()),
        });
        let left = looked.flatten().next()?;
        if began.elapsed() > AFTERMATH {
            return Some(left);
        }
        baton_runtime::sleep(LOOK).await;
    }
}

async fn left(conductor: &Conductor) -> Result<Option<String>, CliError> {
    let nodes = nodes(conductor).await?;
    let name = |node: &v1::NodeStatus| node.info.as_ref().map(|info| info.name.clone()).unwrap_or_default();
    if let Some(node) = nodes.iter().find(|node| node.state != "ready") {
        return Ok(Some(format!("{} is {}", name(node), node.state)));
    }
    if let Some(node) = nodes.iter().find(|node| node.placed > 0) {
        return Ok(Some(format!("{} requests are placed on {}", node.placed, name(node))));
    }
    let checked = conductor.cluster().check_integrity(v1::CheckClusterIntegrityRequest {}).await?.into_inner().nodes;
    Ok(checked.into_iter().find_map(|node| {
        let load = node.load.unwrap_or_default();
        match (node.problem.is_empty(), load.blocks_used + load.blocks_reserved) {
            (false, _) => Some(format!("{}: {}", node.node, node.problem)),
            (true, 0) => None,
            (true, held) => Some(format!("{held} blocks are held on {}", node.node)),
        }
    }))
}

/// Programs read the end.
fn say(json: bool, text: &str) -> Result<(), CliError> {
    if !json {
        line(text)?;
    }
    Ok(())
}
