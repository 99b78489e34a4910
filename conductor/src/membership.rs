//! Embedded membership: nodes register with this conductor, and it opens a session to each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::Step;
use baton_proto::v1::{self, node_command::Command, node_event::Event};
use baton_scheduler::{Applied, ClusterNode, Departure, NodeState, RequestEvent};
use baton_text::ModelLimits;
use baton_types::{
    DecodeEvent, ErrorKind, Load, NodeInfo, NodeRole, PrefillEvent, Refused, RequestKey, TransferReport,
};

use crate::frontend::Frontend;
use crate::nodes::{SessionError, SessionEvents, run_session};
use crate::unjoined::NotJoined;

/// A node that takes fewer tokens of prompt and output is of no use.
const LEAST_CONTEXT: u32 = 32;
/// Requests that are told at once that their node is away, and how long the next ones wait.
const AWAY_AT_ONCE: usize = 32;
const AWAY_EVERY: Duration = Duration::from_millis(10);

/// Takes a node in, and dials it if it is new.
pub fn join(frontend: &Arc<Frontend>, info: NodeInfo) -> Result<(), Refused> {
    if let Err(refused) = check_model(frontend, &info) {
        // The node asks again every few seconds, and logs it each time.
        tracing::warn!(node = %info.node, reason = refused.message, "a node is refused");
        return Err(refuse(frontend, &info, refused));
    }
    let registered = frontend.nodes.register(info.clone());
    let Some(dial) = registered.map_err(|refused| refuse(frontend, &info, refused))? else { return Ok(()) };
    let frontend = Arc::clone(frontend);
    frontend.clone().tasks.spawn_request("node session", async move {
        tokio::select! {
            begun = run_session(&frontend.nodes, dial, frontend.id, &*frontend.clock, &*frontend) => if let Err(error) = begun {
                frontend.on_no_session(&info, &error);
            },
            // The nodes see their sessions end and abort what is left.
            () = frontend.tasks.cancelled() => {}
        }
    });
    Ok(())
}

/// Operators see what was refused.
fn refuse(frontend: &Frontend, info: &NodeInfo, refused: Refused) -> Refused {
    frontend.unjoined.on_not_joined(frontend.clock.now(), info, NotJoined::Refused, &refused.message);
    refused
}

/// A node of another model, or with another layout than the nodes that are here, cannot serve with
/// them.
fn check_model(frontend: &Frontend, info: &NodeInfo) -> Result<(), Refused> {
    let refuse = |message: String| Err(Refused { kind: ErrorKind::Invalid, message });
    if info.model != frontend.model.name() {
        return refuse(format!(
            "model: node {} serves '{}', this cluster '{}'",
            info.node,
            info.model,
            frontend.model.name()
        ));
    }
    if info.context_length < LEAST_CONTEXT.min(frontend.model.limits.context_length.unwrap_or(LEAST_CONTEXT)) {
        let node = &info.node;
        let has = info.context_length;
        return refuse(format!("context_length: node {node} takes {has} tokens, but {LEAST_CONTEXT} are the least"));
    }
    // Another vocabulary masks other tokens of a structured output.
    let own = frontend.model.grammars.digest();
    if info.vocabulary != own {
        return refuse(format!("vocabulary: node {} has {}, this cluster {own}", info.node, info.vocabulary));
    }
    // It may be restarted with another one, under the same name: this node stays and asks again.
    let stays = |message: String| Err(Refused { kind: ErrorKind::Unavailable, message });
    let layout = &info.layout;
    let wanted = frontend.kv;
    if layout.block_tokens != wanted.block_tokens {
        let node = &info.node;
        let has = layout.block_tokens;
        let wanted = wanted.block_tokens;
        return stays(format!("block_tokens: node {node} has {has}, this conductor's setting is {wanted}"));
    }
    if layout.dtype != wanted.dtype {
        let node = &info.node;
        let has = layout.dtype.as_str();
        let wanted = wanted.dtype.as_str();
        return stays(format!("kv_dtype: node {node} has {has}, this conductor's setting is {wanted}"));
    }
    let cluster = frontend.cluster();
    let other = cluster.nodes().find(|node| node.is_ready() && node.info().node != info.node);
    let Some(other) = other.map(|node| node.info()) else { return Ok(()) };
    match other.layout.check_compatible(&info.layout) {
        Ok(()) => Ok(()),
        // The other one may be the odd one.
        Err(error) => stays(format!("layout of node {} beside node {}: {error}", info.node, other.node)),
    }
}

/// What a node claims of the model beyond what the model's own files say is not believed. It may
/// take less of the context than the model.
fn as_the_model_has_it(limits: ModelLimits, info: NodeInfo) -> NodeInfo {
    let context_length = limits.context_length.map_or(info.context_length, |most| info.context_length.min(most));
    NodeInfo { context_length, vocab_size: limits.vocab_size.unwrap_or(info.vocab_size), ..info }
}

impl SessionEvents for Frontend {
    fn check(&self, info: &NodeInfo) -> Result<(), SessionError> {
        check_model(self, info).map_err(|refused| SessionError::WrongNode(refused.message))
    }

    fn on_welcome(&self, info: &NodeInfo) {
        tracing::info!(
            node = %info.node, role = %info.role, generation = %info.generation, address = info.address,
            kv_class = info.kv_class, "node joined"
        );
        self.unjoined.on_joined(info);
        self.tell_settings(&info.node);
        self.tell_leader(&info.node);
        self.cluster().on_node_joined(self.clock.now(), as_the_model_has_it(self.model.limits, info.clone()));
    }

    fn on_silent(&self, info: &NodeInfo) {
        self.suspect(info, Departure::Silent, "node is silent: it is suspected");
    }

    fn on_still_silent(&self, info: &NodeInfo) {
        self.still_suspect(info, Departure::Silent);
    }

    fn on_event(&self, info: &NodeInfo, event: Event) {
        let now = self.clock.now();
        let result = match event {
            Event::Welcome(_) => Ok(()),
            Event::Load(load) => Load::try_from(load).map(|load| self.on_load(now, info, load)),
            Event::Prefill(event) => event.into_domain().map(|(key, event)| self.on_prefill(now, info, key, event)),
            Event::Decode(events) => {
                let told = events.events.into_iter();
                // What one of them says keeps none of the others from being heard.
                told.map(|event| event.into_domain().map(|(key, event)| self.on_decode(now, info, key, event)))
                    .fold(Ok(()), Result::and)
            }
            Event::Kv(events) => self.on_kv(info, events),
            Event::LeaderTerm(term) => {
                self.on_leader_term(&info.start(), term);
                Ok(())
            }
            Event::MigrationRequest(offer) => baton_proto::key(offer.key).map(|key| {
                self.live.deliver(&info.node, key, now, RequestEvent::MigrationRequested(offer.output_tokens));
            }),
            Event::Transfer(report) => {
                TransferReport::try_from(report).map(|report| self.transfers.keep(&info.node, info.generation, report))
            }
            Event::Step(step) => {
                let slice = step.slice.map(|slice| Step::of(slice.rows, slice.attended_tokens, slice.seconds));
                Step::of(step.rows, step.attended_tokens, step.seconds).and_then(|of| {
                    // A step of a decode node that computed prompts, too, says nothing of one that
                    // did not.
                    if info.role == NodeRole::Prefill || step.prompt_rows == 0 {
                        self.cluster().on_step(now, &info.node, of.rows, of.attended_tokens, of.seconds);
                    }
                    slice.transpose().map(|slice| {
                        if let Some(slice) = slice {
                            self.cluster().on_slice(&info.node, slice.rows, slice.attended_tokens, slice.seconds);
                        }
                    })
                })
            }
        };
        if let Err(error) = result {
            tracing::error!(node = %info.node, %error, "a node sent what this conductor does not understand");
        }
    }

    fn on_left(&self, info: &NodeInfo, error: &SessionError) {
        let now = self.clock.now();
        let state = match error {
            SessionError::Ended => self.cluster().on_node_goodbye(now, &info.node, info.generation),
            _ => {
                self.cluster().on_node_left(now, &info.node, info.generation);
                NodeState::Lost
            }
        };
        let away = match (state, error) {
            (NodeState::Drained, _) => Departure::Drained,
            (_, SessionError::Silent(_)) => Departure::GivenUp,
            // A process that dies ends no stream in order, says nothing of another session, and
            // answers no more.
            (_, SessionError::Ended | SessionError::Replaced(_) | SessionError::CutOff(_) | SessionError::Closed) => {
                Departure::Replaced
            }
            _ => Departure::Died,
        };
        if away == Departure::Drained {
            tracing::info!(node = %info.node, generation = %info.generation, "node drained");
        } else {
            tracing::warn!(node = %info.node, generation = %info.generation, %error, "node lost");
            self.metrics.on_node_lost(info.role);
        }
        self.transfers.forget(&info.node, info.generation);
        // What it told of the leader ends with its session. A later start may have one by now.
        self.on_leader_term(&info.start(), 0);
        self.nodes.send_all(&Command::NodeLost(v1::NodeLostCommand::new(&info.node, info.generation)));
        // After the cluster knows: what is placed from now on is placed without it.
        self.tell_away(info, away);
    }
}

impl Frontend {
    /// A node registered, and its session did not begin.
    fn on_no_session(&self, info: &NodeInfo, error: &SessionError) {
        let node = &info.node;
        tracing::warn!(%node, %error, "no session with a node");
        let why = match error {
            // A later start has one.
            SessionError::Closed => return,
            SessionError::WrongNode(_) => NotJoined::Refused,
            _ => NotJoined::Unreachable,
        };
        let start = |known: &&ClusterNode| known.info().generation == info.generation;
        if self.cluster().node(node).filter(start).is_none_or(|known| known.state() != NodeState::Drained) {
            self.unjoined.on_not_joined(self.clock.now(), info, why, &error.to_string());
        }
    }

    fn on_load(&self, now: Instant, info: &NodeInfo, load: Load) {
        let stalled = load.stalled;
        let was_stalled = {
            let mut cluster = self.cluster();
            let known = cluster.node(&info.node).filter(|node| node.info().generation == info.generation);
            // A later start took its place while the report was on its way.
            let Some(was_stalled) = known.map(|node| node.load().stalled) else { return };
            cluster.on_load(now, &info.node, load);
            was_stalled
        };
        match (stalled, was_stalled) {
            (true, false) => {
                self.suspect(info, Departure::Stalled, "the node's engine makes no progress: it is suspected")
            }
            (true, true) => self.still_suspect(info, Departure::Stalled),
            (false, _) => {}
        }
    }

    /// What a node has goes on elsewhere, if others can do its work.
    fn suspect(&self, info: &NodeInfo, away: Departure, why: &'static str) {
        let others = self.cluster().on_node_silent(&info.node);
        tracing::warn!(node = %info.node, others, "{why}");
        if others {
            self.tell_away(info, away);
        }
    }

    /// Others that can do its work may be here by now.
    fn still_suspect(&self, info: &NodeInfo, away: Departure) {
        if self.cluster().on_node_silent(&info.node) {
            self.tell_away(info, away);
        }
    }

    /// Tells the requests that are at a node, a few at a time: each is placed again, and what
    /// others have to say goes between.
    fn tell_away(&self, info: &NodeInfo, away: Departure) {
        #[cfg(test)]
        crate::tests::seen::away(away);
        let at = self.clock.now();
        let requests = self.live.at(&info.node);
        let (first, rest) = requests.split_at(requests.len().min(AWAY_AT_ONCE));
        self.live.node_away(first, at, &info.start(), away);
        if rest.is_empty() {
            return;
        }
        // Of a node that stays away it is told again and again.
        tracing::debug!(node = %info.node, requests = requests.len(), "many requests go on elsewhere");
        let live = self.live.clone();
        let start = info.start();
        let rest = rest.to_vec();
        let clock = Arc::clone(&self.clock);
        self.tasks.spawn_request("node away", async move {
            for some in rest.chunks(AWAY_AT_ONCE) {
                clock.sleep(AWAY_EVERY).await;
                live.node_away(some, at, &start, away);
            }
        });
    }

    fn on_prefill(&self, now: Instant, info: &NodeInfo, key: RequestKey, event: PrefillEvent) {
        self.live.deliver(&info.node, key, now, RequestEvent::Prefill(event));
    }

    fn on_decode(&self, now: Instant, info: &NodeInfo, key: RequestKey, event: DecodeEvent) {
        self.live.deliver(&info.node, key, now, RequestEvent::Decode(event));
    }

    fn on_kv(&self, info: &NodeInfo, events: v1::KvEvents) -> Result<(), baton_proto::InvalidMessage> {
        let changes = events.events.into_iter().map(TryInto::try_into).collect::<Result<Vec<_>, _>>()?;
        let sequence = events.sequence;
        let snapshot = events.snapshot;
        let applied = if events.goes_on {
            self.index.more_of_snapshot(&info.node, info.generation, sequence, &changes)
        } else {
            self.index.on_events(&info.node, info.generation, sequence, snapshot, &changes)
        };
        if applied == Applied::Gap {
            tracing::info!(node = %info.node, "prefix events were missed: asking for a snapshot");
            self.nodes.send(&info.node, Command::KvSnapshot(v1::KvSnapshotRequest {}));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_of_a_node_beyond_the_model_are_not_believed() {
        let info =
            |context_length, vocab_size| NodeInfo { context_length, vocab_size, ..crate::nodes::tests::info("p0", 1) };
        let limits = ModelLimits { context_length: Some(2048), vocab_size: Some(512) };
        for (claim, known) in [(1 << 28, 2048), (2048, 2048), (1000, 1000)] {
            for vocabulary in [1, 512, 1 << 28] {
                let taken = as_the_model_has_it(limits, info(claim, vocabulary));
                assert_eq!((taken.context_length, taken.vocab_size), (known, 512));
            }
        }
        assert_eq!(as_the_model_has_it(ModelLimits::default(), info(9, 8)), info(9, 8), "the files do not say");
    }
}
